"""Match the names of tensors in a file with those of a model.

Networks are often saved inside another module, or wrapped after they were saved: `DataParallel` puts `module.` before
every name, Lightning `model.`, and `nn.Sequential(normalise, net)` puts `1.`. One prefix then stands for another one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

_CONSTANT = re.compile(r"(?:.*\.)?_?(?:norm_?|image_?|img_?|pixel_?)?(?:mean|std|mu|sigma)_?")
_CHANNELS = 4  # numbers of a constant of normalisation, at most: one a channel of the images
_COUNTERS = ("n_averaged",)  # of torch's AveragedModel: no part of the network

Shapes = Mapping[str, Tensor]


class Match(NamedTuple):
    """One prefix in place of another: the file's tensors by the names of the model, and what is left on both sides."""

    old: str
    new: str
    renamed: dict[str, str]  # names of the model, and the names in the file
    missing: list[str]  # of the model, not in the file
    left: list[str]  # of the file, not in the model

    @property
    def words(self) -> str:
        """What was done to the names."""
        removed = f"without the prefix {self.old!r}" if self.old else ""
        added = f"with the prefix {self.new!r}" if self.new else ""
        return " and ".join(filter(None, (removed, added)))


def best_match(given: Shapes, expected: Shapes, tied: Sequence[Sequence[str]] = ()) -> Match:
    """The prefixes under which most names of a file are those of a model: exact names win, then equal shapes.

    A weight that the model ties to another one need not be in the file under both names.
    """
    matches = [_matched(given, expected, tied, old, new) for old, new in _prefixes(given, expected)]

    def quality(match: Match) -> tuple[int, int, int]:
        fitting = sum(given[name].shape == expected[own].shape for own, name in match.renamed.items())
        return -len(match.missing) - len(match.left), fitting, -len(match.old) - len(match.new)

    return max(matches, key=quality)


def _prefixes(given: Shapes, expected: Shapes) -> Iterator[tuple[str, str]]:
    """Pairs of prefixes under which one name of the model is in the file; no prefixes first."""
    yield "", ""
    found: set[tuple[str, str]] = {("", "")}
    # Constants of normalisation are in front of the network, not in it.
    pivot = max(expected, key=lambda name: (not is_constant(name, expected[name]), name.count(".")), default=None)
    own = [] if pivot is None else pivot.split(".")
    for name in given:
        parts = name.split(".")
        common = 0
        while common < min(len(parts), len(own)) and parts[-1 - common] == own[-1 - common]:
            common += 1
        if common:
            pair = _joined(parts[: len(parts) - common]), _joined(own[: len(own) - common])
            if pair not in found:
                found.add(pair)
                yield pair


def _joined(parts: Sequence[str]) -> str:
    return "".join(f"{part}." for part in parts)


def _matched(given: Shapes, expected: Shapes, tied: Sequence[Sequence[str]], old: str, new: str) -> Match:
    renamed = {new + name[len(old) :]: name for name in given if name.startswith(old)}
    own = {name: renamed[name] for name in expected if name in renamed}
    for group in tied:
        present = next((name for name in group if name in own), None)
        if present is not None:
            own |= {name: own[present] for name in group if name not in own}
    used = set(own.values())
    missing = [name for name in expected if name not in own]
    return Match(old, new, own, missing, [name for name in given if name not in used and name not in _COUNTERS])


def is_constant(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a mean or a deviation of the channels of images, by its name and size."""
    return _CONSTANT.fullmatch(name) is not None and tensor.numel() <= _CHANNELS
