"""Progress of a run: fed with counts, told in log lines, snapshots and hooks.

Theory of operation. The threads of a run call `add_rows` and `add_step`; both only count, under one
lock. `tick`, called by a thread of `running()` every second, decides what is due: a line every
`interval_s` (C49), a heartbeat when nothing has finished for `stall_s` (C51), and the hooks, which
are how Prefect artifacts and other listeners learn of it. Time comes from the injected clock only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flows.summary import BAD_STATUSES, duration
from storage.marker import Tally

WINDOW_S = 30.0
"""Rates are taken over that long."""

ENCODE = "encode"
"""The phase of jobs that encode."""

STALL_S = 60.0
"""A run in which no row finishes for that long says so."""


class RowLike(Protocol):
    """What is counted of a result row; `storage.results.ResultRow` has it."""

    @property
    def status(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class StepLike(Protocol):
    """What is counted of an engine step; `workers.request.StepRecord` has it."""

    @property
    def phase(self) -> str: ...
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_decode_tokens(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a run stands at one instant.

    Attributes:
        phase: what is going on: `loading the model`, or the engine's kind of step.
        total_rows: rows of the job; None before they are counted.
        done_rows: rows with a result, those of earlier runs included.
        by_status: the same by status.
        completion_tokens: of the rows that this run has finished.
        in_flight: sequences that hold KV memory.
        waiting: sequences that wait for it.
        rows_per_s: over the last seconds.
        tokens_per_s: generated tokens, over the last seconds.
        prefill_tokens_per_s: prompt tokens computed, over the last seconds.
        eta_s: seconds to the end at this run's pace; None when unknown.
        elapsed_s: since the start of the run.
        since_finished_s: since a row finished (or since the start of the rows).
    """

    phase: str
    total_rows: int | None
    done_rows: int
    by_status: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    in_flight: int
    waiting: int
    rows_per_s: float
    tokens_per_s: float
    prefill_tokens_per_s: float
    eta_s: float | None
    elapsed_s: float
    since_finished_s: float

    @property
    def fraction(self) -> float:
        """Share of the rows that are done, 0 to 1."""
        return self.done_rows / self.total_rows if self.total_rows else 0.0

    def line(self) -> str:
        """The log line of a run without a terminal."""
        if self.total_rows is None:
            return f"{self.phase}: {duration(self.elapsed_s)} so far"
        percent = f" ({self.fraction:.1%})" if self.total_rows else ""
        bad = sum(self.by_status.get(status, 0) for status in BAD_STATUSES)
        faults = f", {bad} bad" if bad else ""
        eta = "unknown" if self.eta_s is None else duration(self.eta_s)
        head = f"{self.phase}: {self.done_rows}/{self.total_rows} rows{percent}{faults}"
        if self.phase == ENCODE:
            return f"{head}, {self.encode_speed}, ETA {eta}"
        return (
            f"{head}, {self.completion_tokens} tokens, {self.tokens_per_s:.1f} tok/s "
            f"(prompts {self.prefill_tokens_per_s:.0f} tok/s), ETA {eta}, "
            f"in flight {self.in_flight}, waiting {self.waiting}"
        )

    @property
    def encode_speed(self) -> str:
        """Of a job that encodes: it generates nothing."""
        return f"{self.rows_per_s:,.0f} rows/s, {self.prefill_tokens_per_s:,.0f} tok/s"


class _Sample(NamedTuple):
    """Totals at one instant, for rates."""

    at_s: float
    rows: int
    tokens: int
    prefill_tokens: int


class _Rates(NamedTuple):
    """Per second, over the window."""

    rows: float
    tokens: float
    prefill_tokens: float


@dataclass(slots=True)
class _Counts:
    """The totals of a run. `Progress` owns them, under its lock."""

    phase: str = "starting"
    total_rows: int | None = None
    earlier_rows: int = 0
    by_status: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    completion_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    waiting: dict[str, int] = field(default_factory=dict[str, int])
    finished_s: float | None = None
    rows_started_s: float | None = None


