"""Memory and time of a network are estimated before anything is allocated, so that a small file can't demand much."""

import math
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import harp
from harp.engine import footprint, format
from harp.engine.capture.capture import capture
from harp.engine.format.reader import BadFile, Stored
from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph
from harp.engine.lowering import lower
from harp.engine.native import bindings
from harp.engine.network import Network
from harp.engine.runner import Runner
from harp.errors import CheckpointError

engine = pytest.mark.skipif(bindings.kernels() is None, reason="this installation has no native code")


class Branches(nn.Module):
    """Strides, sums, concatenations and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(3, 6, 1, 2)
        self.c, self.d = nn.Conv2d(6, 6, 3, padding=2, dilation=2), nn.Conv2d(18, 5, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x).relu(), self.b(x)
        y = self.c(y).relu() + y
        y = torch.cat([y, z, nn.functional.max_pool2d(y, 3, 1, 1)], 1)
        return nn.functional.avg_pool2d(self.d(y), 2).flatten(1)


@engine
def test_the_estimate_covers_the_arena() -> None:
    kernels = bindings.kernels()
    assert kernels is not None
    model = Branches().eval()
    captured = capture(model, torch.rand(2, 3, 20, 20))
    tensors = {name: tensor.numpy() for name, tensor in captured.tensors(model).items()}
    (part,) = Network(captured.graph, tensors).parts
    assert isinstance(part, Runner)
    for lanes in (1, int(kernels.lanes)):
        arena = 4 * part.builder(lanes, "forward").arena.size
        assert arena < footprint.program_bytes(part, lanes) < arena + (1 << 18)


@contextmanager
def within(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def conv(shape: list[int], size: list[int], kernel: int, **attributes: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """One convolution with two kept weights, in opposite corners."""
    weight = torch.zeros(1, 1, kernel, kernel)
    weight[0, 0, 0, 0] = weight[0, 0, -1, -1] = 1
    layer = {"op": "conv", "name": "a", "shape": size, "tensors": {"weight": "a"}, "attributes": attributes}
    return [{"op": "input", "shape": shape}, layer], {"a": weight}


def pool(shape: list[int], kernel: int, stride: int, padding: int) -> tuple[list[Any], dict[str, Tensor]]:
    window = {"kernel": [kernel] * 2, "stride": [stride] * 2, "padding": [padding] * 2}
    return [{"op": "input", "shape": shape}, {"op": "avgpool", "attributes": window}], {}


HUGE = {
    "mean": ([{"op": "input", "shape": [1, 1 << 14, 1 << 14]}, {"op": "mean"}], {}),
    "pool": pool([1, 5000, 5000], 5000, 1, 2500),
    "stride of a pool": pool([1, 1, 1], 1 << 19, 1 << 19, 1 << 18),
    "dilation": conv([1, 4, 4], [1, 4, 4], 3, dilation=[1 << 16] * 2, padding=[1 << 16] * 2),
    "padding": conv([1, 1, 1], [1, 40_001 - 99, 40_001 - 99], 100, padding=[20_000] * 2),
    "stride": conv([1, 9000, 9000], [1, 2, 2], 2, stride=[8998] * 2),
    "activations": ([{"op": "input", "shape": [1 << 20]}, *[{"op": "relu"}] * 99], {}),
    "images": (
        [{"op": "input", "shape": [1, 1 << 13, 1 << 13]}, *[{"op": "concat", "inputs": ["input0"] * 4}] * 9],
        {},
    ),
}


@engine
@pytest.mark.parametrize("kind", HUGE)
def test_small_files_that_need_much_memory_are_refused_before_it_is_allocated(kind: str, tmp_path: Path) -> None:
    nodes, tensors = HUGE[kind]
    masks = {name: tensor != 0 for name, tensor in tensors.items()}
    format.write(tmp_path / "a.harp", tensors, masks, {"graph": {"nodes": nodes}})
    assert (tmp_path / "a.harp").stat().st_size < 1000
    with within(1 << 22), pytest.raises(CheckpointError, match=r"computing an image|too large") as refused:
        harp.load(tmp_path / "a.harp", limit=1 << 30)
    assert "\n" not in str(refused.value)


@engine
def test_a_huge_stored_kernel_is_refused_before_memory_is_allocated() -> None:
    graph = Graph.from_dict({"nodes": conv([1, 1, 1], [1, 1, 1], 1)[0]})
    weight = Stored((1, 1, 1 << 20, 1 << 20), np.array([0, (1 << 40) - 1]), np.ones(2, np.float32))
    with within(1 << 20), pytest.raises(BadFile):
        footprint.check(Network(graph, {"a": weight}), 1 << 40)


def test_without_native_code_pruned_weights_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "kernels", lambda: None)
    nodes, tensors = conv([1, 1000, 1000], [1, 1, 1], 1000)
    format.write(tmp_path / "a.harp", tensors, {"a": tensors["a"] != 0}, {"graph": {"nodes": nodes}})
    with within(1 << 20), pytest.raises(CheckpointError, match="the tensors take 4000000 bytes"):
        harp.load(tmp_path / "a.harp", limit=1 << 21)


@engine
def test_averages_of_huge_windows_read_only_the_image(tmp_path: Path) -> None:
    """The largest windows have four hundred million pixels, and all but two of them are outside."""
    x = torch.rand(3, 2, 2, 1)
    for kernel, stride, padding in ((5, 1, 2), (9, 2, 4), (6, 6, 3), (20_000, 1, 10_000), (10_001, 9999, 5000)):
        nodes, _ = pool([2, 2, 1], kernel, stride, padding)
        format.write(tmp_path / "a.harp", {}, {}, {"graph": {"nodes": nodes}})
        with within(1 << 22):
            result = harp.load(tmp_path / "a.harp", limit=1 << 30)(x)
        wanted = nn.functional.avg_pool2d(x.double(), kernel, stride, padding)
        assert torch.allclose(result.double(), wanted, rtol=1e-5, atol=0)


@engine
def test_copying_many_channels_takes_little_memory() -> None:
    nodes = [{"op": "input", "shape": [20_000]}, {"op": "relu"}, {"op": "concat", "inputs": ["input0", "relu1"]}]
    network = Network(Graph.from_dict({"nodes": nodes}), {})
    x = np.linspace(-1, 1, 20_000, dtype=np.float32)[None]
    with within(1 << 26):
        result = network(x)
    assert np.array_equal(result, np.concatenate([x, x.clip(0)], 1))


def resnet152(size: int) -> tuple[Graph, dict[str, Stored]]:
    """Its shapes, with two weights a layer."""
    nodes: list[dict[str, Any]] = [{"op": "input", "name": "x", "shape": [3, size, size]}]
    tensors: dict[str, Stored] = {}

    def layer(source: str, inputs: int, outputs: int, side: int, kernel: int, stride: int = 1) -> str:
        name = f"conv{len(nodes)}"
        how = {"stride": [stride] * 2, "padding": [kernel // 2] * 2}
        shape = {"shape": [outputs, side, side], "tensors": {"weight": name}}
        nodes.append({"op": "conv", "name": name, "inputs": [source], **shape, "attributes": how})
        weight = (outputs, inputs, kernel, kernel)
        tensors[name] = Stored(weight, np.array([0, math.prod(weight) - 1]), np.ones(2, np.float32))
        return name

    def then(op: str, *inputs: str, **attributes: Any) -> str:
        nodes.append({"op": op, "name": f"{op}{len(nodes)}", "inputs": list(inputs), "attributes": attributes})
        return str(nodes[-1]["name"])

    x = then("relu", layer("x", 3, 64, size // 2, 7, 2))
    x = then("maxpool", x, kernel=[3, 3], stride=[2, 2], padding=[1, 1])
    side, given = size // 4, 64
    for stage, blocks in enumerate((3, 8, 36, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            y = then("relu", layer(x, given, width, side, 1))
            side //= stride
            y = then("relu", layer(y, width, width, side, 3, stride))
            y = layer(y, width, 4 * width, side, 1)
            x = then("relu", then("add", y, layer(x, given, 4 * width, side, 1, stride) if block == 0 else x))
            given = 4 * width
    then("mean", x)
    return Graph.from_dict({"nodes": nodes}), tensors


@engine
def test_the_estimate_of_a_deep_network_counts_results_held_at_a_time() -> None:
    graph, tensors = resnet152(224)
    assert 64 * sum(math.prod(node.shape) for node in graph.nodes) > 1 << 31
    footprint.check(Network(graph, tensors), 1 << 30)
    with pytest.raises(BadFile, match="computing an image may take"):
        footprint.check(Network(graph, tensors), 1 << 20)


@pytest.mark.parametrize("kernels", [bindings.kernels(), None])
def test_too_many_multiplications_are_refused(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "kernels", lambda: kernels)
    graph = Graph.from_dict({"nodes": conv([1, 9, 9], [1, 7, 7], 3)[0]})
    network = Network(graph, {"a": np.ones((1, 1, 3, 3), np.float32)})
    footprint.check(network, 1 << 40)
    monkeypatch.setattr(footprint, "MOST_WORK", 49 * 9 - 1)
    with pytest.raises(BadFile, match="441 multiplications"):
        footprint.check(network, 1 << 40)


@pytest.mark.parametrize("op", ["relu", "add", "flatten"])
def test_many_nodes_are_lowered_in_one_pass(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, looks = 500, 0
    inputs = [["input0", "input0"], *([f"add{i}", f"add{max(1, i - 1)}"] for i in range(1, count))]
    nodes = [{"op": op, "inputs": inputs[i]} if op == "add" else {"op": op} for i in range(count)]
    graph = Graph.from_dict({"nodes": [{"op": "input", "shape": [4]}, *nodes]})
    plain = lower.read

    def counted(operation: Any) -> Any:
        nonlocal looks
        looks += 1
        return plain(operation)

    monkeypatch.setattr(lower, "read", counted)
    lower.stages(graph, {})
    assert looks <= 3 * count


def test_results_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"op": "torch", "shape": [3]}
    nodes = [{"op": "input", "shape": [3], "name": "t0"}]
    for i in range(20):
        arguments = {"op": "aten.exp.default", "args": [{"node": f"t{i}"}]}
        nodes.append({**call, "name": f"t{i + 1}", "attributes": arguments})
    alive: list[weakref.ref[Tensor]] = []
    plain = reference.compute

    def watched(*arguments: Any) -> Tensor:
        assert sum(result() is not None for result in alive) <= 2
        result = plain(*arguments)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(reference, "compute", watched)
    network = Network(Graph.from_dict({"nodes": nodes}), {})
    assert network(np.zeros((2, 3), np.float32)).shape == (2, 3)
    assert len(alive) == 20
