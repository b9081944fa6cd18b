"""Nothing is lost: signals, time limits and kill -9 at any moment, and the end is the same to the bit."""

import errno
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from harp.cli import options
from harp.errors import TIME_IS_UP, CheckpointError, DiskError, Interrupted
from harp.experiments import recipe
from harp.experiments.run import Run
from harp.system import files, interrupt
from harp.system.distributed.launcher import SUPERVISOR
from harp.system.interrupt import Stop
from harp.system.tensors import load_state, load_tensors, save_state
from harp.training import metrics
from support.commands import FINISHED, RECIPE, Harp
from support.paths import ROOT
from support.survival import artefact, assert_equal, assert_whole, finish, wait_for

STAGES = [
    {"name": "pretrain", "pruner": "dense", "epochs": 2},
    {"name": "prune", "pruner": {"name": "harp", "keep": "5%"}, "epochs": 3},
    {"name": "finetune", "pruner": "fixed", "epochs": 2, "optimizer": {"lr": 0.01}},
]


def command(folder: Path, *words: str) -> list[str]:
    (folder / "r.yaml").write_text(yaml.safe_dump({**RECIPE, "stages": STAGES}))
    # --minutes 0 saves the state at every step, so that a kill can hit every moment of a save
    return [sys.executable, "-m", "harp", "run", str(folder / "r.yaml"), "--out", str(folder / "runs"), *words]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The artefact of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    finish(command(folder))
    return artefact(folder)


# The command, which is sent a signal after the first epoch of a stage: from outside it could be over before.
SIGNALLED = """
import os, sys
from harp.training import metrics
from harp.cli import main

stage, number, *sys.argv[1:] = sys.argv[1:]
write = metrics.MetricsFile.write

def signalled(log, record):
    write(log, record)
    if log.path.parent.name.endswith(f"-{stage}"):
        os.kill(os.getpid(), int(number))

metrics.MetricsFile.write = signalled
main()
"""

# The command, which is sent one while it loads torch.
PREEMPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGUSR2)

sys.meta_path.insert(0, Finder())
from harp.cli import main
main()
"""


# The command, which is killed in its tenth save of a stage: the new state is written and not yet in its place.
KILLED = """
import os, signal, sys
from harp.cli import main

stage, *sys.argv[1:] = [*sys.argv[1:], "--minutes", "0"]
replace, saves = os.replace, []

def killed(source, target):
    if str(source).endswith(".tmp") and str(target).endswith(f"-{stage}/state.pt"):
        saves.append(target)
        if len(saves) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = killed
main()
"""


def scripted(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command by a script of ours."""
    python, _, _, *rest = command(folder)
    return subprocess.run([python, "-c", script, *words, *rest], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("number", "stage", "code", "cause"),
    [
        pytest.param(signal.SIGINT, "pretrain", 130, "Ctrl-C", marks=pytest.mark.slow),
        (signal.SIGUSR1, "prune", 75, "SIGUSR1"),
    ],
)
def test_a_stopped_run_says_how_to_continue_and_continues(
    tmp_path: Path, straight: dict[str, torch.Tensor], number: signal.Signals, stage: str, code: int, cause: str
) -> None:
    stopped = scripted(SIGNALLED, tmp_path, stage, str(int(number)))
    assert stopped.returncode == code, stopped.stderr
    assert f"the state is saved ({cause}). Go on with the same command: harp run" in stopped.stderr
    assert list(tmp_path.glob(f"runs/stages/*-{stage}/state.pt"))
    finish(command(tmp_path))
    assert_equal(artefact(tmp_path), straight)


def test_a_stop_before_the_first_state(tmp_path: Path) -> None:
    """A job that is preempted while it loads modules and data is to be queued again like any other."""
    stopped = scripted(PREEMPTED, tmp_path)
    assert stopped.returncode == 75, stopped.stderr
    assert "stopped by SIGUSR2; nothing is lost. Go on with the same command: harp run" in stopped.stderr


