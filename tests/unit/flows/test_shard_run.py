"""What became of shards: times from submission to commit, tokens from the marker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flows.shard_run import ShardRuns
from storage.marker import ShardSummary
from storage.shards import Shard, Span


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shard(index: int = 3) -> Shard:
    return Shard(index, (Span(0, 0, 0, 10, 0),), 120)


def summary(index: int = 3) -> ShardSummary:
    return ShardSummary(
        index=index, file="", num_rows=10, num_bytes=1, by_status={"ok": 10},
        by_finish_reason={"stop": 10}, prompt_tokens=70, completion_tokens=40,
    )  # fmt: skip


def test_times_are_from_submission_to_first_row_to_commit() -> None:
    clock = Clock()
    runs = ShardRuns(clock=clock)
    runs.submitted(shard())
    clock.now_s = 2.0
    runs.started(3)
    clock.now_s = 7.0
    runs.ended(3)
    clock.now_s = 100.0
    run = runs.of(summary())
    assert (run.queued_s, run.run_s) == (2.0, 5.0)
    assert (run.num_rows, run.est_tokens, run.num_tokens) == (10, 120, 110)
    assert run.workers == ("worker-0",)


def test_a_superbatch_has_partitions_and_no_completions() -> None:
    runs = ShardRuns(clock=Clock(), encodes=True, partitioned=True)
    runs.submitted(shard())
    run = runs.of(replace(summary(), completion_tokens=0, num_files=4))
    assert (run.completion_tokens, run.num_partitions, run.num_tokens) == (None, 4, 70)
    plain = ShardRuns(clock=Clock())
    plain.submitted(shard())
    assert plain.of(summary()).num_partitions is None


def test_a_shard_is_over_when_it_is_asked_for_at_the_latest() -> None:
    clock = Clock()
    runs = ShardRuns(clock=clock)
    runs.submitted(shard())
    runs.started(3)
    clock.now_s = 4.0
    assert runs.of(summary()).run_s == 4.0
    clock.now_s = 9.0
    runs.ended(3)
    assert runs.of(summary()).run_s == 4.0


def test_a_shard_that_was_never_read_took_no_time() -> None:
    clock = Clock()
    runs = ShardRuns(clock=clock)
    runs.submitted(shard())
    clock.now_s = 4.0
    run = runs.of(summary())
    assert (run.queued_s, run.run_s) == (4.0, 0.0)


def test_a_shard_that_was_never_submitted_is_no_shard_of_the_run() -> None:
    with pytest.raises(KeyError):
        ShardRuns(clock=Clock()).of(summary())
