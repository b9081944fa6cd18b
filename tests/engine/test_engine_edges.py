"""The engine at its limits: no memory of others is read or written, and errors say what is wrong."""

import copy
import ctypes
import pickle
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harp.engine.graph.nodes import Graph, Node
from harp.engine.lowering import program
from harp.engine.lowering.matrices import matrix_of
from harp.engine.lowering.memory import Plane
from harp.engine.lowering.steps import Steps
from harp.engine.lowering.taps import Window, convolution, sparse
from harp.engine.native import bindings
from harp.engine.network import Network
from harp.engine.runner import Runner
from harp.errors import DataError, RecipeError
from support.engines import Writer, conv, engine_of

pytestmark = pytest.mark.skipif(bindings.kernels() is None, reason="this installation has no native code")
LANES = [1, 16]


def pooling(channels: int, size: int, **window: Any) -> Graph:
    w = Writer((channels, size, size), 1.0, 0)
    w.add("maxpool", ("input",), {}, **{"ceil": False, "dilation": [1, 1], **window})
    return w.graph()


def built(network: Network, lanes: int) -> program.Builder:
    """The programs of the forward and the backward pass."""
    (runner,) = network.parts
    assert isinstance(runner, Runner)
    return runner.builder(lanes, "backward")


def rows(steps: Steps, op: int) -> set[int]:
    """The channels that the steps of one kind compute."""
    channels: set[int] = set()
    for step in steps.steps:
        if step.op == op:
            channels |= set(ctypes.cast(step.place, ctypes.POINTER(ctypes.c_int32))[: step.rows])
    return channels


@pytest.mark.parametrize("count", LANES)
def test_the_gradient_of_a_pooling_is_computed_for_read_channels_only(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Writer((3, 6, 6), 1.0, 0)
    pool = w.add("maxpool", ("input",), {}, kernel=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil=False)
    last = conv(w, pool, 2, (1, 1))
    w.tensors[f"{last}.weight"][:, 1] = 0
    network = Network(w.graph(), w.tensors)
    empty = np.empty

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        array.reshape(-1).view(np.uint8)[:] = 0xEE
        return array

    monkeypatch.setattr(np, "empty", poisoned)
    x = np.random.default_rng(0).random((count, 3, 6, 6), dtype=np.float32)
    logits, trace = network.forward(x, keep=True)
    input_gradient = network.backward(trace, np.ones_like(logits))
    monkeypatch.undo()
    points = torch.from_numpy(x).requires_grad_(True)
    weight, bias = (torch.from_numpy(w.tensors[f"{last}.{role}"]) for role in ("weight", "bias"))
    F.conv2d(F.max_pool2d(points, 2), weight, bias).sum().backward()
    assert points.grad is not None and torch.allclose(torch.from_numpy(input_gradient), points.grad, atol=1e-6)
    forward, backward = built(network, 1 if count == 1 else int(bindings.kernels().lanes)).steps  # type: ignore[union-attr]
    assert rows(backward, bindings.MAXPOOL_BACK) == rows(forward, bindings.MAXPOOL) == {0, 2}


@pytest.mark.parametrize("count", LANES)
def test_max_pooling_of_minus_infinities_chooses_the_first(count: int) -> None:
    network = Network(pooling(2, 5, kernel=[3, 3], stride=[2, 2], padding=[1, 1]), {})
    x = np.full((count, 2, 5, 5), -np.inf, np.float32)
    x[:, 1, 3, 3] = 1
    logits, trace = network.forward(x, keep=True)
    points = torch.from_numpy(x).requires_grad_(True)
    F.max_pool2d(points, 3, 2, 1).sum().backward()
    assert np.array_equal(network.backward(trace, np.ones_like(logits)), points.grad)


@pytest.mark.parametrize("count", LANES)
def test_max_pooling_of_padding_alone_gives_minus_infinity_and_no_gradient(count: int) -> None:
    network = Network(pooling(2, 2, kernel=[2, 2], stride=[1, 1], padding=[1, 1], dilation=[3, 3]), {})
    logits, trace = network.forward(np.ones((count, 2, 2, 2), np.float32), keep=True)
    assert np.isneginf(logits).all()
    assert not network.backward(trace, np.ones_like(logits)).any()


def test_offsets_that_are_too_far_in_either_direction_are_refused() -> None:
    taps = convolution(sparse(np.ones((1, 2, 1, 1), np.float32)), (2, 1, 1), Window())
    plane = Plane(1, 1, 0, 1, 1, 8)
    with mock.patch("harp.engine.lowering.matrices.FARTHEST", 3):
        with pytest.raises(OverflowError):
            matrix_of(taps, range(1), 1, plane, (12, 4, 3, 3))
        left = replace(taps, plane=np.zeros(2, np.int64), right=np.array([-9, 0]))
        with pytest.raises(OverflowError):
            matrix_of(left, range(1), 1, plane, (12, 4, 3, 3))


def test_forward_and_backward_programs_count_their_own_work() -> None:
    w = Writer((4, 8, 8), 1.0, 0)
    conv(w, "input", 4, (3, 3), padding=[1, 1])
    once = 4 * 4 * 9 * 64
    for worth, shared in ((once, 1), (1.5 * once, 0)):
        with mock.patch.object(program, "WORTH", worth):
            assert [code.worth for code in built(Network(w.graph(), w.tensors), 1).programs] == [shared, shared]


def small(threads: int = 1) -> Network:
    w = Writer((2, 4, 4), 1.0, 0)
    w.add("relu", (conv(w, "input", 3, (3, 3)),), {})
    return Network(w.graph(), w.tensors, threads=threads)


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 2, 4), (1, 2, 4, 5), (1, 32)])
def test_images_of_another_shape_do_not_reach_native_code(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"this network takes \(n, 2, 4, 4\)"):
        small().forward(np.zeros(shape, np.float32))


