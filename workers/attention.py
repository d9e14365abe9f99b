"""Attention over the KV pool: packed chunks without padding, and single tokens over block tables.

Legend: T tokens of the batch, S single-token segments, Q queries of one chunk, L positions, N query
heads, K key-value heads, H head size, B blocks, P positions per block, M blocks per table.

A batch is a run of tokens: first the chunks, segment after segment, then the single tokens. A chunk
is computed alone, over its own keys and values and, when it is not its sequence's first, over what
is in KV memory. The single tokens of all sequences are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.kernels import attention as native
from workers.kv import LayerKV

QUERY_TILE = 256
"""Queries of a chunk that are masked at once: bounds the mask at QUERY_TILE x L, and what lies
behind a tile is not computed.
"""

MAX_PADDING = 1.25
"""Padded positions per real one in a bucket of `torch_decode_attention`, at most about that."""

MAX_BUCKET_POSITIONS = 32768
"""Positions that are gathered at once: bounds scratch memory."""


class Chunk(NamedTuple):
    """A segment of several tokens: rows [begin, end) of the batch, positions from `start` on.

    `blocks_M` is its block table, None when `start` is 0.
    """

    begin: int
    end: int
    start: int
    blocks_M: Tensor | None


class Bucket(NamedTuple):
    """Single-token segments of similar length, for `torch_decode_attention`.

    Attributes:
        rows_S: which of the segments.
        blocks_SL: block of each position that is read.
        offsets_SL: position within that block.
        visible_S11L: which positions the query sees; None: all.
    """

    rows_S: Tensor
    blocks_SL: Tensor
    offsets_SL: Tensor
    visible_S11L: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Singles:
    """Block tables of the single-token segments, which are the last S rows of the batch.

    Attributes:
        tables_SM: int32; entries beyond a sequence's blocks are 0.
        lengths_S: int32, positions in KV memory, the token's own included.
        lengths: the same on the host.
        block_size: P.
    """

    tables_SM: Tensor
    lengths_S: Tensor
    lengths: Sequence[int]
    block_size: int
    _buckets: dict[tuple[int, bool], list[Bucket]] = field(default_factory=dict)

    def buckets(self, window: int, *, alone: bool) -> list[Bucket]:
        """Segments grouped by length, made once per step and window.

        Args:
            window: positions that a query sees; 0: all.
            alone: one segment a bucket.
        """
        key = (window, alone)
        if key not in self._buckets:
            seen = [min(length, window) if window else length for length in self.lengths]
            groups = group_by_length(seen, alone=alone)
            self._buckets[key] = [self._bucket(rows, seen[rows[-1]], window) for rows in groups]
        return self._buckets[key]

    def _bucket(self, rows: list[int], longest: int, window: int) -> Bucket:
        device = self.tables_SM.device
        rows_S = torch.tensor(rows, device=device)
        lengths_S1 = self.lengths_S[rows_S, None].long()
        first_S1 = (lengths_S1 - window).clamp(min=0) if window else torch.zeros_like(lengths_S1)
        position_SL = lengths_S1 - longest + torch.arange(longest, device=device)
        visible_SL = position_SL >= first_S1
        # Clamped, so that only a sequence's own positions are ever read: others may hold NaN.
        position_SL = position_SL.maximum(first_S1)
        blocks_SL = self.tables_SM[rows_S].long().gather(1, position_SL // self.block_size)
        mask = None if len(rows) == 1 else visible_SL[:, None, None]
        return Bucket(rows_S, blocks_SL, position_SL % self.block_size, mask)


def group_by_length(lengths: Sequence[int], *, alone: bool) -> Iterator[list[int]]:
    """Indices of segments of similar length, each group in ascending order of length."""
    group: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = (len(group) + 1) * lengths[index]
        total += lengths[index]
        if group and (alone or padded > MAX_PADDING * total or padded > MAX_BUCKET_POSITIONS):
            yield group
            group, total = [], lengths[index]
        group.append(index)
    if group:
        yield group


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What attention needs to know of a step. Built once, used by all layers.

    Attributes:
        num_tokens: T.
        kv_rows_R: where keys and values go, from `KVPool.rows`.
        chunks: segments of several tokens.
        singles: single-token segments, if any.
    """

    num_tokens: int
    kv_rows_R: Tensor
    chunks: tuple[Chunk, ...]
    singles: Singles | None


class DecodeAttention(Protocol):
    """Attention of one query per sequence over its history, over block tables."""

    def __call__(
        self, q_SNH: Tensor, kv: LayerKV, singles: Singles, *, scale: float, window: int = 0
    ) -> Tensor:
        """(S, N, H) of the queries' dtype.

        Args:
            q_SNH: queries.
            kv: the layer's memory; the queries' own keys and values are in it.
            singles: block tables and lengths.
            scale: of the scores.
            window: positions that a query sees, its own included; 0: all.
        """
        ...


