"""Evaluation of deployed files: adversarial images of the twin are replayed on them, and Square queries them."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp import models
from harp.attacks import Apgd, Ball, Pgd, Square
from harp.attacks.fast_forward import frozen
from harp.data import registry
from harp.deploy import exported_eval
from harp.deploy.exported_eval import checks
from harp.deploy.exported_eval.evaluate import FileEvaluation
from harp.deploy.exported_eval.open import Artefact, Queried, opened
from harp.deploy.exported_eval.twin import Origin, Setup, Twin, origin_of, run_of
from harp.engine import format, store
from harp.engine.capture.capture import Captured, capture
from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph
from harp.engine.graph.reference import InTorch
from harp.errors import PROBLEM, CheckpointError, DataError, HarpError, Interrupted, ModelError
from harp.evaluation import runner
from harp.evaluation.results import Audit
from harp.models.weights import fingerprint, save_model
from harp.reports import html
from harp.reports.html import collect
from harp.system import files
from harp.system.interrupt import Stop
from harp.system.progress import Quiet
from harp.system.tensors import load_tensors
from support import cases, finished_run
from support.commands import Harp

BALL = Ball(0.1, "linf")


def trained(model: nn.Module, steps: int, rate: float) -> nn.Module:
    """A model after a few steps on the digits."""
    train = registry.load("digits").train
    x = train.images.float() / 255
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), train.labels).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return trained(models.build("tinynet", num_classes=10, shape=(1, 8, 8), width=4), 40, 0.01)


@pytest.fixture(scope="module")
def captured(network: nn.Module) -> Captured:
    return capture(network, registry.load("digits").test.images[:4].float() / 255)


@pytest.fixture(scope="module")
def linear() -> nn.Module:
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 60, 0.05)


def write_harp(path: Path, captured: Captured, model: nn.Module, **header: Any) -> Path:
    files.write_bytes(path, store.pack(captured.graph, captured.tensors(model), {}, header))
    return path


def write_onnx(
    path: Path,
    model: nn.Module | None = None,
    *,
    shape: tuple[Any, ...] = ("n", 1, 8, 8),
    kind: str = "FLOAT",
    inputs: int = 1,
    outputs: int = 1,
    outside: bool = False,
) -> Path:
    """A linear layer as ONNX; the options give it inputs and outputs that are not expected."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, number = onnx.helper, getattr(onnx.TensorProto, kind)
    with torch.no_grad():
        weight = torch.zeros(10, 64) if model is None else model[1].weight
        bias = torch.zeros(10) if model is None else model[1].bias
    dtype = helper.tensor_dtype_to_np_dtype(number)
    constants = [
        onnx.numpy_helper.from_array(tensor.detach().numpy().astype(dtype), name)
        for name, tensor in (("w", weight), ("b", bias))
    ]
    nodes = [
        helper.make_node("Flatten", ["x0"], ["flat"]),
        *(helper.make_node("Gemm", ["flat", "w", "b"], [f"y{k}"], transB=1) for k in range(outputs)),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info(f"x{k}", number, list(shape)) for k in range(inputs)],
        [helper.make_tensor_value_info(f"y{k}", number, None) for k in range(outputs)],
        constants,
    )
    model_proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    extra = {"save_as_external_data": True, "location": f"{path.name}.data", "size_threshold": 0} if outside else {}
    onnx.save(model_proto, str(path), **extra)
    return path


def prepared(path: Path, **options: Any) -> Setup:
    return exported_eval.prepared(path, data_name="digits", **options)


def evaluation_of(setup: Setup, folder: Path | None = None, **more: Any) -> FileEvaluation:
    return FileEvaluation(setup, folder, partial(Audit, **{"examples": 60, "seed": 1, "batch": 32, **more}))


def right_images(result: dict[str, Any]) -> list[bool]:
    return [bit == "1" for bit in result["images"]]


@pytest.fixture
def run(tmp_path: Path, network: nn.Module) -> Path:
    """A finished run whose network is the trained one."""
    content = finished_run.content(data="digits", model={"name": "tinynet", "width": 4}, keep=None)
    content["objective"] = {"name": "pgd", "epsilon": 0.1}
    folder = tmp_path / "runs" / "made-0123456789ab"
    finished_run.make(
        folder, content, results=[finished_run.score("natural", 450, 500, data="digits", low=0.87, high=0.93)]
    )
    save_model(folder / "model.safetensors", network)
    return folder


# Networks as files