class Progress:
    """Counts what a run does and says so. Thread-safe.

    Args:
        clock: seconds, monotonic.
        write: takes a line for the log; None: lines go nowhere (hooks still run).
        interval_s: seconds between log lines.
        stall_s: seconds without a finished row after which a line says so.
        hooks: called with a snapshot at every `tick`.

    Example:
        >>> progress = Progress(write=print)
        >>> with progress.running():
        ...     progress.start(total_rows=10)
        ...     progress.add_rows(rows)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] | None = None,
        interval_s: float = 5.0,
        stall_s: float = STALL_S,
        hooks: Sequence[Callable[[Snapshot], None]] = (),
    ) -> None:
        self._clock = clock
        self._write = write
        self._interval_s = interval_s
        self._stall_s = stall_s
        self.hooks: list[Callable[[Snapshot], None]] = list(hooks)
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._samples: deque[_Sample] = deque()
        self._started_s = clock()
        self._line_due_s = self._started_s + interval_s
        self._stall_said_s: float | None = None

    def set_phase(self, phase: str) -> None:
        """Say what is going on, in a word or two; shown at once when lines are written."""
        with self._lock:
            self._counts.phase = phase
        self._say(phase)

    def start(self, *, total_rows: int, earlier: Mapping[str, int] | None = None) -> None:
        """Rows are about to be worked on; `earlier` counts those that already have a result."""
        with self._lock:
            counts = self._counts
            counts.phase = "running"
            counts.total_rows = total_rows
            counts.by_status.update(earlier or {})
            counts.earlier_rows = counts.by_status.total()
            counts.rows_started_s = counts.finished_s = self._clock()
            self._sample()

    def add_counts(self, rows: Tally) -> None:
        """As `add_rows`, counted already."""
        with self._lock:
            counts = self._counts
            counts.by_status.update(rows.by_status)
            counts.prompt_tokens += rows.prompt_tokens
            counts.completion_tokens += rows.completion_tokens
            counts.finished_s = self._clock()
            self._stall_said_s = None

    def add_rows(self, rows: Iterable[RowLike]) -> None:
        """Rows that got their result."""
        with self._lock:
            counts = self._counts
            before = counts.by_status.total()
            for row in rows:
                counts.by_status[row.status] += 1
                counts.prompt_tokens += row.prompt_tokens
                counts.completion_tokens += row.completion_tokens
            if counts.by_status.total() > before:
                counts.finished_s = self._clock()
                self._stall_said_s = None

    def add_step(self, step: StepLike, worker: str = "") -> None:
        """A step that a worker's engine has executed."""
        with self._lock:
            counts = self._counts
            counts.phase = step.phase
            counts.generated_tokens += step.num_decode_tokens
            counts.prefill_tokens += step.num_prefill_tokens
            counts.in_flight[worker] = step.num_running
            counts.waiting[worker] = step.num_waiting

    def snapshot(self) -> Snapshot:
        """Where the run stands now."""
        with self._lock:
            return self._snapshot()

    def tick(self) -> None:
        """Write what is due and call the hooks. Called about once a second."""
        with self._lock:
            self._sample()
            snapshot = self._snapshot()
            lines = [*self._progress_line(snapshot), *self._stall_line(snapshot)]
        for line in lines:
            self._say(line)
        for hook in self.hooks:
            hook(snapshot)

    @contextmanager
    def running(self, *, every_s: float = 1.0) -> Generator[Progress]:
        """Tick in a thread of its own while the block runs, and once more at its end."""
        ended = threading.Event()

        def tick_until_ended() -> None:
            while not ended.wait(every_s):
                self.tick()

        thread = threading.Thread(target=tick_until_ended, name="progress", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()
            self.tick()

    def _say(self, line: str) -> None:
        if self._write is not None:
            self._write(line)

    def _sample(self) -> None:
        now_s, counts = self._clock(), self._counts
        tokens = max(counts.generated_tokens, counts.completion_tokens)
        rows = counts.by_status.total()
        self._samples.append(_Sample(now_s, rows, tokens, counts.prefill_tokens))
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()

    def _snapshot(self) -> Snapshot:
        now_s, counts = self._clock(), self._counts
        rates = self._rates()
        finished_s = self._started_s if counts.finished_s is None else counts.finished_s
        return Snapshot(
            phase=counts.phase,
            total_rows=counts.total_rows,
            done_rows=counts.by_status.total(),
            by_status=dict(counts.by_status),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            in_flight=sum(counts.in_flight.values()),
            waiting=sum(counts.waiting.values()),
            rows_per_s=rates.rows,
            tokens_per_s=rates.tokens,
            prefill_tokens_per_s=rates.prefill_tokens,
            eta_s=self._eta_s(now_s),
            elapsed_s=now_s - self._started_s,
            since_finished_s=now_s - finished_s,
        )

    def _rates(self) -> _Rates:
        if len(self._samples) < 2:
            return _Rates(0.0, 0.0, 0.0)
        first, last = self._samples[0], self._samples[-1]
        span_s = max(last.at_s - first.at_s, 1e-9)
        return _Rates(
            (last.rows - first.rows) / span_s,
            (last.tokens - first.tokens) / span_s,
            (last.prefill_tokens - first.prefill_tokens) / span_s,
        )

    def _eta_s(self, now_s: float) -> float | None:
        """At the pace of this run as a whole: steadier than the window's."""
        counts = self._counts
        if counts.total_rows is None or counts.rows_started_s is None:
            return None
        done = counts.by_status.total()
        fresh = done - counts.earlier_rows
        if done >= counts.total_rows:
            return 0.0
        if fresh <= 0 or now_s <= counts.rows_started_s:
            return None
        return (counts.total_rows - done) * (now_s - counts.rows_started_s) / fresh

    def _progress_line(self, snapshot: Snapshot) -> Iterator[str]:
        now_s = self._clock()
        if now_s >= self._line_due_s:
            self._line_due_s = now_s + self._interval_s
            yield snapshot.line()

    def _stall_line(self, snapshot: Snapshot) -> Iterator[str]:
        now_s, counts = self._clock(), self._counts
        if counts.rows_started_s is None or snapshot.since_finished_s < self._stall_s:
            return
        if snapshot.done_rows == snapshot.total_rows:
            return
        if self._stall_said_s is not None and now_s < self._stall_said_s + self._stall_s:
            return
        self._stall_said_s = now_s
        yield (
            f"no row finished for {snapshot.since_finished_s:.0f} s, "
            f"in flight = {snapshot.in_flight}"
        )
