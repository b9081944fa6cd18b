"""The energy that a training takes, and what it emits: measured where that is possible, else by a formula.

The formula is the one of the Machine Learning Impact Calculator (Lacoste et al., "Quantifying the Carbon Emissions of
Machine Learning", 2019), which the HARP paper used,

    kWh  =  watts / 1000 · hours · PUE          g CO2  =  kWh · intensity

A GPU is taken to be the paper's, an RTX 3090 of 350 W, and electricity to be the world's mean, as nobody knows where a
run is. At `PAPER_INTENSITY`, the 610 g/kWh that the calculator holds for Google's region europe-west3, the 10,198 hours
of the paper emit the 2,177.27 kg that it reports. The calculator knows no power usage effectiveness (PUE: what the
building takes for each unit that its machines take), so it is 1 unless told.
"""

import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from harp.errors import RecipeError

GPU_WATTS = 350.0  # board power of the RTX 3090, the card of the paper
CPU_WATTS = 65.0  # an assumption: the usual thermal design power of a desktop's processor
PUE = 1.0
INTENSITY = 475.0  # g CO2 / kWh, the world's mean by the IEA's Global Energy & CO2 Status Report of 2019
PAPER_INTENSITY = 610.0
"""The paper's, g CO2 / kWh: europe-west3 in the calculator."""

_MEASURED = ("intel_rapl", "windows_emi", "intel_power_gadget")  # what codecarbon calls its ways to read a CPU's power
_METERED = ("AppleSiliconChip", "Raspberry")  # chips that say themselves what they draw


def estimate(
    hours: float, *, watts: float = GPU_WATTS, pue: float = PUE, intensity: float = INTENSITY
) -> dict[str, Any]:
    """Energy (kWh) and CO2 (g) of so many hours at so many watts, and in `by` the formula with its numbers."""
    _check(watts, pue, intensity)
    if not 0 <= hours < math.inf:
        raise RecipeError(f"hours must be a finite number of 0 or more, not {hours!r}")
    kwh = watts / 1000 * hours * pue
    by = f"formula: {watts:g} W x {hours:.3g} h x PUE {pue:g} x {intensity:g} g/kWh"
    return {"kwh": kwh, "co2_g": kwh * intensity, "by": by}


def assumed(device: str, processes: int, nodes: int = 1) -> float:
    """The watts to assume of processes on so many machines: a GPU for each, or a CPU that those of a machine share."""
    return nodes * CPU_WATTS if device == "cpu" else processes * GPU_WATTS


class Meter:
    """Measures what happens inside a `with` block; `result` holds kwh, co2_g and by afterwards.

    The energy is codecarbon's where that is installed (the extra `energy`) and works: offline, silent, without files.
    `by` says whether it measured the power or estimated it. It sees all of this machine: where the work is done by
    several `nodes`, the others are taken to be like it. Else it is `estimate`'s, at `watts` for all of them. In both
    cases PUE and intensity are the ones given here. A failure to measure never reaches the work that is measured.
    """

    def __init__(
        self, *, watts: float = CPU_WATTS, pue: float = PUE, intensity: float = INTENSITY, nodes: int = 1
    ) -> None:
        _check(watts, pue, intensity)
        self.watts, self.pue, self.intensity, self.nodes = watts, pue, intensity, nodes
        self.result: dict[str, Any] = {}
        self._tracker: Any = None
        self._measured: tuple[float, str] | None = None  # kWh, and by what
        self._began = self._seconds = 0.0

    def __enter__(self) -> Self:
        self._tracker = _started()
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds = time.monotonic() - self._began
        self._measured, self._tracker = _stopped(self._tracker), None
        self.result = self.over(self._seconds)

    def over(self, seconds: float) -> dict[str, Any]:
        """What the work takes in so many seconds, at the power that was seen: of parts that were not measured too."""
        if self._measured is None or not self._seconds:
            return estimate(seconds / 3600, watts=self.watts, pue=self.pue, intensity=self.intensity)
        kwh = self.nodes * self._measured[0] * self.pue * seconds / self._seconds
        by = self._measured[1] if self.nodes == 1 else f"{self._measured[1]}, one of {self.nodes} nodes"
        return {"kwh": kwh, "co2_g": kwh * self.intensity, "by": by}


def _check(watts: float, pue: float, intensity: float) -> None:
    for name, value, least in (("watts", watts, 0), ("pue", pue, 1), ("intensity", intensity, 0)):
        if not least <= value < math.inf:
            raise RecipeError(f"{name} must be a finite number of {least} or more, not {value!r}")


def _started() -> Any:
    """A running tracker of codecarbon, or None."""
    try:
        with _silence():
            from codecarbon import OfflineEmissionsTracker

            tracker = OfflineEmissionsTracker(
                country_iso_code="DEU",  # it wants one; its emissions are not used
                output_methods=[],
                log_level="critical",
                allow_multiple_runs=True,  # or it would refuse to run beside another, by a lock file
                pue=1.0,
            )
            tracker.start()
            return tracker
    except Exception:  # an optional measurement, of hardware that may do anything: there's always the formula
        return None


def _stopped(tracker: Any) -> tuple[float, str] | None:
    """The kWh that a tracker saw, and how it did; None if it did not."""
    try:
        with _silence():
            tracker.stop()
            seen = tracker.final_emissions_data
            kwh, by = float(seen.energy_consumed), f"codecarbon {seen.codecarbon_version}, {_how(tracker._hardware)}"
    except Exception:  # as above; codecarbon also swallows its own errors, and leaves attributes unset
        return None
    return (kwh, by) if 0 < kwh < math.inf else None


def _how(hardware: list[Any]) -> str:
    measured = any(getattr(part, "_mode", None) in _MEASURED or type(part).__name__ in _METERED for part in hardware)
    words = ["measured CPU power" if measured else "CPU power estimated from its load"]
    if any(type(part).__name__ == "GPU" for part in hardware):
        words.append("measured GPU power")
    return ", ".join([*words, "RAM power estimated"])


@contextmanager
def _silence() -> Iterator[None]:
    """No logging and no warnings of codecarbon; once it is started its log level is at `critical` anyway."""
    log = logging.getLogger("codecarbon")
    earlier, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = earlier
