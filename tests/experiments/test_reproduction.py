"""The paper's claims: none is left out, their experiments can be run, and verdicts follow from intervals."""

import math
from pathlib import Path
from typing import Any

import pytest

from harp.errors import CheckpointError, RecipeError
from harp.experiments.reproduction import claim, evidence, judge, verdict
from harp.experiments.reproduction.claim import Cell, Claim, Experiment
from harp.experiments.reproduction.evidence import Evidence, Record, Value
from harp.experiments.reproduction.verdict import Measured, State

CLAIMS = claim.shipped()

# Every label of a table or figure that the paper shows, noted from its LaTeX source.
LABELS = {
    "fig": (
        "overview gamma-control mad-compare compare-cifar10-stg stg-overview-vgg-cr stg-overview-vgg gamma-adapt "
        "gamma-acc gamma-pgd gamma-prate gamma-stgs bcsp-compare-resnet bcsp-stg-resnet-svhn mad-compare-svhn stg-init "
        "init-resnet-w001 init-resnet-w0001 learn-process end2end-resnet-w001 end2end-resnet-w0001 "
        "stg-overview-resnet50 vgg-cifar-wdist vgg-svhn-wdist overview-flops"
    ),
    "tab": (
        "rate-score compare-cifar-w compare-svhn-w compare-imgnet mad-compare stg-compare abbr-summary "
        "stg-compare-bcsp dnr-compare stg-init compare-imgnet-stg natprune anp-vs-preprocess train-consume"
    ),
}


def test_every_table_and_figure_of_the_paper_has_exactly_one_claim() -> None:
    shown = sorted(f"{kind}:{name}" for kind, names in LABELS.items() for name in names.split())
    assert sorted(label for each in CLAIMS.values() for label in each.labels) == shown


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("small", [False, True])
def test_the_experiments_of_a_claim_can_be_planned(name: str, small: bool) -> None:
    chosen = CLAIMS[name]
    variant = chosen.small if small else chosen.full
    for title, experiment in (variant.experiments if variant else {}).items():
        recipes = experiment.recipes(title)
        methods = {method for method, _ in recipes}
        shares = {keep for _, keep in recipes if keep is not None}
        for order in (order for order in variant.orders if order.experiment == title) if variant else ():
            assert {order.better, *order.than} <= methods
            assert set(order.keep) <= shares
        if not small:
            for cell in (cell for cell in chosen.cells if cell.experiment == title and cell.keep is not None):
                assert cell.method in methods, cell
                assert cell.keep in shares, cell
            measures = {*experiment.attacks, "natural", *OTHER_MEASURES}
            assert {cell.measure for cell in chosen.cells if cell.experiment == title} <= measures


OTHER_MEASURES = ("kept first", "kept last", "pruned natural", "pruned robust", "middle magnitude")


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_judged_belongs_to_an_experiment(name: str) -> None:
    chosen = CLAIMS[name]
    unknown = {order.experiment for order in chosen.orders} - set(chosen.experiments)
    assert not unknown
    if chosen.small:
        assert not {order.experiment for order in chosen.small.orders} - set(chosen.small.experiments)
        assert chosen.small.says and chosen.small.orders
    assert chosen.source in ("printed", "figure") or chosen.notes, "a claim without values says why"
    assert chosen.source != "none" or not chosen.cells


def test_harp_runs_as_published_in_the_full_experiments() -> None:
    recipe = CLAIMS["overview"].experiments["cifar10"].recipes("cifar10")["harp", 0.01]
    prune = next(stage for stage in recipe.stages if stage.name == "prune")
    assert prune.pruner["published"] is True
    assert prune.pruner["gamma_step"] == 0.01
    assert [stage.epochs for stage in recipe.stages] == [100, 20, 100]


def test_seeds_of_small_experiments_are_used_by_no_choice() -> None:
    """Seeds 11 to 13 chose the defaults on held-out images."""
    for each in CLAIMS.values():
        for experiment in (each.small.experiments if each.small else {}).values():
            assert not {11, 12, 13} & set(experiment.seeds)


@pytest.mark.parametrize("name", [name for name, each in CLAIMS.items() if each.computed])
def test_what_needs_no_data_is_judged_here(name: str) -> None:
    """All agree with the paper but MAD's 20 steps of masks, which are one pass over the data here."""
    lines = judge.computed(CLAIMS[name])
    differing = [line.what for line in lines if line.verdict.state is not State.REPRODUCED]
    assert differing == (["epochs, method mad"] if name == "training-cost" else [])


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [
        (49.0, 51.0, State.REPRODUCED),
        (48.5, 51.5, State.REPRODUCED),
        (48.4, 51.0, State.OPEN),
        (51.0, 52.0, State.OPEN),
        (51.6, 52.0, State.HIGHER),
        (47.0, 48.4, State.LOWER),
        (40.0, 60.0, State.OPEN),
    ],
)
def test_a_value_is_judged_by_its_interval(low: float, high: float, state: State) -> None:
    measured = Measured((low + high) / 2, low, high, 3, 1000)
    assert verdict.of_value(50.0, 1.5, measured).state is state


