"""The command line: what works, and one line and exit code 2 for what does not."""

import json
import pickle
import pwd
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml

from harp import models
from harp.cli import app
from harp.errors import AT_CHANCE, LOST, UNFINISHED, CheckpointError
from harp.models.weights import save_model
from harp.system import files
from harp.system.tensors import load_tensors
from support.commands import FINISHED, RECIPE, Harp, refused, write_recipe


def test_a_run_from_start_to_artefact_is_not_repeated(harp: Harp, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "tiny.yaml")
    code, out, err = harp("run", recipe, "--set", "seed=3")
    assert code == AT_CHANCE, err  # so short a training leaves a network that knows nothing
    (folder,) = Path("runs").glob("tiny-*")
    files = {path.name for path in folder.iterdir()}
    assert {"recipe.yaml", "model.safetensors", "masks.safetensors", "summary.json", "layers.png", "results"} <= files
    summary = json.loads((folder / "summary.json").read_text())
    size, kept = (sum(layer[key] for layer in summary["layers"]) for key in ("size", "kept"))
    assert kept == round(0.05 * size)
    assert f"{size:,} → {kept:,}" in out
    assert f"artefact  {folder / 'model.safetensors'}" in out
    tensors, _ = load_tensors(folder / "model.safetensors")
    assert sum(int(tensors[layer["name"]].count_nonzero()) for layer in summary["layers"]) <= kept
    number = json.loads((folder / "results" / "pgd-2.json").read_text())
    assert {"value", "low", "high", "n", "seed", "versions", "recipe", "attack"} <= number.keys()
    assert number["n"] == 50 and number["seed"] == 3 and number["attack"]["epsilon"] == 0.1
    (log,) = Path("runs/stages").glob("*-prune/metrics.jsonl")
    metrics = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["epoch"] for line in metrics] == [1, 2]
    assert {"loss", "budget_loss", "rate", "natural", "robust"} <= metrics[0].keys()
    assert not list(Path("runs").rglob("state.pt")), "a finished stage needs no state"
    assert list(Path("runs/stages").glob("*-prune/tensorboard/events*"))

    stages = {path: path.stat().st_mtime_ns for path in Path("runs/stages").rglob("model.safetensors")}
    code, again, err = harp("run", recipe, "--set", "seed=3")
    assert code == AT_CHANCE
    assert err.count("done before") == 3
    assert again == out
    assert all(path.stat().st_mtime_ns == time for path, time in stages.items())

    code, evaluated, err = harp(
        "evaluate", str(folder), "--attack", "fgsm", "--attack", "cw", "--examples", "20", "--json"
    )
    assert code == 0, err
    evaluation = json.loads(evaluated)
    assert [number["name"] for number in evaluation["results"]] == ["natural", "fgsm", "cw", "worst case"]
    assert evaluation["flips"]["n"] == 20
    assert {finding["verdict"] for finding in evaluation["checks"]["findings"]} <= {"good", "look", "bad"}
    files = {path: path.stat().st_mtime_ns for path in (folder / "evaluation").iterdir()}
    code, table, err = harp("evaluate", str(folder), "--attack", "fgsm", "--attack", "cw", "--examples", "20")
    assert code == 0 and "worst class under" in table and "signs of false robustness" in table
    assert {path: path.stat().st_mtime_ns for path in (folder / "evaluation").iterdir()} == files, "measured again"
    assert "fgsm" in (folder / "MODEL_CARD.md").read_text()
    code, out, err = harp("report", str(folder), "--out", "page.html")
    assert code == 0, err
    assert {Path(line).name for line in out.split()} == {"page.html", "page.json", "page.md"}
    assert "<svg" in Path("page.html").read_text() and "fgsm" in Path("page.md").read_text()
    (folder / "summary.json").unlink()
    refused(harp, "evaluate", str(folder), said="is not finished")
    refused(harp, "report", str(folder), said="summary.json")
    refused(harp, "submit", "robustbench", str(folder), "--name", "Zhao2023Holistic", said="summary.json")


