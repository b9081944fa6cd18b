"""The pages that are made from the source are what the source says now."""

import pytest

import harp
from support.paths import ROOT
from support.scripts import load_script

make_reference = load_script("make-reference")


@pytest.mark.parametrize("name", ["commands.md", "recipe-keys.md", "python.md"])
def test_the_page_is_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert make_reference.pages()[name] == written, "run scripts/make-reference"


def test_every_key_and_argument_has_a_meaning() -> None:
    for page in make_reference.pages().values():
        unexplained = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
        assert not unexplained


def test_every_public_name_is_on_the_page() -> None:
    page = make_reference.python_api()
    missing = [name for name in harp.__all__ if f"### harp.{name}\n" not in page and f"### harp.{name}." not in page]
    assert not missing, f"add their package to SECTIONS in scripts/make-reference: {', '.join(missing)}"
