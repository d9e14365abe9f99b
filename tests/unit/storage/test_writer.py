"""The commit protocol: whatever happens at whatever step, every row comes out once."""

from __future__ import annotations

import errno
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import LedgerError, OutputError
from storage.ledger import Ledger
from storage.results import ResultRow
from storage.status import read_status
from storage.writer import ShardWriter
from tests.unit.storage.harness import (
    Crash,
    Job,
    every_third_fails,
    expected_ids,
    failed,
    files_under,
    make_job,
    ok,
)


@pytest.fixture(autouse=True)
def _merge_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are merged at three, so that small jobs take these steps too."""
    monkeypatch.setattr("storage.parts.COMPACT_PARTS", 3)


def first_writer(ledger: Ledger) -> ShardWriter:
    return ledger.writer(ledger.shards[0])


def check_whole(job: Job) -> None:
    """Every row once, in order, with what was kept and computed; nothing else is left."""
    rows = job.results()
    assert [row["row_id"] for row in rows] == expected_ids(job.dataset)
    assert [row["n"] for row in rows] == list(range(job.dataset.num_rows))
    assert [row["text"] for row in rows] == [f"<text {row['n']}>" for row in rows]
    left = {name for name in files_under(job.output) if name.startswith(("_check", "_tmp", "_lea"))}
    assert left == set()
    status = read_status(job.output)
    assert status.complete
    assert (status.committed_rows, status.checkpointed_rows) == (job.dataset.num_rows, 0)


def job_of(folder: Path) -> Job:
    return make_job(folder, shard_rows=7, kept=("n",))


def steps_of(folder: Path, **run: Any) -> list[str]:
    steps: list[str] = []
    job_of(folder).run(on_step=steps.append, **run)
    return steps


def crash_at(number: int) -> Any:
    left = iter(range(number))

    def on_step(name: str) -> None:
        if next(left, None) is None:
            raise Crash(name)

    return on_step


def test_c03_an_exception_at_any_step_loses_and_repeats_no_row(tmp_path: Path) -> None:
    steps = steps_of(tmp_path / "count", every=1)
    assert set(steps) == {
        "before_part", "part_durable", "part_written", "parts_merged", "old_part_deleted",
        "before_result", "result_durable", "result_written", "before_marker", "marker_written",
        "parts_deleted",
    }  # fmt: skip
    for number in range(len(steps)):
        job = job_of(tmp_path / str(number))
        with pytest.raises(Crash):
            job.run(on_step=crash_at(number), every=1)
        job.run()
        check_whole(job)


def test_c03_a_kill_at_any_step_loses_and_repeats_no_row(tmp_path: Path) -> None:
    """Every state of the disk, drafts and lease included, is one that a kill can leave."""
    job = job_of(tmp_path / "job")
    states: list[Path] = []

    def keep_state(name: str) -> None:
        states.append(tmp_path / f"{len(states):03d}-{name}")
        shutil.copytree(job.output, states[-1])

    job.run(on_step=keep_state)
    assert len(states) > 20
    for state in states:
        again = Job(output=str(state), dataset=job.dataset, kept=job.kept)
        again.hours = job.hours
        again.run()
        check_whole(again)


def test_c03_two_crashes_in_a_row_lose_and_repeat_no_row(tmp_path: Path) -> None:
    total = len(steps_of(tmp_path / "count"))
    for first in range(0, total, 3):
        for second in range(0, total, 4):
            job = job_of(tmp_path / f"{first}-{second}")
            with pytest.raises(Crash):
                job.run(on_step=crash_at(first))
            try:
                job.run(on_step=crash_at(second))
            except Crash:
                job.run()
            check_whole(job)


def test_c03_durable_rows_are_not_computed_again(tmp_path: Path) -> None:
    for number in range(len(steps_of(tmp_path / "count"))):
        job = job_of(tmp_path / str(number))
        done_before = Counter[str]()

        def answer(row: Any, done: Counter[str] = done_before) -> ResultRow:
            done[row.row_id] += 1
            return ok(row)

        with pytest.raises(Crash):
            job.run(on_step=crash_at(number), answer=answer)
        durable = read_status(job.output).done_rows
        again = job.run(answer=answer)
        assert len(again) == job.dataset.num_rows - durable
        assert max(done_before.values()) <= 2
        assert sum(done_before.values()) <= job.dataset.num_rows + 2  # `every` rows were buffered


def fail_at(step: str) -> Any:
    """A disk that is full at one step."""

    def on_step(name: str) -> None:
        if name == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    return on_step


@pytest.mark.parametrize("step", ["part_durable", "result_durable"])
def test_c04_a_sink_that_fails_leaves_rows_pending(tmp_path: Path, step: str) -> None:
    job = job_of(tmp_path)
    with pytest.raises(OutputError, match="No space left"):
        job.run(on_step=fail_at(step), every=100)
    status = read_status(job.output)
    assert status.done_shards == 0
    assert status.by_status == ({} if step == "part_durable" else {"ok": 7})
    assert not list(Path(job.output).glob("results/*"))
    job.run()
    check_whole(job)


def test_c04_rows_stay_in_the_buffer_until_they_are_written(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    full = [True]

    def on_step(name: str) -> None:
        if name == "part_durable" and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = first_writer(job.open(on_step=on_step).ledger)
    writer.add(ResultRow(ordinal=0, row_id="a", status="ok"))
    with pytest.raises(OutputError):
        writer.checkpoint()
    assert writer.counts() == {}
    full[0] = False
    writer.checkpoint()
    assert writer.counts() == {"ok": 1}


def test_c04_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    ledger = job.open().ledger
    Path(job.output, "_checkpoints").write_text("in the way")
    writer = first_writer(ledger)
    writer.add(ResultRow(ordinal=0, row_id="a", status="ok"))
    with pytest.raises(OutputError, match="_checkpoints/shard-00000"):
        writer.checkpoint()


def test_c05_a_reader_sees_only_whole_files(tmp_path: Path) -> None:
    job = make_job(tmp_path, [f"text {n}" for n in range(60)], shard_rows=3, group_rows=60)
    stop, seen, faults = threading.Event(), set[str](), list[str]()

    def poll() -> None:
        while not stop.is_set():
            for path in Path(job.output).glob("results/*"):
                try:
                    table = pq.ParquetFile(path).read()
                except (OSError, pa.ArrowException) as fault:
                    faults.append(f"{path.name}: {fault}")
                    continue
                if table.num_rows != 3 or path.suffix != ".parquet":
                    faults.append(f"{path.name} has {table.num_rows} rows")
                seen.add(path.name)

    job.kept = ("n",)
    reader = threading.Thread(target=poll)
    reader.start()
    try:
        job.run()
        job.run(answer=ok, retry_errors=True)
    finally:
        stop.set()
        reader.join()
    assert faults == []
    assert seen


def test_c07_reopening_costs_the_same_after_any_number_of_checkpoints(tmp_path: Path) -> None:
    most = []
    for rows in (8, 64):
        job = make_job(tmp_path / str(rows), ["same"] * (rows + 1), shard_rows=100)
        writer = first_writer(job.open().ledger)
        counts: list[int] = []
        for ordinal in range(rows):
            writer.add(ResultRow(ordinal=ordinal, row_id=str(ordinal), status="ok"))
            writer.checkpoint()
            counts.append(len(list(Path(job.output).glob("_checkpoints/*/*"))))
        most.append(max(counts))
        assert first_writer(job.open().ledger).num_missing == 1
    assert most[0] == most[1] <= 3


def test_c07_skipped_and_error_rows_are_terminal(tmp_path: Path) -> None:
    job = make_job(tmp_path, shard_rows=100)
    writer = first_writer(job.open().ledger)
    writer.add(ResultRow(ordinal=1, row_id="1", status="error", error_type="x"))
    writer.add(ResultRow(ordinal=3, row_id="3", status="skipped"))
    writer.add(ResultRow(ordinal=4, row_id="4", status="invalid_output", text="{"))
    writer.checkpoint()
    again = first_writer(job.open().ledger)
    assert again.done == {1, 3, 4}
    assert again.is_done(1) and not again.is_done(0)
    assert again.counts() == {"error": 1, "skipped": 1, "invalid_output": 1}


def test_c08_rows_are_known_by_place_not_by_text(tmp_path: Path) -> None:
    job = make_job(tmp_path, ["the same"] * 3, kept=("n",))
    writer = first_writer(job.open().ledger)
    writer.add(ResultRow(ordinal=0, row_id="rows.parquet:0", status="ok", text="one"))
    writer.checkpoint()  # and the process is gone
    assert len(job.run()) == 2
    assert [row["n"] for row in job.results()] == [0, 1, 2]


def test_c13_a_retry_touches_error_rows_only_and_counts_attempts(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.run(answer=every_third_fails)
    before = job.results()
    bad = [row["row_id"] for row in before if row["status"] == "error"]
    assert len(bad) == 3
    assert job.run() == []
    assert job.run(answer=failed, retry_errors=True) == bad
    assert job.run(retry_errors=True) == bad
    rows = job.results()
    check_whole(job)
    assert Counter(row["attempts"] for row in rows) == {1: 9, 3: 3}
    assert [row for row in rows if row["attempts"] == 1] == [
        row for row in before if row["status"] == "ok"
    ]
    assert job.run(retry_errors=True) == []


def test_c13_a_kill_at_any_step_of_a_retry_loses_and_repeats_no_row(tmp_path: Path) -> None:
    job = job_of(tmp_path / "job")
    job.run(answer=every_third_fails)
    states: list[Path] = []

    def keep_state(name: str) -> None:
        states.append(tmp_path / f"{len(states):03d}-{name}")
        shutil.copytree(job.output, states[-1])

    job.run(on_step=keep_state, retry_errors=True, every=1)
    assert len(states) > 10
    for state in states:
        again = Job(output=str(state), dataset=job.dataset, kept=job.kept)
        again.hours = job.hours
        status = read_status(again.output)
        assert status.total_rows == status.done_rows
        again.run(retry_errors=True)
        check_whole(again)
        assert {row["attempts"] for row in again.results()} == {1, 2}


def test_c13_error_rows_of_an_open_shard_are_retried_when_asked(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with pytest.raises(Crash):
        job.run(answer=failed, on_step=lambda name: crash_at(0)(name) if "result" in name else None)
    ledger = job.open().ledger
    assert first_writer(ledger).num_missing == 0
    assert ledger.writer(ledger.shards[0], retry_errors=True).num_missing == 7
    ledger.release()
    job.run(retry_errors=True)
    check_whole(job)
    assert [row["attempts"] for row in job.results()] == [2] * 7 + [1] * 5


def test_c16_a_missing_row_keeps_the_shard_open(tmp_path: Path) -> None:
    job = make_job(tmp_path, shard_rows=3)
    writer = first_writer(job.open().ledger)
    for ordinal in (0, 2):
        writer.add(ResultRow(ordinal=ordinal, row_id=str(ordinal), status="ok"))
    with pytest.raises(LedgerError, match=r"2 results for 3 rows \(1 missing\)"):
        writer.close()
    assert not list(Path(job.output).glob("results/*"))
    assert read_status(job.output).done_rows == 2


def test_c16_a_second_or_a_foreign_result_is_refused(tmp_path: Path) -> None:
    writer = first_writer(make_job(tmp_path, shard_rows=3).open().ledger)
    writer.add(ResultRow(ordinal=1, row_id="r1", status="ok"))
    with pytest.raises(LedgerError, match="second result for row r1"):
        writer.add(ResultRow(ordinal=1, row_id="r1", status="ok"))
    for ordinal in (-1, 3):
        with pytest.raises(LedgerError, match=f"no row {ordinal}"):
            writer.add(ResultRow(ordinal=ordinal, row_id="x", status="ok"))


def test_c19_the_first_error_may_come_in_the_last_batch(tmp_path: Path) -> None:
    job = make_job(tmp_path, shard_rows=100)
    last = job.dataset.num_rows - 1
    job.run(answer=lambda row: failed(row) if row.ordinal == last else ok(row), every=1)
    rows = job.results()
    assert [row["error_type"] for row in rows] == [None] * last + ["timeout"]


def test_c19_all_files_of_a_job_have_one_schema(tmp_path: Path) -> None:
    job = make_job(tmp_path, shard_rows=4)
    job.run(answer=lambda row: ok(row) if row.row_id.endswith(("0", "1")) else failed(row))
    schemas = [pq.read_schema(path) for path in Path(job.output).glob("results/*.parquet")]
    assert len(schemas) == 3
    assert all(schema == schemas[0] for schema in schemas)


def test_c53_rows_come_out_in_input_order_whatever_order_they_finish_in(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.run(backwards=True)
    check_whole(job)


def test_text_that_is_no_unicode_is_written_with_a_mark(tmp_path: Path) -> None:
    job = make_job(tmp_path, ["a", "b"], kept=())
    writer = first_writer(job.open().ledger)
    writer.add(ResultRow(ordinal=0, row_id="0", status="ok", text="half \ud83d"))
    writer.add(ResultRow(ordinal=1, row_id="1", status="error", error_message="bad \udcff"))
    writer.close()
    rows = job.results()
    assert (rows[0]["text"], rows[1]["error_message"]) == ("half ?", "bad ?")


def test_a_summary_counts_what_is_in_the_file(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.run(answer=every_third_fails)
    summary = job.open().ledger.committed[0]
    file = Path(job.output, summary.file)
    assert (summary.num_rows, summary.num_bytes) == (7, file.stat().st_size)
    assert summary.by_status == {"ok": 5, "error": 2}
    assert summary.by_finish_reason == {"stop": 5}
    assert (summary.prompt_tokens, summary.completion_tokens) == (10, 15)
