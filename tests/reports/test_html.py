"""The report: what it says is what the files say, in all three forms, and nothing wrong gets in or breaks it."""

import json
import math
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from harp.errors import HarpError, RecipeError, RunFolderError
from harp.experiments import records
from harp.reports import html as report
from harp.reports import templating
from harp.reports.html import accuracy as accuracies
from harp.reports.html import blocks, collect, compose, groups
from support.reports import HOSTILE, accuracy, evaluation, make_run, many

VOID = {"meta", "link", "img", "br", "hr", "input"}


WIDTHS = (("block1.conv.weight", 8), ("block2.conv.weight", 16))


def channel_run(root: Path, method: str = "harp", keep: float = 0.25, seed: int = 0, **facts: Any) -> Path:
    """A run that pruned channels under a budget of FLOPs."""
    folder = make_run(root, method, keep, seed, name=f"slim-{method}-{keep:g}", **facts)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"units": {"kind": "channels"}}, sort_keys=False))
    summary = json.loads((folder / "summary.json").read_text())
    summary["layers"] = [{"name": n, "size": size, "kept": round(size * keep**0.5)} for n, size in WIDTHS]
    kept = round(1_000_000 * keep) - 1000 * (seed + 1)
    summary["budget"] = {"kind": "channels", "unit": "FLOPs", "size": 1_000_000, "total": 250_000, "kept": kept}
    macs = {f"block{i}.conv.weight": 100_000 * (i + 1) for i in range(3)}
    summary["cost"]["layers"] = [{"name": n, "macs": m, "macs_kept": round(m * keep)} for n, m in macs.items()]
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class Page(HTMLParser):
    """A page's elements, checked for being closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def reported(folders: list[Path], out: Path) -> dict[str, str]:
    """The three forms of a report, by their endings."""
    return {path.suffix: path.read_text("utf-8") for path in report.build(folders, out)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("runs")
    return {path.suffix: path.read_text("utf-8") for path in report.build(many(root), root / "out.html")}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("run")
    return {path.suffix: path.read_text("utf-8") for path in report.build([make_run(root)], root / "out")}


def test_page_is_well_formed_small_and_needs_no_other_file(built: dict[str, str]) -> None:
    found = Page(built[".html"])
    assert len(built[".html"].encode()) < 1_000_000
    assert not {"script", "iframe", "object", "embed", "base"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        for key in ("src", "href", "srcset", "data", "action"):
            value = attributes.get(key)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
        assert not [key for key in attributes if key.startswith("on")]
    assert "http://" not in built[".html"] and "https://" not in built[".html"]
    assert "@import" not in built[".html"] and "url(" not in built[".html"]


def test_all_chapters_have_titles_captions_charts_and_numbers(built: dict[str, str]) -> None:
    found = Page(built[".html"])
    anchors = {attributes.get("id") for tag, attributes in found.tags if tag == "section"}
    wanted = "results curves checks parts classes examples layers weights learning flips corruptions cost origin"
    assert anchors == set(wanted.split())
    figures = built[".html"].split("<figure")[1:]
    drawn = [figure for figure in figures if 'class="panels' in figure.split("</figure>")[0]]
    assert len(drawn) >= 7
    colours = set(re.findall(r"(--\w+):", built[".html"].split("</style>")[0]))
    for figure in drawn:
        body = figure.split("</figure>")[0]
        assert re.search(r"<h3>[^<]+</h3>", body) and re.search(r"<figcaption>[^<]{30,}", body)
        assert "<details" in body and "<table" in body
        for svg in re.findall(r'<div class="panel">.*?(<svg .*?</svg>)', body, re.DOTALL):
            assert 'role="img" aria-label="' in svg and svg.count("<text") > 3
            assert re.search(r'class="mark">(<title|.*?<use[^>]*><title)', svg), "something is drawn, with a tooltip"
            assert set(re.findall(r"var\((--\w+)\)", svg)) <= colours and "#" not in re.sub(
                r'(href|id)="[^"]*"', "", svg
            )
    assert 'href="#results"' in built[".html"]


def test_numbers_of_a_run_are_those_of_its_files(single: dict[str, str]) -> None:
    words = Page(single[".html"]).words.replace("\xa0", " ")
    assert "weights 600 → 60 (10.000%), natural 80.0% → 70.0%, pgd-20 60.0% → 50.0%" in words
    assert "60 of 600" in words and "60.0 % → 50.0 %" in words and "−10.0 points" in words
    assert "50 times fewer" in words and "5.6 times smaller" in words
    assert "The worst class is 'owl' with 22.4 % (autoattack, ε 8/255)" in words
    assert "Counted while attacking: 46.00 %; the found images, classified once more: 45.00 %" in words
    assert "15 (15.0 %)" in words and "0.5 kWh" in words and "180 g" in words and "4 min" in words
    for number in ("597", "59.7 %", "harp 1.2.3, torch 2.9", "never", "toys; checksums agree"):
        assert number in words, number


def test_a_run_that_pruned_channels_shows_flops_and_widths(tmp_path: Path) -> None:
    files = reported([channel_run(tmp_path, epochs=2)], tmp_path / "report")
    page, data = Page(files[".html"]), json.loads(files[".json"])
    line = "FLOPs 1,000,000 → 249,000 (24.900%), channels 24 → 12, MACs 4,000,000 → 80,000, parameters 700 → 170"
    (part,) = data["parts"]
    assert part["headline"].startswith(line) and line in page.words and line in files[".md"]
    for words in ("FLOPs kept", "Channels kept", "Multiplications (MACs) per layer", "24.9 %", "cut out"):
        assert words in page.words, words
    for words in ("weights kept", "Preserved weights", "skips zeros", "stored sparsely", "(estimate)"):
        assert words not in page.words, words
    (network,) = part["networks"]
    assert (network["kind"], network["unit"], network["label"]) == ("channels", "FLOPs", "HARP, 25 % FLOPs")
    assert [one["layer"] for one in network["weights"]] == [f"block{i}.conv.weight" for i in range(3)]
    tables = {table["title"]: table for section in part["sections"] for table in section["tables"]}
    widths = tables["Channels kept in each layer: 25 % of the FLOPs"]
    assert widths["columns"][:2] == ["read by", "channels"]
    assert widths["rows"] == [["block1.conv", "8", "4 (50 %)"], ["block2.conv", "16", "8 (50 %)"]]
    work = tables["Multiplications (MACs) per layer"]
    assert work["rows"][0] == ["block0.conv", "100,000", "25,000"]
    assert work["rows"][-1] == ["all layers", "600,000", "150,000"]


def test_multiplications_per_layer_are_shown_for_pruned_weights_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    summary["cost"]["layers"] = [{"name": "block0.conv.weight", "macs": 1000, "macs_kept": 10}]
    (folder / "summary.json").write_text(json.dumps(summary))
    files = reported([folder], tmp_path / "report")
    assert "| block0.conv | 1,000 | 10 |" in files[".md"] and "skips zeros" in files[".md"]


def test_shares_of_weights_and_of_flops_are_not_mixed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, method, keep) for method in ("harp", "hydra") for keep in (0.1, 0.01)]
    folders += [channel_run(tmp_path, method, keep) for method in ("harp", "hydra") for keep in (0.25, 0.5)]
    folders += [channel_run(tmp_path, "harp", 0.25, 1)]
    files = reported(folders, tmp_path / "report")
    data = json.loads(files[".json"])
    (part,) = data["parts"]
    chapter = part["sections"][0]
    sparsity, flops = chapter["tables"][:2]
    assert [table["title"] for table in (sparsity, flops)] == ["Accuracy over sparsity", "Accuracy over FLOPs"]
    assert [row[0] for row in sparsity["rows"]][1:] == ["HARP, 10 %", "HYDRA, 10 %", "HARP, 1 %", "HYDRA, 1 %"]
    assert all(row[0].endswith(" % FLOPs") for row in flops["rows"][1:])
    assert files[".html"].count(">weights kept (%") == files[".html"].count(">FLOPs kept (%") == 2, "two panels each"
    assert any("budgets count different things (weights, FLOPs)" in note for note in part["warnings"])
    assert not any("different numbers" in note for note in part["warnings"]), "sizes differ by their unit only"
    labels = [network["label"] for network in part["networks"]]
    assert len(set(labels)) == len(labels) == 8
    assert "HARP, 10 %" in labels and "HARP, 25 % FLOPs" in labels
    assert "60 of 600 weights" in [row[2] for row in sparsity["rows"]]
    assert "249,000 / 248,000 of 1,000,000 FLOPs" in [row[2] for row in flops["rows"]]
    assert "weights 600 → 6 (1.000%)" in part["headline"], "most networks count weights"


def test_units_tested_under_different_attacks_are_each_shown_under_their_own(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, keep=0.1, evaluated=False), make_run(tmp_path, keep=0.01, evaluated=False)]
    for keep in (0.25, 0.5):
        folders.append(channel_run(tmp_path, keep=keep, evaluated=False))
        summary = json.loads((folders[-1] / "summary.json").read_text())
        summary["results"][1] = accuracy("pgd-5", 0.4, epsilon=8 / 255)
        (folders[-1] / "summary.json").write_text(json.dumps(summary))
    page = reported(folders, tmp_path / "report")[".html"]
    for attack in ("pgd-20", "pgd-5"):
        assert page.count(f">accuracy under {attack}, ε 8/255 (%)<") == 1
    assert page.count(">accuracy without attack (%)<") == 2


def test_the_best_network_at_the_smallest_budget_is_shown_first(tmp_path: Path) -> None:
    folders = [channel_run(tmp_path, "harp", value=0.6), channel_run(tmp_path, "hydra", seed=5, value=0.3)]
    arranged = groups.arrange(collect.read(folders))
    assert arranged.lead.method == "HARP" and arranged.lead.share > min(v.share for v in arranged.pruned)
    text = reported(folders, tmp_path / "report")[".md"]
    assert "HARP, 25 % FLOPs, the best of 2 at the smallest budget" in text


def test_an_exceeded_budget_is_refused(tmp_path: Path) -> None:
    folder = channel_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    summary["budget"]["kept"] = 2_000_000
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunFolderError, match="budget: keeps 2000000 of 1000000"):
        collect.read([folder])


def test_seeds_become_means_with_intervals(built: dict[str, str]) -> None:
    data = json.loads(built[".json"])
    network = next(one for one in data["parts"][0]["networks"] if one["label"] == "HARP, 10 %")
    score = next(one for one in network["accuracy"] if one["attack"] == "pgd-20")["after"]
    half = 12.706 * math.sqrt(0.0002) / math.sqrt(2)
    assert network["seeds"] == [0, 1] and score["runs"] == 2
    assert score["value"] == pytest.approx(0.59)
    assert [score["low"], score["high"]] == pytest.approx([0.59 - half, 0.59 + half], abs=1e-4)
    assert "59.0 ± 12.7" in built[".md"]


def test_json_has_all_records_and_only_finite_numbers(built: dict[str, str]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads(built[".json"], parse_constant=refuse)
    networks = data["parts"][0]["networks"]
    assert len(data["runs"]) == 10 and len(networks) == 5
    assert data["runs"][0]["stages"][1]["history"][3]["budget_loss"] == 0
    assert [layer["kept"] for layer in data["runs"][0]["summary"]["layers"][:3]] == [10, 20, 30]
    assert sum(networks[1]["weights"][0]["counts"]) == networks[1]["weights"][0]["kept"] == 10
    examples = next(one for one in data["runs"][0]["evaluation"] if one.get("shape"))
    assert examples["items"] == [{"index": 7, "label": 0, "before": 0, "after": 3}]


def test_markdown_has_tables_of_equal_width(built: dict[str, str]) -> None:
    blocks = re.split(r"\n\n", built[".md"])
    tables = [block.split("\n") for block in blocks if block.startswith("|")]
    assert len(tables) > 12
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
        assert len(widths) == 1, table[0]
    assert "| worst class |" in built[".md"].replace("\\", "")


@pytest.mark.parametrize("suffix", [".html", ".md", ".json"])
def test_no_file_contains_paths_of_the_machine(single: dict[str, str], suffix: str, tmp_path: Path) -> None:
    assert "/home/me" not in single[suffix] and str(tmp_path.parent.parent) not in single[suffix]
    assert "toys; checksums agree" in single[suffix] and "w.pt" in single[suffix]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path, name="evil")
    content = json.loads((folder / "summary.json").read_text())
    content["layers"][0]["name"] = content["name"] = content["source"] = HOSTILE + '"&|`'
    content["results"][1]["name"] = HOSTILE
    (folder / "summary.json").write_text(json.dumps(content))
    stage = next((tmp_path / "stages").glob("*prune*")) / "stage.json"
    stage.write_text(json.dumps({**json.loads(stage.read_text()), "stage": HOSTILE}))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["stages"][1]["pruner"] = {"name": HOSTILE, "keep": 0.1, "strategy": "]]>--></svg></style>"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    html, _, markdown = (path.read_text("utf-8") for path in report.build([folder], tmp_path / "r.html"))
    found = Page(html)
    assert "script" not in {tag for tag, _ in found.tags} and HOSTILE in found.words
    outside = re.sub(r"```yaml\n.*?\n```", "", markdown, flags=re.DOTALL)
    assert outside != markdown and "<script" not in outside


def test_a_run_with_nothing_but_its_summary_makes_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path, evaluated=False)
    content = json.loads((folder / "summary.json").read_text())
    del content["cost"], content["source"]
    content["dense"], content["results"] = [], content["results"][:1]
    content["results"][0].pop("versions")
    (folder / "summary.json").write_text(json.dumps(content))
    for name in ("model.safetensors", "masks.safetensors"):
        (folder / name).unlink()
    for path in (tmp_path / "stages").glob("*/stage.json"):
        path.unlink()
    html = report.build([folder], tmp_path / "r.html", ["html"])[0].read_text("utf-8")
    found = Page(html)
    anchors = {attributes.get("id") for tag, attributes in found.tags if tag == "section"}
    assert anchors == {"results", "layers", "classes", "cost", "origin"}
    for note in ("No evaluation beyond", "No run was tested under attack", "no file of weights", "stages are missing"):
        assert note in found.words
    assert "nan" not in found.words.lower().split()


@pytest.mark.parametrize("kind", list(evaluation(0.5)))
def test_every_kind_of_record_alone_makes_a_report(tmp_path: Path, kind: str) -> None:
    folder = make_run(tmp_path, evaluated=False)
    (folder / "evaluation" / "x.json").write_text(json.dumps(evaluation(0.5)[kind]))
    assert len(report.build([folder], tmp_path / "r.html")) == 3


def test_notes_warn_of_failed_checks_and_small_tests(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    content = json.loads((folder / "summary.json").read_text())
    content["results"] = [accuracy("natural", 0.4, 100), accuracy("pgd-20", 0.5, 100, 8 / 255)]
    (folder / "summary.json").write_text(json.dumps(content))
    for path in (tmp_path / "stages").glob("*prune*/stage.json"):
        stage = json.loads(path.read_text())
        path.write_text(json.dumps({**stage, "history": [{**record, "ready": False} for record in stage["history"]]}))
    curve = {**evaluation(0.5)["curve"], "n": 60}
    (folder / "evaluation" / "curve.json").write_text(json.dumps(curve))
    (folder / "evaluation" / "new.json").write_text('{"kind": "horoscope"}')
    words = "\n".join(compose.compose(groups.parts(collect.read([folder])), [{}]).parts[0].notes)
    for note in (
        "check for false robustness failed (gradients)",
        "more accurate under pgd-20, ε 8/255 than without",
        "budget was not met in training by HARP, 10 %",
        "Few test images (100)",
        "measured on few images (60 and more)",
        "subset of the test set (2,000 images",
        "evaluation/new.json is of an unknown kind",
    ):
        assert note in words, note


def test_of_repeated_measurements_the_one_on_most_images_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path, evaluated=False)
    curve = evaluation(0.5)["curve"]
    points = [{"epsilon": 0.1, "value": 0.25}]
    for name, content in {
        "a": {**curve, "n": 100},
        "b": {**curve, "n": 1000, "points": points},
        "c": {**curve, "n": 50},
        "d": {"kind": "radius", "name": "one point of a curve"},
        "e": {"kind": "accuracy", **accuracy("pgd-20", 0.4, 100, 8 / 255)},
        "f": {"kind": "accuracy", **accuracy("natural", 0.75, 5000)},
    }.items():
        (folder / "evaluation" / f"{name}.json").write_text(json.dumps(content))
    (run,) = collect.read([folder])
    assert [point.value for point in run.of(records.Curve)[0].points] == [0.25] and len(run.of(records.Curve)) == 1
    assert {result.name: result.value for result in run.results} == {"natural": 0.75, "pgd-20": 0.5}
    assert not run.unknown


def unlink_recipe(folder: Path) -> None:
    (folder / "recipe.yaml").unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no recipe": (unlink_recipe, "is no run: there is no recipe.yaml"),
    "no summary": (lambda folder: (folder / "summary.json").unlink(), "is not finished: there is no summary.json"),
    "cut": (lambda folder: (folder / "summary.json").write_text('{"recipe": "a", "na'), "summary.json can't be read"),
    "a list": (lambda folder: (folder / "summary.json").write_text("[]"), "holds a list, not an object"),
    "empty": (
        lambda folder: (folder / "summary.json").write_text("{}"),
        "is damaged: recipe: Field required",
    ),
    "bytes": (lambda folder: (folder / "summary.json").write_bytes(b"\xff\xfe\x00"), "summary.json can't be read"),
    "yaml": (lambda folder: (folder / "recipe.yaml").write_text("{"), "recipe.yaml is damaged"),
    "no stages": (lambda folder: (folder / "recipe.yaml").write_text("name: x"), "has no list of stages"),
    "weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 9), "model.safetensors"),
    "value": (
        lambda folder: (folder / "evaluation" / "aa.json").write_text('{"kind": "curve"}'),
        "damaged: attack",
    ),
    "picture": (
        lambda folder: (folder / "evaluation" / "examples.json").write_text(
            json.dumps({**evaluation(0.5)["examples"], "shape": [1, 2, 2]})
        ),
        "has 48 bytes, but its shape (1, 2, 2) needs 4",
    ),
}


@pytest.mark.parametrize("damage", list(BROKEN))
def test_a_damaged_run_is_a_one_line_error_and_overwrites_nothing(tmp_path: Path, damage: str) -> None:
    good, bad = make_run(tmp_path), make_run(tmp_path, keep=0.05)
    out, texts = tmp_path / "out" / "r.html", ("json", "md")
    report.build([good], out, texts)
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    ruin, message = BROKEN[damage]
    ruin(bad)
    with pytest.raises(HarpError) as caught:
        report.build([good, bad], out, texts)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    for wrong in (lambda: report.build([], tmp_path), lambda: report.build([tmp_path / "none"], tmp_path)):
        with pytest.raises(HarpError):
            wrong()
    with pytest.raises(RecipeError, match=r"format 'pdf': a report can be html, json, md"):
        report.build([folder], tmp_path, ["pdf"])
    (tmp_path / "file").write_text("")
    with pytest.raises(HarpError):
        report.build([folder], tmp_path / "file")


def test_files_are_written_where_asked_and_are_reproducible(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    made = report.build([folder, folder], tmp_path / "a" / "page.html", ["md", "html"])
    assert [path.name for path in made] == ["page.md", "page.html"]
    again = report.build([folder], tmp_path / "b")
    assert [path.name for path in again] == ["report.html", "report.json", "report.md"]
    assert again[0].read_bytes() == made[1].read_bytes(), "a run given twice counts once"


def test_methods_of_one_name_are_labelled_by_the_options_that_differ(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path, "hydra", 0.1, options={"strategy": "lamp"}),
        make_run(tmp_path, "hydra", 0.1),
        make_run(tmp_path, "r-admm", 0.1, options={"rho": 0.01}),
        make_run(tmp_path, "r-admm", 0.1, options={"rho": 0.1}),
        make_run(tmp_path, "harp", 0.1, options={"gamma_step": 0.1}),
        make_run(tmp_path, "harp", 0.01, options={"gamma_step": 0.2}),
    ]
    found = groups.arrange(collect.read(folders))
    assert sorted(found.methods) == ["HARP", "HYDRA", "HYDRA + LAMP", "R-ADMM (rho 0.01)", "R-ADMM (rho 0.1)"]
    assert [title for title, _ in found.panels(found.pruned)] == ["10 % of the weights", "1 % of the weights"]
    assert found.lead.label == "HARP, 1 %"


def test_each_data_set_and_model_has_a_part_of_its_own(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path, keep=0.1, data="cifar10", model="resnet18", evaluated=False),
        make_run(tmp_path, keep=0.1, data="cifar10", model="nets/my_net.py:Net", evaluated=False),
        make_run(tmp_path, "hydra", 0.1, data="fashion-mnist", model="nets/my_net.py:Net", evaluated=False),
        make_run(tmp_path, "harp", 0.1, data="fashion-mnist", model="nets/my_net.py:Net", evaluated=False),
    ]
    summary = json.loads((folders[1] / "summary.json").read_text())
    summary["dense"] = [accuracy("natural", 0.9), accuracy("pgd-20", 0.7, epsilon=8 / 255)]
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    files = reported(folders, tmp_path / "report")
    parts = json.loads(files[".json"])["parts"]
    assert [part["title"] for part in parts] == [
        "HARP, 10 % – resnet18 on CIFAR-10",
        "HARP, 10 % – my_net on CIFAR-10",
        "my_net on Fashion-MNIST: 2 methods, 1 budget",
    ]
    before = [row[3] for part in parts[:2] for row in part["sections"][0]["tables"][0]["rows"]]
    assert before == ["80.0 %", "60.0 %", "90.0 %", "70.0 %"], "no mean of different networks"
    assert "2 models on 2 data sets" in Page(files[".html"]).words
    ids = re.findall(r'id="([^"]+)"', re.sub(r"<svg.*?</svg>", "", files[".html"], flags=re.DOTALL))
    assert len(set(ids)) == len(ids) and set(re.findall(r'<a[^>]*href="#([^"]+)"', files[".html"])) <= set(ids)
    assert files[".md"].count("\n# ") == 3 and "> **Warning:**" not in files[".md"]


def test_a_network_at_chance_looks_different_everywhere(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path, keep=keep, value=value, evaluated=False) for keep, value in ((0.1, 0.5), (0.01, 0.05))
    ]
    files = reported(folders, tmp_path / "report")
    (part,) = json.loads(files[".json"])["parts"]
    assert [network["remark"] for network in part["networks"]] == [None, "at chance level"]
    assert "> **Warning:** At chance level: HARP, 1 %, seed 0.\n" in files[".md"]
    assert [row[-1] for row in part["sections"][0]["tables"][0]["rows"]] == ["", "", "at chance level"]
    assert files[".html"].count(">always the same answer<") == 2, "a line in both charts"
    assert files[".html"].count('class="tile failed"') == 2
    good = reported(folders[:1], tmp_path / "good")
    assert "always the same answer" not in good[".html"] and 'class="tile failed"' not in good[".html"]


def test_one_budget_is_bars_and_several_are_a_logarithmic_axis(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, method, keep) for keep in (0.1, 0.01) for method in ("harp", "hydra")]
    for count, name in ((2, "overview"), (4, "sparsity")):
        (runs,) = groups.parts(collect.read(folders[:count]))
        results = accuracies.results(runs)
        assert results is not None
        (figure, _) = results.blocks
        assert (
            isinstance(figure, blocks.Figure)
            and figure.title == blocks.words("figures", name, what="sparsity", unit="")[0]
        )
        assert (
            [(chart.kind, chart.log) for chart in figure.charts] == [("bars", False)]
            if count == 2
            else [("lines", True)] * 2
        )


def test_networks_that_started_from_different_ones_have_no_common_line(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, method, 0.1) for method in ("harp", "hydra")]
    assert "| before pruning |" in reported(folders, tmp_path / "same")[".md"]
    summary = json.loads((folders[1] / "summary.json").read_text())
    summary["dense"] = [accuracy("natural", 0.9), accuracy("pgd-20", 0.7, epsilon=8 / 255)]
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    assert "| before pruning |" not in reported(folders, tmp_path / "other")[".md"]


def test_classes_have_their_names(tmp_path: Path) -> None:
    known = make_run(tmp_path, data="cifar10", evaluated=False)
    noted = make_run(tmp_path, "hydra", data="mine", evaluated=False)
    summary = json.loads((noted / "summary.json").read_text())
    (noted / "summary.json").write_text(json.dumps(summary | {"data": {"classes": ["ant", "bee", "cow", "6"]}}))
    unknown = make_run(tmp_path, "lamp", data="yours", evaluated=False)
    runs = [groups.parts([run])[0] for run in collect.read([known, noted, unknown])]
    assert [one.class_name(one.all[0], 2) for one in runs] == ["bird", "cow", "class 2"]
    assert runs[1].class_name(runs[1].all[0], 3) == "class 6", "a number alone says nothing"
    assert "The worst class is 'bird'" in reported([known], tmp_path / "report")[".md"]


def test_the_formula_of_the_energy_is_said_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    for hours, path in enumerate((tmp_path / "stages").glob("*/stage.json"), 1):
        energy = {"kwh": 0.1, "co2_g": 40.0, "by": f"formula: 65 W x 0.0{hours} h x 475 g/kWh"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"energy": energy}))
    words = Page(reported([folder], tmp_path / "report")[".html"]).words
    assert words.count("475 g/kWh") == 1 and "65 W x hours x 475 g/kWh" in words


def test_absolute_paths_are_shortened_and_other_text_is_kept() -> None:
    cut = collect.without_paths
    assert cut("/home/me/my data/cifar; checksums agree") == "cifar; checksums agree"
    assert cut(r"C:\Users\me\w.pt") == "w.pt" and cut("~/x/net.py:Net") == "net.py:Net"
    assert cut("found in '/srv/a/b.pt', twice") == "found in 'b.pt', twice"
    for same in ("8/255", "and/or", "block/conv", "https://a.b/c/d", "toys", "", "a; b", "runs/x/y"):
        assert cut(same) == same
    assert cut({"image": "/9j/4AA/x", "a": [1, "/x/y"]}) == {"image": "/9j/4AA/x", "a": [1, "y"]}


def test_images_verdicts_and_recipe_are_in_page_and_text(single: dict[str, str]) -> None:
    assert single[".html"].count("data:image/png;base64,") == 3
    assert "✗ bad" in single[".html"] and "✗ bad" in single[".md"]
    assert "stages:" in single[".html"] and "stages:" in single[".md"]


def test_templates_are_part_of_the_package() -> None:
    assert {"model_card.md", "report.html", "report.md", "style.css"} <= set(os.listdir(templating.FOLDER))
    assert "prefers-color-scheme: dark" in (templating.FOLDER / "style.css").read_text("utf-8")
