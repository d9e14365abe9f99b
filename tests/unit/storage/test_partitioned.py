"""Partitioned vectors under the commit protocol: whatever step a run dies at, every row comes out
once, in its partition's one file, and a reader sees whole files only.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputError, LedgerError, OutputError, OutputInUse
from storage.hive import NULL_FOLDER
from storage.merge import merged
from storage.record import JobRecord
from storage.results import ResultRow
from storage.rows import RowReader
from storage.status import read_status
from storage.vectors import VectorSpec
from tests.unit.storage.outputs import Crash, crash_at, write_input
from tests.unit.storage.partitioned import VectorJob, vector_of

KEYS = ["a/b", "a/b", None, "", "", "ü", "x", "x", "x", "x", "x", "x", "y"]
TEXTS = ["t0", "t1", None, "t3", "t4", "t5", "t6", "t7", None, "t9", "t10", "t11", "t12"]
FOLDERS = {"a/b": "key=a%2Fb", None: f"key={NULL_FOLDER}", "": "key=", "ü": "key=ü"}
FORMS: dict[str, dict[str, Any]] = {
    "one block": {},
    "slices": {"slice_rows": 2},
    "parts": {"slice_rows": 2, "checkpoint_blocks": 1},
    "some in parts": {"slice_rows": 2, "checkpoint_blocks": 2},
    "interleaved parts": {"interleave": True, "checkpoint_blocks": 1},
    "kept": {"kept": ("number",), "slice_rows": 3, "checkpoint_blocks": 1},
    "one file a batch": {"batch_rows": 1},
}


@pytest.fixture
def job(tmp_path: Path) -> VectorJob:
    """Thirteen rows, two of them bad, in six partitions."""
    rows = {"key": KEYS, "text": TEXTS, "number": list(range(len(KEYS)))}
    file = write_input(tmp_path / "in.parquet", rows, row_group_size=4)
    return VectorJob(file, tmp_path / "out")


def with_form(job: VectorJob, form: str) -> VectorJob:
    for name, value in FORMS[form].items():
        setattr(job, name, value)
    return job


def expected(job: VectorJob) -> dict[str, list[dict[str, Any]]]:
    """By brute force."""
    found: dict[str, list[dict[str, Any]]] = {}
    for index, (key, text) in enumerate(zip(KEYS, TEXTS, strict=True)):
        good = text is not None or job.mended
        row: dict[str, Any] = {
            "row_id": f"in.parquet:{index}",
            "status": "ok" if good else "error",
            "embedding": vector_of(text) if good else None,
            "error_type": None if good else "null_prompt",
            "error_message": None if good else "the text is null",
            "prompt_tokens": len(text or ""),
            "truncated": False,
            "attempts": 2 if job.mended and text is None else 1,
        }
        row |= {"number": index} if "number" in job.kept else {}
        found.setdefault(FOLDERS.get(key, f"key={key}"), []).append(row)
    return found


def check(job: VectorJob) -> None:
    """The output is whole, and nothing else is left of the run."""
    assert job.results() == expected(job)
    status = read_status(str(job.output))
    bad = 0 if job.mended else 2
    counts = {"ok": 13 - bad} | ({"error": 2} if bad else {})
    assert status.complete and status.by_status == counts
    assert status.prompt_tokens == sum(len(text or "") for text in TEXTS)
    left = [
        path
        for folder in ("_checkpoints", "_tmp")
        for path in (Path(job.output) / folder).rglob("*")
        if path.is_file() or "draft" in path.name
    ]
    assert left == []
    markers = [
        orjson.loads(file.read_bytes()) for file in (Path(job.output) / "_markers").iterdir()
    ]
    assert sum(marker["num_files"] for marker in markers) == len(job.files()) == 6
    sizes = sum(file.stat().st_size for file in job.files())
    assert sum(marker["num_bytes"] for marker in markers) == sizes


def check_held(job: VectorJob) -> None:
    """What a reader sees in between: files are whole, and hold what they will hold."""
    whole = expected(job)
    for folder, rows in job.results().items():
        assert [row["row_id"] for row in rows] == [row["row_id"] for row in whole[folder]]


@pytest.mark.parametrize("form", FORMS)
def test_each_partition_is_a_file_with_its_rows_in_order(job: VectorJob, form: str) -> None:
    with_form(job, form).run()
    check(job)
    assert sorted(job.encoded) == sorted(f"in.parquet:{n}" for n in range(len(KEYS)))
    job.run()
    assert len(job.encoded) == len(KEYS)


@pytest.mark.parametrize("form", FORMS)
def test_crash_at_each_step_then_rerun_gives_every_row_once(job: VectorJob, form: str) -> None:
    with_form(job, form)
    names: list[str] = []
    while True:
        job.output = Path(job.output).with_name(f"out-{len(names)}")
        job.encoded.clear()
        try:
            job.run(on_step=crash_at(len(names)))
        except Crash as crash:
            names.append(str(crash))
            check_held(job)
            done = read_status(str(job.output)).done_rows
            before = len(job.encoded)
            job.run()
            check(job)
            assert len(job.encoded) - before == len(KEYS) - done  # nothing durable is repeated
            continue
        break
    check(job)
    steps = {"before_result", "before_partition", "result_durable", "partition_written",
             "result_written", "before_marker", "marker_written", "parts_deleted"}  # fmt: skip
    assert steps <= set(names)
    assert ("part_written" in names) == (form in ("parts", "some in parts", "interleaved parts",
                                                  "kept"))  # fmt: skip


def states_of(job: VectorJob, **options: Any) -> list[Path]:
    """The output at each step of a run, as a kill leaves it."""
    states: list[Path] = []

    def keep(name: str) -> None:
        states.append(Path(job.output).with_name(f"state-{len(states):03d}-{name}"))
        shutil.copytree(job.output, states[-1])

    job.run(on_step=keep, **options)
    return states


@pytest.mark.parametrize("form", ["one block", "parts", "interleaved parts"])
def test_from_what_a_kill_leaves_every_row_comes_out_once(job: VectorJob, form: str) -> None:
    states = states_of(with_form(job, form))
    drafts = [state for state in states if list((state / "_tmp").glob("*draft*"))]
    assert drafts
    for state in states:
        job.output = state
        job.open(wall_clock=lambda: 3600.0).release()
        job.run()
        check(job)


@pytest.mark.parametrize("form", ["one block", "parts", "kept"])
def test_crash_while_errors_are_retried_keeps_every_row(job: VectorJob, form: str) -> None:
    with_form(job, form).run()
    committed = shutil.copytree(job.output, Path(job.output).with_name("committed"))
    job.mended = True
    names: list[str] = []
    while True:
        job.output = shutil.copytree(committed, committed.with_name(f"retry-{len(names)}"))
        try:
            job.run(retry_errors=True, on_step=crash_at(len(names)))
        except Crash as crash:
            names.append(str(crash))
            check_held(job)
            assert len(job.files()) == 6  # a reader never loses what was committed
            job.open().release()  # a look in between changes nothing
            job.run(retry_errors=True)
            check(job)
            continue
        break
    check(job)
    assert {"partition_written", "result_written", "marker_written"} <= set(names)
    assert set(job.encoded[len(KEYS) :]) == {"in.parquet:2", "in.parquet:8"}


def test_a_reader_at_any_time_sees_whole_files_only(tmp_path: Path) -> None:
    keys = [f"k{n // 3:03d}" for n in range(150)]
    rows = {"key": keys, "text": [f"t{n}" for n in range(150)]}
    job = VectorJob(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", batch_rows=30)
    faults: list[str] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            found = job.results()  # raises on a broken file
            faults.extend(folder for folder, held in found.items() if len(held) != 3)

    reader = threading.Thread(target=poll)
    reader.start()
    job.run()
    stop.set()
    reader.join()
    assert not faults and len(job.files()) == 50


def test_other_kept_columns_are_written_without_encoding(job: VectorJob) -> None:
    job.run()
    job.kept = ("number",)
    job.run()
    check(job)
    job.kept = ("number", "key")  # the folders have the key; the files need not
    job.run()
    check(job)
    job.kept = ()
    job.run()
    check(job)
    assert len(job.encoded) == len(KEYS)


@pytest.mark.parametrize("after", range(6))
def test_a_crash_while_files_are_rewritten_never_mixes_columns(
    job: VectorJob, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    from storage.objects import ObjectStore

    job.run()
    job.kept = ("number",)
    left = [after]
    write = ObjectStore.write

    def dying_write(store: ObjectStore, name: str, data: bytes) -> None:
        if left[0] == 0:
            raise Crash(name)
        left[0] -= 1
        write(store, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "write", dying_write)
        with pytest.raises(Crash):
            job.open()
    job.run()
    check(job)
    assert len(job.encoded) == len(KEYS)


def test_files_of_which_only_some_have_new_columns_are_all_written_anew(
    job: VectorJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    job.run()
    job.kept = ("number",)
    left = [0]
    replace = os.replace

    def dying_replace(draft: str, place: Any) -> None:
        if "part-00000.parquet" in str(place):
            left[0] += 1
            if left[0] == 2:
                raise Crash(place)
        replace(draft, place)

    with monkeypatch.context() as patch:
        patch.setattr("storage.partition_files.os.replace", dying_replace)
        with pytest.raises(Crash):
            job.open()
    assert len({tuple(rows[0]) for rows in job.results().values()}) == 2
    job.kept = ()
    job.run()
    check(job)


def test_a_lost_file_is_computed_again_with_its_superbatch(job: VectorJob) -> None:
    job.run()
    (Path(job.output) / "results" / "key=y" / "part-00000.parquet").unlink()
    job.run()
    check(job)
    assert job.encoded[len(KEYS) :] == [f"in.parquet:{n}" for n in (12,)]


def test_the_plan_is_kept_with_the_record(job: VectorJob) -> None:
    first = job.open()
    first.release()
    job.batch_rows = 1
    again = job.open()
    again.release()
    assert again.shards == first.shards
    assert again.partitions is not None and first.partitions is not None
    assert again.partitions.keys.equals(first.partitions.keys)
    shown = [again.partitions.of(shard.index).folders for shard in again.shards]
    assert shown == [["key=a%2Fb", f"key={NULL_FOLDER}", "key="], ["key=ü", "key=x"], ["key=y"]]
    table = pq.read_table(Path(job.output) / "_plan" / "partitions.parquet")
    assert table.column("key").to_pylist() == ["a/b", None, "", "ü", "x", "y"]
    assert table.column("__num_rows").to_pylist() == [2, 1, 2, 1, 6, 1]


def test_a_lost_plan_is_named(job: VectorJob) -> None:
    job.run()
    (Path(job.output) / "_plan" / "partitions.parquet").unlink()
    with pytest.raises(LedgerError, match=r"partitions\.parquet is gone or damaged"):
        job.open()


def test_a_run_that_died_before_its_record_is_begun_anew(job: VectorJob) -> None:
    job.open().release()
    (Path(job.output) / "job.json").unlink()
    shutil.rmtree(Path(job.output) / "_markers", ignore_errors=True)
    job.run()
    check(job)


def test_an_input_that_is_not_grouped_is_grouped_first(tmp_path: Path) -> None:
    keys = ["b", "a", None, "b", "a", "c", None, "b"]
    rows = {"key": keys, "text": [f"t{n}" for n in range(8)], "number": list(range(8))}
    input_ = write_input(tmp_path / "in.parquet", rows, row_group_size=3)
    job = VectorJob(input_, tmp_path / "out", kept=("number",), batch_rows=3)
    with pytest.raises(InputError, match="not grouped"):
        job.run()
    job.grouped = True
    for step in range(12):
        job.output = tmp_path / f"out-{step}"
        job.run_until_done(crash_at(step))
        found = {
            folder: [(row["row_id"], row["number"]) for row in held]
            for folder, held in job.results().items()
        }
        assert found == {
            f"key={key or NULL_FOLDER}": [
                (f"in.parquet:{n}", n) for n, other in enumerate(keys) if other == key
            ]
            for key in keys
        }
    ledger = job.open()
    assert ledger.record.grouped and ledger.dataset.id_column == "__row_id"
    assert JobRecord.from_bytes(ledger.record.to_bytes(), "job.json") == ledger.record
    ledger.release()
    assert not list((tmp_path / "spill").iterdir())


def test_several_keys_are_nested_folders(tmp_path: Path) -> None:
    rows = {"a": ["x", "x", "y"], "b": [1, 2, 1], "text": ["s", "t", "u"]}
    input_ = write_input(tmp_path / "in.parquet", rows)
    job = VectorJob(input_, tmp_path / "out", keys=("a", "b"))
    job.run()
    assert sorted(job.results()) == ["a=x/b=1", "a=x/b=2", "a=y/b=1"]


def test_one_partition_of_all_rows_is_streamed(tmp_path: Path) -> None:
    rows = {"key": ["k"] * 500, "text": [f"t{n}" for n in range(500)]}
    input_ = write_input(tmp_path / "in.parquet", rows, row_group_size=64)
    for form in ("parts", "interleaved parts"):
        job = with_form(VectorJob(input_, tmp_path / form), form)
        job.slice_rows = 7
        job.run()
        (held,) = job.results().values()
        assert [row["row_id"] for row in held] == [f"in.parquet:{n}" for n in range(500)]
        assert [row["embedding"] for row in held] == [vector_of(f"t{n}") for n in range(500)]


def test_blocks_that_do_not_fit_are_refused_whole(job: VectorJob) -> None:
    from dataclasses import replace

    ledger = job.open()
    writer = ledger.writer(ledger.shards[0])
    batches = RowReader(ledger.dataset, ("text",)).rows(ledger.shards[0])
    rows = [row for batch in batches for row in batch]
    job.add(writer, rows[:2])
    for again in (rows[1:3], [rows[2], rows[2]], [rows[2]._replace(ordinal=99)]):
        with pytest.raises(LedgerError):
            job.add(writer, again)
    with pytest.raises(LedgerError, match="3 missing"):
        writer.close()
    row = ResultRow(ordinal=2, row_id="r", status="ok", text="no vector")
    with pytest.raises(LedgerError, match="come in blocks"):
        writer.add(row)
    writer.add(replace(row, status="error", error_type="null_prompt", text=None))
    job.add(writer, rows[3:])
    assert writer.close().by_status == {"ok": 4, "error": 1}
    ledger.release()


def test_labels_and_scores_are_partitioned_too(job: VectorJob) -> None:
    job.spec = VectorSpec(task="classify", width=2, labels=("no", "yes"), dtype="float16")
    job.run()
    row = job.results()["key=y"][0]
    assert (row["label"], row["score"]) == ("yes", vector_of("t12")[1])
    job.output = Path(job.output).with_name("scores")
    job.spec = VectorSpec(task="score", width=1)
    job.run()
    row = job.results()["key=y"][0]
    assert row["logprob"] == vector_of("t12")[0] and row["num_scored_tokens"] == 3


def test_the_files_have_the_schema_of_the_results(job: VectorJob) -> None:
    job.run()
    schemas = [pq.read_schema(file) for file in job.files()]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert schemas[0].field("embedding").type == pa.list_(pa.field("element", pa.float32()), 3)
    assert "key" not in schemas[0].names


def test_what_readers_would_mistake_for_a_key_is_refused(job: VectorJob) -> None:
    job.output = Path(job.output).parent / "key=1" / "out"
    with pytest.raises(OutputError, match=r"below a folder .* 'key=\.\.\.'"):
        job.open()
    assert not list(job.output.rglob("*.json"))
    job.output = job.output.parents[1] / "other=1" / "out"
    job.run()
    check(job)


def test_a_key_of_a_name_that_the_results_need_is_refused(tmp_path: Path) -> None:
    input_ = write_input(tmp_path / "in.parquet", {"Status": ["a"], "text": ["t"]})
    job = VectorJob(input_, tmp_path / "out", keys=("Status",))
    with pytest.raises(InputError, match="partitioned by 'Status': the results have a column"):
        job.open()


def test_an_input_without_rows_is_a_finished_job(tmp_path: Path) -> None:
    schema = pa.schema([("key", pa.string()), ("text", pa.string())])
    job = VectorJob(write_input(tmp_path / "in.parquet", schema.empty_table()), tmp_path / "out")
    job.run()
    assert read_status(str(job.output)).complete
    job.run()


def test_a_block_is_written_from_the_memory_that_it_came_in(job: VectorJob) -> None:
    ledger = job.open()
    writer = ledger.writer(ledger.shards[0])
    batches = RowReader(ledger.dataset, ("text",)).rows(ledger.shards[0])
    rows = [row for batch in batches for row in batch]
    made: list[int] = []
    add = writer.add_block

    def noting(ordinals: np.ndarray, table: pa.Table) -> None:
        made.append(table.column("embedding").chunk(0).values.buffers()[1].address)
        add(ordinals, table)

    writer.add_block = noting  # type: ignore[method-assign]
    job.add(writer, rows)
    (block,) = writer._all_rows()
    assert block.column("embedding").chunk(0).values.buffers()[1].address == made[0]
    ledger.release()


def test_a_long_commit_shows_that_the_run_is_alive(
    job: VectorJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.partition_files.GROUP_ROWS", 2)
    monkeypatch.setitem(merged.__kwdefaults__, "window_rows", 1)
    now_s, seen = [0.0], []

    def later(name: str) -> None:
        now_s[0] += 100.0  # less than a lease lasts, but all steps take longer
        lease = orjson.loads((Path(job.output) / "_lease.json").read_bytes())
        seen.append((name, now_s[0] - lease["heartbeat_s"]))

    ledger = job.open(on_step=later, wall_clock=lambda: now_s[0])
    for shard in ledger.pending():
        writer = ledger.writer(shard)
        for rows in job._slices(ledger, shard, writer):
            for row in rows:
                job.add(writer, [row])
                writer.checkpoint()
        writer.close()
    ledger.release()
    check(job)
    assert max(age_s for _, age_s in seen) <= 100.0
    assert {"before_partition", "before_row_group"} <= {name for name, _ in seen}


def test_a_run_that_lost_its_output_stops_in_the_middle_of_a_commit(job: VectorJob) -> None:
    now_s = [0.0]
    ledger = job.open(wall_clock=lambda: now_s[0])
    writer = ledger.writer(ledger.shards[0])
    batches = RowReader(ledger.dataset, ("text",)).rows(ledger.shards[0])
    job.add(writer, [row for batch in batches for row in batch])
    now_s[0] = 1000.0
    job.open(wall_clock=lambda: now_s[0])  # takes the output over
    with pytest.raises(OutputInUse, match="was taken over"):
        writer.close()
    assert job.files() == []


def run_on(job: VectorJob, url: str, on_step: Callable[[str], None] = lambda _: None) -> None:
    job.output = url
    job.run(on_step=on_step)


def test_a_remote_output_survives_a_crash_at_each_step(job: VectorJob) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    steps: list[str] = []
    job.slice_rows, job.checkpoint_blocks = 3, 2
    run_on(job, "memory://partitioned/whole", steps.append)
    for number in range(len(steps)):
        url = f"memory://partitioned/{number}"
        with pytest.raises(Crash):
            run_on(job, url, crash_at(number))
        job.open(wall_clock=lambda: 1000.0).release()
        run_on(job, url)
        root = f"/partitioned/{number}/results/"
        found = {
            name[len(root) :].rpartition("/")[0]: pq.ParquetFile(fs.open(name)).read().to_pylist()
            for name in fs.find(root)
        }
        assert found == expected(job)
        assert read_status(url).complete
        assert fs.find(f"/partitioned/{number}/_checkpoints") == []
    fs.rm("/partitioned", recursive=True)
