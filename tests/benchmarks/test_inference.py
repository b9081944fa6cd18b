"""The benchmark of inference compares like with like. How long it takes is the machine's business."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import inference, pruned
from harp.deploy import bench, fresh_process
from harp.engine.native import bindings
from harp.errors import ModelError
from harp.pruning.units import Weights

needs_native = pytest.mark.skipif(bindings.kernels() is None, reason="no native code for this machine")
TINY = ["--model", "resnet8", "--width", "0.5", "--keep", "0.1"]


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing ONNX files takes seconds."""

    def refuse(*_: object) -> None:
        raise ModelError("not today")

    monkeypatch.setattr(bench, "write_onnx", refuse)


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@needs_native
def test_inference_prints_a_table_and_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"import_seconds": 3.0, "open_seconds": 2.0, "first_seconds": 1.0, "peak_bytes": 9, "added_bytes": 4}
    monkeypatch.setattr(fresh_process, "predict", lambda *_: (None, dict(measured)))
    monkeypatch.setattr(inference, "cold_start", lambda *_: {"speedup_with_imports": 2.0})
    flags = ["--batch", "1", "6", "--repeats", "2", "--two-threads", "--clustered", "1", "--remove-dead"]
    assert inference.main([*TINY, *flags]) == 0
    result = last(capsys)
    milliseconds = result["milliseconds"]["6"]
    assert {"engine", "torch", "frozen"} <= milliseconds.keys() and min(milliseconds.values()) > 0
    assert result["max_relative_error"]["1"] < 1e-5 and result["max_relative_error"]["6"] < 1e-5
    ratios = [milliseconds[name] / milliseconds["engine"] for name in ("torch", "frozen")]
    assert result["speedup_torch"]["6"] == pytest.approx(min(ratios), abs=0.02)
    if "onnxruntime" in milliseconds:
        assert result["speedup_ort"]["6"] == pytest.approx(
            milliseconds["onnxruntime"] / milliseconds["engine"], abs=0.02
        )
        assert result["speedup_dense"]["6"] <= result["speedup_ort"]["6"]
        assert result["speedup_ort_small"]["1"] > 0
    assert result["speedup_two_threads"].keys() == {"1", "6"}
    assert result["memory"]["batch"] == 6 and result["memory"]["engine"] == {"peak_bytes": 9, "added_bytes": 4}
    assert result["disconnected"] is False
    assert result["isa"] and 0 < result["native_share"] <= 1
    assert result["cold_start"] and result["seed"] == 0 and result["cpu"] and result["versions"]["torch"]
    assert result["kept"] == Weights(pruned.built("resnet8", 0.5)).total(0.1)


@needs_native
def test_the_sweep_tells_every_density(capsys: pytest.CaptureFixture[str], no_onnx: None) -> None:
    flags = ["--batch", "2", "--repeats", "1", "--skip-fresh", "--density-sweep", "1", "0.2"]
    assert inference.main([*TINY, *flags]) == 0
    result = last(capsys)
    assert result["density_sweep"].keys() == {"1", "0.2"}
    assert all(ratio["2"] > 0 for ratio in result["density_sweep"].values())
    assert "memory" not in result and "speedup_ort" not in result


def test_a_cold_start_is_that_of_fresh_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_onnx: None
) -> None:
    monkeypatch.setattr(inference, "COLD_REPEATS", 1)
    model, _ = pruned.pruned("resnet8", 0.1, "uniform", width=0.5)
    file = bench.of_model(model, torch.rand(2, *pruned.SHAPE), tmp_path).files["sparse"]
    options = Namespace(model="resnet8", width=0.5, threads=1, seed=0)
    result = inference.cold_start(options, model, file, tmp_path)
    for name in ("engine", "dense"):
        assert all(result[name][part] > 0 for part in ("import_seconds", "open_seconds", "first_seconds"))
    whole = {name: sum(result[name].values()) for name in ("engine", "dense")}
    assert result["speedup_with_imports"] == pytest.approx(whole["dense"] / whole["engine"], abs=0.02)


def test_a_network_without_a_way_through_is_told() -> None:
    options = Namespace(seed=0)
    assert inference.disconnected(lambda x: np.ones((len(x), 10), np.float32), options)
    assert not inference.disconnected(lambda x: x.reshape(len(x), -1), options)


def test_without_native_code_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "kernels", lambda: None)
    assert inference.main([*TINY, "--skip-fresh"]) == 2
    assert "no native code" in capsys.readouterr().err


@needs_native
@pytest.mark.parametrize("wrong", [["--model", "nope"], ["--keep", "2"], ["--strategy", "harp"]])
def test_what_is_wrong_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert inference.main([*TINY, *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
