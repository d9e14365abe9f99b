"""`flows profile`: where a job's time went, from what its steps and threads have told.

The engine's line of time is cut without a hole: what came before the first step, then step by step
the parts of the backend, the parts of the engine and what lies between two steps, and what came
behind the last one. So the parts add up to the job's time. Threads beside it are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb

from flows.busy import MAIN, Work
from flows.credentials import storage_options
from flows.errors import SpecError
from flows.report_data import STEP_KIND, dicts
from storage.errors import InputError
from storage.ledger import JOB
from storage.objects import ObjectStore
from storage.views import open_views

KINDS = ("prefill", "decode", "mixed", "encode")
SIZES = ("1-4", "5-16", "17-63", "64+")
"""Sequences of a step."""

PARTS: Mapping[str, str] = {
    "encoder_s": "encoder",
    "products_s": "matrix products",
    "attention_s": "attention",
    "head_s": "output projection",
    "rows_s": "norms, rotation, KV",
    "device_s": "device",
    "sampling_s": "sampling",
    "layout_s": "laying out the batch",
    "backend_s": "other in the backend",
    "plan_s": "plan: the policy",
    "apply_s": "apply: block tables",
    "resume_s": "resume: coroutines",
    "account_s": "account: learning",
    "intake_s": "taking rows in",
    "handing_s": "handing results out",
}
"""The parts of a step, in the order in which they are shown."""

COMPUTE = ("encoder_s", "products_s", "attention_s", "head_s", "device_s")
"""What a step is for; the rest of it is overhead."""

_COUNTS = """
    SELECT count(*), count(DISTINCT run_id) FILTER (products_s IS NOT NULL),
        count(*) FILTER (products_s IS NULL)
    FROM steps WHERE $run IS NULL OR starts_with(run_id, $run)
"""
_LAST_RUN = r"SELECT regexp_replace(max(run_id), '-worker-\d+$', '') FROM steps"
"""Workers have run ids of their own, which begin with the run's."""
_MODEL = "layout_s + products_s + attention_s + rows_s + head_s + sampling_s + device_s"
_CELLS = f"""
    WITH ends AS (
        SELECT *, started_s - lag(started_s + elapsed_s + schedule_s)
            OVER (PARTITION BY run_id ORDER BY step) AS gap_s
        FROM steps WHERE products_s IS NOT NULL AND ($run IS NULL OR starts_with(run_id, $run))
    ), apart AS (
        SELECT * EXCLUDE (intake_s),
            if(phase = 'encode', phase, {STEP_KIND}) AS kind,
            CASE WHEN num_seqs < 5 THEN '1-4' WHEN num_seqs < 17 THEN '5-16'
                WHEN num_seqs < 64 THEN '17-63' ELSE '64+' END AS size,
            if(phase = 'encode', elapsed_s, 0) AS encoder_s,
            if(phase = 'encode', 0, elapsed_s - ({_MODEL})) AS backend_s,
            least(intake_s, coalesce(gap_s, 0)) AS intake_s
        FROM ends
    )
    SELECT kind, size, count(*) AS num_steps,
        sum(num_prefill_tokens)::BIGINT AS num_prefill_tokens,
        sum(num_decode_tokens)::BIGINT AS num_decode_tokens,
        sum(coalesce(gap_s, 0) - intake_s) AS handing_s,
        {", ".join(f"sum({name}) AS {name}" for name in PARTS if name != "handing_s")}
    FROM apart GROUP BY kind, size
"""  # noqa: S608 - made of constants
"""Steps added up. Before the first step of a run nothing was handed out, and taking in is part of
its start.
"""

_THREADS = """
    WITH latest AS (
        SELECT run_id, thread, work, max(cpu_s) AS cpu_s, max(elapsed_s) AS elapsed_s
        FROM threads WHERE $run IS NULL OR starts_with(run_id, $run) GROUP BY ALL
    )
    SELECT thread, work, sum(cpu_s), sum(elapsed_s) FROM latest GROUP BY thread, work
    HAVING sum(elapsed_s) > 0 ORDER BY thread, sum(elapsed_s) DESC
"""


