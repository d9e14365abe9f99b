"""A job's output as a recording: what its rows were and what its steps took, for a replay.

Rows count when they have a completion, in the order of the input: those of committed shards, then
those in the checkpoints of shards that are not done. A prompt counts as far as it was computed;
what a shared prefix brought is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.dataset as pads

from flows.credentials import storage_options
from flows.errors import SpecError
from schedulers.cost import StepCost
from schedulers.sim.arrivals import SimRequest
from schedulers.sim.recorded import RecordedStep
from storage.errors import InputError
from storage.ledger import JOB, RESULTS
from storage.marker import MARKERS, marker_name
from storage.objects import ObjectStore
from storage.parts import CHECKPOINTS, Parts, parts_folder
from storage.record import JobRecord
from storage.results import computed_fields
from storage.telemetry import COEFFICIENTS
from storage.views import open_views

GENERATED = ("ok", "invalid_output")
"""Statuses of rows that have a completion."""
COLUMNS = ["status", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"]

_STEPS = """
    SELECT run_id, started_s, elapsed_s, coalesce(schedule_s, 0), num_prefill_tokens,
        num_decode_tokens, num_context_tokens, num_seqs, num_finished
    FROM steps ORDER BY run_id, step
"""
_POOL = """
    SELECT block_size, num_blocks FROM memory_plan
    WHERE block_size > 0 AND num_blocks > 0 ORDER BY run_id DESC, step DESC LIMIT 1
"""
_CALIBRATED = """
    SELECT alpha_p, beta_p, alpha_d, beta_d, alpha_mb, mix_a, mix_b, mix_c, gamma, alpha_switch
    FROM costs WHERE source = 'calibration' ORDER BY run_id DESC, step LIMIT 1
