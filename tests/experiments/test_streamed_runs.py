"""Recipes on streamed images: runs equal those from memory, go on where they stopped, and tell of damaged images."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from harp.data import decodable
from harp.data.registry import DataSet, load
from harp.data.streaming.images import Streamed
from harp.errors import DataError, Interrupted, RecipeError
from harp.evaluation import accuracy, score
from harp.evaluation.results import Audit
from harp.experiments import recipe
from harp.experiments.run import Run
from harp.system.progress import Quiet
from harp.system.tensors import load_tensors
from support.commands import FINISHED, Harp
from support.pictures import damage, encoded, fill

pytest.importorskip("PIL.Image")

RECIPE: dict[str, Any] = {
    "name": "streamed",
    "data": {"name": "folder", "size": 8, "batch": 6, "holdout": 6, "pad": 1},
    "model": "tinynet",
    "objective": {"name": "pgd", "epsilon": 0.05, "steps": 1},
    "stages": [
        {"name": "pretrain", "pruner": "dense", "epochs": 1},
        {"name": "prune", "pruner": {"name": "hydra", "keep": 0.2}, "epochs": 2},
    ],
    "evaluate": {"attacks": ["pgd-2"]},
}


def changed(**changes: Any) -> recipe.Recipe:
    return recipe.parse({**RECIPE, "data": {**RECIPE["data"], **changes}})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decodable, "known", {})
    return tmp_path / "cache"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "model.safetensors")[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_the_same_from_memory_and_streamed(tmp_path: Path) -> None:
    fill(tmp_path / "pictures")
    held = Run(changed(), tmp_path / "a", data_dir=tmp_path / "pictures").execute()
    for workers in (0, 1):
        lazy = Run(changed(stream=True), tmp_path / f"b{workers}", data_dir=tmp_path / "pictures", workers=workers)
        assert isinstance(lazy.train.images, Streamed)
        streamed = lazy.execute()
        assert same(weights(held.folder), weights(streamed.folder))
        assert [each["value"] for each in streamed.results] == [each["value"] for each in held.results]


class Impatient(Quiet):
    """Ask to stop at a step."""

    def __init__(self, at: int) -> None:
        self.at, self.run = at, None

    def step(self, record: Any) -> None:
        self.at -= 1
        if self.at == 0:
            self.run.stop.signal = 15


def test_a_streamed_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    fill(tmp_path / "pictures")
    damage(tmp_path / "pictures")
    made = changed(crop="resized", corrupt=20)
    straight = Run(made, tmp_path / "a", data_dir=tmp_path / "pictures", workers=0)
    expected = weights(straight.execute().folder)
    at = 2
    while True:
        display = Impatient(at)
        work = Run(made, tmp_path / "b", data_dir=tmp_path / "pictures", workers=at % 2, display=display)
        display.run = work
        try:
            outcome = work.execute()
            break
        except Interrupted:
            at = 7 - at
    assert same(weights(outcome.folder), expected)
    folders = [*_stages(straight), *_stages(work)]
    told = [(folder / "corrupt.txt").read_text().splitlines() for folder in folders]
    assert told and all(line.count("can't be decoded") == 1 for lines in told for line in lines)
    assert all(len(lines) == len(set(lines)) for lines in told)


def test_two_processes_share_one_list_of_damaged_images_and_tell_of_each_once(tmp_path: Path) -> None:
    fill(tmp_path / "pictures")
    damage(tmp_path / "pictures")
    one = {**RECIPE, "data": {**RECIPE["data"], "stream": True, "corrupt": 20}, "stages": RECIPE["stages"][:1]}
    alone = Run(recipe.parse(one), tmp_path / "a", data_dir=tmp_path / "pictures", workers=0)
    alone.execute()
    expected = set((alone.stage_folder(0) / "corrupt.txt").read_text().splitlines())
    assert expected
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(one))
    words = "run", "r.yaml", "--out", "b", "--data-dir", "pictures", "--workers", "0"
    devices = "--devices", "2", "--accelerator", "cpu"
    command = [sys.executable, "-m", "harp", *words, *devices]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode in FINISHED, done.stderr
    (listed,) = tmp_path.glob("b/stages/*-pretrain/corrupt.txt")
    assert {line.removeprefix("pictures/") for line in listed.read_text().splitlines()} == {
        line.removeprefix(f"{tmp_path}/pictures/") for line in expected
    }
    told = [line for line in done.stderr.splitlines() if "takes its place" in line]
    assert len(told) == len(set(told)) == len(expected), done.stderr


def _stages(run: Run) -> list[Path]:
    return [run.stage_folder(number) for number in range(2)]


def test_options_of_where_images_are_change_no_identity() -> None:
    same_results = [changed(), changed(stream=True), changed(corrupt=0.5), changed(stream=False)]
    assert len({each.identity(2, "data") for each in same_results}) == 1
    others = [changed(crop="resized"), changed(crop="resized", margin=1.0), changed(pad=2)]
    assert len({each.identity(2, "data") for each in [*others, changed()]}) == 4
    with pytest.raises(RecipeError, match="leave out stream: false"):
        changed(crop="resized", stream=False)
    with pytest.raises(RecipeError, match="crop"):
        changed(crop="random")


# --- damaged test images


class Flat(nn.Module):
    """A network for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).view(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) @ self.weight


