"""The commit protocol: whatever step a run dies at, every row comes out once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from storage.errors import InputError, LedgerError, OutputError, OutputInUse, OutputMismatch
from storage.objects import ObjectStore
from storage.parts import COMPACT_PARTS
from storage.results import ResultRow
from storage.rows import Row, RowReader
from storage.status import read_status
from tests.unit.storage.outputs import Crash, Job, answer, crash_at, write_input

TEXTS = ["a", "bb", None, "d", "ee", "f", "g", None, "i", "jj"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Ten rows, two of them bad, in two shards."""
    rows = {"text": TEXTS, "number": list(range(10))}
    return Job(write_input(tmp_path / "in.parquet", rows, row_group_size=4), tmp_path / "out")


def every_crash(job: Job, run: Callable[[Callable[[str], None]], None]) -> list[str]:
    """Crash at step 0, 1, 2 ... of a run until one goes through; the names of the steps."""
    names: list[str] = []
    while True:
        output = job.output.with_name(f"out-{len(names)}")
        attempt = crash_at(len(names))
        job.output = output
        try:
            run(attempt)
        except Crash as crash:
            names.append(str(crash))
            continue
        return names


def expected(kept: bool = False) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(TEXTS):
        row: dict[str, Any] = {"row_id": f"in.parquet:{index}", "text": text and text.upper()}
        rows.append({**row, "number": index} if kept else row)
    return rows


def shown(job: Job, kept: bool = False) -> list[dict[str, Any]]:
    columns = ["row_id", "text", *(["number"] if kept else [])]
    return [{column: row[column] for column in columns} for row in job.results()]


def test_c03_crash_at_each_step_then_rerun_gives_every_row_once_in_order(job: Job) -> None:
    def crash_then_rerun(on_step: Callable[[str], None]) -> None:
        try:
            job.run(on_step=on_step)
        except Crash:
            held = job.results()
            assert {row["row_id"] for row in held} <= {row["row_id"] for row in expected()}
            assert len(held) == len({row["row_id"] for row in held})
            job.run()
            assert shown(job) == expected()
            status = read_status(str(job.output))
            assert status.complete and status.by_status == {"ok": 8, "error": 2}
            assert not list((job.output / "_checkpoints").glob("*/*"))
            raise

    names = every_crash(job, crash_then_rerun)
    assert shown(job) == expected()
    assert {
        "before_part", "part_durable", "part_written", "before_result", "result_durable",
        "result_written", "before_marker", "marker_written", "parts_deleted",
    } == set(names)  # fmt: skip
    assert len(names) > 20


def test_c03_two_crashes_in_a_row_lose_nothing(job: Job) -> None:
    for first in range(0, 20, 3):
        for second in range(0, 12, 2):
            job.output = job.output.with_name(f"twice-{first}-{second}")
            with pytest.raises(Crash):
                job.run(on_step=crash_at(first))
            job.run_until_done(crash_at(second))
            assert shown(job) == expected()


def test_c03_crash_while_parts_are_merged_keeps_every_row(tmp_path: Path) -> None:
    rows = {"text": [f"t{i}" for i in range(COMPACT_PARTS + 6)]}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 1000, every=1)
    names: list[str] = []
    job.run(on_step=names.append)
    merge = [i for i, name in enumerate(names) if name in ("parts_merged", "old_part_deleted")]
    for step in (merge[0] - 1, merge[0], merge[1], merge[-1]):
        job.output = tmp_path / f"out-{step}"
        assert job.run_until_done(crash_at(step))
        assert job.row_ids() == [f"in.parquet:{i}" for i in range(COMPACT_PARTS + 6)]


def test_c03_crash_while_errors_are_retried_keeps_every_row(job: Job) -> None:
    def mended(row: Row) -> ResultRow:
        return answer(row._replace(values={"text": row.values["text"] or "mended"}))

    def retry(on_step: Callable[[str], None]) -> None:
        job.answer = answer
        job.run()
        job.answer = mended
        try:
            job.run(retry_errors=True, on_step=on_step)
        except Crash:
            assert job.row_ids() == [row["row_id"] for row in expected()]
            job.open().release()  # a look in between changes nothing
            job.run(retry_errors=True)
            check()
            raise

    def check() -> None:
        rows = job.results()
        assert job.row_ids() == [row["row_id"] for row in expected()]
        assert [row["text"] for row in rows] == [(t or "mended").upper() for t in TEXTS]
        assert [row["attempts"] for row in rows] == [1 if t else 2 for t in TEXTS]
        assert read_status(str(job.output)).by_status == {"ok": 10}

    names = every_crash(job, retry)
    check()
    assert "result_written" in names


