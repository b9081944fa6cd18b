"""Which tests `make quick` runs."""

import subprocess
from pathlib import Path

import pytest

from support.scripts import git, load_script

quick = load_script("quick")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository in a folder with a space, with two packages and their tests."""
    root = tmp_path / "a project"
    for name in (
        "src/harp/errors.py",
        "src/harp/pruning/methods/harp.py",
        "src/harp/models/vgg.py",
        "tests/pruning/test_masks.py",
        "tests/models/test_models.py",
        "tests/support/cases.py",
        "tests/conftest.py",
        "tests/test_api.py",
        "tests/test_docs.py",
        "docs/methods.md",
        "LICENSE",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("first\n", encoding="utf-8")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def test_nothing_changed_means_no_tests(project: Path) -> None:
    assert quick.choose(quick.changed_files(project), project) == ([], [])


def test_changes_of_all_kinds_are_seen(project: Path) -> None:
    (project / "src/harp/models/vgg.py").write_text("edited\n")
    (project / "docs/methods.md").unlink()
    (project / "tests/pruning/test ö.py").write_text("new\n")
    (project / "src/harp/errors.py").write_text("staged\n")
    git(project, "add", "src/harp/errors.py")
    git(project, "mv", "tests/models/test_models.py", "tests/models/test_vgg.py")
    assert quick.changed_files(project) == [
        "docs/methods.md",
        "src/harp/errors.py",
        "src/harp/models/vgg.py",
        "tests/models/test_models.py",
        "tests/models/test_vgg.py",
        "tests/pruning/test ö.py",
    ]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/harp/pruning/methods/harp.py", "tests/pruning"),
        ("src/harp/pruning/masks.py", "tests/pruning"),
        ("tests/models/test_models.py", "tests/models"),
        ("src/harp/errors.py", "tests/test_api.py"),
        ("tests/test_docs.py", "tests/test_docs.py"),
        ("docs/methods.md", "tests/test_docs.py"),
        ("README.md", "tests/test_docs.py"),
    ],
)
def test_a_changed_file_brings_its_tests(project: Path, changed: str, tests: str) -> None:
    assert quick.choose([changed], project) == ([tests], [])


@pytest.mark.parametrize(
    "changed",
    ["tests/support/cases.py", "tests/conftest.py", "tests/test_deleted.py", "src/harp/untested/new.py", "LICENSE"],
)
def test_what_has_no_tests_of_its_own_is_named(project: Path, changed: str) -> None:
    assert quick.choose([changed], project) == ([], [changed])


def test_a_package_is_tested_once(project: Path) -> None:
    changed = ["src/harp/models/vgg.py", "src/harp/pruning/masks.py", "tests/models/test_models.py"]
    assert quick.choose(changed, project) == (["tests/models", "tests/pruning"], [])


def test_an_unknown_package_is_an_error_that_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick.main(["prunning"]) == 2
    message = capsys.readouterr().err
    assert "tests/prunning" in message and "pruning" in message and "support" not in message


def test_every_check_runs_and_one_failure_fails_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1 if "mypy" in command else 0)

    monkeypatch.setattr(quick.subprocess, "run", run)
    assert quick.main(["pruning"]) == 1
    assert [command[2] for command in commands if command[1] == "-m"] == ["ruff", "ruff", "mypy", "pytest"]
    assert commands[-1][-1] == "tests/pruning"
    output = capsys.readouterr().out
    assert "FAILED  types" in output and "passed  tests (tests/pruning)" in output