def test_recipes_with_the_same_first_stage_share_it(harp: Harp, tmp_path: Path) -> None:
    assert harp("run", write_recipe(tmp_path / "a.yaml"))[0] in FINISHED
    stages = [dict(stage) for stage in RECIPE["stages"]]  # type: ignore[attr-defined]
    stages[1] = {"name": "prune", "pruner": {"name": "magnitude", "keep": "5%", "strategy": "lamp"}, "epochs": 0}
    code, _, err = harp("run", write_recipe(tmp_path / "b.yaml", name="other", stages=stages))
    assert code in FINISHED
    assert err.count("done before") == 1
    assert len(list(Path("runs/stages").glob("*-pretrain"))) == 1


def test_prune_takes_a_model_and_weights_of_the_user(harp: Harp, tmp_path: Path) -> None:
    source = "from torch import nn\ndef net(num_classes, in_channels):\n"
    source += "    layers = [nn.Flatten(), nn.Linear(64 * in_channels, 32), nn.ReLU(), nn.Linear(32, num_classes)]\n"
    source += "    return nn.Sequential(*layers)\n"
    (tmp_path / "mine.py").write_text(source)
    code, _, err = harp(
        "prune",
        "mine.py:net",
        "--data",
        "digits",
        "--keep",
        "10%",
        "--pretrain",
        "1",
        "--prune",
        "1",
        "--finetune",
        "1",
    )
    assert code in FINISHED, err
    assert err.startswith("method: tandem, the best measured"), "the chosen method, and why, comes first"
    (folder,) = Path("runs").glob("tandem-mine-py-net-10-*")
    weights = str(folder / "model.safetensors")
    words = ["--data", "digits", "--weights", weights, "--keep", "1/20", "--finetune", "1", "--out", "second"]
    code, out, err = harp("prune", "mine.py:net", "--method", "magnitude", "--strategy", "erk", "--prune", "0", *words)
    assert code in FINISHED, err
    assert "2,368 → 118 (4.983%)" in out
    assert not list(Path("second/stages").glob("*-pretrain"))


def test_list_prints_names_and_descriptions(harp: Harp) -> None:
    for what, expected in {
        "methods": "harp-r",
        "models": "vgg16",
        "data": "svhn",
        "recipes": "demo",
        "studies": "digits",
    }.items():
        code, out, _ = harp("list", what)
        assert code == 0 and expected in out
        code, out, _ = harp("list", what, "--json")
        rows = json.loads(out)["entries"]
        assert expected in [row["name"] for row in rows]
        assert all(row["description"] for row in rows)
    refused(harp, "list", "method", said="did you mean 'methods'?")


def test_plan_shows_every_layer_and_the_total(harp: Harp) -> None:
    code, out, _ = harp("plan", "vgg16", "--strategy", "erk", "--keep", "0.1%", "--json")
    rows = json.loads(out)["layers"]
    assert code == 0
    assert [row["kept"] for row in rows][:3] == [101, 185, 273]
    assert all(row.keys() == {"name", "size", "kept"} for row in rows)
    code, out, _ = harp("plan", "vgg16", "--strategy", "uniform", "--keep", "0.1%")
    assert "15,302,848" in out and "15,303" in out and "features.0.weight" in out
    code, out, _ = harp("plan", "resnet50", "--strategy", "uniform", "--keep", "1%", "--json")
    assert json.loads(out)["totals"]["weights"]["size"] == 25_502_912
    code, out, _ = harp("plan", "tinynet", "--data", "digits", "--channels", "--keep", "25%")
    assert code == 0 and "keep 25% of the FLOPs" in out and "read by" in out and "parameters" in out


