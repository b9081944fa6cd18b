"""Comparing methods: like with like, nothing trained twice, nothing lost, and tables that say what the files say."""

import json
import math
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harp.errors import AT_CHANCE, BudgetError, Interrupted, RecipeError
from harp.evaluation import confidence
from harp.experiments import compose, recipe, study
from harp.experiments import table as standings
from harp.experiments.compare import Comparison
from harp.experiments.pool import Task, start, work
from harp.experiments.run import Run
from harp.experiments.stages import Parts
from harp.experiments.stages import parts as split
from harp.pruning.methods import PRUNERS
from harp.reports import plots
from harp.system import files
from harp.system.progress import Quiet
from support.commands import FINISHED, RECIPE, SHORT, STAGES, STUDY, Harp, refused
from support.documents import json_keys
from support.finished_run import edit
from support.survival import wait_for


class Done:
    """A process that has ended."""

    def __init__(self, code: int | None = 0) -> None:
        self.code, self.signals = code, list[int]()

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        self.code = 128 + sig


def compared(root: Path, **changes: Any) -> Comparison:
    return Comparison(study.parse({**STUDY, **changes}), root)


def here(comparison: Comparison, fail: str = "nothing") -> Callable[[str], Done]:
    """Run in this process, or leave a log and fail."""

    def start(name: str) -> Done:
        entry = next(entry for entry in comparison.entries if entry.name == name)
        if fail in name:
            files.write_text(comparison.folder / "logs" / f"{name}.log", "epoch 1\nerror: out of | luck\n\n")
            return Done(2)
        made = compose.load(comparison.folder / "recipes" / f"{name}.yaml")
        assert Run(made, comparison.root).execute().folder == entry.folder
        return Done()

    return start


def never(name: str) -> Done:
    raise AssertionError(f"{name} was started")


# ---------------------------------------------------------------- what is run


def layout(comparison: Comparison) -> dict[str, list[tuple[str, str, int]]]:
    return {
        entry.name: [(stage.name, stage.pruner["name"], stage.epochs) for stage in entry.recipe.stages]
        for entry in comparison.entries
    }


def test_all_methods_train_for_the_same_number_of_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scratch(PRUNERS["magnitude"]):  # type: ignore[misc]
        from_scratch = True

    class Brief(PRUNERS["hydra"]):  # type: ignore[misc]
        passes = 3
        finetuning = {"name": "trades", "beta": 3}  # noqa: RUF012 (as the methods have it)

    monkeypatch.setitem(PRUNERS, "scratch", Scratch)
    monkeypatch.setitem(PRUNERS, "brief", Brief)
    stages = [{**stage, "epochs": epochs} for stage, epochs in zip(STAGES, (10, 8, 5), strict=True)]
    names = ["harp", "brief", "magnitude", "scratch", "scratch+lamp", "dense-small"]
    comparison = compared(tmp_path, recipe={**RECIPE, "stages": stages}, methods=names, seeds=[4])
    assert layout(comparison) == {
        "t-dense-seed4": [("pretrain", "dense", 10)],
        "t-harp-90-seed4": [("pretrain", "dense", 10), ("prune", "harp", 8), ("finetune", "fixed", 5)],
        "t-brief-90-seed4": [("pretrain", "dense", 10), ("prune", "brief", 3), ("finetune", "fixed", 10)],
        "t-magnitude-90-seed4": [("pretrain", "dense", 10), ("prune", "magnitude", 0), ("finetune", "fixed", 13)],
        "t-scratch-90-seed4": [("train", "scratch", 23)],
        "t-scratch+lamp-90-seed4": [("pretrain", "dense", 10), ("train", "scratch", 23)],
        "t-dense-small-90-seed4": [("train", "dense", 23)],
    }
    entries = {entry.method: entry for entry in comparison.entries}
    waits = {method for method, entry in entries.items() if entry.after == "t-dense-seed4"}
    assert waits == {"harp", "brief", "magnitude", "scratch+lamp"}
    assert [entries[name].epochs() for name in ("harp", "scratch", "scratch+lamp")] == [[10, 8, 5], [23], [10, 23]]
    threat = {"epsilon": 0.1, "step": 0.05, "steps": 1}
    assert entries["brief"].recipe.stages[2].objective == {"name": "trades", "beta": 3, **threat}
    assert entries["harp"].recipe.stages[2].optimizer.lr == 0.01
    assert all(entry.recipe.seed == 4 for entry in comparison.entries)
    assert entries["dense-small"].recipe.model.options["width"] < RECIPE["model"]["width"]  # type: ignore[index]


