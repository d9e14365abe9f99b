"""From result rows to committed shards: the only thread of a run that writes.

It hands result rows to the shard writers, checkpoints every few seconds, commits a shard when its
last row has come, and keeps the telemetry. So nothing of this is on an engine's path, and every
table on disk has one writer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flows.busy import Work
from flows.fleet.messages import Block, EncodeCall, Rows, Steps
from flows.journal import Journal
from flows.progress import Progress
from flows.queues import Outbox, RowRef
from storage.marker import tally
from storage.results import ResultRow
from storage.shards import Shard
from storage.writer import ShardSummary, ShardWriter
from workers.request import StepRecord

QUEUE_ITEMS = 16
"""That wait to be written, at most: whoever sends more waits."""

MAX_BUFFERED_ROWS = 2000
"""Rows of a shard that wait in memory for a checkpoint, however fast they come."""


@dataclass(frozen=True, slots=True)
class FromWorker:
    """What a worker has said, on its way to the files.

    Attributes:
        worker: its name; "" where there is only one.
        event: rows, a block of them or steps, or what its threads have worked on.
    """

    worker: str
    event: Rows | Block | Steps | tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A row of a telemetry table of the run's own.

    Attributes:
        table: its name.
        values: by column.
    """

    table: str
    values: dict[str, Any]


Item = FromWorker | Note
"""What travels to the collector."""


@dataclass(slots=True)
class OpenShard:
    """A shard between its submission and its commit. The collector owns it once it is opened."""

    shard: Shard
    writer: ShardWriter
    committed: Future[ShardSummary]


class Collector:
    """Settles rows, checkpoints and commits. `run` is the body of a thread.

    Args:
        outbox: what the coordinator sends.
        checkpoint_s: seconds between checkpoints.
        clock: seconds, monotonic.
        journal: the output.
        progress: told of rows and steps.
    """

    def __init__(
        self,
        *,
        outbox: Outbox[Item],
        checkpoint_s: float,
        clock: Callable[[], float],
        journal: Journal,
        progress: Progress,
    ) -> None:
        self._outbox = outbox
        self._checkpoint_s = checkpoint_s
        self._clock = clock
        self._journal = journal
        self._meter = journal.meter
        self._progress = progress
        self._shards: dict[int, OpenShard] = {}
        self._opened: list[OpenShard] = []
        self._lock = threading.Lock()
        self._finishing = False

    def open(self, shard: OpenShard) -> None:
        """Expect rows of a shard. Called before any worker is told of it; from any thread."""
        with self._lock:
            self._opened.append(shard)

    def finish(self) -> None:
        """Nothing more will be put: commit or checkpoint what there is, and end."""
        self._finishing = True

    def run(self) -> None:
        """Collect until `finish`; afterwards nobody can put any more, and nobody waits for room."""
        try:
            self._run()
        finally:
            self._outbox.stop()

    def _run(self) -> None:
        due_s = self._clock() + self._checkpoint_s
        while True:
            finishing = self._finishing  # read before the queue, so that nothing slips between
            items = self._outbox.take(timeout_s=min(0.2, due_s - self._clock()))
            self._take_opened()
            self._collect(items)
            if self._clock() >= due_s or finishing:
                self._checkpoint()
                due_s = self._clock() + self._checkpoint_s
            if finishing and not len(self._outbox):
                return

    def _take_opened(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, []
        for shard in opened:
            self._shards[shard.shard.index] = shard
            with self._meter("writing results"):
                self._commit_if_complete(shard)  # all its rows may be in parts already

    def _collect(self, items: Sequence[Item]) -> None:
        rows: list[tuple[RowRef, ResultRow]] = []
        blocks: list[Block] = []
        with self._meter("telemetry"):
            for item in items:
                if isinstance(item, Note):
                    self._journal.add_note(item.table, item.values)
                elif isinstance(item.event, Rows):
                    rows.extend(item.event.rows)
                elif isinstance(item.event, Block):
                    blocks.append(item.event)
                elif isinstance(item.event, Steps):
                    self._add_steps(item.worker, item.event)
                else:
                    self._journal.set_works(item.worker, item.event)
        if rows:
            with self._meter("writing results"):
                self._settle(rows)
        for block in blocks:
            with self._meter("writing results"):
                self._settle_block(block)

    def _add_steps(self, worker: str, steps: Steps) -> None:
        for record in steps.records:
            if isinstance(record, StepRecord):
                self._journal.add_step(record, worker)
                self._progress.add_step(record, worker)
            elif isinstance(record, EncodeCall):
                self._journal.add_encode(record, worker)
            else:
                self._journal.add_event(record, worker)

    def _settle(self, rows: list[tuple[RowRef, ResultRow]]) -> None:
        touched: dict[int, OpenShard] = {}
        for ref, row in rows:
            shard = touched[ref.shard_index] = self._shards[ref.shard_index]
            shard.writer.add(row)
        self._progress.add_rows(row for _, row in rows)
        for index in sorted(touched):
            shard = touched[index]
            if shard.writer.num_buffered >= MAX_BUFFERED_ROWS:
                self._checkpoint_shard(shard)
            self._commit_if_complete(shard)

    def _settle_block(self, block: Block) -> None:
        """Commit the superbatch that a block is; of a larger shard, make the block durable when
        enough has come.
        """
        shard = self._shards[block.shard_index]
        shard.writer.add_block(block.ordinals, block.table)
        self._progress.add_counts(tally(block.table))
        if shard.writer.num_missing and shard.writer.num_buffered >= MAX_BUFFERED_ROWS:
            self._checkpoint_shard(shard)
        self._commit_if_complete(shard)

    def _commit_if_complete(self, shard: OpenShard) -> None:
        if shard.writer.num_missing:
            return
        del self._shards[shard.shard.index]
        summary = shard.writer.close()
        self._journal.committed(summary)
        with suppress(InvalidStateError):  # the run is ending, and it was released
            shard.committed.set_result(summary)

    def _checkpoint(self) -> None:
        with self._meter("writing results"):
            for shard in self._shards.values():
                self._checkpoint_shard(shard)
        with self._meter("telemetry"):
            self._journal.tick()

    def _checkpoint_shard(self, shard: OpenShard) -> None:
        shard.writer.checkpoint()


def item_weight(item: Item) -> int:
    """In the queue to the collector: a block is a whole superbatch, and waits alone."""
    is_block = isinstance(item, FromWorker) and isinstance(item.event, Block)
    return QUEUE_ITEMS if is_block else 1
