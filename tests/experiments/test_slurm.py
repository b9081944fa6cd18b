"""Runs as jobs of a cluster: submitted once, in order, looked after, and never lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harp.errors import AT_CHANCE, CheckpointError, Interrupted, RecipeError, SchedulerError
from harp.experiments import slurm
from harp.experiments.pool import harp_run
from harp.experiments.slurm import Job, Slurm, State
from harp.experiments.slurm_script import script, split_options
from harp.system.progress import Quiet
from support.commands import STUDY, Harp, refused
from support.slurm import Cluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path / "cluster")
    monkeypatch.setenv("PATH", str(made.bin), prepend=os.pathsep)
    return made


Make = Callable[..., Slurm]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Jobs that touch a file: `first`, and `second` after it; both end with a code that a file may hold."""

    def made(options: str = "", devices: int = 1) -> Slurm:
        jobs = []
        for name, after in (("first", None), ("second", "first")):
            done, code = tmp_path / f"{name}.done", tmp_path / f"{name}.code"
            ends = f"code=$(cat {code} 2> /dev/null || echo 0); [[ $code =~ ^[03]$ ]] && touch {done}; exit $code"
            text = f"echo I am {name}; {ends}"
            jobs.append(
                Job(name, ("bash", "-c", text), tmp_path / "study" / "logs" / f"{name}.log", done.exists, after)
            )
        return Slurm(tmp_path / "study", jobs, options, devices)

    return made


def states(queue: Slurm) -> list[str]:
    return [str(each.state) for each in queue.status()]


# ---------------------------------------------------------------- job files


def test_a_job_file_says_all_that_sbatch_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = ("t-harp-1%-seed0", ("harp", "run", "a b.yaml"), tmp_path / "my logs" / "x 1%.log", tmp_path / "x.state")
    text = script(*job, '--partition=gpu --gres gpu:1 --comment="two words"', devices=4)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert f'#SBATCH --output="{tmp_path}/my logs/x 1%%.log"' in lines  # % begins a pattern there
    assert f"#SBATCH --chdir={tmp_path}" in lines
    assert "#SBATCH --ntasks-per-node=4" in lines
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert (
        directives[-1] == '#SBATCH --partition=gpu --gres gpu:1 "--comment=two words"'
    )  # the user's come last and win
    assert "srun --kill-on-bad-exit=1 harp run 'a b.yaml' &" in lines
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "srun" not in script(*job)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--output=x", "sets --output itself"),
        ("--partition=gpu -d afterok:3", "sets --dependency itself"),
        ("-oall.log", "sets --output itself"),
        ("gpu", "write it like"),
        ("--comment='a", "No closing quotation"),
        ("--time=1\n#SBATCH --array=1-9", "in one line"),
    ],
)
def test_reserved_and_malformed_options_of_sbatch_are_refused(options: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        split_options(options)


def test_long_options_are_not_taken_for_short_ones() -> None:
    assert split_options("--account=me --export=ALL --overcommit --deadline=now") != []


def test_a_path_with_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="line break"):
        script("x", ("true",), tmp_path / "a\nb.log", tmp_path / "x.state")


def test_the_command_of_a_run() -> None:
    words = harp_run(Path("r.yaml"), Path("runs"), Path("d"), devices=2)
    assert words == (
        sys.executable,
        *("-m", "harp", "run", "r.yaml", "--out", "runs", "--data-dir", "d", "--devices", "2"),
    )
    assert "--devices" not in harp_run(Path("r.yaml"), Path("runs"), None)


# ---------------------------------------------------------------- submitting


def test_jobs_are_submitted_once_and_in_order(cluster: Cluster, make: Make) -> None:
    queue = make()
    assert states(queue) == ["not submitted"] * 2
    assert [(each.state, each.id, each.note) for each in queue.submit()] == [
        (State.QUEUED, "1", "submitted"),
        (State.QUEUED, "2", "submitted"),
    ]
    first, second = cluster.calls("sbatch")
    assert first[1:-1] == ["--parsable"]
    assert second[1:-1] == ["--parsable", "--dependency=afterok:1", "--kill-on-invalid-dep=yes"]
    assert [each.note for each in make().submit()] == ["Priority", "Dependency"]  # a second call while they are queued
    assert len(cluster.calls("sbatch")) == 2
    assert cluster.run() == ["first", "second"]
    assert states(queue) == ["finished", "finished"]
    assert queue.submit() and len(cluster.calls("sbatch")) == 2
    assert (queue.folder / "logs" / "first.log").read_text() == "I am first\n"


