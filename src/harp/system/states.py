"""The last few states of a training on disk: the newest, and older ones in case it is damaged.

    state.pt      the newest
    state.1.pt    the one before, and so on

A new state is read back from the disk and compared with its digest before the oldest one is removed, and it replaces
the newest atomically. So there is a complete state at every moment, even if the process is killed.
"""

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harp import __version__
from harp.errors import CheckpointError, RecipeError
from harp.system.files import remove
from harp.system.tensors import load_state, save_state

logger = logging.getLogger("harp")

FORMAT = 1
"""The format version of a state; other versions are refused."""


class States:
    """The states of one training: written by one process, read by any.

    Arguments:
        path: the file of the newest state; older ones are in the same folder.
        keep: how many states are kept.
        of: a description of the training; states of other trainings are refused.
    """

    def __init__(self, path: Path, keep: int = 2, of: str = "") -> None:
        if keep < 1:
            raise RecipeError(f"keep {keep} states: give at least 1")
        self.path, self.keep, self.of = path, keep, of

    def paths(self) -> list[Path]:
        """The states that exist, the newest first."""
        pattern = re.compile(re.escape(self.path.stem) + r"\.(\d{1,4})" + re.escape(self.path.suffix))
        files = self.path.parent.iterdir() if self.path.parent.is_dir() else ()
        older = {int(match[1]): file for file in files if (match := pattern.fullmatch(file.name))}
        return [*([self.path] if self.path.exists() else []), *(older[number] for number in sorted(older))]

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a state; the previous one becomes the second newest."""
        header = {"format": FORMAT, "harp": __version__, "of": self.of}
        save_state(self.path, {**state, **header}, before=self._shift)

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact state and its file; damaged ones are reported and renamed."""
        damaged: list[tuple[Path, CheckpointError]] = []
        for path in self.paths():
            try:
                state = load_state(path)
            except CheckpointError as error:
                damaged.append((path, error))
                continue
            self._check(path, state)
            for file, problem in damaged:
                logger.warning("%s; going on from the state before, %s", problem, path)
                with contextlib.suppress(OSError):
                    os.replace(file, self._damaged())
            return path, state
        if damaged:
            names = ", ".join(file.name for file, _ in damaged)
            raise CheckpointError(
                f"{damaged[0][1]}; no other state is whole: delete {names} in {self.path.parent} to start anew"
            )
        return None

    def read(self, path: Path) -> tuple[Path, dict[str, Any]]:
        """The state in a file that another process has chosen by `load`, and the file."""
        state = load_state(path)
        self._check(path, state)
        return path, state

    def remove(self) -> None:
        """Remove all states, after the training has finished."""
        for path in [*self.paths()[::-1], self._damaged(), self.path]:  # the newest is removed last
            remove(path)

    def _check(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse the state of another version or training. Early versions of HARP did not write these entries."""
        if state.get("format", FORMAT) != FORMAT:
            raise CheckpointError(
                f"{path} was written by harp {state.get('harp')}, whose states harp {__version__} can't read: go on "
                "with that version, or delete it to start anew"
            )
        if state.get("of", self.of) != self.of:
            raise CheckpointError(f"{path} is a state of {state['of']}, not of {self.of}: delete it to start anew")

    def _shift(self) -> None:
        """Make the newest state the second newest, and so on. It keeps its name too until the new one replaces it."""
        states = self.paths()
        for number, path in enumerate(states):  # close the gaps that damaged states left
            os.replace(path, self._older(number))
        for number in reversed(range(1, len(states))):
            if number + 1 < self.keep:
                os.replace(self._older(number), self._older(number + 1))
            else:
                self._older(number).unlink()
        if states and self.keep > 1:
            _link(self.path, self._older(1))

    def _older(self, number: int) -> Path:
        """The file of the state that is `number` states older than the newest."""
        return self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}") if number else self.path

    def _damaged(self) -> Path:
        """The file that the latest damaged state is renamed to, for inspection."""
        return self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}")


def _link(path: Path, other: Path) -> None:
    """Give a file a second name; on file systems without hard links, rename it."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:
        os.replace(path, other)
