"""`harp bench`: the same network in every runtime, timed in turns, then in fresh processes."""

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from harp import models
from harp.cli import app
from harp.deploy import bench, fresh_process
from harp.deploy.bench import BenchFiles, latencies, measure
from harp.deploy.runtimes import RUNTIMES, Runtime
from harp.engine.native import bindings
from harp.errors import CheckpointError, HarpError, MissingExtra, ModelError, RecipeError
from harp.experiments import plan
from harp.system import memory
from support import finished_run
from support.cases import ConvNet

SHAPE = (3, 16, 16)
MEASURED = {"import_seconds": 0.2, "open_seconds": 0.1, "first_seconds": 0.05, "peak_bytes": 5_000_000}
MEASURED |= {"added_bytes": 7, "torch": False}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> BenchFiles:
    """The files of a small network, nine tenths of it zero."""
    torch.manual_seed(0)
    model = ConvNet().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.9, 0)
    return bench.of_model(model, torch.rand(2, *SHAPE), tmp_path_factory.mktemp("files"))


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fresh processes: they take seconds to import torch."""
    monkeypatch.setattr(fresh_process, "predict", lambda *_: (None, dict(MEASURED)))


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing ONNX files takes seconds too."""

    def refuse(*_: object) -> None:
        raise ModelError("not today")

    monkeypatch.setattr(bench, "write_onnx", refuse)


def test_every_runtime_computes_the_same_network(network: BenchFiles, no_processes: None) -> None:
    result = measure(network, batches=(1, 5), repeats=3)
    assert list(result["runtimes"]) == list(network.files) and {"sparse", "torch"} <= network.files.keys()
    assert result["against"] == "torch" and result["shape"] == list(SHAPE) and result["cpu"]
    for name, runtime in result["runtimes"].items():
        assert runtime["largest_difference"] < 1e-5
        assert runtime["file_bytes"] == network.files[name].stat().st_size
        assert runtime["peak_bytes"] == 5_000_000
    rows = result["latency"]
    assert [(row["runtime"], row["batch"]) for row in rows] == [(n, b) for b in (1, 5) for n in network.files]
    for row in rows:
        assert 0 < row["median_ms"] <= row["p95_ms"]
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["median_ms"])
        assert row["runtime"] != "torch" or row["speedup"] == 1
    assert result["dense_bytes"] > result["runtimes"]["sparse"]["file_bytes"]


def test_a_note_says_when_torch_computes_the_sparse_network(
    network: BenchFiles, no_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "kernels", lambda: None)
    notes = measure(network, batches=[1], repeats=1)["notes"]
    assert any("no native code" in note for note in notes)


def test_the_number_of_torch_threads_is_restored(network: BenchFiles, no_processes: None) -> None:
    before = torch.get_num_threads()
    measure(network, batches=[1], threads=2, repeats=1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong", [{"batches": []}, {"batches": [0]}, {"threads": 0}, {"repeats": 0}])
def test_numbers_below_one_are_refused(network: BenchFiles, wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="whole numbers from 1 up"):
        measure(network, **wrong)


def test_a_fresh_process_measures_seconds_and_memory_and_needs_no_torch(network: BenchFiles) -> None:
    batches = [np.zeros((2, *SHAPE), np.float32), np.ones((3, *SHAPE), np.float32)]
    logits, measured = fresh_process.predict("sparse", network.files["sparse"], batches, 1)
    expected = RUNTIMES["sparse"].open(network.files["sparse"], 1)(np.concatenate(batches))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert all(measured[key] > 0 for key in ("import_seconds", "open_seconds", "first_seconds"))
    assert measured["torch"] is False
    if sys.platform == "linux":
        assert 0 < measured["peak_bytes"] < memory.most_resident(), "not that of this process, which has torch"
        assert 0 <= measured["added_bytes"] < measured["peak_bytes"]


def test_a_fresh_process_finds_the_package_and_the_file_from_any_folder(
    network: BenchFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a space, with a relative path, a module named like one of the library's and no home folder."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (folder / "network.harp").write_bytes(network.files["sparse"].read_bytes())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/proc/none")
    logits, _ = fresh_process.predict("sparse", Path("network.harp"), [np.zeros((1, *SHAPE), np.float32)], 1)
    assert len(logits) == 1


def test_a_file_that_a_fresh_process_cannot_open_is_a_one_line_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.harp"
    bad.write_bytes(b"nothing of the kind")
    with pytest.raises(
        CheckpointError, match=r"sparse: the file can't be used in a fresh process: .*bad\.harp"
    ) as error:
        fresh_process.predict("sparse", bad, [np.zeros((1, *SHAPE), np.float32)], 1)
    assert "\n" not in str(error.value)


def test_a_fresh_process_that_does_not_end_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_process, "TIME_LIMIT", 0.01)
    with pytest.raises(CheckpointError, match=r"has not predicted 2 images in 0\.01 seconds"):
        fresh_process.predict("sparse", tmp_path / "a.harp", [np.zeros((2, *SHAPE), np.float32)], 1)


def test_functions_take_turns_and_are_all_timed_as_often() -> None:
    calls: list[str] = []
    shown: list[tuple[str, int]] = []
    functions = {name: lambda name=name: [calls.append(name), sum(range(200_000))] for name in "abc"}
    times = latencies(functions, 7, lambda name, done: shown.append((name, done)))
    assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys("abc", 7)
    assert all(second > 0 for seconds in times.values() for second in seconds)
    assert shown[-1][1] == 21 and [done for _, done in shown] == sorted(done for _, done in shown)
    turns = [name for name, after in zip(calls, [*calls[1:], ""], strict=True) if name != after]
    assert turns[:6] == [*"abc", *"abc"], "the first calls are for warming up, then the turns begin"


def test_quick_functions_are_timed_several_times_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-5))
    turns: list[str] = []
    latencies({"quick": lambda: None}, 100, lambda name, done: turns.append(name))
    assert len(turns) == 1