def spoilt(root: Path) -> DataSet:
    fill(root, 6, 12)
    (root / "test/class1/004.jpg").write_bytes(b"")
    (root / "test/class2/005.png").write_bytes(encoded(1, kind="PNG")[:90])
    return load("folder", root, 8, stream=True)


def test_undecodable_test_images_are_left_out_and_counted(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = spoilt(tmp_path / "pictures")
    result, outcome = accuracy.measure(Flat(), data, "natural", None, examples=None, seed=0)
    assert (result["n"], result["undecodable"], len(outcome.right)) == (10, 2, 10)
    assert "2 of 12 images can't be decoded and are left out; the first: " in caplog.text
    good = [row for row in range(12) if row not in (5, 9)]
    kept = replace(data, test=data.test.select(good))
    clean, _ = accuracy.measure(Flat(), kept, "natural", None, examples=None, seed=0)
    assert "undecodable" not in clean and clean["correct"] == result["correct"]
    part, _ = accuracy.measure(Flat(), data, "natural", None, examples=7, seed=1)
    chosen = score.subset(12, 7, 1).tolist()
    assert part["n"] == sum(row in good for row in chosen)
    # The verdict is remembered: nothing is decoded again but what was damaged, which somebody may have mended.
    looked: list[int] = []
    places = Streamed.places
    monkeypatch.setattr(Streamed, "places", lambda self, rows: looked.extend(rows.tolist()) or places(self, rows))
    monkeypatch.setattr(decodable, "known", {})
    assert decodable.readable(data.test).positions.tolist() == good
    assert looked == [5, 9]
    path = next(cache.rglob("readable/*.json"))
    for damaged in ("", "{}", '{"images": 12, "undecodable": [99]}', '{"images": 12, "undecodable": null}'):
        for file in path.parent.glob("*.json"):
            file.write_text(damaged)
        monkeypatch.setattr(decodable, "known", {})
        assert decodable.readable(data.test).positions.tolist() == good
    assert json.loads(path.read_text())["images"] in (12, 7, 10)


def test_repaired_images_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = spoilt(tmp_path / "pictures")
    assert len(decodable.readable(data.test, workers=1).split) == 10
    (tmp_path / "pictures/test/class1/004.jpg").write_bytes(encoded(1))
    monkeypatch.setattr(decodable, "known", {})
    assert len(decodable.readable(data.test).split) == 11


def test_an_audit_knows_which_images_it_has(tmp_path: Path) -> None:
    data = spoilt(tmp_path / "pictures")
    audit = Audit(accuracy.Subject(Flat(), data), None)
    assert audit.chosen.tolist() == [row for row in range(12) if row not in (5, 9)]
    assert audit.natural()["n"] == 10
    for file in (tmp_path / "pictures/test").rglob("*.*"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="none of 12 images can be decoded"):
        Audit(accuracy.Subject(Flat(), load("folder", tmp_path / "pictures", 8, stream=True)), None)


def test_images_in_memory_are_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    digits = load("digits")
    with caplog.at_level(logging.DEBUG, "harp"):
        decodable_images = decodable.readable(digits.test)
    assert decodable_images.split is digits.test and len(decodable_images.positions) == 500 and not caplog.records


def test_the_command_takes_workers(harp: Harp, tmp_path: Path) -> None:
    fill(tmp_path / "pictures")
    content = {**RECIPE, "data": {**RECIPE["data"], "stream": True}, "stages": RECIPE["stages"][:1]}
    Path("r.yaml").write_text(yaml.safe_dump(content))
    code, _, err = harp("run", "r.yaml", "--data-dir", "pictures", "--workers", "1")
    assert code in FINISHED, err
    code, _, err = harp("run", "r.yaml", "--data-dir", "pictures", "--set", "seed=1", "--workers", "-1")
    assert code == 2 and "--workers -1: give at least 0" in err
    (folder,) = Path("runs").glob("streamed-*")
    code, _, err = harp("evaluate", str(folder), "--data-dir", "pictures", "--attack", "pgd-2")
    assert code == 0, err
