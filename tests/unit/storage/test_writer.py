"""What a killed process leaves on the disk, and what the writer says of its rows.

`test_commit.py` injects exceptions; here whole outputs are copied at each step, with drafts and
lease, as a kill leaves them: no `finally` of ours tidies up.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from storage.errors import OutputError
from storage.results import ResultRow
from storage.rows import Row
from storage.status import read_status
from storage.writer import ShardWriter
from tests.unit.storage.outputs import Job, answer, write_input

TEXTS = ["a", "bb", None, "d", "ee", "f", "g", None]
IDS = [f"in.parquet:{index}" for index in range(len(TEXTS))]
LATER_S = 3600.0


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Eight rows, two of them bad, in two shards."""
    rows = {"text": TEXTS, "number": list(range(len(TEXTS)))}
    file = write_input(tmp_path / "in.parquet", rows, row_group_size=3)
    return Job(file, tmp_path / "out", 5, kept=("number",))


def first_writer(job: Job) -> ShardWriter:
    ledger = job.open(wall_clock=lambda: LATER_S)
    ledger.release()
    return ledger.writer(ledger.shards[0])


def states_of(job: Job, *, retry_errors: bool = False) -> list[Path]:
    """The output at each step of a run."""
    states: list[Path] = []

    def keep(name: str) -> None:
        states.append(job.output.with_name(f"state-{len(states):02d}-{name}"))
        shutil.copytree(job.output, states[-1])

    job.run(on_step=keep, retry_errors=retry_errors)
    return states


def left_over(output: Path) -> list[Path]:
    folders = ("_tmp", "_checkpoints")
    return [path for folder in folders for path in (output / folder).rglob("*") if path.is_file()]


def test_c03_from_what_a_kill_leaves_at_any_step_every_row_comes_out_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.parts.COMPACT_PARTS", 2)
    states = states_of(job)
    assert any((state / "_lease.json").exists() and left_over(state) for state in states)
    assert {state.name.split("-", 2)[2] for state in states} >= {"parts_merged", "result_durable"}
    for state in states:
        job.output = state
        done = read_status(str(state)).done_rows
        job.answered.clear()
        job.open(wall_clock=lambda: LATER_S).release()  # the lease of the dead is no obstacle
        job.run()
        assert job.row_ids() == IDS
        assert [row["number"] for row in job.results()] == list(range(len(TEXTS)))
        assert len(job.answered) == len(TEXTS) - done
        assert left_over(state) == []


def test_c03_from_what_a_kill_leaves_in_a_retry_every_row_comes_out_once(job: Job) -> None:
    job.run()
    job.answer = lambda row: answer(row._replace(values={"text": row.values["text"] or "mended"}))
    states = states_of(job, retry_errors=True)
    assert len(states) > 10
    for state in states:
        job.output = state
        assert job.row_ids() == IDS  # a reader never loses what was committed
        job.open(wall_clock=lambda: LATER_S).release()
        job.run(retry_errors=True)
        assert job.row_ids() == IDS
        assert [row["attempts"] for row in job.results()] == [1 if text else 2 for text in TEXTS]
        assert read_status(str(state)).by_status == {"ok": len(TEXTS)}
        assert left_over(state) == []


def test_c04_a_place_that_cannot_be_written_is_named_and_its_rows_stay(job: Job) -> None:
    writer = first_writer(job)
    (job.output / "_checkpoints").write_text("in the way")
    writer.add(ResultRow(ordinal=0, row_id="a", status="ok"))
    with pytest.raises(OutputError, match="_checkpoints/shard-00000"):
        writer.checkpoint()
    assert writer.so_far().by_status == {}
    (job.output / "_checkpoints").unlink()
    writer.checkpoint()
    assert writer.so_far().by_status == {"ok": 1}


def test_c07_rows_of_any_status_are_terminal(job: Job) -> None:
    writer = first_writer(job)
    writer.add(ResultRow(ordinal=1, row_id="1", status="error", error_type="x"))
    writer.add(ResultRow(ordinal=3, row_id="3", status="skipped"))
    writer.add(ResultRow(ordinal=4, row_id="4", status="invalid_output", text="{"))
    writer.checkpoint()
    again = first_writer(job)
    assert again.done == {1, 3, 4}
    assert again.is_done(1) and not again.is_done(0)
    assert again.num_missing == 2
    assert again.so_far().by_status == {"error": 1, "skipped": 1, "invalid_output": 1}


def test_an_empty_checkpoint_writes_no_part(job: Job) -> None:
    first_writer(job).checkpoint()
    assert left_over(job.output) == []


def test_a_summary_counts_what_is_in_the_file(job: Job) -> None:
    job.run()
    summary = job.open().committed[0]
    assert (summary.num_rows, summary.num_bytes) == (5, (job.output / summary.file).stat().st_size)
    assert summary.by_status == {"ok": 4, "error": 1}
    assert summary.by_finish_reason == {"stop": 4}
    assert (summary.prompt_tokens, summary.completion_tokens) == (1 + 2 + 1 + 2, 4)


def test_text_that_is_no_unicode_does_not_keep_a_shard_from_being_written(job: Job) -> None:
    def broken(row: Row) -> ResultRow:
        result = answer(row)
        result.text = result.text and result.text + " \ud83d"
        result.error_message = "bad \udcff"
        return result

    job.answer = broken
    job.run()
    row = job.results()[0]
    assert (row["text"], row["error_message"]) == ("A ?", "bad ?")
