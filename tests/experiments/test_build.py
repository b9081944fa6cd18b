"""What a network is assessed by: the ball that its recipe means, the measure of its data, and the network before it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp.attacks import Ball
from harp.data import registry
from harp.evaluation import accuracy
from harp.experiments import build, recipe
from harp.experiments.run import Run
from harp.system.tensors import load_tensors
from support.commands import RECIPE


def threat(objective: dict[str, Any], **evaluation: Any) -> Ball:
    return build.threat(recipe.parse({**RECIPE, "objective": objective, "evaluate": evaluation}))


@pytest.mark.parametrize("name", ["pgd", "natural"])
def test_the_evaluations_epsilon_goes_before_that_of_the_objective(name: str) -> None:
    objective = {"name": name} if name == "natural" else {"name": name, "epsilon": 0.1}
    assert threat(objective).epsilon == (8 / 255 if name == "natural" else 0.1)
    ball = threat(objective, epsilon=0.3)
    assert ball.epsilon == 0.3
    assert build.attack_of("pgd-2", ball)[1].epsilon == 0.3


def test_a_recipe_is_evaluated_in_the_norm_that_it_trains_in() -> None:
    ball = threat({"name": "trades", "epsilon": 0.5, "norm": "l2"})
    assert ball == Ball(0.5, "l2")
    assert build.attack_of("pgd-2", ball)[1].norm == "l2"
    assert threat({"name": "trades", "epsilon": 0.1}) == Ball(0.1, "linf")


class Constant(nn.Module):
    """Always the first class."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.eye(10)[0].expand(len(x), 10)


def test_the_measure_is_balanced_accuracy_where_the_data_set_asks_for_it() -> None:
    digits = registry.load("digits")
    labels = digits.test.labels
    rows = torch.cat([(labels == 0).nonzero().flatten()[:9], (labels == 1).nonzero().flatten()[:3]]).tolist()
    uneven = replace(digits, test=digits.test.select(rows))
    measures = {}
    for balanced in (False, True):
        result, _ = accuracy.measure(
            Constant(), replace(uneven, balanced=balanced), "natural", None, examples=None, seed=0
        )
        assert [result["low"], result["high"]] == result["balanced_interval" if balanced else "interval"]
        measures[balanced] = result["measure"], result["value"]
    assert measures == {False: ("accuracy", 0.75), True: ("balanced accuracy", 0.5)}


def test_the_dense_network_of_a_run_is_the_one_before_pruning(tmp_path: Path) -> None:
    run = Run(recipe.parse(RECIPE), tmp_path)
    run.execute()
    subject = build.load(str(run.folder()), None, None, None)
    before = load_tensors(run.stage_folder(0) / "model.safetensors")[0]
    after = load_tensors(run.folder() / "model.safetensors")[0]
    assert subject.dense is not None
    for model, expected in ((subject.dense, before), (subject.model, after)):
        state = model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert not any(torch.equal(before[name], after[name]) for name in run.units.names)
    assert build.load(str(run.folder()), None, None, str(run.folder() / "model.safetensors")).dense is None
