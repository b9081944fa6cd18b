"""The sparse engine: the same answers and gradients as torch, for any network, number of images and of threads."""

import gc
import statistics
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.engine.capture.capture import capture
from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph
from harp.engine.lowering import matrices
from harp.engine.native import bindings
from harp.engine.network import Network
from harp.errors import DataError, RecipeError
from support.engines import Writer, by_torch, close, conv, engine_of, images, networks

pytestmark = pytest.mark.skipif(bindings.kernels() is None, reason="this installation has no native code")
SIZES = (1, 2, 7, 8, 9, 13, 24)


def assert_as_torch(graph: Graph, tensors: dict[str, Any], count: int, threads: int = 1) -> None:
    """The engine's answers and gradients are torch's in double precision."""
    engine = Network(graph, tensors, threads=threads)
    x = images(graph, count)
    warm, trace = engine.forward(images(graph, count, seed=1), keep=True)  # what a call leaves must not reach the next
    engine.backward(trace, np.ones_like(warm))
    logits, trace = engine.forward(x, keep=True)
    gradient = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
    wanted, slope = by_torch(graph, tensors, x, gradient, torch.float64)
    assert logits.shape == wanted.shape
    assert close(logits, wanted)
    # Where an activation is at its kink, rounding decides on which side: torch in single precision is as free.
    single = by_torch(graph, tensors, x, gradient, torch.float32)[1].double()
    input_gradient = engine.backward(trace, gradient)
    rounding = float((single - slope).abs().max() / max(1e-3, float(slope.abs().max())))
    assert close(input_gradient, slope, max(1e-5, 2 * rounding)) or close(input_gradient, single)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from(SIZES), st.integers(1, 3))
def test_answers_and_gradients_are_those_of_torch(
    network: tuple[Graph, dict[str, Any]], count: int, threads: int
) -> None:
    assert_as_torch(*network, count, threads)


def same(w: Writer, x: str) -> str:
    """A convolution that leaves the shape as it is."""
    return conv(w, x, w.shape(x)[0], (3, 3), padding=[1, 1])


def leaky(w: Writer, x: str) -> str:
    """An activation that no mask applied twice or too early leaves right."""
    return w.add("leaky", (x,), {}, slope=0.3)


def outside(w: Writer, x: str) -> str:
    """A node that torch computes."""
    return w.add("torch", (x,), {}, op="aten.gelu.default", args=[{"node": x}], kwargs={}, pick=None)


def maxpool(w: Writer, x: str, kernel: tuple[int, int], padding: int = 0) -> str:
    window = {"kernel": list(kernel), "stride": [1, 1], "padding": [padding, padding], "dilation": [1, 1]}
    return w.add("maxpool", (x,), {}, **window, ceil=False)


def total(w: Writer, *names: str) -> str:
    first, *others = names
    for other in others:
        first = w.add("add", (first, other), {})
    return first


def read_before_it_is_activated(w: Writer) -> None:
    x = same(w, "input")
    total(w, same(w, x), leaky(w, x))


def read_after_it_is_activated(w: Writer) -> None:
    x = same(w, "input")
    total(w, leaky(w, x), same(w, x))


def read_outside_before_it_is_activated(w: Writer) -> None:
    x = same(w, "input")
    total(w, leaky(w, x), outside(w, x))


def read_under_another_name(w: Writer) -> None:
    x = conv(w, "input", 4, w.shape("input")[1:])
    flat = w.add("flatten", (x,), {})
    linear = w.add("linear", (flat,), {"weight": w.sparse(4, 4), "bias": w.dense(4)})
    total(w, linear, w.add("flatten", (leaky(w, x),), {}))


def activated_twice(w: Writer) -> None:
    w.add("clip", (leaky(w, same(w, "input")),), {}, low=-0.2, high=0.5, inclusive=True)


def added_after_the_activation(w: Writer) -> None:
    total(w, leaky(w, same(w, "input")), leaky(w, same(w, "input")))


def added_to_itself(w: Writer) -> None:
    x = same(w, "input")
    total(w, x, x)


def added_to_a_sum(w: Writer) -> None:
    leaky(w, total(w, same(w, "input"), "input", same(w, "input"), "input"))


