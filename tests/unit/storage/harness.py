"""A small job over a small input, and a run of it that can be stopped at any step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.ledger import Ledger, Opened
from storage.record import JobRecord
from storage.results import ResultColumns, ResultRow
from storage.rows import Row, read_shard
from storage.shards import TokenCost, cut_shards
from storage.source import Dataset, open_dataset

ONE_A_ROW = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)

Answer = Callable[[Row], ResultRow]
OnStep = Callable[[str], None]


class Crash(BaseException):
    """A process that is gone: nobody catches it."""


def nothing(_: str) -> None:
    """Let every step pass."""


def ok(row: Row) -> ResultRow:
    return ResultRow(
        ordinal=row.ordinal,
        row_id=row.row_id,
        status="ok",
        text=f"<{row.values['text']}>",
        finish_reason="stop",
        prompt_tokens=2,
        completion_tokens=3,
    )


def failed(row: Row) -> ResultRow:
    return ResultRow(
        ordinal=row.ordinal,
        row_id=row.row_id,
        status="error",
        error_type="timeout",
        error_message="too slow",
    )


def every_third_fails(row: Row) -> ResultRow:
    return failed(row) if row.ordinal % 3 == 2 else ok(row)


def write_input(path: Path, texts: Sequence[str | None], *, group_rows: int = 4) -> str:
    table = pa.table({"text": pa.array(texts, pa.string()), "n": list(range(len(texts)))})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)
    return str(path)


@dataclass(kw_only=True)
class Job:
    """A job on an output. Every `open` comes an hour later, so no dead run's lease is in the way."""

    output: str
    dataset: Dataset
    shard_rows: int = 5
    kept: tuple[str, ...] = ("text", "n")
    settings: Mapping[str, Any] = field(default_factory=lambda: {"model": "m", "temperature": 0.0})
    hours: Any = field(default_factory=itertools.count)

    def record(self) -> JobRecord:
        return JobRecord(
            job_id="job",
            created="2026-01-01T00:00:00",
            spec={"model": "m"},
            generation=self.generation,
            output={"keep_columns": list(self.kept)},
            columns=ResultColumns(kept=self.kept),
            shards=cut_shards(self.dataset, cost=ONE_A_ROW, target_tokens=self.shard_rows),
        )

    @property
    def generation(self) -> Mapping[str, Any]:
        return {"input": self.dataset.fingerprint, **self.settings}

    def open(
        self, *, on_step: OnStep = nothing, overwrite: bool = False, hour: float | None = None
    ) -> Opened:
        now_s = 3600.0 * (next(self.hours) if hour is None else hour)
        return Ledger.open(
            self.output,
            dataset=self.dataset,
            generation=self.generation,
            output={"keep_columns": list(self.kept)},
            make_record=self.record,
            overwrite=overwrite,
            wall_clock=lambda: now_s,
            on_step=on_step,
        )

    def run(
        self,
        *,
        on_step: OnStep = nothing,
        answer: Answer = ok,
        every: int = 2,
        backwards: bool = False,
        retry_errors: bool = False,
    ) -> list[str]:
        """Open the output, compute what is missing and commit it.

        Args:
            on_step: told of each step.
            answer: the model.
            every: rows between checkpoints.
            backwards: rows finish in reverse order.
            retry_errors: compute error rows again.

        Returns:
            ids of the rows that were computed.
        """
        ledger = self.open(on_step=on_step).ledger
        computed: list[str] = []
        for shard in ledger.pending(retry_errors=retry_errors):
            writer = ledger.writer(shard, retry_errors=retry_errors)
            batches = read_shard(self.dataset, shard, ["text"], skip=writer.done)
            rows = [row for batch in batches for row in batch]
            for row in reversed(rows) if backwards else rows:
                writer.add(answer(row))
                computed.append(row.row_id)
                if len(computed) % every == 0:
                    writer.checkpoint()
            ledger.note_committed(writer.close())
        ledger.release()
        return computed

    def results(self) -> list[dict[str, Any]]:
        """All rows of all result files, in order of the files."""
        files = sorted(Path(self.output, "results").glob("*.parquet"))
        return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def make_job(
    folder: Path, texts: Sequence[str | None] | None = None, *, group_rows: int = 4, **changes: Any
) -> Job:
    path = write_input(
        folder / "in" / "rows.parquet",
        [f"text {n}" for n in range(12)] if texts is None else texts,
        group_rows=group_rows,
    )
    return Job(output=str(folder / "out"), dataset=open_dataset(path), **changes)


def expected_ids(dataset: Dataset) -> list[str]:
    return [f"{file.name}:{row}" for file in dataset.files for row in range(file.num_rows)]


def files_under(folder: str | Path) -> set[str]:
    root = Path(folder)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
