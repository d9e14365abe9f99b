"""What a report is made of: a job's telemetry in SQL, added up to a few hundred points.

All times are seconds on the job's axis: its runs laid end to end, each from its first step. A
connection holds the views of `storage.views`; `Telemetry` adds two tables to it, `runs` and
`timeline`, and answers from them. Nothing here knows of figures or pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import duckdb
import numpy as np
from numpy.typing import NDArray

from schedulers.encode_cost import EncodeSample

Columns = Mapping[str, NDArray[Any]]
"""A result by columns; nulls are NaN."""

EVENT_TABLES = ("crossover", "phases", "memory_plan", "costs")
SHARES = (0.5, 0.9, 0.99, 1.0)
MAX_SPANS = 500
MAX_EVALUATIONS = 1500
MAX_LENGTHS = 100_000
MAX_CALLS = 2000
MAX_SAMPLES = 4096

_RUNS = """
    CREATE TEMP TABLE runs AS
    WITH seen AS (
        SELECT run_id, started_s AS at_s,
            started_s + elapsed_s + coalesce(schedule_s, 0) AS end_s, true AS is_step
        FROM steps
        UNION ALL SELECT run_id, at_s, at_s, false FROM crossover
        UNION ALL SELECT run_id, at_s, at_s, false FROM phases
        UNION ALL SELECT run_id, at_s, at_s, false FROM memory_plan
        UNION ALL SELECT run_id, at_s, at_s, false FROM costs
        UNION ALL SELECT run_id, started_s, started_s + elapsed_s, false FROM encodes
    ), spans AS (
        SELECT run_id, coalesce(min(at_s) FILTER (is_step), min(at_s)) AS origin_s,
            max(end_s) AS end_s
        FROM seen GROUP BY run_id
    ), whole AS (
        SELECT regexp_replace(run_id, '-worker-\\d+$', '') AS run, min(origin_s) AS origin_s,
            max(end_s) - min(origin_s) AS duration_s
        FROM spans GROUP BY run
    ), placed AS (
        SELECT *, sum(duration_s) OVER (ORDER BY run) - duration_s AS offset_s FROM whole
    )
    SELECT run_id, placed.origin_s, spans.end_s - placed.origin_s AS duration_s,
        row_number() OVER (ORDER BY run_id) AS number, offset_s
    FROM spans JOIN placed ON placed.run = regexp_replace(run_id, '-worker-\\d+$', '')
"""
"""Run ids begin with the time at which a run began, so their order is the runs' order. The
workers of a run, each under an id of its own, lie side by side.
"""

_TIMELINE = """
    CREATE TEMP TABLE timeline AS
    SELECT number, step, offset_s + started_s - origin_s AS at_s,
        elapsed_s + coalesce(schedule_s, 0) AS busy_s, phase, policy_mode,
        num_prefill_tokens, num_decode_tokens, num_running, num_waiting, num_suspended,
        num_finished, num_seqs, 1 - num_free_blocks / nullif(num_blocks, 0) AS kv_use
    FROM steps JOIN runs USING (run_id)
"""

_BINS = """
    WITH reach AS (
        SELECT *,
            least(floor(at_s / $width), $bins - 1)::BIGINT AS first_bin,
            least(floor((at_s + busy_s) / $width), $bins - 1)::BIGINT AS last_bin
        FROM timeline
    ), spread AS (
        SELECT *, unnest(range(first_bin, last_bin + 1)) AS bin FROM reach
    ), parts AS (
        SELECT *, greatest(1e-9, CASE WHEN first_bin = last_bin THEN busy_s
            ELSE least(at_s + busy_s, (bin + 1) * $width) - greatest(at_s, bin * $width) END
        ) AS part_s
        FROM spread
    ), sums AS (
        SELECT bin,
            sum(num_prefill_tokens * part_s / greatest(busy_s, 1e-9)) / $width AS prefill,
            sum(num_decode_tokens * part_s / greatest(busy_s, 1e-9)) / $width AS decode,
            sum(num_seqs * part_s / greatest(busy_s, 1e-9)) / $width AS seqs,
            sum(kv_use * part_s) / sum(part_s) AS kv_use,
            sum(num_running * part_s) / sum(part_s) AS running,
            sum(num_waiting * part_s) / sum(part_s) AS waiting
        FROM parts GROUP BY bin
    )
    SELECT (range + 0.5) * $width AS at_s, coalesce(prefill, 0) AS prefill,
        coalesce(decode, 0) AS decode, coalesce(seqs, 0) AS seqs, kv_use, running, waiting
    FROM range($bins) LEFT JOIN sums ON bin = range ORDER BY range
