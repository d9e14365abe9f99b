"""Opening an output: whose it is, what it holds, and outputs that are not plain local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import LedgerError, OutputError, OutputMismatch
from storage.ledger import Ledger, NewOutput, Opened
from storage.record import JobRecord, differences
from storage.results import ResultColumns, ResultRow
from storage.rows import read_shard
from storage.shards import Shard, Span, TokenCost, cut_shards
from storage.source import Dataset, open_dataset
from storage.status import read_status
from tests.unit.storage.outputs import Crash, Job, answer, crash_at, write_input

ROW_BY_ROW = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)


def record_of(dataset: Dataset, **changes: Any) -> JobRecord:
    values: dict[str, Any] = {
        "job_id": "job",
        "created": "2026-01-01",
        "spec": {"a": [1]},
        "generation": {"input": dataset.fingerprint},
        "output": {"keep_columns": []},
        "columns": ResultColumns(),
        "shards": cut_shards(dataset, cost=ROW_BY_ROW, target_tokens=2),
    }
    return JobRecord(**(values | changes))


def open_at(url: str, dataset: Dataset, **options: Any) -> Opened:
    record = record_of(dataset)
    return Ledger.open(
        url,
        dataset=dataset,
        generation=record.generation,
        output=record.output,
        make_record=lambda _: record,
        **options,
    )


def run_at(url: str, dataset: Dataset, **options: Any) -> int:
    """Open, compute what is pending, release; the number of rows computed."""
    ledger, _ = open_at(url, dataset, **options)
    computed = 0
    for shard in ledger.pending():
        writer = ledger.writer(shard)
        for rows in read_shard(dataset, shard, ("text",), skip=writer.done):
            for row in rows:
                writer.add(answer(row))
                computed += 1
                writer.checkpoint()
        ledger.note_committed(writer.close())
    ledger.release()
    return computed


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    path = write_input(tmp_path / "in.parquet", {"text": [str(i) for i in range(5)]})
    return open_dataset(str(path))


@pytest.mark.parametrize("scheme", ["file://", "memory:/"])
def test_c03_a_job_on_a_url_survives_a_crash_at_each_step(
    tmp_path: Path, dataset: Dataset, scheme: str
) -> None:
    steps: list[str] = []
    run_at(f"{scheme}{tmp_path}/whole", dataset, on_step=steps.append)
    for number in range(0, len(steps), 2):
        url = f"{scheme}{tmp_path}/{number}"
        with pytest.raises(Crash):
            run_at(url, dataset, on_step=crash_at(number), wall_clock=lambda: 0.0)
        done = read_status(url).done_rows
        assert run_at(url, dataset, wall_clock=lambda: 1000.0) == 5 - done
        fs, root = fsspec.core.url_to_fs(url)
        ids: list[str] = []
        for name in sorted(fs.glob(f"{root}/results/*")):
            with fs.open(name) as file:
                ids += pq.ParquetFile(file).read(["row_id"]).column(0).to_pylist()
        assert ids == [f"in.parquet:{row}" for row in range(5)]
        assert fs.find(f"{root}/_checkpoints") == [] and not fs.exists(f"{root}/_lease.json")
        assert read_status(url).complete


def test_an_input_without_rows_is_a_finished_job(tmp_path: Path) -> None:
    for name in ("a", "b"):
        empty = pa.schema([("text", pa.string())]).empty_table()
        write_input(tmp_path / "in" / f"{name}.parquet", empty)
    dataset = open_dataset(str(tmp_path / "in"))
    opened = open_at(str(tmp_path / "out"), dataset)
    assert opened.ledger.shards == () and opened.ledger.pending() == []
    opened.ledger.release()
    assert read_status(str(tmp_path / "out")).complete
    assert open_at(str(tmp_path / "out"), dataset).resumed


def test_c10_the_plan_of_the_first_run_stays(tmp_path: Path, dataset: Dataset) -> None:
    first = open_at(str(tmp_path / "out"), dataset).ledger
    first.release()

    def never(_: NewOutput) -> JobRecord:
        raise AssertionError("a record was made for an output that has one")

    again, resumed = Ledger.open(
        str(tmp_path / "out"),
        dataset=dataset,
        generation={"input": dataset.fingerprint},
        output={"keep_columns": []},
        make_record=never,
    )
    assert resumed and again.shards == first.shards == cut_shards(
        dataset, cost=ROW_BY_ROW, target_tokens=2
    )  # fmt: skip


def test_pending_shards_are_those_without_a_marker(tmp_path: Path, dataset: Dataset) -> None:
    ledger = open_at(str(tmp_path / "out"), dataset).ledger
    writer = ledger.writer(ledger.shards[1])
    writer.add(ResultRow(ordinal=0, row_id="2", status="ok"))
    writer.add(ResultRow(ordinal=1, row_id="3", status="error"))
    ledger.note_committed(writer.close())
    assert [shard.index for shard in ledger.pending()] == [0, 2]
    assert [shard.index for shard in ledger.pending(retry_errors=True)] == [0, 1, 2]
    ledger.release()
    again = open_at(str(tmp_path / "out"), dataset).ledger
    assert again.committed == ledger.committed


def test_a_marker_of_another_hand_is_named(tmp_path: Path, dataset: Dataset) -> None:
    run_at(str(tmp_path / "out"), dataset)
    (tmp_path / "out" / "_markers" / "shard-00001.json").write_text("{")
    with pytest.raises(LedgerError, match=r"shard-00001\.json is damaged .*delete it"):
        open_at(str(tmp_path / "out"), dataset)
    (tmp_path / "out" / "_markers" / "shard-00001.json").unlink()
    assert run_at(str(tmp_path / "out"), dataset) == 2


def test_a_crash_while_overwriting_leaves_a_job_and_no_hole(tmp_path: Path) -> None:
    job = Job(write_input(tmp_path / "in.parquet", {"text": ["a", "b"]}), tmp_path / "out", 1)
    job.run()
    (job.output / "results" / "shard-00000.parquet").unlink()  # the markers went first
    (job.output / "_markers" / "shard-00000.json").unlink()
    job.generation["model"] = "other"
    with pytest.raises(OutputMismatch):
        job.run()
    job.run(overwrite=True)
    assert job.row_ids() == ["in.parquet:0", "in.parquet:1"]


def test_a_url_of_an_unknown_kind_is_an_output_error(dataset: Dataset) -> None:
    with pytest.raises(OutputError, match="gone://bucket"):
        open_at("gone://bucket/out", dataset)


def test_a_record_survives_its_file(dataset: Dataset) -> None:
    columns = ResultColumns(kept=("text",), logprobs=True, samples=True)
    shards = (Shard(0, (Span(0, 1, 2, 3, 4), Span(1, 0, 0, 1, 0)), 7),)
    record = record_of(dataset, columns=columns, shards=shards)
    assert JobRecord.from_bytes(record.to_bytes(), "job.json") == record
    assert record.total_rows == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"format": 1}'])
def test_a_damaged_record_is_named(data: bytes) -> None:
    with pytest.raises(LedgerError, match=r"out/job\.json is damaged"):
        JobRecord.from_bytes(data, "out/job.json")


def test_a_record_of_another_format_is_refused(dataset: Dataset) -> None:
    raw = orjson.loads(record_of(dataset).to_bytes()) | {"format": 99}
    with pytest.raises(LedgerError, match="has format 99; this version reads 1"):
        JobRecord.from_bytes(orjson.dumps(raw), "job.json")


def test_c11_differences_are_by_key_whatever_container_holds_the_value() -> None:
    stored = {"same": [1, 2], "changed": 1, "gone": "x"}
    found = differences(stored, {"new": 0.5, "changed": 2, "same": (1, 2)})
    assert [(d.key, d.stored, d.given) for d in found] == [
        ("new", None, 0.5), ("changed", 1, 2), ("gone", "x", None),
    ]  # fmt: skip
