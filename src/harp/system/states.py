"""The last few states of a training on disk, the newest and what to go back to should that be damaged.

    state.pt      the newest
    state.1.pt    the one before, and so on

A new state is read back from the disk and compared with its digest before the oldest one goes, and it takes its place
in one move: whatever happens, and whenever, there is a whole state to go on from.
"""

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harp import __version__, checkpoint
from harp.errors import CheckpointError, RecipeError
from harp.files import remove

logger = logging.getLogger("harp")

FORMAT = 1
"""Of what is in a state; another number is another version's."""


class States:
    """The states of one training: written by one process, read by any.

    Arguments:
        path: the newest state's; the older ones lie beside it.
        keep: how many there are at most.
        of: what the training is, to refuse the states of another.
    """

    def __init__(self, path: Path, keep: int = 2, of: str = "") -> None:
        if keep < 1:
            raise RecipeError(f"keep {keep} states: give at least 1")
        self.path, self.keep, self.of = path, keep, of

    def paths(self) -> list[Path]:
        """What is there, the newest first."""
        older = {int(match[1]): file for file in self._beside() if (match := self._numbered().fullmatch(file.name))}
        return [*([self.path] if self.path.exists() else []), *(older[number] for number in sorted(older))]

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a state; the one before becomes the second newest."""
        facts = {"format": FORMAT, "harp": __version__, "of": self.of}
        checkpoint.save_state(self.path, {**state, **facts}, before=self._shift)

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest state that is whole, and its file; damaged ones are named and put aside."""
        damaged: list[tuple[Path, CheckpointError]] = []
        for path in self.paths():
            try:
                state = checkpoint.load_state(path)
            except CheckpointError as error:
                damaged.append((path, error))
                continue
            self._check(path, state)
            for file, problem in damaged:
                logger.warning("%s; going on from the state before, %s", problem, path)
                with contextlib.suppress(OSError):
                    os.replace(file, self._aside())
            return path, state
        if damaged:
            names = ", ".join(file.name for file, _ in damaged)
            raise CheckpointError(
                f"{damaged[0][1]}; no other state is whole: delete {names} in {self.path.parent} to start anew"
            )
        return None

    def read(self, path: Path) -> tuple[Path, dict[str, Any]]:
        """The state that another process has found to be the one, and its file."""
        state = checkpoint.load_state(path)
        self._check(path, state)
        return path, state

    def remove(self) -> None:
        """Remove all, as the training is finished."""
        for path in [*self.paths()[::-1], self._aside(), self.path]:  # the newest is the last to go
            remove(path)

    def _check(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse the state of another version or training. Early versions wrote none of these facts."""
        if state.get("format", FORMAT) != FORMAT:
            raise CheckpointError(
                f"{path} was written by harp {state.get('harp')}, whose states harp {__version__} can't read: go on "
                "with that version, or delete it to start anew"
            )
        if state.get("of", self.of) != self.of:
            raise CheckpointError(f"{path} is a state of {state['of']}, not of {self.of}: delete it to start anew")

    def _shift(self) -> None:
        """Make the newest the second newest, and so on. It stays the newest, too, until another takes its place."""
        old = self.paths()
        for number, path in enumerate(old):  # close the gaps that damaged ones left
            os.replace(path, self._older(number))
        for number in reversed(range(1, len(old))):
            if number + 1 < self.keep:
                os.replace(self._older(number), self._older(number + 1))
            else:
                self._older(number).unlink()
        if old and self.keep > 1:
            _link(self.path, self._older(1))

    def _beside(self) -> list[Path]:
        return list(self.path.parent.iterdir()) if self.path.parent.is_dir() else []

    def _numbered(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.path.stem) + r"\.(\d{1,4})" + re.escape(self.path.suffix))

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}") if number else self.path

    def _aside(self) -> Path:
        """Where damaged states go; one is enough to look at."""
        return self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}")


def _link(path: Path, other: Path) -> None:
    """Give a file a second name; where a file system knows no such thing, another name."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:
        os.replace(path, other)
