"""What the documentation names exists: commands and their options, files, modules. tests/docs/ runs its examples."""

import ast
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

import harp
from harp import cli
from harp.pruning.methods import PRUNERS
from support.documents import PAGES, blocks, without_code
from support.paths import ROOT
from test_imports import PACKAGES


def test_every_method_has_its_row() -> None:
    page = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\|(.*?)\|", page, re.MULTILINE)
    missing = set(PRUNERS) - set(re.findall("`(.+?)`", "".join(first_cells)))
    assert not missing, f"add a row to the first table of docs/reference/methods.md for {', '.join(sorted(missing))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_its_options_exist(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = re.findall(r"```(?:sh|shell|bash)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in "\n".join(shell).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["harp"]:
            continue
        parts = 3 if words[1] == "submit" else 2
        monkeypatch.setattr(sys, "argv", [*words[:parts], "--help"])
        with pytest.raises(SystemExit):
            cli.main()
        helped = capsys.readouterr().out
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in helped, f"{line}: {option}"


# Files that are no source: a user's own, and what a command writes.
ELSEWHERE = {"file.py", "my_methods.py", "my_net.py", "path/to/file.py"}
ELSEWHERE |= {"path/to/model.py", "rebuild.py", "logs/", "recipes/", "results/"}


def code_spans(page: Path) -> list[str]:
    """What stands in backticks, without code blocks."""
    return re.findall(r"`([^`\n]+)`", without_code(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    folders = [ROOT / "src" / "harp", ROOT, *([page.parent] if page.parent.name == "benchmarks" else [])]
    for span in code_spans(page):
        named = re.findall(r"[\w./-]+\.py\b", span) + re.findall(r"^[\w./-]+/$", span)
        for path in set(named) - ELSEWHERE:
            if re.search(r"\b[A-Z]+\b", path):  # such as NAME.py, a name to be filled in
                continue
            assert any((folder / path).exists() for folder in folders), f"{page.name}: {path} is not below src/harp"


def names_of_the_library(page: Path) -> set[str]:
    """The dotted names in backticks and in Python blocks that begin with `harp.`."""
    examples = [line for block in blocks(str(page.relative_to(ROOT)), "python") for line in block.splitlines()]
    lines = [line for line in examples if not re.match(r"\s*(from|import) ", line)]
    spans = [span for span in code_spans(page) if not re.search(r"python -m |^(from|import) ", span)]
    names = set(re.findall(r"(?<![\w/.-])harp(?:\.[A-Za-z_]\w*)+", "\n".join([*spans, *lines])))
    return names - {"harp.X"}  # any name


def imported_names(page: Path) -> set[str]:
    """The names that Python blocks import from modules of the library."""
    names = set()
    for node in ast.walk(ast.parse("\n".join(blocks(str(page.relative_to(ROOT)), "python")))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "harp":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_the_library_works_after_its_import(page: Path) -> None:
    for name in names_of_the_library(page):
        first = name.split(".")[1]
        assert first in harp.__all__ or first == "__version__", f"{page.name}: {name} is not public"
        thing: object = harp
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_that_an_example_imports_exists(page: Path) -> None:
    for name in imported_names(page):
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last) or import_module(name), f"{page.name}: {name}"


def test_the_architecture_page_lists_the_packages_in_order() -> None:
    (picture,) = blocks("docs/explanation/architecture.md", "text")
    assert tuple(line.split()[0] for line in picture.splitlines()) == PACKAGES


def test_the_move_is_left_out_of_blame() -> None:
    lines = (ROOT / ".git-blame-ignore-revs").read_text(encoding="utf-8").splitlines()
    hashes = [line for line in lines if line and not line.startswith("#")]
    assert hashes and all(re.fullmatch("[0-9a-f]{40}", line) for line in hashes)
