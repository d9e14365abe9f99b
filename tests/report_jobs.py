"""Outputs of jobs that never ran: real files with made-up telemetry, for tests of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.ledger import JOB, Ledger
from storage.objects import ObjectStore
from storage.record import JobRecord
from storage.results import ResultColumns, ResultRow
from storage.rows import RowReader
from storage.shards import TokenCost, cut_shards
from storage.source import open_dataset
from storage.telemetry import TABLES, TelemetryWriter

SPEC: Mapping[str, Any] = {
    "input": "in.parquet", "model": "org/model", "engine": {"policy": "adaptive"},
}  # fmt: skip
COST: Mapping[str, float] = {
    "alpha_p": 0.02, "beta_p": 5e-5, "alpha_d": 0.01, "beta_d": 4e-4, "alpha_mb": 0.03,
    "mix_a": 1e-4, "mix_b": 3e-4, "mix_c": 0.0, "gamma": 1e-7, "alpha_switch": 0.002,
}  # fmt: skip
CLOCK_S = 1000.0
"""What the engine's clock says at the first step."""


def write_results(
    folder: Path, rows: Iterable[Mapping[str, Any]], *, spec: Mapping[str, Any] = SPEC
) -> Path:
    """A complete job with these result rows, committed by the real ledger."""
    answers = list(rows)
    source = folder / "in.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(["x"] * len(answers), pa.string())}), source)
    dataset, output = open_dataset(str(source)), folder / "out"
    cost = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
    record = JobRecord(
        job_id="job-1",
        created="2026-12-01T00:00:00+00:00",
        spec=spec,
        generation={},
        output={},
        columns=ResultColumns(),
        shards=cut_shards(dataset, cost=cost, target_tokens=1_000_000),
    )
    ledger = Ledger.open(
        str(output), dataset=dataset, generation={}, output={}, make_record=lambda _: record
    ).ledger
    try:
        for shard in ledger.pending():
            writer = ledger.writer(shard)
            for row in (r for batch in RowReader(dataset, ("text",)).rows(shard) for r in batch):
                answer = {"status": "ok", "finish_reason": "stop", **answers[row.ordinal]}
                writer.add(ResultRow(ordinal=row.ordinal, row_id=row.row_id, **answer))
            ledger.note_committed(writer.close())
    finally:
        ledger.release()
    return output


def write_record(folder: Path, spec: Mapping[str, Any] = SPEC) -> Path:
    """A job of which only the record has been written."""
    record = JobRecord(
        job_id="job-0", created="2026-12-01", spec=spec, generation={}, output={},
        columns=ResultColumns(), shards=(),
    )  # fmt: skip
    ObjectStore(str(folder)).write(JOB, record.to_bytes())
    return folder


