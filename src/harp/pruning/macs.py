"""What a network costs: multiply-accumulates (MACs) for one image, parameters, bytes; dense, and of the kept weights.

A weight of a convolution or a linear layer is multiplied once for every position that it is applied at,

    MACs = positions · weights          kept MACs = positions · kept weights

with the positions of the output, or of the input for a transposed convolution. So what pruning saves is known exactly
for each layer. Positions in the padding count, as is usual, and norms, activations, biases and the products of
queries with keys do not.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.modes import evaluating, slow_attention
from harp.pruning.masks import check_shapes

_INDEX = 4  # bytes of the index that says where a kept weight belongs

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Per weight (by identity), how often each block of its rows is applied: one block, or three for packed attention.
_Uses = dict[int, list[int]]


def cost(model: nn.Module, shape: Sequence[int], masks: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The cost of a model for one image of a shape (channels, height, width), as plain numbers.

    Masks say which weights are kept; layers without one are dense. Without any masks the weights that are zero count
    as pruned. What is used twice is counted twice in MACs and once in parameters. `uncounted` names matrix-shaped
    parameters that no layer known here was seen to use. `bytes_dense` are those of all parameters, `bytes_sparse` is
    an estimate: a kept value and a 32-bit index each, or dense where that is smaller; biases and norms as they are.
    """
    check_shapes(model, masks or {})
    parameters = dict(model.named_parameters())
    kept = _kept(parameters, masks)
    uses = _run(model, shape)
    layers = []
    for name, weight in parameters.items():
        if id(weight) in uses:
            applied = uses[id(weight)]
            pairs = list(zip(applied, kept[name].chunk(len(applied)), strict=True))
            macs = sum(times * block.numel() for times, block in pairs)
            left = sum(times * int(block.count_nonzero()) for times, block in pairs)
            layers.append({"name": name, "macs": macs, "macs_kept": left})
    counts = {name: int(mask.count_nonzero()) for name, mask in kept.items()}
    return {
        "macs": sum(layer["macs"] for layer in layers),
        "macs_kept": sum(layer["macs_kept"] for layer in layers),
        "parameters": sum(weight.numel() for weight in parameters.values()),
        "parameters_kept": sum(counts.get(name, weight.numel()) for name, weight in parameters.items()),
        "bytes_dense": sum(weight.nbytes for weight in parameters.values()),
        "bytes_sparse": sum(
            min(weight.nbytes, counts.get(name, weight.numel()) * (weight.element_size() + _INDEX))
            for name, weight in parameters.items()
        ),
        "layers": layers,
        "uncounted": [name for name, weight in parameters.items() if weight.ndim > 1 and id(weight) not in uses],
    }


def reduced(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of a dense network of which a smaller dense one is left."""
    left = {layer["name"]: layer["macs"] for layer in after["layers"]}
    return {
        **before,
        "macs_kept": after["macs"],
        "parameters_kept": after["parameters"],
        "bytes_sparse": after["bytes_dense"],
        "layers": [{**layer, "macs_kept": left.get(layer["name"], 0)} for layer in before["layers"]],
    }


def positions(model: nn.Module, shape: Sequence[int]) -> dict[str, int]:
    """How often each weight of a layer that is known here is applied to one image of a shape, by parameter name.

    All weights of a tensor must be applied equally often: queries, keys and values that are packed into one tensor and
    come from sequences of different lengths are refused.
    """
    uses = _run(model, shape)
    applied = {name: uses[id(weight)] for name, weight in model.named_parameters() if id(weight) in uses}
    for name, times in applied.items():
        if len(set(times)) > 1:
            raise ModelError(f"rows of {name!r} are applied {times} times: its weights have different prices")
    return {name: times[0] for name, times in applied.items()}


def _kept(parameters: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """A mask for every matrix-shaped parameter."""
    matrices = {name: weight.detach() for name, weight in parameters.items() if weight.ndim > 1}
    if masks is None:
        return {name: weight != 0 for name, weight in matrices.items()}
    dense = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in matrices.items() if name not in masks}
    return {**dense, **masks}


def _run(model: nn.Module, shape: Sequence[int]) -> _Uses:
    """Run the model on one grey image in eval mode, and count how often each weight is applied."""
    words = "x".join(map(str, shape))
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ModelError(f"images can't have the shape {words}: give channels, height and width, like (3, 32, 32)")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    image = torch.full((1, *shape), 0.5, dtype=like.dtype, device=like.device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # forward may write into them
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), evaluating(model), slow_attention(), _counting(model) as uses:
        try:
            torch.func.functional_call(model, buffers, (image,))
        except Exception as error:  # forward may do anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the model can't run on an image of shape {words}: {reason}") from error
    return uses


@contextmanager
def _counting(model: nn.Module) -> Iterator[_Uses]:
    """Hooks on all layers that are known, taken off again at the end."""
    uses: _Uses = defaultdict(lambda: [0])

    def layer(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, _TRANSPOSED):
            positions = inputs[0].numel() // module.in_channels
        else:
            width = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            positions = output.numel() // width
        uses[id(module.weight)][0] += positions

    def attention(module: Any, inputs: tuple[Any, ...], options: dict[str, Any], _: Any) -> None:
        tensors = dict(zip(("query", "key", "value"), inputs, strict=False)) | options
        positions = [tensors[name].numel() // tensors[name].shape[-1] for name in ("query", "key", "value")]
        if module.in_proj_weight is not None:
            earlier = uses.get(id(module.in_proj_weight), [0, 0, 0])
            uses[id(module.in_proj_weight)] = [old + new for old, new in zip(earlier, positions, strict=True)]
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            for weight, times in zip(weights, positions, strict=True):
                uses[id(weight)][0] += times
        uses[id(module.out_proj.weight)][0] += positions[0]  # used by a function, so that its own hook is not called

    handles = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
            handles.append(module.register_forward_hook(layer))
        elif isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_hook(attention, with_kwargs=True))
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()
