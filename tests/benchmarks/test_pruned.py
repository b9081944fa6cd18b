"""The networks of the benchmarks: a strategy's counts to the weight, the same for the same seed."""

import os

import pytest
import torch
from benchmarks.switch import engine

from benchmarks import pruned
from harp.errors import RecipeError
from harp.pruning import masks
from harp.pruning.channels.removal import remove_dead
from harp.pruning.units import Weights

# Counts printed in the paper's figure of the strategies for VGG16 at 0.1 %.
VGG16_HARP = [794, 1024, 683, 702, 740, 789, 783, 898, 1075, 1075, 1074, 1074, 1074, 758, 594, 2158]


@pytest.fixture(scope="module")
def vgg16() -> Weights:
    return Weights(pruned.built("vgg16"))


def test_published_counts_are_those_of_the_paper(vgg16: Weights) -> None:
    assert pruned.counts("vgg16", vgg16, 0.001, "harp") == VGG16_HARP


@pytest.mark.parametrize("keep", [0.001, 0.01, 0.1])
def test_scaled_counts_meet_the_budget_and_no_layer_has_too_many(vgg16: Weights, keep: float) -> None:
    counts = pruned.counts("vgg16", vgg16, keep, "harp-like")
    assert sum(counts) == vgg16.total(keep)
    assert all(count <= size for count, size in zip(counts, vgg16.sizes, strict=True))
    assert keep != 0.01 or counts[0] == vgg16.sizes[0], "a rate of 4.6 is one of 1"


@pytest.mark.parametrize(
    ("name", "keep", "words"), [("vgg16", 0.01, "its rates are for 0.001"), ("resnet8", 0.001, "vgg16, resnet18")]
)
def test_published_rates_are_for_their_networks_and_budget(name: str, keep: float, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        pruned.counts(name, Weights(pruned.built(name)), keep, "harp")


def test_clustered_masks_keep_as_many_weights_and_leave_more_channels_dead() -> None:
    dead, kept = [], []
    for width in (0, 2):
        model, kept_masks = pruned.pruned("resnet8", 0.02, "uniform", width=0.5, clustered=width)
        kept.append({name: int(mask.sum()) for name, mask in kept_masks.items()})
        assert all(not bool(model.get_parameter(name)[~mask].any()) for name, mask in kept_masks.items())
        dead.append(remove_dead(model, torch.rand(2, *pruned.SHAPE), kept_masks).parameters[1])
    assert kept[0] == kept[1]
    assert dead[1] < dead[0]


def test_a_pruned_network_follows_from_its_seed() -> None:
    networks = [pruned.pruned("resnet8", 0.1, "erk", width=0.5, clustered=1, seed=seed) for seed in (3, 3, 4)]
    states = [model.state_dict() for model, _ in networks]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert masks.kept(networks[0][1]) == masks.kept(networks[2][1])
    assert any(not torch.equal(networks[0][1][name], networks[2][1][name]) for name in networks[0][1])


def test_signals_do_not_fade() -> None:
    model, _ = pruned.pruned("vgg16", 0.01, "uniform", width=0.25)
    x = torch.rand(4, *pruned.SHAPE, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert 1e-10 < float(gradient.abs().mean()) < 1e3


@pytest.mark.parametrize("before", [None, "always"])
def test_the_switch_is_put_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARP_ENGINE", raising=False)
    if before is not None:
        monkeypatch.setenv("HARP_ENGINE", before)
    with pytest.raises(KeyError), engine(on=False):
        assert os.environ["HARP_ENGINE"] == "off"
        with engine(on=True):
            assert "HARP_ENGINE" not in os.environ
        assert os.environ["HARP_ENGINE"] == "off"
        raise KeyError
    assert os.environ.get("HARP_ENGINE") == before
