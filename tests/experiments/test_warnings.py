"""A run whose network is useless, or whose budget was missed in training, says so wherever it is looked at."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from harp.errors import AT_CHANCE, CheckpointError
from harp.experiments import recipe, run_folder
from harp.experiments.run import Run
from harp.reports import card, html
from harp.training.loop import Fitted
from support.commands import RECIPE, Harp
from support.finished_run import edit

PRETRAIN = {"name": "pretrain", "pruner": "dense", "epochs": 3}
FINETUNE = {"name": "finetune", "pruner": "fixed", "epochs": 0}


def learning(keep: str, **more: Any) -> dict[str, Any]:
    """A recipe that learns something before it prunes at random."""
    prune = {"name": "prune", "pruner": {"name": "random", "keep": keep}, "epochs": 0}
    parts = {"objective": "natural", "data": {"name": "digits", "batch": 64, "holdout": 100, "pad": 1}}
    measured = {"attacks": ["pgd-2"], "examples": 300, "epsilon": 0.05}
    return {**RECIPE, **parts, "stages": [PRETRAIN, prune, FINETUNE], "evaluate": measured, **more}


def executed(harp: Harp, content: dict[str, Any]) -> tuple[int, list[str], list[str], Path, dict[str, Any]]:
    """Exit code, lines of standard output and standard error, folder and summary of a run."""
    Path("r.yaml").write_text(yaml.safe_dump(content))
    code, out, err = harp("run", "r.yaml")
    (folder,) = Path("runs").glob("tiny-*")
    return code, out.splitlines(), err.splitlines(), folder, json.loads((folder / "summary.json").read_text())


def test_a_network_at_chance_after_pruning_is_a_warning_in_every_output(harp: Harp) -> None:
    code, out, err, folder, summary = executed(harp, learning("1%", description="a line of its maker"))
    assert code == AT_CHANCE
    (warning,) = summary["warnings"]
    assert summary["at_chance"] and summary["budget_met"]
    assert warning.startswith("Pruning left a network that answers at chance level: natural accuracy ")
    headline = next(number for number, line in enumerate(out) if line.startswith("weights 4,612 → 46"))
    assert out[headline + 1] == f"warning: {warning}"
    assert err[-1] == f"warning: {warning} All files are kept; the exit code is 3."
    assert {"model.safetensors", "masks.safetensors", "layers.png", card.FILE} <= {
        path.name for path in folder.iterdir()
    }

    text = card.card(folder)
    maker, first, *_ = text.split("# tiny\n\n")[1].split("\n\n")
    assert maker == "a line of its maker" and first.startswith("> **Warning:** Pruning left a network")
    assert "- Pruning left a network" in text.split("## Caveats")[1]

    page, data, words = (path.read_text() for path in html.build([folder], Path("page")))
    assert page.count('<div class="warnings" role="alert">') == 1
    assert "Pruning left a network" in page.split('<div class="warnings"')[1].split("</div>")[0]
    (part,) = json.loads(data)["parts"]
    assert part["warnings"][0] == warning and part["networks"][0]["remark"] == "at chance level"
    assert 'class="tile failed"' in page
    assert "> **Warning:** Pruning left a network" in words

    again = executed(harp, learning("1%", description="a line of its maker"))
    assert again[:2] == (AT_CHANCE, out) and again[2][-1] == err[-1]


def test_a_good_network_gives_no_warning(harp: Harp) -> None:
    content = learning("90%")
    content["stages"][1]["pruner"]["name"] = "magnitude"
    code, out, err, folder, summary = executed(harp, content)
    assert code == 0, err
    assert (summary["at_chance"], summary["budget_met"], summary["warnings"]) == (False, True, [])
    assert not [line for line in (*out, *err) if "warning" in line]
    assert "Warning" not in card.card(folder)
    assert 'class="warnings"' not in html.build([folder], Path("page"))[0].read_text()


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{**PRETRAIN, "epochs": 0}], "The network answers at chance level: natural"),
        (
            [{**PRETRAIN, "epochs": 0}, {"name": "prune", "pruner": {"name": "lamp", "keep": "5%"}, "epochs": 0}],
            "The network answers at chance level, as it did before pruning (",
        ),
        (  # what was there before is no trained network
            [{"name": "prune", "pruner": {"name": "lamp", "keep": "5%"}, "epochs": 0}],
            "The network answers at chance level: natural",
        ),
    ],
    ids=["dense", "before and after", "from scratch"],
)
def test_a_network_at_chance_before_pruning_has_a_warning_of_its_own(harp: Harp, stages: list[Any], said: str) -> None:
    code, _, err, _, summary = executed(harp, learning("1%", stages=stages))
    assert code == AT_CHANCE and summary["at_chance"]
    assert summary["warnings"][0].startswith(said) and err[-1].startswith(f"warning: {said}")


def test_the_warning_comes_right_after_pruning_and_the_training_continues(harp: Harp) -> None:
    _, _, err, *_ = executed(harp, RECIPE)
    line = (
        "warning: after pruning the network answers at chance level (10.0% of 10 classes); fine-tuning may recover it"
    )
    place = err.index(line)
    assert err[place - 1].startswith("prune: epoch 2/2") and err[place + 1].startswith(("compact", "finetune: epoch 1"))
    assert not [text for text in executed(harp, RECIPE)[2] if "after pruning" in text], "said when it was trained"


@pytest.mark.parametrize(
    ("history", "epoch", "number", "said"),
    [
        ([0.9, 0.1], 2, 1, "(10.0% of 10 classes); fine-tuning may recover it"),
        ([0.9, 0.1], 1, 1, None),
        ([0.1, 0.9], 2, 1, None),
        ([0.1], 1, 2, "(10.0% of 10 classes)"),  # nothing comes after it
        ([], 0, 1, None),
    ],
)
def test_the_chosen_epoch_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, history: list[float], epoch: int, number: int, said: str | None
) -> None:
    run = Run(recipe.parse(RECIPE), tmp_path)
    with caplog.at_level(logging.WARNING, "harp"):
        run.warn_of_chance(number, Fitted({}, [{"natural": value} for value in history], epoch))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([] if said is None else [f"after pruning the network answers at chance level {said}"])


def test_a_budget_missed_in_training_is_a_warning_in_every_output(harp: Harp) -> None:
    prune = {
        "name": "prune",
        "pruner": {"name": "harp", "keep": "40%", "published": True, "gamma_step": 1e-6, "initial_rate": 0.9},
    }
    content = learning("1%", stages=[PRETRAIN, {**prune, "epochs": 1}, FINETUNE])
    code, out, err, folder, summary = executed(harp, content)
    assert code == 0, err
    (warning,) = summary["warnings"]
    assert not summary["budget_met"] and not summary["at_chance"]
    assert warning.startswith("The budget was not met in stage prune (exceeded by 1") and "gamma_step" in warning
    assert f"warning: {warning}" in out
    assert "> **Warning:** The budget was not met" in card.card(folder)
    page, data, _ = (path.read_text() for path in html.build([folder], Path("page")))
    assert "The budget was not met" in page.split('<div class="warnings"')[1].split("</div>")[0]
    assert len([text for text in json.loads(data)["parts"][0]["warnings"] if "budget was not met" in text]) == 1, "once"

    (stage,) = Path("runs/stages").glob("*-prune/stage.json")
    assert json.loads(stage.read_text())["budget_met"] is False
    pruning = [
        path for path in Path("runs/stages").glob("*/stage.json") if "budget_met" in json.loads(path.read_text())
    ]
    assert pruning == [stage], "only of stages that prune"
    again = executed(harp, content)
    assert again[4] == summary and f"warning: {warning}" in again[2], "a stage that is taken from its folder tells it"
    facts = json.loads(stage.read_text())
    del facts["budget_met"]  # as older versions wrote it: its epochs tell
    stage.write_text(json.dumps(facts))
    assert executed(harp, content)[4]["warnings"] == [warning]


def test_runs_of_older_versions_have_no_warnings(harp: Harp) -> None:
    *_, folder, summary = executed(harp, learning("1%"))
    for key in ("warnings", "at_chance", "budget_met"):
        del summary[key]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert run_folder.read(folder).warnings == []
    assert "Warning" not in card.card(folder)
    assert 'class="warnings"' not in html.build([folder], Path("page"))[0].read_text()
    edit(folder / "summary.json", warnings="none")
    with pytest.raises(CheckpointError, match="warnings: Input should be a valid list"):
        run_folder.read(folder)


def test_a_large_drop_is_a_warning_with_what_to_try_in_every_output(harp: Harp) -> None:
    code, out, _, folder, summary = executed(harp, learning("60%"))
    assert code == 0 and not summary["at_chance"]
    (warning,) = summary["warnings"]
    assert re.match(r"Pruning cost much accuracy: natural [\d.]+% → [\d.]+%", warning)
    advice = "Try more epochs of fine-tuning (0 now), a larger keep (60 % now), or another method or strategy."
    assert warning.endswith(advice) and f"warning: {warning}" in out
    text = card.card(folder)
    assert warning.split(":")[0] in text.split("## Model details")[0] and "(large drop)**" in text
    assert "- far-below-the-dense-network" in text.split("---")[1]
    page = html.build([folder], Path("page"))[0].read_text()
    assert "Pruning cost much accuracy" in page.split('<div class="warnings"')[1].split("</div>")[0]


def test_the_accuracy_before_pruning_is_said_before_it_begins(harp: Harp) -> None:
    _, out, err, _, summary = executed(harp, learning("99%"))
    lines = next(stream for stream in (out, err) if any(line.startswith("before pruning") for line in stream))
    expected = ", ".join(f"{result['name']} {result['value']:.1%}" for result in summary["dense"])
    before = next(number for number, line in enumerate(lines) if line.startswith("before pruning: "))
    assert lines[before] == f"before pruning: {expected} on the test set"
    assert not [line for line in lines[: before + 1] if line.startswith(("weights ", "prune"))]
    untrained = learning("99%", name="untrained")
    untrained["stages"] = untrained["stages"][1:]
    Path("u.yaml").write_text(yaml.safe_dump(untrained))
    assert "before pruning" not in "".join(harp("run", "u.yaml")[1:]), "random weights have no accuracy to lose"


def test_a_page_of_several_runs_names_the_run_of_a_warning(harp: Harp) -> None:
    *_, folder, _ = executed(harp, learning("1%"))
    other = folder.with_name("other")
    other.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    (other / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + "seed: 5\n")
    content = json.loads((other / "summary.json").read_text())
    edit(other / "summary.json", warnings=[], at_chance=False, results=content["dense"])
    words = html.build([folder, other], Path("page"))[2].read_text()
    assert words.count("> **Warning:** ") == 1 and "At chance level: random, 1 %, seed 0." in words