def test_a_value_that_was_not_measured_is_not_run() -> None:
    assert verdict.of_value(50.0, 1.5, None).state is State.NOT_RUN


@pytest.mark.parametrize(
    ("ours", "theirs", "by", "state"),
    [
        ([60, 61, 62], [50, 51, 52], 0.0, State.HOLDS),
        ([50, 51, 52], [60, 61, 62], 0.0, State.CONTRADICTED),
        ([60, 50, 55], [50, 60, 54], 0.0, State.OPEN),
        ([60, 61, 62], [50, 51, 52], 10.5, State.CONTRADICTED),
        ([50, 51, 52.1], [50.5, 51.4, 52.6], -1.0, State.HOLDS),
        ([60], [50], 0.0, State.OPEN),
        ([], [], 0.0, State.NOT_RUN),
    ],
)
def test_an_order_is_judged_by_the_paired_interval(
    ours: list[float], theirs: list[float], by: float, state: State
) -> None:
    assert verdict.of_order(ours, theirs, by).state is state


def test_an_open_order_says_how_many_more_seeds_would_decide() -> None:
    # By hand: mean 1.83, deviation 1.26; t * s / sqrt(n) is 2.00 for four seeds and 1.56 for five.
    few = verdict.of_order([52.0, 53.0, 50.5], [50.0, 50.0, 50.0])
    assert few.state is State.OPEN
    assert "about 2 more seeds would decide" in few.detail
    # By hand: mean 0.25, deviation 3.4, so that t * s / sqrt(n) stays above it up to 50 seeds.
    assert "more than 50 seeds" in verdict.of_order([54.0, 46.5, 50.2, 50.3], [50.0] * 4).detail


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([State.REPRODUCED, State.HOLDS], State.REPRODUCED),
        ([State.HOLDS, State.HOLDS], State.HOLDS),
        ([State.HOLDS, State.OPEN], State.OPEN),
        ([State.HOLDS, State.NOT_RUN], State.OPEN),
        ([State.HOLDS, State.CONTRADICTED], State.CONTRADICTED),
        ([State.REPRODUCED, State.LOWER, State.NOT_RUN], State.LOWER),
        ([State.NOT_RUN, State.NOT_RUN], State.NOT_RUN),
        ([], State.NO_VALUE),
    ],
)
def test_a_failure_is_never_hidden_by_what_agrees(states: list[State], state: State) -> None:
    assert verdict.overall(verdict.Verdict(each) for each in states).state is state


def small_claim(**changes: Any) -> Claim:
    experiment = {"recipe": "fashion-small", "methods": ["harp", "hydra"], "keep": ["1%"], "seeds": [1, 2, 3]}
    content: dict[str, Any] = {
        "id": "mine",
        "title": "mine",
        "says": "harp is ahead of hydra",
        "place": "Table 1",
        "labels": ["tab:mine"],
        "source": "printed",
        "experiments": {"fashion": {**experiment, "attacks": ["pgd-20"]}},
        "expected": {"fashion": {"pgd-20": {"dense": 60.0, "harp": {"1%": 50.0}}}},
        "orders": [{"experiment": "fashion", "measure": "pgd-20", "better": "harp", "than": ["hydra"], "keep": ["1%"]}],
    }
    return Claim.model_validate({**content, **changes})