"""


class Pool(NamedTuple):
    """KV memory of the latest run."""

    block_size: int
    num_blocks: int

    @property
    def capacity_tokens(self) -> int:
        return self.block_size * self.num_blocks


class Sample(NamedTuple):
    """One completion: its lengths, and how many prompt tokens shared blocks brought."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a job left behind.

    Attributes:
        url: of the output.
        record: what the job is.
        samples: in the order of the input.
        num_rows: rows that the samples are of.
        steps: of all runs.
        pool: None: no run has told of its memory.
        calibrated: what the policy knew of step costs at the start; None: nothing.
    """

    url: str
    record: JobRecord
    samples: tuple[Sample, ...]
    num_rows: int
    steps: tuple[RecordedStep, ...]
    pool: Pool | None
    calibrated: StepCost | None = None

    @property
    def engine(self) -> Mapping[str, Any]:
        """How the work was to be done."""
        return self.record.spec.get("engine") or {}

    @property
    def policy(self) -> str:
        return str(self.engine.get("policy"))

    @property
    def requests(self) -> list[SimRequest]:
        return [
            SimRequest(
                sample.num_prompt_tokens - sample.num_cached_tokens,
                sample.num_output_tokens,
                sample.max_output_tokens,
            )
            for sample in self.samples
        ]

    @property
    def shared_context_tokens(self) -> float:
        """Positions of shared blocks that a decode token reads on average."""
        total = sum(sample.num_output_tokens for sample in self.samples)
        shared = sum(s.num_cached_tokens * s.num_output_tokens for s in self.samples)
        return shared / total if total else 0.0


def read_recording(url: str, *, credentials: str | None = None) -> Recording:
    """Read an output. Writes nothing; may be called while a run goes on.

    Args:
        url: the output.
        credentials: a Prefect block for an s3:// URL; None: the AWS chain.

    Raises:
        InputError: there is no job at that place.
        SpecError: no row has a completion, or the job makes none.
    """
    store = ObjectStore(url, storage_options=storage_options(credentials, url))
    data = store.read_or_none(JOB)
    if data is None:
        raise InputError(f"{url!r} holds no job (it has no {JOB})")
    record = JobRecord.from_bytes(data, store.path(JOB))
    if record.columns.vector is not None:
        raise SpecError(
            f"{url!r} is a job of task {record.columns.vector.task}, which generates nothing; "
            "flows simulate takes generating jobs: give the output of one, or --synthetic (for "
            "an encoding job, flows plan predicts the time)"
        )
    with closing(open_views(store)) as con:
        steps = tuple(RecordedStep(*row) for row in con.execute(_STEPS).fetchall())
        pool = _pool(con)
        calibrated = _calibrated(con)
    rows = [row for row in _rows(store, record) if _is_generated(row)]
    if not rows:
        raise SpecError(
            f"no row of {url!r} has a completion; run the job first, or give --synthetic"
        )
    samples = tuple(samples_of(rows, record.spec, pool))
    return Recording(
        url=url,
        record=record,
        samples=samples,
        num_rows=len(rows),
        steps=steps,
        pool=pool,
        calibrated=calibrated,
    )


def _calibrated(con: duckdb.DuckDBPyConnection) -> StepCost | None:
    found = con.execute(_CALIBRATED).fetchone()
    return None if found is None else StepCost(**dict(zip(COEFFICIENTS, found, strict=True)))


def _pool(con: duckdb.DuckDBPyConnection) -> Pool | None:
    found = con.execute(_POOL).fetchone()
    return None if found is None else Pool(*found)


def _is_generated(row: Mapping[str, Any]) -> bool:
    return row["status"] in GENERATED and row["prompt_tokens"] > 0 and row["completion_tokens"] > 0


def _rows(store: ObjectStore, record: JobRecord) -> Iterator[dict[str, Any]]:
    """Lengths of all rows that have a result."""
    columns = [*COLUMNS, *(["samples"] if record.columns.samples else [])]
    names = [store.path(name) for name in store.list(RESULTS) if name.endswith(".parquet")]
    if names:
        schema = pa.schema(computed_fields(record.columns))
        files = pads.dataset(names, schema=schema, format="parquet", filesystem=store.fs)
        yield from files.to_table(columns=columns).to_pylist()
    committed, begun = set(store.list(MARKERS)), set(store.list_folders(CHECKPOINTS))
    for shard in record.shards:
        folder = parts_folder(shard.name, 0)
        if folder in begun and marker_name(shard.name) not in committed:
            parts = Parts(store, folder, record.columns, on_step=lambda _: None)
            yield from parts.read(columns).to_pylist()


# -- lengths --


def samples_of(
    rows: Iterable[Mapping[str, Any]], spec: Mapping[str, Any], pool: Pool | None
) -> Iterator[Sample]:
    """The completions of rows, and what each might have had.

    The further samples of a row find the full blocks of its prompt computed.
    """
    kept = list(rows)
    max_tokens = int((spec.get("sampling") or {}).get("max_tokens") or 1)
    shares = not (spec.get("engine") or {}).get("deterministic", False)
    block_size = pool.block_size if pool is not None and shares else None
    longest = _longest(kept, max_tokens, inf if pool is None else pool.capacity_tokens)
    for row in kept:
        prompt, cached = row["prompt_tokens"], row["cached_tokens"]
        for index, (output, reason) in enumerate(_completions(row)):
            if index and block_size is not None:
                cached = (prompt - 1) // block_size * block_size
            allowed = output if reason == "length" else min(max_tokens, longest - prompt)
            yield Sample(prompt, cached, output, max(output, int(allowed)))


def _completions(row: Mapping[str, Any]) -> Iterator[tuple[int, str | None]]:
    """Length and end of each sample of a row."""
    for sample in row.get("samples") or ():
        yield sample["completion_tokens"], sample["finish_reason"]
    if not row.get("samples"):
        yield row["completion_tokens"], row["finish_reason"]


def _longest(rows: Iterable[Mapping[str, Any]], max_tokens: int, capacity: float) -> float:
    """Tokens of the longest row that may be: a completion that was cut before `max_tokens` shows
    how long the model's context is.
    """
    cut = (
        row["prompt_tokens"] + output
        for row in rows
        for output, reason in _completions(row)
        if reason == "length" and output < max_tokens
    )
    return min(capacity, max(cut, default=inf))
