"""Estimates: the real loop on noise, sums that add up, counts that agree with arithmetic, and nothing left behind."""

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
from harp.errors import ModelError, RecipeError
from harp.experiments import recipe, study
from harp.experiments import stages as pipeline
from harp.experiments.compare import Comparison
from harp.experiments.estimate import attacking, counting, hardware, machine, measuring, passes, plan, stages, trial
from harp.experiments.estimate.known import Sizes, sizes
from harp.pruning.methods import PRUNERS
from harp.system.progress import Quiet
from harp.training import objectives
from harp.training.objectives import PgdTraining
from support.commands import FINISHED, RECIPE, STUDY, Harp, refused
from support.pictures import fill

SMALL = Sizes(1297, 500, (1, 8, 8), 10)


def made(**changes: Any) -> recipe.Recipe:
    return recipe.parse({**RECIPE, **changes})


# ---------------------------------------------------------------- how much data there is


def test_data_is_known_without_its_files() -> None:
    of = {
        name: sizes(made(data={"name": name, "batch": 8, "holdout": 100})) for name in ("cifar10", "imagenet", "svhn")
    }
    assert of["cifar10"] == Sizes(50_000, 10_000, (3, 32, 32), 10)
    assert of["imagenet"].streamed and of["imagenet"].memory() == 0
    assert of["svhn"].trained(made(data={"name": "svhn", "holdout": 0.1})) == 73_257 - 7_326
    assert sizes(made(data={"name": "imagenet", "size": 64, "holdout": 100})).shape == (3, 64, 64)


def test_data_of_ones_own_by_flags() -> None:
    own = made(data={"name": "folder", "holdout": 10})
    found = sizes(own, None, images="1000,200", shape="3,64,64", classes=7)
    assert found == Sizes(1000, 200, (3, 64, 64), 7)
    assert sizes(own, None, images="1000", shape="3x64x64", classes=7).test == 100
    for flags, said in (
        ({"images": "many", "shape": "1,8,8"}, "--images 'many': write it like"),
        ({"images": "100", "shape": "8,8"}, "channels, height and width"),
        ({"images": "5", "shape": "1,8,8"}, "nothing is left to train"),
        ({"images": "0", "shape": "1,8,8"}, "0 \\+ 1 images"),
    ):
        with pytest.raises(RecipeError, match=said):
            sizes(own, None, classes=2, **flags)


def test_streamed_images_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image")
    fill(tmp_path, 12, 3)
    monkeypatch.setattr(Streamed, "__getitem__", lambda *_: pytest.fail("nothing is to be decoded for an estimate"))

    def folder(**words: Any) -> recipe.Recipe:
        return made(data={"name": "folder", "size": 8, "holdout": 2, **words})

    few = sizes(folder(), tmp_path)
    assert not few.streamed and few.memory() == (2 * few.train + few.test) * 3 * 8 * 8
    streamed = sizes(folder(stream=True), tmp_path)
    assert streamed == replace(few, streamed=True) and streamed.memory() == 0
    assert sizes(folder(crop="resized"), tmp_path).streamed
    many = {"images": "10000000,1000", "classes": 9}  # 4.6 TB at 224, and 2 GB at 8
    monkeypatch.setattr(base, "memory_size", lambda: 16 * 10**9)
    assert sizes(folder(), tmp_path, **many, shape="3,224,224").streamed
    assert not sizes(folder(), tmp_path, **many).streamed
    assert not sizes(folder(stream=False), tmp_path, **many, shape="3,224,224").streamed
    assert sizes(made(data={"name": "tiny-imagenet", "size": 224, "holdout": 100})).streamed
    assert not sizes(made(data={"name": "npz", "holdout": 100}), None, **many, shape="3,224,224").streamed


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
def test_noise_is_of_the_datas_kind(train: int, test: int, classes: int) -> None:
    found = Sizes(100, 10, (2, 3, 4), classes).noise(train, test)
    assert (len(found.train), len(found.test), found.shape, found.num_classes) == (train, test, (2, 3, 4), classes)


# ---------------------------------------------------------------- counting


def test_operations_are_those_of_the_formulas() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 5))
    macs = 64 * 4 * 27 + 5 * 256
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    with counting.Counter() as forward:
        loss = net(x).sum()
    assert forward.total == 2 * 2 * macs
    with counting.Counter() as backward:
        loss.backward()
    assert backward.total == 2 * forward.total