def test_failed_jobs_and_those_that_wait_for_them_are_submitted_again(
    cluster: Cluster, make: Make, tmp_path: Path
) -> None:
    queue = make()
    (tmp_path / "first.code").write_text("2")
    queue.submit()
    assert cluster.run() == ["first"]  # the second is cancelled, as its dependency can't be met any more
    first, second = queue.status()
    assert (first.state, first.note) == (State.FAILED, "FAILED, exit code 2")
    assert (second.state, second.note) == (State.FAILED, "CANCELLED, exit code 0")
    (tmp_path / "first.code").unlink()
    assert [each.id for each in queue.submit()] == ["3", "4"]
    assert "--dependency=afterok:3" in cluster.calls("sbatch")[-1]
    assert cluster.run() == ["first", "second"]
    assert states(queue) == ["finished", "finished"]


@pytest.mark.parametrize("commands", [("squeue", "sacct", "scancel"), ()], ids=["with accounting", "by files"])
def test_a_run_at_chance_level_is_finished_and_the_next_one_starts(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, commands: tuple[str, ...]
) -> None:
    cluster = Cluster(tmp_path / "cluster", ("sbatch", "scontrol", *commands))
    monkeypatch.setenv("PATH", f"{cluster.bin}:/usr/bin:/bin")
    queue = make()
    (tmp_path / "first.code").write_text(str(AT_CHANCE))
    queue.submit()
    assert cluster.run() == ["first", "second"], "the second waits for the first to end well"
    assert states(queue) == ["finished", "finished"]
    assert (queue.folder / "jobs" / "first.state").read_text() == "ended:0 1\n"
    assert queue.wait(Quiet(), seconds=0.01) == {}


def test_no_job_depends_on_a_finished_run(cluster: Cluster, make: Make, tmp_path: Path) -> None:
    (tmp_path / "first.done").touch()
    queue = make()
    assert [str(each.state) for each in queue.submit()] == ["finished", "queued"]
    assert cluster.calls("sbatch")[0][1:-1] == ["--parsable"]


def test_a_job_that_waits_for_a_lost_one_is_cancelled(cluster: Cluster, make: Make) -> None:
    queue = make()
    queue.submit()
    cluster.mark("1", state="NODE_FAIL")  # the other is in the queue still, with a dependency that is never satisfied
    assert [each.id for each in queue.submit()] == ["3", "4"]
    assert cluster.calls("scancel") == [["scancel", "2"]]
    assert cluster.run() == ["first", "second"]


def test_a_run_that_saved_its_state_queues_again(cluster: Cluster, make: Make, tmp_path: Path) -> None:
    queue = make()
    (tmp_path / "first.code").write_text("75")
    queue.submit()
    assert cluster.run(most=2) == ["first", "first"]
    assert states(queue) == ["queued", "queued"] and cluster.calls("scontrol")[0][1:] == ["requeue", "1"]
    (tmp_path / "first.code").unlink()
    assert cluster.run() == ["first", "second"]
    cluster.says("scontrol", "1")
    (tmp_path / "second.done").unlink()
    (tmp_path / "second.code").write_text("75")
    queue.submit()
    cluster.run()
    assert [each.note for each in queue.status()] == ["", "FAILED, exit code 75"]  # where requeueing is not allowed


def test_a_signal_reaches_the_run_and_its_exit_code_the_scheduler(tmp_path: Path) -> None:
    code = 'trap "echo told; sleep 0.3; exit 7" USR1; echo ready; while :; do sleep 0.05; done'
    (tmp_path / "x.sh").write_text(script("x", ("bash", "-c", code), tmp_path / "x.log", tmp_path / "x.state"))
    environment = {**os.environ, "SLURM_JOB_ID": "5"}
    process = subprocess.Popen(["bash", str(tmp_path / "x.sh")], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert (tmp_path / "x.state").read_text() == "running 5\n"
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=120)[0] == "told\n" and process.returncode == 7
    assert (tmp_path / "x.state").read_text() == "ended:7 5\n"


