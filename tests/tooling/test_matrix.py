"""How `scripts/matrix` chooses versions, and what it records."""

from pathlib import Path
from typing import Any

import pytest

from support.scripts import git, load_script

matrix = load_script("matrix")

PROJECT = """
[project]
dependencies = ["torch>=2.6", "numpy>=1.26,<9", "pyyaml>=6"]
"""
PAGE = f"before\n{matrix.BEGIN}{matrix.END}after\n"
VERSIONS = {"torch": "2.6.0+cpu", "numpy": "1.26.0"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with requirements and a page."""
    for name, text in {"pyproject.toml": PROJECT, matrix.PAGE: PAGE, "code.py": "", matrix.RECORD: "{}"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "change")


@pytest.fixture
def combinations_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The combinations that were run; all of them pass, without an environment."""
    names: list[str] = []

    def run(root: Path, name: str, python: Path | None, venv: Path) -> dict[str, Any]:
        names.append(name)
        head = matrix.git(root, "rev-parse", "HEAD").stdout.strip()
        counts = {"passed": 3, "failed": 0, "skipped": 1}
        return {"date": "2026-01-01", "commit": head, "python": "3.11.7", "versions": VERSIONS, **counts} | {
            "outcome": "passed"
        }

    monkeypatch.setattr(matrix, "run", run)
    return names


def test_the_lowest_versions_are_those_of_the_project(project: Path) -> None:
    assert matrix.lowest(project) == ["torch==2.6", "numpy==1.26", "pyyaml==6"]


def test_a_result_is_recorded_and_shown_between_the_marks(project: Path, combinations_run: list[str]) -> None:
    assert matrix.main(["3.11-lowest"], project) == 0
    assert combinations_run == ["3.11-lowest"]
    assert matrix.read_record(project)["3.11-lowest"]["passed"] == 3
    page = (project / matrix.PAGE).read_text("utf-8")
    assert page.startswith("before\n") and page.endswith(matrix.END + "after\n")
    assert "| 3.11-lowest | 3.11.7 | passed: 3 passed, 0 failed, 1 skipped | 2.6.0+cpu | 1.26.0 |" in page


def test_what_passed_is_run_again_only_after_a_change(project: Path, combinations_run: list[str]) -> None:
    matrix.main(["3.11-lowest"], project)
    commit(project)
    assert matrix.main(["3.11-lowest"], project) == 0
    assert combinations_run == ["3.11-lowest"]
    (project / "code.py").write_text("changed = True", encoding="utf-8")
    commit(project)
    matrix.main(["3.11-lowest"], project)
    assert combinations_run == ["3.11-lowest", "3.11-lowest"]


def test_changes_must_be_committed(project: Path, combinations_run: list[str]) -> None:
    (project / "code.py").write_text("changed = True", encoding="utf-8")
    assert matrix.main(["3.11-lowest"], project) == 2
    assert combinations_run == []


def test_a_python_that_is_missing_is_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "find_python", lambda version: None)
    assert matrix.main(["3.14-newest"], project) == 1
    assert "no such Python here" in (project / matrix.PAGE).read_text("utf-8")


def test_one_python_is_for_one_combination(project: Path) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--python", "/usr/bin/python3"], project)
