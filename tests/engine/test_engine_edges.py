"""The engine where memory could be read or written that is not its own, and what it says then."""

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


def codes(network: Network, lanes: int) -> tuple[program.Code, program.Code]:
    """The programs of both directions."""
    (runner,) = network.parts
    assert isinstance(runner, Runner)
    ahead, behind = runner.builder(lanes, "backward").codes
    return ahead, behind


def rows(code: program.Code, op: int) -> set[int]:
    """The channels that the steps of one kind compute."""
    found: set[int] = set()
    for step in code.steps:
        if step.op == op:
            found |= set(ctypes.cast(step.place, ctypes.POINTER(ctypes.c_int32))[: step.rows])
    return found


@pytest.mark.parametrize("count", LANES)
def test_a_pooling_goes_back_to_the_channels_that_are_read(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = Writer((3, 6, 6), 1.0, 0)
    pool = w.add("maxpool", ("input",), {}, kernel=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil=False)
    last = conv(w, pool, 2, (1, 1))
    w.tensors[f"{last}.weight"][:, 1] = 0
    network = Network(w.graph(), w.tensors)
    empty = np.empty

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        made.reshape(-1).view(np.uint8)[:] = 0xEE
        return made

    monkeypatch.setattr(np, "empty", poisoned)
    x = np.random.default_rng(0).random((count, 3, 6, 6), dtype=np.float32)
    logits, trace = network.forward(x, keep=True)
    found = network.backward(trace, np.ones_like(logits))
    monkeypatch.undo()
    points = torch.from_numpy(x).requires_grad_(True)
    weight, bias = (torch.from_numpy(w.tensors[f"{last}.{role}"]) for role in ("weight", "bias"))
    F.conv2d(F.max_pool2d(points, 2), weight, bias).sum().backward()
    assert points.grad is not None and torch.allclose(torch.from_numpy(found), points.grad, atol=1e-6)
    ahead, behind = codes(network, 1 if count == 1 else int(bindings.kernels().lanes))  # type: ignore[union-attr]
    assert rows(behind, bindings.MAXPOOL_BACK) == rows(ahead, bindings.MAXPOOL) == {0, 2}


@pytest.mark.parametrize("count", LANES)
def test_of_numbers_that_are_all_minus_infinity_the_first_is_the_largest(count: int) -> None:
    network = Network(pooling(2, 5, kernel=[3, 3], stride=[2, 2], padding=[1, 1]), {})
    x = np.full((count, 2, 5, 5), -np.inf, np.float32)
    x[:, 1, 3, 3] = 1
    logits, trace = network.forward(x, keep=True)
    points = torch.from_numpy(x).requires_grad_(True)
    F.max_pool2d(points, 3, 2, 1).sum().backward()
    assert np.array_equal(network.backward(trace, np.ones_like(logits)), points.grad)


@pytest.mark.parametrize("count", LANES)
def test_a_window_of_padding_alone_has_no_largest_number(count: int) -> None:
    network = Network(pooling(2, 2, kernel=[2, 2], stride=[1, 1], padding=[1, 1], dilation=[3, 3]), {})
    logits, trace = network.forward(np.ones((count, 2, 2, 2), np.float32), keep=True)
    assert np.isneginf(logits).all()
    assert not network.backward(trace, np.ones_like(logits)).any()


def test_a_layer_is_too_large_in_either_direction() -> None:
    taps = convolution(sparse(np.ones((1, 2, 1, 1), np.float32)), (2, 1, 1), Window())
    plane = Plane(1, 1, 0, 1, 1, 8)
    with mock.patch("harp.engine.lowering.matrices.FARTHEST", 3):
        with pytest.raises(OverflowError):
            matrix_of(taps, range(1), 1, plane, (12, 4, 3, 3))
        left = replace(taps, plane=np.zeros(2, np.int64), right=np.array([-9, 0]))
        with pytest.raises(OverflowError):
            matrix_of(left, range(1), 1, plane, (12, 4, 3, 3))


def test_both_directions_count_their_own_work() -> None:
    w = Writer((4, 8, 8), 1.0, 0)
    conv(w, "input", 4, (3, 3), padding=[1, 1])
    once = 4 * 4 * 9 * 64
    for worth, shared in ((once, 1), (1.5 * once, 0)):
        with mock.patch.object(program, "WORTH", worth):
            assert [code.program.worth for code in codes(Network(w.graph(), w.tensors), 1)] == [shared, shared]


def small(threads: int = 1) -> Network:
    w = Writer((2, 4, 4), 1.0, 0)
    w.add("relu", (conv(w, "input", 3, (3, 3)),), {})
    return Network(w.graph(), w.tensors, threads=threads)


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 2, 4), (1, 2, 4, 5), (1, 32)])
def test_images_of_another_shape_do_not_reach_native_code(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"this network takes \(n, 2, 4, 4\)"):
        small().forward(np.zeros(shape, np.float32))


def test_what_comes_back_must_fit_what_went_forward() -> None:
    network, x = small(), np.zeros((5, 2, 4, 4), np.float32)
    logits, trace = network.forward(x, keep=True)
    for wrong in (logits[:4], logits[:, :2], np.zeros((6, *logits.shape[1:]), np.float32)):
        with pytest.raises(DataError, match="the logits are of shape"):
            network.backward(trace, wrong)
    with pytest.raises(DataError, match="keep=True"):
        network.backward(network.forward(x)[1], logits)
    longer = network.forward(np.concatenate([x] * 5), keep=True)[1]
    for kept in ({}, {0: []}, {0: [each[:1] for each in trace.kept[0]]}, longer.kept):
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
def test_all_floats_of_torch_are_taken(dtype: torch.dtype) -> None:
    x = torch.rand(3, 2, 4, 4).to(dtype)
    assert torch.equal(small()(x), small()(x.float()))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_network_can_be_copied_and_sent(again: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()).eval()
    network, x = engine_of(model, (2, 8, 8), threads=2), torch.rand(9, 2, 8, 8)
    wanted = network(x)
    values = {each: (each.taps.values * 2, each.bias) for each in network.products() if each.weight is not None}
    network.refill(values)
    twin = again(network)
    assert (twin.isa, twin.threads, twin.graph) == (network.isa, 2, network.graph)
    assert torch.equal(twin(x), network(x)) and not torch.equal(twin(x), wanted), "with the weights of the moment"
    logits, trace = twin.forward(x.numpy(), keep=True)
    again_logits, again_trace = network.forward(x.numpy(), keep=True)
    assert np.array_equal(twin.backward(trace, logits), network.backward(again_trace, again_logits))
    twin.refill({each: (each.taps.values * 2, each.bias) for each in twin.products() if each.weight is not None})
    assert not torch.equal(twin(x), network(x))


def test_a_copy_needs_native_code_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(small())
    monkeypatch.setattr(bindings, "kernels", lambda: None)
    with pytest.raises(RecipeError, match="copied to where there is none"):
        pickle.loads(sent)


def test_a_graph_of_nothing_but_the_input_is_fine() -> None:
    graph = Graph((Node("input", "input", (), (2,)), Node("flat", "flatten", ("input",), (2,))), "flat")
    assert Network(graph, {})(np.ones((3, 2), np.float32)).tolist() == [[1, 1]] * 3
