"""What `flows profile` and the report show of a profile: its numbers to text, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from flows.busy import PROCESS
from flows.job_profile import KINDS, PARTS, SIZES, JobProfile, Sum
from flows.report_tables import Table
from flows.summary import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

OVERHEAD = "Overhead is what is neither matrix product (the output projection is one) nor attention"
WIDTH = 110
"""Of the widest table, with steps of all kinds."""
BESIDE = (
    "These threads ran beside the engine: their time is not in the tables above, but their CPU "
    "seconds were taken from the cores that compute."
)
_ENCODE_NAMES = {"handing_s": "between batches: texts, results"}
"""Parts that are something else beside an encoder than beside an engine."""
_LINE = ("imports", "opening the job", "loading the model", "engine and first rows", "finishing")


def parts_table(profile: JobProfile) -> Table:
    """The job's whole line of time, part by part."""
    steps, total_s = profile.steps, profile.total_s
    names = {**PARTS, **(_ENCODE_NAMES if profile.encodes else {})}
    steps_noun = "batches" if profile.encodes else "steps"

    def row(name: str, seconds: float, *, in_steps: bool) -> tuple[str, ...]:
        each = (_us(seconds, steps.num_steps), _us(seconds, steps.num_tokens))
        return name, _s(seconds), _share(seconds, total_s), *(each if in_steps else ("", ""))

    def line(*works: str) -> list[tuple[str, ...]]:
        known = ((work, profile.line.get(work, 0.0)) for work in works)
        return [row(work, seconds, in_steps=False) for work, seconds in known if seconds]

    rows = [
        *line(*_LINE[:-1]),
        *(row(names[key], steps.parts[key], in_steps=True) for key in PARTS if steps.parts[key]),
        *line(_LINE[-1]),
        row(f"{steps_noun} together", steps.total_s, in_steps=True),
        row("all", total_s, in_steps=False),
    ]  # fmt: skip
    each = "us/batch" if profile.encodes else "us/step"
    return Table(("part", "s", "share", each, "us/token"), rows, words=frozenset({0}))


def kinds_table(profile: JobProfile) -> Table:
    """The parts of prefill, decode and mixed steps beside each other."""
    found = {kind: profile.of_kind(kind) for kind in KINDS}
    kinds = {kind: steps for kind, steps in found.items() if steps.num_steps}
    keys = [key for key in PARTS if any(steps.parts[key] for steps in kinds.values())]

    def cells(seconds: float, of_s: float, steps: Sum) -> tuple[str, str, str]:
        each = _us(seconds, steps.num_steps), _us(seconds, steps.num_tokens)
        return _share(seconds, of_s), *each

    def row(name: str, of_kind: Callable[[Sum], Iterable[str]]) -> list[str]:
        return [name, *(cell for steps in kinds.values() for cell in of_kind(steps))]

    rows = [
        *(row(PARTS[key], lambda k, key=key: cells(k.parts[key], k.total_s, k)) for key in keys),
        row("together", lambda k: cells(k.total_s, profile.steps.total_s, k)),
        row("steps", lambda k: ("", f"{k.num_steps:,}", "")),
    ]
    headers = [cell for kind in kinds for cell in (kind, "us/step", "us/token")]
    return Table(("part", *headers), rows, words=frozenset({0}))


def sizes_table(profile: JobProfile) -> Table:
    """Overhead by the number of sequences in a step."""
    rows = [
        (
            size,
            f"{found.num_steps:,}",
            _s(found.total_s),
            _us(found.total_s, found.num_steps),
            _us(found.overhead_s, found.num_steps),
            _share(found.overhead_s, found.total_s),
        )
        for size in SIZES
        if (found := profile.of_size(size)).num_steps
    ]
    headers = ("sequences", "steps", "s", "us/step", "overhead us/step", "overhead")
    return Table(headers, rows, words=frozenset({0}))


def threads_table(profile: JobProfile) -> Table:
    """The other threads, and the CPU seconds of the whole process."""
    works = sorted(profile.threads, key=lambda work: work.thread == PROCESS)
    rows = [
        (
            work.thread,
            work.work,
            "-" if work.cpu_s is None else _s(work.cpu_s),
            _s(work.elapsed_s),
            "-" if work.cpu_s is None else _share(work.cpu_s, profile.total_s),
        )
        for work in works
    ]
    headers = ("thread", "work", "CPU s", "elapsed s", "CPU / job's time")
    return Table(headers, rows, words=frozenset({0, 1}))


def headline(profile: JobProfile) -> str:
    """What the profile is of."""
    cells = profile.cells
    prefill, decode = (
        sum(cell.num_prefill_tokens for cell in cells),
        sum(cell.num_decode_tokens for cell in cells),
    )
    left_out = (
        f"; {counted(profile.num_untimed, 'step')} of an earlier version told no parts and are "
        "left out"
        if profile.num_untimed
        else ""
    )
    noun, tokens = "step", f"{prefill:,} prefill and {decode:,} decode tokens"
    if profile.encodes:
        noun, tokens = "batch", f"{prefill:,} text tokens"
    return (
        f"{counted(profile.num_runs, 'run')}, {counted(profile.steps.num_steps, noun)}, {tokens}, "
        f"{profile.total_s:,.2f} s{left_out}"
    )


def titled_tables(profile: JobProfile) -> Iterator[tuple[str, Table, str]]:
    """Title, table, and the sentence under it. An encoder has one kind of step, and tells no parts
    that an overhead could be made of.
    """
    yield "Where the time went", parts_table(profile), ""
    if not profile.encodes:
        yield "By kind of step", kinds_table(profile), ""
        yield "By sequences in a step", sizes_table(profile), f"{OVERHEAD}."
    if profile.threads:
        yield "Beside the engine", threads_table(profile), BESIDE


def render_profile(profile: JobProfile) -> RenderableType:
    """The profile for the terminal."""
    from rich import table as rich_table
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = [Text(f"Profile: {headline(profile)}")]
    for title, table, sentence in titled_tables(profile):
        drawn = rich_table.Table(title=title, title_justify="left", box=None)
        for index, name in enumerate(table.headers):
            drawn.add_column(
                name, justify="left" if index in table.words else "right", no_wrap=True
            )
        for row in table.rows:
            drawn.add_row(*row)
        shown += [Text(), drawn, *([Text(sentence)] if sentence else [])]
    return Group(*shown)


def _s(seconds: float) -> str:
    return f"{seconds:,.3f}"


def _share(seconds: float, of_s: float) -> str:
    return f"{seconds / of_s:.1%}" if of_s > 0 else "-"


def _us(seconds: float, count: int) -> str:
    if not count:
        return "-"
    each = 1e6 * seconds / count
    return f"{each:,.0f}" if each >= 100 else f"{each:,.1f}"