"""
"""A step that reaches over several bins gives each its part."""

_PHASE_SHARES = """
    WITH reach AS (
        SELECT phase, at_s, busy_s, unnest(range(
            least(floor(at_s / $width), $bins - 1)::BIGINT,
            least(floor((at_s + busy_s) / $width), $bins - 1)::BIGINT + 1)) AS bin
        FROM timeline
    ), parts AS (
        SELECT bin, phase, greatest(1e-9, least(at_s + busy_s, (bin + 1) * $width)
            - greatest(at_s, bin * $width)) AS part_s
        FROM reach
    )
    SELECT bin * $width AS at_s,
        sum(part_s) FILTER (phase = 'prefill') / sum(part_s) AS prefill,
        sum(part_s) FILTER (phase = 'decode') / sum(part_s) AS decode,
        sum(part_s) FILTER (phase = 'mixed') / sum(part_s) AS mixed,
        sum(part_s) FILTER (phase NOT IN ('prefill', 'decode', 'mixed')) / sum(part_s) AS idle
    FROM parts GROUP BY bin ORDER BY bin
"""

_MODES = """
    WITH marked AS (
        SELECT number, step, at_s, at_s + busy_s AS end_s, policy_mode, coalesce(
            policy_mode <> lag(policy_mode) OVER w OR number <> lag(number) OVER w, true) AS starts
        FROM timeline WINDOW w AS (ORDER BY number, step)
    ), numbered AS (
        SELECT *, sum(starts::INT) OVER (ORDER BY number, step) AS span FROM marked
    )
    SELECT min(at_s) AS start_s, max(end_s) AS end_s, any_value(policy_mode) AS policy_mode
    FROM numbered GROUP BY span ORDER BY span LIMIT $most
"""

_EVALUATIONS = """
    WITH numbered AS (
        SELECT *, row_number() OVER (ORDER BY number, time_s, step) AS row,
            count(*) OVER () AS total
        FROM timed_crossover
    )
    SELECT number, time_s AS at_s, contention, amortisation, margin, hysteresis
    FROM numbered
    WHERE mode_before <> mode_after OR row % ceil(total / $most)::BIGINT = 0 OR row IN (1, total)
    ORDER BY row
"""

_CALLS = """
    WITH numbered AS (
        SELECT *, greatest(0, offset_s + started_s - origin_s) AS at_s,
            row_number() OVER (ORDER BY number, started_s) AS row, count(*) OVER () AS total,
            lag(num_partitions, 1, 0) OVER (PARTITION BY run_id ORDER BY started_s) AS files
        FROM encodes JOIN runs USING (run_id) WHERE num_texts > 0
    )
    SELECT at_s, num_texts, num_tokens, interval_s, files FROM numbered
    WHERE row % ceil(total / $most)::BIGINT = 0 OR row IN (1, total) ORDER BY row
"""
_CALL_TOTALS = """
    SELECT count(*) AS num_calls, coalesce(sum(num_texts), 0)::BIGINT AS num_texts,
        coalesce(max(num_texts), 0) AS most_texts, avg(num_partitions) AS partitions,
        coalesce(max(num_partitions), 0) AS most_partitions,
        coalesce(sum(num_tokens), 0)::BIGINT AS num_tokens,
        coalesce(sum(num_calls), 0)::BIGINT AS num_batches
    FROM encodes
"""

STEP_KIND = """
    CASE WHEN num_decode_tokens = 0 THEN 'prefill'
        WHEN num_prefill_tokens = 0 THEN 'decode' ELSE 'mixed' END