def test_backward_refuses_gradients_and_state_of_another_forward_pass() -> None:
    network, x = small(), np.zeros((5, 2, 4, 4), np.float32)
    logits, trace = network.forward(x, keep=True)
    for wrong in (logits[:4], logits[:, :2], np.zeros((6, *logits.shape[1:]), np.float32)):
        with pytest.raises(DataError, match="the logits are of shape"):
            network.backward(trace, wrong)
    with pytest.raises(DataError, match="keep=True"):
        network.backward(network.forward(x)[1], logits)
    longer = network.forward(np.concatenate([x] * 5), keep=True)[1]
    for kept in ({}, {0: []}, {0: [state[:1] for state in trace.kept[0]]}, longer.kept):
        with pytest.raises(DataError, match="not that of 5 images"):
            network.backward(replace(trace, kept=kept), logits)
    assert network.backward(trace, logits).shape == x.shape


def test_rows_are_checked_before_their_address_is_taken() -> None:
    (runner,) = small().parts
    assert isinstance(runner, Runner)
    for rows_ in (np.zeros((2, 31), np.float32), np.zeros((2, 32)), np.zeros((32, 2), np.float32).T):
        with pytest.raises(DataError, match="rows of 32 float32 are needed"):
            runner.forward(rows_, keep=False)
    with pytest.raises(DataError, match="rows of 12 float32 are needed"):
        runner.backward(np.zeros((2, 11), np.float32), [])
    with pytest.raises(DataError, match="2 gradients for 3 images"):
        runner.learn(np.zeros((2, 12), np.float32), np.zeros((3, 32), np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_all_float_types_of_torch_are_accepted(dtype: torch.dtype) -> None:
    x = torch.rand(3, 2, 4, 4).to(dtype)
    assert torch.equal(small()(x), small()(x.float()))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_network_can_be_copied_and_pickled(again: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()).eval()
    network, x = engine_of(model, (2, 8, 8), threads=2), torch.rand(9, 2, 8, 8)
    wanted = network(x)
    values = {
        product: (product.taps.values * 2, product.bias) for product in network.products() if product.weight is not None
    }
    network.refill(values)
    twin = again(network)
    assert (twin.isa, twin.threads, twin.graph) == (network.isa, 2, network.graph)
    assert torch.equal(twin(x), network(x)) and not torch.equal(twin(x), wanted), "with the weights of the moment"
    logits, trace = twin.forward(x.numpy(), keep=True)
    again_logits, again_trace = network.forward(x.numpy(), keep=True)
    assert np.array_equal(twin.backward(trace, logits), network.backward(again_trace, again_logits))
    twin.refill(
        {product: (product.taps.values * 2, product.bias) for product in twin.products() if product.weight is not None}
    )
    assert not torch.equal(twin(x), network(x))


def test_a_copy_needs_native_code_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(small())
    monkeypatch.setattr(bindings, "kernels", lambda: None)
    with pytest.raises(RecipeError, match="copied to where there is none"):
        pickle.loads(sent)


def test_a_graph_without_operations_returns_its_input() -> None:
    graph = Graph((Node("input", "input", (), (2,)), Node("flat", "flatten", ("input",), (2,))), "flat")
    assert Network(graph, {})(np.ones((3, 2), np.float32)).tolist() == [[1, 1]] * 3