def test_plan_takes_the_network_budget_and_strategy_of_a_recipe(harp: Harp, tmp_path: Path) -> None:
    def planned(*words: str) -> Any:
        code, out, err = harp("plan", *words, "--json")
        assert code == 0, err
        return json.loads(out)

    assert planned("cifar10/vgg16/hydra-erk-99.9") == planned("vgg16", "--keep", "0.1%", "--strategy", "erk")
    small = ["--strategy", "erk", "--keep", "3%"]
    assert planned("fashion", *small) == planned("tinynet", "--data", "fashion", *small)
    assert planned("tiny-imagenet/small")["totals"]["weights"] == {"size": 723_376, "kept": 72_338}, (
        "its width, its keep"
    )
    assert planned("fashion/harp-channels-4x")["kind"] == "channels"
    limited = write_recipe(tmp_path / "limited.yaml", units={"ignore": ["features.0.weight"]})
    assert "features.0.weight" not in [layer["name"] for layer in planned(limited)["layers"]]


def test_options_of_run_replace_the_method_and_budget_of_a_recipe(harp: Harp, tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "tiny.yaml")
    code, _, err = harp("run", path, "--method", "magnitude", "--strategy", "erk", "--keep", "10%")
    assert code in FINISHED, err
    (folder,) = Path("runs").glob("tiny-magnitude-erk-90-*")
    stages = yaml.safe_load((folder / "recipe.yaml").read_text())["stages"]
    assert stages[-2]["pruner"] == {"name": "magnitude", "keep": 0.1, "strategy": "erk"}


def test_doctor_shows_layers_channels_and_findings(harp: Harp, tmp_path: Path) -> None:
    code, out, _ = harp("doctor", "tinynet", "--data", "digits")
    assert code == 0
    assert "features.0.weight" in out and "a vector" in out and "✓ gradients" in out
    assert "channels that can be pruned" in out and "✓ channels" in out and "the model's input" in out
    code, out, _ = harp("doctor", "tinynet", "--data", "digits", "--no-channels")
    assert code == 0 and "channels that can be pruned" not in out
    code, out, _ = harp("doctor", "resnet8", "--json")
    examination = json.loads(out)
    assert examination["healthy"] and examination["layers"][0]["name"] == "conv1.weight"
    assert examination["spaces"][0]["name"] == "layer1.0.conv1.weight"
    assert examination["whole"][0]["readers"] == ["conv1.weight"]
    (tmp_path / "bad.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))\n"
    )
    code, out, _ = harp("doctor", "bad.py:net", "--data", "digits")
    assert code == 1
    assert "✗ logits" in out and "softmax" in out


def commands() -> list[list[str]]:
    """The words of every command."""
    group = typer.main.get_group(app)
    return [
        [name, *([inner] if inner else [])]
        for name, command in group.commands.items()
        for inner in getattr(command, "commands", [""])
    ]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_help_of_every_command_has_an_example_that_the_command_accepts(harp: Harp, words: list[str]) -> None:
    code, out, _ = harp(*words, "--help")
    assert code == 0 and "Usage" in out
    command: Any = typer.main.get_group(app)
    for word in words:
        command = command.commands[word]
    (example,) = re.findall(rf"Example: harp {' '.join(words)} (.*)", command.help)
    command.make_context("harp", shlex.split(example.partition(", ")[0]))


def test_the_help_explains_exit_codes_and_the_version_is_printed(harp: Harp) -> None:
    assert harp("--version")[1].startswith("harp 0.")
    text = " ".join(harp("--help")[1].split())
    for exit_code in (AT_CHANCE, UNFINISHED, LOST):
        assert f"{exit_code} " in text.partition("Exit codes:")[2]


