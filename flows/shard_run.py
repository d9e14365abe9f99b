"""What became of a run's shards: how large they were, who computed them, how long it took."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.marker import ShardSummary
from storage.shards import Shard

LOCAL_WORKER = "worker-0"
"""The name of the worker of a run that computes in its own process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRun:
    """A shard that a run has committed.

    Attributes:
        index: of the shard.
        num_rows: its rows, those of earlier runs included.
        est_tokens: what the plan thought it would take.
        prompt_tokens: of all its rows.
        completion_tokens: of all its rows.
        workers: who computed it.
        queued_s: seconds from its submission until a worker was given its first rows.
        run_s: seconds from there to its commit.
    """

    index: int
    num_rows: int
    est_tokens: int
    prompt_tokens: int
    completion_tokens: int
    workers: tuple[str, ...]
    queued_s: float
    run_s: float

    @property
    def num_tokens(self) -> int:
        """Of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class _Times:
    """Clock readings of a shard; None for what has not happened."""

    est_tokens: int
    submitted_s: float
    ended_s: float | None = None


class ShardRuns:
    """When the shards of a run were submitted and committed. Thread-safe.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[int, _Times] = {}
        self._lock = threading.Lock()

    def submitted(self, shard: Shard) -> None:
        """A shard was handed to the run."""
        with self._lock:
            self._times[shard.index] = _Times(shard.est_tokens, self._clock())

    def ended(self, index: int) -> None:
        """It was committed, or given up. Only the first call counts."""
        with self._lock:
            times = self._times[index]
            times.ended_s = self._clock() if times.ended_s is None else times.ended_s

    def of(
        self, summary: ShardSummary, *, begun_s: float | None, workers: Sequence[str]
    ) -> ShardRun:
        """What became of a shard that was submitted and has been committed.

        Args:
            summary: its marker.
            begun_s: when a worker was given its first rows; None: all its rows were in parts.
            workers: who had rows of it; "" is this process's own.
        """
        # Whoever waits for a commit may be here before the callback that notes its time.
        self.ended(summary.index)
        times = self._times[summary.index]
        assert times.ended_s is not None
        begun_s = times.ended_s if begun_s is None else begun_s
        return ShardRun(
            index=summary.index,
            num_rows=summary.num_rows,
            est_tokens=times.est_tokens,
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=summary.completion_tokens,
            workers=tuple(name or LOCAL_WORKER for name in workers),
            queued_s=begun_s - times.submitted_s,
            run_s=times.ended_s - begun_s,
        )
