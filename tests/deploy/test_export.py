"""Exports: every file gives the logits of the network in a fresh process; no incomplete export is left."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import harp
from harp.cli import app
from harp.deploy.export import formats, write
from harp.deploy.export.source import Source, of_module, of_target
from harp.engine import format
from harp.engine.capture.capture import capture
from harp.engine.format.reader import read_sparse
from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph
from harp.engine.store import pack, read_channels
from harp.errors import CheckpointError, HarpError, MissingExtra, ModelError, RecipeError, RunFolderError
from harp.system import files
from harp.system.progress import Quiet
from harp.system.tensors import load_tensors
from support import finished_run
from support.cases import batch, build

TINY = {"name": "tinynet", "width": 6}


def source_of(target: object) -> Source:
    """What the command exports of a target, without options."""
    return of_target(str(target), None, None, None, Quiet(), needs_data=False)


def run_of(folder: Path, **options: Any) -> nn.Module:
    """A run on Fashion-MNIST, not trained."""
    content = finished_run.content(data="fashion", model=options.pop("model", TINY), **options)
    results = [finished_run.score("natural", 80, 100), finished_run.score("pgd-20", 40, 100, 0.1)]
    return finished_run.make(folder, content, results=results)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that pruned weights, exported in every format by the command."""
    folder = tmp_path_factory.mktemp("weights") / "pruned-0123"
    run_of(folder, keep=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "86400")
        to = [part for name in formats.FORMATS for part in ("--to", name)]
        done = CliRunner().invoke(app, ["export", str(folder), *to, "--check", "--examples", "40"])
    assert done.exit_code == 0, done.output
    assert "network.harp" in done.stdout
    assert "95 % interval" in done.stdout
    return folder, json.loads((folder / "export" / "manifest.json").read_text())