def test_a_run_that_ends_while_its_script_passes_the_signal_on_queues_again(tmp_path: Path) -> None:
    """The trap ended the waiting, and the run is gone before the script looks: the code is still the run's."""
    code = 'trap "exit 75" USR1; echo ready; while :; do sleep 0.05; done'
    cluster = Cluster(tmp_path / "cluster")
    (tmp_path / "x.sh").write_text(script("x", ("bash", "-c", code), tmp_path / "x.log", tmp_path / "x.state"))
    slow = '() { builtin kill "$@" || return; [ "$1" = -0 ] || while builtin kill -0 "$2"; do sleep 0.01; done; }'
    environment = {
        **os.environ,
        "SLURM_JOB_ID": "5",
        "PATH": f"{cluster.bin}:{os.environ['PATH']}",
        "BASH_FUNC_kill%%": slow,
    }
    process = subprocess.Popen(["bash", str(tmp_path / "x.sh")], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=120)
    assert process.returncode == 75
    assert cluster.calls("scontrol") == [["scontrol", "requeue", "5"]]


@pytest.mark.parametrize(("given", "seen"), [("8", "8"), ("", "none")])
def test_tasks_get_the_cores_of_the_job(tmp_path: Path, given: str, seen: str) -> None:
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/bash\necho "${SRUN_CPUS_PER_TASK-none}"\n')
    stub.chmod(0o755)
    environment = {
        **os.environ,
        "SLURM_JOB_ID": "5",
        "SLURM_CPUS_PER_TASK": given,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    text = script("x", ("true",), tmp_path / "x.log", tmp_path / "x.state", devices=2)
    done = subprocess.run(["bash"], input=text, text=True, env=environment, capture_output=True)
    assert done.stdout == f"{seen}\n", done.stderr


def test_without_squeue_the_state_files_are_used(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path / "cluster", ("sbatch", "scontrol"))
    monkeypatch.setenv("PATH", f"{cluster.bin}:/usr/bin:/bin")
    queue = make()
    queue.submit()
    assert states(queue) == ["queued", "queued"]
    (queue.folder / "jobs" / "first.state").write_text("running 1\n")
    assert states(queue) == ["running", "queued"]
    assert len(cluster.calls("sbatch")) == 2 and queue.submit() and len(cluster.calls("sbatch")) == 2
    (tmp_path / "first.code").write_text("4")
    cluster.run()
    first, second = queue.status()
    assert (first.state, first.note) == (State.FAILED, "exit code 4")
    assert (second.state, second.note) == (State.FAILED, "not started: first failed")
    (tmp_path / "first.code").unlink()
    queue.submit()
    assert states(queue) == ["queued", "queued"]  # what the earlier job told is not the new one's
    cluster.run()
    assert states(queue) == ["finished", "finished"]


# ---------------------------------------------------------------- what may go wrong


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("print('Submitted batch job') or 0", r"sbatch said 'Submitted batch job' of .*, expected the number of a job"),
        ("0", "sbatch said ''"),
        ("'sbatch: error: invalid partition specified: gpu'", "sbatch failed: .*invalid partition specified: gpu"),
        ("3", "sbatch failed: exit code 3"),
    ],
)
def test_an_answer_of_sbatch_without_a_number_is_an_error(cluster: Cluster, make: Make, answer: str, said: str) -> None:
    cluster.says("sbatch", answer)
    with pytest.raises(SchedulerError, match=said):
        make().submit()
    assert not (make().folder / "jobs.json").exists()


def test_the_clusters_name_is_not_part_of_the_number(cluster: Cluster, tmp_path: Path) -> None:
    cluster.says("sbatch", "print('12;main') or 0")
    assert slurm.submit(tmp_path / "x.sh", None) == "12"


