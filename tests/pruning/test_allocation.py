"""Allocation: exact, bounded, and equal to the published tables."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harp import models
from harp.errors import BudgetError, RecipeError
from harp.experiments import plan
from harp.pruning import allocation
from harp.pruning.units import Weights

# Counts printed in the paper's strategy figures: VGG16 at 0.1 %, ResNet50 at 1 %.
VGG16_ERK = [101, 185, 273, 361, 538, 714, 714, 1067, 1420, 1420, 1420, 1420, 1420, 3177, 706, 367]
VGG16_UNIFORM = [2, 37, 74, 147, 295, 590, 590, 1180, 2359, 2359, 2359, 2359, 2359, 524, 66, 3]
# fmt: off
RESNET50_ERK = [
    395, 634, 653, 1570, 1570, 1570, 653, 1570, 1570, 653, 1570, 1881, 1277, 3129, 3753, 3129, 1277, 3129, 3129,
    1277, 3129, 3129, 1277, 3129, 3753, 2525, 6249, 7497, 6249, 2525, 6249, 6249, 2525, 6249, 6249, 2525, 6249,
    6249, 2525, 6249, 6249, 2525, 6249, 7497, 5021, 12488, 14984, 12488, 5021, 12488, 12488, 5021, 12488, 14857,
]
RESNET50_UNIFORM = [
    94, 41, 369, 164, 164, 164, 369, 164, 164, 369, 164, 328, 1475, 655, 1311, 655, 1475, 655, 655, 1475, 655,
    655, 1475, 655, 1311, 5898, 2621, 5243, 2621, 5898, 2621, 2621, 5898, 2621, 2621, 5898, 2621, 2621, 5898,
    2621, 2621, 5898, 2621, 5243, 23593, 10486, 20972, 10486, 23593, 10486, 10486, 23593, 10486, 20480,
]
# fmt: on


class Layers(nn.Module):
    """Linear layers of given shapes, nothing else."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(rows, columns, bias=False) for columns, rows in shapes)


@pytest.fixture(scope="module")
def vgg16() -> Weights:
    return Weights(models.build("vgg16", num_classes=10, shape=(3, 32, 32)))


@pytest.mark.parametrize(("strategy", "published"), [("erk", VGG16_ERK), ("uniform", VGG16_UNIFORM)])
def test_vgg16_table_is_met_to_the_weight(vgg16: Weights, strategy: str, published: list[int]) -> None:
    assert vgg16.total(0.001) == sum(published) == 15_303
    assert allocation.allocate(strategy, vgg16, 15_303) == published


@pytest.mark.parametrize(("strategy", "published"), [("erk", RESNET50_ERK), ("uniform", RESNET50_UNIFORM)])
def test_resnet50_table_as_published_and_exact(strategy: str, published: list[int]) -> None:
    net = models.build("resnet50", num_classes=1000, shape=(3, 64, 64))
    assert [row["kept"] for row in plan.spread(Weights(net), strategy, 0.01, as_published=True)] == published
    exact = [row["kept"] for row in plan.spread(Weights(net), strategy, 0.01)]
    assert sum(exact) == 255_029  # the published integers sum to 255 033 and 255 027
    assert max(abs(a - b) for a, b in zip(exact, published, strict=True)) == 1


@pytest.mark.parametrize(
    ("name", "keep", "dense"),
    [
        ("vgg16", 0.1, {"features.0.weight", "classifier.2.weight", "classifier.4.weight"}),
        ("vgg16", 0.01, {"classifier.4.weight"}),
        ("resnet18", 0.01, {"linear.weight"}),
    ],
)
def test_erk_saturates_the_layers_that_the_authors_found_dense(name: str, keep: float, dense: set[str]) -> None:
    units = Weights(models.build(name, num_classes=10, shape=(3, 32, 32)))
    counts = allocation.erk(units, units.total(keep))
    assert sum(counts) == units.total(keep)
    full = {n for n, size, count in zip(units.names, units.sizes, counts, strict=True) if count == size}
    assert full == dense