def test_the_other_runtimes_compute_the_network_of_a_harp_file(
    network: BenchFiles, tmp_path: Path, no_onnx: None
) -> None:
    again = bench.of_harp(network.files["sparse"], tmp_path)
    assert again.files["sparse"] == network.files["sparse"] and again.dense_bytes == network.dense_bytes
    x = np.random.default_rng(0).random((3, *SHAPE), dtype=np.float32)
    answers = [RUNTIMES["torch"].open(each.files["torch"], 1)(x) for each in (network, again)]
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-6)


def test_an_onnx_file_is_measured_as_it_is(network: BenchFiles, tmp_path: Path, no_processes: None) -> None:
    if "onnxruntime" not in network.files:
        pytest.skip("ONNX Runtime is not installed")
    onnx = bench.of_onnx(network.files["onnxruntime"])
    assert onnx.shape == SHAPE and "sparse" not in onnx.files and "torch" not in onnx.files
    assert onnx.dense_bytes == pytest.approx(network.dense_bytes, rel=0.1)
    result = measure(onnx, batches=[2], repeats=1)
    assert result["against"] == "onnxruntime" and result["notes"]


@pytest.mark.parametrize("kind", ["vector", "fixed", "garbage"])
def test_onnx_files_that_take_no_batches_of_images_are_refused_in_one_line(
    network: BenchFiles, tmp_path: Path, kind: str, no_processes: None
) -> None:
    if "onnxruntime" not in network.files:
        pytest.skip("ONNX Runtime is not installed")
    import onnx
    from onnx import TensorProto, helper

    shape = ["n", 4] if kind == "vector" else [1, *SHAPE]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", ends[:1], ends[1:])
    path = tmp_path / "other.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    if kind == "garbage":
        path.write_bytes(b"no protobuf at all")
    with pytest.raises(HarpError) as error:
        measure(bench.of_onnx(path), batches=[2], repeats=1)
    assert "\n" not in str(error.value)


def test_a_runtime_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Runtime("no-such-package", lambda: print).version is None
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtra, match="openvino is not installed: pip install openvino"):
        RUNTIMES["openvino"].load()


def test_a_note_says_why_there_is_no_onnx_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: 1 / 0)
    network = bench.of_model(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.rand(2, 3, 2, 2), tmp_path)
    assert set(network.files) == {"sparse", "torch"}
    if RUNTIMES["onnxruntime"].version:
        assert "ONNX can't hold the model: ZeroDivisionError: division by zero" in network.notes[-1]


@pytest.mark.parametrize("units", [{}, {"kind": "channels"}], ids=["weights", "channels"])
def test_a_run_is_measured_against_its_architecture_before_any_cut(
    units: dict[str, str], tmp_path: Path, no_onnx: None
) -> None:
    content = finished_run.content(data="fashion", model={"name": "resnet8", "width": 0.5}, keep=0.1, units=units)
    model = finished_run.make(tmp_path / "run", content)
    network = bench.of_target(plan.Subject(str(tmp_path / "run")), tmp_path)
    whole = models.build("resnet8", num_classes=10, shape=(1, 28, 28), width=0.5)
    assert network.shape == (1, 28, 28)
    assert network.dense_bytes == 4 * sum(parameter.numel() for parameter in whole.parameters())
    assert network.files["sparse"].stat().st_size < network.dense_bytes / 2
    x = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        expected = model(x)
    answer = RUNTIMES["sparse"].open(network.files["sparse"], 1)(x.numpy())
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)


def test_the_command_prints_tables_or_json(network: BenchFiles, no_processes: None, no_onnx: None) -> None:
    file = str(network.files["sparse"])
    arguments = ["bench", file, "--batch", "1", "--batch", "4", "--repeats", "2"]
    plain = CliRunner().invoke(app, arguments)
    assert plain.exit_code == 0, plain.output
    assert "median ms" in plain.stdout and "peak memory" in plain.stdout and "5.0 MB" in plain.stdout
    result = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert result["artefact"] == file and {row["batch"] for row in result["latency"]} == {1, 4}
    if RUNTIMES["onnxruntime"].version:
        assert "not today" in plain.stdout and "not today" in result["notes"][-1]


@pytest.mark.parametrize("target", ["nothing.harp", "nothing.onnx", ".", "no-such-model"])
def test_a_target_that_is_no_network_is_a_one_line_error(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", target])
    assert isinstance(result.exception, HarpError) and "\n" not in str(result.exception)


def test_a_damaged_harp_file_is_a_one_line_error(tmp_path: Path, network: BenchFiles) -> None:
    bad = tmp_path / "bad.harp"
    bad.write_bytes(network.files["sparse"].read_bytes()[:-40])
    result = CliRunner().invoke(app, ["bench", str(bad)])
    assert isinstance(result.exception, CheckpointError) and "\n" not in str(result.exception)


def test_the_model_itself_is_not_changed(tmp_path: Path, no_onnx: None) -> None:
    model = ConvNet().train()
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bench.of_model(model, torch.rand(2, *SHAPE), tmp_path)
    assert model.training and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