def test_a_run_killed_during_a_save_ends_with_the_same_bits(
    tmp_path: Path, here: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process, which goes on
    assert scripted(KILLED, tmp_path, "prune").returncode == -signal.SIGKILL
    (stage,) = tmp_path.glob("runs/stages/*-prune")
    state = load_state(stage / "state.pt")
    assert state["epoch"] > 0 and state["step"] > 0, "in the middle of the training"
    assert list(stage.glob(".state.pt.*.tmp"))
    assert_whole(tmp_path / "runs")
    go_on(tmp_path)
    assert_equal(artefact(tmp_path), here)
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.name.startswith((".", "state"))]


@pytest.mark.slow
def test_a_run_killed_repeatedly_ends_with_the_same_bits(tmp_path: Path, straight: dict[str, torch.Tensor]) -> None:
    delays = random.Random(0)
    for attempt in range(4):
        process = subprocess.Popen(command(tmp_path, "--minutes", "0"), stderr=subprocess.PIPE, text=True)
        wait_for(tmp_path, f"runs/stages/*-{['pretrain', 'prune', 'prune', 'finetune'][attempt]}/state.pt", process)
        time.sleep(delays.random() * 0.3)
        process.kill()
        process.communicate()
        assert_whole(tmp_path / "runs")
    finish(command(tmp_path))
    assert_equal(artefact(tmp_path), straight)
    assert not list((tmp_path / "runs").rglob("state*.pt"))
    assert not list((tmp_path / "runs").rglob(".*")) and not list((tmp_path / "runs").rglob("*.lock"))
    assert_whole(tmp_path / "runs")


def test_files_left_by_a_kill_after_a_stage_are_removed_by_the_next_run(tmp_path: Path) -> None:
    """Between the stage's last file and its tidying up there is a moment, and a kill may hit it."""
    go_on(tmp_path)
    (stage,) = (tmp_path / "runs" / "stages").glob("*-prune")
    left = [stage / "state.pt", stage / "state.1.pt", stage.with_name(f"{stage.name}.lock")]
    for path in left:
        path.write_bytes(b"left behind")
    dead = subprocess.Popen(["true"])
    dead.wait()
    temporary = stage / f".state.pt.{files.HOST}.{dead.pid}.tmp"
    temporary.write_bytes(b"half of a state")
    go_on(tmp_path)
    assert not [path for path in (*left, temporary) if path.exists()]


def test_stages_run_one_by_one_equal_a_single_run(tmp_path: Path, here: dict[str, torch.Tensor]) -> None:
    """Nothing but files passes from stage to stage: a run that ends between two of them loses nothing."""
    for count in range(1, len(STAGES) + 1):
        folder = go_on(tmp_path, stages=count)
    assert_equal(load_tensors(folder / "model.safetensors")[0], here)


# ---------------------------------------------------------------- time limits


