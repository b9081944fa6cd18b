"""Random graphs for the engine, and the same in torch."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.engine.capture.capture import capture
from harp.engine.graph import reference
from harp.engine.graph.nodes import Graph, Node
from harp.engine.network import Network
from harp.engine.runner import Runner


class Writer:
    """Writes a graph node by node, with random tensors."""

    def __init__(self, shape: tuple[int, ...], density: float, seed: int) -> None:
        self.nodes = [Node("input", "input", (), shape)]
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.density, self.random = density, np.random.default_rng(seed)

    def shape(self, name: str) -> tuple[int, ...]:
        return next(node.shape for node in self.nodes if node.name == name)

    def add(
        self, op: str, inputs: tuple[str, ...], tensors: dict[str, np.ndarray[Any, Any]], /, **attributes: Any
    ) -> str:
        name = f"{op}_{len(self.nodes)}"
        names = {role: f"{name}.{role}" for role in tensors}
        self.tensors |= {names[role]: tensor for role, tensor in tensors.items()}
        node = Node(name, op, inputs, (), names, attributes)
        shells = [torch.zeros(2, *self.shape(source)) for source in inputs]
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


def by_torch(graph: Graph, tensors: dict[str, Any], x: Any, gradient: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the images, by torch."""
    points = torch.from_numpy(x).to(dtype).requires_grad_(True)
    full = {name: torch.from_numpy(np.asarray(tensor)).to(dtype) for name, tensor in tensors.items()}
    result = reference.run(graph, full, points)
    if not result.requires_grad:
        return result, torch.zeros_like(points)
    (input_gradient,) = torch.autograd.grad(result, points, torch.from_numpy(gradient).to(dtype), allow_unused=True)
    return result.detach(), torch.zeros_like(points) if input_gradient is None else input_gradient


def close(result: Any, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool(
        (torch.from_numpy(result).double() - expected).abs().max() <= tolerance * max(1e-3, expected.abs().max())
    )


def engine_of(model: nn.Module, shape: tuple[int, ...] = (3, 16, 16), **options: Any) -> Network:
    captured = capture(model, torch.rand(2, *shape))
    return Network(captured.graph, {k: v.numpy() for k, v in captured.tensors(model).items()}, **options)


def ops(network: Network, lanes: int) -> set[int]:
    (runner,) = network.parts
    assert isinstance(runner, Runner)
    return {step.op for step in runner.builder(lanes, "forward").steps[0].steps}
