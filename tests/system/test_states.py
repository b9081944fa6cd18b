"""The last states: verified when written; if the newest is damaged, the one before is loaded."""

import errno
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harp.errors import CheckpointError, DiskError, RecipeError
from harp.system import digest
from harp.system.states import FORMAT, States
from harp.system.tensors import load_state, save_state


def state(number: int) -> dict[str, Any]:
    return {"epoch": number, "step": 0, "x": torch.full((1000,), float(number)), "list": [1, "two", None]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def filled(folder: Path, count: int, keep: int = 2) -> States:
    states = States(folder / "state.pt", keep, of="a stage")
    for number in range(count):
        states.save(state(number))
    return states


def loaded(states: States) -> int:
    found = states.load()
    assert found is not None
    path, content = found
    assert path.exists()
    assert bool((content["x"] == content["epoch"]).all())
    return int(content["epoch"])


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_last_states_are_kept(tmp_path: Path, keep: int) -> None:
    for count in range(1, 7):
        states = filled(tmp_path / str(count), count, keep)
        expected = list(range(count))[::-1][:keep]
        assert [load_state(path)["epoch"] for path in states.paths()] == expected
        assert [path.name for path in states.paths()] == ["state.pt", "state.1.pt", "state.2.pt", "state.3.pt"][:count][
            :keep
        ]
        assert loaded(states) == count - 1
        states.remove()
        assert names(tmp_path / str(count)) == []


def test_fewer_states_are_kept_after_keep_is_reduced(tmp_path: Path) -> None:
    filled(tmp_path, 5, keep=4)
    States(tmp_path / "state.pt", 2).save(state(5))
    assert names(tmp_path) == ["state.1.pt", "state.pt"]
    with pytest.raises(RecipeError, match="at least 1"):
        States(tmp_path / "state.pt", 0)


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flip,
    "half of it": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "without its digest": lambda data: data[:-76],
    "nothing": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "another digest": lambda data: data[:-1] + (b"0" if data[-1:] != b"0" else b"1"),
    "more at its end": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_state_before_a_damaged_one_is_loaded(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = filled(tmp_path, 3)
    whole = states.path.read_bytes()
    states.path.write_bytes(DAMAGE[damage](whole))
    assert loaded(states) == 1
    assert "state.pt" in caplog.text
    assert "going on from the state before" in caplog.text
    assert names(tmp_path) == ["state.1.pt", "state.damaged.pt"]
    states.save(state(7))  # the intact state is kept
    assert [load_state(path)["epoch"] for path in states.paths()] == [7, 1]
    states.remove()
    assert names(tmp_path) == []


def test_only_damaged_states_are_an_error(tmp_path: Path) -> None:
    states = filled(tmp_path, 3)
    for path in states.paths():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is empty.*; no other state is whole: delete state.pt, state.1.pt in"):
        states.load()
    assert names(tmp_path) == ["state.1.pt", "state.pt"]


def test_no_states_give_none(tmp_path: Path) -> None:
    assert States(tmp_path / "nowhere" / "state.pt").load() is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_changed_byte_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    states = filled(tmp_path_factory.mktemp("states"), 1)
    whole = states.path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    bits = data.draw(st.integers(1, 255))
    states.path.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
    try:
        found = load_state(states.path)
    except CheckpointError:
        return
    # Where the digest itself can't be found there is nothing to compare with; what torch then reads must be right.
    assert torch.equal(found["x"], torch.zeros(1000))


def test_a_state_without_a_digest_is_read(tmp_path: Path) -> None:
    torch.save(state(3), tmp_path / "state.pt")
    assert digest.intact(tmp_path / "state.pt") is None
    assert loaded(States(tmp_path / "state.pt", of="a stage")) == 3


def test_torch_loads_a_state_file(tmp_path: Path) -> None:
    path = filled(tmp_path, 1).path
    assert digest.intact(path) is True
    assert torch.load(path, weights_only=True)["epoch"] == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"harp sha256 ")


def test_states_of_another_version_or_training_are_refused(tmp_path: Path) -> None:
    states = filled(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"is a state of a stage, not of another stage: delete it to start anew"):
        States(states.path, of="another stage").load()
    save_state(states.path, {**state(1), "format": FORMAT + 1, "harp": "99.0"})
    with pytest.raises(CheckpointError, match=r"was written by harp 99.0, whose states .* delete it to start anew"):
        states.load()


def test_old_states_survive_a_disk_that_returns_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = filled(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in states.paths()}
    monkeypatch.setattr(digest, "intact", lambda path, from_disk: False)
    with pytest.raises(DiskError, match="other bytes than were written"):
        states.save(state(9))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
def test_old_states_survive_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    states = filled(tmp_path, 3)

    def fail(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    if call == "write":
        monkeypatch.setattr(
            digest.Sealed, "write", lambda self, data: setattr(self, "error", OSError(number, "x")) or 1
        )
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskError, match=r"can't write .*state\.pt: "):
        states.save(state(9))
    monkeypatch.undo()
    assert names(tmp_path) == ["state.1.pt", "state.pt"]
    assert loaded(states) == 2
    states.save(state(3))
    assert [load_state(path)["epoch"] for path in states.paths()] == [3, 2]


def test_states_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    states = filled(tmp_path, 4, keep=3)
    assert [load_state(path)["epoch"] for path in states.paths()] == [3, 2, 1]


def test_a_complete_state_exists_after_a_kill_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed after any call that changes the folder."""
    for links in (True, False):
        moment = 0
        while True:
            folder = tmp_path / f"{links}-{moment}"
            states = filled(folder, 3, keep=3)
            left = [moment]

            def count(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
                def counted(*arguments: Any, **options: Any) -> Any:
                    if left[0] == 0:
                        raise KeyboardInterrupt
                    left[0] -= 1
                    return call(*arguments, **options)

                return counted

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", count(os.replace))
                patch.setattr(os, "unlink", count(os.unlink))
                patch.setattr(os, "link", count(os.link if links else _no_link))
                try:
                    states.save(state(3))
                except KeyboardInterrupt:
                    pass
                else:
                    break
            assert loaded(states) == 2, moment
            moment += 1
        assert loaded(states) == 3
        assert moment >= 3


def _no_link(*arguments: Any) -> None:
    raise OSError(errno.EPERM, "no links here")
