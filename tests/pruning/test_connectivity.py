"""Paths: weights that lie on no path are found and replaced, and a network is never cut in two."""

import copy

import pytest
import torch
from torch import Tensor, nn

from harp import models
from harp.pruning.connectivity import Paths
from harp.pruning.masks import apply
from harp.pruning.units import Weights
from support import cases


def chain() -> nn.Sequential:
    """Three layers of two, three, three and two channels."""
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def mask(shape: tuple[int, int], *places: tuple[int, int]) -> Tensor:
    flags = torch.zeros(shape, dtype=torch.bool)
    for row, column in places:
        flags[row, column] = True
    return flags


def test_weights_that_are_not_read_or_that_read_nothing_are_of_no_use() -> None:
    paths = Paths(chain(), torch.rand(1, 2))
    masks = {
        "0.weight": mask((3, 2), (0, 0), (1, 1)),  # channel 1 is not read
        "2.weight": mask((3, 3), (0, 0), (1, 2), (2, 0)),  # (1, 2) reads channel 2, which no weight gives
        "4.weight": mask((2, 3), (0, 0), (1, 1)),  # channel 1 of the second layer is then given by no weight
    }
    useful = paths.useful(masks)
    assert useful["0.weight"].nonzero().tolist() == [[0, 0]]
    assert useful["2.weight"].nonzero().tolist() == [[0, 0]]  # (2, 0) gives a channel that is not read
    assert useful["4.weight"].nonzero().tolist() == [[0, 0]]
    assert int(masks["2.weight"].sum()) == 3, "the masks themselves stay"
    possible = paths.open(useful)
    assert possible["2.weight"].nonzero().tolist() == [[0, 0]]
    assert possible["0.weight"].nonzero().tolist() == [[0, 0], [0, 1]]


def test_a_residual_block_is_not_reached_by_its_own_output() -> None:
    """Its second weight gives what its first one reads: without the stem no image reaches either."""
    model = cases.build("residual")
    units = Weights(model)
    masks = {
        name: torch.ones_like(weight, dtype=torch.bool) for name, weight in zip(units.names, units.weights, strict=True)
    }
    masks["stem.weight"].zero_()
    assert not any(bool(mask.any()) for mask in Paths(model, cases.batch()[0]).useful(masks).values())


@pytest.mark.parametrize("case", cases.CASES)
def test_removing_what_is_of_no_use_changes_no_answer_by_more_than_a_constant(case: str) -> None:
    model = cases.build(case).eval()
    units, (x, _) = Weights(model), cases.batch()
    torch.manual_seed(1)
    masks = {name: torch.rand_like(weight) < 0.08 for name, weight in zip(units.names, units.weights, strict=True)}
    apply(model, masks)
    with torch.no_grad():
        before = model(x)
    useful = Paths(model, x).useful(masks)
    apply(model, useful)
    with torch.no_grad():
        after = model(x)
    # A weight that reads a constant adds a constant: what depends on the image is the same, up to zero padding.
    moved = (after - before).std(dim=0).max()
    assert float(moved) <= 1e-5 + 0.02 * float(before.abs().max())


def dependent(model: nn.Module, masks: dict[str, Tensor], x: Tensor) -> bool:
    """Whether the answer depends on the image at all, by a gradient through layers that let everything pass."""
    model = model.double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.weight.fill_(1)
                module.bias.zero_()
        for parameter in model.parameters():
            parameter.abs_().add_(1e-3)
    apply(model, masks)
    images = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(images).sum(), images)
    return bool(gradient.abs().max() > 0)


@pytest.mark.parametrize("name", ["tinynet", "resnet8"])
def test_no_choice_cuts_the_network_in_two(name: str) -> None:
    model = models.build(name, num_classes=10, shape=(1, 16, 16), width=4 if name == "tinynet" else 0.25)
    units, x = Weights(model), torch.rand(1, 1, 16, 16)
    paths = Paths(model, x)
    for seed, count in ((0, 1), (1, 1), (2, 2), (3, 3), (4, 6)):
        torch.manual_seed(seed)
        strengths = {n: torch.rand_like(w) for n, w in zip(units.names, units.weights, strict=True)}
        counts = [min(count, size) for size in units.sizes]
        masks, _ = paths.choose(strengths, counts)
        assert [int(each.sum()) for each in masks.values()] == counts
        assert bool(paths.useful(masks)[units.names[-1]].any())
        if name == "resnet8":  # elsewhere a single tap at a kernel's corner may look at nothing but padding
            assert dependent(copy.deepcopy(model), masks, x)


def test_the_strongest_are_chosen_where_all_are_of_use() -> None:
    model = chain()
    strengths = {n: torch.rand_like(w) for n, w in zip(Weights(model).names, Weights(model).weights, strict=True)}
    masks, possible = Paths(model, torch.rand(1, 2)).choose(strengths, [6, 9, 6])
    assert all(bool(each.all()) for each in (*masks.values(), *possible.values()))
    masks, _ = Paths(model, torch.rand(1, 2)).choose(strengths, [5, 8, 5])
    for name, strength in strengths.items():
        assert not masks[name].reshape(-1)[strength.argmin()]


def test_layers_that_are_not_pruned_connect_all_their_channels() -> None:
    paths = Paths(chain(), torch.rand(1, 2))
    masks = {"0.weight": mask((3, 2), (0, 0)), "4.weight": mask((2, 3), (0, 2))}
    useful = paths.useful(masks)
    assert all(torch.equal(useful[name], masks[name]) for name in masks)
    assert paths.open(useful)["4.weight"].all()
    alone = {"0.weight": torch.rand(3, 2)}  # all weights that read channels are ignored
    chosen, _ = paths.choose(alone, [2])
    assert int(chosen["0.weight"].sum()) == 2
