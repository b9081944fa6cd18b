"""Model cards: everything that is known gets into them, and nothing of the machine does."""

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from harp.errors import HarpError, RunFolderError
from harp.experiments import recipe, run_folder
from harp.pruning.methods import PRUNERS
from harp.reports import card
from support.finished_run import accuracy, content, distances, edit, make, score

TINY = {"name": "tinynet", "width": 2}
FINDINGS = [
    {"check": "gradients", "verdict": "bad", "text": "half of them are zero"},
    {"check": "x", "verdict": "good", "text": "as it should be"},
]
EVALUATION = [
    accuracy("autoattack", 3000, 10_000, 8 / 255, versions={"harp": "0.2.0", "torch": "2.1"}),
    accuracy("apgd-ce-50@0.02", 3000, 10_000, 0.02),
    accuracy("natural", 80, 100),
    distances([0.0, 0.01, 0.02, 0.03, None]),
    {"kind": "checks", "findings": FINDINGS},
    {"kind": "corruptions", "rows": [], "mean": 0.625},
    {"kind": "something new", "of": "another version"},
    accuracy("fgsm", 1000, 10_000, 8 / 255, data="svhn"),
]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_snippets(folder: Path) -> tuple[dict[str, Any], str]:
    """Run what the card says about loading, in the run's folder."""
    scope: dict[str, Any] = {}
    printed = io.StringIO()
    with inside(folder), contextlib.redirect_stdout(printed):
        for snippet in snippets((folder / card.FILE).read_text()):
            exec(snippet, scope)
    return scope, printed.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("card") / "run"
    part = {**TINY, "normalize": [[0.5, 0.4, 0.3], [0.25, 0.25, 0.2]]}
    made = content(model=part, keep=0.05, description="one line\n| and <b>another</b>", objective="trades")
    model = make(folder, made, evaluation=EVALUATION)
    stage = folder.parent / "stages" / "abc-prune"
    stage.mkdir(parents=True)
    energy = {"kwh": 0.25, "co2_g": 120, "by": "formula: 65 W"}
    (stage / "stage.json").write_text(json.dumps({"stage": "prune", "epochs": 2, "seconds": 90.5, "energy": energy}))
    cost = {"macs": 1_000_000, "macs_kept": 50_000, "bytes_dense": 4_000, "bytes_sparse": 700}
    dense = [score("pgd-20", 5500, 10_000, 8 / 255)]
    edit(folder / "summary.json", stages=["stages/abc-prune", "stages/gone"], cost=cost, dense=dense)
    return folder, model


def test_the_card_contains_what_is_known_of_the_run(run: tuple[Path, nn.Module]) -> None:
    folder, _ = run
    text = card.card(folder)
    found = run_folder.read(folder)
    expected = [
        f"It keeps {found.kept:,} of {found.size:,} weights",
        "| natural | – | – | 80.0% | 79.0% – 81.0% | 10,000 | 7 |",
        "| pgd-20 | L∞, 8/255 | 55.0% | 45.0% | 44.0% – 46.0% | 10,000 | 7 |",
        "| autoattack | L∞, 8/255 | – | 30.0% |",
        "Worst class, autoattack: airplane, 29.9%.",
        "Zhao and Wressnegger, “Holistic Adversarially Robust Pruning”, ICLR 2023",
        "**pretrain**: 3 epochs, dense; TRADES (Zhang et al. 2019) (L∞, epsilon 8/255, steps 10)",
        "pruning by HARP (keep 0.05)",
        "gradients (bad): half of them are zero",
        "harp 0.1.0, torch 2.0; harp 0.2.0, torch 2.1",
        "median L∞ distance of 0.02 (5 images, 1 never broken)",
        "mean accuracy is 62.5%",
        "Training time: 90 s",
        "0.25 kWh, 120 g of CO2 (formula: 65 W)",
        "50,000 with weights that live",
        "not certified",
        "**Licence**: unknown",
        "mean [0.5, 0.4, 0.3]",
        "cifar10 (checksums agree)",
        "one line \\| and &lt;b&gt;another&lt;/b&gt;",
    ]
    assert not [line for line in expected if line not in text]
    assert "AutoAttack was not run" not in text
    assert "fgsm" not in text, "measured on other data"
    assert "apgd-ce-50@" not in text, "points of a curve are no rows"
    assert "subset" not in text, "the number on more images is shown"
    assert "/home/" not in text
    assert str(folder) not in text


def test_front_matter_is_what_hubs_read(run: tuple[Path, nn.Module]) -> None:
    head = yaml.safe_load(card.card(run[0]).split("---\n")[1])
    assert head["license"] == "unknown"
    assert head["datasets"] == ["cifar10"]
    (entry,) = head["model-index"]
    values = {metric["name"]: metric["value"] for metric in entry["results"][0]["metrics"]}
    assert values["accuracy, autoattack, L∞, epsilon 8/255"] == 30.0


def test_the_card_is_written_beside_the_model_and_its_snippets_run(run: tuple[Path, nn.Module]) -> None:
    folder, model = run
    assert card.write(folder) == folder / "MODEL_CARD.md"
    scope, printed = run_snippets(folder)
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(scope["model"](x), model(x))
    assert f"{len(model.state_dict())} tensors" in printed
    before = (folder / card.FILE).read_text()
    card.write(folder)
    assert (folder / card.FILE).read_text() == before