@pytest.mark.parametrize("case", ["residual", "tied"])
def test_a_graph_in_torch_computes_the_graph_and_can_be_folded(case: str) -> None:
    model, (x, _) = cases.build(case), cases.batch(6)
    captured = capture(model.eval(), x)
    tensors = captured.tensors(model)
    network = InTorch(captured.graph, tensors)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    x.requires_grad_()
    expected = reference.run(captured.graph, tensors, x)
    torch.testing.assert_close(network(x), expected)
    wanted, got = (torch.autograd.grad(y.square().sum(), x)[0] for y in (expected, network(x)))
    torch.testing.assert_close(got, wanted)
    with frozen(network, x.detach()) as net:
        assert net is not network, "attacks must find a faster network"
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_an_artefact_takes_images_in_the_unit_range_only(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    artefact = opened(write_harp(tmp_path / "m.harp", captured, network))
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(artefact.model(x), network(x), rtol=1e-2, atol=1e-2)
    assert artefact.model(x[:0]).shape == (0, 10)
    with pytest.raises(DataError, match=r"images in \[0, 1\], not \[0.*, 1\.5\]"):
        artefact.model(x + 0.5 + (1 - x.max()))
    with pytest.raises(DataError, match="shape"):
        artefact.model(torch.rand(2, 1, 8, 9))
    with pytest.raises(DataError, match="not"):
        artefact.model(torch.full((1, 1, 8, 8), float("nan")))
    assert artefact.model.classes == 10 and artefact.bytes == (tmp_path / "m.harp").stat().st_size


def test_files_with_other_bytes_have_other_fingerprints(network: nn.Module, captured: Captured, tmp_path: Path) -> None:
    one = opened(write_harp(tmp_path / "a.harp", captured, network))
    other = opened(write_harp(tmp_path / "b.harp", captured, network, note="other"))
    again = opened(write_harp(tmp_path / "c.harp", captured, network))
    prints = [fingerprint(artefact.model) for artefact in (one, other, again)]
    assert prints[0] == prints[2] != prints[1] and one.sha256 == again.sha256


def test_square_queries_the_artefact_within_the_unit_range(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    setup = prepared(write_harp(tmp_path / "m.harp", captured, network))
    asked: list[tuple[float, float, int]] = []
    before = setup.artefact.model.ask

    def watched(images: Any) -> Any:
        asked.append((float(images.min()), float(images.max()), len(images)))
        return before(images)

    setup.artefact.model.ask = watched
    trial = evaluation_of(setup)
    result = trial.under("square-60", Square(0.1, steps=60))
    assert result["how"] == "queries" and result["torch"] is None
    assert all(low >= 0 and high <= 1 for low, high, _ in asked) and len(asked) > 60
    assert max(count for *_, count in asked) <= 32
    natural = trial.natural()["deployed"]
    assert result["deployed"]["parts"][0]["tried"] == sum(right_images(natural)), "only what the artefact gets right"
    assert result["deployed"]["value"] < natural["value"]
    again = evaluation_of(setup).under("square-60", Square(0.1, steps=60))
    assert again["deployed"]["images"] == result["deployed"]["images"]


def test_adversarial_images_of_the_twin_are_replayed_on_the_artefact(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    """By hand: the attack on the twin, and the file's answers about what it result."""
    wrong = damaged(network, 0.6)
    setup = prepared(write_harp(tmp_path / "m.harp", captured, wrong))
    setup = Setup(setup.artefact, setup.origin, setup.data, BALL, Twin(network, "the trained one"))
    trial = evaluation_of(setup, tmp_path / "out", store=True)
    for name, attack in (("pgd-5", Pgd(0.1, steps=5)), ("apgd-ce-10", Apgd(0.1, steps=10))):
        result = trial.under(name, attack)
        stored = sorted((tmp_path / "out" / "twin").glob(f"accuracy-{name}-*/*.safetensors"))
        portions = [load_tensors(file)[0] for file in stored]
        tensors = {key: torch.cat([portion[key] for portion in portions]) for key in portions[0]}
        expected = setup.artefact.model(tensors["images"]).argmax(1) == tensors["labels"]
        assert right_images(result["deployed"]) == expected.tolist()
        assert right_images(result["torch"]) == (network(tensors["images"]).argmax(1) == tensors["labels"]).tolist()
        assert right_images(result["deployed"]) != right_images(result["torch"]), (
            "the damaged file must give another class somewhere"
        )
        assert result["deployed"]["value"] == pytest.approx(expected.double().mean().item())
        assert result["deployed"]["network"] == fingerprint(setup.artefact.model)
        assert result["torch"]["network"] == fingerprint(network)


def test_an_image_is_robust_if_neither_replays_nor_queries_fool_the_artefact(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    trial = evaluation_of(prepared(write_harp(tmp_path / "m.harp", captured, network)))
    tests = [trial.natural(), trial.under("pgd-3", Pgd(0.1, steps=3)), trial.under("square-99", Square(0.1, steps=99))]
    worst = trial.worst(tests)
    by_hand = [all(row) for row in zip(*(right_images(test["deployed"]) for test in tests), strict=True)]
    assert right_images(worst["deployed"]) == by_hand
    assert worst["deployed"]["value"] == sum(by_hand) / 60
    assert worst["deployed"]["value"] <= min(test["deployed"]["value"] for test in tests)
    inside = [all(row) for row in zip(*(right_images(test["torch"]) for test in tests[:2]), strict=True)]
    assert right_images(worst["torch"]) == inside


def damaged(model: nn.Module, noise: float) -> nn.Module:
    """A copy with other weights."""
    copy = models.build("tinynet", num_classes=10, shape=(1, 8, 8), width=4).eval()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.ndim > 1:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return copy


def test_wrong_weights_lower_the_accuracy_and_cause_warnings(
    harp: Harp, run: Path, network: nn.Module, captured: Captured
) -> None:
    good = write_harp(run / "export" / "network.harp", captured, network)
    words = ["--examples", "100", "--attack", "pgd-3", "--attack", "square-30", "--json"]
    code, out, err = harp("evaluate", str(good), *words)
    assert code == 0 and "warning" not in err, err
    right = json.loads(out)
    write_harp(good, captured, damaged(network, 1.0))
    code, out, err = harp("evaluate", str(good), *words)
    assert code == PROBLEM, err
    wrong = json.loads(out)
    assert wrong["tests"][0]["deployed"]["value"] < right["tests"][0]["deployed"]["value"] - 0.2
    assert wrong["tests"][-1]["deployed"]["value"] < right["tests"][-1]["deployed"]["value"]
    assert "warning: agreement" in err and "the run made-0123456789ab" in err and "warning: stated accuracy" in err
    assert right["artefact"]["sha256"] != wrong["artefact"]["sha256"]
    # With the run as the twin, the numbers stand side by side.
    code, out, err = harp("evaluate", str(good), *words, "--twin", str(run))
    beside = json.loads(out)["tests"][0]
    assert beside["torch"]["value"] == right["tests"][0]["torch"]["value"] > beside["deployed"]["value"] + 0.2
    assert "does not compute what its twin computes" in err


# Numbers and files


def test_the_output_names_everything_that_a_number_depends_on(
    run: Path, network: nn.Module, captured: Captured, harp: Harp
) -> None:
    path = write_harp(run / "export" / "network.harp", captured, network)
    code, out, err = harp(
        "evaluate", str(path), "--examples", "40", "--attack", "pgd-2", "--attack", "square-9", "--json"
    )
    assert code == 0, err
    output = json.loads(out)
    (kept,) = (run / "export" / "network.harp.evaluation").glob("deployed-*.json")
    assert json.loads(kept.read_text()) == output
    assert output["artefact"]["sha256"] == opened(path).sha256 and output["artefact"]["bytes"] == path.stat().st_size
    assert output["threat"] == {"epsilon": 0.1, "norm": "linf"}, "the run's"
    assert output["data"] == "digits" and output["n"] == 40 and output["seed"] == 0
    assert [test["name"] for test in output["tests"]] == ["natural", "pgd-2", "square-9", "worst case"]
    assert [test["how"] for test in output["tests"]] == ["images", "replayed", "queries", "union"]
    for test in output["tests"]:
        record = test["deployed"]
        assert record["low"] <= record["value"] <= record["high"] and record["n"] == 40 == sum(record["totals"])
        assert record["seed"] == 0 and {"harp", "torch"} <= set(record["versions"]) and "images" not in record
        assert len(record["correct"]) == 10, "by class"
        if test["name"] != "natural":
            assert record["attack"]["epsilon"] == 0.1
    own, original = output["agreement"]
    assert own["twin"] and own["agree"] == 40 and own["relative"] < 1e-5
    assert not original["twin"] and original["with"] == "the run made-0123456789ab" and original["relative"] < 1e-2
    assert output["twin"]["words"] == "the graph in network.harp"
    assert all(output["tests"][k]["torch"]["value"] == output["tests"][k]["deployed"]["value"] for k in (0, 1))


def test_the_table_shows_the_file_and_its_twin(run: Path, network: nn.Module, captured: Captured, harp: Harp) -> None:
    path = write_harp(run / "export" / "network.harp", captured, network)
    code, out, err = harp("evaluate", str(path), "--examples", "30", "--attack", "square-9", "--out", "there")
    assert code == 0, err
    for words in ("in torch", "as deployed", "asked of the file itself", "agreement", "sha256", "is it what it seems?"):
        assert words in out, words
    assert len(list(Path("there").glob("deployed-network.harp-*.json"))) == 1
    assert not (run / "export" / "network.harp.evaluation").exists()


def test_a_number_is_measured_once_and_only_for_this_file(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    setup = prepared(write_harp(tmp_path / "m.harp", captured, network))
    first = evaluation_of(setup, tmp_path / "out").under("pgd-3", Pgd(0.1, steps=3))
    square = evaluation_of(setup, tmp_path / "out").under("square-9", Square(0.1, steps=9))
    untouched = setup.artefact.model.ask

    def never(images: Any) -> Any:
        raise AssertionError("asked again")

    setup.artefact.model.ask = never
    again = evaluation_of(setup, tmp_path / "out")
    assert again.under("pgd-3", Pgd(0.1, steps=3)) == json.loads(json.dumps(first))
    assert again.under("square-9", Square(0.1, steps=9)) == json.loads(json.dumps(square))
    other = prepared(write_harp(tmp_path / "m.harp", captured, network, note="another file"))
    other.artefact.model.ask = never
    for name, attack in (("pgd-3", Pgd(0.1, steps=3)), ("square-9", Square(0.1, steps=9))):
        with pytest.raises((AssertionError, ModelError), match="asked again"):
            evaluation_of(other, tmp_path / "out").under(name, attack)
    setup.artefact.model.ask = untouched


class Impatient(Quiet):
    """Asks to stop after so many steps."""

    def __init__(self, stop: Stop, after: int) -> None:
        self.stop, self.left = stop, after

    def count(self, done: float, total: int, text: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            self.stop.signal = 2


@pytest.mark.parametrize(
    ("name", "attack", "after"), [("apgd-ce-9", Apgd(0.1, steps=9), 7), ("square-40", Square(0.1, steps=40), 25)]
)
def test_an_interrupted_evaluation_resumes_to_the_same_result(
    network: nn.Module,
    captured: Captured,
    tmp_path: Path,
    name: str,
    attack: Any,
    after: int,
) -> None:
    setup = prepared(write_harp(tmp_path / "m.harp", captured, network))
    whole = evaluation_of(setup).under(name, attack)
    stop = Stop()
    with pytest.raises(Interrupted):
        evaluation_of(setup, tmp_path / "out", display=Impatient(stop, after), stop=stop).under(name, attack)
    assert list((tmp_path / "out").rglob("*.state.pt"))
    result = evaluation_of(setup, tmp_path / "out").under(name, attack)
    assert result["deployed"]["images"] == whole["deployed"]["images"]
    assert not list((tmp_path / "out").rglob("*.state.pt"))


def test_a_witness_classifies_the_images_of_all_shards(
    network: nn.Module, linear: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = registry.load("digits").test
    monkeypatch.setattr(runner, "SHARD", 10 * 64 * 4)
    images, labels = test.images[:35], test.labels[:35]
    work = runner.AttackRun(network, images, labels, None, classes=10, batch=10, witness=linear)
    outcome = work.run()
    expected = linear(images.float() / 255).argmax(1) == labels
    assert torch.equal(outcome.witnessed, expected) and work.count == 4


def test_the_curve_over_epsilon_is_replayed(
    network: nn.Module, captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harp.evaluation.results.CURVE", (0.5, 4.0))
    trial = evaluation_of(prepared(write_harp(tmp_path / "m.harp", captured, network)), examples=20)
    points = trial.curve(BALL)
    assert [point["epsilon"] for point in points] == [0.0, 0.05, 0.4]
    values = [point["deployed"]["value"] for point in points]
    assert values == sorted(values, reverse=True) and values[-1] < 0.1 < values[0]
    assert points[0]["deployed"]["value"] == trial.natural()["deployed"]["value"]


# ONNX


def test_an_onnx_file_is_attacked_through_its_twin(harp: Harp, linear: nn.Module, tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", linear)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    save_model(tmp_path / "m.safetensors", linear)
    words = ["evaluate", "m.onnx", "--data", "digits", "--examples", "50", "--epsilon", "0.1", "--json"]
    words += ["--attack", "pgd-3", "--attack", "square-20", "--twin", "net.py:make", "--weights", "m.safetensors"]
    code, out, err = harp(*words)
    assert code == 0, err
    output = json.loads(out)
    assert output["artefact"]["runtime"]["onnxruntime"] and output["artefact"]["runtime"]["opset"] == 18
    assert output["twin"]["words"] == "net.py:make with m.safetensors"
    assert output["agreement"][0]["agree"] == 50 and output["agreement"][0]["relative"] < 1e-5
    replayed = output["tests"][1]
    assert replayed["torch"]["value"] == replayed["deployed"]["value"] < output["tests"][0]["deployed"]["value"]
    assert (path.with_name("m.onnx.evaluation")).is_dir()


def test_an_onnx_file_without_a_twin_is_only_queried(harp: Harp, linear: nn.Module, tmp_path: Path) -> None:
    write_onnx(tmp_path / "m.onnx", linear)
    words = ["evaluate", "m.onnx", "--data", "digits", "--examples", "40", "--epsilon", "0.1"]
    code, out, err = harp(*words, "--attack", "pgd-3", "--attack", "square-20", "--json")
    assert code == 0, err
    assert err.strip() == "no twin in torch (--twin): only black-box attacks run, not pgd-3"
    output = json.loads(out)
    assert [test["name"] for test in output["tests"]] == ["natural", "square-20", "worst case"]
    assert (
        output["twin"] is None and output["agreement"] == [] and all(test["torch"] is None for test in output["tests"])
    )
    assert {"artefact's answers"} <= {check["check"] for check in output["checks"]}


def test_the_twin_of_an_onnx_file_is_the_run_that_its_manifest_names(harp: Harp, run: Path, tmp_path: Path) -> None:
    """The network is another one than the run's: the twin is no twin, and that is said."""
    (tmp_path / "elsewhere").mkdir()
    path = write_onnx(tmp_path / "elsewhere" / "m.onnx")
    manifest = {"manifest": 1, "provenance": {"run": run.name}, "files": {"m.onnx": {"sha256": "0" * 64}}}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    words = ["evaluate", str(path), "--examples", "30", "--attack", "fgsm", "--attack", "square-9", "--json"]
    code, out, err = harp(*words)
    assert code == PROBLEM, err
    output = json.loads(out)
    assert output["twin"]["words"] == f"the run {run.name}" and output["data"] == "digits"
    assert output["threat"]["epsilon"] == 0.1
    assert "warning: agreement" in err and "warning: integrity" in err


def test_a_manifest_that_lists_only_other_files_is_ignored(
    harp: Harp, network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    wrong = {"architecture": {"name": "vgg16"}, "data": "cifar10", "files": {"new.harp": {"sha256": "0" * 64}}}
    (tmp_path / "manifest.json").write_text(json.dumps(wrong))
    path = write_harp(tmp_path / "old.harp", captured, network, data="digits")
    origin = origin_of(opened(path))
    assert origin.unlisted and origin.data == "digits" and "architecture" not in origin.manifest
    code, out, err = harp("evaluate", str(path), "--examples", "9", "--attack", "square-3", "--json")
    assert code == 0 and "does not list it" in err, err
    (finding,) = (check for check in json.loads(out)["checks"] if check["check"] == "integrity")
    assert finding["verdict"] == "look" and "does not list it" in finding["text"]
    bare = write_harp(tmp_path / "bare.harp", captured, network)
    code, _, err = harp("evaluate", str(bare), "--examples", "9")
    assert code == 2 and "the manifest beside it does not list it, add --data" in err


def test_the_run_of_a_file_is_found_by_name_or_recipe(
    run: Path, network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    def run_found_for(path: Path, **provenance: str) -> Path | None:
        origin = origin_of(opened(write_harp(path, captured, network, provenance=provenance)))
        return None if origin.run is None else origin.run.folder

    assert run_found_for(run / "export" / "m.harp") == run
    assert run_found_for(run / "export" / "m.harp", run=run.name) == run
    assert run_found_for(run / "export" / "m.harp", run="another") is None
    assert run_found_for(run / "export" / "m.harp", run="before-it-was-renamed", recipe="0123456789ab") == run
    assert run_found_for(tmp_path / "runs" / "m.harp", run=run.name) == run
    assert run_found_for(tmp_path / "far" / "m.harp") is None
    (run / "model.safetensors").write_bytes(b"gone bad")
    setup = prepared(write_harp(run / "export" / "m.harp", captured, network))
    assert setup.original is None and setup.twin is not None
    assert setup.notes[0].startswith(f"not compared with the run {run.name}: ")


@pytest.mark.parametrize("batch", [1, 4])
def test_an_onnx_file_with_a_fixed_batch_size_takes_any_number_of_images(
    linear: nn.Module, tmp_path: Path, batch: int
) -> None:
    artefact = opened(write_onnx(tmp_path / "m.onnx", linear, shape=(batch, 1, 8, 8)))
    x = torch.rand(7, 1, 8, 8)
    torch.testing.assert_close(artefact.model(x), linear(x), rtol=1e-4, atol=1e-4)


def test_external_weights_are_part_of_an_onnx_file(linear: nn.Module, tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", linear, outside=True)
    one = opened(path)
    assert set(one.parts) == {"m.onnx.data"}
    beside = tmp_path / "m.onnx.data"
    content = bytearray(beside.read_bytes())
    content[3] ^= 64
    beside.write_bytes(bytes(content))
    other = opened(path)
    assert one.sha256 == other.sha256
    assert fingerprint(one.model) != fingerprint(other.model)
    beside.unlink()
    with pytest.raises(CheckpointError, match=r"can't read .*m\.onnx\.data, which m\.onnx needs"):
        opened(path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shape": ("n", 64)}, "N x C x H x W"),
        ({"shape": ("n", 1, 8, 8, 1)}, "N x C x H x W"),
        ({"shape": ("n", 1, "h", "w")}, "fixed size"),
        ({"kind": "DOUBLE"}, r"tensor\(double\), expected float32"),
        ({"inputs": 2}, "2 inputs"),
        ({"outputs": 2}, "2 outputs"),
    ],
)
def test_an_onnx_model_that_classifies_no_images_is_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    path = write_onnx(tmp_path / "m.onnx", **wrong)
    with pytest.raises(ModelError, match=said) as error:
        opened(path)
    assert "\n" not in str(error.value)


def test_without_onnx_runtime_an_onnx_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harp: Harp
) -> None:
    (tmp_path / "m.onnx").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, _, err = harp("evaluate", "m.onnx", "--data", "digits")
    assert code == 2 and err == 'error: m.onnx needs ONNX Runtime: pip install "harp-prune[export]"\n'


# Errors


def test_wrong_arguments_are_refused_in_one_line(
    harp: Harp, run: Path, network: nn.Module, captured: Captured, linear: nn.Module, tmp_path: Path
) -> None:
    write_harp(tmp_path / "m.harp", captured, network)
    (tmp_path / "cut.harp").write_bytes((tmp_path / "m.harp").read_bytes()[:-9])
    format.write(tmp_path / "bare.harp", {"w": torch.ones(3)}, {}, {})
    narrow = models.build("tinynet", num_classes=5, shape=(1, 8, 8), width=4).eval()
    write_harp(tmp_path / "five.harp", capture(narrow, torch.rand(3, 1, 8, 8)), narrow)
    save_model(tmp_path / "five.safetensors", narrow)
    (tmp_path / "five.py").write_text(
        "from harp import models\nmake = lambda: models.build('tinynet', num_classes=5, shape=(1, 8, 8), width=4)\n"
    )
    (tmp_path / "folder.harp").mkdir()
    for words, said in (
        (["m.harp"], "no data set for m.harp"),
        (["gone.harp"], "can't read gone.harp: No such file"),
        (["folder.harp"], "it is a folder"),
        (["cut.harp"], "cut or damaged"),
        (["bare.harp"], "no graph"),
        (["m.harp", "--data", "fashion"], "m.harp takes images of 1x8x8, fashion has images of 1x28x28"),
        (["five.harp", "--data", "digits"], "five.harp knows 5 classes, digits has 10"),
        (["m.harp", "--data", "digits", "--twin", "gone.safetensors"], "there is no twin at gone.safetensors"),
        (["m.harp", "--data", "digits", "--twin", "gone"], "--twin gone: there is no model"),
        (["m.harp", "--data", "digits", "--twin", "runs"], "no recipe.yaml"),
        (["m.harp", "--data", "digits", "--twin", "tinynet"], "add --weights FILE"),
        (["m.harp", "--data", "digits", "--twin", "five.safetensors"], "which architecture five.safetensors is for"),
        (["m.harp", "--data", "digits", "--twin", "five.py:make", "--weights", "five.safetensors"], "gives 5 logits"),
        (["m.harp", "--data", "digits", "--weights", "five.safetensors"], "an artefact has its own"),
        (["m.harp", "--data", "digits", "--twin", str(run), "--weights", "five.safetensors"], "has its own weights"),
        (["m.harp", "--data", "digits", "--distances"], "--distances needs the gradients"),
        (["m.harp", "--data", "digits", "--attack", "pgd-x"], "pgd-x"),
        (["m.harp", "--data", "digits", "--norm", "l3"], "linf or l2"),
        (["m.harp", "--data", "digits", "--examples", "0"], "examples"),
        (["tinynet", "--data", "digits", "--twin", "x"], "a twin is for a .harp or .onnx file"),
    ):
        code, out, err = harp("evaluate", *words)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, (words, err)
        assert said in err, (words, err)
        assert not list(tmp_path.glob("*.evaluation")), words


def test_a_checkpoint_is_a_twin_if_the_architecture_is_known(
    run: Path, network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    save_model(tmp_path / "w.safetensors", network)
    stated = {"architecture": {"name": "tinynet", "options": {"width": 4}}, "normalisation": None}
    setup = prepared(write_harp(tmp_path / "m.harp", captured, network, **stated), twin=str(tmp_path / "w.safetensors"))
    assert setup.twin is not None and setup.twin.words == "w.safetensors" and setup.original is None
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(setup.twin.model.eval()(x), network(x))
    setup = prepared(write_harp(run / "export" / "m.harp", captured, network), twin=str(tmp_path / "w.safetensors"))
    assert setup.twin is not None and setup.original is not None and setup.original.words == f"the run {run.name}"


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_one_line_errors_or_other_networks(
    network: nn.Module, captured: Captured, linear: nn.Module, tmp_path: Path, draw: st.DataObject
) -> None:
    suffix = draw.draw(st.sampled_from(["harp", "onnx"]))
    whole = tmp_path / f"whole.{suffix}"
    if not whole.exists():
        write_harp(whole, captured, network) if suffix == "harp" else write_onnx(whole, linear)
    content = bytearray(whole.read_bytes())
    how = draw.draw(st.sampled_from(["cut", "flip", "noise"]))
    if how == "cut":
        content = content[: draw.draw(st.integers(0, len(content) - 1))]
    elif how == "flip":
        for _ in range(draw.draw(st.integers(1, 4))):
            content[draw.draw(st.integers(0, len(content) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        content = bytearray(draw.draw(st.binary(max_size=200)))
    path = tmp_path / f"hurt.{suffix}"
    path.write_bytes(bytes(content))
    try:
        artefact = opened(path)
    except HarpError as error:
        assert "\n" not in str(error)
    else:  # ONNX has no checksum: what can still be computed is another network
        assert artefact.sha256 != opened(whole).sha256 or bytes(content) == whole.read_bytes()


# Manifests and checks


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["manifest", "provenance", "data", "accuracy", "files", "architecture", "normalisation"]


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(KEYS), JSON))
@example({"accuracy": [{"name": "natural", "value": "x"}, {"name": "natural", "value": 0.5, "low": None}]})
@example({"accuracy": [{"epsilon": -1, "norm": []}], "files": [3, {"name": "m"}], "data": {"name": 3}})
@example({"architecture": {"name": "tinynet", "options": {"weights": []}}, "provenance": {"run": "../.."}})
def test_invalid_manifests_are_ignored_or_one_line_errors(manifest: dict[str, Any]) -> None:
    origin = Origin(manifest, run_of(Path("/nowhere"), manifest))
    assert origin.data is None or isinstance(origin.data, str)
    assert isinstance(origin.sha256_of("m"), str | None)
    assert origin.stated_threat.epsilon >= 0
    assert all(one.verdict for one in checks.stated({"value": 0.5, "low": 0.4, "high": 0.6, "data": "x"}, origin))
    try:
        origin.architecture("w")
    except HarpError as error:
        assert "\n" not in str(error)


def test_a_manifest_that_is_no_json_object_is_a_one_line_error(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    artefact = opened(write_harp(tmp_path / "m.harp", captured, network))
    for content in ("{", "[]", '"x"'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            origin_of(artefact)


def test_the_header_of_a_file_names_its_data_set_and_epsilon(
    harp: Harp, network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    manifest = {
        "manifest": {"accuracy": [{"name": "pgd-20", "value": 0.1, "data": "digits", "epsilon": 0.05, "norm": "linf"}]}
    }
    write_harp(tmp_path / "m.harp", captured, network, **manifest)
    code, out, err = harp("evaluate", "m.harp", "--examples", "20", "--attack", "square-5", "--json", "--no-checks")
    assert code == 0, err
    output = json.loads(out)
    assert output["data"] == "digits" and output["threat"]["epsilon"] == 0.05 and output["checks"] == []


def artefact_of(answer: Callable[[Tensor], Tensor]) -> Artefact:
    """An artefact that answers as a function does."""

    def ask(images: Any) -> Any:
        return answer(torch.from_numpy(images)).numpy()

    model = Queried("m.harp", ask, "00" * 32, (1, 8, 8))
    return Artefact(Path("m.harp"), "0" * 64, 1, model)


def test_logits_that_depend_on_more_than_the_image_are_a_bad_finding() -> None:
    def ten(x: Tensor) -> Tensor:
        return x.flatten(1)[:, :10]

    calls: Iterator[int] = iter(range(10_000))
    images = torch.rand(8, 1, 8, 8)
    assert checks.determinism(artefact_of(ten), images).verdict == "good"
    assert checks.determinism(artefact_of(lambda x: ten(x) + next(calls)), images).verdict == "bad"
    mixed = checks.determinism(artefact_of(lambda x: ten(x) - ten(x).mean()), images)
    assert mixed.verdict == "bad" and "beside it" in mixed.text
    with pytest.raises(ModelError, match="expected floats of shape"):
        artefact_of(lambda x: x.flatten())
    with pytest.raises(ModelError, match=r"m\.harp can't be computed: RuntimeError: boom"):
        artefact_of(lambda x: exec("raise RuntimeError('boom')"))


def test_replays_that_do_not_fool_the_artefact_are_a_bad_finding() -> None:
    def test(name: str, how: str, inside: str, outside: str) -> dict[str, Any]:
        both = {"torch": {"images": inside, "n": len(inside)}, "deployed": {"images": outside, "n": len(outside)}}
        return {"name": name, "how": how, **both}

    clean = test("natural", "images", "1" * 100, "1" * 100)
    held = test("pgd-20", "replayed", "1" * 50 + "0" * 50, "1" * 50 + "0" * 50)
    slipped = test("pgd-20", "replayed", "1" * 50 + "0" * 50, "1" * 60 + "0" * 40)
    assert [one.verdict for one in checks.replays(clean, [clean, held])] == ["good"]
    (finding,) = checks.replays(clean, [clean, slipped])
    assert (
        finding.verdict == "bad" and "of 50 images that the twin gets wrong the artefact gets 10 right" in finding.text
    )
    apart = test("natural", "images", "0" * 20 + "1" * 80, "1" * 100)
    assert "20 of 100 clean images are right in the artefact only" in checks.replays(apart, [apart, held])[-1].text
    square = {**test("square", "queries", "", "1" * 40 + "0" * 60), "torch": None}
    (queried,) = checks.queries([clean, held, square])
    assert queried.verdict == "look" and "fools 10 of 50 images" in queried.text


# The report


def test_the_report_shows_the_file_and_its_twin(
    harp: Harp, run: Path, network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    path = write_harp(run / "export" / "network.harp", captured, network)
    words = ["evaluate", str(path), "--attack", "pgd-2", "--attack", "square-9", "--json"]
    output = json.loads(harp(*words, "--examples", "40")[1])
    built = {page.suffix: page.read_text("utf-8") for page in html.build([run], tmp_path / "r.html")}
    natural = f"{100 * output['tests'][0]['deployed']['value']:.1f} %"
    for text in (built[".html"], built[".md"]):
        for word in ("As deployed", "in torch", "network.harp", natural, output["artefact"]["sha256"], "the graph in"):
            assert word in text.replace("\u00a0", " "), word
    (part,) = json.loads(built[".json"])["parts"]
    (section,) = [one for one in part["sections"] if one["title"] == "As deployed"]
    rows = section["tables"][0]["rows"]
    assert [row[2] for row in rows] == ["natural", "pgd-2, ε 0.1", "square-9, ε 0.1", "worst case, ε 0.1"]
    assert [row[3] for row in rows][2] == "–" and rows[0][3] == rows[0][4] == natural
    assert "a check of the deployed file failed" not in built[".md"]
    kept = [one for one in json.loads(built[".json"])["runs"][0]["evaluation"] if one["kind"] == "deployed"]
    assert len(kept) == 1 and kept[0]["artefact"]["sha256"] == output["artefact"]["sha256"]
    # A file that was put in its place, and is damaged.
    write_harp(path, captured, damaged(network, 1.0))
    harp(*words, "--examples", "30")
    (record,) = collect.read([run])[0].deployed
    assert record.artefact.sha256 == opened(path).sha256 and {test.deployed.n for test in record.tests} == {30}
    assert "a check of the deployed file failed" in html.build([run], tmp_path / "s.html")[2].read_text("utf-8")


def test_several_evaluations_of_a_file_are_merged(run: Path) -> None:
    def record(name: str, sha256: str, *tests: dict[str, Any]) -> None:
        content = {"kind": "deployed", "artefact": {"file": "a.harp", "sha256": sha256, "bytes": 9}, "n": 10}
        files.write_json(run / "export" / "a.harp.evaluation" / f"deployed-{name}.json", {**content, "tests": tests})

    def test(name: str, right: int, n: int, how: str) -> dict[str, Any]:
        return {"name": name, "how": how, "deployed": finished_run.score(name, right, n, 0.1)}

    record("1", "old", test("pgd-20", 1000, 1000, "replayed"))
    record("2", "new", test("pgd-20", 500, 1000, "replayed"), test("worst case", 300, 1000, "union"))
    record("3", "new", test("pgd-20", 90, 100, "replayed"), test("worst case", 400, 1000, "union"))
    (merged,) = collect.read([run])[0].deployed
    assert [(test.name, test.deployed.value) for test in merged.tests] == [("pgd-20", 0.5), ("worst case", 0.3)]
    files.write_json(run / "export" / "a.harp.evaluation" / "deployed-4.json", {"kind": "deployed", "n": 0})
    with pytest.raises(HarpError, match=r"deployed-4\.json") as error:
        collect.read([run])
    assert "\n" not in str(error.value)


def test_the_graph_of_a_file_has_the_rounded_weights_of_the_file(
    network: nn.Module, captured: Captured, tmp_path: Path
) -> None:
    """The twin has the weights of the file, rounded as there, and not those of the network that was exported."""
    path = write_harp(tmp_path / "m.harp", captured, network)
    header, tensors, _ = format.load(path)
    in_torch = opened(path).in_torch
    assert in_torch is not None
    x = torch.rand(9, 1, 8, 8)
    graph = Graph.from_dict(header["graph"])
    assert torch.equal(in_torch()(x), reference.run(graph, tensors, x))
    assert not np.array_equal(in_torch()(x).numpy(), network(x).detach().numpy())