@pytest.fixture(scope="module")
def counted() -> passes.Passes:
    return passes.Passes()


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ({"name": "natural"}, 3),
        ({"name": "pgd", "steps": 10}, 23),
        ({"name": "pgd", "steps": 4}, 11),
        ({"name": "trades", "steps": 3}, 2 * 3 + 1 + 6),
        ({"name": "free", "replays": 4}, 12),
    ],
)
def test_passes_of_a_step(counted: passes.Passes, objective: dict[str, Any], expected: int) -> None:
    one = made(objective=objective)
    assert counted.of_step(one, one.stages[0]) == pytest.approx(expected, rel=0.03)  # images need no gradient


def test_masks_cost_nothing_and_attacks_what_they_ask(counted: passes.Passes) -> None:
    one = made()
    assert counted.of_step(one, one.stages[2]) == counted.of_step(one, one.stages[0])
    assert counted.of_attack(attacks.Pgd(steps=7)) == pytest.approx(15, rel=0.03)
    assert counted.of_attack(None) == 1
    assert counted.of_attack(attacks.AutoAttack()) > 8000  # as if nobody was fooled


def test_shared_stages_count_once(counted: passes.Passes) -> None:
    tally = plan.Tally(counted)
    first, added = tally.count(made())
    assert added == 3
    longer = [*RECIPE["stages"][:2], {**RECIPE["stages"][2], "epochs": 2}]  # type: ignore[index]
    second, added = tally.count(made(stages=longer))
    assert added == 1 and 0 < second < first
    assert tally.count(made(name="other")) == (0, 0)


def test_the_runs_of_a_plan_are_those_of_a_comparison(tmp_path: Path) -> None:
    planned = study.parse({**STUDY, "methods": ["harp", "magnitude", "hydra+lamp", "flying-bird"], "seeds": [0, 1]})
    entries = [entry for entry in Comparison(planned, tmp_path).entries if entry.recipe.seed == 0]
    ours = {one.identity(len(one.stages)) for one in plan.laid_out(planned)}
    assert ours == {entry.recipe.identity(len(entry.recipe.stages)) for entry in entries}


def test_cut_channels_do_not_count(counted: passes.Passes) -> None:
    cut = made(units={"kind": "channels"})
    whole = counted.operations(cut, SMALL, 1)
    assert counted.operations(cut, SMALL, 2) == pytest.approx(0.05 * whole)
    assert counted.operations(made(), SMALL, 2) == whole


def test_a_plan_on_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        plan.PLANS, "tiny", lambda: [plan.Part("a", lambda: [made()], 3), plan.Part("b", lambda: [made(seed=1)], 1)]
    )
    found = plan.estimate("tiny", "a100x8", utilisation=0.5, intensity=100.0)
    flop = found["parts"][0]["flop"]
    assert found["parts"][0]["gpu_hours"] == pytest.approx(flop / (312e12 * 0.5) / 3600)
    assert found["total"]["days"] == pytest.approx(found["total"]["gpu_hours"] / 8 / 24)
    assert found["total"]["co2_g"] == pytest.approx(found["total"]["gpu_hours"] * 0.4 * 100)
    assert found["parts"][0]["runs"] == 3 and found["parts"][0]["stages"] == 9
    with pytest.raises(RecipeError, match="unknown plan"):
        plan.estimate("thesis", "a100")


def test_the_papers_plan_is_made_of_what_is_shipped() -> None:
    parts = plan.paper()
    assert len(parts) > 15 and sum(part.seeds for part in parts) > 40
    free = parts[-1].recipes()[0]
    assert free.data.name == "imagenet" and objectives.OBJECTIVES["free"]().replays == 4
    assert [stage.epochs for stage in free.stages if stage.pruner["name"] != "dense"] == [5, 25]


