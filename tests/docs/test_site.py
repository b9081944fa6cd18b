"""The pages as files and as a site: links and anchors lead somewhere, and the navigation lists every page."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from support.documents import PAGES, without_code
from support.paths import ROOT
from support.scripts import load_script

build_docs = load_script("build-docs")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: words in lower case, joined by hyphens; the second of a name ends in -1."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}: there are {', '.join(sorted(anchors(file)))}"


def test_the_navigation_lists_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = re.findall(r"[\w/-]+\.md", yaml.safe_dump(navigation))
    assert sorted(listed) == sorted(build_docs.places().values())


class Links(HTMLParser):
    """The links and pictures of a page, and what can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.names |= {value for key, value in attributes if key in ("id", "name") and value}
        target = values.get({"a": "href", "img": "src", "link": "href", "script": "src"}.get(tag, ""))
        if target and values.get("rel") != "canonical":
            self.targets.append(target)


@pytest.mark.skipif(find_spec("zensical") is None, reason="zensical is not installed: pip install 'harp-prune[docs]'")
def test_the_built_site_has_no_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build-docs"), str(tmp_path / "site")]
    subprocess.run(command, check=True, capture_output=True)
    pages: dict[Path, Links] = {}
    for path in (tmp_path / "site").rglob("*.html"):
        pages[path] = Links()
        pages[path].feed(path.read_text("utf-8"))
    assert len(pages) > len(build_docs.places())
    for path, links in pages.items():
        if path.name == "404.html":  # its links are those of a server's root
            continue
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "data"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{path.name}: {target}"
            if parts.fragment and file in pages:
                assert unquote(parts.fragment) in pages[file].names | {"top"}, f"{path.name}: {target}"