def test_igq_gives_the_closed_form(vgg16: Weights) -> None:
    expected = [634, 975, 988, 995, 998, 1000, 1000, 1001, 1001, 1001, 1001, 1001, 1001, 1000, 987, 720]
    assert allocation.igq(vgg16, 15_303) == expected


def test_igq_keeps_its_form_in_the_layers_that_no_limit_binds() -> None:
    shapes = [(100, 100), (200, 200), (400, 400), (50, 50)]
    units = Weights(Layers(shapes), minimum={"layers.3": 1.0}, maximum={"layers.2": 0.01})
    first, second, *bound = allocation.igq(units, units.total(0.1))
    assert bound == [1600, 2500]
    # k = n / (F n + 1) with one F for both: 1 / k - 1 / n = F.
    assert 1 / first - 1 / 10_000 == pytest.approx(1 / second - 1 / 40_000, rel=1e-3)


shapes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8)
strategies = st.sampled_from(sorted(allocation.STRATEGIES))


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, keep=st.floats(0.001, 1.0), strategy=strategies, seed=st.integers(0, 99))
def test_every_strategy_is_exact_and_bounded(
    shapes: list[tuple[int, int]], keep: float, strategy: str, seed: int
) -> None:
    torch.manual_seed(seed)
    units = Weights(Layers(shapes))
    try:
        total = units.total(keep)
    except BudgetError:
        assert round(keep * sum(units.sizes)) <= len(shapes)
        return
    counts = allocation.allocate(strategy, units, total)
    assert sum(counts) == total
    assert all(low <= count <= high for low, count, high in zip(units.lower, counts, units.upper, strict=True))


