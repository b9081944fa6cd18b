"""The benchmark of ANP-VS's pre-processing runs, and its attack is as weak as it says."""

import json

import pytest
import torch

import harp
from benchmarks import anp_vs
from harp.pruning.methods.anp import CrippledPgd, standardise


def test_it_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert anp_vs.main(["--epochs", "1", "--examples", "50", "--seeds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    means = result["mean"]
    assert set(means) == {"natural_standardised", "claimed", "honest", "natural_rescaled", "rescaled"}
    assert means["claimed"] <= means["natural_standardised"]
    assert means["rescaled"] <= means["natural_rescaled"]


def test_the_authors_attack_leaves_pixels_outside_the_box_at_its_border() -> None:
    torch.manual_seed(0)
    x = standardise(torch.rand(4, 1, 8, 8))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    attacked = CrippledPgd(0.1, 0.01, 40)(model, x, torch.arange(4))
    below = x < -0.1
    assert below.any()
    assert (attacked[below] == 0).all()  # one value whatever the attack does
    plain = harp.Pgd(0.1, 0.01, steps=40)(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    assert plain.std() > 0
