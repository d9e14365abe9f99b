"""`flows status`: where a job stands, from its output alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flows.summary import ordered

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.status import JobStatus


def render_status(status: JobStatus) -> RenderableType:
    """The status for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title="Job", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in status_lines(status):
        table.add_row(name, Text(value))
    return table


def status_lines(status: JobStatus) -> Iterator[tuple[str, str]]:
    """Name and value of each fact."""
    share = f" ({status.done_rows / status.total_rows:.1%})" if status.total_rows else ""
    yield "rows", f"{status.done_rows} of {status.total_rows}{share}"
    if status.checkpointed_rows:
        yield "not yet committed", f"{status.checkpointed_rows} rows, kept as checkpoints"
    yield "shards", f"{status.done_shards} of {status.total_shards} committed"
    for kind, count in ordered(status.by_status):
        yield f"status {kind}", str(count)
    for reason, count in ordered(status.by_finish_reason):
        yield f"finish {reason}", str(count)
    if status.encodes:
        yield "text tokens", f"{status.prompt_tokens:,}"
    else:
        yield "prompt tokens", f"{status.prompt_tokens:,}"
        yield "completion tokens", f"{status.completion_tokens:,}"
    yield "running", _running(status)


def _running(status: JobStatus) -> str:
    if status.lease is not None:
        return f"yes, process {status.lease.pid} on {status.lease.host}"
    return "no, complete" if status.complete else "no; the same command goes on from here"
