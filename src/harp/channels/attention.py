"""Multi-head attention whose heads need not fill the embedding.

`torch.nn.MultiheadAttention` computes the size of a head from the embedding's, so it can't have fewer heads of the
same size. This module can, has the same parameters by the same names, and is called alike.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention with packed projections of queries, keys and values of the same width."""

    _qkv_same_embed_dim = False  # what a transformer layer asks before it takes a short cut past this module

    def __init__(self, width: int, heads: int, size: int, *, bias: bool, batch_first: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.batch_first, self.dropout = heads, batch_first, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * heads * size, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * heads * size)) if bias else None
        self.out_proj = nn.Linear(heads * size, width, bias)

    @classmethod
    def of(cls, other: nn.MultiheadAttention) -> Self:
        """The same attention, with the same parameters."""
        options = {"bias": other.in_proj_bias is not None, "batch_first": other.batch_first, "dropout": other.dropout}
        made = cls(other.embed_dim, other.num_heads, other.head_dim, **options)
        made.in_proj_weight, made.in_proj_bias = other.in_proj_weight, other.in_proj_bias
        made.out_proj.weight, made.out_proj.bias = other.out_proj.weight, other.out_proj.bias
        return made.train(other.training)

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
        """Attend; weights are not given out."""
        given = [query, key, value] if self.batch_first else [x.transpose(0, 1) for x in (query, key, value)]
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads = [
            F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, w, b in zip(given, weights, biases, strict=True)
        ]
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            padding = torch.zeros(key_padding_mask.shape, dtype=query.dtype, device=query.device)
            padding = padding.masked_fill(key_padding_mask.bool(), float("-inf"))[:, None, None]
            attn_mask = padding if attn_mask is None else attn_mask + padding
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=attn_mask, dropout_p=dropout, is_causal=False)
        answer: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return answer if self.batch_first else answer.transpose(0, 1), None
