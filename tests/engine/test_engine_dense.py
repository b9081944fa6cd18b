"""Layers that the engine computes densely: the same answers and gradients as torch, with every kernel."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from harp.engine.graph.nodes import Graph
from harp.engine.lowering import dense, program
from harp.engine.lowering.memory import Plane
from harp.engine.lowering.taps import Taps, Window, convolution, sparse
from harp.engine.native import bindings
from harp.engine.native.bindings import NARROW, WINOGRAD
from harp.engine.network import Network
from support.engines import Writer, by_torch, close, conv, engine_of, images, networks, ops

pytestmark = pytest.mark.skipif(bindings.kernels() is None, reason="this installation has no native code")
NEVER = float("inf")


@contextmanager
def forced(op: int, worth: float = 0) -> Iterator[None]:
    """One dense way is taken wherever it can be, and threads share even small groups of images."""
    others = {"direct_time", "panels_time" if op == WINOGRAD else "tiles_time"}
    with ExitStack() as stack:
        for name in others:
            stack.enter_context(mock.patch.object(dense, name, return_value=NEVER))
        stack.enter_context(mock.patch.object(program, "WORTH", worth))
        yield


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Graph, dict[str, np.ndarray[Any, Any]]]:
    """Two convolutions of at most 3x3 with an activation, and a sum around the second if it fits."""
    density = draw(st.sampled_from((0.05, 0.5, 1.0)))
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 13)), draw(st.integers(1, 13))
    w = Writer(shape, density, draw(st.integers(0, 2**32 - 1)))
    x = "input"
    for _ in range(2):
        kernel = [draw(st.sampled_from((1, 2, 3, 3, 3, 3))) for _ in range(2)]
        padding = [draw(st.integers(0, 2)) for _ in range(2)]
        size = w.shape(x)[1:]
        if min(n + 2 * p - k + 1 for n, p, k in zip(size, padding, kernel, strict=True)) < 1:
            padding, kernel = [0, 0], [1, 1]
        out = draw(st.integers(1, 20))
        y = conv(w, x, out, (kernel[0], kernel[1]), bias=draw(st.booleans()), padding=padding)
        if w.shape(y) == w.shape(x):
            y = w.add("add", (x, y), {})
        activation = draw(st.sampled_from(("relu", "leaky", "clip")))
        more = {"leaky": {"slope": 0.1}, "clip": {"low": -0.5, "high": 0.7, "inclusive": False}}.get(activation, {})
        x = w.add(activation, (y,), {}, **more)
    return w.graph(), w.tensors


@pytest.mark.parametrize("op", [WINOGRAD, NARROW])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(convolutions(), st.sampled_from((1, 5, 8, 17, 40)), st.integers(1, 3))
def test_answers_and_gradients_are_those_of_torch(
    op: int, network: tuple[Graph, Any], count: int, threads: int
) -> None:
    graph, tensors = network
    with forced(op):
        engine = Network(graph, tensors, threads=threads)
        x = images(graph, count)
        warm, trace = engine.forward(images(graph, count, seed=1), keep=True)
        engine.backward(trace, np.ones_like(warm))
        logits, trace = engine.forward(x, keep=True)
        gradient = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
        input_gradient = engine.backward(trace, gradient)
    wanted, slope = by_torch(graph, tensors, x, gradient, torch.float64)
    assert close(logits, wanted)
    single = by_torch(graph, tensors, x, gradient, torch.float32)[1].double()
    rounding = float((single - slope).abs().max() / max(1e-3, float(slope.abs().max())))
    assert close(input_gradient, slope, max(1e-5, 2 * rounding)) or close(input_gradient, single)


@pytest.mark.parametrize("op", [WINOGRAD, NARROW])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(convolutions())
def test_threads_do_not_change_a_bit_of_one_image_or_of_many(op: int, network: tuple[Graph, Any]) -> None:
    graph, tensors = network
    for count in (1, 43):
        x, results = images(graph, count), []
        with forced(op):
            for threads in (1, 2, 5):
                engine = Network(graph, tensors, threads=threads)
                logits, trace = engine.forward(x, keep=True)
                results.append((logits, engine.backward(trace, np.ones_like(logits))))
        for logits, slope in results[1:]:
            assert np.array_equal(logits, results[0][0])
            assert np.array_equal(slope, results[0][1])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_threads_that_share_an_image_do_not_change_a_bit(network: tuple[Graph, Any]) -> None:
    graph, tensors = network
    x, results = images(graph, 1), []
    with mock.patch.object(program, "WORTH", 0):
        for threads in (1, 2, 5):
            engine = Network(graph, tensors, threads=threads)
            logits, trace = engine.forward(x, keep=True)
            results.append((logits, engine.backward(trace, np.ones_like(logits))))
    for logits, slope in results[1:]:
        assert np.array_equal(logits, results[0][0])
        assert np.array_equal(slope, results[0][1])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(convolutions())
def test_panels_give_the_same_bits_as_sparse_products(network: tuple[Graph, Any]) -> None:
    graph, tensors = network
    x = images(graph, 2)
    with mock.patch.object(dense, "dense", return_value=None):  # tiles have an order of their own
        plain = Network(graph, tensors)(x)
    with forced(NARROW):
        assert np.array_equal(Network(graph, tensors)(x), plain)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(convolutions())
def test_tiles_give_the_same_bits_for_one_image_as_for_many(network: tuple[Graph, Any]) -> None:
    graph, tensors = network
    x = images(graph, 16)
    with forced(WINOGRAD):
        engine = Network(graph, tensors)
        assert np.array_equal(engine(x[3:4])[0], engine(x)[3])


def layer(channels: int, size: int, density: float) -> tuple[Taps, Plane, Plane]:
    random = np.random.default_rng(0)
    shape = channels, channels, 3, 3
    weight = (random.standard_normal(shape) * (random.random(shape) < density)).astype(np.float32)
    taps = convolution(sparse(weight), (channels, size, size), Window(padding=(1, 1)))
    several, single = (Plane(size, size, 1, size + 1, lanes, 8) for lanes in (8, 1))
    return taps, several, single


@pytest.mark.parametrize(
    ("channels", "size", "density", "several", "single"),
    [
        (64, 32, 1.0, dense.Tiles, dense.Tiles),
        (64, 32, 0.6, dense.Tiles, dense.Tiles),
        (64, 32, 0.15, type(None), type(None)),
        (256, 4, 1.0, dense.Tiles, dense.Panels),
        (256, 4, 0.05, type(None), type(None)),
        (256, 2, 0.6, dense.Tiles, dense.Panels),
        (4, 8, 1.0, type(None), type(None)),
    ],
)
def test_the_kernel_depends_on_density_and_size(
    channels: int, size: int, density: float, several: type, single: type
) -> None:
    taps, many, one = layer(channels, size, density)
    assert type(dense.dense(taps, many, many)) is several
    assert type(dense.dense(taps, one, one)) is single


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 40),
    ).eval()


def test_a_dense_network_is_computed_densely_and_its_weights_can_change() -> None:
    model = dense_model()
    engine = engine_of(model)
    x = torch.rand(17, 3, 16, 16)
    assert torch.allclose(engine(x), model(x), atol=1e-5)
    kernels = bindings.kernels()
    assert kernels is not None
    assert WINOGRAD in ops(engine, int(kernels.lanes))
    assert NARROW in ops(engine, 1)
    values = {}
    for product in engine.products():
        product_bias = None if product.bias is None else product.bias + 1
        values[product] = product.taps.values * 0.5, product_bias
    engine.refill(values)
    with torch.no_grad():
        fresh = engine_of(model)
        fresh.refill({other: values[one] for one, other in zip(engine.products(), fresh.products(), strict=True)})
    assert np.array_equal(engine(x.numpy()), fresh(x.numpy()))
    assert not torch.allclose(engine(x), model(x), atol=1e-2)