def write_table(output: Path, table: str, run_id: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows of a telemetry table; columns that are not given are empty."""
    writer = TelemetryWriter(ObjectStore(str(output)), table, run_id)
    blank = dict.fromkeys(TABLES[table].names)
    for row in rows:
        assert row.keys() <= blank.keys(), row.keys() - blank.keys()
        writer.add({**blank, **row})
    writer.flush(force=True)


def step(number: int, started_s: float, elapsed_s: float, **changes: Any) -> dict[str, Any]:
    """A decode step of ten sequences."""
    values: dict[str, Any] = {
        "step": number, "started_s": CLOCK_S + started_s, "elapsed_s": elapsed_s,
        "schedule_s": 0.0, "phase": "decode", "reason": "", "num_prefill_tokens": 0,
        "num_decode_tokens": 10, "num_context_tokens": 1000, "num_seqs": 10, "num_running": 10,
        "num_waiting": 5, "num_admitted": 0, "num_suspended": 0, "num_finished": 0,
        "num_free_blocks": 25, "num_blocks": 100, "policy_mode": "mixed",
    }  # fmt: skip
    return {**values, **changes}


def look(number: int, at_s: float, **changes: Any) -> dict[str, Any]:
    """An evaluation of the crossover that changes nothing."""
    values: dict[str, Any] = {
        "step": number, "at_s": CLOCK_S + at_s, "trigger": "completions", "p0": 0.01,
        "eta": 1e-5, "mean_prompt_tokens": 200.0, "mean_output_tokens": 80.0,
        "num_samples": 100, "decode_share": 0.29, "demand": 40.0, "holders": 32,
        "max_holders": 64, "theta0": 0.2, "correction": 0.05, "theta": 0.25, "refill": 8, **COST,
        "switch_s": 0.02, "contention": 3e-5, "amortisation": 2e-5, "margin": 1e-5,
        "hysteresis": 5e-6, "crossover_holders": 24.0, "exclusive_s": 0.1, "mixed_s": 0.2,
        "mode_before": "mixed", "mode_after": "mixed", "cooldown": 0, "reason": "no change",
    }  # fmt: skip
    return {**values, **changes}


def switch(number: int, at_s: float, before: str, after: str, reason: str) -> dict[str, Any]:
    """An evaluation that changes the mode."""
    return look(number, at_s, mode_before=before, mode_after=after, reason=reason)


def prices(number: int, at_s: float, source: str, **changes: Any) -> dict[str, Any]:
    """Coefficients in force from a step on."""
    fit = {"source": source, "num_prefill": 100, "num_decode": 400, "num_mixed": 30}
    place = {"step": number, "at_s": CLOCK_S + at_s, "interference_threshold": 0.4}
    return {**place, **fit, **COST, **changes}


def sizing(number: int, at_s: float, **changes: Any) -> dict[str, Any]:
    """A memory plan."""
    values: dict[str, Any] = {
        "step": number, "at_s": CLOCK_S + at_s, "form": "moments", "capacity_tokens": 16000,
        "overflow_probability": 0.01, "num_samples": 100, "mean_tokens": 280.0,
        "std_tokens": 90.0, "holders": 32, "uncut_holders": 41, "holders_paper": 38,
        "holders_paper_sigma": 35, "num_steps": 100, "num_overflows": 2,
        "limit_bytes": 2 * 1024**3, "weights_bytes": 300 * 1024**2,
        "activation_bytes": 64 * 1024**2, "kv_bytes": 1024**3, "block_size": 16,
        "num_blocks": 1000, "reason": "lengths known",
    }  # fmt: skip
    return {**values, **changes}


def phase(number: int, at_s: float, before: str, after: str, reason: str) -> dict[str, Any]:
    """A phase switch."""
    return {
        "step": number, "at_s": CLOCK_S + at_s, "before": before, "after": after,
        "num_decoding": 24, "num_prefilling": 0, "num_waiting": 9, "num_free_blocks": 40,
        "holders": 32, "refill": 8, "reason": reason,
    }  # fmt: skip


def shifted_job(folder: Path, *, num_rows: int = 400, run_id: str = "20261201T1200-aaaa") -> Path:
    """A job whose load shifts in its middle: mixed, then exclusive from a third on, then mixed."""
    import random

    rng = random.Random(7)
    lengths = [min(256, 1 + int(rng.expovariate(1 / 70))) for _ in range(num_rows)]
    output = write_results(
        folder,
        (
            {
                "status": "error" if n % 97 == 96 else "ok", "text": "t",
                "finish_reason": "length" if length == 256 else "stop",
                "prompt_tokens": int(rng.lognormvariate(5, 0.6)), "completion_tokens": length,
            }
            for n, length in enumerate(lengths)
        ),
    )  # fmt: skip
    tables = _shifted_telemetry(rng, num_rows)
    for table, rows in tables.items():
        write_table(output, table, run_id, rows)
    return output


def _shifted_telemetry(rng: Any, num_rows: int) -> dict[str, list[dict[str, Any]]]:
    from schedulers.cost import StepCost

    cost = StepCost(**COST)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    found["costs"] = [prices(1, 0.0, "calibration", beta_d=3e-4)]
    at_s, kind, mode, left, num_steps = 0.0, "idle", "mixed", float(num_rows), 1800
    for number in range(1, num_steps + 1):
        third = 3 * (number - 1) // num_steps
        wanted = "exclusive" if third == 1 else "mixed"
        margin = (1.6e-5 if third == 1 else -1.2e-5) + rng.gauss(0, 3e-6)
        if wanted != mode or number % 40 == 1:
            why = "margin outside the band for two looks" if wanted != mode else "inside the band"
            found["crossover"].append(
                look(
                    number, at_s, margin=margin, contention=4e-5 + margin, amortisation=4e-5,
                    mode_before=mode, mode_after=wanted, reason=why, demand=40.0 + 30 * third,
                    mean_prompt_tokens=200.0 + 300 * (third == 1),
                )
            )  # fmt: skip
            mode = wanted
        new = _kind_of(number, mode)
        if new != kind:
            why = "k holders have finished" if new == "prefill" else "nothing left to prefill"
            found["phases"].append(phase(number, at_s, kind, new, why))
            kind = new
        tokens = 0 if kind == "decode" else rng.randint(100, 900)
        running = max(1, min(32, int(left)))
        decodes = 0 if kind == "prefill" else running
        context = decodes * 250
        elapsed_s = cost.step_s(tokens, decodes, context) * rng.lognormvariate(0, 0.08)
        done = left / (num_steps - number + 1) * (1.6 if number < num_steps else 1.0)
        ended = int(left) - int(left - done) if number < num_steps else int(left + 0.5)
        left -= done
        found["steps"].append(
            step(
                number, at_s, elapsed_s, phase=kind, num_prefill_tokens=tokens,
                num_decode_tokens=decodes, num_context_tokens=context, num_finished=ended,
                num_running=running, num_waiting=int(left), policy_mode=mode,
                num_suspended=int(number % 300 == 0), schedule_s=0.0004,
                num_free_blocks=20 + int(20 * rng.random()) + (40 if running < 32 else 0),
            )
        )  # fmt: skip
        at_s += elapsed_s + 0.0004
        if number in (1, 300, 900):
            found["memory_plan"].append(sizing(number, at_s, holders=20 + number // 50))
        if number in (400, 1200):
            found["costs"].append(prices(number, at_s, "online"))
    return found


def _kind_of(number: int, mode: str) -> str:
    if mode == "mixed":
        return "mixed" if number % 4 == 0 else "decode"
    return "prefill" if number % 30 < 3 else "decode"
