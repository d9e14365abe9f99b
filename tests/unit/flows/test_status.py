"""`flows status` shows what is done, what is only checkpointed, and whether anybody is at it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from flows.status import render_status, status_lines
from storage.lease import Holder
from storage.status import JobStatus

HOLDER = Holder("run-1", 12, "box", 0.0)


def status(**changes: Any) -> JobStatus:
    values: dict[str, Any] = {
        "job_id": "j", "total_rows": 200, "committed_rows": 100, "checkpointed_rows": 20,
        "total_shards": 2, "done_shards": 1, "by_status": {"error": 3, "ok": 117},
        "by_finish_reason": {"stop": 117, "error": 3}, "prompt_tokens": 5000,
        "completion_tokens": 1234, "lease": HOLDER, "spec": {},
    }  # fmt: skip
    return JobStatus(**{**values, **changes})


def test_rows_shards_and_counts_are_shown() -> None:
    lines = dict(status_lines(status()))
    assert lines["rows"] == "120 of 200 (60.0%)"
    assert lines["not yet committed"] == "20 rows, kept as checkpoints"
    assert lines["shards"] == "1 of 2 committed"
    assert (lines["status ok"], lines["status error"], lines["finish stop"]) == ("117", "3", "117")
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render_status(status()))
    assert "1,234" in capture.get()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "yes, process 12 on box"),
        ({"lease": None}, "no; the same command goes on from here"),
        ({"lease": None, "done_shards": 2}, "no, complete"),
        ({"lease": None, "total_rows": 0, "total_shards": 0, "done_shards": 0}, "complete"),
    ],
)
def test_it_says_whether_the_job_runs(changes: dict[str, Any], expected: str) -> None:
    assert expected in dict(status_lines(status(**changes)))["running"]
