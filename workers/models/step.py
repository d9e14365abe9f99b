"""From a batch of segments to a model's step: all that is integers, built once per step.

Legend: G segments, T tokens, S single-token segments, M blocks per table, R rows of KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention import AttentionPlan, Chunk, Singles
from workers.backends.base import Batch, Segment
from workers.errors import InternalError
from workers.kv import KVPool
from workers.models.decoder import Step
from workers.sequence import Sequence

Integers = NDArray[np.int64]


def build_step(batch: Batch, pool: KVPool, device: torch.device) -> Step:
    """Everything that the model needs to know of a batch, on the device."""
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
    tables_GM = _block_tables(segments, starts_G + counts_G, pool.block_size)
    blocks_T = tables_GM[owner_T, position_T // pool.block_size]
    rows_R = pool.rows(blocks_T, position_T % pool.block_size)
    sampled = [row for row, segment in enumerate(segments) if segment.sample]
    on_device = _Sender(device)
    return Step(
        token_ids_T=on_device(_token_ids(segments, num_tokens)),
        position_T=on_device(position_T),
        last_position=int(position_T.max()),
        sampled_S=on_device(ends_G[sampled] - 1),
        attention=AttentionPlan(
            num_tokens=num_tokens,
            kv_rows_R=on_device(rows_R),
            chunks=_chunks(segments[:num_chunks], tables_GM, ends_G, on_device),
            singles=_singles(tables_GM[num_chunks:], starts_G[num_chunks:] + 1, pool, on_device),
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


def _chunks(
    segments: Seq[Segment[Sequence]], tables_GM: Integers, ends_G: Integers, on_device: _Sender
) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(
            begin=end - segment.num_tokens,
            end=end,
            start=segment.start,
            blocks_M=on_device(table_M) if segment.start else None,
        )
        for segment, table_M, end in zip(segments, tables_GM, ends_G.tolist(), strict=False)
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
