"""A small job for the tests of the ledger: an input, a run that answers rows, and its reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.ledger import Ledger
from storage.record import JobRecord
from storage.results import ResultColumns, ResultRow
from storage.rows import Row, RowReader
from storage.shards import TokenCost, cut_shards
from storage.source import Dataset, open_dataset

CREATED = "2026-11-29T00:00:00+00:00"


class Crash(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


def write_input(
    path: Path, rows: dict[str, Any] | pa.Table, *, row_group_size: int | None = None
) -> Path:
    """A Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(rows) if isinstance(rows, dict) else rows
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def crash_at(count: int) -> Callable[[str], None]:
    """Raises `Crash` at the step of this number, from 0."""
    left = [count]

    def on_step(name: str) -> None:
        if left[0] == 0:
            raise Crash(name)
        left[0] -= 1

    return on_step


def answer(row: Row) -> ResultRow:
    """What the fake model says."""
    text = row.values["text"]
    if text is None:
        return ResultRow(
            ordinal=row.ordinal,
            row_id=row.row_id,
            status="error",
            error_type="null_prompt",
            error_message="the prompt is null",
        )
    return ResultRow(
        ordinal=row.ordinal,
        row_id=row.row_id,
        status="ok",
        text=text.upper(),
        finish_reason="stop",
        prompt_tokens=len(text),
        completion_tokens=1,
    )


@dataclass
class Job:
    """A job over an input file: `run` does what is pending, a checkpoint every `every` rows."""

    input: Path
    output: Path
    shard_rows: int = 6
    every: int = 2
    kept: tuple[str, ...] = ()
    generation: dict[str, Any] = field(default_factory=lambda: {"model": "m", "temperature": 0.0})
    answer: Callable[[Row], ResultRow] = answer
    answered: list[str] = field(default_factory=list)
    """Row ids in the order in which the fake model saw them, over all runs."""

    @property
    def dataset(self) -> Dataset:
        return open_dataset(str(self.input))

    def open(
        self,
        *,
        overwrite: bool = False,
        on_step: Callable[[str], None] = lambda _: None,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> Ledger:
        dataset = self.dataset
        cost = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
        return Ledger.open(
            str(self.output),
            dataset=dataset,
            generation={**self.generation, "input": dataset.fingerprint},
            output={"keep_columns": list(self.kept)},
            make_record=lambda _: JobRecord(
                job_id="job",
                created=CREATED,
                spec={"input": str(self.input)},
                generation={**self.generation, "input": dataset.fingerprint},
                output={"keep_columns": list(self.kept)},
                columns=ResultColumns(kept=self.kept),
                shards=cut_shards(dataset, cost=cost, target_tokens=self.shard_rows),
            ),
            overwrite=overwrite,
            on_step=on_step,
            wall_clock=wall_clock,
        ).ledger

    def run(
        self,
        *,
        retry_errors: bool = False,
        overwrite: bool = False,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        """A whole run. Rows come back from the model in another order than they went in."""
        ledger = self.open(overwrite=overwrite, on_step=on_step)
        try:
            for shard in ledger.pending(retry_errors=retry_errors):
                writer = ledger.writer(shard, retry_errors=retry_errors)
                rows = RowReader(self.dataset, ("text",)).rows(shard, skip=writer.done)
                for number, row in enumerate(reversed([r for batch in rows for r in batch])):
                    self.answered.append(row.row_id)
                    writer.add(self.answer(row))
                    if number % self.every == self.every - 1:
                        writer.checkpoint()
                ledger.note_committed(writer.close())
        finally:
            ledger.release()

    def results(self) -> list[dict[str, Any]]:
        """What a reader of the output sees now: all files under `results/`; each must be whole."""
        files = sorted((self.output / "results").glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def row_ids(self) -> list[str]:
        return [row["row_id"] for row in self.results()]

    def run_until_done(self, on_step: Callable[[str], None]) -> bool:
        """Run; if it crashes, run again undisturbed. True when it crashed."""
        try:
            self.run(on_step=on_step)
        except Crash:
            self.run()
            return True
        return False
