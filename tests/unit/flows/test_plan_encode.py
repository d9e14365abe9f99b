"""What is known of an encoding job before it runs, against sums by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.plan_encode import EncodePlan, encode_plan_lines, plan_encoding
from flows.spec import JobSpec
from flows.summary import duration
from flows.superbatches import DEFAULT_COST, MEMORY_SHARE
from schedulers.superbatch import resident_bound
from tests.e2e.jobs import fake_encoder_model

WORDS = 6


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that costs nothing to open, and no memory of earlier jobs."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "flows.plan_encode.open_model", lambda spec: fake_encoder_model(task=spec.task)
    )


def plan(folder: Path, sizes: list[int], *, grouped: bool = True, **fields: Any) -> EncodePlan:
    keys = [f"k{n:04d}" for n, size in enumerate(sizes) for _ in range(size)]
    if not grouped:
        random.Random(3).shuffle(keys)
    texts = [" ".join([f"w{n:05d}"] * WORDS) for n in range(len(keys))]
    source = folder / "in.parquet"
    table = pa.table({"key": pa.array(keys, pa.string()), "text": pa.array(texts, pa.string())})
    pq.write_table(table, source, row_group_size=31)
    spec = {
        "input": str(source), "task": "embed", "prompt": {"column": "text"},
        "partition_by": ["key"], "output": str(folder / "out"),
    }  # fmt: skip
    return plan_encoding(JobSpec.model_validate({**spec, **fields}))


def lines(found: EncodePlan) -> dict[str, str]:
    return dict(encode_plan_lines(found))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grouped", [True, False])
def test_sizes_calls_and_gain_are_as_by_hand(tmp_path: Path, seed: int, grouped: bool) -> None:
    rng = random.Random(seed)
    sizes = [1 + int(rng.lognormvariate(1.0, 1.0)) for _ in range(80)]
    found = plan(tmp_path, sizes, grouped=grouped, encode={"min_texts": 30, "max_texts": 90})
    assert (found.stats.count, found.stats.total) == (80, sum(sizes))
    assert found.stats.cv == pytest.approx(np.std(sizes) / np.mean(sizes))
    assert found.survey.mean_tokens == WORDS
    assert not found.measured
    # As many calls as the least threshold makes, within a partition at each.
    assert sum(sizes) / 90 <= found.num_calls <= sum(sizes) / 30 + 1
    call_s, text_s = DEFAULT_COST.call_s, DEFAULT_COST.token_s * WORDS
    assert (found.cost.call_s, found.cost.text_s) == pytest.approx((call_s, text_s))
    calls_s, rest_s = 80 * call_s, sum(sizes) * text_s + 80 * DEFAULT_COST.partition_s
    assert found.advice is not None
    assert found.advice.phi == pytest.approx(calls_s / (calls_s + rest_s))
    ours_s = found.num_calls * call_s + rest_s
    assert found.advice.speed_up == pytest.approx((calls_s + rest_s) / ours_s)
    assert found.advice.most_speed_up == pytest.approx((calls_s + rest_s) / (call_s + rest_s))
    resident = resident_bound(found.choice.thresholds, max(sizes), 4)
    assert found.choice.resident_texts == resident
    assert f"at most {resident:,} texts in memory" in lines(found)["encode calls"]


def test_only_the_first_rows_count(tmp_path: Path) -> None:
    found = plan(tmp_path, [10, 20, 30], limit=35)
    assert (found.num_rows, found.stats.count, found.stats.total) == (35, 3, 35)
    assert found.stats.largest == 20
    assert lines(found)["rows"] == "35, 8 numbers each"


def test_choices_are_so_many_texts_of_a_row(tmp_path: Path) -> None:
    one = plan(tmp_path, [10, 20])
    two = plan(
        tmp_path, [10, 20], task="classify", model="m", encode={"choices": ["a", "b"]}
    )  # fmt: skip
    assert two.cost.text_s == pytest.approx(2 * one.cost.text_s)
    assert two.cost.call_s == one.cost.call_s


@pytest.mark.parametrize("memory", ["64MiB", "256MiB", "4GiB"])
def test_texts_stay_within_their_share_of_the_memory(tmp_path: Path, memory: str) -> None:
    """Of a model that costs little a call, so that thresholds are small anyway, or are cut."""
    found = plan(tmp_path, [1] * 500 + [3000], engine={"memory": memory})
    share = MEMORY_SHARE * found_bytes(memory)
    assert found.choice.resident_texts * (8 * 4 + 400) <= share


def found_bytes(memory: str) -> int:
    spec = JobSpec.model_validate({"input": "in", "prompt": "p", "engine": {"memory": memory}})
    limit = spec.engine.memory_bytes(psutil.virtual_memory().total)
    assert limit is not None
    return limit


def test_less_memory_makes_smaller_calls(tmp_path: Path) -> None:
    large = plan(tmp_path, [1] * 500 + [3000], engine={"memory": "4GiB"})
    small = plan(tmp_path, [1] * 500 + [3000], engine={"memory": "8MiB"})
    assert small.choice.thresholds.max_texts < large.choice.thresholds.max_texts
    assert small.num_calls > large.num_calls
    assert "Memory allows calls of" in lines(small)["encode calls"]


def test_without_partitions_nothing_is_said_of_them(tmp_path: Path) -> None:
    fields = {"partition_by": [], "shard_tokens": 50 * WORDS, "encode": {"max_texts": 30}}
    found = plan(tmp_path, [400], **fields)
    said = lines(found)
    assert not {"partitions", "phi", "speed-up", "advice"} & set(said)
    # Shards of about 50 rows, and a small last one; each but that in two slices.
    assert 8 <= found.stats.count <= 9
    assert 16 <= found.num_calls <= 17
    assert said["encode calls"] == f"{found.num_calls} of at most 30 texts"
    seconds = found.num_calls * DEFAULT_COST.call_s + 400 * WORDS * DEFAULT_COST.token_s
    assert said["time (estimate)"] == duration(seconds)


def test_an_empty_input_is_planned(tmp_path: Path) -> None:
    for fields in ({}, {"partition_by": []}):
        said = lines(plan(tmp_path, [], **fields))
        assert said["rows"] == "0, 8 numbers each"
        assert said["encode calls"].startswith("0 of")
    assert lines(plan(tmp_path, []))["advice"] == "There is nothing to encode."
