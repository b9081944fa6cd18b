"""How `make slow` chooses its parts, and what it records."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.scripts import git, load_script

slow = load_script("slow")

# The marker is put in later: this file has no slow tests.
FILE = "import pytest\n\n@pytest.mark.{marker}\ndef test_slow():\n    {body}\n\ndef test_quick():\n    assert False\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository in a folder with a space: two packages with slow tests, one without."""
    root = tmp_path / "a project"
    contents = {
        "tests/engine/test_engine.py": FILE.format(marker="slow", body="pass"),
        "tests/models/test_models.py": "def test_models():\n    pass\n",
        "tests/pruning/test_masks.py": FILE.format(marker="slow", body="assert False"),
        "pytest.ini": "[pytest]\nmarkers = slow\naddopts = -m 'not slow' -p no:cacheprovider --import-mode=importlib\n",
        ".gitignore": "__pycache__/\n",
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    git(root, "init", "--quiet")
    commit(root)
    return root


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "change")


def row(root: Path, part: str) -> dict[str, Any]:
    return json.loads((root / slow.RECORD).read_text(encoding="utf-8"))[part]


@pytest.fixture
def parts_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that were run; all of them pass, without pytest."""
    parts: list[str] = []

    def run_part(root: Path, part: str) -> dict[str, Any]:
        parts.append(part)
        head = slow.git(root, "rev-parse", "HEAD").stdout.strip()
        return {**slow.NOT_RUN, "date": "2026-01-01", "commit": head, "passed": 1, "outcome": "passed"}

    monkeypatch.setattr(slow, "run_part", run_part)
    return parts


def test_the_results_of_real_tests_are_recorded(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert slow.main(["engine"], project) == 0
    head = slow.git(project, "rev-parse", "HEAD").stdout.strip()
    counts = {"passed": 1, "failed": 0, "skipped": 0}
    assert row(project, "engine") == {
        **counts,
        "outcome": "passed",
        "commit": head,
        "date": row(project, "engine")["date"],
    }
    assert row(project, "pruning") == slow.NOT_RUN
    assert slow.main([], project) == 1
    assert row(project, "engine")["outcome"] == "passed"
    assert row(project, "pruning") | {"date": "", "commit": ""} == {
        "date": "",
        "commit": "",
        "passed": 0,
        "failed": 1,
        "skipped": 0,
        "outcome": "failed",
    }
    assert "tests/engine passed at this commit already" in capfd.readouterr().out


def test_tests_that_are_all_skipped_have_not_passed(project: Path) -> None:
    text = FILE.format(marker="slow", body="pytest.skip('not here')")
    (project / "tests/engine/test_engine.py").write_text(text, encoding="utf-8")
    commit(project)
    assert slow.main(["engine"], project) == 1
    assert (row(project, "engine")["skipped"], row(project, "engine")["outcome"]) == (1, "failed")


def test_a_part_that_passed_is_run_again_only_after_a_change(project: Path, parts_run: list[str]) -> None:
    assert slow.main([], project) == 0
    assert parts_run == ["engine", "pruning"]
    commit(project)
    assert slow.main([], project) == 0
    assert parts_run == ["engine", "pruning"], "the commit of the record is no reason to run again"
    (project / "source.py").write_text("changed\n", encoding="utf-8")
    commit(project)
    assert slow.main(["engine"], project) == 0
    assert parts_run == ["engine", "pruning", "engine"]


def test_a_commit_that_is_gone_counts_for_nothing(project: Path, parts_run: list[str]) -> None:
    gone = {**slow.NOT_RUN, "commit": "0" * 40, "outcome": "passed"}
    slow.write_record(project, {"engine": gone})
    slow.main(["engine"], project)
    assert parts_run == ["engine"]


@pytest.mark.parametrize("name", ["tests/engine/test_engine.py", "new.py"])
def test_nothing_is_run_with_changes_that_are_not_committed(project: Path, parts_run: list[str], name: str) -> None:
    (project / name).write_text("changed\n", encoding="utf-8")
    assert slow.main([], project) == 2
    assert not parts_run
    assert not (project / slow.RECORD).exists()


def test_a_folder_without_slow_tests_is_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slow.main(["models"], project) == 2
    assert "tests/models has no slow tests; these have: engine, pruning" in capsys.readouterr().err


def test_a_run_that_left_no_report_has_not_passed(tmp_path: Path) -> None:
    assert slow.counts_of(tmp_path / "report.xml") == {"passed": 0, "failed": 0, "skipped": 0}


def test_the_committed_record_names_every_folder_with_slow_tests() -> None:
    record = json.loads((slow.ROOT / slow.RECORD).read_text(encoding="utf-8"))
    assert list(record) == slow.slow_parts(slow.ROOT)
    for result in record.values():
        assert set(result) == set(slow.NOT_RUN)
        assert result["outcome"] in ("passed", "failed", "not run")
