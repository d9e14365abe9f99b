"""Attention over the KV pool: chunks of prompts packed without padding, and single tokens over
block tables.

Legend: T tokens of a step, S single-token segments (decodes), N query heads, K key-value heads, G =
    N / K, H head size, B blocks, P positions per block, M blocks per table, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.backends.base import Batch
from workers.kernels import attention as native
from workers.kv import LayerKV


class Chunk(NamedTuple):
    """Tokens `[first, last)` of the step: positions from `start` on of one sequence."""

    first: int
    last: int
    start: int
    blocks_M: Tensor


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a forward pass needs to know of a step, built once for all layers.

    Attributes:
        token_ids_T: int64.
        positions_T: int64.
        block_T: int64, block of each token's slot.
        offset_T: int64, position of it in the block.
        chunks: multi-token segments; they come first in T.
        num_chunk_tokens: their tokens; from there on one token per decode.
        tables_SM: int32, block tables of the decodes, padded with 0.
        lengths_S: int32, positions of each decode, the new token included.
        sampled: indices in T of the tokens whose logits are wanted.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    block_T: Tensor
    offset_T: Tensor
    chunks: tuple[Chunk, ...]
    num_chunk_tokens: int
    tables_SM: Tensor
    lengths_S: Tensor
    sampled: Tensor


def build_step(batch: Batch, *, block_size: int, device: torch.device) -> StepInput:
    """Turn a batch into tensors."""
    segments = batch.segments
    starts = np.array([s.start for s in segments], np.int64)
    counts = np.array([s.num_tokens for s in segments], np.int64)
    ends = counts.cumsum()
    num_chunks = int((counts > 1).sum())
    token_ids: list[int] = []
    for s in segments:
        token_ids += s.seq.token_ids[s.start : s.start + s.num_tokens]
    positions_T = np.arange(int(ends[-1])) + np.repeat(starts - (ends - counts), counts)
    widest = max(len(s.block_table) for s in segments)
    tables = np.zeros((len(segments), widest), np.int32)
    for row, s in enumerate(segments):
        tables[row, : len(s.block_table)] = s.block_table
    segment_T = np.repeat(np.arange(len(segments)), counts)
    block_T = tables[segment_T, positions_T // block_size].astype(np.int64)
    wanted = np.array([s.sample for s in segments], bool)

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepInput(
        token_ids_T=put(np.array(token_ids, np.int64)),
        positions_T=put(positions_T),
        block_T=put(block_T),
        offset_T=put(positions_T % block_size),
        chunks=tuple(
            Chunk(
                first=int(ends[i] - counts[i]),
                last=int(ends[i]),
                start=int(starts[i]),
                blocks_M=put(
                    tables[i, : -(-int(starts[i] + counts[i]) // block_size)].astype(np.int64)
                ),
            )
            for i in range(num_chunks)
        ),
        num_chunk_tokens=int(ends[num_chunks - 1]) if num_chunks else 0,
        tables_SM=put(np.ascontiguousarray(tables[num_chunks:])),
        lengths_S=put((starts[num_chunks:] + 1).astype(np.int32)),
        sampled=put((ends - 1)[wanted]),
    )


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    kv: LayerKV,
    step: StepInput,
    *,
    window: int,
    alone: bool = False,
) -> Tensor:
    """Causal attention of a step's tokens; stores their keys and values first.

    Args:
        q_TNH: queries, rotated.
        k_TKH: keys, rotated.
        v_TKH: values.
        kv: the layer's pool.
        step: see `StepInput`.
        window: positions that a token sees, its own included; 0: all.
        alone: no sequence is padded to another's length (deterministic mode).

    Returns:
        (T, N, H).
    """
    kv.write(step.block_T, step.offset_T, k_TKH, v_TKH)
    out_TNH = torch.empty_like(q_TNH)
    for chunk in step.chunks:
        rows = slice(chunk.first, chunk.last)
        if chunk.start == 0:
            keys, values = k_TKH[rows].transpose(0, 1), v_TKH[rows].transpose(0, 1)
        else:
            keys, values = kv.gather(chunk.blocks_M, chunk.start + chunk.last - chunk.first)
        out_TNH[rows] = chunk_attention(
            q_TNH[rows].transpose(0, 1), keys, values, start=chunk.start, window=window
        ).transpose(0, 1)
    if step.num_chunk_tokens < q_TNH.shape[0]:
        out_TNH[step.num_chunk_tokens :] = decode_attention(
            q_TNH[step.num_chunk_tokens :],
            kv,
            step.tables_SM,
            step.lengths_S,
            window=window,
            bucket=1 if alone else BUCKET_SEQS,
        )
    return out_TNH


def chunk_attention(
    q_NLH: Tensor, k_KLH: Tensor, v_KLH: Tensor, *, start: int, window: int
) -> Tensor:
    """One sequence's chunk over its history and itself.

    Args:
        q_NLH: queries at positions `[start, start + L)`.
        k_KLH: keys at positions `[0, start + L)`.
        v_KLH: values at the same.
        start: position of the first query.
        window: see `attend`.

    Returns:
        (N, L, H).
    """
    groups = q_NLH.shape[0] // k_KLH.shape[0]
    k_NLH, v_NLH = (x.repeat_interleave(groups, 0) if groups > 1 else x for x in (k_KLH, v_KLH))
    num_queries, num_keys = q_NLH.shape[1], k_KLH.shape[1]
    causal = start == 0 and (window == 0 or window >= num_keys)
    mask = None if causal else causal_mask(num_queries, num_keys, window, q_NLH.device)
    return F.scaled_dot_product_attention(
        q_NLH[None], k_NLH[None], v_NLH[None], attn_mask=mask, is_causal=causal
    )[0]


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """True where the last `num_queries` of `num_keys` positions may look."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    seen = key <= query
    return seen & (key > query - window) if window else seen