class Cell(NamedTuple):
    """Steps of one kind and size, added up.

    Attributes:
        parts: seconds by `PARTS`.
    """

    kind: str
    size: str
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    parts: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens


class Sum(NamedTuple):
    """Several cells together."""

    num_steps: int
    num_tokens: int
    parts: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def overhead_s(self) -> float:
        """Outside of matrix products and attention."""
        return self.total_s - sum(self.parts[name] for name in COMPUTE)


def add_up(cells: Iterable[Cell]) -> Sum:
    """Cells together."""
    found = list(cells)
    parts = {name: sum(cell.parts[name] for cell in found) for name in PARTS}
    return Sum(sum(c.num_steps for c in found), sum(c.num_tokens for c in found), parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """Where the time of a job, or of its last run, went.

    Attributes:
        num_runs: that have steps with parts.
        num_untimed: steps of an earlier version, which told no parts; they are not in it.
        cells: steps by kind and size.
        line: seconds before the first steps and behind the last ones.
        threads: work beside the engine.
    """

    num_runs: int
    num_untimed: int
    cells: tuple[Cell, ...]
    line: Mapping[str, float]
    threads: tuple[Work, ...]

    @property
    def encodes(self) -> bool:
        """All steps are batches of an encoder, which tells no parts: its time is one."""
        return {cell.kind for cell in self.cells} == {"encode"}

    @property
    def steps(self) -> Sum:
        return add_up(self.cells)

    @property
    def total_s(self) -> float:
        """Of the line of time."""
        return sum(self.line.values()) + self.steps.total_s

    def of_kind(self, kind: str) -> Sum:
        return add_up(cell for cell in self.cells if cell.kind == kind)

    def of_size(self, size: str) -> Sum:
        return add_up(cell for cell in self.cells if cell.size == size)


def read_profile(
    output: str, *, last_run: bool = False, credentials: str | None = None
) -> JobProfile:
    """The profile of a finished or running job.

    Args:
        output: the job's output directory or URL.
        last_run: of its last run only.
        credentials: a Prefect block for an s3:// URL; None: the AWS chain.

    Raises:
        InputError: there is no job at that place.
        SpecError: nothing in it has told where its time went.
    """
    store = ObjectStore(output, storage_options=storage_options(credentials, output))
    if store.read_or_none(JOB) is None:
        raise InputError(f"{output!r} holds no job (it has no {JOB})")
    with closing(open_views(store)) as con:
        found = profile_of(con, last_run=last_run)
    if found is None:
        raise SpecError(f"{output!r} has no profile: no step has been recorded yet")
    if not found.cells:
        raise SpecError(
            f"{output!r} has no profile: its {found.num_untimed:,} steps were recorded by an "
            "earlier version, which did not time their parts"
        )
    return found


def profile_of(con: duckdb.DuckDBPyConnection, *, last_run: bool = False) -> JobProfile | None:
    """As `read_profile`, from a connection with the views of `storage.views`; None without steps.
    Without cells when no step has told its parts.
    """
    values: dict[str, str | None] = {"run": None}
    if last_run:
        ((values["run"],),) = con.execute(_LAST_RUN).fetchall()
    ((num_steps, num_runs, num_untimed),) = con.execute(_COUNTS, values).fetchall()
    if not num_steps:
        return None
    cells = tuple(_cell(row) for row in dicts(con.execute(_CELLS, values)))
    works = [Work(*row) for row in con.execute(_THREADS, values).fetchall()]
    return JobProfile(
        num_runs=num_runs,
        num_untimed=num_untimed,
        cells=cells,
        line={work.work: work.elapsed_s for work in works if work.thread == MAIN},
        threads=tuple(work for work in works if work.thread != MAIN),
    )


def _cell(row: Mapping[str, Any]) -> Cell:
    return Cell(
        row["kind"],
        row["size"],
        row["num_steps"],
        row["num_prefill_tokens"],
        row["num_decode_tokens"],
        {name: row[name] for name in PARTS},
    )
