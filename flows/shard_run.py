"""What became of a run's shards: how large they were, who computed them, how long it took."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from storage.marker import ShardSummary
from storage.shards import Shard

LOCAL_WORKER = "worker-0"
"""The name of the only worker of a run without others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRun:
    """A shard that a run has committed.

    Attributes:
        index: of the shard.
        num_rows: its rows, those of earlier runs included.
        est_tokens: what the plan thought it would take.
        prompt_tokens: of all its rows.
        completion_tokens: of all its rows; None: they are encoded, and have none.
        workers: who computed it.
        queued_s: seconds from its submission until its rows were first read.
        run_s: seconds from there to its commit.
        num_partitions: that it has whole; None: the job has no partitions.
    """

    index: int
    num_rows: int
    est_tokens: int
    prompt_tokens: int
    completion_tokens: int | None
    workers: tuple[str, ...]
    queued_s: float
    run_s: float
    num_partitions: int | None = None

    @property
    def num_tokens(self) -> int:
        """Of prompts and completions."""
        return self.prompt_tokens + (self.completion_tokens or 0)


@dataclass(slots=True)
class _Times:
    """Clock readings of a shard; None for what has not happened."""

    est_tokens: int
    submitted_s: float
    started_s: float | None = None
    ended_s: float | None = None
    workers: tuple[str, ...] = ()


class ShardRuns:
    """Times and workers of the shards of a run. Thread-safe.

    Args:
        clock: seconds, monotonic.
        encodes: the rows have no completions.
        partitioned: a shard is made of whole partitions, each with a file.
    """

    def __init__(
        self, *, clock: Callable[[], float], encodes: bool = False, partitioned: bool = False
    ) -> None:
        self._clock = clock
        self._encodes = encodes
        self._partitioned = partitioned
        self._times: dict[int, _Times] = {}
        self._lock = threading.Lock()

    def submitted(self, shard: Shard) -> None:
        """A shard was handed to the run."""
        with self._lock:
            self._times[shard.index] = _Times(shard.est_tokens, self._clock())

    def started(self, index: int, worker: str = "") -> None:
        """A worker, "" for the run's own, has been given rows of it."""
        name = worker or LOCAL_WORKER
        with self._lock:
            times = self._times[index]
            if times.started_s is None:
                times.started_s = self._clock()
            if name not in times.workers:
                times.workers = (*times.workers, name)

    def ended(self, index: int) -> None:
        """It was committed, or given up. Only the first call counts."""
        with self._lock:
            times = self._times[index]
            times.ended_s = self._clock() if times.ended_s is None else times.ended_s

    def of(self, summary: ShardSummary) -> ShardRun:
        """What became of a shard that was submitted and has been committed."""
        # Whoever waits for a commit may be here before the callback that notes its time.
        self.ended(summary.index)
        times = self._times[summary.index]
        assert times.ended_s is not None
        # A shard whose rows were all in parts is never read.
        started_s = times.ended_s if times.started_s is None else times.started_s
        return ShardRun(
            index=summary.index,
            num_rows=summary.num_rows,
            est_tokens=times.est_tokens,
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=None if self._encodes else summary.completion_tokens,
            workers=times.workers or (LOCAL_WORKER,),
            queued_s=started_s - times.submitted_s,
            run_s=times.ended_s - started_s,
            num_partitions=summary.num_files if self._partitioned else None,
        )
