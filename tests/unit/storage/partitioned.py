"""A small job with vectors and partitions for the tests of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from storage.errors import InputError
from storage.grouping import group_by_keys
from storage.ledger import Ledger, NewOutput, PlannedJob
from storage.partitions import find_partitions, plan_partitions
from storage.record import JobRecord
from storage.results import ResultColumns
from storage.rows import Row, RowReader
from storage.shards import Shard, TokenCost
from storage.source import Dataset, open_dataset
from storage.vectors import VectorErrors, VectorSpec, vectors_table
from storage.writer import ShardWriter
from tests.unit.storage.outputs import CREATED, Crash

COST = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
WIDTH = 3


def vector_of(text: str | None, width: int = WIDTH) -> list[float]:
    """What the fake encoder says."""
    seed = 0 if text is None else sum(map(ord, text)) + len(text)
    return [float(seed + n) for n in range(width)]


@dataclass
class VectorJob:
    """A job over an input file. A superbatch is whole partitions of `batch_rows` rows or more; its
    rows come in blocks of `slice_rows`, every other one from another worker, with a checkpoint
    behind each `checkpoint_blocks`.
    """

    input: Path
    output: Path | str
    keys: tuple[str, ...] = ("key",)
    batch_rows: int = 4
    slice_rows: int = 1000
    checkpoint_blocks: int = 1000
    interleave: bool = False
    kept: tuple[str, ...] = ()
    spec: VectorSpec = field(default_factory=lambda: VectorSpec(task="embed", width=WIDTH))
    grouped: bool = False
    mended: bool = False
    """Null texts get a vector too."""
    encoded: list[str] = field(default_factory=list)
    """Row ids in the order in which the fake encoder saw them, over all runs."""
    overwrite: bool = False

    @property
    def dataset(self) -> Dataset:
        return open_dataset(str(self.input))

    def open(
        self,
        *,
        on_step: Callable[[str], None] = lambda _: None,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> Ledger:
        dataset = self.dataset
        return Ledger.open(
            str(self.output),
            dataset=dataset,
            generation={"input": dataset.fingerprint},
            output={"keep_columns": list(self.kept)},
            make_record=lambda new: self._plan(dataset, new),
            overwrite=self.overwrite,
            on_step=on_step,
            wall_clock=wall_clock,
        ).ledger

    def _plan(self, dataset: Dataset, new: NewOutput) -> PlannedJob | JobRecord:
        given = dataset
        found = find_partitions(dataset, self.keys)
        if not found.grouped:
            if not self.grouped:
                raise InputError("the input is not grouped")
            dataset = group_by_keys(
                dataset,
                self.keys,
                columns=["text", *self.kept],
                store=new.store,
                spill=self.input.parent / "spill",
                memory_bytes=1 << 20,
                on_batch=new.beat,
            )
            found = find_partitions(dataset, self.keys)
        planned = plan_partitions(dataset, found, self._bounds(found.num_rows), cost=COST)
        record = JobRecord(
            job_id="job",
            created=CREATED,
            spec={"input": str(self.input)},
            generation={"input": given.fingerprint},
            output={"keep_columns": list(self.kept)},
            columns=ResultColumns(kept=self.kept, vector=self.spec, partition_by=self.keys),
            shards=planned.shards,
            grouped=dataset is not given,
        )
        return PlannedJob(record, planned.partitions, dataset)

    def _bounds(self, sizes: np.ndarray) -> Iterator[tuple[int, int]]:
        first = rows = 0
        for index, size in enumerate(sizes.tolist()):
            rows += size
            if rows >= self.batch_rows or index == len(sizes) - 1:
                yield first, index + 1
                first, rows = index + 1, 0

    def run(
        self, *, retry_errors: bool = False, on_step: Callable[[str], None] = lambda _: None
    ) -> None:
        """A whole run."""
        ledger = self.open(on_step=on_step)
        try:
            for shard in ledger.pending(retry_errors=retry_errors):
                writer = ledger.writer(shard, retry_errors=retry_errors)
                for number, rows in enumerate(self._slices(ledger, shard, writer)):
                    self.encoded += [row.row_id for row in rows]
                    self.add(writer, rows)
                    if number % self.checkpoint_blocks == self.checkpoint_blocks - 1:
                        writer.checkpoint()
                ledger.note_committed(writer.close())
        finally:
            ledger.release()

    def _slices(self, ledger: Ledger, shard: Shard, writer: ShardWriter) -> list[list[Row]]:
        reader = RowReader(ledger.dataset, ("text",))
        rows = [r for batch in reader.rows(shard, skip=writer.done) for r in batch]
        if self.interleave:
            return [rows[0::2], rows[1::2]] if len(rows) > 1 else [rows] if rows else []
        return [rows[n : n + self.slice_rows] for n in range(0, len(rows), self.slice_rows)]

    def add(self, writer: ShardWriter, rows: list[Row]) -> None:
        """The fake encoder's block of these rows."""
        texts = [row.values["text"] for row in rows]
        bad = [text is None and not self.mended for text in texts]
        table = vectors_table(
            self.spec,
            np.array([vector_of(text, self.spec.width) for text in texts], np.float32),
            row_ids=[row.row_id for row in rows],
            prompt_tokens=np.array([len(text or "") for text in texts]),
            num_scored_tokens=np.array([len(text or "") for text in texts]),
            errors=VectorErrors(
                types=["null_prompt" if b else None for b in bad],
                messages=["the text is null" if b else None for b in bad],
            ),
        )
        writer.add_block(np.array([row.ordinal for row in rows], np.int64), table)

    def files(self) -> list[Path]:
        return sorted((Path(self.output) / "results").rglob("*.parquet"))

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """What a reader of the output sees now: rows by folder; each file must be whole."""
        top = Path(self.output) / "results"
        return {
            str(file.parent.relative_to(top)): pq.ParquetFile(file).read().to_pylist()
            for file in self.files()
        }

    def run_until_done(self, on_step: Callable[[str], None]) -> bool:
        """Run; if it crashes, run again undisturbed. True when it crashed."""
        try:
            self.run(on_step=on_step)
        except Crash:
            self.run()
            return True
        return False
