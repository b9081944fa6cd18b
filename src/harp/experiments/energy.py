"""The energy that a training takes and the CO2 that it emits: measured by codecarbon where possible, else by a formula.

The formula is that of the Machine Learning Impact Calculator (Lacoste et al., "Quantifying the Carbon Emissions of
Machine Learning", 2019), which the HARP paper uses:

    kWh  =  watts / 1000 · hours          g CO2  =  kWh · intensity

A GPU is assumed to be the paper's, an RTX 3090 of 350 W. The default intensity of the electricity is the world's mean,
because the location of a run is not known. At `PAPER_INTENSITY`, the calculator's 610 g/kWh of Google's region
europe-west3, the 10,198 hours of the paper emit the 2,177.27 kg that it reports. The energy of the building around the
machines is not included.
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
INTENSITY = 475.0  # g CO2 / kWh, the world's mean by the IEA's Global Energy & CO2 Status Report of 2019
PAPER_INTENSITY = 610.0
"""The paper's, g CO2 / kWh: europe-west3 in the calculator."""

_CPU_MODES = ("intel_rapl", "windows_emi", "intel_power_gadget")  # codecarbon's names of measurements of a CPU's power
_CHIPS = ("AppleSiliconChip", "Raspberry")  # chips that report their power


def estimate(hours: float, *, watts: float = GPU_WATTS, intensity: float = INTENSITY) -> dict[str, Any]:
    """Energy (kWh) and CO2 (g) of so many hours at so many watts, and in `by` the formula with its numbers."""
    for name, value in (("hours", hours), ("watts", watts), ("intensity", intensity)):
        if not 0 <= value < math.inf:
            raise RecipeError(f"{name} must be a finite number of 0 or more, not {value!r}")
    kwh = watts / 1000 * hours
    by = f"formula: {watts:g} W x {hours:.3g} h x {intensity:g} g/kWh"
    return {"kwh": kwh, "co2_g": kwh * intensity, "by": by}


def assumed(device: str, processes: int, nodes: int = 1) -> float:
    """The assumed watts of processes on so many machines: a GPU for each process, or a CPU for each machine."""
    return nodes * CPU_WATTS if device == "cpu" else processes * GPU_WATTS


class Meter:
    """Measure the energy of a `with` block; afterwards `result` holds kwh, co2_g and by.

    codecarbon measures it if it is installed (the extra `energy`) and works: offline, silent, without files. `by` says
    whether it measured the power or estimated it. It sees this machine only: other `nodes` are assumed to be like it.
    Without codecarbon it is the formula of `estimate`, at `watts` for all nodes. A failure to measure never reaches the
    measured work.
    """

    def __init__(self, *, watts: float = CPU_WATTS, nodes: int = 1) -> None:
        self.watts, self.nodes = watts, nodes
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
        self._measured = _stopped(self._tracker)
        self.result = self.over(self._seconds)

    def over(self, seconds: float) -> dict[str, Any]:
        """The energy of so many seconds at the measured power, for work that began before the block too."""
        if self._measured is None or not self._seconds:
            return estimate(seconds / 3600, watts=self.watts)
        kwh, by = self._measured
        kwh *= self.nodes * seconds / self._seconds
        by = by if self.nodes == 1 else f"{by}, one of {self.nodes} nodes"
        return {"kwh": kwh, "co2_g": kwh * INTENSITY, "by": by}


def _started() -> Any:
    """A running tracker of codecarbon, or None."""
    try:
        with _silence():
            from codecarbon import OfflineEmissionsTracker

            tracker = OfflineEmissionsTracker(
                country_iso_code="DEU",  # required; its emissions are not used
                output_methods=[],
                log_level="critical",
                allow_multiple_runs=True,  # otherwise a lock file refuses a second tracker
                pue=1.0,
            )
            tracker.start()
            return tracker
    except Exception:  # the measurement is optional, and the hardware may raise anything
        return None


def _stopped(tracker: Any) -> tuple[float, str] | None:
    """The kWh that a tracker measured, and how; None if it failed."""
    try:
        with _silence():
            tracker.stop()
            data, parts = tracker.final_emissions_data, tracker._hardware
            kwh = float(data.energy_consumed)
    except Exception:  # as above; codecarbon hides errors of its own too, and leaves attributes unset
        return None
    cpu = any(getattr(part, "_mode", None) in _CPU_MODES or type(part).__name__ in _CHIPS for part in parts)
    how = ["measured CPU power" if cpu else "CPU power estimated from its load"]
    how += ["measured GPU power"] if any(type(part).__name__ == "GPU" for part in parts) else []
    by = ", ".join([f"codecarbon {data.codecarbon_version}", *how, "RAM power estimated"])
    return (kwh, by) if 0 < kwh < math.inf else None


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress logging and warnings of codecarbon."""
    log = logging.getLogger("codecarbon")
    earlier, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = earlier