def test_submissions_before_a_failure_are_remembered(cluster: Cluster, make: Make) -> None:
    cluster.says("sbatch", "print(1) or 0 if not options.get('dependency') else 'limit reached'")
    with pytest.raises(SchedulerError, match="limit reached"):
        make().submit()
    assert list(json.loads((make().folder / "jobs.json").read_text())["jobs"]) == ["first"]


def test_no_slurm_here(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="there is no sbatch here"):
        make().submit()
    assert len(make().write()) == 2


def test_nothing_is_submitted_if_squeue_fails(cluster: Cluster, make: Make) -> None:
    queue = make()
    queue.submit()
    cluster.says("squeue", "'slurm_load_jobs error: Unable to contact slurm controller'")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        queue.submit()
    assert len(cluster.calls("sbatch")) == 2  # rather than submitting what may be running


def test_a_damaged_list_of_jobs_is_an_error(make: Make) -> None:
    queue = make()
    queue.folder.mkdir()
    for text in ("{", "[]", '{"jobs": {"first": {"number": 3}}}'):
        (queue.folder / "jobs.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"jobs\.json"):
            queue.status()


# ---------------------------------------------------------------- waiting


class Once(Quiet):
    """Do something when it has been shown for the first time that jobs wait."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.acts = [act]

    def active_runs(self, names: list[str]) -> None:
        if self.acts:
            self.acts.pop()()


def test_waiting_ends_with_the_jobs_and_says_what_failed(cluster: Cluster, make: Make, tmp_path: Path) -> None:
    queue = make()
    (tmp_path / "second.code").write_text("4")
    queue.submit()
    assert queue.wait(Once(cluster.run), seconds=0.01) == {"second": "FAILED, exit code 4"}


def test_ctrl_c_ends_the_waiting_and_not_the_jobs(cluster: Cluster, make: Make) -> None:
    queue = make()
    queue.submit()
    with pytest.raises(Interrupted, match="the jobs go on"):
        queue.wait(Once(lambda: signal.raise_signal(signal.SIGINT)), seconds=60)
    assert states(queue) == ["queued", "queued"] and not cluster.calls("scancel")


# ---------------------------------------------------------------- the command


def test_a_comparison_on_a_cluster(harp: Harp, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**STUDY, "methods": ["magnitude"]}))
    words = ("compare", "s.yaml", "--launcher", "slurm", "--sbatch", "--time=1:00:00")
    code, out, err = harp(*words, "--dry-run")
    assert code == 0 and "2 job files" in out and not cluster.calls("sbatch"), err
    code, out, err = harp(*words)
    assert code == 0 and "2 submitted, 0 of 2 runs finished" in out, err
    code, out, _ = harp(*words, "--json")
    assert code == 0 and [job["state"] for job in json.loads(out)["jobs"]] == ["queued", "queued"]
    assert cluster.run(most=1) == ["t-dense-seed0"]
    code, out, _ = harp(*words)
    assert "0 submitted, 1 of 2 runs finished" in out and "queued" in out
    assert cluster.run() == ["t-magnitude-90-seed0"]
    code, out, err = harp(*words, "--wait")
    assert code == 0 and "keep 10 %" in out and "magnitude" in out, err
    assert len(cluster.calls("sbatch")) == 2
    (folder,) = Path("runs").glob("compare-t-*")
    assert {"table.md", "results.json", "jobs.json", "jobs"} <= {path.name for path in folder.iterdir()}


def test_wrong_options_are_refused_in_one_line(harp: Harp, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY))
    refused(harp, "compare", "s.yaml", "--launcher", "slurn", said="did you mean 'slurm'?")
    refused(harp, "compare", "s.yaml", "--dry-run", said="are for --launcher slurm")
    refused(harp, "compare", "s.yaml", "--launcher", "slurm", "--sbatch", "--wrap=x", said="sets --wrap itself")


def test_where_there_is_no_slurm_nothing_is_written(
    harp: Harp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY))
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(harp, "compare", "s.yaml", "--launcher", "slurm", said="there is no sbatch here")
    assert not Path("runs").exists()
