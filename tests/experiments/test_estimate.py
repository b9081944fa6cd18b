"""Estimates: measured by the real loop on noise, sums that add up, and nothing left behind."""

import json
import math
import resource
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harp import attacks
from harp.attacks import ATTACKS
from harp.data.datasets import base
from harp.data.streaming.images import Streamed
from harp.errors import PROBLEM, ModelError, RecipeError
from harp.evaluation.runner import parts
from harp.experiments import recipe
from harp.experiments import stages as pipeline
from harp.experiments.estimate import measure, stages
from harp.experiments.estimate.measure import AttackTime, Measurement, Request, TimedRun, seconds_an_image
from harp.experiments.estimate.sizes import Sizes, sizes
from harp.pruning.methods import PRUNERS
from harp.system.progress import Quiet
from harp.training.objectives import PgdTraining
from support.commands import FINISHED, RECIPE, STAGES, Harp, refused
from support.documents import json_keys
from support.pictures import fill

SMALL = Sizes(1297, 500, (1, 8, 8), 10)


def recipe_with(**changes: Any) -> recipe.Recipe:
    return recipe.parse({**RECIPE, **changes})


# ---------------------------------------------------------------- how much data there is


def test_data_is_known_without_its_files() -> None:
    data = {
        name: sizes(recipe_with(data={"name": name, "batch": 8, "holdout": 100}))
        for name in ("cifar10", "imagenet", "svhn")
    }
    assert data["cifar10"] == Sizes(50_000, 10_000, (3, 32, 32), 10)
    assert data["imagenet"].streamed and data["imagenet"].memory() == 0
    assert data["svhn"].trained(recipe_with(data={"name": "svhn", "holdout": 0.1})) == 73_257 - 7_326
    assert sizes(recipe_with(data={"name": "imagenet", "size": 64, "holdout": 100})).shape == (3, 64, 64)


def test_options_describe_data_that_is_not_there() -> None:
    own = recipe_with(data={"name": "folder", "holdout": 10})
    data = sizes(own, None, images="1000,200", shape="3,64,64", classes=7)
    assert data == Sizes(1000, 200, (3, 64, 64), 7)
    assert sizes(own, None, images="1000", shape="3x64x64", classes=7).test == 100
    for options, said in (
        ({"images": "many", "shape": "1,8,8"}, "--images 'many': write it like"),
        ({"images": "100", "shape": "8,8"}, "channels x height x width"),
        ({"images": "5", "shape": "1,8,8"}, "nothing is left to train"),
        ({"images": "0", "shape": "1,8,8"}, "0 training and 1 test images"),
    ):
        with pytest.raises(RecipeError, match=said):
            sizes(own, None, classes=2, **options)


def test_streamed_images_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image")
    fill(tmp_path, 12, 3)
    monkeypatch.setattr(Streamed, "__getitem__", lambda *_: pytest.fail("nothing is to be decoded for an estimate"))

    def folder(**words: Any) -> recipe.Recipe:
        return recipe_with(data={"name": "folder", "size": 8, "holdout": 2, **words})

    few = sizes(folder(), tmp_path)
    assert not few.streamed and few.memory() == (2 * few.train + few.test) * 3 * 8 * 8
    streamed = sizes(folder(stream=True), tmp_path)
    assert streamed == replace(few, streamed=True) and streamed.memory() == 0
    assert sizes(folder(crop="resized"), tmp_path).streamed
    many = {"images": "10000000,1000", "classes": 9}  # 4.6 TB at 224, and 2 GB at 8
    monkeypatch.setattr(base, "machine_memory", lambda: 16 * 10**9)
    assert sizes(folder(), tmp_path, **many, shape="3,224,224").streamed
    assert not sizes(folder(), tmp_path, **many).streamed
    assert not sizes(folder(stream=False), tmp_path, **many, shape="3,224,224").streamed
    assert sizes(recipe_with(data={"name": "tiny-imagenet", "size": 224, "holdout": 100})).streamed
    assert not sizes(recipe_with(data={"name": "npz", "holdout": 100}), None, **many, shape="3,224,224").streamed


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
def test_noise_has_the_shape_and_classes_of_the_data(train: int, test: int, classes: int) -> None:
    data = Sizes(100, 10, (2, 3, 4), classes).noise(train, test)
    assert (len(data.train), len(data.test), data.shape, data.num_classes) == (train, test, (2, 3, 4), classes)


