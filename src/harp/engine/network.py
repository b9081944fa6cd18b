"""A network that computes with its nonzero weights only: the forward pass, and the gradient of the input."""

import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.graph.nodes import Graph, Node
from harp.engine.lowering.lower import Product, Stage, Value, stages
from harp.engine.native import bindings
from harp.engine.runner import Kept, Runner
from harp.errors import DataError, RecipeError

Array = npt.NDArray[np.float32]


@dataclass
class Trace:
    """What the backward pass needs from the forward pass."""

    count: int
    keep: bool
    shape: tuple[int, ...] = ()  # of the logits
    kept: dict[int, Kept] = field(default_factory=dict)  # by the number of the part
    inputs: dict[int, list[Any]] = field(default_factory=dict)


class Network:
    """A graph with its tensors, called with a batch of images: float32, channels first.

    Arguments:
        tensors: arrays or `harp.engine.format.Stored`, by name. Weights that are zero in an array, or that are not
            among the stored indices, are skipped.
        threads: the largest number of threads for a batch. It does not change a bit of the result.
        header: the header of the file.

    Native code computes the network if this installation has it for the CPU, else torch does.
    """

    def __init__(
        self, graph: Graph, tensors: Mapping[str, Any], *, threads: int = 1, header: Mapping[str, Any] | None = None
    ) -> None:
        if type(threads) is not int or threads < 1:
            raise RecipeError(f"threads {threads!r}: give a whole number from 1 on")
        self.graph, self.threads, self.header = graph, threads, dict(header or {})
        self._lock = threading.Lock()
        self._shapes = {node.name: node.shape for node in graph.nodes}
        kernels = bindings.kernels()
        # In the order of execution: stages that native code computes, and single nodes for torch.
        self.parts: list[Runner | Node] = (
            list(graph.nodes[1:])
            if kernels is None
            else [Runner(p, kernels, threads) if isinstance(p, Stage) else p for p in stages(graph, tensors)]
        )
        self.done = _last_reads(self.parts, graph.output)  # for each part, the results that are not read after it
        # The tensors that torch computes with; `refill` can change them.
        self.tensors: dict[str, Any] = {}
        names = {name for part in self.parts if isinstance(part, Node) for name in part.tensors.values()}
        if names:
            from harp.engine.graph import reference  # loads torch

            self.tensors = {name: reference.tensor(tensors[name]) for name in names}

    @property
    def isa(self) -> str | None:
        """The instruction set of the native code, None without native code."""
        kernels = bindings.kernels()
        return None if kernels is None else str(kernels.name.decode())

    def __getstate__(self) -> dict[str, Any]:
        """The state with the current weights, without the lock, which can't be pickled."""
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def native_share(self) -> float:
        """The share of the graph's nodes that native code computes."""
        torch_nodes = sum(isinstance(part, Node) for part in self.parts)
        return 1 - torch_nodes / max(1, len(self.graph.nodes) - 1)

    def __call__(self, x: Any) -> Any:
        """The logits of images: an array for an array, a torch tensor for a torch tensor."""
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(x, torch.Tensor)
        if is_tensor:
            x = x.detach().cpu()
            x = (x.float() if x.is_floating_point() else x).numpy()  # numpy has no bfloat16
        output, _ = self.forward(_checked(x, self.graph.input_shape))
        return torch.from_numpy(output) if is_tensor and torch is not None else output

    def forward(self, x: Array, *, keep: bool = False) -> tuple[Array, Trace]:
        """The logits of images, and with `keep` what `backward` needs."""
        _check_shape(x, self.graph.input_shape)
        trace = Trace(len(x), keep)
        results: dict[str, Any] = {self.graph.nodes[0].name: x}
        with self._lock:
            for number, part in enumerate(self.parts):
                inputs = [results[name] for name in _inputs(part)]
                if isinstance(part, Runner):
                    rows, trace.kept[number] = part.forward(_rows(inputs, len(x)), keep=keep)
                    results |= self._split_rows(rows, part.stage.outputs)
                else:
                    from harp.engine.graph import reference

                    results[part.name] = reference.compute(part, inputs, self.tensors, len(x))
                    if keep:
                        trace.inputs[number] = inputs
                for name in self.done[number]:  # free the memory: a transformer has hundreds of results
                    del results[name]
        output = results[self.graph.output]
        trace.shape = tuple(output.shape)
        return (output if isinstance(output, np.ndarray) else output.numpy()), trace

    def backward(self, trace: Trace, gradient: Array) -> Array:
        """The gradient of the images from the gradient of the logits."""
        if not trace.keep:
            raise DataError("backward needs a forward pass with keep=True")
        if np.shape(gradient) != trace.shape:
            raise DataError(f"a gradient of shape {np.shape(gradient)}: the logits are of shape {trace.shape}")
        gradients: dict[str, Any] = {self.graph.output: np.ascontiguousarray(gradient, np.float32)}
        with self._lock:
            for number, part in reversed(list(enumerate(self.parts))):
                if isinstance(part, Runner):
                    outputs = part.stage.outputs
                    if not outputs.keys() & gradients.keys():
                        continue
                    output_gradients = [
                        gradients.pop(name)
                        if name in gradients
                        else np.zeros((trace.count, math.prod(value.size)), np.float32)
                        for name, value in outputs.items()
                    ]
                    rows = part.backward(_rows(output_gradients, trace.count), trace.kept.get(number, []))
                    for name, array in self._split_rows(rows, part.stage.inputs).items():
                        _add(gradients, name, array)
                elif (output_gradient := gradients.pop(part.name, None)) is not None:
                    from harp.engine.graph import reference

                    inputs = trace.inputs[number]
                    tensors = reference.gradients(part, inputs, self.tensors, trace.count, output_gradient)
                    for name, tensor in zip(part.inputs, tensors, strict=True):
                        if tensor is not None:
                            _add(gradients, name, tensor.numpy())
        shape = trace.count, *self.graph.input_shape
        input_gradient = gradients.get(self.graph.nodes[0].name)
        if input_gradient is None:
            return np.zeros(shape, np.float32)
        return _rows([input_gradient], trace.count).reshape(shape)

    def products(self) -> list[Product]:
        """The layers that native code computes; `refill` can change their weights."""
        stages = [part.stage for part in self.parts if isinstance(part, Runner)]
        return [operation for stage in stages for operation in stage.operations if isinstance(operation, Product)]

    def refill(
        self, values: Mapping[Product, tuple[Array, Array | None]], tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the weights (at the same nonzero positions) and biases of products, and the tensors of torch."""
        with self._lock:
            self.tensors.update(tensors or {})
            for part in self.parts:
                if isinstance(part, Runner):
                    part.refill(values)

    def _split_rows(self, rows: Array, values: Mapping[str, Value]) -> dict[str, Any]:
        """The inverse of `_rows`, for the outputs or the inputs of a stage."""
        results, start = {}, 0
        for name, value in values.items():
            end = start + math.prod(value.size)
            results[name] = rows[:, start:end].reshape(len(rows), *self._shapes[name])
            start = end
        return results


def _inputs(part: Runner | Node) -> Iterable[str]:
    return part.stage.inputs if isinstance(part, Runner) else part.inputs


def _last_reads(parts: Sequence[Runner | Node], output: str) -> list[list[str]]:
    """For each part, the results that are not read after it."""
    last_use: dict[str, int] = {}
    for number, part in enumerate(parts):
        outputs = part.stage.outputs if isinstance(part, Runner) else [part.name]
        last_use.update(dict.fromkeys((*_inputs(part), *outputs), number))
    dead: list[list[str]] = [[] for _ in parts]
    for name, number in last_use.items():
        if name != output:
            dead[number].append(name)
    return dead


def _checked(array: Any, shape: Sequence[int]) -> Array:
    """The images as contiguous float32; a `DataError` if the network can't take them."""
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
    """Arrays as one matrix: one row per image, with the arrays side by side."""
    flat = [np.ascontiguousarray(array, np.float32).reshape(count, math.prod(array.shape[1:])) for array in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, 1)


def _add(gradients: dict[str, Any], name: str, gradient: Array) -> None:
    gradients[name] = gradients[name] + gradient if name in gradients else gradient
