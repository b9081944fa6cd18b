"""The rules that turn calls of torch into operations of a graph.

A rule gets the arguments of the call by their names (`bound`) and the shape of the result, and adds the node. It
returns None if no operation of the graph fits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harp.engine.capture.exported_program import RESHAPES, Constant, Reader, Result, Rule
from harp.engine.graph.nodes import Node, Shape
from harp.engine.graph.passes import Fold, normed

Bound = dict[str, Any]


def _layer(reader: Reader, name: str, op: str, bound: Bound, shape: Shape, **more: Any) -> Result | None:
    weight, bias = bound["weight"], bound["bias"]
    if not isinstance(weight, Constant) or not (bias is None or isinstance(bias, Constant)):
        return None
    tensors = {"weight": weight.name} | ({} if bias is None else {"bias": bias.name})
    return reader.make(name, op, [bound["input"]], shape, tensors=tensors, **more)


def conv(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A convolution of images, with the same zero padding on both sides."""
    weight = bound["weight"]
    if reader.images(bound["input"], 3) is None or not isinstance(weight, Constant) or bound.get("transposed"):
        return None
    stride, dilation, padding = _pair(bound["stride"]), _pair(bound["dilation"]), bound["padding"]
    if padding == "same":
        paddings = [step * (size - 1) for step, size in zip(dilation, reader.sizes[weight.name][2:], strict=True)]
        if any(length % 2 for length in paddings):
            return None
        padding = [length // 2 for length in paddings]
    padding = [0, 0] if padding == "valid" else _pair(padding)
    more = {"stride": stride, "padding": padding, "dilation": dilation, "groups": bound["groups"]}
    return _layer(reader, name, "conv", bound, shape, **more)


def linear(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A linear layer of vectors."""
    return None if reader.images(bound["input"], 1) is None else _layer(reader, name, "linear", bound, shape)


def norm(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A batch norm with running statistics."""
    x = bound["input"]
    parts = [bound[key] for key in ("weight", "bias", "running_mean", "running_var")]
    constant = all(part is None or isinstance(part, Constant) for part in parts)
    if reader.images(x) is None or not constant or None in parts[2:] or bound.get("training"):
        return None
    scale, shift = (None if part is None else part.name for part in parts[:2])
    mean, variance = parts[2].name, parts[3].name
    fold = Fold(None, scale, shift, mean, variance, bound["eps"])
    names = tuple(tensor for tensor in (scale, shift, mean, variance) if tensor is not None)

    def part(index: int) -> Callable[..., Tensor]:
        return lambda *tensors: normed(fold, dict(zip(names, tensors, strict=True)).__getitem__)[index]

    prefix = mean.removesuffix(".running_mean")
    result = _affine(reader, name, x, shape, part(0), part(1), names, prefix)
    reader.norms[result.name] = fold
    return result


def _affine(
    reader: Reader,
    name: str,
    x: Result,
    shape: Shape,
    scale: Callable[..., Tensor],
    shift: Callable[..., Tensor],
    names: tuple[str, ...],
    prefix: str = "",
) -> Result:
    prefix = prefix or name
    size = shape[:1]
    tensors = {
        "scale": reader.derive(f"{prefix}.scale", scale, names, size).name,
        "shift": reader.derive(f"{prefix}.shift", shift, names, size).name,
    }
    return reader.add(Node(name, "affine", (x.name,), shape, tensors))


def _by_channel(reader: Reader, value: Any, shape: Shape) -> bool:
    """Whether a value is a number or a tensor with one number for each channel."""
    if not isinstance(value, Constant):
        return isinstance(value, (int, float)) and math.isfinite(value)
    size = reader.sizes[value.name]
    per_channel = (shape[0], *[1] * (len(shape) - 1))
    return math.prod(size) == 1 or size in (per_channel, (1, *per_channel))


def _arithmetic(
    reader: Reader, name: str, pair: tuple[Any, Any], shape: Shape, rule: Callable[[Any, bool], tuple[Any, Any]]
) -> Result | None:
    """A sum, difference, product or quotient of images and a constant for each channel.

    `rule` gets the constant and whether it came first, and gives the scale and the shift of the images.
    """
    first, second = pair
    x, other, swapped = (first, second, False) if isinstance(first, Result) else (second, first, True)
    if not isinstance(x, Result) or reader.images(x) != shape or not _by_channel(reader, other, shape):
        return None
    channels = shape[0]
    names = (other.name,) if isinstance(other, Constant) else ()

    def part(index: int) -> Callable[..., Tensor]:
        def compute(*tensors: Tensor) -> Tensor:
            constant = tensors[0].reshape(-1).float() if tensors else float(other)
            summand: Tensor | float = rule(constant, swapped)[index]
            return torch.zeros(channels) + summand

        return compute

    return _affine(reader, name, x, shape, part(0), part(1), names)


def add(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A sum of two results, or of one and a constant."""
    first, second, alpha = bound["self"], bound["other"], bound.get("alpha", 1)
    if reader.images(first) == shape == reader.images(second):
        return reader.make(name, "add", [first, second], shape) if alpha == 1 else None
    return _arithmetic(
        reader, name, (first, second), shape, lambda c, swapped: (alpha, c) if swapped else (1, alpha * c)
    )


def subtract(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A difference of a result and a constant."""
    alpha = bound.get("alpha", 1)
    pair = bound["self"], bound["other"]
    return _arithmetic(reader, name, pair, shape, lambda c, swapped: (-alpha, c) if swapped else (1, -alpha * c))


def multiply(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A product of a result and a constant."""
    return _arithmetic(reader, name, (bound["self"], bound["other"]), shape, lambda c, _: (c, 0))


def divide(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A result divided by a constant."""
    if not isinstance(bound["self"], Result) or bound.get("rounding_mode") or bound["other"] == 0:
        return None
    return _arithmetic(reader, name, (bound["self"], bound["other"]), shape, lambda c, _: (1 / c, 0))


def relu(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A ReLU."""
    return _pointwise(reader, name, "relu", bound, shape)


def leaky(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A leaky ReLU."""
    return _pointwise(reader, name, "leaky", bound, shape, slope=float(bound["negative_slope"]))


def clip(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A ReLU6 or hardtanh: no gradient at the bounds."""
    return _clip(reader, name, bound, shape, (bound.get("min_val", 0), bound.get("max_val", 6)), inclusive=False)


def clamp(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A clamp: with a gradient at the bounds."""
    return _clip(reader, name, bound, shape, (bound["min"], bound["max"]), inclusive=True)


def _clip(
    reader: Reader, name: str, bound: Bound, shape: Shape, bounds: tuple[Any, Any], *, inclusive: bool
) -> Result | None:
    if not all(isinstance(limit, (int, float)) and math.isfinite(limit) for limit in bounds) or bounds[0] > bounds[1]:
        return None
    low, high = map(float, bounds)
    return _pointwise(reader, name, "clip", bound, shape, low=low, high=high, inclusive=inclusive)


def _pointwise(reader: Reader, name: str, op: str, bound: Bound, shape: Shape, **more: Any) -> Result | None:
    x = bound["self"]
    return None if reader.images(x) is None else reader.make(name, op, [x], shape, **more)


def concat(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """A concatenation along the channels."""
    parts, axis = bound["tensors"], bound["dim"] % (len(shape) + 1)
    fits = axis == 1 and all(reader.images(part, len(shape)) is not None for part in parts)
    return reader.make(name, "concat", parts, shape) if fits else None


def max_pool(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """The largest of each window."""
    return _pool(reader, name, "maxpool", bound, shape, dilation=_pair(bound["dilation"]))


def mean_pool(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """The mean of each window."""
    if bound["divisor_override"] is not None:
        return None
    size, padding = reader.images(bound["self"], 3), _pair(bound["padding"])
    if size is not None and size[1:] == tuple(_pair(bound["kernel_size"])) and padding == [0, 0]:
        return reader.make(name, "mean", [bound["self"]], shape, keep=True)
    return _pool(reader, name, "avgpool", bound, shape, count_padding=bound["count_include_pad"])


def _pool(reader: Reader, name: str, op: str, bound: Bound, shape: Shape, **more: Any) -> Result | None:
    if reader.images(bound["self"], 3) is None:
        return None
    kernel = _pair(bound["kernel_size"])
    stride = _pair(bound["stride"]) if bound["stride"] else kernel
    window = {"kernel": kernel, "stride": stride, "padding": _pair(bound["padding"]), "ceil": bound["ceil_mode"]}
    return reader.make(name, op, [bound["self"]], shape, **window, **more)


def adaptive(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """An adaptive mean pooling, if all windows have the same size."""
    size = reader.images(bound["self"], 3)
    if size is None or any(before % after for before, after in zip(size[1:], shape[1:], strict=True)):
        return None
    if shape[1:] == (1, 1):
        return reader.make(name, "mean", [bound["self"]], shape, keep=True)
    kernel = [before // after for before, after in zip(size[1:], shape[1:], strict=True)]
    return reader.make(name, "avgpool", [bound["self"]], shape, kernel=kernel, stride=kernel)


def mean(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """The mean over height and width."""
    axes = {axis % 4 for axis in bound.get("dim") or ()}
    if reader.images(bound["self"], 3) is None or axes != {2, 3} or bound.get("dtype") is not None:
        return None
    return reader.make(name, "mean", [bound["self"]], shape, keep=bound["keepdim"])


def flatten(reader: Reader, name: str, bound: Bound, shape: Shape) -> Result | None:
    """All numbers of an image in one row."""
    x = bound["self"]
    return None if reader.images(x) is None or len(shape) != 1 else reader.make(name, "flatten", [x], shape)


def _pair(value: Any) -> list[int]:
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers * 2 if len(numbers) == 1 else numbers


RULES: dict[str, Rule] = {
    "conv2d": conv,
    "convolution": conv,
    "linear": linear,
    "_native_batch_norm_legit_no_training": norm,
    "batch_norm": norm,
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "div": divide,
    "relu": relu,
    "leaky_relu": leaky,
    "relu6": clip,
    "hardtanh": clip,
    "clamp": clamp,
    "clip": clamp,
    "cat": concat,
    "concat": concat,
    "max_pool2d": max_pool,
    "max_pool2d_with_indices": max_pool,
    "avg_pool2d": mean_pool,
    "adaptive_avg_pool2d": adaptive,
    "_adaptive_avg_pool2d": adaptive,
    "mean": mean,
    "squeeze": flatten,
    **dict.fromkeys(RESHAPES, flatten),
}
