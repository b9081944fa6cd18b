"""The rules that turn calls of torch into operations of a graph.

A rule adds the node of a call, or returns None if no operation of the graph fits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harp.engine.capture.exported_program import RESHAPES, Call, Constant, Result, Rule
from harp.engine.graph.nodes import Node
from harp.engine.graph.passes import Fold, normed

_STATISTICS = ("weight", "bias", "running_mean", "running_var")


def _layer(call: Call, op: str, **attributes: Any) -> Result | None:
    weight, bias = call["weight"], call["bias"]
    if not isinstance(weight, Constant) or not (bias is None or isinstance(bias, Constant)):
        return None
    tensors = {"weight": weight.name} | ({} if bias is None else {"bias": bias.name})
    return call.make(op, call["input"], tensors=tensors, **attributes)


def _conv(call: Call) -> Result | None:
    """A convolution of images, with the same zero padding on both sides."""
    weight, padding, dilation = call["weight"], call["padding"], _pair(call["dilation"])
    if call.images("input", 3) is None or not isinstance(weight, Constant) or call["transposed"]:
        return None
    if padding == "same":
        kernel = call.reader.sizes[weight.name][2:]
        both_sides = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        if any(length % 2 for length in both_sides):
            return None
        padding = [length // 2 for length in both_sides]
    padding = [0, 0] if padding == "valid" else _pair(padding)
    stride, groups = _pair(call["stride"]), call["groups"]
    return _layer(call, "conv", stride=stride, padding=padding, dilation=dilation, groups=groups)


def _linear(call: Call) -> Result | None:
    """A linear layer of vectors."""
    return None if call.images("input", 1) is None else _layer(call, "linear")


def _norm(call: Call) -> Result | None:
    """A batch norm with running statistics."""
    parts = [call[key] for key in _STATISTICS]
    constant = all(part is None or isinstance(part, Constant) for part in parts)
    if call.images("input") is None or not constant or None in parts[2:] or call["training"]:
        return None
    scale, shift, mean, variance = (None if part is None else part.name for part in parts)
    assert mean is not None and variance is not None
    fold = Fold(None, scale, shift, mean, variance, call["eps"])
    names = tuple(name for name in (scale, shift, mean, variance) if name is not None)

    def part(index: int) -> Callable[..., Tensor]:
        return lambda *tensors: normed(fold, dict(zip(names, tensors, strict=True)).__getitem__)[index]

    result = _affine(call, call["input"], part, names, mean.removesuffix(".running_mean"))
    call.reader.norms[result.name] = fold
    return result


def _affine(
    call: Call, x: Result, part: Callable[[int], Callable[..., Tensor]], names: tuple[str, ...], prefix: str
) -> Result:
    """An affine map; `part` gives the functions of the tensors `names` that compute its scale (0) and its shift (1)."""
    derive, size = call.reader.derive, call.shape[:1]
    tensors = {
        role: derive(f"{prefix}.{role}", part(index), names, size).name for index, role in enumerate(("scale", "shift"))
    }
    return call.reader.add(Node(call.name, "affine", (x.name,), call.shape, tensors))


def _is_by_channel(call: Call, value: Any) -> bool:
    """Whether a value is a number or a tensor with one number for each channel."""
    if not isinstance(value, Constant):
        return isinstance(value, (int, float)) and math.isfinite(value)
    size = call.reader.sizes[value.name]
    per_channel = (call.shape[0], *[1] * (len(call.shape) - 1))
    return math.prod(size) == 1 or size in (per_channel, (1, *per_channel))


def _arithmetic(call: Call, rule: Callable[[Any, bool], tuple[Any, Any]]) -> Result | None:
    """A sum, difference, product or quotient of images and a constant for each channel.

    `rule` gets the constant and whether it came first, and gives the scale and the shift of the images.
    """
    x, other, swapped = call["self"], call["other"], False
    if not isinstance(x, Result):
        x, other, swapped = other, x, True
    if not isinstance(x, Result) or call.reader.images(x) != call.shape or not _is_by_channel(call, other):
        return None

    def part(index: int) -> Callable[..., Tensor]:
        def compute(*tensors: Tensor) -> Tensor:
            constant = tensors[0].reshape(-1).float() if tensors else float(other)
            summand: Tensor | float = rule(constant, swapped)[index]
            return torch.zeros(call.shape[0]) + summand

        return compute

    return _affine(call, x, part, (other.name,) if isinstance(other, Constant) else (), call.name)


def _add(call: Call) -> Result | None:
    """A sum of two results, or of one and a constant."""
    alpha = call.bound.get("alpha", 1)
    if call.images("self") == call.shape == call.images("other"):
        return call.make("add", call["self"], call["other"]) if alpha == 1 else None
    return _arithmetic(call, lambda c, swapped: (alpha, c) if swapped else (1, alpha * c))


def _subtract(call: Call) -> Result | None:
    """A difference of a result and a constant."""
    alpha = call.bound.get("alpha", 1)
    return _arithmetic(call, lambda c, swapped: (-alpha, c) if swapped else (1, -alpha * c))


def _multiply(call: Call) -> Result | None:
    """A product of a result and a constant."""
    return _arithmetic(call, lambda c, _: (c, 0))


def _divide(call: Call) -> Result | None:
    """A result divided by a constant."""
    if not isinstance(call["self"], Result) or call["rounding_mode"] or call["other"] == 0:
        return None
    return _arithmetic(call, lambda c, _: (1 / c, 0))


def _pointwise(call: Call, op: str, **attributes: Any) -> Result | None:
    return None if call.images("self") is None else call.make(op, call["self"], **attributes)


def _clip(call: Call, low: Any, high: Any, *, inclusive: bool) -> Result | None:
    """A clamp, which has a gradient at the bounds (inclusive), or a hardtanh, which has none."""
    if not all(isinstance(limit, (int, float)) and math.isfinite(limit) for limit in (low, high)) or low > high:
        return None
    return _pointwise(call, "clip", low=float(low), high=float(high), inclusive=inclusive)


def _hardtanh(call: Call) -> Result | None:
    return _clip(call, call.bound.get("min_val", 0), call.bound.get("max_val", 6), inclusive=False)  # ReLU6 has none


def _clamp(call: Call) -> Result | None:
    return _clip(call, call["min"], call["max"], inclusive=True)


def _concat(call: Call) -> Result | None:
    """A concatenation along the channels."""
    axes = len(call.shape)
    fits = all(call.reader.images(part, axes) is not None for part in call["tensors"])
    return call.make("concat", *call["tensors"]) if fits and call["dim"] % (axes + 1) == 1 else None


def _max_pool(call: Call) -> Result | None:
    return _pool(call, "maxpool", dilation=_pair(call["dilation"]))


def _mean_pool(call: Call) -> Result | None:
    """The mean of each window."""
    if call["divisor_override"] is not None:
        return None
    size, kernel = call.images("self", 3), tuple(_pair(call["kernel_size"]))
    if size is not None and size[1:] == kernel and _pair(call["padding"]) == [0, 0]:
        return call.make("mean", call["self"], keep=True)
    return _pool(call, "avgpool", count_padding=call["count_include_pad"])


def _pool(call: Call, op: str, **more: Any) -> Result | None:
    if call.images("self", 3) is None:
        return None
    kernel = _pair(call["kernel_size"])
    stride = _pair(call["stride"]) if call["stride"] else kernel
    window = {"kernel": kernel, "stride": stride, "padding": _pair(call["padding"]), "ceil": call["ceil_mode"]}
    return call.make(op, call["self"], **window, **more)


def _adaptive(call: Call) -> Result | None:
    """An adaptive mean pooling, if all windows have the same size."""
    size = call.images("self", 3)
    if size is None or any(before % after for before, after in zip(size[1:], call.shape[1:], strict=True)):
        return None
    if call.shape[1:] == (1, 1):
        return call.make("mean", call["self"], keep=True)
    kernel = [before // after for before, after in zip(size[1:], call.shape[1:], strict=True)]
    return call.make("avgpool", call["self"], kernel=kernel, stride=kernel)


def _mean(call: Call) -> Result | None:
    """The mean over height and width."""
    axes = {axis % 4 for axis in call["dim"] or ()}
    if call.images("self", 3) is None or axes != {2, 3} or call["dtype"] is not None:
        return None
    return call.make("mean", call["self"], keep=call["keepdim"])


def _flatten(call: Call) -> Result | None:
    """All numbers of an image in one row."""
    return _pointwise(call, "flatten") if len(call.shape) == 1 else None


def _pair(value: Any) -> list[int]:
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers * 2 if len(numbers) == 1 else numbers


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv2d", "convolution"), _conv),
    "linear": _linear,
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "batch_norm"), _norm),
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "div": _divide,
    "relu": lambda call: _pointwise(call, "relu"),
    "leaky_relu": lambda call: _pointwise(call, "leaky", slope=float(call["negative_slope"])),
    **dict.fromkeys(("relu6", "hardtanh"), _hardtanh),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("cat", "concat"), _concat),
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _max_pool),
    "avg_pool2d": _mean_pool,
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d"), _adaptive),
    "mean": _mean,
    **dict.fromkeys((*RESHAPES, "squeeze"), _flatten),
}
