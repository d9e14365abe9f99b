"""Telemetry: whole files with the declared columns, none lost but what was not flushed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import OutputError
from storage.objects import ObjectStore
from storage.telemetry import STEPS, TelemetryWriter
from workers.request import StepRecord
from workers.times import EngineTimes, ExecuteTimes


def step(number: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in STEPS:
        if field.name != "run_id":
            values[field.name] = "decode" if field.type == pa.string() else number
    return values


def files(folder: Path) -> list[Path]:
    return sorted((folder / "telemetry" / "steps").glob("*"))


def test_the_table_of_steps_has_the_engines_record() -> None:
    blank: dict[str, Any] = {field.name: 0 for field in fields(StepRecord)}
    record = StepRecord(**{**blank, "engine": EngineTimes(), "execute": ExecuteTimes()})
    assert {"run_id", *record.row()} == set(STEPS.names)


def test_records_come_out_once_in_order_with_their_run(tmp_path: Path) -> None:
    writer = TelemetryWriter(ObjectStore(str(tmp_path)), "steps", "run-a", flush_rows=2)
    for number in range(5):
        writer.add(step(number))
        writer.flush()
    assert [path.name for path in files(tmp_path)] == [
        "run-a-00001.parquet",
        "run-a-00002.parquet",
    ]
    writer.flush(force=True)
    writer.flush(force=True)  # nothing is left, so no file
    tables = [pq.ParquetFile(path).read() for path in files(tmp_path)]
    assert [table.num_rows for table in tables] == [2, 2, 1]
    assert all(table.schema == STEPS for table in tables)
    whole = pa.concat_tables(tables)
    assert whole.column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert set(whole.column("run_id").to_pylist()) == {"run-a"}


def test_two_runs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for run in ("run-a", "run-b"):
        writer = TelemetryWriter(ObjectStore(str(tmp_path)), "steps", run)
        writer.add(step(1))
        writer.flush(force=True)
    assert len(files(tmp_path)) == 2


def test_records_of_a_flush_that_failed_are_written_by_the_next(tmp_path: Path) -> None:
    writer = TelemetryWriter(ObjectStore(str(tmp_path)), "steps", "run-a")
    writer.add(step(1))
    (tmp_path / "telemetry").write_text("in the way")
    with pytest.raises(OutputError):
        writer.flush(force=True)
    (tmp_path / "telemetry").unlink()
    writer.add(step(2))
    writer.flush(force=True)
    table = pq.ParquetFile(files(tmp_path)[0]).read()
    assert table.column("step").to_pylist() == [1, 2]


def test_a_record_without_a_column_is_refused(tmp_path: Path) -> None:
    writer = TelemetryWriter(ObjectStore(str(tmp_path)), "steps", "run-a")
    writer.add({"step": 1})
    with pytest.raises(KeyError, match="started_s"):
        writer.flush(force=True)
