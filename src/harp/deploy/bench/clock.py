"""Time several functions in turns, so that other load on the machine affects all of them alike."""

import time
from collections.abc import Callable, Mapping

Seconds = dict[str, list[float]]


def latencies(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    on_turn: Callable[[str, int], None] = lambda name, done: None,
) -> Seconds:
    """The wall time in seconds of each call: `repeats` calls of every function, in turns whose order rotates.

    `on_turn(name, number of timed calls so far)` is called after each turn, for a display.

    A turn begins with a call that is not timed: the caches hold the weights of the previous function. Quick functions
    have several timed calls a turn, so that they are measured warm.
    """
    seconds: Seconds = {name: [] for name in functions}
    calls = {name: _calls(function) for name, function in functions.items()}
    names = list(functions)
    while unfinished := [name for name in names if len(seconds[name]) < repeats]:
        for name in unfinished:
            functions[name]()
            for _ in range(min(calls[name], repeats - len(seconds[name]))):
                began = time.perf_counter()
                functions[name]()
                seconds[name].append(time.perf_counter() - began)
            on_turn(name, sum(map(len, seconds.values())))
        names = names[1:] + names[:1]
    return seconds


_TURN = 0.02  # seconds of timed calls in a turn


def _calls(function: Callable[[], object]) -> int:
    """The number of timed calls in a turn."""
    function()  # the first call may compile
    began = time.perf_counter()
    function()
    return max(1, round(_TURN / max(time.perf_counter() - began, 1e-6)))
