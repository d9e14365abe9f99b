"""Decode attention by the native kernel.

Legend: S sequences, N query heads, K key-value heads, H head size, B blocks, P positions per block,
    M blocks per table.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers import kernels

_NAMES = {torch.float32: "headrace_decode_f32", torch.bfloat16: "headrace_decode_bf16"}
MAX_GROUPS = 64


def supports(*, dtype: torch.dtype, device: torch.device, num_groups: int, head_size: int) -> bool:
    """Whether the kernel can be used: on a CPU, for these shapes, and where it could be built."""
    return (
        device.type == "cpu"
        and dtype in _NAMES
        and head_size % 16 == 0
        and num_groups <= MAX_GROUPS
        and kernels.load() is not None
    )


def decode_attention(
    q_SNH: Tensor,
    k_BKPH: Tensor,
    v_BKPH: Tensor,
    tables_SM: Tensor,
    lengths_S: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of one query token per sequence over its history, in the order of its block table.

    Args:
        q_SNH: queries, contiguous.
        k_BKPH: keys of the whole pool, contiguous.
        v_BKPH: values of the whole pool, contiguous.
        tables_SM: int32, blocks of each sequence.
        lengths_S: int32, positions in KV memory, the query's own included.
        scale: of the scores.
        window: positions that a query sees, its own included; 0: all.

    Returns:
        (S, N, H) of the queries' dtype.
    """
    library = kernels.load()
    assert library is not None
    num_seqs, num_heads, head_size = q_SNH.shape
    _, num_kv_heads, block_size, _ = k_BKPH.shape
    out_SNH = torch.empty_like(q_SNH)
    getattr(library, _NAMES[q_SNH.dtype])(
        *(_pointer(t) for t in (q_SNH, k_BKPH, v_BKPH, tables_SM, lengths_S, out_SNH)),
        num_seqs,
        num_heads,
        num_kv_heads,
        head_size,
        block_size,
        tables_SM.shape[1],
        ctypes.c_float(scale),
        window,
    )
    return out_SNH


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous(), (
        f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    )
    return ctypes.c_void_p(tensor.data_ptr())
