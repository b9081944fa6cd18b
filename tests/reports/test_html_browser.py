"""The report in a real browser, on a desktop and on a phone: nothing overflows, collides, is empty or logs an error."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harp.reports import html as report
from support.reports import make_run, many

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")

# Runs inside the page, which is opened in a frame of the wanted width: windows can't be as narrow as a phone.
MEASURE = """
const found = {wide: [], outside: [], collide: [], empty: [], small: [], drawings: 0, tables: 0, pictures: 0};
for (const one of document.querySelectorAll("details")) one.open = true;
const root = document.documentElement;
found.page = [root.scrollWidth, root.clientWidth];
for (const one of document.body.querySelectorAll("*")) {
  if (one.closest("svg, .scroll, pre") || !one.clientWidth) continue;
  if (one.scrollWidth > one.clientWidth + 1) found.wide.push([one.className, one.scrollWidth, one.clientWidth]);
}
for (const one of document.querySelectorAll(".scroll, pre")) {
  const box = one.getBoundingClientRect();
  if (box.right > root.clientWidth + 1 || box.left < -1) found.wide.push([one.className, box.right]);
}
found.tables = document.querySelectorAll("table").length;
for (const one of document.images) if (one.complete && one.naturalWidth > 0 && one.width > 8) found.pictures += 1;
for (const svg of document.querySelectorAll(".panel svg")) {
  found.drawings += 1;
  const name = svg.getAttribute("aria-label"), view = svg.viewBox.baseVal, texts = [];
  const shown = svg.getBoundingClientRect();
  if (shown.width / view.width * 10 < 8) found.small.push([name, shown.width / view.width]);
  for (const text of svg.querySelectorAll("text")) {
    const at = text.getBoundingClientRect(), zoom = view.width / shown.width;  // lines of a text are moved
    const box = {x: (at.x - shown.x) * zoom, y: (at.y - shown.y) * zoom};
    box.width = at.width * zoom, box.height = at.height * zoom;
    const inside = box.x >= -1 && box.y >= -1 && box.x + box.width <= view.width + 1 &&
      box.y + box.height <= view.height + 1;
    if (!inside || !box.width) found.outside.push([name, text.textContent, box.x, box.y, box.width, box.height]);
    texts.push([text.firstChild.data, box]);
  }
  for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [texts[i][1], texts[j][1]], air = 4;  // two lines' boxes are higher than their letters
    const beside = a.x >= b.x + b.width || b.x >= a.x + a.width;
    if (!beside && a.y + air < b.y + b.height && b.y + air < a.y + a.height)
      found.collide.push([name, texts[i][0], texts[j][0]]);
  }
  const marks = [...svg.querySelectorAll(".mark use, .mark path")].filter(mark => {
    const box = mark.getBBox();
    return box.width + box.height > 0 && getComputedStyle(mark).fill + getComputedStyle(mark).stroke !== "nonenone";
  });
  if (!marks.length) found.empty.push(name);
}
parent.postMessage(JSON.stringify(found), "*");
"""
FRAME = """<!doctype html><body style="margin:0"><pre id="answer"></pre><script>
addEventListener("message", event => { document.getElementById("answer").textContent = event.data; });
</script><iframe src="inner.html" style="border:0;width:WIDEpx;height:900px"></iframe>"""


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}")
    command = [CHROMIUM, *quiet, "--window-size=1400,900", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison, with names that are longer than there is room for."""
    root = tmp_path_factory.mktemp("runs")
    folders = [
        *many(root),
        make_run(root, "hydra", 0.02, options={"strategy": "a-strategy-with-a-name-without-any-end"}),
    ]
    for folder in folders:
        path = folder / "summary.json"
        content = json.loads(path.read_text())
        content["layers"][2]["name"] = "encoder.layers.11.self_attention.output_projection_with_more.weight"
        path.write_text(json.dumps(content))
    return report.build(folders, root / "report.html", ["html"])[0]


@pytest.mark.parametrize("width", [1280, 360])
def test_nothing_overflows_collides_or_is_empty(page: Path, tmp_path: Path, width: int) -> None:
    found = measured(page, tmp_path, width)
    assert found["drawings"] > 25 and found["tables"] > 20 and found["pictures"] == 3 * 11


def test_a_single_run_on_a_phone(tmp_path: Path) -> None:
    found = measured(report.build([make_run(tmp_path)], tmp_path / "one.html", ["html"])[0], tmp_path, 360)
    assert found["drawings"] == 9 and found["pictures"] == 3


@pytest.mark.parametrize("width", [1280, 360])
def test_several_models_and_data_sets_and_a_network_at_chance(tmp_path: Path, width: int) -> None:
    folders = [
        make_run(tmp_path, data="cifar10", model="resnet18"),
        make_run(tmp_path, "hydra", data="fashion-mnist", model="a/my_net.py:Net", value=0.05, evaluated=False),
        make_run(tmp_path, "harp", 0.01, data="fashion-mnist", model="a/my_net.py:Net", evaluated=False),
    ]
    measured(report.build(folders, tmp_path / "r.html", ["html"])[0], tmp_path, width)


def measured(page: Path, tmp_path: Path, width: int) -> dict[str, Any]:
    """What the browser finds in a page, after checking that nothing is out of place."""
    content = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
    (tmp_path / "inner.html").write_text(content.replace("</body>", f"<script>{MEASURE}</script></body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDE", str(width)))
    answer = browse(frame, tmp_path / "profile", "--dump-dom", "--virtual-time-budget=5000").stdout
    match = re.search(r'<pre id="answer">(\{.*?\})</pre>', answer, re.DOTALL)
    assert match, answer[-500:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert found["page"][0] <= found["page"][1] == width
    for what in ("wide", "outside", "collide", "empty", "small"):
        assert not found[what], (what, found[what][:5])
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_browser_logs_nothing_and_follows_the_colour_scheme(page: Path, tmp_path: Path, dark: bool) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    picture = tmp_path / "page.png"
    flags = (scheme, f"--screenshot={picture}", "--enable-logging=stderr", "--v=0")
    said = browse(page, tmp_path / "profile", *flags).stderr
    assert "CONSOLE" not in said, said
    image = pytest.importorskip("PIL.Image")
    with image.open(picture) as opened:
        corner = opened.convert("RGB").getpixel((2, 2))
    assert (max(corner) < 60) if dark else (min(corner) > 200)