"""
"""What a step computed; its `phase` is what the policy called it."""

_PRICED = f"""
    CREATE TEMP VIEW priced AS
    SELECT predicted_s, realised_s, (predicted_s - realised_s) / realised_s AS error,
        {STEP_KIND} AS kind
    FROM step_costs
    WHERE predicted_s > 0 AND realised_s > 0 AND num_prefill_tokens + num_decode_tokens > 0
"""  # noqa: S608 - made of constants
_COST_CELLS = """
    SELECT kind, avg(predicted_s) AS predicted_s, avg(realised_s) AS realised_s,
        count(*) AS num_steps
    FROM priced
    GROUP BY kind, round(30 * log10(predicted_s)), round(30 * log10(realised_s))
    ORDER BY ALL
"""
_COST_ERRORS = """
    SELECT kind, count(*) AS num_steps, median(abs(error)) AS median_error,
        quantile_cont(abs(error), 0.9) AS p90_error, median(error) AS bias
    FROM priced GROUP BY kind ORDER BY kind
"""

_FINISHED = """
    WITH ends AS (
        SELECT at_s + busy_s AS at_s, sum(num_finished) OVER (ORDER BY number, step) AS finished
        FROM timeline WHERE num_finished > 0
    )
    SELECT max(at_s) AS at_s, max(finished) AS finished
    FROM ends GROUP BY floor(at_s / $width) ORDER BY at_s
"""
_SHARE_AT = """
    WITH ends AS (
        SELECT at_s + busy_s AS at_s, sum(num_finished) OVER (ORDER BY number, step) AS finished
        FROM timeline WHERE num_finished > 0
    )
    SELECT min(at_s) FROM ends WHERE finished >= $share * (SELECT max(finished) FROM ends)
"""


class Run(NamedTuple):
    """One of the job's runs on the time axis."""

    number: int
    run_id: str
    start_s: float
    duration_s: float