def records(chosen: Claim, **values: list[float]) -> list[Record]:
    recipes = chosen.experiments["fashion"].recipes("fashion")
    size = 108_492
    return [
        Record(
            experiment="fashion",
            method=method,
            keep=0.01,
            seed=seed,
            recipe=evidence.digest(recipes[method, 0.01]),
            kept=1085,
            size=size,
            values={"pgd-20": Value(value=value, images=1000)},
        )
        for method, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def test_the_verdict_of_a_claim_counts_values_and_orders() -> None:
    chosen = small_claim()
    found = evidence.made(chosen, records(chosen, harp=[49.5, 50.0, 50.5], hydra=[40.0, 41.0, 40.0]), small=False)
    states = {judge.cell_text(cell): line.verdict.state for cell, line in judge.values(chosen, found)}
    assert states == {"fashion: dense, pgd-20": State.NOT_RUN, "fashion: harp at 1 %, pgd-20": State.REPRODUCED}
    assert [line.verdict.state for line in judge.orders(chosen.orders, found)] == [State.HOLDS]
    assert judge.overall(chosen, found, small=False).state is State.OPEN
    assert judge.overall(chosen, None, small=False).state is State.NOT_RUN


def test_one_seed_has_the_interval_of_its_images() -> None:
    chosen = small_claim()
    found = evidence.made(chosen, records(chosen, harp=[50.0]), small=False)
    measured = found.measured(Cell("fashion", "pgd-20", "harp", 0.01))
    assert measured is not None
    assert measured.low == pytest.approx(46.91, abs=0.01)  # Wilson, 500 of 1,000
    assert judge.orders(chosen.orders, found)[0].verdict.state is State.NOT_RUN


def test_only_seeds_that_both_methods_have_are_paired() -> None:
    chosen = small_claim()
    several = records(chosen, harp=[50.0, 51.0, 52.0], hydra=[40.0, 41.0])
    line = judge.orders(chosen.orders, evidence.made(chosen, several, small=False))[0]
    assert "over 2 seeds" in line.ours


def test_evidence_is_read_as_it_was_written(tmp_path: Path) -> None:
    chosen = small_claim()
    found = evidence.made(chosen, records(chosen, harp=[50.0, 51.0]), small=False)
    found.write(tmp_path / "mine.json")
    assert evidence.read(tmp_path / "mine.json") == found
    assert evidence.problems(found, chosen) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recipe": "000000000000"}, "recipe 000000000000, the claim's is"),
        ({"kept": 1086}, "keeps 1,086 of 108,492 weights, the budget is 1,085"),
        ({"method": "magnitude"}, "the claim has no such run"),
        ({"values": {"pgd-20": Value(value=50.05, images=1000)}}, "is no whole number of 1000 images"),
        ({"values": {"pgd-20": Value(value=101.0, images=1000)}}, "is no share"),
    ],
)
def test_evidence_that_can_not_be_is_refused(changes: dict[str, Any], problem: str) -> None:
    chosen = small_claim()
    (record,) = records(chosen, harp=[50.0])
    found = evidence.made(chosen, [record.model_copy(update=changes)], small=False)
    (text,) = evidence.problems(found, chosen)
    assert problem in text


def test_a_run_that_is_there_twice_is_refused() -> None:
    chosen = small_claim()
    found = evidence.made(chosen, records(chosen, harp=[50.0]) * 2, small=False)
    assert "is there twice" in evidence.problems(found, chosen)[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"claim": 3}', '{"claim": "a", "records": [{}]}', "\x00\xff"])
def test_any_bytes_are_evidence_or_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError):
        evidence.read(tmp_path / "mine.json")


@pytest.mark.parametrize("path", sorted(evidence.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_evidence_belongs_to_its_claim(path: Path) -> None:
    found = evidence.read(path)
    assert path.stem == found.claim + ("-small" if found.variant == "small" else "")
    assert found.records
    assert evidence.problems(found, CLAIMS[found.claim]) == []


def test_the_cost_counts_a_shared_pretraining_once() -> None:
    experiment = Experiment(recipe="fashion-small", methods=("harp", "hydra"), keep=("1%",), seeds=(1, 2))
    runs, epochs = claim.Variant(experiments={"fashion": experiment}).length()
    assert (runs, epochs) == (2 * 3, 2 * (8 + 2 * (4 + 4)))


def test_a_wrong_claim_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("title: mine\nsays: more\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"mine.yaml: place: Field required"):
        claim.load(tmp_path / "mine.yaml")
    with pytest.raises(RecipeError, match=r"unknown claim 'overvew'.*overview"):
        claim.named("overvew")


def test_a_claim_without_a_small_variant_says_what_to_do() -> None:
    with pytest.raises(RecipeError, match="imagenet has no small experiment: give it without --small"):
        CLAIMS["imagenet"].variant(small=True)
    with pytest.raises(RecipeError, match="training-cost has no full experiment: it needs no run"):
        CLAIMS["training-cost"].variant(small=False)


def test_intervals_are_finite_for_two_seeds() -> None:
    chosen = small_claim()
    found: Evidence = evidence.made(chosen, records(chosen, harp=[50.0, 51.0]), small=False)
    measured = found.measured(Cell("fashion", "pgd-20", "harp", 0.01))
    assert measured is not None
    assert math.isfinite(measured.low) and measured.high - measured.low == pytest.approx(2 * 12.706 / 2, rel=1e-3)