SCALES = {"paper": (100, 20, 100), "tenth": (10, 8, 10), "short": (1, 1, 1)}


@pytest.mark.parametrize(
    ("scale", "lengths"),
    [
        (
            "paper",
            {"harp": [100, 20, 100], "r-admm": [100, 100, 100], "bcs-p": [200], "mad": [60, 1, 60], "dnr": [200]},
        ),
        ("paper", {"hydra": [100, 20, 100], "magnitude": [100, 0, 100], "flying-bird+": [200], "twinrep": [100]}),
        (
            "tenth",
            {"harp": [10, 8, 10], "r-admm": [10, 10, 10], "bcs-p": [20], "mad": [6, 1, 6], "bcs-p+lamp": [10, 20]},
        ),
        ("short", {"harp": [1, 1, 1], "r-admm": [1, 1, 1], "bcs-p": [2], "mad": [1, 1, 1]}),
    ],
)
def test_the_papers_protocol_gives_each_method_its_own_lengths(
    tmp_path: Path, scale: str, lengths: dict[str, list[int]]
) -> None:
    stages = [{**stage, "epochs": epochs} for stage, epochs in zip(STAGES, SCALES[scale], strict=True)]
    planned = {"recipe": {**RECIPE, "stages": stages}, "methods": list(lengths)}
    comparison = compared(tmp_path, **planned, protocol="paper")
    assert {entry.method: entry.epochs() for entry in comparison.entries if entry.keep} == lengths
    equal = compared(tmp_path, **planned).entries
    assert len({sum(entry.epochs()) for entry in equal if entry.keep and entry.method != "bcs-p+lamp"}) == 1


def test_the_papers_protocol_has_the_papers_settings(tmp_path: Path) -> None:
    stages = [
        {**stage, "epochs": epochs, "optimizer": {"lr": lr}}
        for stage, epochs, lr in zip(STAGES, (100, 20, 100), (0.1, 0.1, 0.01), strict=True)
    ]
    threat = {"name": "pgd", "epsilon": "8/255", "step": "2/255", "steps": 10}
    methods = ["harp", "r-admm", "mad", "bcs-p", "twinrep"]
    content = {**RECIPE, "stages": stages, "objective": threat}
    comparison = compared(tmp_path, recipe=content, methods=methods, keep=["20%", "10%"], protocol="paper")
    entries = {entry.method: entry for entry in comparison.entries}
    harp, admm, mad = (entries[name].recipe.stages for name in ("harp", "r-admm", "mad"))
    assert admm[0] == harp[0] and [stage.optimizer.lr for stage in harp] == [0.1, 0.1, 0.01]
    settings = [(stage.optimizer.lr, stage.optimizer.weight_decay) for stage in admm]
    assert settings == [(0.1, 5e-4), (0.01, 1e-4), (0.01, 1e-4)]
    assert [stage.optimizer.schedule["name"] for stage in admm] == ["cosine", "sawtooth", "steps"]
    assert [(stage.optimizer.lr, stage.optimizer.weight_decay) for stage in (mad[0], mad[2])] == [(0.1, 2e-4)] * 2
    assert [(stage.objective or {}).get("step") for stage in mad] == [0.0069] * 3
    assert [(stage.objective or {}).get("name") for stage in mad] == ["pgd", "pgd", "mart"]
    (bcs,), (twin,) = entries["bcs-p"].recipe.stages, entries["twinrep"].recipe.stages
    assert (bcs.optimizer.lr, bcs.optimizer.schedule) == (0.1, {"name": "steps"})
    assert (twin.optimizer.weight_decay, twin.optimizer.schedule) == (2e-4, {"name": "cosine"})
    # MAD begins with a network of its own, trained once for its two budgets; the others share the recipe's.
    dense = {entry.name: entry.epochs() for entry in comparison.entries if entry.keep is None}
    assert dense == {"t-dense-seed0": [100], "t-dense-mad-seed0": [60]}
    waits = {entry.method: entry.after for entry in comparison.entries if entry.keep}
    assert waits == dict.fromkeys(("harp", "r-admm"), "t-dense-seed0") | {
        "mad": "t-dense-mad-seed0",
        "bcs-p": None,
        "twinrep": None,
    }