def test_the_manifest_describes_the_files_and_the_network(weights: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = weights
    assert sorted(path.name for path in (folder / "export").iterdir()) == sorted(["manifest.json", *manifest["files"]])
    for name, entry in manifest["files"].items():
        content = (folder / "export" / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert entry["ratio"] == pytest.approx(manifest["dense_bytes"] / len(content), abs=0.01)
        assert entry["check"]["error"] <= entry["check"]["bound"] == 1e-5
        assert entry["check"]["images"] == 64
        assert entry["check"]["changed"] == 0
    budget = manifest["budget"]
    assert budget["kept"] == sum(layer["kept"] for layer in budget["layers"])
    assert manifest["architecture"] == {"name": "tinynet", "options": {"width": 6}}
    assert (manifest["input_shape"], len(manifest["classes"])) == ([1, 28, 28], 10)
    assert [(result["name"], result["n"], result.get("epsilon")) for result in manifest["accuracy"]] == [
        ("natural", 100, None), ("pgd-20", 100, 0.1),
    ]  # fmt: skip
    origin = manifest["provenance"]
    assert (origin["run"], origin["recipe"], origin["date"]) == ("pruned-0123", "0123456789ab", "1970-01-02T00:00:00Z")
    assert manifest["files"]["network.onnx"]["opset"] >= 18
    assert "parameters" in manifest["files"]["network.onnx"]["removed"]


def test_the_accuracy_of_every_coding_is_measured(weights: tuple[Path, dict[str, Any]]) -> None:
    _, manifest = weights
    measured = [(result["values"], result["name"], result["n"]) for result in manifest["codings"]]
    assert measured == [(values, name, 40) for values in ("f32", "f16", "int8") for name in ("natural", "pgd-20")]
    natural, robust = (result["value"] for result in manifest["codings"][:2])
    assert robust <= natural
    assert all(result["low"] <= result["value"] <= result["high"] for result in manifest["codings"])


def test_the_sparse_file_holds_the_kept_weights(weights: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = weights
    header, stored = read_sparse(folder / "export" / "network.harp")
    kept = {layer["name"]: layer["kept"] for layer in manifest["budget"]["layers"]}
    assert {name: len(tensor.values) for name, tensor in stored.items() if name in kept} == kept
    assert header["manifest"]["budget"] == manifest["budget"]
    assert "files" not in header["manifest"]
    graph = Graph.from_dict(header["graph"])
    assert not graph.needs_torch
    assert manifest["files"]["network.harp"]["check"]["torch"] is False
    network = harp.load(folder / "export" / "network.harp")
    images = torch.rand(5, 1, 28, 28)
    _, tensors, _ = format.load(folder / "export" / "network.harp")
    expected = reference.run(graph, tensors, images)
    assert torch.allclose(network(images), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert np.array_equal(network(images.numpy()), network(images).numpy())
    assert network.header["classes"] == manifest["classes"]


def test_the_safetensors_file_is_the_state_and_the_onnx_file_takes_any_batch(
    weights: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = weights
    tensors, _ = load_tensors(folder / "export" / "network.safetensors")
    original, _ = load_tensors(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in original.items()}
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(str(folder / "export" / "network.onnx")).graph
    assert [value.name for value in graph.input] == ["images"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch", "the number of images is open"


def test_the_small_network_of_a_channel_run_is_exported(tmp_path: Path) -> None:
    options = {"units": {"kind": "channels", "budget": "flops"}, "model": {"name": "tinynet", "width": 8}}
    options["model"] |= {"normalize": [[0.3], [0.4]]}
    small = run_of(tmp_path / "run", keep=0.4, **options)
    source = source_of(tmp_path / "run")
    assert source.cut is not None
    manifest = write.export(source, tmp_path / "out", ["sparse", "safetensors"], values="f32")
    parameters = sum(p.numel() for p in small.parameters())
    assert manifest["dense_bytes"] > 4 * parameters
    assert manifest["files"]["network.harp"]["deviation"] < 1e-5, "f32 is exact"
    assert manifest["files"]["network.safetensors"]["ratio"] > 1
    x = torch.rand(3, 1, 28, 28)
    assert torch.allclose(harp.load(tmp_path / "out" / "network.harp")(x), small(x).detach(), atol=1e-4)


def test_a_model_without_a_run_is_exported_by_its_name(tmp_path: Path) -> None:
    command = ["export", "tinynet", "--data", "digits", "--to", "sparse", "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    manifest = json.loads(done.stdout)
    assert manifest["provenance"]["model"] == "tinynet"
    assert manifest["accuracy"] == []
    assert manifest["budget"]["kept"] == manifest["budget"]["size"]


def test_loading_needs_no_torch(weights: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = weights
    code = (
        "import sys, numpy, harp; net = harp.load(sys.argv[1]);"
        "net(numpy.zeros((1, 1, 28, 28), numpy.float32)); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / "export" / "network.harp")], check=True)


# Errors.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "onx"], "did you mean 'onnx'"),
        (["--to", "sparse", "--values", "f8"], "one of f32, f16, int8"),
        (["--to", "sparse", "--weights", "a"], "a run has its own"),
    ],
)
def test_wrong_options_are_refused(weights: tuple[Path, dict[str, Any]], arguments: list[str], words: str) -> None:
    with pytest.raises(HarpError, match=words):
        CliRunner().invoke(app, ["export", str(weights[0]), *arguments], catch_exceptions=False)


def test_targets_that_are_no_finished_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no folder"):
        source_of(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match="is no run"):
        source_of(tmp_path)
    run_of(tmp_path / "half")
    (tmp_path / "half" / "summary.json").unlink()
    with pytest.raises(RunFolderError, match="is not finished"):
        source_of(tmp_path / "half")


def test_a_format_whose_packages_are_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'onnx, onnxscript, onnxruntime: pip install "harp-prune\[export\]"'):
        formats.check(["sparse", "onnx"])
    formats.check(["sparse", "safetensors"])


def test_a_folder_that_cannot_be_written_is_refused(weights: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    source = source_of(weights[0])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't write to"):
        write.export(source, tmp_path / "file" / "out", ["sparse"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError])
def test_a_failed_export_leaves_no_files(
    weights: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    source = source_of(weights[0])

    def stop(form: str, path: Path, *rest: Any) -> dict[str, Any]:
        assert path.stat().st_size > 0
        if form == "safetensors":
            raise error("stop")
        return {}

    monkeypatch.setattr(write, "check_file", stop)
    with pytest.raises(error):
        write.export(source, tmp_path / "out", ["sparse", "safetensors"])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_with_other_logits_is_refused(weights: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = weights
    source, images, file = source_of(folder), torch.rand(4, 1, 28, 28), folder / "export" / "network.harp"
    logits = harp.load(file)(images)
    assert write.check_file("sparse", file, source, images, logits)["error"] < 1e-6
    with pytest.raises(ModelError, match=r"differ from the network's by 1\.0e-03 of the largest"):
        write.check_file("sparse", file, source, images, logits * 1.001)
    with pytest.raises(ModelError, match=r"of shape \(4, 10\), not \(4, 9\)"):
        write.check_file("sparse", file, source, images, logits[:, :9])
    files.write_bytes(tmp_path / "bad.harp", file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        write.check_file("sparse", tmp_path / "bad.harp", source, images, logits)


def test_a_date_that_is_no_number_of_seconds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(RecipeError, match="SOURCE_DATE_EPOCH=yesterday"):
        write.export(of_module(build("residual"), (3, 8, 8)), tmp_path, ["sparse"])


# The file with a graph in it.


@pytest.fixture(scope="module")
def residual() -> tuple[nn.Module, Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A network of which most channels are dead."""
    model = build("residual").eval()
    generator = torch.Generator().manual_seed(1)
    masks = {n: torch.rand(p.shape, generator=generator) < 0.02 for n, p in model.named_parameters() if p.ndim > 1}
    masks["linear.weight"][:, 0] = True
    harp.apply_masks(model, masks)
    captured = capture(model, batch(2)[0])
    return model, captured.graph, captured.tensors(model), masks


def test_biases_of_unread_channels_are_not_stored(residual: Any, tmp_path: Path) -> None:
    model, graph, tensors, masks = residual
    files.write_bytes(tmp_path / "a.harp", pack(graph, tensors, masks, {"classes": 4}, "f32"))
    header, stored = read_sparse(tmp_path / "a.harp")
    dropped = {name for name, tensor in stored.items() if name.endswith("bias") and tensor.indices is not None}
    assert dropped, "most channels have no reader"
    assert header["classes"] == 4
    x = batch(6)[0]
    assert torch.allclose(harp.load(tmp_path / "a.harp")(x), model(x).detach(), atol=1e-5)
    _, read, _ = format.load(tmp_path / "a.harp")
    assert torch.allclose(reference.run(graph, read, x), model(x).detach(), atol=1e-5)


def test_changing_an_unread_channel_changes_no_logits(residual: Any) -> None:
    _, graph, tensors, masks = residual
    read_by_layer = read_channels(graph, masks)
    x = batch(4)[0]
    expected = reference.run(graph, tensors, x)
    for node in graph.nodes:
        if node.op == "conv" and "bias" in node.tensors:
            name = node.tensors["bias"]
            for channel, read in enumerate(read_by_layer[node.name].tolist()):
                moved = {**tensors, name: tensors[name].clone()}
                moved[name][channel] += 100.0
                same = torch.equal(reference.run(graph, moved, x), expected)
                assert same or read, f"{name} {channel} is read"


def test_coarser_codings_change_the_logits_more(residual: Any) -> None:
    model, graph, tensors, masks = residual
    x = batch(8)[0]
    expected = model(x).detach()
    gaps = {}
    for values in formats.CODINGS:
        twin = formats.unpacked(graph, pack(graph, tensors, masks, {}, values))
        gaps[values] = float((twin(x) - expected).abs().max() / expected.abs().max())
    assert gaps["f32"] < 1e-6 < gaps["f16"] < gaps["int8"] < 0.05


def test_operations_that_torch_computes_are_stored_in_the_file(tmp_path: Path) -> None:
    model = build("transformer").eval()
    captured = capture(model, batch(2)[0])
    content = pack(captured.graph, captured.tensors(model), {}, {}, "f32")
    files.write_bytes(tmp_path / "a.harp", content)
    network = harp.load(tmp_path / "a.harp")
    x = batch(5)[0]
    assert network.graph.needs_torch
    assert torch.allclose(network(x), model(x).detach(), atol=1e-5)
    _, stored = read_sparse(content)
    assert stored["encoder.layers.0.linear1.weight"].indices is not None, "a weight, whatever computes with it"
    assert stored["position"].indices is None


def test_files_that_hold_no_valid_network_are_refused(residual: Any, tmp_path: Path) -> None:
    _, graph, tensors, masks = residual
    path = tmp_path / "a.harp"
    format.write(path, tensors, masks, {})
    with pytest.raises(CheckpointError, match="no graph"):
        harp.load(path)
    format.write(path, tensors, masks, {"graph": {"nodes": [{"op": "exec"}]}})
    with pytest.raises(CheckpointError, match="unknown operation"):
        harp.load(path)
    fewer = {name: tensor for name, tensor in tensors.items() if name != "linear.bias"}
    format.write(path, fewer, masks, {"graph": graph.as_dict()})
    with pytest.raises(CheckpointError, match=r"needs a tensor 'linear\.bias'"):
        harp.load(path)
    format.write(path, tensors, masks, {"graph": graph.as_dict()})
    with pytest.raises(CheckpointError, match="limit of 100"):
        harp.load(path, limit=100)
    huge = {"nodes": [{"op": "input", "shape": [1, 1 << 14, 1 << 14]}, {"op": "mean"}]}
    format.write(path, {}, {}, {"graph": huge})
    with pytest.raises(CheckpointError, match="computing an image may take"):
        harp.load(path)
    bad = {"op": "torch", "shape": [4], "attributes": {"op": "aten.from_file.default", "args": ["/etc/passwd"]}}
    format.write(path, tensors, masks, {"graph": {"nodes": [*graph.as_dict()["nodes"], bad]}})
    with pytest.raises(CheckpointError, match="no function that a network in a file may call"):
        harp.load(path)
    with pytest.raises(CheckpointError, match="No such file"):
        harp.load(tmp_path / "b.harp")


def test_a_second_export_adds_to_the_first(
    weights: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "check_file", lambda *_: {})
    source = source_of(weights[0])
    out = tmp_path / "out"
    write.export(source, out, ["sparse"], values="f32")
    manifest = write.export(source, out, ["safetensors"])
    assert list(manifest["files"]) == ["network.harp", "network.safetensors"]
    assert manifest["files"]["network.harp"]["values"] == "f32"
    (out / "network.safetensors").write_bytes(b"something else")
    assert list(write.export(source, out, ["sparse"])["files"]) == ["network.harp"]


class Noting(Quiet):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_an_export_of_another_network_leaves_nothing_of_the_first(
    weights: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "check_file", lambda *_: {})
    source = source_of(weights[0])
    out = tmp_path / "out"
    write.export(source, out, ["sparse", "safetensors", "torch-export"])
    (out / "network.pt2").write_bytes(b"changed by somebody")
    with torch.no_grad():
        next(source.model.parameters()).mul_(0.5)
    display = Noting()
    manifest = write.export(source, out, ["sparse"], display=display)
    assert list(manifest["files"]) == ["network.harp"]
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "network.harp", "network.pt2"]
    assert [note for note in display.notes if note.startswith("removed network.safetensors: of another network")]