def go_on(folder: Path, stop: Stop | None = None, stages: int = len(STAGES)) -> Path:
    return Run(recipe.parse({**RECIPE, "stages": STAGES[:stages]}), folder / "runs", stop=stop).execute().folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The artefact of a run in this process, whose number of threads may be another."""
    folder = tmp_path_factory.mktemp("here")
    go_on(folder)
    return artefact(folder)


def test_a_run_that_is_out_of_time_repeatedly_ends_with_the_same_bits(
    tmp_path: Path, here: dict[str, torch.Tensor]
) -> None:
    """However little time there is, each call takes the training a step further."""
    places = []
    for _ in range(9):  # over the end of an epoch
        with pytest.raises(Interrupted, match=r"stopped in epoch \d, step \d; the state is saved") as caught:
            go_on(tmp_path, Stop(1e-9))
        assert caught.value.signal == TIME_IS_UP
        places.append(str(caught.value))
    assert len(set(places)) == 9
    assert any("epoch 2, step 0" in place for place in places)
    go_on(tmp_path)
    assert_equal(artefact(tmp_path), here)


def test_every_long_command_has_a_time_limit(harp: Harp, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({**RECIPE, "stages": STAGES}))
    prune = ["prune", "tinynet", "--data", "digits", "--keep", "5%", "--epsilon", "0.1", "--pretrain", "1"]
    compare = ["compare", "r.yaml", "--methods", "magnitude", "--keep", "10%"]
    for words in (["run", "r.yaml"], prune, compare):
        code, out, err = harp(*words, "--max-minutes", "0.0001")
        assert code == 75, err
        assert out == ""
        assert "(its time is over). Go on with the same command: harp " in err
    assert harp("run", "r.yaml")[0] in FINISHED
    (folder,) = Path("runs").glob("tiny-*")
    evaluate = ["evaluate", str(folder), "--attack", "pgd-3", "--examples", "40"]
    code, _, err = harp(*evaluate, "--max-minutes", "0.0001")
    assert code == 75, err
    assert harp(*evaluate)[0] in (0, 1)  # 1: finished, with a check that found something
    for wrong in ("0", "-1", "nan"):
        code, _, err = harp("run", "r.yaml", "--max-minutes", wrong)
        assert code == 2 and "minutes: give more than 0" in err
    code, _, err = harp(*compare, "--launcher", "slurm", "--max-minutes", "3")
    assert code == 2 and "--time=" in err


def test_the_time_counts_from_the_start_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes that were started together it counts from the start of the one that started them."""
    earliest = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen(["sleep", "60"]) as first:
        latest = time.clock_gettime(time.CLOCK_BOOTTIME)
        stopped = SimpleNamespace(CLOCK_BOOTTIME=0, clock_gettime=lambda _: latest + 5, monotonic=lambda: 1000.0)
        monkeypatch.setattr(options, "time", stopped)
        before = options.start_time()
        monkeypatch.setenv(SUPERVISOR, str(first.pid))
        tick = 2 / os.sysconf("SC_CLK_TCK")  # the system counts in these
        assert 1000 - (latest + 5 - earliest) - tick <= options.start_time() <= 1000 - 5 + tick
        assert before < options.start_time()
        monkeypatch.setenv(SUPERVISOR, "0")  # a system that doesn't tell
        assert options.start_time() == 1000
        first.kill()


# ---------------------------------------------------------------- states of others, damage, divergence


def interrupted(folder: Path) -> Path:
    """A run that was stopped in its first stage."""
    with pytest.raises(Interrupted):
        go_on(folder, Stop(1e-9))
    (path,) = (folder / "runs" / "stages").glob("*-pretrain/state.pt")
    return path


def test_a_damaged_state_falls_back_to_the_state_before(
    tmp_path: Path, here: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path)
    path = interrupted(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    go_on(tmp_path)
    assert f"{path} is damaged" in caplog.text
    assert "going on from the state before" in caplog.text
    assert_equal(artefact(tmp_path), here)
    assert not list(tmp_path.rglob("state*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": "0123-prune"}, r"is a state of 0123-prune, not of \w+-pretrain: delete it to start anew"),
        ({"format": 99, "harp": "9.9"}, r"was written by harp 9\.9, whose states .* can't read"),
        (
            {"model": {}},
            r"the saved state is of another model, pruner or optimiser .*: delete it to start the stage anew",
        ),
        ({"optimizer": None}, r"the saved state is of another model, pruner or optimiser"),
    ],
)
def test_states_of_other_trainings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = interrupted(tmp_path)
    save_state(path, {**load_state(path), **change})
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        go_on(tmp_path)
    assert path.read_bytes() == before


def test_the_error_of_a_divergence_says_how_to_continue(harp: Harp, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({**RECIPE, "stages": STAGES[:1]}))
    changes = ["--set", "stages.pretrain.optimizer.lr=1e30"]
    code, _, err = harp("run", "r.yaml", "--minutes", "0", *changes)
    assert code == 2
    line = err.strip().splitlines()[-1]
    assert "became" in line and " in epoch 1, step 2, at learning rate 9.75528e+29: " in line
    assert "Last good state: " in line
    assert "Train this stage anew with --set stages.pretrain.optimizer.lr=3e+29" in line