def test_the_papers_step_is_for_attacks_of_many_steps() -> None:
    parts = Parts(STAGES[:1], STAGES[1], STAGES[2])
    mad = {"name": "mad", "keep": 0.1}

    def under(objective: dict[str, Any] | None) -> list[Any]:
        return [stage.get("objective") for stage in parts.published(mad, objective)]

    assert [part["step"] for part in under(None)] == [0.0069] * 3
    assert [part["step"] for part in under({"name": "trades", "epsilon": 0.1})] == [0.0219938] * 3
    assert under({"name": "natural"}) == [None, None, None]
    assert under({"name": "free", "epsilon": 0.1})[:2] == [None, None]


def test_a_natural_warm_up_is_not_added_to_a_training_from_scratch() -> None:
    """It serves the adversarial pre-training after it; natural pre-training alone, or of natural methods, counts."""
    warm_up = {"name": "warmup", "pruner": "dense", "epochs": 10, "objective": {"name": "natural"}}
    first, second, third = ({**stage, "epochs": epochs} for stage, epochs in zip(STAGES, (100, 20, 100), strict=True))
    scratch, pgd = {"name": "bcs-p", "keep": 0.1}, {"name": "pgd"}

    def epochs(pretrain: list[dict[str, Any]], objective: dict[str, Any], lay_out: Any = Parts.equal) -> int:
        (only,) = lay_out(Parts(pretrain, second, third), scratch, objective)
        return int(only["epochs"])

    assert epochs([warm_up, first], pgd) == epochs([first], pgd) == 220
    assert epochs([{**warm_up, "objective": "natural"}, first], pgd) == 220
    assert epochs([warm_up, first], {"name": "natural"}) == 230
    assert epochs([{**first, "objective": {"name": "natural"}}], pgd) == 220
    assert epochs([warm_up, first], pgd, Parts.published) == 200
    made = compose.load("svhn/vgg16").model_dump(mode="json", exclude_defaults=True)
    assert split(made["stages"]).equal(scratch, made["objective"])[0]["epochs"] == 220


def test_no_pretraining_where_nobody_needs_it(tmp_path: Path) -> None:
    assert [entry.name for entry in compared(tmp_path, methods=["dense-small"]).entries] == ["t-dense-small-90-seed0"]
    assert [entry.name for entry in compared(tmp_path, methods=["dense"]).entries] == ["t-dense-seed0"]


def test_names_of_runs_and_of_the_folder_of_a_comparison(tmp_path: Path) -> None:
    comparison = compared(tmp_path, methods=["harp:reach=1/100"], keep=["7%", "12.5%"], seeds=[2, 5])
    assert [entry.recipe.name for entry in comparison.entries] == [
        *["t-dense"] * 2,
        *["t-harp-reach=1-100-87.5", "t-harp-reach=1-100-93"] * 2,
    ]
    assert len({entry.folder for entry in comparison.entries}) == 6
    assert comparison.folder.name.startswith("compare-t-")
    assert comparison.folder == compared(
        tmp_path, methods=["harp:reach=0.01"], keep=[0.125, 0.07], seeds=[2, 5]
    ).folder.with_name(comparison.folder.name)
    assert comparison.folder != compared(tmp_path, methods=["harp"]).folder


def test_a_machine_elsewhere_may_choose_another_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node has no GPU; what the jobs' GPUs computed in bfloat16 is found all the same, but by no local run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    away = Comparison(study.parse(STUDY), tmp_path, elsewhere=True)
    near, entry = compared(tmp_path), away.entries[-1]
    assert near.folder == away.folder and near.entries[-1].folders == entry.folders[:1] and not entry.finished()
    (folder,) = entry.folders[1:]
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(entry.recipe.to_yaml())
    (folder / "summary.json").write_text("{}")
    assert entry.finished() and entry.folder == folder and not near.entries[-1].finished()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {**SHORT, "stages": STAGES[:2]}}, "pruners are dense, harp: for other methods"),
        (
            {"recipe": {**SHORT, "stages": [*STAGES, {**STAGES[2], "name": "more"}]}},
            "fixed, fixed: for other methods",
        ),
        ({"recipe": {**SHORT, "evaluate": {"attacks": []}}}, "evaluate.attacks is empty"),
        ({"recipe": {**SHORT, "stages": [STAGES[0], {**STAGES[1], "epochs": 0}, STAGES[2]]}}, "has 0 epochs"),
        ({"recipe": {**SHORT, "stages": STAGES[1:]}, "methods": ["dense", "harp"]}, "no dense network to show"),
        ({"keep": ["0.01%"]}, "layers and their limits need at least"),
        ({"keep": ["1%"], "methods": ["dense-small"]}, "at its narrowest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recipes_that_can_not_be_compared_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((RecipeError, BudgetError)) as caught:
        compared(tmp_path / "runs", **changes)
    assert said in str(caught.value) and not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- running and gathering


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, dict[str, Any]]:
    """A small comparison, run in this process."""
    comparison = compared(tmp_path_factory.mktemp("runs"), methods=["magnitude", "hydra", "dense-small"], seeds=[0, 1])
    return comparison, comparison.execute(start=here(comparison))