@settings(max_examples=40, deadline=None)
@given(shapes=shapes, strategy=strategies, seed=st.integers(0, 99))
def test_counts_grow_with_the_budget(shapes: list[tuple[int, int]], strategy: str, seed: int) -> None:
    torch.manual_seed(seed)
    units = Weights(Layers(shapes))
    least, most = sum(units.lower), sum(units.upper)
    totals = sorted({least, (least + most) // 2, (least + 3 * most) // 4, most})
    rounding = 0 if strategy in ("lamp", "global") else 1  # largest remainder may move one weight the other way
    for small, large in itertools.pairwise(totals):
        pairs = zip(
            allocation.allocate(strategy, units, small), allocation.allocate(strategy, units, large), strict=True
        )
        assert all(a <= b + rounding for a, b in pairs)


def test_limits_hold_under_every_strategy() -> None:
    torch.manual_seed(0)
    net = Layers([(10, 10), (20, 20), (30, 30), (5, 5)])
    units = Weights(net, minimum={"layers.0": 0.7}, maximum={"layers.2": 0.02}, ignore=["layers.3"])
    assert units.names == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    for strategy in allocation.STRATEGIES:
        free = allocation.allocate(strategy, Weights(net, ignore=["layers.3"]), 280)
        assert free[0] < 70 and free[2] > 18, "both limits bind"
        counts = allocation.allocate(strategy, units, units.total(0.2))
        assert sum(counts) == 280
        assert counts[0] >= 70
        assert counts[2] <= 18


def test_lamp_equals_its_definition() -> None:
    torch.manual_seed(3)
    units = Weights(Layers([(4, 6), (8, 3), (2, 2)]))
    scores = []
    for number, weight in enumerate(units.weights):
        flat = weight.detach().double().abs().flatten().tolist()
        scores += [(w * w / sum(v * v for v in flat if v >= w), number) for w in flat]
    scores.sort(reverse=True)
    for total in (3, 10, 25, 52):
        expected = [sum(1 for _, layer in scores[:total] if layer == number) for number in range(3)]
        assert allocation.lamp(units, total) == expected


def test_lamp_is_blind_to_a_layers_scale_and_never_empties_a_layer() -> None:
    torch.manual_seed(4)
    net = Layers([(20, 20), (30, 30), (3, 3)])
    before = allocation.lamp(Weights(net), 60)
    with torch.no_grad():
        net.layers[1].weight.mul_(1e-3)
    assert allocation.lamp(Weights(net), 60) == before
    assert min(allocation.lamp(Weights(net), 3)) == 1


def test_global_magnitude_keeps_the_largest_weights_of_all_layers() -> None:
    torch.manual_seed(5)
    units = Weights(Layers([(6, 6), (9, 9)]))
    values = np.concatenate([w.detach().abs().flatten().numpy() for w in units.weights])
    threshold = np.sort(values)[-20]
    expected = [int((w.detach().abs() >= float(threshold)).sum()) for w in units.weights]
    assert allocation.global_magnitude(units, 20) == expected


def test_ties_are_resolved_to_the_exact_count() -> None:
    net = Layers([(5, 5), (5, 5)])
    for parameter in net.parameters():
        nn.init.constant_(parameter, 1.0)
    for strategy in allocation.STRATEGIES:
        assert sum(allocation.allocate(strategy, Weights(net), 17)) == 17


def test_given_rates_are_taken_as_they_are_where_they_fit() -> None:
    units = Weights(Layers([(10, 10), (20, 5)]))
    rates = {"layers.0.weight": 0.3, "layers.1.weight": 0.07}
    assert allocation.allocate(rates, units, 37) == [30, 7]
    larger = Weights(Layers([(10, 10), (20, 10)]))
    rates = {"layers.0.weight": 1.0, "layers.1.weight": 0.07}
    assert allocation.allocate(rates, larger, 57) == [50, 7], "a 1.0 among them is a rate too"
    assert allocation.allocate({"layers.0.weight": 30.0, "layers.1.weight": 7.0}, units, 74) == [60, 14]


@pytest.mark.parametrize(
    "rates",
    [
        {"layers.0.weight": 0.3},
        {"layers.0.weight": 0.3, "layers.1.weight": 0.1, "other": 0.1},
        {"layers.0.weight": -0.1, "layers.1.weight": 0.1},
    ],
)
def test_wrong_given_rates_are_named(rates: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="given strategy"):
        allocation.allocate(rates, Weights(Layers([(10, 10), (20, 5)])), 20)


def test_unknown_strategy_lists_the_known() -> None:
    with pytest.raises(RecipeError, match="did you mean 'erk'"):
        allocation.allocate("erq", Weights(Layers([(2, 2)])), 2)
    with pytest.raises(RecipeError, match="uniform, erk, lamp, global, igq"):
        allocation.allocate("xyz", Weights(Layers([(2, 2)])), 2)


@pytest.mark.parametrize(("keep", "share"), [(0.2, 0.5), (0.1, 0.5), (0.01, 0.1**0.5), (0.0025, 0.025**0.5)])
def test_a_blend_is_between_uniform_and_lamp(keep: float, share: float) -> None:
    units = Weights(models.build("vgg8", num_classes=10, shape=(3, 32, 32)))
    total = units.total(keep)
    even, fed, found = (allocation.allocate(name, units, total) for name in ("uniform", "lamp", "blend"))
    assert sum(found) == total
    for low, high, count in zip(even, fed, found, strict=True):
        assert count == pytest.approx(share * low + (1 - share) * high, abs=2)


@pytest.mark.parametrize(("keep", "share"), [(0.001, 0.2), (0.01, 4288 / 153028)])
def test_boosted_ends_are_dense_or_take_a_fifth(keep: float, share: float) -> None:
    units = Weights(models.build("vgg16", num_classes=10, shape=(3, 32, 32)))
    total = units.total(keep)
    counts = allocation.allocate("boosted", units, total)
    assert sum(counts) == total
    assert (counts[0] + counts[-1]) / total == pytest.approx(share, rel=1e-3)
    middle = allocation.allocate("igq", units, total)[1:-1]
    relative = [a / b for a, b in zip(counts[1:-1], middle, strict=True)]
    assert max(relative) - min(relative) < 0.02  # the rest is spread by IGQ
