"""A run's folder as all commands see it: what was measured is shared, and what is broken is said the same way."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harp.errors import RunFolderError
from harp.evaluation.runner import AttackRun, Outcome
from harp.experiments import study
from harp.experiments.compare import Comparison
from harp.experiments.run import Run
from support.commands import FINISHED, Harp

RECIPE = {
    "name": "tiny",
    "data": {"name": "digits", "batch": 64, "holdout": 100, "pad": 1},
    "model": {"name": "tinynet", "width": 4},
    "objective": {"name": "pgd", "epsilon": 0.1, "step": 0.05, "steps": 1},
    "stages": [
        {"name": "pretrain", "pruner": "dense", "epochs": 6, "optimizer": {"lr": 0.1}},
        {"name": "prune", "pruner": {"name": "magnitude", "keep": "50%"}, "epochs": 0},
        {"name": "finetune", "pruner": "fixed", "epochs": 0},
    ],
    "evaluate": {"attacks": ["pgd-2"]},
}
STUDY = {"name": "tiny", "recipe": RECIPE, "methods": ["magnitude"], "keep": ["50%"], "seeds": [0]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of a study, which the tests copy."""
    root = tmp_path_factory.mktemp("run")
    entries = Comparison(study.parse(STUDY), root / "runs").entries
    for entry in entries:
        Run(entry.recipe, root / "runs").execute()
    (root / "tiny.yaml").write_text(entries[-1].recipe.to_yaml())
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run of one's own, in the folder where commands run."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    shutil.copy(made / "tiny.yaml", tmp_path)
    (folder,) = (tmp_path / "runs").glob("tiny-magnitude-*")
    return folder.relative_to(tmp_path)


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured on the test set, one entry a call."""
    calls: list[str] = []
    execute = AttackRun.run

    def counting(self: AttackRun) -> Outcome:
        calls.append("natural" if self.attack is None else f"{type(self.attack).__name__} {self.attack.epsilon}")  # type: ignore[attr-defined]
        return execute(self)

    monkeypatch.setattr(AttackRun, "run", counting)
    return calls


def test_evaluate_uses_results_of_the_run(harp: Harp, run: Path, attacked: list[str]) -> None:
    code, out, err = harp("evaluate", str(run), "--attack", "pgd-2", "--json")
    assert code == 0, err
    assert attacked == []
    assert "natural: measured before, taken from" in err and "pgd-2: measured before, taken from" in err
    own = {number["name"]: number["value"] for number in json.loads((run / "summary.json").read_text())["results"]}
    assert {number["name"]: number["value"] for number in json.loads(out)["results"]} == own
    kinds = {path.name.partition("-")[0] for path in (run / "evaluation").iterdir()}
    assert {"accuracy", "examples", "checks", "flips"} <= kinds
    assert "measured before" not in harp("evaluate", str(run), "--attack", "pgd-2")[2], "it is in its own folder by now"


def test_evaluate_uses_a_result_on_all_images_if_their_number_is_given(
    harp: Harp, run: Path, attacked: list[str]
) -> None:
    summary = json.loads((run / "summary.json").read_text())
    count = str(summary["results"][0]["n"])
    code, _, err = harp("evaluate", str(run), "--attack", "pgd-2", "--examples", count, "--no-checks")
    assert code == 0, err
    assert attacked == []


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (("--epsilon", "0.2"), ["Pgd 0.2"]),
        (("--norm", "l2"), ["Pgd 0.1"]),
        (("--seed", "1"), ["natural", "Pgd 0.1"]),
        (("--examples", "50"), ["natural", "Pgd 0.1"]),
        (("--store",), ["natural", "Pgd 0.1"]),
    ],
    ids=["epsilon", "norm", "seed", "examples", "store"],
)
def test_another_attack_or_more_images_are_measured(
    harp: Harp, run: Path, attacked: list[str], words: tuple[str, ...], measured: list[str]
) -> None:
    code, _, err = harp("evaluate", str(run), "--attack", "pgd-2", "--no-checks", *words)
    assert code == 0, err
    assert attacked == measured


def test_another_network_is_measured(harp: Harp, run: Path, attacked: list[str]) -> None:
    (weights,) = Path("runs/stages").glob("*-pretrain/model.safetensors")
    code, _, err = harp("evaluate", str(run), "--weights", str(weights), "--attack", "pgd-2", "--no-checks")
    assert code == 0, err
    assert attacked == ["natural", "Pgd 0.1"]


def test_run_uses_results_of_evaluate(harp: Harp, run: Path, attacked: list[str]) -> None:
    assert harp("evaluate", str(run), "--attack", "fgsm", "--no-checks")[0] == 0
    assert attacked == ["Fgsm 0.1"]
    code, _, err = harp("run", "tiny.yaml", "--set", "evaluate.attacks=[fgsm]")
    assert code in FINISHED, err
    assert attacked == ["Fgsm 0.1", "Fgsm 0.1"], "the dense network's is new, the pruned one's is known"


def test_a_result_of_an_older_version_is_used(harp: Harp, run: Path, attacked: list[str]) -> None:
    (stage,) = Path("runs/stages").glob("*-finetune")
    (number,) = stage.glob("accuracy-natural-*.json")
    content = json.loads(number.read_text()) | {"value": 0.125}
    number.unlink()
    (stage / "test-natural-73f92770.json").write_text(json.dumps(content))
    assert harp("run", "tiny.yaml")[0] in FINISHED
    assert json.loads((run / "summary.json").read_text())["results"][0]["value"] == 0.125
    assert attacked == []


NETWORK = (["evaluate"], ["export", "--to", "sparse"], ["slim", "--out", "slim"], ["bench"])
"""Commands on a run that need its network."""


def cut(path: Path) -> None:
    path.write_text(path.read_text()[:20])


def drop(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        del content[key]
        path.write_text(json.dumps(content))

    return change


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "summary cut": ("summary.json", cut, "summary.json can't be read: JSONDecodeError"),
    "summary is a list": ("summary.json", lambda path: path.write_text("[]"), "holds a list, not an object"),
    "summary is bytes": ("summary.json", lambda path: path.write_bytes(b"\xff\xfe\0"), "can't be read: Unicode"),
    "summary without results": ("summary.json", drop("results"), "is damaged: results: Field required"),
    "recipe cut": ("recipe.yaml", lambda path: path.write_text("{"), "recipe.yaml is damaged: it can't be read"),
    "recipe is bytes": ("recipe.yaml", lambda path: path.write_bytes(b"\xff\xfe\0"), "recipe.yaml is damaged"),
    "recipe without stages": ("recipe.yaml", lambda path: path.write_text("name: x"), "it has no list of stages"),
    "stage cut": ("../stages/*-finetune/stage.json", cut, "stage.json can't be read: JSONDecodeError"),
    "stage without its name": ("../stages/*-finetune/stage.json", drop("stage"), "is damaged: stage: Field required"),
    "evaluation cut": ("evaluation/x.json", lambda path: path.write_text("{"), "(delete it to measure again)"),
    "no recipe": ("recipe.yaml", Path.unlink, "is no run: there is no recipe.yaml in it"),
}


@pytest.mark.parametrize("damage", list(BROKEN))
def test_a_damaged_run_gives_the_same_error_in_every_command(harp: Harp, run: Path, damage: str) -> None:
    name, ruin, message = BROKEN[damage]
    (run / "evaluation").mkdir()
    paths = list(run.glob(name)) or [run / name]
    ruin(paths[0])
    Path("study.yaml").write_text(yaml.safe_dump(STUDY))
    errors = {}
    for command in (*([*words, str(run)] for words in (*NETWORK, ["report"])), ["compare", "study.yaml"]):
        code, _, err = harp(*command)
        assert code == 2, (command, err)
        errors[command[0]] = err.splitlines()[-1]
    assert len(set(errors.values())) == 1, errors
    assert message in errors["report"]
    assert errors["report"].startswith(f"error: {run}") or "stages" in errors["report"]


def test_an_unfinished_run_gives_the_same_error_in_every_command(harp: Harp, run: Path) -> None:
    (run / "summary.json").unlink()
    lines = set()
    for command in (*NETWORK, ["report"]):
        code, _, err = harp(*command, str(run))
        assert code == 2
        lines.add(err)
    finish = "(`harp run` its recipe again to finish it)"
    assert lines == {f"error: {run} is not finished: there is no summary.json in it {finish}\n"}


@pytest.mark.parametrize("name", ["model.safetensors", "masks.safetensors"])
def test_a_missing_network_gives_the_same_error_in_every_command(harp: Harp, run: Path, name: str) -> None:
    (run / name).unlink()
    outcomes = [harp(*command, str(run)) for command in NETWORK]
    assert {code for code, *_ in outcomes} == {2}
    (line,) = {err for *_, err in outcomes}
    assert f"{run} is not finished: there is no {name} in it" in line


def test_a_damaged_stage_gives_run_an_error_without_a_traceback(harp: Harp, run: Path) -> None:
    (stage,) = Path("runs/stages").glob("*-finetune/stage.json")
    cut(stage)
    code, _, err = harp("run", "tiny.yaml")
    assert code == 2
    assert f"{stage} can't be read" in err and "delete the stage's folder" in err


def test_a_recipe_of_another_version_can_still_be_reported(harp: Harp, run: Path) -> None:
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("name: magnitude", "name: forgotten"))
    assert harp("report", str(run))[0] == 0
    code, _, err = harp("slim", str(run), "--out", "slim")
    assert code == 2 and f"{run / 'recipe.yaml'} can't be used: " in err and "forgotten" in err


def test_the_error_survives_a_process(run: Path) -> None:
    error = RunFolderError(run, "is no run: there is no recipe.yaml in it", "give another")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is RunFolderError and str(again) == str(error)
    assert str(error) == f"{run} is no run: there is no recipe.yaml in it (give another)"