def test_hardware_by_name_and_by_file(tmp_path: Path) -> None:
    eight = hardware.hardware("A100x8")
    assert (eight.count, eight.precision) == (8, "bf16")
    assert eight.sustained == pytest.approx(312e12 * hardware.UTILISATION["bf16"])
    assert hardware.hardware("v100").precision == "f32"
    (tmp_path / "mine.yaml").write_text("{f32: 10, watts: 200, count: 4}")
    mine = hardware.hardware(str(tmp_path / "mine.yaml"), "f32", 0.3)
    assert (mine.gpu.name, mine.count, mine.sustained) == ("mine", 4, pytest.approx(3e12))
    for text, more, said in (
        ("a1000", {}, "did you mean 'a100'"),
        ("v100", {"precision": "bf16"}, "does not compute in bf16"),
        ("a100", {"precision": "f16"}, "unknown precision"),
        ("a100x0", {}, "at least 1"),
        ("a100", {"utilisation": 1.5}, "0 to 1"),
    ):
        with pytest.raises(RecipeError, match=said):
            hardware.hardware(text, **more)
    for content in ("{f32: 10}", "[1]", "{f32: -1, watts: 3}", "{f32: 1, watts: 3, count: 1.5}"):
        (tmp_path / "mine.yaml").write_text(content)
        with pytest.raises(RecipeError, match=r"mine\.yaml"):
            hardware.hardware(str(tmp_path / "mine.yaml"))


# ---------------------------------------------------------------- measuring


def wish(stage: int = 0, **changes: Any) -> measuring.Wish:
    told = {"stage": stage, "batch": 32, "sizes": SMALL, "steps": 2, "seconds": 5.0, "before": False, "after": False}
    return measuring.Wish(**{**told, **changes})


def test_stages_are_measured_by_the_real_loop() -> None:
    found = measuring.measure(made(), wish(2, after=True))
    assert found["batch"] == 32 and len(found["steps"]) >= 2 and min(found["steps"]) > 0
    assert found["state_bytes"] > 1000 and found["peak_bytes"] > 1e8
    assert found["share"] > 0 and found["validation_seconds"] > 0
    assert set(found["after"]) == {"natural", "pgd-2"}