def test_c04_rows_of_a_failed_write_stay_pending(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = job.open()
    writer = ledger.writer(ledger.shards[0])
    rows = [r for batch in RowReader(job.dataset, ("text",)).rows(ledger.shards[0]) for r in batch]
    writer.add(answer(rows[0]))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("storage.objects.os.fsync", full)
        with pytest.raises(OutputError, match="No space left"):
            writer.checkpoint()
    assert ledger.writer(ledger.shards[0]).done == set()
    writer.checkpoint()
    assert ledger.writer(ledger.shards[0]).done == {0}
    ledger.release()
    job.run()
    assert shown(job) == expected()


def test_c04_a_shard_whose_result_could_not_be_written_is_not_committed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("storage.joined.row_groups", full)
        with pytest.raises(OutputError, match="No space left"):
            job.run()
    assert not job.results()
    answered = len(job.answered)
    assert answered == 6
    job.run()
    assert shown(job) == expected()
    assert len(job.answered) == 10  # nothing was computed twice


def test_c05_a_reader_at_any_time_sees_whole_files_only(tmp_path: Path) -> None:
    rows = {"text": [f"t{i}" for i in range(60)]}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 3, every=1)
    faults: list[str] = []
    looks: list[int] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            found = job.row_ids()  # raises on a broken file
            looks.append(len(found))
            if len(found) != len(set(found)) or len(found) % 3:
                faults.append(f"{len(found)} rows")

    reader = threading.Thread(target=poll)
    reader.start()
    job.run()
    stop.set()
    reader.join()
    assert not faults and looks == sorted(looks) and looks[0] < 60


def test_c05_at_every_step_results_hold_whole_shards_only(job: Job) -> None:
    seen: set[int] = set()
    job.run(on_step=lambda _: seen.add(len(job.row_ids())))
    assert seen == {0, 6, 10}


def test_c06_a_single_file_resumes_inside_its_row_group(tmp_path: Path) -> None:
    rows = {"text": [f"t{i}" for i in range(40)]}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 10, every=2)
    assert pq.ParquetFile(job.input).num_row_groups == 1
    assert len(job.open().shards) == 4
    (job.output / "_lease.json").unlink()
    with pytest.raises(Crash):
        job.run(on_step=crash_at(25))
    before = len(job.answered)
    job.run()
    assert len(job.answered) - 40 <= job.every < before
    assert job.row_ids() == [f"in.parquet:{i}" for i in range(40)]


def test_c07_bad_rows_are_terminal_and_opening_costs_the_same_however_long_it_ran(
    tmp_path: Path,
) -> None:
    rows = {"text": [None if i % 100 == 0 else f"t{i}" for i in range(400)]}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 1000, every=1)
    parts: list[int] = []

    def watch(name: str) -> None:
        if name == "part_written":
            parts.append(len(list((job.output / "_checkpoints").glob("*/*"))))
            if len(parts) == 300:
                raise Crash(name)

    with pytest.raises(Crash):
        job.run(on_step=watch)
    assert max(parts) <= COMPACT_PARTS
    job.run()
    assert len(job.answered) == 400  # bad rows neither, and none twice
    assert [row["status"] for row in job.results()].count("error") == 4
    job.run()
    assert len(job.answered) == 400


def test_c08_identical_rows_are_counted_by_id(tmp_path: Path) -> None:
    rows = {"text": ["same", "same", "same"]}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", every=1)
    assert job.run_until_done(crash_at(3))
    assert job.row_ids() == ["in.parquet:0", "in.parquet:1", "in.parquet:2"]
    assert [row["text"] for row in job.results()] == ["SAME"] * 3


def test_c09_an_edited_input_is_refused_by_name_and_a_copy_is_not(job: Job) -> None:
    job.run()
    before = job.results()
    copy = job.input.read_bytes()
    write_input(job.input, {"text": [*TEXTS[:9], "edited"], "number": list(range(10))})
    with pytest.raises(OutputMismatch) as refused:
        job.run()
    assert [d.key for d in refused.value.differences] == ["input"]
    assert job.results() == before
    job.input.write_bytes(copy)
    job.run()
    assert job.results() == before