def test_the_table_is_what_the_files_say(finished: tuple[Comparison, dict[str, Any]]) -> None:
    comparison, outcome = finished
    stages = list((comparison.root / "stages").glob("*-pretrain"))
    assert len(stages) == 2, "one pre-training a seed"
    written = json.loads((comparison.folder / "results.json").read_text())
    assert (written["size"], written["unit"]) == (comparison.size, "weights")
    assert written["rows"][0]["method"] == "dense"
    robust = [row["robust"] for row in written["rows"][1:]]
    assert robust == sorted(robust, reverse=True)
    table = (comparison.folder / "table.md").read_text()
    for row in outcome["rows"]:
        label = "t-dense" if row["keep"] is None else f"t-{row['method']}-90"
        folders = [path for path in comparison.root.iterdir() if re.fullmatch(rf"{label}-[0-9a-f]{{12}}", path.name)]
        assert len(folders) == 2
        for key, name in (("natural", "natural"), ("robust", "pgd-2")):
            numbers = [json.loads((folder / "results" / f"{name}.json").read_text()) for folder in folders]
            assert all({"recipe", "seed", "n", "versions"} <= number.keys() for number in numbers)
            assert all(number["versions"].keys() == {"harp", "torch", "python"} for number in numbers)
            values = [number["value"] for number in numbers]
            half = 12.706 * statistics.stdev(values) / math.sqrt(2)
            assert row[key] == pytest.approx(statistics.fmean(values))
            assert row[f"{key}_half"] == pytest.approx(half)
            assert f"{100 * statistics.fmean(values):.1f} ± {100 * half:.1f}" in table
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        kept = {sum(layer["kept"] for layer in summary["layers"]) for summary in summaries}
        assert row["kept"] == [min(kept), max(kept)] and f"| {kept.pop():,} |" in table
        own = [stage for summary in summaries for stage in summary["stages"] if not stage.endswith("-pretrain")]
        if row["keep"] is not None:
            seconds = [json.loads((comparison.root / stage / "stage.json").read_text())["seconds"] for stage in own]
            assert row["seconds"] == pytest.approx(sum(seconds) / 2)
    assert (written["rank_by"], written["protocol"]) == ("pgd-2", "equal")
    assert "weights, ranked by pgd-2\n" in table and "Protocol equal: every method trains for the same" in table
    assert "pgd-2, ε 0.1" in table and "1/0/2" in table and "Pre-training (epochs: 1)" in table
    budget = round(0.1 * comparison.size)
    kept = {row["method"]: row["kept"] for row in outcome["rows"]}
    assert kept["hydra"] == kept["magnitude"] == [budget, budget]
    assert kept["dense-small"][1] <= budget


def test_the_plots_of_a_comparison_are_drawn(finished: tuple[Comparison, dict[str, Any]]) -> None:
    comparison, outcome = finished
    paths = plots.draw_study(comparison.folder, outcome)
    assert [path.name for path in paths] == ["robust.png", "robust.svg"]
    assert b"PNG" in paths[0].read_bytes()[:20] and b"magnitude" in paths[1].read_bytes()
    for rows in ([], [row for row in outcome["rows"] if row["keep"] is None]):
        plots.draw_study(comparison.folder, {**outcome, "rows": rows})