class Telemetry:
    """Answers about one job. Owns `runs` and `timeline` in its connection.

    Args:
        con: with the views of `storage.views.open_views`.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
        self.con = con
        con.execute(_RUNS)
        con.execute(_TIMELINE)
        con.execute(_PRICED)
        for table in EVENT_TABLES:
            con.execute(_timed(table))
        self.runs = tuple(
            Run(*row)
            for row in con.execute(
                "SELECT number, run_id, offset_s, duration_s FROM runs ORDER BY number"
            ).fetchall()
        )
        self.total_s = sum(run.duration_s for run in self.runs)
        (counts,) = self.rows(
            "SELECT count(*) AS num_steps, count(*) FILTER (num_suspended > 0) AS num_short, "
            "coalesce(sum(num_prefill_tokens), 0)::BIGINT AS num_prefill, "
            "coalesce(sum(num_decode_tokens), 0)::BIGINT AS num_decode FROM timeline"
        )
        self.num_steps: int = counts["num_steps"]
        self.num_short_steps: int = counts["num_short"]
        self.num_prefill_tokens: int = counts["num_prefill"]
        self.num_decode_tokens: int = counts["num_decode"]

    def rows(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        """A result by rows, nulls as None."""
        return dicts(self.con.execute(sql, values or None))

    def columns(self, sql: str, **values: Any) -> Columns:
        """A result by columns, nulls as NaN."""
        found = self.con.execute(sql, values or None).fetchnumpy()
        return {name: _plain(column) for name, column in found.items()}

    # -- over time --

    def bins(self) -> Columns:
        """Tokens and sequences (of an encoder, texts) per second, KV use, running and waiting, in
        equal stretches of time.
        """
        num_bins = min(150, max(30, self.num_steps // 15))
        return self.columns(_BINS, bins=num_bins, width=self._width_s(num_bins))

    def phase_shares(self) -> Columns:
        """How each stretch of time was divided between the kinds of step."""
        num_bins = 400
        return self.columns(_PHASE_SHARES, bins=num_bins, width=self._width_s(num_bins))

    def modes(self) -> list[tuple[float, float, str]]:
        """Start, end and mode of each stretch in which the policy stayed in one mode."""
        rows = self.rows(_MODES, most=MAX_SPANS)
        return [(row["start_s"], row["end_s"], row["policy_mode"] or "") for row in rows]

    def finished(self) -> Columns:
        """Sequences finished so far, over time."""
        return self.columns(_FINISHED, width=self._width_s(600))

    def finished_at(self) -> dict[float, float]:
        """When each of `SHARES` of the sequences had finished; empty when none has."""
        found: dict[float, float] = {}
        for share in SHARES:
            ((at_s,),) = self.con.execute(_SHARE_AT, {"share": share}).fetchall()
            if at_s is not None:
                found[share] = at_s
        return found

    # -- decisions --

    def events(
        self, table: str, where: str = "true", *, most: int | None = None
    ) -> list[dict[str, Any]]:
        """Rows of an event table in order, with `number` (of the run) and `time_s`."""
        found = self.con.table(f"timed_{table}").filter(where).order("number, time_s, step")
        return dicts(found if most is None else found.limit(most))

    def switches(self) -> list[dict[str, Any]]:
        """The evaluations that changed the mode."""
        return self.events("crossover", "mode_before <> mode_after", most=MAX_SPANS)

    def evaluations(self) -> Columns:
        """Both sides of the crossover over time: all that changed the mode, and enough others."""
        return self.columns(_EVALUATIONS, most=MAX_EVALUATIONS)

    def last(self, table: str, where: str = "true") -> dict[str, Any] | None:
        """The latest row of an event table."""
        found = self.con.table(f"timed_{table}").filter(where)
        rows = dicts(found.order("number DESC, time_s DESC, step DESC").limit(1))
        return rows[0] if rows else None

    # -- encode calls --

    def encode_calls(self) -> Columns:
        """Time, texts, tokens and seconds (until its end, since the end of the call before it) of
        encode calls; of very many, evenly spaced ones.
        """
        return self.columns(_CALLS, most=MAX_CALLS)

    def encode_samples(self) -> list[EncodeSample]:
        """Calls, to fit their cost to."""
        found = self.rows(_CALLS, most=MAX_SAMPLES)
        names = ("num_texts", "num_tokens", "interval_s", "files")
        return [EncodeSample(*(call[name] for name in names)) for call in found]

    def encode_totals(self) -> dict[str, Any]:
        """Encode calls added up."""
        (totals,) = self.rows(_CALL_TOTALS)
        return totals

    def num_truncated(self) -> int:
        """Texts that were cut to the model's length."""
        ((count,),) = self.con.execute("SELECT count(*) FROM results WHERE truncated").fetchall()
        return count

    # -- costs and lengths --

    def cost_cells(self) -> Columns:
        """Predicted and realised seconds of steps: the mean of each cell of a fine grid."""
        return self.columns(_COST_CELLS)

    def cost_errors(self) -> list[dict[str, Any]]:
        """Relative errors of the predictions by kind of step."""
        return self.rows(_COST_ERRORS)

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Lengths of the rows with text, sorted; of very many, evenly spaced ranks."""
        found = self.con.table("results").filter(
            f"status IN ('ok', 'invalid_output') AND {column} > 0"
        )
        counts = found.aggregate(f"{column}, count(*)").order(column).fetchall()
        pairs = np.array(counts, np.int64).reshape(-1, 2)
        lengths = np.repeat(pairs[:, 0], pairs[:, 1])
        return lengths[:: -(-len(lengths) // MAX_LENGTHS) or 1]

    def _width_s(self, num_bins: int) -> float:
        return max(self.total_s, 1e-6) / num_bins


def _timed(table: str) -> str:
    """A view of an event table with `number` (of the run) and `time_s`."""
    return (
        f"CREATE TEMP VIEW timed_{table} AS FROM {table} JOIN runs USING (run_id) "
        "SELECT *, greatest(0, offset_s + at_s - origin_s) AS time_s"
    )


def dicts(found: Any) -> list[dict[str, Any]]:
    """A result by rows."""
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _plain(column: Any) -> NDArray[Any]:
    """A numpy column without a mask."""
    if column.dtype == object:
        return np.ma.filled(column, "")
    return np.ma.filled(column.astype(float), np.nan)