def read_by_two_products(w: Writer) -> None:
    x = leaky(w, same(w, "input"))
    total(w, same(w, x), same(w, x))


def read_by_two_products_and_outside(w: Writer) -> None:
    x = leaky(w, same(w, "input"))
    total(w, same(w, x), same(w, x), outside(w, x))


def read_by_a_product_and_two_others(w: Writer) -> None:
    x = leaky(w, same(w, "input"))
    product = same(w, x)
    w.add("concat", (x, product, maxpool(w, x, (3, 3), padding=1)), {})


def read_by_a_sum(w: Writer) -> None:
    x = leaky(w, same(w, "input"))
    total(w, same(w, x), x)


SHAPES: list[Callable[[Writer], None]] = [
    read_before_it_is_activated,
    read_after_it_is_activated,
    read_outside_before_it_is_activated,
    read_under_another_name,
    activated_twice,
    added_after_the_activation,
    added_to_itself,
    added_to_a_sum,
    read_by_two_products,
    read_by_two_products_and_outside,
    read_by_a_product_and_two_others,
    read_by_a_sum,
]


@pytest.mark.parametrize("count", [1, 19])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_values_with_several_readers_are_those_of_torch(shape: Callable[[Writer], None], count: int) -> None:
    """What a product can take in itself, and when a gradient is whole, depends on who else reads a value."""
    w = Writer((3, 6, 5), 1.0, 0)
    shape(w)
    assert_as_torch(w.graph(), w.tensors, count)


@pytest.mark.parametrize("count", [1, 19])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("count_padding", [False, True])
@pytest.mark.parametrize("padding", [[0, 0], [1, 0], [0, 1], [1, 1]])
def test_averages_at_the_edge_are_those_of_torch(
    padding: list[int], count_padding: bool, ceil: bool, count: int
) -> None:
    """Windows of which a part is padding or beyond it: how many pixels they are divided by differs."""
    w = Writer((2, 6, 8), 1.0, 0)
    window = {"kernel": [3, 3], "stride": [2, 2], "padding": padding}
    w.add("avgpool", ("input",), {}, **window, ceil=ceil, count_padding=count_padding)
    assert_as_torch(w.graph(), w.tensors, count)


@pytest.mark.parametrize("count", [1, 19])
@pytest.mark.parametrize("kernel", [(15, 17), (16, 16), (17, 17)])
def test_the_last_pixel_of_a_large_window_can_be_the_largest(kernel: tuple[int, int], count: int) -> None:
    """Native code keeps its place in a byte, so that torch computes larger windows."""
    w = Writer((2, 17, 18), 1.0, 0)
    maxpool(w, "input", kernel)
    graph = w.graph()
    engine = Network(graph, {})
    x = np.sort(images(graph, count).reshape(count, 2, -1)).reshape(count, 2, 17, 18)
    logits, trace = engine.forward(x, keep=True)
    gradient = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
    wanted, slope = by_torch(graph, {}, x, gradient, torch.float64)
    assert close(logits, wanted) and close(engine.backward(trace, gradient), slope)
    assert engine.native_share == (kernel == (15, 17))


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
    for cache, enough in ((matrices.CACHE, matrices.ENOUGH), (1, 0)):
        with mock.patch.object(matrices, "CACHE", cache), mock.patch.object(matrices, "ENOUGH", enough):
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


def test_arrays_give_arrays_and_tensors_give_tensors() -> None:
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
def test_invalid_images_are_refused_in_one_line(garbage: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        engine_of(small_cnn())(garbage)
    assert "\n" not in str(error.value)


def test_the_number_of_threads_is_checked() -> None:
    with pytest.raises(RecipeError, match="threads 0"):
        engine_of(small_cnn(), threads=0)


def test_torch_computes_what_native_code_can_not() -> None:
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
def test_the_gradient_at_the_bounds_of_a_clip_equals_that_of_torch(held: nn.Module, count: int) -> None:
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
    for input_gradient in (torch.from_numpy(engine.backward(trace, np.ones_like(logits))), by_reference):
        assert torch.allclose(input_gradient, wanted, atol=1e-6)


def test_nonzero_weights_can_be_replaced() -> None:
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
    monkeypatch.setattr("harp.engine.runner.MOST", 1)
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