def test_a_second_execution_runs_nothing_and_gives_the_same_results(
    finished: tuple[Comparison, dict[str, Any]],
) -> None:
    comparison, outcome = finished
    again = compared(comparison.root, methods=["magnitude", "hydra", "dense-small"], seeds=[0, 1])
    assert json.dumps(again.execute(start=never)) == json.dumps(outcome)
    subset = compared(comparison.root, methods=["magnitude"], seeds=[1]).execute(start=never)
    assert subset["rows"][1]["natural_half"] != subset["rows"][1]["natural_half"], "one seed has no interval"
    assert "± –" in standings.cells(subset["rows"][1])[2]


def test_other_attacks_are_measured_without_training_again(finished: tuple[Comparison, dict[str, Any]]) -> None:
    comparison, _ = finished
    trained = {path: path.stat().st_mtime_ns for path in (comparison.root / "stages").rglob("stage.json")}
    again = compared(
        comparison.root,
        methods=["magnitude"],
        recipe={**SHORT, "evaluate": {"attacks": ["pgd-2", "fgsm"], "examples": 50}},
    )
    outcome = again.execute(start=here(again))
    assert outcome["attack"] == "fgsm, ε 0.1"
    assert trained == {path: path.stat().st_mtime_ns for path in (comparison.root / "stages").rglob("stage.json")}


def test_the_attack_that_ranks_is_measured_and_shown(finished: tuple[Comparison, dict[str, Any]]) -> None:
    """It need not be the last attack of the recipe, nor any of them."""
    comparison, before = finished
    trained = {path: path.stat().st_mtime_ns for path in (comparison.root / "stages").rglob("stage.json")}
    again = compared(comparison.root, methods=["magnitude", "hydra"], rank_by="fgsm")
    assert [entry.recipe.evaluate.attacks for entry in again.entries] == [["pgd-2", "fgsm"]] * 3
    outcome = again.execute(start=here(again))
    assert trained == {path: path.stat().st_mtime_ns for path in (comparison.root / "stages").rglob("stage.json")}
    assert (outcome["rank_by"], outcome["attack"]) == ("fgsm", "fgsm, ε 0.1")
    (run,) = (run for run in outcome["runs"] if run["method"] == "hydra")
    assert run["robust"] == json.loads((again.root / run["folder"] / "results" / "fgsm.json").read_text())["value"]
    table = (again.folder / "table.md").read_text()
    assert "weights, ranked by fgsm" in table and "Ranked by fgsm." in table
    # Back to an attack that is measured, in the middle of the list: nothing is run.
    middle = {**SHORT, "evaluate": {"attacks": ["pgd-2", "fgsm"], "examples": 50}}
    third = compared(comparison.root, methods=["magnitude", "hydra"], recipe=middle, rank_by="pgd-2")
    rows = {row["method"]: row["robust"] for row in third.execute(start=never)["rows"]}
    first = {run["method"]: run["robust"] for run in before["runs"] if run["seed"] == 0}
    assert rows == {method: first[method] for method in ("dense", "magnitude", "hydra")}


def test_a_failing_run_is_shown_and_the_others_survive(tmp_path: Path) -> None:
    comparison = compared(tmp_path, methods=["magnitude", "dense-small"], seeds=[0, 1])
    outcome = comparison.execute(start=here(comparison, fail="magnitude-90-seed1"))
    rows = {row["method"]: row for row in outcome["rows"]}
    assert (rows["magnitude"]["failed"], rows["dense-small"]["failed"]) == (1, 0)
    cells = standings.cells(rows["magnitude"])
    assert cells[-2] == "1 of 2" and cells[-1].endswith("error: out of | luck")
    assert r"error: out of \| luck |" in (comparison.folder / "table.md").read_text()
    assert [run["name"] for run in outcome["runs"] if run["failed"]] == ["t-magnitude-90-seed1"]
    repaired = comparison.execute(start=here(comparison))
    assert not any(row["failed"] for row in repaired["rows"])


