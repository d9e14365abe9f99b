"""The thresholds of an encoding job, and the superbatches that they make of its partitions."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.prepare import prepare
from flows.spec import JobSpec
from flows.superbatches import (
    DEFAULT_COST,
    MEMORY_SHARE,
    QUEUE_DEPTH,
    choose,
    encode_memory,
    mean_text_bytes,
    plan_superbatches,
    text_bytes,
)
from schedulers.encode_cost import EncodeCost
from schedulers.sizes import SizeStats
from schedulers.superbatch import Thresholds, count_calls, resident_bound
from storage.partitions import find_partitions
from storage.rows import RowReader
from storage.shards import TokenCost
from workers.backends.fake_encoder import FakeEncoder

COST = EncodeCost.of_tokens(call_s=0.05, token_s=1e-5, mean_tokens=20)
GIB = 2**30


def spec_of(encode: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"input": "in", "task": "embed", "prompt": {"column": "text"}, "encode": encode or {},
         **fields}
    )  # fmt: skip


def chosen(sizes: list[int], memory_bytes: float = GIB, **encode: Any) -> Any:
    return choose(
        spec_of(encode).encode, SizeStats.of(sizes), COST,
        resident_text_bytes=1000, memory_bytes=memory_bytes,
    )  # fmt: skip


SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@settings(max_examples=25)
@given(
    sizes=SIZES,
    least=st.one_of(st.none(), st.integers(1, 500)),
    more=st.one_of(st.none(), st.integers(0, 500)),
    memory=st.sampled_from([1e3, 1e6, 1e9]),
)
def test_what_the_user_gives_is_taken_and_the_rest_goes_with_it(sizes, least, more, memory) -> None:
    most = None if more is None else (least or 1) + more
    choice = chosen(sizes, memory, min_texts=least, max_texts=most)
    found = choice.thresholds
    if least is not None:
        assert found.min_texts == least
    if most is not None:
        assert found.max_texts == most
    if least is None and most is None:
        assert choice.reasons != ("The thresholds are given.",)
    else:
        assert choice.reasons == ("The thresholds are given.",)
    assert choice.resident_texts == resident_bound(found, max(sizes), QUEUE_DEPTH)
    assert 0 <= choice.call_share <= 1


@settings(max_examples=25)
@given(sizes=SIZES, memory=st.integers(10_000, 10**8))
def test_texts_that_may_be_in_memory_fit_into_it(sizes, memory) -> None:
    assert chosen(sizes, memory).resident_texts * 1000 <= memory


def test_calls_that_are_predicted_for_given_thresholds_are_those_of_them() -> None:
    choice = chosen([10] * 1000, min_texts=100, max_texts=300)
    assert choice.num_calls == pytest.approx(100, rel=0.05)
    assert choice.call_share == pytest.approx(5 / (5 + 10_000 * 2e-4), rel=0.05)


@pytest.mark.parametrize(("least", "most"), [(None, 7), (7, None), (5, 9)])
def test_of_one_given_threshold_the_other_follows(least, most) -> None:
    found = chosen([3] * 100, min_texts=least, max_texts=most).thresholds
    assert 1 <= found.min_texts <= found.max_texts


def test_a_resident_text_has_text_tokens_and_vector() -> None:
    base = text_bytes(100, 20, 384)
    assert text_bytes(101, 20, 384) - base == 1
    assert text_bytes(100, 21, 384) - base == 8
    assert text_bytes(100, 20, 385) - base == 4


# -- of a dataset --


def write(path: Path, sizes: list[int], group: int = 53) -> Any:
    keys = [f"k{n:04d}" for n, size in enumerate(sizes) for _ in range(size)]
    texts = [f"{'word ' * (n % 5)}end {n}" for n in range(len(keys))]
    table = pa.table({"key": keys, "text": texts, "other": range(len(keys))})
    pq.write_table(table, path, row_group_size=group, use_dictionary=False)
    return prepare(spec_of(input=str(path), output=str(path.parent / "o"), partition_by=["key"]))


def forms(sizes: list[int], least: int, most: int) -> list[list[int]]:
    """Partitions together, as the paper says it."""
    made: list[list[int]] = []
    open_: list[int] = []
    for index, size in enumerate(sizes):
        held = sum(sizes[n] for n in open_)
        if open_ and (held + size > most):
            made.append(open_)
            open_ = []
        open_ = [*open_, index]
        if sum(sizes[n] for n in open_) >= least:
            made.append(open_)
            open_ = []
    return [*made, open_] if open_ else made


@pytest.mark.parametrize("seed", range(5))
def test_shards_are_whole_partitions_as_the_thresholds_say(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [1 + int(rng.lognormvariate(1.5, 1.3)) for _ in range(90)]
    job = write(tmp_path / "in.parquet", sizes)
    least = rng.randint(1, 40)
    thresholds = Thresholds(least, least + rng.randint(0, 80))
    choice = chosen(sizes, min_texts=thresholds.min_texts, max_texts=thresholds.max_texts)
    tokens = TokenCost(columns=("text",), tokens_per_byte=0.2, tokens_per_row=0.0)
    plan = plan_superbatches(
        job.dataset, find_partitions(job.dataset, ["key"]), choice, COST, tokens
    )
    wanted = forms(sizes, thresholds.min_texts, thresholds.max_texts)
    shards, partitions = plan.planned
    assert [partitions.of(shard.index).num_rows.tolist() for shard in shards] == [
        [sizes[n] for n in members] for members in wanted
    ]
    with_rows = [
        [row.values["other"] for rows in RowReader(job.dataset, ("other",)).rows(s) for row in rows]
        for s in shards
    ]
    ends = np.cumsum([0, *(sum(sizes[n] for n in members) for members in wanted)])
    assert with_rows == [list(range(a, b)) for a, b in pairwise(ends)]
    calls = sum(-(-sum(sizes[n] for n in m) // thresholds.max_texts) for m in wanted)
    assert plan.num_calls == calls == count_calls(sizes, thresholds)
    assert (plan.stats.count, plan.stats.total) == (90, sum(sizes))
    assert plan.advice.calls == calls


def test_mean_bytes_are_of_the_text_columns_only(tmp_path: Path) -> None:
    job = write(tmp_path / "in.parquet", [40, 60])
    texts = pq.read_table(tmp_path / "in.parquet")["text"].to_pylist()
    mean = sum(map(len, texts)) / len(texts)
    assert mean_text_bytes(job.dataset, ("text",)) == pytest.approx(mean + 4, abs=2)  # a length
    assert mean_text_bytes(job.dataset, ("text", "other")) > mean + 8
    assert mean_text_bytes(job.dataset, ()) == 0


def test_an_empty_input_has_no_mean(tmp_path: Path) -> None:
    job = write(tmp_path / "in.parquet", [])
    assert mean_text_bytes(job.dataset, ("text",)) == 0
    plan = plan_superbatches(
        job.dataset, find_partitions(job.dataset, ["key"]), chosen([1]), DEFAULT_COST,
        TokenCost(columns=("text",), tokens_per_byte=0.2, tokens_per_row=0.0),
    )  # fmt: skip
    assert (plan.planned.shards, plan.num_calls, plan.advice.verdict) == ((), 0, "no_texts")


# -- memory of a worker --


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_texts_have_their_share_of_the_memory_and_the_model_the_rest(num_workers: int) -> None:
    info = FakeEncoder(8).info
    spec = spec_of(engine={"memory": "1GiB", "max_batch_tokens": 4096})
    memory = encode_memory(spec, info, num_workers=num_workers)
    assert memory.limit_bytes == GIB // num_workers
    assert memory.max_batch_tokens == 4096
    assert memory.activation_bytes <= (1 - MEMORY_SHARE) * memory.limit_bytes