def test_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = trial.Stopwatch("prune")
    watch.stamps, watch.busy = [10.0, 11.0, 14.0], [0.0, 1.0, 6.0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert watch.seconds() == [1.0, 3.0] and watch.share() == 0.75


def test_what_is_found_without_training_has_no_steps() -> None:
    stage = {"name": "prune", "pruner": {"name": "magnitude", "keep": "5%"}, "epochs": 0}
    found = measuring.measure(made(stages=[RECIPE["stages"][0], stage]), wish(1, before=True))  # type: ignore[index]
    assert found["steps"] == [] and found["once_seconds"] > 0 and "natural" in found["before"]


def test_the_batch_of_a_process_is_split_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a recipe's batches of 64 two processes have 32 each, in the four parts that are asked for."""
    parts = set[int]()
    loss = PgdTraining.__call__

    def noted(self: Any, model: Any, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        parts.add(len(x))
        return loss(self, model, x, *more, **named)

    monkeypatch.setattr(PgdTraining, "__call__", noted)
    data = {**RECIPE["data"], "batch": 64}  # type: ignore[dict-item]
    one = made(data=data, stages=[{**RECIPE["stages"][0], "accumulate": 4}])  # type: ignore[index]
    measuring.measure(one, wish(0, seconds=1e9))
    assert parts == {8}


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


@given(st.floats(0.01, 10), st.floats(0.001, 1))
def test_what_is_fixed_and_what_grows_are_told_apart(fixed: float, each: float) -> None:
    steps = [(1, 10, fixed + 10 * each), (1, 20, fixed + 20 * each), (4, 96, 4 * fixed + 96 * each)]
    assert measuring.solved(steps) == (pytest.approx(fixed, rel=1e-3), pytest.approx(each, rel=1e-3))


def test_no_time_is_negative() -> None:
    assert measuring.solved([(1, 10, 2.0), (1, 20, 1.0)])[0] == 0.0
    fixed, each = measuring.solved([(1, 10, 1.0), (1, 20, 3.0)])
    assert fixed == 0.0 and each > 0


def test_too_slow_a_step_is_measured_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measuring.affordable(wish(batch=64), 0.001)[0] == 64
    batch, steps = measuring.affordable(wish(batch=256, steps=5), 0.1)
    assert batch == 8 and steps == 5
    assert measuring.affordable(wish(batch=256, steps=5), 100.0) == (2, 2)
    one, begin = made(), measuring.run_of

    def timed(*arguments: Any, batch: int, steps: int, watch: Any, objective: Any = None, **rest: Any) -> Any:
        _, passes = measuring.passes_of(objective or one.stage_objective(one.stages[0]))
        watch.seconds = lambda: [0.5 + 0.01 * passes * batch] * steps
        return begin(*arguments, batch=batch, steps=steps, watch=watch, objective=objective, **rest)

    monkeypatch.setattr(measuring, "run_of", timed)
    monkeypatch.setattr(measuring, "seconds_of_a_pass", lambda made, wish: 1e-4)
    found = measuring.measure(one, wish(0, batch=64, seconds=1e-3))
    assert found["batch"] == 2 and found["peak_batch"] == 64 and found["bytes_an_image"] >= 0
    _, each = measuring.passes_of(one.stage_objective(one.stages[0]))
    assert found["scale"] == pytest.approx((0.5 + 0.01 * each * 64) / (0.5 + 0.01 * each * 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRUNERS) - {"dense", "fixed"}))
def test_every_method_can_be_measured(name: str) -> None:
    parts = pipeline.parts(made().model_dump(mode="json")["stages"])
    laid_out = pipeline.stages({"name": name, "keep": 0.2}, *parts, RECIPE["objective"])  # type: ignore[arg-type]
    one = made(stages=laid_out)
    for number in range(len(laid_out)):
        found = measuring.measure(one, wish(number))
        assert found["steps"] or not one.stages[number].epochs


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_every_attack_has_its_price(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    attack = ATTACKS[name]()
    each, bound = attacking.seconds_an_image(net, attack, torch.rand(4, 1, 8, 8), 4, 1e-6)
    assert 0 < each < 60
    assert bound == bool(attacking.parts(attack, 4))


def test_few_steps_stand_for_many() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            answer: torch.Tensor = self.layer(x.flatten(1))
            return answer

    net = Slow()
    attacking.seconds_an_image(net, attacks.Pgd(steps=500), torch.rand(4, 1, 2, 2), 3, passing=1.0)
    assert net.calls < 20


# ---------------------------------------------------------------- summing


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "batch": 256,
        "device": "cpu",
        "steps": [0.1, 0.2, 0.3],
        "share": 1.0,
        "validation_seconds": 0.01,
        "epoch_seconds": 0.5,
        "watts": 100.0,
        "energy_by": "formula: ...",
        "base_bytes": 10**8,
        "peak_bytes": 3 * 10**8,
        "state_bytes": 10**6,
        "result_bytes": 10**5,
        "operations": 10**9,
        **changes,
    }


def summed(found: list[dict[str, Any]], devices: int = 1, **more: Any) -> dict[str, Any]:
    return stages.summed(made(), SMALL, found, devices, Path(), 500.0, **more)


def test_times_add_up() -> None:
    evaluation = {"natural": {"seconds": 0.001, "bound": False}, "aa": {"seconds": 1.0, "bound": True}}
    found = summed([facts(), facts(before=evaluation), facts(after=evaluation)])
    first = found["stages"][0]
    assert first["steps"] == math.ceil(1197 / 256) == 5
    assert first["seconds"] == pytest.approx(5 * 0.2 + 100 * 0.01 + 0.5)
    assert (first["low"], first["high"]) == (pytest.approx(5 * 0.15 + 1.5), pytest.approx(5 * 0.25 + 1.5))
    assert first["gflops"] == pytest.approx(256 / 0.2)
    assert found["stages"][1]["seconds"] == pytest.approx(2 * first["seconds"])  # two epochs
    assert [row["seconds"] for row in found["evaluation"]] == pytest.approx([0.05, 25.0] * 2)
    assert [row["high"] for row in found["evaluation"]] == pytest.approx([0.05, 50.0] * 2)
    assert found["seconds"] == pytest.approx(4 * first["seconds"] + 2 * 25.05)
    assert found["energy"]["kwh"] == pytest.approx(65 / 1000 * found["seconds"] / 3600)
    assert found["energy"]["co2_g"] == pytest.approx(500 * found["energy"]["kwh"])
    assert found["needs"]["disk"] == 3 * 10**6 + 4 * 10**5
    assert summed([facts()] * 3, keep_states=4)["needs"]["disk"] == 5 * 10**6 + 4 * 10**5
    assert any("aa: fooled images leave early" in note for note in found["notes"])


def test_smaller_batches_are_scaled_and_said() -> None:
    small = facts(batch=32, bytes_an_image=10**6, peak_batch=56)
    found = summed([small, facts(), facts()])
    row = found["stages"][0]
    assert row["step"] == pytest.approx(8 * 0.2) and row["scaled"]
    assert row["memory"] == 3 * 10**8 + 200 * 10**6 + SMALL.memory()
    assert any("pretrain (32 images)" in note for note in found["notes"])


def test_several_devices_share_the_work() -> None:
    found = summed([facts(batch=128)] * 3, devices=2)
    assert found["stages"][0]["seconds"] == pytest.approx(5 * 0.2 + 100 * 0.01 / 2 + 0.5)
    assert found["energy"]["watts"] == 65 and found["needs"]["memory"] == 2 * (3 * 10**8 + SMALL.memory())
    assert summed([facts(batch=128, device="cuda")] * 3, devices=2)["energy"]["watts"] == 700


def test_what_does_not_fit_is_said_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * 10**8)
    monkeypatch.setattr(machine, "free_disk", lambda folder: 10**6)
    memory, disk = summed([facts()] * 3)["warnings"]
    assert "--set stages.pretrain.accumulate=4" in memory and "300.2 MB" in memory
    assert "3.4 MB of disk and 1.0 MB are free" in disk
    busy = summed([facts(share=0.4)] * 3)["notes"]
    assert any("the steps had 40% of its cores" in note for note in busy)


def test_measured_power_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = summed([facts(energy_by="codecarbon 3, measured CPU power")] * 3)
    assert found["energy"]["watts"] == 100 and found["energy"]["by"].startswith("codecarbon")
    several = summed([facts(batch=128, energy_by="codecarbon 3, measured CPU power")] * 3, devices=2)
    assert several["energy"]["watts"] == 65, (
        "one process was measured, and the machine's power is not twice that of one"
    )


def test_a_stage_that_fails_is_one_line() -> None:
    wrong = made(model={"name": "torchvision:nothing"})
    with pytest.raises(ModelError, match=r"stage 'pretrain' can't be measured: .*nothing"):
        stages.estimate(wrong, SMALL, display=Quiet())
    with pytest.raises(RecipeError, match="multiple of 3"):
        stages.estimate(made(), SMALL, devices=3)


def test_there_is_memory_and_disk_here(tmp_path: Path) -> None:
    assert (machine.free_memory() or 0) > 10**6
    assert machine.free_disk(tmp_path / "not" / "there") > 0


# ---------------------------------------------------------------- the command


def one_stage(path: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump({**RECIPE, "stages": [{**RECIPE["stages"][0], **changes}]}))  # type: ignore[index]
    return str(path)


def test_the_command_measures_and_leaves_nothing(harp: Harp, tmp_path: Path) -> None:
    name = one_stage(tmp_path / "r.yaml")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = harp("estimate", name, "--set", "data.name=cifar10", "--steps", "2")
    assert code == 0, err
    assert all(text in out for text in ("pretrain", "natural", "pgd-2", "memory", "disk", "kWh", "475 g/kWh"))
    assert sorted(tmp_path.rglob("*")) == before, "nothing may be written"


def test_words_of_the_command(harp: Harp, tmp_path: Path) -> None:
    name = one_stage(tmp_path / "r.yaml")
    refused(harp, "estimate", said="give a recipe or --plan")
    refused(harp, "estimate", name, "--shape", "3", said="channels, height and width")
    refused(harp, "estimate", name, "--steps", "0", said="at least 1")
    refused(harp, "estimate", "--plan", "paper", "--hardware", "abacus", said="unknown GPU")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children of a process are looked up in /proc")
def test_ctrl_c_is_clean(tmp_path: Path) -> None:
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
    assert code == 0, err
    told = json.loads(out)
    share = statistics.fmean(row["share"] for row in told["stages"])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "harp", "run", "demo", *changes]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode in FINISHED
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    estimated = told["seconds"] * share * torch.get_num_threads()
    print(f"estimated {estimated:.1f} s of processor time, took {spent:.1f} s: ratio {estimated / spent:.2f}")
    assert 0.5 < estimated / spent < 2