def test_a_run_at_chance_level_is_finished_and_its_row_says_so(tmp_path: Path) -> None:
    comparison = compared(tmp_path, methods=["harp", "magnitude"], seeds=[0, 1])
    run = here(comparison)

    def start(name: str) -> Done:
        run(name)
        entry = next(entry for entry in comparison.entries if entry.name == name)
        wrecked = name in ("t-dense-seed0", "t-magnitude-90-seed1")
        facts = {"at_chance": wrecked, "budget_met": "harp" not in name, "warnings": ["one"] if wrecked else []}
        edit(entry.folder / "summary.json", **facts)
        return Done(AT_CHANCE if wrecked else 0)

    outcome = comparison.execute(start=start)
    assert not [run for run in outcome["runs"] if run["failed"]], "nor what begins with it"
    notes = {row["method"]: standings.cells(row)[-1] for row in outcome["rows"]}
    assert notes == {"dense": "1 of 2 at chance", "magnitude": "1 of 2 at chance", "harp": "budget unmet in 2 of 2"}
    assert "| – | budget unmet in 2 of 2 |" in (comparison.folder / "table.md").read_text()
    runs = {run["name"]: run for run in json.loads((comparison.folder / "results.json").read_text())["runs"]}
    assert runs["t-magnitude-90-seed1"]["at_chance"] and runs["t-magnitude-90-seed1"]["warnings"] == ["one"]
    assert not runs["t-magnitude-90-seed0"]["at_chance"] and not runs["t-harp-90-seed0"]["budget_met"]

    for entry in comparison.entries:  # as older versions wrote it
        path = entry.folder / "summary.json"
        told = json.loads(path.read_text())
        for key in ("at_chance", "budget_met", "warnings"):
            del told[key]
        path.write_text(json.dumps(told))
    assert {standings.cells(row)[-1] for row in comparison.execute(start=never)["rows"]} == {""}


def test_without_its_pretraining_a_run_is_not_started(tmp_path: Path) -> None:
    comparison = compared(tmp_path, methods=["magnitude"])
    outcome = comparison.execute(start=here(comparison, fail="dense"))
    assert [row["robust"] for row in outcome["rows"]] == [None, None]
    assert "not started: t-dense-seed0 failed" in (comparison.folder / "table.md").read_text()
    assert plots.draw_study(comparison.folder, outcome)[0].exists()


def test_weights_from_a_file_are_the_dense_row(finished: tuple[Comparison, dict[str, Any]], tmp_path: Path) -> None:
    comparison, _ = finished
    weights = str(comparison.entries[0].folder / "model.safetensors")
    given = {**SHORT, "stages": STAGES[1:], "model": {"name": "tinynet", "width": 4, "weights": weights}}
    other = compared(tmp_path, recipe=given, methods=["magnitude", "dense-small"])
    outcome = other.execute(start=here(other))
    rows = {row["method"]: row for row in outcome["rows"]}
    expected = json.loads((comparison.entries[0].folder / "results" / "pgd-2.json").read_text())["value"]
    assert rows["dense"]["robust"] == expected and rows["dense"]["kept"] == [comparison.size] * 2
    assert rows["dense-small"]["epochs"] == "2"


# ---------------------------------------------------------------- the order of the work


def test_tasks_wait_only_for_the_task_that_they_build_on() -> None:
    log: list[str] = []
    ends = {"a": 3, "b": 9}

    class Slow(Done):
        def __init__(self, name: str) -> None:
            super().__init__(None)
            self.name, self.left = name, ends.get(name, 2)
            log.append(f"+{name}")

        def poll(self) -> int | None:
            self.left -= 1
            if self.left:
                return None
            log.append(f"-{self.name}")
            return int(self.name == "b")

    tasks = [Task("a"), Task("b"), Task("a1", "a"), Task("b1", "b"), Task("a2", "a"), Task("old", "finished before")]
    failed = work(tasks, Slow, 2, Quiet())
    assert failed == {"b": "exit code 1", "b1": "not started: b failed"}
    assert log[:2] == ["+a", "+b"] and log.index("-a") < log.index("+a1") < log.index("-b")
    assert "+b1" not in log and "+old" in log
    running = 0
    for step in log:
        running += 1 if step[0] == "+" else -1
        assert running <= 2


def test_a_signal_is_passed_on_once_and_nothing_more_is_started() -> None:
    processes: list[Done] = []

    def start(name: str) -> Done:
        processes.append(Done(None))
        if len(processes) == 2:
            signal.raise_signal(signal.SIGINT)
        return processes[-1]

    with pytest.raises(Interrupted) as caught:
        work([Task(str(number)) for number in range(5)], start, 2, Quiet())
    assert caught.value.signal == signal.SIGINT
    assert [process.signals for process in processes] == [[signal.SIGINT], [signal.SIGINT]]


