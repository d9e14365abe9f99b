"""The profile of a job: sums of what its steps told, and a sentence where they told nothing."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.errors import SpecError
from flows.job_profile import PARTS, read_profile
from flows.profile_tables import WIDTH, render_profile
from flows.report import render_report
from storage.errors import InputError
from tests.report_jobs import shifted_job, step, write_record, write_table

EXECUTE = {
    "layout_s": 0.01, "products_s": 0.5, "attention_s": 0.2, "rows_s": 0.1, "head_s": 0.05,
    "sampling_s": 0.04, "device_s": 0.0,
}  # fmt: skip
ENGINE = {"intake_s": 0.02, "plan_s": 0.01, "apply_s": 0.02, "resume_s": 0.03, "account_s": 0.04}


def timed(number: int, started_s: float, **changes: Any) -> dict[str, Any]:
    """A step of 1 s in the backend and 0.1 s around it, of which each part is known."""
    return step(number, started_s, 1.0, schedule_s=0.1, **{**EXECUTE, **ENGINE, **changes})


def works(*rows: tuple[str, str, float | None, float], at_s: float = 9.0) -> list[dict[str, Any]]:
    names = ("thread", "work", "cpu_s", "elapsed_s")
    return [{"at_s": at_s, **dict(zip(names, row, strict=True))} for row in rows]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Three steps 0.05 s apart: a prefill, a decode, and a mixed one; two readings of threads."""
    made = write_record(tmp_path / "out")
    prefill = {"num_prefill_tokens": 90, "num_decode_tokens": 0, "num_seqs": 3}
    mixed = {"num_prefill_tokens": 20, "num_decode_tokens": 70, "num_seqs": 71}
    steps = [
        timed(1, 0.0, **prefill, phase="anything"), timed(2, 1.15), timed(3, 2.30, **mixed)
    ]  # fmt: skip
    write_table(made, "steps", "run-1", steps)
    early = works(("main", "imports", None, 2.0), ("feeder", "reading", 0.1, 0.2), at_s=1.0)
    late = works(
        ("main", "imports", None, 2.0),
        ("main", "finishing", None, 0.5),
        ("feeder", "reading", 0.3, 0.6),
        ("process", "all threads", 7.0, 6.0),
    )
    write_table(made, "threads", "run-1", early + late)
    return made


def test_the_parts_add_up_to_the_jobs_time(output: Path) -> None:
    found = read_profile(str(output))
    steps = found.steps
    assert steps.num_steps == 3 and steps.num_tokens == 90 + 10 + 90
    want = {name: pytest.approx(3 * value) for name, value in {**EXECUTE, **ENGINE}.items()}
    want["backend_s"], want["encoder_s"] = pytest.approx(3 * 0.1), 0.0
    # Before the first step both are part of the start.
    want["intake_s"], want["handing_s"] = pytest.approx(2 * 0.02), pytest.approx(2 * 0.03)
    assert steps.parts == want
    assert steps.parts.keys() == PARTS.keys()
    assert steps.total_s == pytest.approx(3.4), "from the first start to the last end"
    assert found.line == {"imports": 2.0, "finishing": 0.5}
    assert found.total_s == pytest.approx(5.9)


def test_steps_are_split_by_what_they_computed_and_by_size(output: Path) -> None:
    found = read_profile(str(output))
    kinds = {k: found.of_kind(k).num_tokens for k in ("prefill", "decode", "mixed")}
    assert kinds == {"prefill": 90, "decode": 10, "mixed": 90}
    sizes = {size: found.of_size(size).num_steps for size in ("1-4", "5-16", "17-63", "64+")}
    assert sizes == {"1-4": 1, "5-16": 1, "17-63": 0, "64+": 1}
    decode = found.of_size("5-16")
    assert decode.total_s == pytest.approx(1.15)
    assert decode.overhead_s == pytest.approx(1.15 - 0.5 - 0.2 - 0.05)


def test_sizes_have_their_borders(tmp_path: Path) -> None:
    made = write_record(tmp_path / "out")
    counts = [1, 4, 5, 16, 17, 63, 64, 300]
    rows = [timed(n, 2.0 * n, num_seqs=count) for n, count in enumerate(counts)]
    write_table(made, "steps", "run-1", rows)
    found = read_profile(str(made))
    assert [found.of_size(s).num_steps for s in ("1-4", "5-16", "17-63", "64+")] == [2] * 4


def test_of_the_threads_the_last_reading_counts(output: Path) -> None:
    found = read_profile(str(output))
    assert [tuple(work) for work in found.threads] == [
        ("feeder", "reading", 0.3, 0.6), ("process", "all threads", 7.0, 6.0),
    ]  # fmt: skip


def test_runs_are_added_up_or_the_last_one_is_taken(output: Path) -> None:
    write_table(output, "steps", "run-2", [timed(1, 50.0), timed(2, 51.1)])
    write_table(output, "threads", "run-2", works(("feeder", "reading", 1.0, 1.0)))
    both, last = read_profile(str(output)), read_profile(str(output), last_run=True)
    assert (both.num_runs, both.steps.num_steps) == (2, 5)
    assert (last.num_runs, last.steps.num_steps) == (1, 2)
    assert both.steps.total_s == pytest.approx(3.4 + 2.2)
    assert [work.cpu_s for work in both.threads if work.thread == "feeder"] == [1.3]
    assert [work.cpu_s for work in last.threads] == [1.0]


def test_what_is_printed(output: Path) -> None:
    out = StringIO()
    Console(width=WIDTH, file=out).print(render_profile(read_profile(str(output))))
    text = out.getvalue()
    words = " ".join(text.split())
    assert "Profile: 1 run, 3 steps, 110 prefill and 80 decode tokens, 5.90 s" in words
    assert "imports 2.000 33.9%" in words
    assert "matrix products 1.500 25.4% 500,000 7,895" in words
    assert "all 5.900 100.0%" in words
    assert "device" not in text, "what took no time is left out"
    assert "5-16 1 1.150 1,150,000 400,000 34.8%" in words
    assert "feeder reading 0.300 0.600 5.1%" in words
    assert "ran beside the engine" in words
    assert "…" not in text


def test_steps_of_an_earlier_version(output: Path, tmp_path: Path) -> None:
    old = shifted_job(tmp_path / "old")
    with pytest.raises(SpecError, match=r"its 1,800 steps were recorded by an earlier version"):
        read_profile(str(old))
    assert "No step has told where its time went" in render_report(str(old))
    write_table(output, "steps", "run-0", [step(1, 0.0, 1.0), step(2, 1.0, 1.0)])
    found = read_profile(str(output))
    assert (found.num_untimed, found.num_runs, found.steps.num_steps) == (2, 1, 3)
    assert "2 steps of an earlier version told no parts" in render_report(str(output))


def test_without_steps_or_without_a_job_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no step has been recorded yet"):
        read_profile(str(write_record(tmp_path / "out")))
    with pytest.raises(InputError, match=r"holds no job \(it has no job\.json\)"):
        read_profile(str(tmp_path))


def test_the_report_has_the_same_tables(output: Path) -> None:
    page = render_report(str(output))
    assert "1 run, 3 steps, 110 prefill and 80 decode tokens, 5.90 s" in page
    assert "matrix products" in page and "ran beside the engine" in page
