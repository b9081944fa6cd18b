"""The aten functions of torch that a network in a file may call.

They are pure functions of tensors and numbers: they overwrite nothing, draw nothing at random and read nothing else,
and they check every index against the sizes of the tensors. The list has what captures of the usual networks need.
Other functions of torch, such as backward passes and unpoolings, do not check the indices that they get.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_POINTWISE = """
abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu
clamp clamp_max clamp_min clip cos cosh div divide elu eq erf erfc exp exp2 expm1 floor floor_divide fmod frac ge gelu
glu gt hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 log1p log2
log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul
multiply nan_to_num ne neg negative pow prelu _prelu_kernel reciprocal relu relu6 remainder round rsqrt rsub selu sgn
sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh tanhshrink threshold true_divide
trunc where xlogy
"""
_REDUCTIONS = """
all amax amin any argmax argmin argsort cumprod cumsum linalg_norm linalg_vector_norm log_softmax _log_softmax logsumexp
max mean min norm prod _safe_softmax softmax _softmax sort std std_mean sum topk var var_mean
"""
_SHAPES = """
broadcast_to cat channel_shuffle chunk concat diagonal expand expand_as flatten flip movedim narrow
native_channel_shuffle permute pixel_shuffle pixel_unshuffle repeat reshape roll rot90 select select_scatter slice
slice_scatter split split_with_sizes squeeze stack swapaxes t tile transpose tril triu unbind unflatten unfold
_unsafe_view unsqueeze view
"""
_PRODUCTS = """
addmm baddbmm bmm _cdist_forward conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
_convolution einsum linear matmul mm mv outer scaled_dot_product_attention
"""
_LAYERS = """
adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d batch_norm col2im
constant_pad_nd group_norm im2col instance_norm layer_norm max_pool1d max_pool2d max_pool2d_with_indices max_pool3d
max_pool3d_with_indices _native_batch_norm_legit_no_training native_group_norm native_layer_norm pad rms_norm
upsample_bicubic2d _upsample_bicubic2d_aa upsample_bilinear2d _upsample_bilinear2d_aa upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d upsample_trilinear3d
"""
_OTHERS = """
arange embedding eye full full_like index index_select linspace new_full new_ones new_zeros ones ones_like
scalar_tensor zeros zeros_like clone contiguous detach float to _to_copy type_as
"""
_FUNCTIONS = frozenset(" ".join((_POINTWISE, _REDUCTIONS, _SHAPES, _PRODUCTS, _LAYERS, _OTHERS)).split())
_KINDS = {"dtype", "out_dtype", "layout", "device", "memory_format"}
_ATTENTION = "scaled_dot_product_attention"
_SCALES = 1 / 1024, 1024  # the smallest and the largest scale of a resized image


def is_allowed(overload: Any) -> bool:
    """Whether a network in a file may call a function of torch."""
    schema = overload._schema
    name = schema.name.removeprefix("aten::")
    return (
        overload.namespace == "aten"
        and name in _FUNCTIONS
        and not schema.is_mutable
        and not any(argument.is_out for argument in schema.arguments)
        and bool(schema.returns)
        and all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
        and (torch.Tag.nondeterministic_seeded not in overload.tags or name == _ATTENTION)
    )


def objection(overload: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why an allowed function must not be called with these arguments; None if it may be."""
    name = overload._schema.name.removeprefix("aten::")
    rule = _RULES.get(name) or (_resized if "upsample" in name else None)
    names = [argument.name for argument in overload._schema.arguments]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    for key in _KINDS & bound.keys():  # torch takes any integer as a type, and crashes
        if bound[key] is not None and not (key in ("dtype", "out_dtype") and isinstance(bound[key], torch.dtype)):
            return f"has {key} {bound[key]!r:.100}"
    return None if rule is None else rule(bound)


def _attention(bound: Mapping[str, Any]) -> str | None:
    return "drops numbers at random" if bound.get("dropout_p", 0) != 0 else None


def _batch_norm(bound: Mapping[str, Any]) -> str | None:
    """Not all of these functions of torch check the sizes."""
    input_stats = bound.get("use_input_stats", False) and bound["running_mean"] is not None
    if bound.get("training", False) or input_stats:
        return "changes its running statistics"
    x = bound["input"]
    parts = [bound.get(key) for key in ("weight", "bias", "running_mean", "running_var")]
    fits = all(part is None or (isinstance(part, Tensor) and part.shape == x.shape[1:2]) for part in parts)
    return None if x.ndim > 1 and fits else "has statistics of another size"


def _padded(bound: Mapping[str, Any]) -> str | None:
    if bound.get("mode", "constant") != "constant" and min(bound["pad"], default=0) < 0:
        return "has a negative padding"
    return None


def _resized(bound: Mapping[str, Any]) -> str | None:
    """Torch computes positions as products with these factors, rounded to integers."""
    arguments = [bound.get(key) for key in ("scale_factors", "scales", "scales_d", "scales_h", "scales_w")]
    lists = [argument if isinstance(argument, list) else [argument] for argument in arguments]
    factors = [factor for values in lists for factor in values if factor is not None]
    fit = all(math.isfinite(factor) and _SCALES[0] <= factor <= _SCALES[1] for factor in factors)
    return None if fit else f"resizes images by {factors}"


_RULES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    _ATTENTION: _attention,
    "batch_norm": _batch_norm,
    "instance_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "pad": _padded,
}
