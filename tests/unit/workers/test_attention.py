"""Attention against a brute-force oracle: one query, one head, one key at a time."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workers import attention
from workers.attention import (
    Attention,
    Singles,
    causal_mask,
    group_by_length,
    native_decode_attention,
    prefill_attention,
    torch_decode_attention,
)
from workers.backends.base import Batch, Segment
from workers.kernels import attention as native
from workers.kv import KVPool
from workers.models.step import build_step, lay_out

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64


def oracle(q_NH, k_LKH, v_LKH, window=0):
    """Attention of the query at the last of L positions, in float64. (N, H)"""
    length, num_kv_heads, head_size = k_LKH.shape
    groups = len(q_NH) // num_kv_heads
    first = max(0, length - window) if window else 0
    out_NH = torch.zeros_like(q_NH)
    for head in range(len(q_NH)):
        keys, values = (x[first:, head // groups].double() for x in (k_LKH, v_LKH))
        weights = torch.softmax(keys @ q_NH[head].double() / head_size**0.5, 0)
        out_NH[head] = (weights @ values).to(q_NH.dtype)
    return out_NH


def make_pool(num_kv_heads: int, head_size: int) -> KVPool:
    pool = KVPool(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=num_kv_heads,
        block_size=BLOCK_SIZE,
        head_size=head_size,
        dtype=torch.float32,
        device=CPU,
    )
    for tensor in pool.layers[0]:
        tensor.fill_(float("nan"))  # what was never written must never be read
    return pool


def fill(pool: KVPool, table: list[int], k_LKH: torch.Tensor, v_LKH: torch.Tensor) -> None:
    """Write a history position by position."""
    for position in range(len(k_LKH)):
        block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        pool.layers[0].k_BKPH[block, :, offset] = k_LKH[position]
        pool.layers[0].v_BKPH[block, :, offset] = v_LKH[position]


def scattered_tables(lengths: list[int], rng: torch.Generator) -> list[list[int]]:
    free = torch.randperm(NUM_BLOCKS, generator=rng).tolist()
    needs = [-(-length // BLOCK_SIZE) for length in lengths]
    return [[free.pop() for _ in range(need)] for need in needs]


def make_singles(tables: list[list[int]], lengths: list[int]) -> Singles:
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    return Singles(
        tables_SM=torch.tensor(padded, dtype=torch.int32),
        lengths_S=torch.tensor(lengths, dtype=torch.int32),
        lengths=lengths,
        block_size=BLOCK_SIZE,
    )


@settings(deadline=None, max_examples=60)
@given(
    start=st.integers(0, 20),
    num_queries=st.integers(1, 20),
    window=st.integers(0, 24),
    groups=st.integers(1, 3),
    tile=st.sampled_from([3, 8, 256]),
)
def test_prefill_attention_equals_the_oracle(start, num_queries, window, groups, tile) -> None:
    rng = torch.Generator().manual_seed(start * 1000 + num_queries * 31 + window)
    length, num_kv_heads, head_size = start + num_queries, 2, 8
    k, v = (torch.randn(length, num_kv_heads, head_size, generator=rng) for _ in range(2))
    q = torch.randn(num_queries, groups * num_kv_heads, head_size, generator=rng)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_TILE", tile)
        got = prefill_attention(*heads_first, start=start, scale=head_size**-0.5, window=window)
    for at in range(num_queries):
        end = start + at + 1
        want = oracle(q[at], k[:end], v[:end], window)
        assert (got[:, at] - want).abs().max() < 1e-5


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    window=st.integers(0, 33),
    groups=st.integers(1, 3),
    kind=st.sampled_from(["buckets", "alone", "native"]),
)
def test_decode_attention_equals_the_oracle(lengths, window, groups, kind) -> None:
    rng = torch.Generator().manual_seed(sum(lengths) * 100 + window)
    num_kv_heads, head_size = 2, 16
    tables = scattered_tables(lengths, rng)
    pool = make_pool(num_kv_heads, head_size)
    q = torch.randn(len(lengths), groups * num_kv_heads, head_size, generator=rng)
    histories = []
    for table, length in zip(tables, lengths, strict=True):
        k, v = (torch.randn(length, num_kv_heads, head_size, generator=rng) for _ in range(2))
        fill(pool, table, k, v)
        histories.append((k, v))
    decode = {
        "buckets": torch_decode_attention,
        "alone": partial(torch_decode_attention, alone=True),
        "native": native_decode_attention,
    }[kind]
    if kind == "native":
        assume(native.supports(dtype=q.dtype, device=CPU, num_groups=groups, head_size=head_size))
    got = decode(
        q, pool.layers[0], make_singles(tables, lengths), scale=head_size**-0.5, window=window
    )
    for row, (k, v) in enumerate(histories):
        assert (got[row] - oracle(q[row], k, v, window)).abs().max() < 1e-5


@settings(deadline=None, max_examples=40)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 14)), min_size=1, max_size=5),
    window=st.sampled_from([0, 1, 5, 40]),
    deterministic=st.booleans(),
)
def test_a_packed_batch_equals_the_oracle(pieces, window, deterministic) -> None:
    """Segments (start, number of tokens) in one call, over what is in KV memory already."""
    pieces = sorted(pieces, key=lambda piece: piece[1] == 1)
    lengths = [start + count for start, count in pieces]
    rng = torch.Generator().manual_seed(sum(lengths) * 10 + window)
    num_heads, num_kv_heads, head_size = 4, 2, 16
    tables, pool = scattered_tables(lengths, rng), make_pool(num_kv_heads, head_size)
    histories = []
    for table, (start, _), length in zip(tables, pieces, lengths, strict=True):
        k, v = (torch.randn(length, num_kv_heads, head_size, generator=rng) for _ in range(2))
        fill(pool, table, k[:start], v[:start])
        histories.append((k, v))
    new = [slice(start, start + count) for start, count in pieces]
    k, v = (
        torch.cat([history[kind][part] for history, part in zip(histories, new, strict=True)])
        for kind in range(2)
    )
    q = torch.randn(len(k), num_heads, head_size, generator=rng)
    attend = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=torch.float32,
        device=CPU,
        deterministic=deterministic,
    )
    plan = build_step(lay_out(make_batch(pieces, tables), pool.block_size), pool, CPU).attention
    got = attend(q, k, v, pool.layers[0], plan, window=window)
    row = 0
    for (start, count), (k, v) in zip(pieces, histories, strict=True):
        for end in range(start + 1, start + count + 1):
            want = oracle(q[row], k[:end], v[:end], window)
            assert (got[row] - want).abs().max() < 1e-5
            row += 1
    assert row == len(got)


def make_batch(pieces: list[tuple[int, int]], tables: list[list[int]]) -> Batch:
    return Batch(
        tuple(
            Segment(SimpleNamespace(token_ids=[7] * (start + count)), start, count, table, True)
            for (start, count), table in zip(pieces, tables, strict=True)
        )
    )


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_mask_is_causal_and_slides(window) -> None:
    mask = causal_mask(range(2, 6), window, CPU)
    for row, position in enumerate(range(2, 6)):
        for key in range(6):
            sees = key <= position and (not window or position - key < window)
            assert bool(mask[row, key]) == sees


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_groups_cover_all_and_pad_little(lengths) -> None:
    groups = list(group_by_length(lengths, alone=False))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert longest == lengths[group[-1]]
        real = sum(lengths[index] for index in group)
        assert len(group) * longest <= attention.MAX_PADDING * real
        assert len(group) == 1 or len(group) * longest <= attention.MAX_BUCKET_POSITIONS


def test_alone_means_one_segment_a_group() -> None:
    assert list(group_by_length([5, 5, 2], alone=True)) == [[2], [0], [1]]


def test_a_pool_takes_memory_only_when_written() -> None:
    """2 GiB of KV memory on any machine, of which a few kilobytes are touched."""
    pool = KVPool(
        num_layers=1,
        num_blocks=1 << 14,
        num_kv_heads=8,
        block_size=32,
        head_size=128,
        dtype=torch.bfloat16,
        device=CPU,
    )
    before = resident_bytes()
    pool.layers[0].k_BKPH[1 << 13] = 1
    assert pool.layers[0].k_BKPH[1 << 13].sum() == 8 * 32 * 128
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss
