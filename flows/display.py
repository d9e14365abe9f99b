"""Progress and summary on a console: a live display on a terminal, log lines elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flows.progress import ENCODE, STALL_S, Progress, Snapshot
from flows.summary import JobSummary, duration, ordered

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def console_progress(console: Console, *, interval_s: float = 5.0) -> Progress:
    """Progress that writes lines, unless the console is a terminal, where `shown` draws it."""
    if console.is_terminal:
        return Progress()

    def write(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    return Progress(write=write, interval_s=interval_s)


@contextmanager
def shown(progress: Progress, console: Console) -> Generator[Progress]:
    """Run and show: a live display on a terminal, log lines elsewhere."""
    if not console.is_terminal:
        with progress.running():
            yield progress
        return
    from rich.live import Live

    with (
        progress.running(),
        Live(
            get_renderable=lambda: render(progress.snapshot(), stall_s=STALL_S),
            console=console,
            refresh_per_second=4,
            transient=True,
        ),
    ):
        yield progress


def render(snapshot: Snapshot, *, stall_s: float) -> RenderableType:
    """The live display: a bar and two lines."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    counts = ", ".join(f"{count} {status}" for status, count in ordered(snapshot.by_status))
    total = "?" if snapshot.total_rows is None else str(snapshot.total_rows)
    eta = "unknown" if snapshot.eta_s is None else duration(snapshot.eta_s)
    lines = [
        Text(f"{snapshot.phase}  {snapshot.done_rows}/{total} rows  ETA {eta}", style="bold"),
        ProgressBar(total=snapshot.total_rows or 1, completed=snapshot.done_rows, width=60),
        Text(f"{_speed(snapshot)}  {duration(snapshot.elapsed_s)}  {counts}"),
    ]
    if snapshot.total_rows is not None and snapshot.since_finished_s >= stall_s:
        stalled = f"no row finished for {snapshot.since_finished_s:.0f} s"
        lines.append(Text(stalled, style="yellow"))
    return Group(*lines)


def _speed(snapshot: Snapshot) -> str:
    if snapshot.phase == ENCODE:
        return snapshot.encode_speed
    return (
        f"{snapshot.completion_tokens:,} tokens  {snapshot.tokens_per_s:.1f} tok/s  "
        f"prompts {snapshot.prefill_tokens_per_s:.0f} tok/s  "
        f"in flight {snapshot.in_flight}  waiting {snapshot.waiting}"
    )


def summary_table(summary: JobSummary) -> RenderableType:
    """The table at the end of a run."""
    from rich.table import Table

    table = Table(show_header=False, title="Result", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in summary.lines():
        table.add_row(name, value)
    return table
