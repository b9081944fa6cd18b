"""The table of methods: the built-in ones, and those of other packages.

A package offers a method by an entry point of the group `harp.methods`: its name is that of the method, its object a
subclass of `harp.Pruner`. Entry points are read only when a name is not built in, or when all methods are listed. One
that can't be used is left out with one warning.
"""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points

from harp.pruning.methods.base import Pruner

logger = logging.getLogger("harp")

GROUP = "harp.methods"
_RESERVED = ("dense-small",)  # a row of `harp compare` that prunes nothing
_NAME = re.compile(r"\w[\w.+-]*")  # `harp compare` writes options and lists of methods with other characters


class Methods(MutableMapping[str, type[Pruner]]):
    """Pruner classes by name, built-in ones first."""

    def __init__(self, built_in: Mapping[str, type[Pruner]]) -> None:
        self._rows = dict(built_in)
        self._built_in = frozenset(built_in)
        self._warned: set[str] = set()

    def __getitem__(self, name: str) -> type[Pruner]:
        if name not in self._rows:
            self._load(name, [point for point in entry_points(group=GROUP) if point.name == name])
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        offers: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=GROUP):
            offers.setdefault(point.name, []).append(point)
        for name in sorted(offers):
            self._load(name, offers[name])
        return iter(dict(self._rows))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __setitem__(self, name: str, method: type[Pruner]) -> None:
        self._rows[name] = method

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def _load(self, name: str, points: list[EntryPoint]) -> None:
        """Add the method that entry points of this name offer; warn once if it can't be used."""
        if not points or (name in self._rows and name not in self._built_in) or name in self._warned:
            return
        if name in self._built_in or name in _RESERVED:
            problem = "HARP has a method of this name; give it another one"
        elif len(points) > 1:
            problem = "several packages have a method of this name; uninstall all but one"
        elif not _NAME.fullmatch(name):
            problem = "a name has letters, digits, '.', '+', '-' and '_' only"
        else:
            try:
                method = points[0].load()
            except (Exception, SystemExit) as error:  # the import of another package can raise anything
                problem = " ".join(f"{type(error).__name__}: {error}".split())
            else:
                if inspect.isclass(method) and issubclass(method, Pruner):
                    self._rows[name] = method
                    return
                problem = f"{points[0].value} is no subclass of harp.Pruner"
        self._warned.add(name)
        packages = ", ".join(sorted({point.dist.name if point.dist else point.value for point in points}))
        logger.warning("method %r of %s is left out: %s", name, packages, problem)
