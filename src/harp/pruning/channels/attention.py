"""Multi-head attention whose heads need not fill the embedding.

`torch.nn.MultiheadAttention` computes the size of a head from the embedding's, so it can't have fewer heads of the
same size. This module can. It has the same parameters under the same names, and the same call.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.MultiheadAttention):
    """Attention with packed projections of queries, keys and values of the same width."""

    def __init__(self, width: int, heads: int, size: int, *, bias: bool, batch_first: bool, dropout: float) -> None:
        nn.Module.__init__(self)  # not the parent's, which makes other parameters
        self.embed_dim, self.num_heads, self.head_dim = width, heads, size
        self.batch_first, self.dropout = batch_first, dropout
        # A transformer layer reads this to decide on its fast path, which would bypass this module.
        self._qkv_same_embed_dim = False
        self.in_proj_weight = nn.Parameter(torch.empty(3 * heads * size, width))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(3 * heads * size)) if bias else None)
        self.out_proj = nn.modules.linear.NonDynamicallyQuantizableLinear(heads * size, width, bias)

    @classmethod
    def of(cls, other: nn.MultiheadAttention) -> Self:
        """The same attention, with the same parameters."""
        options = {"bias": other.in_proj_bias is not None, "batch_first": other.batch_first, "dropout": other.dropout}
        module = cls(other.embed_dim, other.num_heads, other.head_dim, **options)
        module.in_proj_weight, module.in_proj_bias = other.in_proj_weight, other.in_proj_bias
        module.out_proj.weight, module.out_proj.bias = other.out_proj.weight, other.out_proj.bias
        return module.train(other.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend. The attention weights are not returned."""
        inputs = [query, key, value] if self.batch_first else [x.transpose(0, 1) for x in (query, key, value)]
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads = [
            F.linear(x, w, b).reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        ]
        mask = _additive(attn_mask, query)
        if mask is not None and mask.ndim == 3:
            mask = mask.reshape(-1, self.num_heads, *mask.shape[1:])
        padding = _additive(key_padding_mask, query)
        if padding is not None:
            mask = padding[:, None, None] if mask is None else mask + padding[:, None, None]
        dropout = self.dropout if self.training else 0.0
        q, k, v = heads
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        answer = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        return answer if self.batch_first else answer.transpose(0, 1), None


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask to add to the scores; True in a boolean mask means not to attend."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
