"""`read_status` from files alone, at any moment of a job's life."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import InputError
from storage.lease import STALE_S
from storage.results import ResultRow
from storage.status import JobStatus, read_status
from tests.unit.storage.outputs import Job, write_input

TEXTS = ["a", None, "ccc", "d", "e"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Five rows, one bad, in two shards of three and two."""
    return Job(write_input(tmp_path / "in.parquet", {"text": TEXTS}), tmp_path / "out", 3)


def status_of(job: Job, now_s: float = 0.0) -> JobStatus:
    return read_status(str(job.output), wall_clock=lambda: now_s)


def test_a_job_that_has_just_begun(job: Job) -> None:
    job.open()
    status = status_of(job)
    assert (status.total_rows, status.done_rows, status.total_shards) == (5, 0, 2)
    assert (status.by_status, status.complete, status.job_id) == ({}, False, "job")
    assert status.spec == {"input": str(job.input)}


def test_rows_in_parts_are_done_but_not_committed(job: Job) -> None:
    ledger = job.open()
    writer = ledger.writer(ledger.shards[1])
    writer.add(ResultRow(ordinal=0, row_id="0", status="ok", finish_reason="length",
                         prompt_tokens=2, completion_tokens=7))  # fmt: skip
    writer.checkpoint()
    writer.add(ResultRow(ordinal=1, row_id="1", status="error"))
    status = status_of(job)
    assert (status.committed_rows, status.checkpointed_rows, status.done_shards) == (0, 1, 0)
    assert (status.by_status, status.by_finish_reason) == ({"ok": 1}, {"length": 1})
    assert (status.prompt_tokens, status.completion_tokens) == (2, 7)


def test_a_finished_job(job: Job) -> None:
    job.run()
    status = status_of(job)
    assert status.complete and status.lease is None
    assert (status.committed_rows, status.checkpointed_rows) == (5, 0)
    assert status.by_status == {"ok": 4, "error": 1}
    assert status.by_finish_reason == {"stop": 4}
    assert (status.prompt_tokens, status.completion_tokens) == (6, 4)


def test_rows_are_counted_once_at_every_step(job: Job) -> None:
    seen: list[int] = []
    job.every = 1
    job.run(on_step=lambda _: seen.append(status_of(job).done_rows))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 5)


def test_a_lease_is_shown_while_its_holder_lives(job: Job) -> None:
    ledger = job.open()
    holder = status_of(job).lease
    assert holder is not None and holder.heartbeat_s == 0.0
    assert status_of(job, STALE_S + 1).lease is None
    ledger.release()
    assert status_of(job).lease is None


def test_looking_changes_nothing(job: Job) -> None:
    job.open()
    before = sorted(job.output.rglob("*"))
    status_of(job)
    assert sorted(job.output.rglob("*")) == before


def test_a_folder_without_a_job_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"holds no job \(it has no job\.json\)"):
            read_status(str(folder))
    assert not (tmp_path / "nowhere").exists()