# ---------------------------------------------------------------- measuring


def request(stage: int = 0, parsed: recipe.Recipe | None = None, **changes: Any) -> Request:
    options = {"stage": stage, "batch": 32, "steps": 2, "seconds": 5.0, **changes}
    return Request(recipe=parsed or recipe_with(), sizes=SMALL, **options)


def test_stages_are_measured_by_the_real_loop() -> None:
    measured = measure.measure(request(2, after=True))
    assert measured.batch == 32 and len(measured.steps) >= 2 and min(measured.steps) > 0
    assert measured.state_bytes > 1000 and measured.peak_bytes > 1e8
    assert measured.share > 0 and measured.validation_seconds > 0
    assert set(measured.after) == {"natural", "pgd-2"}


def test_a_request_and_its_answer_are_the_same_after_json() -> None:
    asked = request(1, before=True)
    assert Request.model_validate_json(asked.model_dump_json(exclude_defaults=True)) == asked
    answer = facts(before={"natural": AttackTime(seconds=0.1, bound=False)})
    assert Measurement.model_validate_json(answer.model_dump_json()) == answer


def test_the_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TimedRun(recipe_with(), tmp_path, SMALL.noise(256, 8))
    run.stamps, run.busy = [10.0, 11.0, 14.0], [0.0, 1.0, 6.0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert run.seconds() == [1.0, 3.0] and run.share() == 0.75


def test_a_stage_without_training_has_no_steps() -> None:
    stage = {"name": "prune", "pruner": {"name": "magnitude", "keep": "5%"}, "epochs": 0}
    measured = measure.measure(request(1, recipe_with(stages=[STAGES[0], stage]), before=True))
    assert measured.steps == [] and measured.once_seconds > 0 and "natural" in measured.before


def test_the_batch_of_a_process_is_split_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe has batches of 64: each of two processes has 32 images, in four parts."""
    lengths = set[int]()
    loss = PgdTraining.__call__

    def noted(self: Any, model: Any, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        lengths.add(len(x))
        return loss(self, model, x, *more, **named)

    monkeypatch.setattr(PgdTraining, "__call__", noted)
    data = {"name": "digits", "batch": 64, "holdout": 100}
    measure.measure(request(0, recipe_with(data=data, stages=[{**STAGES[0], "accumulate": 4}]), seconds=1e9))
    assert lengths == {8}


def test_processes_that_share_a_cpu_are_measured_with_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(stages.affinity, "usable", lambda: frozenset(range(12)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "OMP_NUM_THREADS" not in stages.environment(1)
    assert [stages.environment(devices)["OMP_NUM_THREADS"] for devices in (2, 5, 16)] == ["6", "2", "1"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "OMP_NUM_THREADS" not in stages.environment(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert stages.environment(4)["OMP_NUM_THREADS"] == "3"


def test_a_slow_step_is_measured_with_a_smaller_batch() -> None:
    assert measure.affordable(request(batch=64), 0.001)[0] == 64
    assert measure.affordable(request(batch=256, steps=5), 0.1) == (8, 5)
    assert measure.affordable(request(batch=256, steps=5), 100.0) == (4, 1)


@pytest.mark.parametrize(
    ("seconds", "whole"),
    [
        (lambda batch: 0.5 + 0.01 * batch, 0.5 + 0.01 * 64),  # a part is fixed, the rest grows with the images
        (lambda batch: 1.0, 64 / 4),  # noise: in proportion to the images, the most that it can be
        (lambda batch: 0.01 * batch**2, 64 / 4 * 0.16),
    ],
)
def test_two_smaller_batches_give_the_time_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, seconds: Any, whole: float
) -> None:
    steps = TimedRun.seconds
    monkeypatch.setattr(TimedRun, "seconds", lambda run: [seconds(run.recipe.data.batch)] * len(steps(run)))
    measured = measure.measure(request(0, batch=64, seconds=1e-9))
    assert measured.batch == 4 and measured.peak_bytes > 1e8
    assert measured.steps == [pytest.approx(whole)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRUNERS) - {"dense", "fixed"}))
def test_every_method_can_be_measured(name: str) -> None:
    parts = pipeline.parts(recipe_with().model_dump(mode="json")["stages"])
    laid_out = parts.equal({"name": name, "keep": 0.2}, RECIPE["objective"])  # type: ignore[arg-type]
    one = recipe_with(stages=laid_out)
    for number in range(len(laid_out)):
        measured = measure.measure(request(number, one))
        assert measured.steps or not one.stages[number].epochs


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_every_attack_can_be_measured(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    attack = ATTACKS[name]()
    seconds, bound = seconds_an_image(net, attack, torch.rand(4, 1, 8, 8), 4, 1e-6)
    assert 0 < seconds < 60
    assert bound == bool(parts(attack, 4))


def test_a_long_attack_is_measured_by_few_steps() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            logits: torch.Tensor = self.layer(x.flatten(1))
            return logits

    net = Counting()
    seconds_an_image(net, attacks.Pgd(steps=500), torch.rand(4, 1, 2, 2), 3, one_pass=1.0)
    assert net.calls < 20


# ---------------------------------------------------------------- summing


def facts(**changes: Any) -> Measurement:
    measured: dict[str, Any] = {
        "batch": 256,
        "device": "cpu",
        "steps": [0.1, 0.2, 0.3],
        "validation_seconds": 0.01,
        "epoch_seconds": 0.5,
        "watts": 100.0,
        "energy_by": "formula: ...",
        "base_bytes": 10**8,
        "peak_bytes": 3 * 10**8,
        "state_bytes": 10**6,
        "result_bytes": 10**5,
    }
    return Measurement(**{**measured, **changes})


def summed(measured: list[Measurement], devices: int = 1, **more: Any) -> dict[str, Any]:
    return stages.summed(recipe_with(), SMALL, measured, devices, Path(), 500.0, **more)


def test_times_add_up() -> None:
    evaluation = {"natural": AttackTime(seconds=0.001, bound=False), "aa": AttackTime(seconds=1.0, bound=True)}
    result = summed([facts(), facts(before=evaluation), facts(after=evaluation)])
    first = result["stages"][0]
    assert first["steps"] == math.ceil(1197 / 256) == 5
    assert first["seconds"] == pytest.approx(5 * 0.2 + 100 * 0.01 + 0.5)
    assert (first["low"], first["high"]) == (pytest.approx(5 * 0.15 + 1.5), pytest.approx(5 * 0.25 + 1.5))
    assert result["stages"][1]["seconds"] == pytest.approx(2 * first["seconds"])  # two epochs
    assert [row["seconds"] for row in result["evaluation"]] == pytest.approx([0.05, 25.0] * 2)
    assert [row["high"] for row in result["evaluation"]] == pytest.approx([0.05, 50.0] * 2)
    assert result["seconds"] == pytest.approx(4 * first["seconds"] + 2 * 25.05)
    assert result["energy"]["kwh"] == pytest.approx(65 / 1000 * result["seconds"] / 3600)
    assert result["energy"]["co2_g"] == pytest.approx(500 * result["energy"]["kwh"])
    assert result["needs"]["disk"] == 3 * 10**6 + 4 * 10**5
    assert summed([facts()] * 3, keep_states=4)["needs"]["disk"] == 5 * 10**6 + 4 * 10**5
    assert any("aa: fooled images leave early" in note for note in result["notes"])


def test_a_note_names_the_stages_that_were_measured_with_smaller_batches() -> None:
    result = summed([facts(batch=32), facts(), facts()])
    assert [row["scaled"] for row in result["stages"]] == [True, False, False]
    assert any("pretrain (32 images)" in note for note in result["notes"])


def test_several_devices_share_the_work() -> None:
    result = summed([facts(batch=128)] * 3, devices=2)
    assert result["stages"][0]["seconds"] == pytest.approx(5 * 0.2 + 100 * 0.01 / 2 + 0.5)
    assert result["energy"]["watts"] == 65 and result["needs"]["memory"] == 2 * (3 * 10**8 + SMALL.memory())
    assert summed([facts(batch=128, device="cuda")] * 3, devices=2)["energy"]["watts"] == 700


def test_too_little_memory_or_disk_is_a_warning_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "free_memory", lambda: 2 * 10**8)
    monkeypatch.setattr(stages, "free_disk", lambda folder: 10**6)
    memory, disk = summed([facts()] * 3)["warnings"]
    assert "--set stages.pretrain.accumulate=4" in memory and "300.2 MB" in memory
    assert "3.4 MB of disk space, 1.0 MB are free" in disk
    busy = summed([facts(share=0.4)] * 3)["notes"]
    assert any("the steps had 40% of its cores" in note for note in busy)


def test_measured_power_is_used() -> None:
    result = summed([facts(energy_by="codecarbon 3, measured CPU power")] * 3)
    assert result["energy"]["watts"] == 100 and result["energy"]["by"].startswith("codecarbon")
    several = summed([facts(batch=128, energy_by="codecarbon 3, measured CPU power")] * 3, devices=2)
    assert several["energy"]["watts"] == 65, (
        "one process was measured, and the machine's power is not twice that of one"
    )


def test_a_stage_that_fails_is_one_line() -> None:
    wrong = recipe_with(model={"name": "torchvision:nothing"})
    with pytest.raises(ModelError, match=r"stage 'pretrain' can't be measured: .*nothing"):
        stages.estimate(wrong, SMALL, display=Quiet())
    with pytest.raises(RecipeError, match="multiple of 3"):
        stages.estimate(recipe_with(), SMALL, devices=3)


def test_free_memory_and_disk_are_above_zero(tmp_path: Path) -> None:
    assert (stages.free_memory() or 0) > 10**6
    assert stages.free_disk(tmp_path / "not" / "there") > 0


# ---------------------------------------------------------------- the command


def one_stage(path: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump({**RECIPE, "stages": [{**STAGES[0], **changes}]}))
    return str(path)


def test_the_command_measures_and_leaves_nothing(harp: Harp, tmp_path: Path) -> None:
    name = one_stage(tmp_path / "r.yaml")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = harp("estimate", name, "--set", "data.name=cifar10", "--steps", "2")
    assert code == 0, err
    assert all(text in out for text in ("pretrain", "natural", "pgd-2", "memory", "disk", "kWh", "475 g/kWh"))
    assert sorted(tmp_path.rglob("*")) == before, "nothing may be written"


def test_wrong_options_are_refused_in_one_line(harp: Harp, tmp_path: Path) -> None:
    name = one_stage(tmp_path / "r.yaml")
    refused(harp, "estimate", said="give a recipe")
    refused(harp, "estimate", name, "--shape", "3", said="channels x height x width")
    refused(harp, "estimate", name, "--steps", "0", said="at least 1")
    for option in ("--plan", "--hardware", "--precision", "--utilisation"):
        refused(harp, "estimate", option, "paper", said="are gone: run `harp estimate RECIPE`")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children of a process are looked up in /proc")
def test_ctrl_c_ends_the_measuring_process_too(tmp_path: Path) -> None:
    name = one_stage(tmp_path / "r.yaml")
    command = [sys.executable, "-m", "harp", "estimate", name]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 120
    while not listed.read_text().split() and time.monotonic() < until:
        time.sleep(0.001)  # it comes while the process is being started
    (child,) = listed.read_text().split()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert not Path(f"/proc/{child}").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_estimate_is_right_within_a_factor_of_two(harp: Harp, tmp_path: Path) -> None:
    """By processor time: that is the same on a machine that others use too."""
    short = [f"stages.{stage}.epochs=2" for stage in ("pretrain", "prune", "finetune")]
    changes = [word for change in short for word in ("--set", change)]
    code, out, err = harp("estimate", "demo", "--json", *changes)
    assert code in (0, PROBLEM), err
    estimate = json.loads(out)
    assert json_keys("estimate") <= estimate.keys()
    share = statistics.fmean(row["share"] for row in estimate["stages"])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "harp", "run", "demo", *changes]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode in FINISHED
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    estimated = estimate["seconds"] * share * torch.get_num_threads()
    print(f"estimated {estimated:.1f} s of processor time, took {spent:.1f} s: ratio {estimated / spent:.2f}")
    assert 0.5 < estimated / spent < 2