class Attention:
    """Attention of one model on one device.

    Args:
        deterministic: each segment is computed as if it were alone.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self.scale = head_size**-0.5
        self.deterministic = deterministic
        self.decode: DecodeAttention = partial(torch_decode_attention, alone=deterministic)
        num_groups = num_heads // num_kv_heads
        if native.supports(dtype=dtype, device=device, num_groups=num_groups, head_size=head_size):
            self.decode = native_decode_attention

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        kv: LayerKV,
        plan: AttentionPlan,
        *,
        window: int = 0,
    ) -> Tensor:
        """Write the step's keys and values, then attend. (T, N, H), contiguous."""
        kv.write(plan.kv_rows_R, k_TKH, v_TKH)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for chunk in plan.chunks:
            q, k, v = (x[chunk.begin : chunk.end] for x in (q_TNH, k_TKH, v_TKH))
            out_TNH[chunk.begin : chunk.end] = self._chunk(q, k, v, kv, chunk, window)
        if plan.singles is not None:
            first = plan.num_tokens - len(plan.singles.lengths)
            out_TNH[first:] = self.decode(
                q_TNH[first:], kv, plan.singles, scale=self.scale, window=window
            )
        return out_TNH

    def _chunk(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, chunk: Chunk, window: int
    ) -> Tensor:
        """(Q, N, H) of one chunk."""
        if self.deterministic:  # equal memory alignment, whatever lies before it in the batch
            q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        q_NQH = q.transpose(0, 1)
        if chunk.blocks_M is None:
            k_KLH, v_KLH, first = k.transpose(0, 1), v.transpose(0, 1), 0
        else:
            first = max(0, chunk.start - window + 1) if window else 0
            end = chunk.start + chunk.end - chunk.begin
            k_KLH, v_KLH = kv.read(chunk.blocks_M, first, end)
        out_NQH = prefill_attention(
            q_NQH, k_KLH, v_KLH, start=chunk.start - first, scale=self.scale, window=window
        )
        return out_NQH.transpose(0, 1)


def prefill_attention(
    q_NQH: Tensor, k_KLH: Tensor, v_KLH: Tensor, *, start: int, scale: float, window: int = 0
) -> Tensor:
    """Causal attention of a run of queries whose first one stands at key `start`. (N, Q, H).

    Args:
        q_NQH: queries.
        k_KLH: keys, L = start + Q.
        v_KLH: values.
        start: keys before the first query.
        scale: of the scores.
        window: positions that a query sees, its own included; 0: all.
    """
    num_queries = q_NQH.shape[1]
    attend = partial(_attend, scale=scale)
    if start == 0 and (window == 0 or window >= num_queries):
        return attend(q_NQH, k_KLH, v_KLH, is_causal=True)
    tiles: list[Tensor] = []
    for begin in range(0, num_queries, QUERY_TILE):
        end = min(begin + QUERY_TILE, num_queries)
        first = max(0, start + begin - window + 1) if window else 0
        keys = slice(first, start + end)
        mask_QL = causal_mask(
            range(start + begin - first, start + end - first), window, q_NQH.device
        )
        tiles.append(attend(q_NQH[:, begin:end], k_KLH[:, keys], v_KLH[:, keys], mask=mask_QL))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def causal_mask(positions: range, window: int, device: torch.device) -> Tensor:
    """(Q, L): which keys [0, positions.stop) the queries at these positions see."""
    query_Q1 = torch.arange(positions.start, positions.stop, device=device)[:, None]
    key_L = torch.arange(positions.stop, device=device)
    seen_QL = key_L <= query_Q1
    return seen_QL & (key_L > query_Q1 - window) if window else seen_QL


def _attend(
    q_NQH: Tensor,
    k_KLH: Tensor,
    v_KLH: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    return scaled_dot_product_attention(
        q_NQH[None],
        k_KLH[None],
        v_KLH[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_NQH.shape[0] != k_KLH.shape[0],
    )[0]


def native_decode_attention(
    q_SNH: Tensor, kv: LayerKV, singles: Singles, *, scale: float, window: int = 0
) -> Tensor:
    """`DecodeAttention` by the native kernel: exact lengths, no copy of the history."""
    return native.decode_attention(
        q_SNH.contiguous(),
        kv.k_BKPH,
        kv.v_BKPH,
        singles.tables_SM,
        singles.lengths_S,
        scale=scale,
        window=window,
    )


def torch_decode_attention(
    q_SNH: Tensor,
    kv: LayerKV,
    singles: Singles,
    *,
    scale: float,
    window: int = 0,
    alone: bool = False,
) -> Tensor:
    """`DecodeAttention` by torch: sequences of similar length are gathered and computed together.

    Args:
        q_SNH: queries.
        kv: the layer's memory.
        singles: block tables and lengths.
        scale: of the scores.
        window: positions that a query sees, its own included; 0: all.
        alone: one sequence at a time, so that a result does not depend on the others.
    """
    out_SNH = torch.empty_like(q_SNH, memory_format=torch.contiguous_format)
    for bucket in singles.buckets(window, alone=alone):
        # Indexing around a slice: (S, L, K, H).
        k_SKLH, v_SKLH = (
            pool_BKPH[bucket.blocks_SL, :, bucket.offsets_SL].transpose(1, 2) for pool_BKPH in kv
        )
        out_SN1H = scaled_dot_product_attention(
            q_SNH[bucket.rows_S][:, :, None],
            k_SKLH,
            v_SKLH,
            attn_mask=bucket.visible_S11L,
            scale=scale,
            enable_gqa=q_SNH.shape[1] != k_SKLH.shape[1],
        )
        out_SNH[bucket.rows_S] = out_SN1H[:, :, 0]
    return out_SNH