def test_a_full_disk_does_not_end_a_training(
    tmp_path: Path, here: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither states nor metrics can be written until the pruning is done; only states are lost."""
    from harp.system import files, states

    full = [True]
    save, write = states.States.save, files.write_text

    def refuse(call: Any) -> Any:
        def called(*arguments: Any) -> None:
            if full[0]:
                raise DiskError("can't write it: No space left on device", full=True)
            call(*arguments)

        return called

    monkeypatch.setattr(states.States, "save", refuse(save))
    monkeypatch.setattr(metrics.files, "write_text", refuse(write))
    finish = Run.train_stage

    def train_stage(self: Run, number: int, *arguments: Any) -> None:
        full[0] = number == 1  # while pruning
        finish(self, number, *arguments)

    from harp.experiments import artefact as artefacts

    kept = artefacts.save

    def room(*arguments: Any) -> None:
        full[0] = False
        kept(*arguments)

    monkeypatch.setattr(Run, "train_stage", train_stage)
    monkeypatch.setattr(artefacts, "save", room)
    put, waits = Run.write, list[float]()

    def write_outcome(self: Run, outcome: Any) -> None:
        if not waits:  # and once more, at the very end
            raise DiskError("can't write it: No space left on device", full=True)
        put(self, outcome)

    monkeypatch.setattr(Run, "write", write_outcome)
    monkeypatch.setattr(interrupt.time, "sleep", waits.append)
    go_on(tmp_path)
    assert waits == [1.0]
    assert_equal(artefact(tmp_path), here)
    assert caplog.text.count("training goes on") == 3
    assert caplog.text.count("it is written with the next epoch") == 3


# ---------------------------------------------------------------- metrics


def test_metrics_have_every_epoch_once_and_no_damaged_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = metrics.MetricsFile(tmp_path)
    for epoch in (1, 2, 3):
        log.write({"epoch": epoch, "loss": float(epoch)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "lo')
    again = metrics.MetricsFile(tmp_path)  # the state was of the second epoch
    for epoch in (3, 4):
        again.write({"epoch": epoch, "loss": 10.0 * epoch})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"epoch": 1, "loss": 1.0},
        {"epoch": 2, "loss": 2.0},
        {"epoch": 3, "loss": 30.0},
        {"epoch": 4, "loss": 40.0},
    ]
    assert "a damaged line" in caplog.text
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_metrics_that_a_full_disk_refused_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = metrics.MetricsFile(tmp_path)
    write = metrics.files.write_text

    def refuse(*arguments: Any) -> None:
        raise DiskError("no room")

    log.write({"epoch": 1})
    monkeypatch.setattr(metrics.files, "write_text", refuse)
    log.write({"epoch": 2})
    log.write({"epoch": 3})
    monkeypatch.setattr(metrics.files, "write_text", write)
    log.close()
    assert [json.loads(line)["epoch"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]

    class Board:
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    log.board = Board()
    log.close()


def test_without_tensorboard_metrics_are_written_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = metrics.MetricsFile(tmp_path)
    log.write({"epoch": 1, "loss": 1.0})
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# ---------------------------------------------------------------- the documented job script


@pytest.mark.parametrize(
    ("number", "ending", "code"), [(signal.SIGUSR1, 75, 75), (signal.SIGTERM, 75, 75), (None, 2, 2)]
)
def test_the_documented_job_requeues_an_unfinished_run(
    tmp_path: Path, number: signal.Signals | None, ending: int, code: int
) -> None:
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    script = next(block for block in page.split("```sh\n")[1:] if block.startswith("#!/bin/bash")).split("```")[0]
    work = "import signal, sys, time; " + (
        f"signal.signal({int(number)}, lambda *_: (time.sleep(0.3), sys.exit({ending}))); "
        "open('ready', 'w').close(); time.sleep(60)"
        if number is not None
        else f"sys.exit({ending})"
    )
    (line,) = [each for each in script.splitlines() if each.startswith("harp run")]
    (tmp_path / "job.sh").write_text(script.replace(line, f"{shlex.join([sys.executable, '-c', work])} &"))
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> requeued\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
    process = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment)
    if number is not None:
        end = time.monotonic() + 30
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert (tmp_path / "requeued").exists() == (code == 75)
    if code == 75:
        assert (tmp_path / "requeued").read_text() == "requeue 42\n"
