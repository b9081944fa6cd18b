"""A network that computes with the weights that it keeps, forwards and backwards to its input."""

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from harp.errors import DataError, RecipeError
from harp.sparse import native
from harp.sparse.graph import Graph, Node
from harp.sparse.lowering import Product, Stage, stages
from harp.sparse.runner import Kept, Runner

Array = npt.NDArray[np.float32]


@dataclass
class Trace:
    """What the way back needs of the way forward."""

    count: int
    keep: bool
    shape: tuple[int, ...] = ()  # of the logits
    kept: dict[int, Kept] = field(default_factory=dict)
    inputs: dict[int, list[Any]] = field(default_factory=dict)


class Network:
    """A graph with its tensors, called with images: a batch of them, float32, channels first.

    Arguments:
        tensors: by their names; arrays, or `harp.compact.Stored`. Weights that are zero in an array, or not among the
            indices of what is stored, take no part.
        threads: at most so many are used for a batch. Their number does not change a bit of the result.
        header: what the file says of itself.

    The computation is native where this installation has native code for the CPU, else torch does it.
    """

    def __init__(
        self, graph: Graph, tensors: Mapping[str, Any], *, threads: int = 1, header: Mapping[str, Any] | None = None
    ) -> None:
        if type(threads) is not int or threads < 1:
            raise RecipeError(f"threads {threads!r}: give a whole number from 1 on")
        self.graph, self.threads, self.header = graph, threads, dict(header or {})
        self._lock = threading.Lock()
        fit = native.kernels()
        self.isa = None if fit is None else fit.name.decode()
        self._shapes = {node.name: node.shape for node in graph.nodes}
        self._parts: list[Runner | Node] = []
        for part in graph.nodes[1:] if fit is None else stages(graph, tensors):
            self._parts.append(Runner(part, fit, threads) if fit and isinstance(part, Stage) else cast(Node, part))
        self._done = _done(self._parts, graph.output)
        self._tensors: dict[str, Any] = {}
        if any(isinstance(each, Node) for each in self._parts):
            from harp.sparse import borrowed  # loads torch

            self._torch = borrowed
            for left in self._parts:
                if isinstance(left, Node):
                    self._tensors.update(borrowed.tensors_of(left, tensors))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or another process needs: the weights of this moment, but neither a lock nor a module."""
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_torch")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fit = native.kernels()
        vars(self).update(state, _lock=threading.Lock(), isa=None if fit is None else fit.name.decode())
        if any(isinstance(each, Node) for each in self._parts):
            from harp.sparse import borrowed

            self._torch = borrowed

    @property
    def parts(self) -> Sequence[Runner | Node]:
        """What is computed one after another: by native code, or single nodes by torch."""
        return self._parts

    @property
    def done(self) -> Sequence[Sequence[str]]:
        """For each part, the results that nobody reads after it."""
        return self._done

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor that torch computes with."""
        return tuple(self._tensors[tensor].shape)

    @property
    def native_share(self) -> float:
        """The share of the graph's nodes that native code computes."""
        left = sum(isinstance(part, Node) for part in self._parts)
        return 1 - left / max(1, len(self.graph.nodes) - 1)

    def __call__(self, x: Any) -> Any:
        """The logits of images, as an array or as a tensor of torch, whichever was given."""
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(x, torch.Tensor)
        if is_tensor:
            x = x.detach().cpu()
            x = (x.float() if x.is_floating_point() else x).numpy()  # of some floats numpy does not know
        found, _ = self.forward(_checked(x, self.graph.input_shape))
        return torch.from_numpy(found) if is_tensor and torch is not None else found

    def forward(self, x: Array, *, keep: bool = False) -> tuple[Array, Trace]:
        """The logits of images, and what `backward` needs if it is to be kept."""
        _check_shape(x, self.graph.input_shape)
        trace = Trace(len(x), keep)
        results: dict[str, Any] = {self.graph.nodes[0].name: x}
        with self._lock:
            for number, part in enumerate(self._parts):
                if isinstance(part, Runner):
                    made, kept = part.forward(_rows([results[name] for name in part.stage.inputs], len(x)), keep=keep)
                    results.update(_apart(made, part.stage, self._shapes))
                    trace.kept[number] = kept
                else:
                    inputs = [results[name] for name in part.inputs]
                    results[part.name] = self._torch.compute(part, inputs, self._tensors, len(x))
                    if keep:
                        trace.inputs[number] = inputs
                for name in self._done[number]:  # a transformer has hundreds of results
                    del results[name]
        found = results[self.graph.output]
        trace.shape = tuple(found.shape)
        return (found if isinstance(found, np.ndarray) else found.numpy()), trace

    def backward(self, trace: Trace, gradient: Array) -> Array:
        """The gradient of the images, given that of the logits."""
        if not trace.keep:
            raise DataError("there is no way back from a forward pass without keep=True")
        if np.shape(gradient) != trace.shape:
            raise DataError(f"a gradient of shape {np.shape(gradient)}: the logits are of shape {trace.shape}")
        left: dict[str, Any] = {self.graph.output: np.ascontiguousarray(gradient, np.float32)}
        with self._lock:
            for number in reversed(range(len(self._parts))):
                part = self._parts[number]
                if isinstance(part, Runner):
                    outputs = part.stage.outputs.items()
                    given = [left.pop(n, None) for n, _ in outputs]
                    if all(each is None for each in given):
                        continue
                    sizes = [math.prod(value.size) for _, value in outputs]
                    filled = [
                        np.zeros((trace.count, size), np.float32) if each is None else each
                        for each, size in zip(given, sizes, strict=True)
                    ]
                    found = part.backward(_rows(filled, trace.count), trace.kept.get(number, []))
                    for name, each in _apart(found, part.stage, self._shapes, back=True).items():
                        _add(left, name, each)
                elif (given_one := left.pop(part.name, None)) is not None:
                    inputs = trace.inputs[number]
                    every = self._torch.gradients(part, inputs, self._tensors, trace.count, given_one)
                    for name, each in zip(part.inputs, every, strict=True):
                        if each is not None:
                            _add(left, name, each)
        shape = trace.count, *self.graph.input_shape
        whole = left.get(self.graph.nodes[0].name)
        return np.zeros(shape, np.float32) if whole is None else _rows([whole], trace.count).reshape(shape)

    def products(self) -> list[Product]:
        """The layers that native code computes, whose weights `refill` can change."""
        found = []
        for part in self._parts:
            if isinstance(part, Runner):
                found += [each for each in part.stage.operations if isinstance(each, Product)]
        return found

    def borrowed(self) -> list[str]:
        """The names of the tensors with which torch computes, which `refill` can change too."""
        return list(self._tensors)

    def refill(
        self, values: Mapping[Product, tuple[Array, Array | None]], tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Give products other weights, at the places that count, and other biases; and torch other tensors."""
        with self._lock:
            self._tensors.update(tensors or {})
            for part in self._parts:
                if isinstance(part, Runner):
                    part.refill(values)


def _done(parts: Sequence[Runner | Node], output: str) -> list[list[str]]:
    """For each part, the results that nobody reads after it."""
    last: dict[str, int] = {}
    for number, part in enumerate(parts):
        given, made = (
            (part.stage.inputs, part.stage.outputs) if isinstance(part, Runner) else (part.inputs, [part.name])
        )
        last.update(dict.fromkeys((*given, *made), number))
    found: list[list[str]] = [[] for _ in parts]
    for name, number in last.items():
        if name != output:
            found[number].append(name)
    return found


def _checked(array: Any, shape: Sequence[int]) -> Array:
    """Images that the network can take; `DataError` says what is wrong with others."""
    _check_shape(array, shape)
    if array.dtype not in (np.float32, np.float64, np.float16):
        raise DataError(f"images of type {array.dtype}: give floats, usually from 0 to 1")
    images = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(images).all():
        raise DataError("images hold NaN or infinite numbers")
    return images


def _check_shape(array: Any, shape: Sequence[int]) -> None:
    if not isinstance(array, np.ndarray):
        raise DataError(f"images must be an array of numpy or a tensor of torch, not {type(array).__name__}")
    if array.ndim != 1 + len(shape) or tuple(array.shape[1:]) != tuple(shape):
        wanted = ", ".join(map(str, ("n", *shape)))
        raise DataError(f"images of shape {array.shape}: this network takes ({wanted})")


def _rows(arrays: list[Any], count: int) -> Array:
    """Arrays of one row an image side by side."""
    flat = [np.ascontiguousarray(each, np.float32).reshape(count, math.prod(each.shape[1:])) for each in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, 1)


def _apart(rows: Array, stage: Stage, shapes: Mapping[str, tuple[int, ...]], *, back: bool = False) -> dict[str, Any]:
    """The opposite of `_rows`, for the outputs or inputs of a stage."""
    found, at = {}, 0
    for name, value in (stage.inputs if back else stage.outputs).items():
        size = math.prod(value.size)
        found[name] = rows[:, at : at + size].reshape(len(rows), *shapes[name])
        at += size
    return found


def _add(left: dict[str, Any], name: str, gradient: Any) -> None:
    array = gradient if isinstance(gradient, np.ndarray) else gradient.detach().numpy()
    left[name] = left[name] + array if name in left else array
