"""The pages of the documentation, and their code blocks."""

import re
from pathlib import Path

from support.paths import ROOT

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/**/*.md")]
)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def without_code(page: Path) -> str:
    """The text of a page without code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def json_keys(command: str) -> set[str]:
    """The keys of a command's JSON that the documentation names, up to the first semicolon: those always there."""
    page = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    section = page.partition("## JSON")[2].partition("## Output")[0]
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", section, re.MULTILINE)
    (cell,) = [keys for commands, keys in rows if f"`{command}`" in commands]
    return set(re.findall(r"`([a-z_]+)`", cell.partition(";")[0]))
