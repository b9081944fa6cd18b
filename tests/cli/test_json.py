"""`--json`: one object on standard output with the keys that the documentation names, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from harp.errors import PROBLEM
from support.commands import FINISHED, Harp, write_recipe
from support.documents import json_keys


def parsed(harp: Harp, *words: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    code, out, err = harp(*words, "--json")
    assert code in codes, err
    value = json.loads(out)
    assert isinstance(value, dict)
    missing = json_keys(words[0]) - value.keys()
    assert not missing, f"not there: {missing}"
    return value


def test_run_and_what_reads_a_run(harp: Harp, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "tiny.yaml")
    summary = parsed(harp, "run", recipe, codes=FINISHED)
    folder = summary["folder"]
    assert summary["name"] == "tiny" and Path(folder, "model.safetensors").is_file()
    assert {"natural", "pgd-2"} == {result["name"] for result in summary["results"]}
    codes = (0, PROBLEM)  # such a network may not pass the checks
    words = ["--attack", "fgsm", "--examples", "20"]
    assert parsed(harp, "evaluate", folder, *words, codes=codes)["results"][1]["name"] == "fgsm"
    assert all(Path(path).is_file() for path in parsed(harp, "report", folder)["files"])
    assert list(parsed(harp, "export", folder, "--to", "safetensors")["files"]) == ["network.safetensors"]
    assert parsed(harp, "slim", folder, "--out", "small")["folder"] == "small"
    timed = parsed(harp, "bench", folder, "--batch", "1", "--repeats", "1")
    assert timed["artefact"] == folder and timed["latency"]
    for problems in ("submit", "apb"), ("submit", "robustbench"):
        name = ["--name", "Zhao2023Holistic"] * (problems[1] == "robustbench")
        code, out, _ = harp(*problems, folder, *name, "--out", f"for-{problems[1]}", "--json")
        assert code in (PROBLEM, 2)
        assert not out or json.loads(out)["errors"]


def test_prune(harp: Harp) -> None:
    epochs = ["--pretrain", "1", "--prune", "0", "--finetune", "0"]
    words = ["tinynet", "--data", "digits", "--keep", "5%", "--method", "magnitude", *epochs]
    assert Path(parsed(harp, "prune", *words, codes=FINISHED)["folder"]).is_dir()


def test_shard(harp: Harp) -> None:
    for part in ("train", "test"):
        for name in ("a", "b"):
            Path("images", part, name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(Path("images", part, name, "0.png"))
    written = parsed(harp, "shard", "images", "shards")
    assert written["images"] == 4 and written["undecodable"] == []
    Path("images/train/a/1.png").write_bytes(b"no image")
    code, out, err = harp("shard", "images", "others", "--size", "4", "--json")
    assert code == PROBLEM and json.loads(out)["undecodable"] and "left out" in err


@pytest.mark.parametrize("what", ["methods", "models", "data", "recipes", "studies"])
def test_list(harp: Harp, what: str) -> None:
    listed = parsed(harp, "list", what)
    assert listed["list"] == what and all(entry.keys() == {"name", "description"} for entry in listed["entries"])


def test_plan_doctor_and_reproduce(harp: Harp) -> None:
    assert parsed(harp, "plan", "tinynet", "--keep", "1%")["kind"] == "weights"
    assert parsed(harp, "doctor", "tinynet", "--no-channels")["healthy"]
    assert {"claim", "verdict"} <= parsed(harp, "reproduce")["claims"][0].keys()
