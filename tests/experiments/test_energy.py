"""Energy and CO2: the paper's number by the formula, and a meter that never gets in the way."""

import builtins
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harp.errors import RecipeError
from harp.experiments import energy
from harp.system.distributed.environment import Place
from support.commands import RECIPE

CODECARBON = importlib.util.find_spec("codecarbon") is not None


def without_codecarbon(patch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "codecarbon":
            raise ImportError("No module named 'codecarbon'")
        return real(name, *rest, **more)

    patch.setattr(builtins, "__import__", fail)


def test_the_number_of_the_paper() -> None:
    used = energy.estimate(10_198, intensity=energy.PAPER_INTENSITY)
    assert round(used["co2_g"] / 1000, 2) == 2177.27
    assert round(used["kwh"], 1) == 3569.3
    assert used["by"] == "formula: 350 W x 1.02e+04 h x 610 g/kWh"


def test_the_power_of_several_processes() -> None:
    """Four on one processor don't draw four times its power; each GPU draws its own."""
    assert energy.assumed("cpu", 4) == energy.CPU_WATTS
    assert energy.assumed("cpu", 4, nodes=2) == 2 * energy.CPU_WATTS
    assert energy.assumed("cuda", 8, nodes=2) == 8 * energy.GPU_WATTS


def test_a_run_counts_its_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harp.experiments import recipe, run

    work = run.Run(recipe.parse(RECIPE), tmp_path)
    monkeypatch.setattr(run.environment, "here", lambda: Place(world=4, nodes=2))
    monkeypatch.setattr(work, "fabric", SimpleNamespace(world_size=4, device=SimpleNamespace(type="cpu")))
    assert (work.meter().watts, work.meter().nodes) == (2 * energy.CPU_WATTS, 2)


@given(
    hours=st.floats(0, 1e4),
    watts=st.floats(0, 1e4),
    intensity=st.floats(0, 1500),
    k=st.floats(0, 9),
)
def test_the_formula_is_a_product(hours: float, watts: float, intensity: float, k: float) -> None:
    one = energy.estimate(hours, watts=watts, intensity=intensity)
    assert one["kwh"] == pytest.approx(watts * hours / 1000)
    assert one["co2_g"] == pytest.approx(one["kwh"] * intensity)
    more = energy.estimate(k * hours, watts=watts, intensity=intensity)
    assert more["co2_g"] == pytest.approx(k * one["co2_g"])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"watts": -1.0}, "watts"), ({"watts": float("inf")}, "watts"), ({"intensity": float("nan")}, "intensity")],
)
def test_wrong_numbers_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        energy.estimate(1.0, **options)
    with pytest.raises(RecipeError, match="hours"):
        energy.estimate(-1.0)


def test_without_codecarbon_the_formula_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    without_codecarbon(monkeypatch)
    clock = iter([100.0, 136.0])
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with energy.Meter(watts=100) as meter:
        pass
    assert meter.result == {
        "kwh": pytest.approx(0.001),
        "co2_g": pytest.approx(0.475),
        "by": "formula: 100 W x 0.01 h x 475 g/kWh",
    }


def test_an_error_in_the_measured_block_is_raised_and_the_energy_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    without_codecarbon(monkeypatch)
    meter = energy.Meter()
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    assert meter.result["by"].startswith("formula: 65 W")


class Tracker:
    """A stand-in for codecarbon's, in the ways it can go wrong."""

    fault = ""
    seen: Any = SimpleNamespace(energy_consumed=0.5, codecarbon_version="3.9")

    def __init__(self, **options: Any) -> None:
        assert options["output_methods"] == [] and options["pue"] == 1.0
        self._hardware = [type("CPU", (), {"_mode": "intel_rapl"})(), type("GPU", (), {})()]

    def start(self) -> None:
        if self.fault == "start":
            raise RuntimeError("no power counters")

    def stop(self) -> None:
        if self.fault == "stop":
            raise RuntimeError("gone")
        if self.fault != "nothing":
            self.final_emissions_data = self.seen


@pytest.mark.parametrize("fault", ["start", "stop", "nothing", "zero"])
def test_a_failing_codecarbon_falls_back_to_the_formula(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    seen = SimpleNamespace(energy_consumed=0.0, codecarbon_version="3.9") if fault == "zero" else Tracker.seen
    broken = type("Broken", (Tracker,), {"fault": fault, "seen": seen})
    monkeypatch.setitem(sys.modules, "codecarbon", SimpleNamespace(OfflineEmissionsTracker=broken))
    with energy.Meter() as meter:
        pass
    assert meter.result["by"].startswith("formula: 65 W") and meter.result["kwh"] >= 0


def test_the_measurement_of_codecarbon_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon", SimpleNamespace(OfflineEmissionsTracker=Tracker))
    with energy.Meter() as meter:
        pass
    assert meter.result == {
        "kwh": 0.5,
        "co2_g": 237.5,
        "by": "codecarbon 3.9, measured CPU power, measured GPU power, RAM power estimated",
    }
    with energy.Meter(nodes=3) as several:  # it sees this machine alone
        pass
    assert several.result["kwh"] == 1.5 and several.result["by"].endswith(", one of 3 nodes")


@pytest.mark.skipif(not CODECARBON, reason="codecarbon is not installed (the extra `energy`)")
def test_codecarbon_itself_offline_silent_and_without_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*words: Any, **more: Any) -> Any:
        raise AssertionError("the network was asked")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with energy.Meter() as meter:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
    assert meter.result["by"].startswith("codecarbon 3.")
    assert 0 < meter.result["kwh"] < 0.01
    assert meter.result["co2_g"] == pytest.approx(meter.result["kwh"] * energy.INTENSITY)
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == []
    assert not logging.getLogger("codecarbon").disabled


def test_importing_the_module_does_not_import_codecarbon() -> None:
    code = "import sys; import harp.experiments.energy; sys.exit('codecarbon' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