def test_c09_rows_that_were_discarded_are_not_computed_again(job: Job) -> None:
    job.run()
    job.run()
    assert len(job.answered) == len(TEXTS)


def test_c10_another_shard_size_reuses_the_plan_and_what_was_done(job: Job) -> None:
    with pytest.raises(Crash):
        job.run(on_step=crash_at(12))
    done = len(job.answered)
    plan = job.open().shards
    (job.output / "_lease.json").unlink()
    job.shard_rows = 2
    job.run()
    assert job.open().shards == plan
    assert len(job.answered) - len(TEXTS) <= job.every < done
    assert shown(job) == expected()


def test_c11_another_model_is_refused_with_every_differing_key(job: Job) -> None:
    job.run()
    job.generation = {"model": "other", "temperature": 0.7}
    with pytest.raises(OutputMismatch, match="model: 'm' in the output, 'other' now") as refused:
        job.run()
    assert [d.key for d in refused.value.differences] == ["model", "temperature"]
    assert not (job.output / "_lease.json").exists()
    job.run(overwrite=True)
    assert shown(job) == expected() and len(job.answered) == 20


def test_c12_other_kept_columns_reuse_the_generations(job: Job) -> None:
    job.run()
    job.kept = ("number",)
    job.run()
    assert shown(job, kept=True) == expected(kept=True)
    job.kept = ()
    job.run()
    assert "number" not in job.results()[0]
    assert len(job.answered) == len(TEXTS)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("asked_next", [("number",), ()])
def test_c12_a_crash_while_files_are_rewritten_never_mixes_columns(
    job: Job, monkeypatch: pytest.MonkeyPatch, after: int, asked_next: tuple[str, ...]
) -> None:
    job.run()
    job.kept = ("number",)
    written: list[str] = []
    write = ObjectStore.write

    def dying_write(store: ObjectStore, name: str, data: bytes) -> None:
        if len(written) == after:
            raise Crash(name)
        written.append(name)
        write(store, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "write", dying_write)
        with pytest.raises(Crash):
            job.open()
    job.kept = asked_next
    job.run()
    kept = bool(asked_next)
    assert {("number" in row) for row in job.results()} == {kept}
    assert shown(job, kept=kept) == expected(kept=kept)
    assert len(job.answered) == len(TEXTS)
    status = read_status(str(job.output))
    assert status.by_status == {"ok": 8, "error": 2}


def test_c12_keeping_a_column_that_the_results_need_is_refused_at_start(tmp_path: Path) -> None:
    input_ = write_input(tmp_path / "in.parquet", {"text": ["a"]})
    with pytest.raises(InputError, match="'text' cannot be kept"):
        Job(input_, tmp_path / "out", kept=("text",)).open()
    assert not list((tmp_path / "out").glob("*.json"))


def test_c13_retrying_errors_touches_error_rows_only(job: Job) -> None:
    job.run()
    first = list(job.answered)
    job.run(retry_errors=True)
    assert sorted(job.answered[len(first) :]) == ["in.parquet:2", "in.parquet:7"]
    assert [row["attempts"] for row in job.results()] == [1 if text else 2 for text in TEXTS]
    job.run()
    assert len(job.answered) == len(first) + 2


def test_c13_what_a_killed_retry_mended_is_not_computed_again(job: Job) -> None:
    job.run()
    job.answer = lambda row: answer(row._replace(values={"text": "mended"}))
    with pytest.raises(Crash):
        job.run(retry_errors=True, on_step=crash_at(4))  # row 2 is in the part, nothing committed
    assert job.answered[10:] == ["in.parquet:2"]
    assert [row["status"] for row in job.results()].count("error") == 2
    job.run(retry_errors=True)
    assert job.answered[10:] == ["in.parquet:2", "in.parquet:7"]
    assert [row["status"] for row in job.results()].count("error") == 0


def test_a_marker_never_vouches_for_a_file_it_was_not_written_for(job: Job) -> None:
    job.run()
    seen: dict[str, bool] = {}

    def look(step: str) -> None:
        marker = orjson.loads((job.output / "_markers" / "shard-00000.json").read_bytes())
        size = (job.output / "results" / "shard-00000.parquet").stat().st_size
        seen.setdefault(step, marker["num_bytes"] == size)

    job.run(retry_errors=True, on_step=look)
    assert seen["before_part"] and seen["part_written"] and seen["marker_written"]
    assert not (seen["before_result"] or seen["result_written"] or seen["before_marker"])