BUCKET_SEQS = 32
"""Sequences that the torch code pads to a common length."""


def decode_attention(
    q_SNH: Tensor,
    kv: LayerKV,
    tables_SM: Tensor,
    lengths_S: Tensor,
    *,
    window: int,
    bucket: int = BUCKET_SEQS,
) -> Tensor:
    """One query token per sequence over its history, by the native kernel where there is one.

    Args:
        q_SNH: queries.
        kv: the layer's pool.
        tables_SM: int32 block tables.
        lengths_S: int32 positions, the query's own included.
        window: see `attend`.
        bucket: sequences padded to a common length where there is no kernel.

    Returns:
        (S, N, H).
    """
    num_heads, head_size = q_SNH.shape[1:]
    if native.supports(
        dtype=q_SNH.dtype,
        device=q_SNH.device,
        num_groups=num_heads // kv.k_BKPH.shape[1],
        head_size=head_size,
    ):
        return native.decode_attention(
            q_SNH.contiguous(), *kv, tables_SM, lengths_S, scale=head_size**-0.5, window=window
        )
    return torch_decode_attention(q_SNH, kv, tables_SM, lengths_S, window=window, bucket=bucket)


def torch_decode_attention(
    q_SNH: Tensor,
    kv: LayerKV,
    tables_SM: Tensor,
    lengths_S: Tensor,
    *,
    window: int,
    bucket: int = BUCKET_SEQS,
) -> Tensor:
    """As `decode_attention`, in torch: sequences of similar length are gathered and padded
    together.
    """
    out_SNH = torch.empty_like(q_SNH)
    order = torch.argsort(lengths_S)
    block_size = kv.k_BKPH.shape[2]
    for rows in order.split(bucket):
        lengths = lengths_S[rows]
        longest = int(lengths.max())
        blocks = tables_SM[rows, : -(-longest // block_size)].long()
        out_SNH[rows] = _padded_attention(q_SNH[rows], kv, blocks, lengths, longest, window)
    return out_SNH


def _padded_attention(
    q_SNH: Tensor, kv: LayerKV, blocks_SM: Tensor, lengths_S: Tensor, longest: int, window: int
) -> Tensor:
    num_seqs, num_heads, head_size = q_SNH.shape
    num_kv_heads = kv.k_BKPH.shape[1]

    def gather(pool_BKPH: Tensor) -> Tensor:
        picked_SMKPH = pool_BKPH[blocks_SM]
        flat = picked_SMKPH.transpose(1, 2).reshape(num_seqs, num_kv_heads, -1, head_size)
        return flat[:, :, :longest]

    key = torch.arange(longest, device=q_SNH.device)[None, :]
    seen_SL = key < lengths_S[:, None]
    if window:
        seen_SL = seen_SL & (key >= lengths_S[:, None] - window)
    # The query heads of a group are the rows of one small matrix, so keys are not repeated.
    q_SKGH = q_SNH.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_size)
    out_SKGH = F.scaled_dot_product_attention(
        q_SKGH, gather(kv.k_BKPH), gather(kv.v_BKPH), attn_mask=seen_SL[:, None, None, :]
    )
    return out_SKGH.reshape(num_seqs, num_heads, head_size)
