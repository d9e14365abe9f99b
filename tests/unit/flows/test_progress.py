"""Progress says where a run stands, at the pace of an injected clock, also when nothing happens."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from flows.display import console_progress, render, shown, summary_table
from flows.progress import Progress, Snapshot
from flows.summary import JobSummary, duration


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Row:
    status: str = "ok"
    finish_reason: str | None = "stop"
    prompt_tokens: int = 5
    completion_tokens: int = 10


@dataclass
class Step:
    phase: str = "decode"
    num_prefill_tokens: int = 100
    num_decode_tokens: int = 4
    num_running: int = 4
    num_waiting: int = 2


class Run:
    """A progress with its clock and its lines."""

    def __init__(self, **options: float) -> None:
        self.clock = Clock()
        self.lines: list[str] = []
        self.progress = Progress(clock=self.clock, write=self.lines.append, **options)

    def wait(self, seconds: int, *, rows_a_second: int = 0) -> None:
        for _ in range(seconds):
            self.clock.now_s += 1.0
            self.progress.add_rows([Row()] * rows_a_second)
            self.progress.tick()


def summary(**changes: object) -> JobSummary:
    values: dict[str, object] = {
        "total_rows": 1000,
        "by_status": {"ok": 970, "error": 20, "invalid_output": 5, "skipped": 5},
        "by_finish_reason": {"stop": 900, "length": 75, "error": 20},
        "prompt_tokens": 12345,
        "completion_tokens": 6789,
        "elapsed_s": 75.0,
        "tokens_per_s": 90.52,
        "output": "out/x",
        "complete": True,
    }
    return JobSummary(**{**values, **changes})  # type: ignore[arg-type]


def test_c49_log_has_one_line_an_interval_with_rows_speed_and_eta() -> None:
    run = Run(interval_s=5.0)
    run.progress.start(total_rows=100)
    run.wait(20, rows_a_second=2)
    assert len(run.lines) == 4
    assert run.lines[-1].startswith("running: 40/100 rows (40.0%), 400 tokens, 20.0 tok/s ")
    assert "ETA 30.0 s" in run.lines[-1]


def test_c49_callback_gets_every_tick() -> None:
    run = Run()
    seen: list[Snapshot] = []
    run.progress.hooks.append(seen.append)
    run.progress.start(total_rows=10)
    run.wait(3, rows_a_second=1)
    assert [snapshot.done_rows for snapshot in seen] == [1, 2, 3]
    assert seen[-1].eta_s == pytest.approx(7.0)


def test_c49_eta_counts_only_what_this_run_did() -> None:
    run = Run()
    run.progress.start(total_rows=100, earlier={"ok": 80, "error": 10})
    assert run.progress.snapshot().eta_s is None
    run.wait(5, rows_a_second=1)
    assert run.progress.snapshot().done_rows == 95
    assert run.progress.snapshot().eta_s == pytest.approx(5.0)


def test_rate_is_that_of_the_last_seconds() -> None:
    run = Run()
    run.progress.start(total_rows=10_000)
    run.wait(100, rows_a_second=1)
    run.wait(40, rows_a_second=3)
    assert run.progress.snapshot().tokens_per_s == pytest.approx(30.0, rel=0.05)


def test_tokens_of_unfinished_rows_count_for_the_speed() -> None:
    run = Run()
    run.progress.start(total_rows=10)
    for _ in range(5):
        run.clock.now_s += 1.0
        run.progress.add_step(Step())
        run.progress.tick()
    snapshot = run.progress.snapshot()
    assert snapshot.tokens_per_s == pytest.approx(4.0)
    assert snapshot.prefill_tokens_per_s == pytest.approx(100.0)
    assert (snapshot.phase, snapshot.in_flight, snapshot.waiting) == ("decode", 4, 2)


def test_c51_stalled_run_says_so_and_goes_on_saying_so() -> None:
    run = Run(interval_s=1e9, stall_s=60.0)
    run.progress.start(total_rows=10)
    run.progress.add_step(Step(num_running=3))
    run.wait(59)
    assert run.lines == []
    run.wait(1)
    assert run.lines == ["no row finished for 60 s, in flight = 3"]
    run.wait(60)
    assert run.lines[1:] == ["no row finished for 120 s, in flight = 3"]


def test_c51_finished_row_ends_the_stall() -> None:
    run = Run(interval_s=1e9, stall_s=60.0)
    run.progress.start(total_rows=10)
    run.wait(50)
    run.progress.add_rows([Row()])
    run.wait(50)
    assert run.lines == []
    run.wait(10)
    assert len(run.lines) == 1


def test_c51_progress_lines_go_on_during_a_stall() -> None:
    run = Run(interval_s=10.0, stall_s=60.0)
    run.progress.start(total_rows=10)
    run.wait(60)
    assert len(run.lines) == 7


def test_c51_complete_run_is_not_stalled() -> None:
    run = Run(interval_s=1e9, stall_s=60.0)
    run.progress.start(total_rows=1)
    run.progress.add_rows([Row()])
    run.wait(200)
    assert run.lines == []


def test_line_before_the_rows_are_counted_tells_what_takes_the_time() -> None:
    run = Run(interval_s=5.0)
    run.progress.set_phase("loading the model")
    run.wait(5)
    assert run.lines == ["loading the model", "loading the model: 5.0 s so far"]


def test_bad_rows_show_in_the_line() -> None:
    run = Run()
    run.progress.start(total_rows=9)
    run.progress.add_rows([Row(), Row(status="error"), Row(status="skipped")])
    assert "3/9 rows (33.3%), 1 bad" in run.progress.snapshot().line()


def test_running_ticks_on_its_own_and_once_more_at_the_end() -> None:
    seen: list[Snapshot] = []
    progress = Progress(hooks=[seen.append])
    with progress.running(every_s=30.0):
        progress.start(total_rows=1)
        progress.add_rows([Row()])
    assert [snapshot.done_rows for snapshot in seen] == [1]


def test_terminal_gets_a_display_and_a_log_gets_none() -> None:
    screen, log = io.StringIO(), io.StringIO()
    progress = Progress()
    with shown(progress, Console(file=screen, force_terminal=True, width=100)):
        progress.start(total_rows=4)
        progress.add_rows([Row()])
    assert "1/4 rows" in screen.getvalue()
    console = Console(file=log, force_terminal=False, width=20)
    with shown(console_progress(console), console) as progress:
        progress.set_phase("loading a model with a [long] name")
    assert log.getvalue() == "loading a model with a [long] name\n"


def test_display_shows_the_stall() -> None:
    run = Run(interval_s=1e9)
    run.progress.start(total_rows=4)
    run.clock.now_s += 75
    out = io.StringIO()
    Console(file=out, width=100).print(render(run.progress.snapshot(), stall_s=60.0))
    assert "no row finished for 75 s" in out.getvalue()


def test_c55_summary_lists_statuses_and_finish_reasons() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(summary(stopped="SIGTERM")))
    text = out.getvalue()
    for expected in (
        "finish stop", "900", "finish length", "75", "finish error", "status invalid_output",
        "6,789", "90.5", "1 min 15 s", "out/x", "SIGTERM",
    ):  # fmt: skip
        assert expected in text


@pytest.mark.parametrize(
    ("by_status", "complete", "max_error_rate", "expected"),
    [
        ({"ok": 95, "error": 5}, True, 0.05, 0),
        ({"ok": 94, "error": 6}, True, 0.05, 1),
        ({"ok": 94, "invalid_output": 6}, True, 0.05, 1),
        ({"error": 100}, True, 0.05, 1),
        ({"error": 100}, True, 1.0, 0),
        ({"ok": 50, "skipped": 50}, True, 0.0, 0),
        ({"ok": 100}, True, 0.0, 0),
        ({"ok": 99}, False, 0.05, 1),
        ({}, True, 0.0, 0),
    ],
)
def test_c25_exit_code_reflects_rows(
    by_status: dict[str, int], complete: bool, max_error_rate: float, expected: int
) -> None:
    assert summary(by_status=by_status, complete=complete).exit_code(max_error_rate) == expected


def test_c25_message_counts_rows() -> None:
    expected = "970 ok, 5 invalid_output, 20 error, 5 skipped of 1000 rows"
    assert summary().message() == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.24, "4.2 s"), (185.0, "3 min 05 s"), (7390.0, "2 h 03 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
