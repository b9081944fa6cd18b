"""Files are written whole or not at all."""

import errno
import json
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harp.errors import DiskError
from harp.system import files
from harp.system.files import amount, atomic, write_json, write_text
from harp.system.tensors import load_tensors, save_state, save_tensors
from support.checkpoints import only, refused


def test_atomic_replaces_the_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    write_text(path, "one\n")
    write_text(path, "two é\n")
    assert path.read_bytes() == "two é\n".encode()
    assert only(path.parent) == ["a.txt"]


def test_the_file_is_synced_before_it_is_replaced_and_then_its_folder(tmp_path, monkeypatch):
    """Should the power fail, the name leads to the old file or to the whole new one, never to an empty one."""
    path, calls = tmp_path / "a.txt", []
    write_text(path, "old")
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        fsync(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            assert os.path.samestat(facts, tmp_path.stat())
            calls.append(("fsync folder", path.read_text()))
        else:
            calls.append(("fsync file", os.pread(descriptor, 100, 0).decode()))

    def replaced(source: str | Path, target: str | Path) -> None:
        replace(source, target)
        calls.append(("replace", path.read_text()))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_text(path, "new")
    assert calls == [("fsync file", "new"), ("replace", "new"), ("fsync folder", "new")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failure_in_the_block_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a"
    write_text(path, "old")
    with pytest.raises(error), atomic(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert only(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (errno.ENOSPC, r"No space left on device \(12\.3 MB needed, \d.* free\)"),
        (errno.EDQUOT, r"Disk quota exceeded \(12\.3 MB needed\)"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_errors_of_the_system_are_explained(tmp_path, number, ending):
    def write() -> None:
        with atomic(tmp_path / "a", 12_345_678) as temporary:
            temporary.write_text("half")
            raise OSError(number, os.strerror(number))

    write_text(tmp_path / "a", "old")
    assert re.fullmatch(re.escape(f"can't write {tmp_path / 'a'}: ") + ending, refused(write))
    with pytest.raises(DiskError):
        write()
    assert (tmp_path / "a").read_text() == "old"
    assert only(tmp_path) == ["a"]


def test_amounts():
    assert [amount(size) for size in (0, 999, 1000, 1.25e6, 3e9, 5e15)] == [
        *["0 bytes", "999 bytes", "1.0 kB", "1.2 MB", "3.0 GB", "5000.0 TB"]
    ]


def test_a_full_disk(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": torch.ones(10)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        messages = [
            refused(save_tensors, path, {"x": torch.ones(100_000)}),
            refused(save_state, path, {"x": torch.ones(100_000)}),
            refused(write_text, path, "x" * 400_000),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(message == f"can't write {path}: File too large" for message in messages)
    assert torch.equal(load_tensors(path)[0]["x"], torch.ones(10))
    assert only(tmp_path) == ["a.safetensors"]


def test_paths_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    assert "can't write" in refused(write_text, tmp_path / "file" / "a", "x")
    assert "Is a directory" in refused(write_text, tmp_path / "folder", "x")
    assert "device" in refused(write_text, "/dev/full", "x")
    assert Path("/dev/full").is_char_device()
    assert "null" in refused(write_text, "a\0b", "x")
    assert "long" in refused(write_text, tmp_path / ("n" * 300), "x")
    assert only(tmp_path) == ["file", "folder"]


def test_links_are_followed_and_modes_kept(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_temporaries_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".a.txt.{files.HOST}.{dead.pid}.tmp").write_text("half")
    (tmp_path / ".a.txt.gone.1.tmp").write_text("of another machine")
    os.utime(tmp_path / ".a.txt.gone.1.tmp", (0, 0))
    kept = [f".a.txt.{files.HOST}.{os.getppid()}.tmp", f".b.txt.{files.HOST}.{dead.pid}.tmp", ".a.txt.x.tmp"]
    kept.append(f".a.txt.elsewhere.{dead.pid}.tmp")
    for name in kept:
        (tmp_path / name).write_text("of others")
    (tmp_path / f".a.txt.{files.HOST}.{os.getpid()}.tmp").write_text("of an earlier process with this id")
    write_text(tmp_path / "a.txt", "x")
    assert only(tmp_path) == sorted([*kept, "a.txt"])


KILLED = """
import os, random, signal, sys, time
import torch
from harp.system.tensors import load_state, load_tensors, save_state, save_tensors
torch.set_num_threads(1)  # a forked child has lost the other threads, and would wait for them
folder = sys.argv[1]
weights, state = os.path.join(folder, "w.safetensors"), os.path.join(folder, "s.pt")
def write(n):
    save_tensors(weights, {"x": torch.full((300_000,), float(n))})
    save_state(state, {"n": n, "x": torch.full((300_000,), float(n))})
write(0)
random.seed(0)
left = 0
for _ in range(25):
    child = os.fork()
    if child == 0:
        n = 0
        while True:
            n += 1
            write(n)
    time.sleep(random.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left += any(name.endswith(".tmp") for name in os.listdir(folder))
    x, s = load_tensors(weights)[0]["x"], load_state(state)
    assert len(x) == 300_000 and bool((x == x[0]).all())
    assert bool((s["x"] == s["n"]).all())
write(1)
assert sorted(os.listdir(folder)) == ["s.pt", "w.safetensors"], os.listdir(folder)
print("interrupted", left)
"""


def test_kill_in_the_middle_of_a_write(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[1]) > 3  # else no kill hit a write, and nothing was tested


def test_json(tmp_path):
    path = tmp_path / "a.json"
    value = {"b": [1, 2.5, None, True], "a": {"é": "ü"}, "nan": float("nan"), "inf": [float("-inf")]}
    write_json(path, value)
    assert json.loads(path.read_text()) == {**value, "nan": None, "inf": [None]}
    assert list(json.loads(path.read_text())) == list(value)
    assert path.read_text().endswith("}\n")


def test_json_keeps_undecodable_file_names(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"path": name})
    assert json.loads((tmp_path / "a.json").read_text()) == {"path": name}


def test_values_that_json_can_not_hold_are_refused(tmp_path):
    circle: list[object] = []
    circle.append(circle)
    assert "Tensor" in refused(write_json, tmp_path / "a", {"x": torch.ones(1)})
    assert "can't write" in refused(write_json, tmp_path / "a", circle)
    assert only(tmp_path) == []