def test_if_one_can_not_be_started_the_others_are_asked_to_end() -> None:
    process = Done(None)

    def start(name: str) -> Done:
        if name == "b":
            raise OSError("no memory")
        return process

    with pytest.raises(OSError, match="no memory"):
        work([Task("a"), Task("b")], start, 2, Quiet())
    assert process.signals == [signal.SIGTERM]


def test_each_process_gets_its_share_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, env, **more: seen.append(env))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for jobs, wished in ((2, None), (3, None), (99, None), (2, "1"), (4, "16"), (4, "many")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if wished is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", wished)
        start(("true",), tmp_path / "logs" / "r.log", jobs)
    assert [env["OMP_NUM_THREADS"] for env in seen] == ["4", "2", "1", "1", "2", "2"]
    assert all(env["OMP_WAIT_POLICY"] == "PASSIVE" for env in seen)


# ---------------------------------------------------------------- real processes


def test_two_jobs_from_the_command_line(harp: Harp, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**STUDY, "methods": ["magnitude", "dense-small"]}))
    code, out, err = harp("compare", "s.yaml", "--jobs", "2")
    assert code == 0, err
    assert all(
        text in out for text in ("keep 10 %", "dense-small", "magnitude", "pgd-2, ε 0.1", "files     runs/compare")
    )
    assert "runs 3/3" in err
    (folder,) = Path("runs").glob("compare-t-*")
    assert {path.name for path in folder.iterdir()} == {
        *("table.md", "results.json", "robust.png", "robust.svg", "recipes", "logs")
    }
    assert len(list((folder / "logs").iterdir())) == 3
    code, out, _ = harp("compare", "s.yaml", "--json")
    assert code == 0 and json.loads(out)["rows"][0]["method"] == "dense"
    assert json_keys("compare") <= json.loads(out).keys()
    (tmp_path / "broken.npz").write_bytes(b"")
    refused(harp, "compare", "s.yaml", "--set", "data.name=broken.npz", said="broken.npz")
    refused(harp, "compare", "s.yaml", "--methods", "harb", said="did you mean 'harp'?")