def test_unknown_commands_and_options_are_refused(harp: Harp) -> None:
    code, _, err = harp("prun")
    assert code == 2 and "No such command" in err
    code, _, err = harp("run", "demo", "--sed", "3")
    assert code == 2 and "No such option" in err


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ("0", "above 0 and at most 1"),
        ("101%", "above 0 and at most 1"),
        ("-1%", "above 0 and at most 1"),
        ("0.0001%", "6 layers"),
        ("little", "a share above 0"),
        ("nan", "above 0 and at most 1"),
    ],
)
def test_budgets_without_a_meaning_are_refused(harp: Harp, keep: str, said: str) -> None:
    refused(harp, "prune", "tinynet", "--data", "digits", f"--keep={keep}", said="keep")
    refused(harp, "plan", "tinynet", f"--keep={keep}", said=said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prune", "tinynet", "--data", "digits", "--keep", "1%", "--method", "harb"], "did you mean 'harp'?"),
        (["prune", "tinynet", "--data", "digit", "--keep", "1%"], "digits"),
        (["prune", "tinnet", "--data", "digits", "--keep", "1%"], "tinynet"),
        (["prune", "tinynet", "--data", "digits", "--keep", "1%", "--strategy", "erq"], "erk"),
        (["prune", "tinynet", "--data", "digits", "--keep", "1%", "--objective", "pdg"], "did you mean 'pgd'?"),
        (
            ["prune", "tinynet", "--data", "digits", "--keep", "1%", "--set", "stages.prune.epoch=1"],
            "did you mean 'epochs'?",
        ),
        (["prune", "tinynet", "--data", "digits", "--keep", "1%", "--ignore", "nothing.*"], "matches no parameter"),
        (["prune", "tinynet", "--data", "digits", "--keep", "1%", "--epsilon", "much"], "is no number"),
        (["prune", "tinynet", "--data", "digits", "--keep", "1%", "--weights", "no.safetensors"], "no.safetensors"),
        (["prune", "missing.py:net", "--data", "digits", "--keep", "1%"], "missing.py"),
        (["prune", "tinynet", "--data", "cifar10", "--keep", "1%"], "cifar-10"),
        (["prune", "tinynet", "--data", "svhn", "--data-dir", "nowhere", "--keep", "1%"], "train_32x32.mat"),
        (["run", "nothing.yaml"], "no recipe file"),
        (["run", "zzz"], "one of cifar10/resnet18, cifar10/vgg16, demo"),
        (["run", "cifar10/vgg17"], "did you mean 'cifar10/vgg16'?"),
        (["run", "fashion", "--method", "harb"], "did you mean 'harp'?"),
        (["estimate", "fashion", "--keep", "200%"], "keep '200%': give a share above 0"),
        (["compare", "fashion", "--methods", "harp", "--objective", "pdg"], "did you mean 'pgd'?"),
        (["plan", "fashion/hrp-99"], "did you mean 'fashion/harp-99'?"),
        (["plan", "vgg16"], "--keep 1%"),
        (["list", "recipes", "svnh"], "svnh"),
        (["evaluate", "no/such"], "there is no folder no/such"),
        (["evaluate", "tinynet"], "--data"),
        (["evaluate", "tinynet", "--data", "digits", "--attack", "pgd-x"], "pgd-x"),
        (["evaluate", "tinynet", "--data", "digits", "--epsilon=-1"], "number of 0 or more"),
        (["evaluate", "tinynet", "--data", "digits", "--norm", "l3"], "linf or l2"),
        (["evaluate", "tinynet", "--data", "digits", "--batch", "0"], "batch"),
        (["evaluate", "tinynet", "--data", "digits", "--examples", "0"], "examples"),
        (
            ["evaluate", "tinynet", "--data", "digits", "--attack", "fgsm", "--no-checks", "--corruptions", "."],
            "expected the files of CIFAR-10-C",
        ),
        (["evaluate", "."], "no recipe.yaml"),
        (["report", "nowhere"], "nowhere"),
        (["submit", "apb", "nowhere"], "nowhere"),
        (["doctor", "tinynet", "--shape", "3-32"], "like 3x32x32"),
        (["run", "demo", "--devices", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(harp: Harp, words: list[str], said: str) -> None:
    refused(harp, *words, said=said)


def test_damaged_and_malicious_files_are_refused(harp: Harp, tmp_path: Path) -> None:
    prune = ["prune", "tinynet", "--data", "digits", "--keep", "1%", "--weights"]
    other = models.build("resnet8", num_classes=10, shape=(1, 8, 8))
    save_model("other.safetensors", other)
    refused(harp, *prune, "other.safetensors", said="same architecture")

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "owned"),))

    Path("evil.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    refused(harp, *prune, "evil.pt", said="evil.pt")
    torch.save({"state_dict": Evil()}, "evil2.pt")
    refused(harp, *prune, "evil2.pt", said="evil2.pt")
    assert not (tmp_path / "owned").exists()

    net = models.build("tinynet", num_classes=10, shape=(1, 8, 8))
    with torch.no_grad():
        net.features[0].weight[0] = float("nan")
    torch.save(net.state_dict(), "nan.pt")
    refused(harp, *prune, "nan.pt", said="NaN")

    Path("junk.yaml").write_bytes(b"\x00\xff\xfe")
    refused(harp, "run", "junk.yaml", said="junk.yaml")
    write_recipe(tmp_path / "odd.yaml", objective={"name": "pgd", "epsilom": 0.1})
    refused(harp, "run", "odd.yaml", said="did you mean 'epsilon'?")


def test_invalid_data_is_refused(harp: Harp) -> None:
    good = {"x": np.random.default_rng(0).random((40, 8, 8), dtype=np.float32), "y": np.arange(40) % 10}
    command = ["prune", "tinynet", "--keep", "5%", "--data"]
    sets = {
        "range": ({**good, "x": good["x"] * 255}, "[0, 1]"),
        "labels": ({**good, "y": good["y"] - 1}, "-1"),
        "nan": ({**good, "x": np.full_like(good["x"], np.nan)}, "nan"),
    }
    for name, (arrays, said) in sets.items():
        np.savez(f"{name}.npz", x_train=arrays["x"], y_train=arrays["y"], x_test=good["x"], y_test=good["y"])
        refused(harp, *command, f"{name}.npz", said=said)
    np.savez("cut.npz", x_train=good["x"], y_train=good["y"], x_test=good["x"], y_test=good["y"])
    Path("cut.npz").write_bytes(Path("cut.npz").read_bytes()[:900])
    refused(harp, *command, "cut.npz", said="cut.npz")


def test_output_folders_that_cannot_be_written_are_refused(harp: Harp, tmp_path: Path) -> None:
    write_recipe(tmp_path / "tiny.yaml")
    Path("file").write_text("in the way")
    refused(harp, "run", "tiny.yaml", "--out", "file", said="can't write to the output folder file")
    refused(harp, "run", "tiny.yaml", "--out", "file/runs", said="can't write to the output folder")


def test_too_little_disk_space_is_refused_before_training(
    harp: Harp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path / "tiny.yaml")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 30_000}))
    refused(harp, "run", "tiny.yaml", said="has 30.0 kB free, this run needs")


def test_without_a_home_folder_nothing_fails_and_no_folder_of_that_name_is_made(
    harp: Harp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has no entry in the password file."""

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    refused(harp, "plan", "~/model.py:net", "--keep", "1%", said="~/model.py")
    with pytest.raises(CheckpointError, match="can't write"):
        files.write_text(files.user_cache() / "index", "")
    assert not Path("~").exists()


@pytest.mark.slow
def test_a_full_disk_is_a_one_line_error_and_leaves_no_damaged_files(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "tiny.yaml")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # files end at 20 kB, as on a full disk

    command = [sys.executable, "-m", "harp", "run", recipe]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "can't write" in done.stderr.strip().splitlines()[-1]
    assert not list((tmp_path / "runs").rglob("*.safetensors")) and not list((tmp_path / "runs").rglob("state.pt"))
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert again.returncode in FINISHED, "with space again the run goes on"
