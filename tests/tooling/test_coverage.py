"""What `make coverage` makes of the reports of coverage."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.scripts import load_script

coverage = load_script("coverage")


def report(covered: int, branches: int) -> dict[str, Any]:
    """Of a package with one file."""
    summary = {"covered_branches": covered, "num_branches": branches, "covered_lines": 9, "num_statements": 10}
    return {"totals": summary, "files": {"masks.py": {"summary": summary, "missing_branches": [[3, 5], [7, -1]]}}}


def test_a_package_at_its_floor_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.verdict("pruning", 95.0, report(95, 100))
    assert "passed  harp.pruning: branches 95.0 % (floor 95.0), lines 90.0 %" in capsys.readouterr().out


@pytest.mark.parametrize("numbers", [(94, 100), (9499, 10000)])
def test_a_package_below_its_floor_fails_and_names_the_branches(
    capsys: pytest.CaptureFixture[str], numbers: tuple[int, int]
) -> None:
    assert not coverage.verdict("pruning", 95.0, report(*numbers))
    output = capsys.readouterr().out
    assert "FAILED  harp.pruning: branches 94." in output
    assert "masks.py" in output and "3->5, 7->exit" in output


def test_a_package_without_branches_passes() -> None:
    assert coverage.verdict("pruning", 100.0, report(0, 0))


def test_a_package_whose_tests_fail_fails() -> None:
    assert not coverage.verdict("pruning", 0.0, None)


def test_a_report_is_read_only_if_the_tests_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    status = 0

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (option,) = [word for word in command if word.startswith("--cov-report=json:")]
        Path(option.removeprefix("--cov-report=json:")).write_text(json.dumps(report(1, 2)), encoding="utf-8")
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(coverage.subprocess, "run", run)
    assert coverage.measure("pruning", ["tests/pruning"]) == report(1, 2)
    status = 1
    assert coverage.measure("pruning", ["tests/pruning"]) is None


def test_an_unknown_package_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(["prunning"]) == 2
    assert "prunning has no floor; these have: attacks" in capsys.readouterr().err


def test_the_floors_name_packages_and_tests_that_exist() -> None:
    floors = json.loads(coverage.FLOORS.read_text(encoding="utf-8"))
    for package, entry in floors.items():
        assert (ROOT / "src/harp" / package.replace(".", "/")).is_dir()
        assert all((ROOT / path).exists() for path in entry["tests"])
        assert 0 < entry["floor"] <= 100
