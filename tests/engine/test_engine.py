"""The sparse engine: the same answers and gradients as torch, for any network, number of images and of threads."""

import gc
import statistics
import threading
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import DataError, RecipeError
from harp.sparse import matrices, native, reference
from harp.sparse.capture import capture
from harp.sparse.graph import Graph, Node
from harp.sparse.network import Network

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="this installation has no native code")
SIZES = (1, 2, 7, 8, 9, 13, 24)


class Writer:
    """Writes a graph node by node, with random tensors."""

    def __init__(self, shape: tuple[int, ...], density: float, seed: int) -> None:
        self.nodes = [Node("input", "input", (), shape)]
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.density, self.random = density, np.random.default_rng(seed)

    def shape(self, name: str) -> tuple[int, ...]:
        return next(node.shape for node in self.nodes if node.name == name)

    def add(self, op: str, inputs: tuple[str, ...], tensors: dict[str, np.ndarray[Any, Any]], **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        names = {role: f"{name}.{role}" for role in tensors}
        self.tensors |= {names[role]: tensor for role, tensor in tensors.items()}
        node = Node(name, op, inputs, (), names, attributes)
        shells = [torch.zeros(2, *self.shape(each)) for each in inputs]
        given_tensors = {names[role]: torch.from_numpy(tensor) for role, tensor in tensors.items()}
        shape = tuple(reference.step(node, shells, given_tensors, torch.zeros(2)).shape[1:])
        self.nodes.append(Node(name, op, inputs, shape, names, attributes))
        return name

    def sparse(self, *shape: int) -> np.ndarray[Any, Any]:
        weight = self.random.standard_normal(shape) / max(1.0, np.sqrt(np.prod(shape[1:]) * self.density))
        return (weight * (self.random.random(shape) < self.density)).astype(np.float32)

    def dense(self, *shape: int) -> np.ndarray[Any, Any]:
        return self.random.standard_normal(shape).astype(np.float32)

    def graph(self) -> Graph:
        return Graph.from_dict(Graph(tuple(self.nodes), self.nodes[-1].name).as_dict())


def conv(
    w: Writer, x: str, out: int, kernel: tuple[int, int], *, groups: int = 1, bias: bool = True, **how: Any
) -> str:
    channels = w.shape(x)[0]
    tensors = {"weight": w.sparse(out, channels // groups, *kernel)}
    if bias:
        tensors["bias"] = w.dense(out)
    attributes = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], **how}
    return w.add("conv", (x,), tensors, **attributes, groups=groups)


@st.composite
def networks(draw: st.DrawFn) -> tuple[Graph, dict[str, np.ndarray[Any, Any]]]:
    density = draw(st.sampled_from((0.0, 0.02, 0.1, 0.4, 0.8, 1.0)))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 11)), draw(st.integers(1, 11))
    w = Writer(shape, density, draw(st.integers(0, 2**32 - 1)))
    names = ["input"]
    pair = st.tuples(st.integers(0, 2), st.integers(0, 2))
    for _ in range(draw(st.integers(1, 7))):
        x = draw(st.sampled_from(names))
        channels, *plane = w.shape(x) if len(w.shape(x)) == 3 else (*w.shape(x), 0, 0)
        spatial = plane != [0, 0]
        choices = ["relu", "leaky", "clip", "affine", "concat", "add"]
        choices += (
            ["conv", "conv", "conv", "depthwise", "maxpool", "avgpool", "mean", "flatten"] if spatial else ["linear"]
        )
        op = draw(st.sampled_from(choices))
        if op in ("conv", "depthwise"):
            kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
            dilation, padding = draw(st.tuples(st.integers(1, 2), st.integers(1, 2))), draw(pair)
            room = [n + 2 * p - d * (k - 1) for n, p, d, k in zip(plane, padding, dilation, kernel, strict=True)]
            if min(room) < 1:
                continue
            groups = channels if op == "depthwise" else draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
            out = groups * draw(st.integers(1, 6))
            stride = list(draw(st.tuples(st.integers(1, 3), st.integers(1, 3))))
            how = {"stride": stride, "padding": list(padding), "dilation": list(dilation)}
            names.append(conv(w, x, out, kernel, groups=groups, bias=draw(st.booleans()), **how))
        elif op == "linear":
            outputs = draw(st.integers(1, 9))
            names.append(w.add("linear", (x,), {"weight": w.sparse(outputs, channels), "bias": w.dense(outputs)}))
        elif op in ("maxpool", "avgpool"):
            kernel = [draw(st.integers(1, min(3, n))) for n in plane]
            padding = [draw(st.integers(0, k // 2)) for k in kernel]
            stride = [draw(st.integers(1, 3)) for _ in kernel]
            more: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "ceil": draw(st.booleans())}
            more |= {"dilation": [1, 1]} if op == "maxpool" else {"count_padding": draw(st.booleans())}
            names.append(w.add(op, (x,), {}, **more))
        elif op == "affine":
            names.append(w.add(op, (x,), {"scale": w.dense(channels), "shift": w.dense(channels)}))
        elif op in ("add", "concat"):
            same = [n for n in names if w.shape(n) == w.shape(x)]
            names.append(w.add(op, (x, draw(st.sampled_from(same))), {}))
        else:
            clip = {"low": -0.5, "high": 0.7, "inclusive": draw(st.booleans())}
            more = {"leaky": {"slope": 0.1}, "clip": clip, "mean": {"keep": draw(st.booleans())}}
            names.append(w.add(op, (x,), {}, **more.get(op, {})))
    return w.graph(), w.tensors


def images(graph: Graph, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random((count, *graph.input_shape), dtype=np.float32)


def torch_way(
    graph: Graph, tensors: dict[str, Any], x: Any, gradient: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the images, by torch."""
    points = torch.from_numpy(x).to(dtype).requires_grad_(True)
    full = {name: torch.from_numpy(np.asarray(tensor)).to(dtype) for name, tensor in tensors.items()}
    result = reference.run(graph, full, points)
    if not result.requires_grad:
        return result, torch.zeros_like(points)
    (found,) = torch.autograd.grad(result, points, torch.from_numpy(gradient).to(dtype), allow_unused=True)
    return result.detach(), torch.zeros_like(points) if found is None else found


def close(found: Any, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((torch.from_numpy(found).double() - wanted).abs().max() <= tolerance * max(1e-3, wanted.abs().max()))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from(SIZES), st.integers(1, 3))
def test_answers_and_gradients_are_those_of_torch(
    network: tuple[Graph, dict[str, Any]], count: int, threads: int
) -> None:
    graph, tensors = network
    engine = Network(graph, tensors, threads=threads)
    x = images(graph, count)
    warm, trace = engine.forward(images(graph, count, seed=1), keep=True)  # what a call leaves must not reach the next
    engine.backward(trace, np.ones_like(warm))
    logits, trace = engine.forward(x, keep=True)
    gradient = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
    wanted, slope = torch_way(graph, tensors, x, gradient, torch.float64)
    assert logits.shape == wanted.shape
    assert close(logits, wanted)
    # Where an activation is at its kink, rounding decides on which side: torch in single precision is as free.
    single = torch_way(graph, tensors, x, gradient, torch.float32)[1].double()
    found = engine.backward(trace, gradient)
    rounding = float((single - slope).abs().max() / max(1e-3, float(slope.abs().max())))
    assert close(found, slope, max(1e-5, 2 * rounding)) or close(found, single)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_neither_threads_nor_the_number_of_images_change_a_bit(network: tuple[Graph, dict[str, Any]]) -> None:
    graph, tensors = network
    x = images(graph, 21)
    alone = Network(graph, tensors)
    logits, trace = alone.forward(x, keep=True)
    back = alone.backward(trace, np.ones_like(logits))
    for threads in (2, 5):
        engine = Network(graph, tensors, threads=threads)
        again, trace = engine.forward(x, keep=True)
        assert np.array_equal(again, logits)
        assert np.array_equal(engine.backward(trace, np.ones_like(logits)), back)
    if not any(node.op in ("avgpool",) for node in graph.nodes):  # torch computes some of those, in its own order
        assert all(np.array_equal(alone(x[i : i + 1])[0], logits[i]) for i in (0, 20))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_parts_of_the_planes_do_not_change_a_bit(network: tuple[Graph, dict[str, Any]]) -> None:
    graph, tensors = network
    x = images(graph, 11)
    answers = []
    for cache, enough in ((matrices._CACHE, matrices._ENOUGH), (1, 0)):
        with mock.patch.object(matrices, "_CACHE", cache), mock.patch.object(matrices, "_ENOUGH", enough):
            engine = Network(graph, tensors)
            logits, trace = engine.forward(x, keep=True)
            answers.append((logits, engine.backward(trace, np.ones_like(logits))))
    assert all(np.array_equal(one, other) for one, other in zip(*answers, strict=True))


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()


def engine_of(model: nn.Module, shape: tuple[int, ...] = (3, 16, 16), **options: Any) -> Network:
    captured = capture(model, torch.rand(2, *shape))
    return Network(captured.graph, {k: v.numpy() for k, v in captured.tensors(model).items()}, **options)


def test_takes_arrays_and_tensors_and_gives_the_same_kind() -> None:
    model = small_cnn()
    engine = engine_of(model)
    x = torch.rand(5, 3, 16, 16)
    assert torch.allclose(engine(x), model(x), atol=1e-6)
    answer = engine(x.numpy())
    assert isinstance(answer, np.ndarray) and np.array_equal(answer, engine(x).numpy())
    assert engine(x[:0]).shape == (0, 10)
    assert engine(np.asfortranarray(x.numpy())).tolist() == answer.tolist()
    assert engine(x.double()).dtype == torch.float32
    assert engine.native_share == 1.0


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (np.zeros((3, 16, 16), np.float32), "takes"),
        (np.zeros((1, 3, 16, 15), np.float32), "takes"),
        (np.zeros((1, 3, 16, 16), np.uint8), "uint8"),
        (np.full((1, 3, 16, 16), np.nan, np.float32), "NaN"),
        ([[1.0]], "list"),
    ],
)
def test_garbage_is_refused_in_one_line(garbage: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        engine_of(small_cnn())(garbage)
    assert "\n" not in str(error.value)


def test_the_number_of_threads_is_checked() -> None:
    with pytest.raises(RecipeError, match="threads 0"):
        engine_of(small_cnn(), threads=0)


def test_what_native_code_does_not_know_is_left_to_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Softplus(), nn.Flatten(), nn.Linear(1152, 4)
    )
    engine = engine_of(model.eval())
    assert 0 < engine.native_share < 1
    x = torch.rand(11, 3, 16, 16)
    assert torch.allclose(engine(x), model(x), atol=1e-5)
    logits, trace = engine.forward(x.numpy(), keep=True)
    points = x.clone().requires_grad_(True)
    (wanted,) = torch.autograd.grad(model(points).sum(), points)
    assert torch.allclose(torch.from_numpy(engine.backward(trace, np.ones_like(logits))), wanted, atol=1e-5)


class Clamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1)


@pytest.mark.parametrize("held", [Clamp(), nn.Hardtanh(0, 1), nn.ReLU6(), nn.ReLU(), nn.LeakyReLU(0.1)])
@pytest.mark.parametrize("count", [1, 16])
def test_the_gradient_at_the_bounds_is_torchs(held: nn.Module, count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(held, nn.Conv2d(1, 2, 3), nn.Flatten()).eval()
    captured = capture(model, torch.rand(2, 1, 6, 6))
    tensors = captured.tensors(model)
    engine = Network(captured.graph, {name: tensor.numpy() for name, tensor in tensors.items()})
    assert engine.native_share == 1.0
    choices = torch.tensor([-1.0, 0.0, 0.5, 1.0, 6.0, 7.0])
    x = choices[torch.randint(len(choices), (count, 1, 6, 6))].requires_grad_(True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    logits, trace = engine.forward(x.detach().numpy(), keep=True)
    (by_reference,) = torch.autograd.grad(reference.run(captured.graph, tensors, x).sum(), x)
    for found in (torch.from_numpy(engine.backward(trace, np.ones_like(logits))), by_reference):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_weights_can_change_where_they_count() -> None:
    model = small_cnn()
    captured = capture(model, torch.rand(2, 3, 16, 16))
    engine = Network(captured.graph, {k: v.numpy() for k, v in captured.tensors(model).items()})
    x = torch.rand(9, 3, 16, 16)
    engine(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    fresh = captured.tensors(model)
    values = {}
    for product in engine.products():
        if product.weight is not None:
            bias = fresh[product.bias_name].numpy() if product.bias_name else None
            values[product] = fresh[product.weight].numpy().reshape(-1)[product.taps.index], bias
    engine.refill(values)
    assert torch.allclose(engine(x), model(x), atol=1e-5)


def test_several_threads_may_call_one_network() -> None:
    engine = engine_of(small_cnn())
    x = np.random.default_rng(0).random((16, 3, 16, 16), dtype=np.float32)
    wanted = engine(x)
    wrong: list[int] = []

    def ask() -> None:
        wrong.extend(1 for _ in range(20) if not np.array_equal(engine(x), wanted))

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("size", [7, 8, 9, 28])
def test_a_second_call_is_as_good_as_the_first(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten()).eval()
    engine = engine_of(model, (1, size, size))
    x = torch.rand(19, 1, size, size)
    first, trace = engine.forward(x.numpy(), keep=True)
    slope = engine.backward(trace, first)
    for _ in range(3):
        again, trace = engine.forward(x.numpy(), keep=True)
        assert np.array_equal(again, first)
        assert np.array_equal(engine.backward(trace, again), slope)
    assert torch.allclose(torch.from_numpy(first), model(x).detach(), atol=1e-5)


def test_large_images_are_computed_one_by_one_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(9, 3, 16, 16)
    wanted = engine_of(small_cnn())(x)
    monkeypatch.setattr("harp.sparse.runner._MOST", 1)
    engine = engine_of(small_cnn(), threads=2)
    assert torch.equal(engine(x), wanted)
    logits, trace = engine.forward(x.numpy(), keep=True)
    assert engine.backward(trace, logits).shape == x.shape


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_ten_thousand_calls_leave_no_memory_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    ).eval()
    engine = engine_of(model, (1, 6, 6), threads=2)
    x = np.random.default_rng(0).random((17, 1, 6, 6), dtype=np.float32)

    def many(count: int) -> None:
        for _ in range(count):
            logits, trace = engine.forward(x, keep=True)
            engine.backward(trace, logits)

    many(2000)
    pages = []
    for _ in range(6):
        gc.collect()
        pages.append(resident())
        many(2000)
    # The median: what others in this process take or give back at once is no matter.
    assert statistics.median(later - earlier for earlier, later in pairwise(pages)) < 40, pages  # of 4 KiB
