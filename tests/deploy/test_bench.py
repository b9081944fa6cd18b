"""What a network costs to use: the same network in every runtime, timed in turns, then in processes of their own."""

import json
import subprocess
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
from harp.deploy.bench import clock, fresh, measuring, prepared
from harp.deploy.bench.clock import latencies
from harp.deploy.bench.prepared import Prepared
from harp.deploy.bench.runtimes import RUNTIMES, Runtime
from harp.engine.native import bindings
from harp.errors import CheckpointError, HarpError, MissingExtra, ModelError, RecipeError
from harp.experiments import plan
from harp.system import memory
from support import finished_run
from support.cases import ConvNet

SHAPE = (3, 16, 16)
ALONE = {"import_seconds": 0.2, "open_seconds": 0.1, "first_seconds": 0.05, "peak_bytes": 5_000_000, "added_bytes": 7}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The files of a small network, nine tenths of it zero."""
    torch.manual_seed(0)
    model = ConvNet().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.9, 0)
    return prepared.of_model(model, torch.rand(2, *SHAPE), tmp_path_factory.mktemp("files"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes: they take seconds to import torch."""
    monkeypatch.setattr(fresh, "measure", lambda *_: dict(ALONE))


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing ONNX files takes seconds too."""

    def refuse(*_: object) -> None:
        raise ModelError("not today")

    monkeypatch.setattr(prepared, "write_onnx", refuse)


def test_every_runtime_computes_the_same_network(made: Prepared, quick: None) -> None:
    found = measuring.measure(made, batches=(1, 5), repeats=3)
    assert list(found["runtimes"]) == list(made.files) and {"sparse", "torch"} <= made.files.keys()
    assert found["against"] == "torch" and found["shape"] == list(SHAPE) and found["cpu"]
    for name, each in found["runtimes"].items():
        assert each["largest_difference"] < 1e-5
        assert each["file_bytes"] == made.files[name].stat().st_size
        assert each["peak_bytes"] == 5_000_000
    assert [(row["runtime"], row["batch"]) for row in found["latency"]] == [(n, b) for b in (1, 5) for n in made.files]
    for row in found["latency"]:
        assert 0 < row["median_ms"] <= row["p95_ms"]
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["median_ms"])
        assert row["runtime"] != "torch" or row["speedup"] == 1
    assert found["dense_bytes"] > found["runtimes"]["sparse"]["file_bytes"]


def test_times_that_are_torchs_are_told(made: Prepared, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "kernels", lambda: None)
    told = measuring.measure(made, batches=[1], repeats=1)["notes"]
    assert any("no native code" in note for note in told)


def test_threads_of_torch_are_what_they_were(made: Prepared, quick: None) -> None:
    before = torch.get_num_threads()
    measuring.measure(made, batches=[1], threads=2, repeats=1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong", [{"batches": []}, {"batches": [0]}, {"threads": 0}, {"repeats": 0}])
def test_numbers_below_one_are_refused(made: Prepared, wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="whole numbers from 1 up"):
        measuring.measure(made, **wrong)


def test_a_fresh_process_tells_seconds_and_memory_and_needs_no_torch(made: Prepared, tmp_path: Path) -> None:
    images = tmp_path / "images.npy"
    np.save(images, np.zeros((2, *SHAPE), np.float32))
    found = fresh.measure("sparse", made.files["sparse"], images, 1)
    assert all(found[key] > 0 for key in ("import_seconds", "open_seconds", "first_seconds"))
    if sys.platform == "linux":
        assert 0 < found["peak_bytes"] < memory.most_resident(), "not that of this process, which has torch"
        assert 0 <= found["added_bytes"] < found["peak_bytes"]
    code = (
        "import sys; from harp.deploy.bench import fresh; fresh.main(*sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "sparse", str(made.files["sparse"]), str(images), "1"], check=True)


def test_a_file_that_a_fresh_process_can_not_open_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.harp"
    bad.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=r"sparse can't use .*bad\.harp") as error:
        fresh.measure("sparse", bad, bad, 1)
    assert "\n" not in str(error.value)


def test_a_process_that_does_not_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "PATIENCE", 0.01)
    with pytest.raises(CheckpointError, match=r"has not predicted with .* in 0\.01 seconds"):
        fresh.measure("sparse", tmp_path / "a.harp", tmp_path / "x.npy", 1)


def test_ways_take_turns_and_are_all_called_as_often() -> None:
    calls: list[str] = []
    shown: list[tuple[str, int]] = []
    ways = {name: lambda name=name: [calls.append(name), sum(range(200_000))] for name in "abc"}
    found = latencies(ways, 7, lambda name, done: shown.append((name, done)))
    assert {name: len(seconds) for name, seconds in found.items()} == dict.fromkeys("abc", 7)
    assert all(second > 0 for seconds in found.values() for second in seconds)
    assert shown[-1][1] == 21 and [done for _, done in shown] == sorted(done for _, done in shown)
    turns = [name for name, after in zip(calls, [*calls[1:], ""], strict=True) if name != after]
    assert turns[:6] == [*"abc", *"abc"], "the first calls are for warming up, then the turns begin"


def test_quick_ways_are_timed_several_times_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-5))
    turns: list[str] = []
    latencies({"quick": lambda: None}, 100, lambda name, done: turns.append(name))
    assert len(turns) == 1


def test_a_harp_file_brings_its_own_network(made: Prepared, tmp_path: Path, no_onnx: None) -> None:
    again = prepared.of_harp(made.files["sparse"], tmp_path)
    assert again.files["sparse"] == made.files["sparse"] and again.dense_bytes == made.dense_bytes
    x = np.random.default_rng(0).random((3, *SHAPE), dtype=np.float32)
    answers = [RUNTIMES["torch"].opened(each.files["torch"], 1)(x) for each in (made, again)]
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-6)


def test_an_onnx_file_is_measured_as_it_is(made: Prepared, tmp_path: Path, quick: None) -> None:
    if "onnxruntime" not in made.files:
        pytest.skip("ONNX Runtime is not installed")
    found = prepared.of_onnx(made.files["onnxruntime"])
    assert found.shape == SHAPE and "sparse" not in found.files and "torch" not in found.files
    assert found.dense_bytes == pytest.approx(made.dense_bytes, rel=0.1)
    told = measuring.measure(found, batches=[2], repeats=1)
    assert told["against"] == "onnxruntime" and told["notes"]


@pytest.mark.parametrize("kind", ["vector", "fixed", "garbage"])
def test_other_onnx_files_are_refused_in_one_line(made: Prepared, tmp_path: Path, kind: str, quick: None) -> None:
    if "onnxruntime" not in made.files:
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
    with pytest.raises(CheckpointError) as error:
        measuring.measure(prepared.of_onnx(path), batches=[2], repeats=1)
    assert "\n" not in str(error.value)


def test_what_is_not_installed_is_named() -> None:
    absent = Runtime("absent", "no-such-distribution", ("no_such_module",), lambda path, threads: print, "absent")
    assert absent.version is None
    with pytest.raises(MissingExtra, match="no_such_module is not installed: pip install absent"):
        absent.load()


def test_what_can_not_be_written_as_onnx_leaves_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: 1 / 0)
    found = prepared.of_model(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.rand(2, 3, 2, 2), tmp_path)
    assert set(found.files) == {"sparse", "torch"}
    if RUNTIMES["onnxruntime"].version:
        assert "ONNX can't hold the model: ZeroDivisionError: division by zero" in found.notes[-1]


@pytest.mark.parametrize("units", [{}, {"kind": "channels"}], ids=["weights", "channels"])
def test_a_run_is_measured_against_its_architecture_before_any_cut(
    units: dict[str, str], tmp_path: Path, no_onnx: None
) -> None:
    content = finished_run.content(data="fashion", model={"name": "resnet8", "width": 0.5}, keep=0.1, units=units)
    model = finished_run.make(tmp_path / "run", content)
    found = prepared.of(plan.Subject(str(tmp_path / "run")), tmp_path)
    whole = models.build("resnet8", num_classes=10, shape=(1, 28, 28), width=0.5)
    assert found.shape == (1, 28, 28)
    assert found.dense_bytes == 4 * sum(parameter.numel() for parameter in whole.parameters())
    assert found.files["sparse"].stat().st_size < found.dense_bytes / 2
    x = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        expected = model(x)
    answer = RUNTIMES["sparse"].opened(found.files["sparse"], 1)(x.numpy())
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)


def test_the_command_prints_tables_or_json(made: Prepared, quick: None, no_onnx: None) -> None:
    file = str(made.files["sparse"])
    arguments = ["bench", file, "--batch", "1", "--batch", "4", "--repeats", "2"]
    plain = CliRunner().invoke(app, arguments)
    assert plain.exit_code == 0, plain.output
    assert "median ms" in plain.stdout and "peak memory" in plain.stdout and "5.0 MB" in plain.stdout
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert told["artefact"] == file and {row["batch"] for row in told["latency"]} == {1, 4}
    if RUNTIMES["onnxruntime"].version:
        assert "not today" in plain.stdout and "not today" in told["notes"][-1]


@pytest.mark.parametrize("target", ["nothing.harp", "nothing.onnx", ".", "no-such-model"])
def test_what_is_wrong_is_one_line(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", target])
    assert isinstance(result.exception, HarpError) and "\n" not in str(result.exception)


def test_a_damaged_harp_file_is_one_line(tmp_path: Path, made: Prepared) -> None:
    bad = tmp_path / "bad.harp"
    bad.write_bytes(made.files["sparse"].read_bytes()[:-40])
    result = CliRunner().invoke(app, ["bench", str(bad)])
    assert isinstance(result.exception, CheckpointError) and "\n" not in str(result.exception)


def test_the_model_itself_is_not_touched(tmp_path: Path, no_onnx: None) -> None:
    model = ConvNet().train()
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared.of_model(model, torch.rand(2, *SHAPE), tmp_path)
    assert model.training and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
