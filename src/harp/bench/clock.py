"""Measures several ways of doing one thing side by side, so that a busy machine is unfair to none of them."""

import time
from collections.abc import Callable, Mapping

Seconds = dict[str, list[float]]


def latencies(
    ways: Mapping[str, Callable[[], object]],
    repeats: int,
    on_turn: Callable[[str, int], None] = lambda name, done: None,
) -> Seconds:
    """The wall seconds of each call: `repeats` of every way, in turns whose order rotates.

    `on_turn(name, timed calls so far, of all)` is called after each turn, for a display.

    A turn begins with a call that is not timed: the one before has left its own weights in the caches. Ways that are
    quick have several timed calls a turn, or they would never be seen warm.
    """
    found: Seconds = {name: [] for name in ways}
    calls = {name: _calls(way) for name, way in ways.items()}
    names = list(ways)
    while left := [name for name in names if len(found[name]) < repeats]:
        for name in left:
            ways[name]()
            for _ in range(min(calls[name], repeats - len(found[name]))):
                began = time.perf_counter()
                ways[name]()
                found[name].append(time.perf_counter() - began)
            on_turn(name, sum(map(len, found.values())))
        names = names[1:] + names[:1]
    return found


_TURN = 0.02  # seconds of timed calls that a turn should have


def _calls(way: Callable[[], object]) -> int:
    way()  # the first call may compile
    began = time.perf_counter()
    way()
    return max(1, round(_TURN / max(time.perf_counter() - began, 1e-6)))
