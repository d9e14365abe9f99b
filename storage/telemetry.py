"""Telemetry of a run as Parquet files beside the results. One schema a table, declared here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.objects import ObjectStore

STEPS = pa.schema(
    [
        ("run_id", pa.string()),
        ("step", pa.int64()),
        ("started_s", pa.float64()),
        ("elapsed_s", pa.float64()),
        ("schedule_s", pa.float64()),
        ("phase", pa.string()),
        ("reason", pa.string()),
        ("num_prefill_tokens", pa.int64()),
        ("num_decode_tokens", pa.int64()),
        ("num_context_tokens", pa.int64()),
        ("num_seqs", pa.int64()),
        ("num_running", pa.int64()),
        ("num_waiting", pa.int64()),
        ("num_admitted", pa.int64()),
        ("num_suspended", pa.int64()),
        ("num_finished", pa.int64()),
        ("num_free_blocks", pa.int64()),
        ("num_blocks", pa.int64()),
        ("policy_mode", pa.string()),
        # Parts of `schedule_s`, but `intake_s`, which came before the step.
        ("intake_s", pa.float64()),
        ("plan_s", pa.float64()),
        ("apply_s", pa.float64()),
        ("resume_s", pa.float64()),
        ("account_s", pa.float64()),
        # Parts of `elapsed_s`; what they leave of it is the backend's own.
        ("layout_s", pa.float64()),
        ("products_s", pa.float64()),
        ("attention_s", pa.float64()),
        ("rows_s", pa.float64()),
        ("head_s", pa.float64()),
        ("sampling_s", pa.float64()),
        ("device_s", pa.float64()),
    ]
)
THREADS = pa.schema(
    [
        ("run_id", pa.string()),
        ("at_s", pa.float64()),
        ("thread", pa.string()),
        ("work", pa.string()),
        ("cpu_s", pa.float64()),
        ("elapsed_s", pa.float64()),
    ]
)
"""Work beside the engine, added up since the start of a run: of each kind the latest row counts.
Thread `main` is what the run did before its first step and behind its last one.
"""
_EVENT = [("run_id", pa.string()), ("step", pa.int64()), ("at_s", pa.float64())]
"""Of every event table: the step that it preceded, and the engine's clock."""

COEFFICIENTS = (
    "alpha_p", "beta_p", "alpha_d", "beta_d", "alpha_mb", "mix_a", "mix_b", "mix_c", "gamma",
    "alpha_switch",
)  # fmt: skip
_COEFFICIENTS = [(name, pa.float64()) for name in COEFFICIENTS]

