"""Packed texts on a device, and attention over them without padding.

Legend: T tokens of a batch, N query heads, K key-value heads, H head size, B texts of equal length,
L tokens of each, Q queries of a tile.

What is done row by row is done to all T tokens at once. Attention looks beyond its row: texts of
equal length that stand together are one call of torch's attention, which needs no mask then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.encoding import PackedTexts, Places

QUERY_TILE = 256
"""Queries that are masked at once where a token sees its neighbours only: bounds the mask, and keys
out of a tile's reach are not computed.
"""


class Run(NamedTuple):
    """Texts of equal length that stand together: texts [first, last), rows [begin, end)."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def num_texts(self) -> int:
        return self.last - self.first

    @property
    def length(self) -> int:
        """Tokens of each text."""
        return (self.end - self.begin) // self.num_texts


class Reach(NamedTuple):
    """Positions that a token sees before and behind its own; None: all."""

    back: int | None
    ahead: int | None


EVERYTHING = Reach(None, None)
CAUSAL = Reach(None, 0)


class PackedBatch(NamedTuple):
    """A batch on a device.

    Attributes:
        token_ids_T: int64.
        position_T: int64, of each token in its text.
        longest: tokens of the longest text.
        runs: of texts of equal length.
    """

    token_ids_T: Tensor
    position_T: Tensor
    longest: int
    runs: tuple[Run, ...]


def to_device(texts: PackedTexts, device: torch.device) -> PackedBatch:
    """Bring packed texts to a device."""
    lengths_N = texts.lengths_N
    position_T = np.arange(texts.num_tokens) - np.repeat(texts.begins_N, lengths_N)
    return PackedBatch(
        token_ids_T=torch.from_numpy(texts.token_ids_T.astype(np.int64)).to(device),
        position_T=torch.from_numpy(position_T).to(device),
        longest=int(lengths_N.max(initial=0)),
        runs=find_runs(texts.ends_N),
    )


def find_runs(ends_N: Places) -> tuple[Run, ...]:
    """Runs of texts of equal length, in order; texts without tokens are in none."""
    lengths_N = np.diff(ends_N, prepend=0)
    edges = np.flatnonzero(np.diff(lengths_N, prepend=-1)).tolist()
    stops = [*edges[1:], len(ends_N)]
    runs = (
        Run(first, last, int(ends_N[first] - lengths_N[first]), int(ends_N[last - 1]))
        for first, last in zip(edges, stops, strict=True)
    )
    return tuple(run for run in runs if run.end > run.begin)


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    runs: tuple[Run, ...],
    *,
    scale: float,
    reach: Reach = EVERYTHING,
) -> Tensor:
    """Attention of each text to itself. (T, N, H), contiguous.

    Args:
        q_TNH: queries; as keys and values, they may be views of a fused projection.
        k_TKH: keys.
        v_TKH: values.
        runs: of the batch, see `find_runs`.
        scale: of the scores.
        reach: which positions a token sees.
    """
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    for run in runs:
        q_BNLH, k_BKLH, v_BKLH, out_BNLH = (
            x[run.begin : run.end].unflatten(0, (run.num_texts, -1)).transpose(1, 2)
            for x in (q_TNH, k_TKH, v_TKH, out_TNH)
        )
        _attend_run(q_BNLH, k_BKLH, v_BKLH, out_BNLH, scale, reach)
    return out_TNH


def _attend_run(
    q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, out_BNLH: Tensor, scale: float, reach: Reach
) -> None:
    length = q_BNLH.shape[2]
    back = length if reach.back is None else reach.back
    ahead = length if reach.ahead is None else reach.ahead
    if back >= length - 1 and (ahead >= length - 1 or ahead == 0):
        is_causal = ahead < length - 1
        out_BNLH.copy_(_dense(q_BNLH, k_BKLH, v_BKLH, scale, None, is_causal=is_causal))
        return
    for begin in range(0, length, QUERY_TILE):
        end = min(begin + QUERY_TILE, length)
        first, last = max(0, begin - back), min(length, end + ahead)
        seen_QL = _seen(range(begin, end), range(first, last), back, ahead, q_BNLH.device)
        keys, values = k_BKLH[:, :, first:last], v_BKLH[:, :, first:last]
        tile = _dense(q_BNLH[:, :, begin:end], keys, values, scale, seen_QL, is_causal=False)
        out_BNLH[:, :, begin:end] = tile


def _seen(queries: range, keys: range, back: int, ahead: int, device: torch.device) -> Tensor:
    """(Q, L): which keys the queries see."""
    query_Q1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key_L = torch.arange(keys.start, keys.stop, device=device)
    return (key_L >= query_Q1 - back) & (key_L <= query_Q1 + ahead)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