def test_a_stopped_comparison_saves_and_resumes(tmp_path: Path) -> None:
    long = {**SHORT, "stages": [{**STAGES[0], "epochs": 25}, *STAGES[1:]]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**STUDY, "recipe": long, "methods": ["magnitude"]}))
    command = [sys.executable, "-m", "harp", "compare", "s.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path, "runs/stages/*-pretrain/metrics.jsonl", process, seconds=240)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "the others' states are saved (Ctrl-C). Go on with the same command: harp compare s.yaml" in err
    assert out == ""
    (log,) = tmp_path.glob("runs/compare-t-*/logs/*.log")
    assert "the state is saved" in log.read_text()
    assert list(tmp_path.glob("runs/stages/*-pretrain/state.pt")) and not list(tmp_path.rglob("*.lock"))
    comparison = Comparison(study.load(str(tmp_path / "s.yaml")), tmp_path / "runs")
    assert not any(row["failed"] for row in comparison.execute(start=here(comparison))["rows"])


@pytest.mark.slow
def test_two_processes_train_a_stage_once(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(SHORT))
    command = [sys.executable, "-m", "harp", "run", "r.yaml"]
    both = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    logs = [process.communicate(timeout=280)[1] for process in both]
    assert all(process.returncode in FINISHED for process in both), logs
    for stage in ("pretrain", "prune", "finetune"):
        assert sum(log.count(f"{stage}: epoch 1/1") for log in logs) == 1, logs
        assert sum(log.count(f"{stage}: done before") for log in logs) == 1, logs


def test_waiting_for_another_process_is_shown_and_can_be_stopped(tmp_path: Path) -> None:
    class Ears(Quiet):
        def note(self, text: str) -> None:
            said.append(text)
            signal.raise_signal(signal.SIGTERM)

    said: list[str] = []
    run = Run(recipe.parse(SHORT), tmp_path, display=Ears())
    folder = run.stage_folder(0)
    with files.lock(folder.with_name(f"{folder.name}.lock")), pytest.raises(Interrupted, match="waiting for another"):
        run.execute()
    assert said == ["pretrain: another process is training it, waiting for that"]


def test_a_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "new" / "x.lock", 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(3):
            with files.lock(path):
                inside += 1
                most = max(most, inside)
                time.sleep(0.01)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and inside == 0 and not path.exists()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (4, 2.776), (9, 2.262), (10, 2.228), (20, 2.086), (60, 2.000), (1000, 1.962)]
)
def test_quantiles_of_students_t(freedom: int, expected: float) -> None:
    assert confidence.quantile(freedom) == pytest.approx(expected, abs=6e-4)


def test_intervals_by_hand() -> None:
    mean, half = confidence.interval([0.5, 0.7, 0.6])
    assert mean == pytest.approx(0.6) and half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert math.isnan(confidence.interval([0.5])[1])


def test_seeds_that_keep_different_counts_are_shown_as_a_range() -> None:
    facts = {"method": "m", "keep": 0.1, "failed": None, "epochs": [1], "natural": 0.5, "robust": 0.4, "seconds": 1.0}
    (row,) = standings.rows([{**facts, "seed": 0, "kept": 1000}, {**facts, "seed": 1, "kept": 1200}])
    assert standings.cells(row)[1] == "1,000–1,200"


def test_tables_are_in_the_units_of_the_budget() -> None:
    facts = {"method": "harp", "keep": 0.25, "seed": 0, "failed": None, "epochs": [1, 2, 3], "kept": 902_086}
    rows = standings.rows([{**facts, "natural": 0.5, "robust": 0.25, "seconds": 1.0}])
    outcome = {"study": "s", "description": "", "attack": "pgd-5", "measure": "accuracy", "seeds": [0], "rows": rows}
    said = {"rank_by": "pgd-5", "protocol": "equal", "protocol_meaning": "fair"}
    text = standings.markdown(outcome | said | {"size": 3_801_514, "unit": "FLOPs"})
    assert "## keep 25 %: 950,379 of 3,801,514 FLOPs, ranked by pgd-5\n" in text
    assert "- Ranked by pgd-5. Protocol equal: fair.\n" in text
    assert "| method | FLOPs kept |" in text and "| harp | 902,086 |" in text and "weights kept" not in text


def test_a_row_has_all_remarks_on_its_runs() -> None:
    facts = {"method": "m", "keep": 0.1, "failed": None, "epochs": [1], "natural": 0.5, "robust": 0.4, "seconds": 1.0}
    facts |= {"kept": 10}
    told = [{"at_chance": True}, {"budget_met": False}, {"at_chance": True, "budget_met": False}, {"failed": "why"}]
    (row,) = standings.rows([{**facts, "seed": seed, **each} for seed, each in enumerate(told)])
    assert standings.cells(row)[-1] == "2 of 4 at chance; budget unmet in 2 of 4; why"


def test_rows_are_paired_with_the_best_of_their_budget() -> None:
    facts = {"keep": 0.1, "epochs": [1], "kept": 1, "natural": 0.5, "seconds": 1.0, "failed": None}
    accuracies = {"best": [0.60, 0.52, 0.55], "other": [0.58, 0.53, 0.50], "once": [None, 0.4, None]}
    records = [
        {**facts, "method": method, "seed": seed, "robust": value, "failed": None if value else "why"}
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    best, other, once = standings.rows(records)
    assert best["lead"] is None and standings.cells(best)[4] == "–"
    assert other["lead"]["mean"] == pytest.approx(0.02) and other["lead"]["ahead"] == 2
    assert other["lead"]["half"] == pytest.approx(4.303 * 0.03 / 3**0.5, rel=1e-3)
    assert standings.cells(other)[4] == "2.0 ± 7.5 on 2 of 3"
    assert standings.cells(once)[4] == "12.0 ± – on 1 of 1"


def test_the_overview_has_a_row_a_method_and_a_column_a_budget() -> None:
    facts = {"seed": 0, "failed": None, "epochs": [1], "seconds": 1.0, "natural": 0.5, "kept": 10}
    places = [("dense", None, 0.9), ("a", 0.1, 0.8), ("b", 0.1, 0.7), ("a", 0.01, 0.2), ("b", 0.01, 0.6)]
    rows = standings.rows([{**facts, "method": m, "keep": keep, "robust": r} for m, keep, r in places])
    assert [[cell.removesuffix(" ± –") for cell in line] for line in standings.overview(rows)] == [
        ["dense", "90.0", "90.0"],
        ["b", "70.0", "60.0"],  # the best where the budget is smallest comes first
        ["a", "80.0", "20.0"],
    ]