def test_a_model_from_a_file_keeps_no_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    body = "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    source = "from torch import nn\ndef net(num_classes):\n" + body
    (tmp_path / "run" / "mine.py").write_text(source)
    part = {"name": f"{tmp_path / 'run' / 'mine.py'}:net", "weights": None}
    made = content(data="digits", model=part, keep=0.5, method="magnitude")
    model = make(tmp_path / "run", made, results=[score("natural", 400, 500)])
    edit(tmp_path / "run" / "summary.json", source="embedded handwritten digits (UCI, CC BY 4.0); checksum agrees")
    card.write(tmp_path / "run")
    text = (tmp_path / "run" / card.FILE).read_text()
    assert str(tmp_path) not in text
    assert "`mine.py:net`" in text
    assert "embedded handwritten digits (UCI, CC BY 4.0); checksum agrees" in text
    assert "AutoAttack was not run" in text
    assert "none were run" in text
    scope, _ = run_snippets(tmp_path / "run")
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(scope["model"](x), model(x))


def test_the_card_of_a_users_data_shows_no_path(tmp_path: Path) -> None:
    made = content(data="fashion", model=TINY, keep=None)
    make(tmp_path, made, results=[score("natural", 40, 50)])
    text = (tmp_path / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace("name: fashion", "name: /srv/secret/mine.npz"))
    edit(tmp_path / "summary.json", source="/srv/secret/mine.npz; no published checksum to compare with")
    told = card.card(tmp_path)
    assert "secret" not in told
    assert "mine.npz (no published checksum to compare with)" in told
    assert "dense (not pruned)" in told
    assert "shape=(CHANNELS, HEIGHT, WIDTH)" in told
    assert "subset (50 test images)" in told


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("/tmp/x; checksums agree", "checksums agree"),
        ("C:\\data\\x; checksums agree", "checksums agree"),
        ("data/cifar10", ""),
        ("mine.npz; no published checksum", "no published checksum"),
        ("embedded part of Fashion-MNIST (Zalando, MIT); checksum agrees",) * 2,
    ],
)
def test_paths_are_removed_from_sources(source: str, kept: str) -> None:
    assert card.meaningful(source) == kept


def test_every_method_and_objective_can_be_described(tmp_path: Path) -> None:
    make(tmp_path, content(model=TINY, keep=0.5))
    for number, (name, method) in enumerate(PRUNERS.items()):
        if name in ("dense", "fixed"):
            continue
        objective = ("natural", "pgd", "trades", "mart")[number % 4]
        made = recipe.parse(content(model=TINY, method=name, keep=0.5, objective=objective))
        (tmp_path / "recipe.yaml").write_text(made.to_yaml())
        text, title = card.card(tmp_path), method.title or name
        assert f"pruning by {title}" in text
        assert (f"Method: {title} – {method.paper}" if method.paper else f"Method: {title}, no paper.") in text


def test_unfinished_runs_are_a_one_line_error_and_keep_the_old_card(tmp_path: Path) -> None:
    def refused(kind: type[HarpError], match: str) -> None:
        with pytest.raises(kind, match=match) as raised:
            card.write(tmp_path)
        assert "\n" not in str(raised.value)
        assert (tmp_path / card.FILE).read_text() == "old"

    (tmp_path / card.FILE).write_text("old")
    refused(RunFolderError, "is no run")
    make(tmp_path, content(model=TINY))
    (tmp_path / "summary.json").write_text("[]")
    refused(RunFolderError, "not an object")
    (tmp_path / "summary.json").unlink()
    refused(RunFolderError, "is not finished")
    (tmp_path / "recipe.yaml").write_text("{")
    refused(RunFolderError, "can't be read")


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("slim") / "run"
    made = content(data="fashion", model={"name": "convnet", "width": 8}, keep=0.25, units={"kind": "channels"})
    return folder, make(folder, made)


def test_the_card_of_a_network_with_channels_cut_out_counts_its_units(slim: tuple[Path, nn.Module]) -> None:
    folder, model = slim
    text, told = card.card(folder), run_folder.read(folder).summary
    kept, size = (sum(layer[key] for layer in told["layers"]) for key in ("kept", "size"))
    budget, cost = told["budget"], told["cost"]
    assert budget["kept"] < 0.26 * budget["size"]
    expected = [
        f"It keeps {budget['kept']:,} of {budget['size']:,} FLOPs",
        f"**FLOPs kept**: {budget['kept']:,} of {budget['size']:,}",
        f"**Channels kept**: {kept:,} of {size:,} that may be pruned, in {len(told['layers'])} groups",
        "**Budget asked for**: 0.25 of the FLOPs",
        "pruning of channels by HARP",
        "fine-tuning of the smaller network",
        f"{cost['macs']:,} before pruning, {cost['macs_kept']:,} now",
        f"Parameters: {cost['parameters']:,} before pruning, {sum(p.numel() for p in model.parameters()):,} now",
        "- structured-pruning",
        "slim.json",
        "`harp slim RUN --out FOLDER`",
    ]
    assert not [line for line in expected if line not in text]
    assert not [words for words in ("weights kept", "zeros where", "stored sparsely", "masks found") if words in text]
    shape = "x".join(map(str, model.features[3].weight.shape))
    assert f"| `features.3.weight` | 16x8x3x3 | {shape} |" in text


def test_the_snippets_for_a_network_with_channels_cut_out_run(slim: tuple[Path, nn.Module]) -> None:
    folder, model = slim
    card.write(folder)
    scope, printed = run_snippets(folder)
    x = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(scope["model"](x), model(x))
    smaller = len(json.loads((folder / "slim.json").read_text())["kept"])
    assert f"{len(model.state_dict())} tensors; {smaller} of them" in printed