def test_c13_errors_in_the_parts_of_an_open_shard_are_retried_too(job: Job) -> None:
    with pytest.raises(Crash):
        job.run(on_step=crash_at(9))  # rows 5 to 2 are in parts
    assert job.answered[:4] == [f"in.parquet:{i}" for i in (5, 4, 3, 2)]
    job.run(retry_errors=True)
    assert job.answered.count("in.parquet:2") == 2
    assert job.answered.count("in.parquet:3") == 1
    assert shown(job) == expected()


def test_c16_a_shard_with_a_missing_row_is_not_committed(job: Job) -> None:
    ledger = job.open()
    writer = ledger.writer(ledger.shards[0])
    rows = [r for batch in RowReader(job.dataset, ("text",)).rows(ledger.shards[0]) for r in batch]
    for row in rows[:-1]:
        writer.add(answer(row))
    with pytest.raises(LedgerError, match="5 results for 6 rows"):
        writer.close()
    assert not job.results() and not list((job.output / "_markers").glob("*"))
    writer.add(answer(rows[-1]))
    assert writer.close().num_rows == 6


def test_c16_a_second_or_foreign_result_is_refused(job: Job) -> None:
    ledger = job.open()
    writer = ledger.writer(ledger.shards[0])
    row = ResultRow(ordinal=0, row_id="in.parquet:0", status="ok")
    writer.add(row)
    with pytest.raises(LedgerError, match="second result"):
        writer.add(replace(row))
    with pytest.raises(LedgerError, match="no row 6"):
        writer.add(replace(row, ordinal=6))


def test_c19_the_schema_is_the_same_when_the_first_error_is_in_the_last_batch(
    tmp_path: Path,
) -> None:
    rows = {"text": ["t"] * 11 + [None]}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 4, every=1)
    job.run()
    files = sorted((job.output / "results").glob("*.parquet"))
    schemas = [pq.read_schema(file) for file in files]
    assert len(schemas) == 3 and all(schema == schemas[0] for schema in schemas)
    assert str(schemas[0].field("error_type").type) == "string"
    assert job.results()[-1]["error_type"] == "null_prompt"


def test_c53_results_are_in_input_order_over_files_and_row_groups(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("b", "a", "c"):
        write_input(folder / f"{name}.parquet", {"text": [name] * 5}, row_group_size=2)
    job = Job(folder, tmp_path / "out", 4, every=3)
    job.run()
    assert job.row_ids() == [f"{name}.parquet:{i}" for name in "abc" for i in range(5)]


def test_a_lost_result_file_is_computed_again(job: Job) -> None:
    job.run()
    (job.output / "results" / "shard-00001.parquet").unlink()
    job.run()
    assert shown(job) == expected()
    assert job.answered[10:] == [f"in.parquet:{i}" for i in (9, 8, 7, 6)]


def test_a_folder_of_something_else_is_refused_and_left_alone(job: Job) -> None:
    job.output.mkdir()
    (job.output / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="not empty and holds no job"):
            job.open(overwrite=overwrite)
    assert [path.name for path in job.output.iterdir()] == ["thesis.tex"]


def test_overwriting_deletes_only_what_a_job_owns(job: Job) -> None:
    job.run()
    (job.output / "notes.txt").write_text("mine")
    job.run(overwrite=True)
    assert (job.output / "notes.txt").read_text() == "mine"
    assert shown(job) == expected()


def test_an_output_that_cannot_be_written_is_named(job: Job) -> None:
    job.output.write_text("a file")
    with pytest.raises(OutputError, match="out"):
        job.open()


def test_two_runs_at_once_are_refused_until_the_first_ends(job: Job) -> None:
    first = job.open()
    with pytest.raises(OutputInUse, match="is being written by process"):
        job.open()
    first.release()
    job.run()
    assert shown(job) == expected()


def test_a_run_that_fails_to_start_gives_the_output_back(job: Job) -> None:
    job.kept = ("missing",)
    with pytest.raises(InputError, match="'missing' is to be kept, but the input has text, number"):
        job.open()
    job.kept = ()
    job.run()
    assert shown(job) == expected()


def test_drafts_of_a_killed_run_are_deleted(job: Job) -> None:
    job.run()
    draft = job.output / "_tmp" / "0123-draft-shard-00000.parquet"
    draft.write_bytes(b"half")
    job.run()
    assert not draft.exists()
