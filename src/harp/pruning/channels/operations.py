"""The operations that `rules.py` has rules for, by kind."""

import torch

aten = torch.ops.aten

MOVES = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.slice,
    aten.select, aten.squeeze, aten.unsqueeze, aten.split, aten.split_with_sizes, aten.unbind, aten.cat, aten.stack,
    aten.flip, aten.roll, aten.repeat, aten.index_select, aten.index, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.channel_shuffle, aten.native_channel_shuffle, aten.unfold, aten._reshape_alias, aten.view_as_real,
    aten.diagonal, aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d,
    aten.replication_pad2d, aten.replication_pad3d, aten.movedim, aten.swapaxes, aten.narrow, aten._reshape_copy,
    aten.tile, aten.rot90, aten.slice_copy,
}  # fmt: skip
PLACED = {  # these depend on the positions of channels
    aten.slice, aten.select, aten.roll, aten.split, aten.split_with_sizes, aten.index, aten.index_select, aten.narrow,
    aten.unbind, aten.unfold, aten.diagonal, aten.slice_copy,
}  # fmt: skip
SPLITS = {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten._reshape_copy}
SAME = {aten._to_copy, aten.detach, aten.alias, aten.contiguous, aten.lift_fresh, aten.clone}
POINTWISE = {
    aten.hardswish, aten.hardswish_, aten._prelu_kernel, aten.prelu, aten.native_dropout, aten.rrelu_with_noise,
}  # fmt: skip
LIKE = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like}
CREATES = {
    aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided, aten.sym_size,
    aten.is_same_size,
}  # fmt: skip
DECIDES = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero}
REDUCTIONS = {
    aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.max, aten.min, aten.linalg_vector_norm,
    aten.logsumexp, aten.norm, aten.var_mean, aten.std_mean,
}  # fmt: skip
BATCH_NORMS = {
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
    aten.cudnn_batch_norm, aten._batch_norm_no_update, aten._batch_norm_with_update, aten.miopen_batch_norm,
    aten.batch_norm,
}  # fmt: skip
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_attention_math, aten.scaled_dot_product_attention, aten._fused_sdp_choice,
}  # fmt: skip