CROSSOVER = pa.schema(
    [
        *_EVENT,
        ("trigger", pa.string()),
        ("p0", pa.float64()),
        ("eta", pa.float64()),
        ("mean_prompt_tokens", pa.float64()),
        ("mean_output_tokens", pa.float64()),
        ("num_samples", pa.int64()),
        ("decode_share", pa.float64()),
        ("demand", pa.float64()),
        ("holders", pa.int64()),
        ("max_holders", pa.int64()),
        ("theta0", pa.float64()),
        ("correction", pa.float64()),
        ("theta", pa.float64()),
        ("refill", pa.int64()),
        *_COEFFICIENTS,
        ("switch_s", pa.float64()),
        ("contention", pa.float64()),
        ("amortisation", pa.float64()),
        ("margin", pa.float64()),
        ("hysteresis", pa.float64()),
        ("crossover_holders", pa.float64()),
        ("exclusive_s", pa.float64()),
        ("mixed_s", pa.float64()),
        ("mode_before", pa.string()),
        ("mode_after", pa.string()),
        ("cooldown", pa.int64()),
        ("reason", pa.string()),
    ]
)
PHASES = pa.schema(
    [
        *_EVENT,
        ("before", pa.string()),
        ("after", pa.string()),
        ("num_decoding", pa.int64()),
        ("num_prefilling", pa.int64()),
        ("num_waiting", pa.int64()),
        ("num_free_blocks", pa.int64()),
        ("holders", pa.int64()),
        ("refill", pa.int64()),
        ("reason", pa.string()),
    ]
)
MEMORY_PLAN = pa.schema(
    [
        *_EVENT,
        ("form", pa.string()),
        ("capacity_tokens", pa.int64()),
        ("overflow_probability", pa.float64()),
        ("num_samples", pa.int64()),
        ("mean_tokens", pa.float64()),
        ("std_tokens", pa.float64()),
        ("holders", pa.int64()),
        ("uncut_holders", pa.int64()),
        ("holders_paper", pa.int64()),
        ("holders_paper_sigma", pa.int64()),
        ("num_steps", pa.int64()),
        ("num_overflows", pa.int64()),
        ("limit_bytes", pa.int64()),
        ("weights_bytes", pa.int64()),
        ("activation_bytes", pa.int64()),
        ("kv_bytes", pa.int64()),
        ("block_size", pa.int64()),
        ("num_blocks", pa.int64()),
        ("reason", pa.string()),
    ]
)
COSTS = pa.schema(
    [
        *_EVENT,
        ("source", pa.string()),
        ("num_prefill", pa.int64()),
        ("num_decode", pa.int64()),
        ("num_mixed", pa.int64()),
        *_COEFFICIENTS,
        ("interference_threshold", pa.float64()),
    ]
)
WORKERS = pa.schema(
    [
        ("run_id", pa.string()),
        ("at_s", pa.float64()),
        ("worker", pa.string()),
        ("life", pa.int64()),
        ("event", pa.string()),
        ("detail", pa.string()),
        ("num_rows", pa.int64()),
        ("num_rows_done", pa.int64()),
    ]
)
"""Lives of worker processes: started, ready, died (with its rows), restarted, given up, ended."""
MOVES = pa.schema(
    [
        ("run_id", pa.string()),
        ("at_s", pa.float64()),
        ("victim", pa.string()),
        ("thief", pa.string()),
        ("num_rows", pa.int64()),
        ("num_begun", pa.int64()),
        ("num_with_kv", pa.int64()),
        ("num_kv_tokens", pa.int64()),
        ("share_s", pa.float64()),
        ("gain_s", pa.float64()),
        ("elapsed_s", pa.float64()),
    ]
)
"""Work that went from one worker to another at a job's tail: what was wanted, and what moved."""
ENCODES = pa.schema(
    [
        ("run_id", pa.string()),
        ("started_s", pa.float64()),
        ("elapsed_s", pa.float64()),
        ("interval_s", pa.float64()),
        ("shard", pa.int64()),
        ("num_partitions", pa.int64()),
        ("num_texts", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_calls", pa.int64()),
        ("width", pa.int64()),
    ]
)
"""Encode calls: a superbatch, or a slice of an oversize partition. `num_calls` are the calls of the
model that it took; `interval_s` is from the end of the call before it to its own.
"""
RETRIES = pa.schema(
    [
        ("run_id", pa.string()),
        ("at_s", pa.float64()),
        ("path", pa.string()),
        ("operation", pa.string()),
        ("cause", pa.string()),
        ("num_retries", pa.int64()),
        ("waited_s", pa.float64()),
    ]
)
"""Requests to an object store that were repeated, by object, since the row before: the latest
operation and cause, `storage.remote.Retried`.
"""
TABLES: Mapping[str, pa.Schema] = {
    "steps": STEPS,
    "threads": THREADS,
    "workers": WORKERS,
    "moves": MOVES,
    "crossover": CROSSOVER,
    "phases": PHASES,
    "memory_plan": MEMORY_PLAN,
    "costs": COSTS,
    "encodes": ENCODES,
    "retries": RETRIES,
}


class TelemetryWriter:
    """Appends records of one table. Flushed in whole files; a crash loses what was not flushed.

    Args:
        store: the output.
        table: a name in `TABLES`.
        run_id: names the files, and is the first column.
        flush_rows: records that make a file worth while; `flush(force=True)` writes fewer.
    """

    def __init__(
        self, store: ObjectStore, table: str, run_id: str, *, flush_rows: int = 1000
    ) -> None:
        self._store = store
        self._table = table
        self._schema = TABLES[table]
        self._run_id = run_id
        self._flush_rows = flush_rows
        self._records: list[Mapping[str, Any]] = []
        self._num_files = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a record with the table's columns; `run_id` only if it is another than the run's."""
        self._records.append(record)

    def flush(self, *, force: bool = False) -> None:
        """Write what has come together."""
        if not self._records or (len(self._records) < self._flush_rows and not force):
            return
        arrays = [
            pa.array(
                [
                    (r.get("run_id") or self._run_id) if f.name == "run_id" else r[f.name]
                    for r in self._records
                ],
                f.type,
            )
            for f in self._schema
        ]
        self._num_files += 1
        name = f"telemetry/{self._table}/{self._run_id}-{self._num_files:05d}.parquet"
        with self._store.writer(name) as file:
            pq.write_table(pa.Table.from_arrays(arrays, schema=self._schema), file)
        self._records = []
