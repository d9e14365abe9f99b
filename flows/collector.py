"""From results to committed rows: the only thread of a run that writes.

It detokenises, hands result rows to the shard writers, checkpoints every few seconds, commits a
shard when its last row has come, and keeps the telemetry. So nothing of this is on the engine's
path, and every table on disk has one writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from flows.feeder import Settled
from flows.queues import Outbox, RowRef
from storage.ledger import ShardSummary, ShardWriter
from storage.results import ResultRow
from storage.shards import Shard
from workers.request import Result, StepRecord


class Answered(NamedTuple):
    """A row that came back from the engine."""

    ref: RowRef
    result: Result


class Decoder(Protocol):
    """The part of a tokenizer that the collector needs."""

    def decode_batch(self, token_ids: Sequence[Sequence[int]]) -> list[str]: ...


@dataclass(slots=True)
class OpenShard:
    """A shard between its submission and its commit. The collector owns it."""

    shard: Shard
    writer: ShardWriter
    num_missing: int
    committed: Future[ShardSummary]
    has_new_rows: bool = False


class Telemetry(Protocol):
    """Where step records go."""

    def add(self, record: dict[str, object]) -> None: ...
    def flush(self) -> None: ...


class Collector:
    """Settles rows, checkpoints and commits. `run` is the body of a thread.

    Args:
        outbox: what the feeder and the engine send: `Settled`, `Answered`, `StepRecord`.
        to_rows: answered and settled rows to result rows, a batch at a time.
        checkpoint_s: seconds between checkpoints.
        clock: seconds, monotonic.
        telemetry: of steps.
        on_rows: told of every batch of result rows.
        on_step: told of every engine step.
        on_commit: told of every committed shard.
    """

    def __init__(
        self,
        *,
        outbox: Outbox[object],
        to_rows: Callable[[Sequence[Answered | Settled]], list[tuple[RowRef, ResultRow]]],
        checkpoint_s: float,
        clock: Callable[[], float],
        telemetry: Telemetry,
        on_rows: Callable[[Sequence[ResultRow]], None],
        on_step: Callable[[StepRecord], None],
        on_commit: Callable[[ShardSummary], None],
    ) -> None:
        self._outbox = outbox
        self._to_rows = to_rows
        self._checkpoint_s = checkpoint_s
        self._clock = clock
        self._telemetry = telemetry
        self._on_rows = on_rows
        self._on_step = on_step
        self._on_commit = on_commit
        self._shards: dict[int, OpenShard] = {}
        self._finishing = False

    def open(self, shard: OpenShard) -> None:
        """Expect rows of a shard. Before the feeder is told of it."""
        self._shards[shard.shard.index] = shard

    def finish(self) -> None:
        """Nothing more will be put: commit or checkpoint what there is, and end."""
        self._finishing = True

    def run(self) -> None:
        """Collect until `finish`."""
        due_s = self._clock() + self._checkpoint_s
        while True:
            finishing = self._finishing  # read before the queue, so that nothing slips between
            self._collect(self._outbox.take(timeout_s=min(0.2, max(0.0, due_s - self._clock()))))
            if self._clock() >= due_s or finishing:
                self._checkpoint()
                due_s = self._clock() + self._checkpoint_s
            if finishing and not len(self._outbox):
                return

    def _collect(self, items: Sequence[object]) -> None:
        rows: list[Answered | Settled] = []
        for item in items:
            if isinstance(item, StepRecord):
                self._telemetry.add(asdict(item))
                self._on_step(item)
            elif isinstance(item, Answered | Settled):
                rows.append(item)
        if rows:
            self._settle(self._to_rows(rows))

    def _settle(self, rows: list[tuple[RowRef, ResultRow]]) -> None:
        for ref, row in rows:
            shard = self._shards[ref.shard_index]
            shard.writer.add(row)
            shard.num_missing -= 1
            shard.has_new_rows = True
        self._on_rows([row for _, row in rows])
        for index in sorted({ref.shard_index for ref, _ in rows}):
            self.commit_if_complete(self._shards[index])

    def commit_if_complete(self, shard: OpenShard) -> None:
        """Commit a shard that has all its rows."""
        if shard.num_missing:
            return
        del self._shards[shard.shard.index]
        summary = shard.writer.close()
        self._on_commit(summary)
        shard.committed.set_result(summary)

    def _checkpoint(self) -> None:
        for shard in self._shards.values():
            if shard.has_new_rows:
                shard.writer.checkpoint()
                shard.has_new_rows = False
        self._telemetry.flush()
