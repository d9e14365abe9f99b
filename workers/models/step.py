"""From a batch of segments to what a model needs to know of it: integers, built once per step.

Legend: G segments, T tokens, S sampled rows, M blocks per table, R rows of KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention import AttentionPlan, Chunk, Singles
from workers.backends.base import Batch, Segment
from workers.errors import InternalError
from workers.kv import KVPool
from workers.sequence import Sequence

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One batch as integers. Segments of several tokens come first.

    Attributes:
        token_ids_T: of all segments, one after another.
        position_T: of each token in its sequence.
        slots_T: where its keys and values go: block times block size plus the position in it.
        sampled_S: the rows after which a token is drawn.
        ends_G: row behind each segment.
        counts_G: tokens of each segment.
        starts_G: position of its first token.
        tables_GM: its blocks, filled up with 0.
        num_chunks: segments of several tokens.
    """

    token_ids_T: Integers
    position_T: Integers
    slots_T: Integers
    sampled_S: Integers
    ends_G: Integers
    counts_G: Integers
    starts_G: Integers
    tables_GM: Integers
    num_chunks: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


def lay_out(batch: Batch, block_size: int) -> StepLayout:
    """Count a batch through."""
    segments = batch.segments
    counts_G = _integers([segment.num_tokens for segment in segments])
    starts_G = _integers([segment.start for segment in segments])
    ends_G = counts_G.cumsum()
    num_chunks = int((counts_G > 1).sum())
    if (counts_G[:num_chunks] < 2).any():
        raise InternalError(f"chunks must come first in a batch; the lengths are {counts_G}")
    num_tokens = int(ends_G[-1])
    owner_T = np.repeat(np.arange(len(segments)), counts_G)
    position_T = np.arange(num_tokens) + (starts_G - ends_G + counts_G)[owner_T]
    tables_GM = _block_tables(segments, starts_G + counts_G, block_size)
    blocks_T = tables_GM[owner_T, position_T // block_size]
    sampled = [row for row, segment in enumerate(segments) if segment.sample]
    return StepLayout(
        token_ids_T=_token_ids(segments, num_tokens),
        position_T=position_T,
        slots_T=blocks_T * block_size + position_T % block_size,
        sampled_S=ends_G[sampled] - 1,
        ends_G=ends_G,
        counts_G=counts_G,
        starts_G=starts_G,
        tables_GM=tables_GM,
        num_chunks=num_chunks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch as tensors on a device.

    Attributes:
        token_ids_T: int64.
        position_T: int64, of each token in its sequence.
        last_position: the largest of them.
        sampled_S: int64, the rows after which a token is drawn.
        attention: where keys and values go and come from.
    """

    token_ids_T: Tensor
    position_T: Tensor
    last_position: int
    sampled_S: Tensor
    attention: AttentionPlan


def build_step(layout: StepLayout, pool: KVPool, device: torch.device) -> Step:
    """Bring a layout to the device."""
    on_device = _Sender(device)
    first = layout.num_chunks
    rows_R = pool.rows(layout.slots_T // pool.block_size, layout.slots_T % pool.block_size)
    return Step(
        token_ids_T=on_device(layout.token_ids_T),
        position_T=on_device(layout.position_T),
        last_position=int(layout.position_T.max()),
        sampled_S=on_device(layout.sampled_S),
        attention=AttentionPlan(
            num_tokens=layout.num_tokens,
            kv_rows_R=on_device(rows_R),
            chunks=_chunks(layout, on_device),
            singles=_singles(
                layout.tables_GM[first:], layout.starts_G[first:] + 1, pool, on_device
            ),
        ),
    )


class _Sender:
    """Moves arrays to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _integers(items: Seq[int]) -> Integers:
    return np.array(items, dtype=np.int64)


def _token_ids(segments: Seq[Segment[Sequence]], num_tokens: int) -> Integers:
    runs = (s.seq.token_ids[s.start : s.start + s.num_tokens] for s in segments)
    return np.fromiter(chain.from_iterable(runs), dtype=np.int64, count=num_tokens)


def _block_tables(
    segments: Seq[Segment[Sequence]], lengths_G: Integers, block_size: int
) -> Integers:
    """Block tables as rows of one array, filled up with 0, each as long as its segment needs."""
    needed_G = -(-lengths_G // block_size)
    tables_GM = np.zeros((len(segments), int(needed_G.max())), dtype=np.int64)
    filled_GM = np.arange(tables_GM.shape[1]) < needed_G[:, None]
    runs = (s.block_table[:n] for s, n in zip(segments, needed_G.tolist(), strict=True))
    flat = np.fromiter(chain.from_iterable(runs), dtype=np.int64)
    if len(flat) != needed_G.sum():
        raise InternalError(f"block tables hold {len(flat)} blocks; {needed_G.sum()} are needed")
    tables_GM[filled_GM] = flat
    return tables_GM


def _chunks(layout: StepLayout, on_device: _Sender) -> tuple[Chunk, ...]:
    counts, starts, ends = (
        array[: layout.num_chunks].tolist()
        for array in (layout.counts_G, layout.starts_G, layout.ends_G)
    )
    return tuple(
        Chunk(
            begin=end - count,
            end=end,
            start=start,
            blocks_M=on_device(table_M) if start else None,
        )
        for count, start, end, table_M in zip(counts, starts, ends, layout.tables_GM, strict=False)
    )


def _singles(
    tables_SM: Integers, lengths_S: Integers, pool: KVPool, on_device: _Sender
) -> Singles | None:
    if not len(lengths_S):
        return None
    num_blocks = -(-int(lengths_S.max()) // pool.block_size)
    return Singles(
        tables_SM=on_device(np.ascontiguousarray(tables_SM[:, :num_blocks], dtype=np.int32)),
        lengths_S=on_device(lengths_S.astype(np.int32)),
        lengths=lengths_S.tolist(),
        block_size=pool.block_size,
    )
