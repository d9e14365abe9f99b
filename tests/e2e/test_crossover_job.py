"""A job tells what its policy decided and why: tables, views, report, calibration."""

from __future__ import annotations

import random
import time
from dataclasses import fields
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from flows.calibration import hardware_of, store_calibration
from flows.report import write_report
from flows.runner import JobRunner
from flows.spec import JobSpec
from flows.summary import JobSummary
from schedulers.calibration import calibrated
from schedulers.cost import StepCost, StepSample
from schedulers.events import EVENTS
from storage.telemetry import TABLES
from tests.e2e.cases import make_spec, write_table
from tests.e2e.jobs import fake_model
from workers.backends.base import Batch

pytestmark = pytest.mark.e2e

COST = StepCost(
    alpha_p=1e-3, beta_p=2e-5, alpha_d=1e-3, beta_d=4e-5, alpha_mb=1e-3, mix_a=3e-5, mix_b=6e-5
)


class PacedClock:
    """Seconds in which a step takes what a cost model says, and all else next to nothing: real time
    counts a hundredth. So a busy machine does not change what is decided.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._spent_s = 0.0

    def __call__(self) -> float:
        return self._spent_s + 0.01 * time.monotonic()

    def on_execute(self, batch: Batch) -> None:
        decode = sum(segment.is_decode for segment in batch.segments)
        self._spent_s += self._cost.step_s(batch.num_tokens - decode, decode)


def run_paced(spec: JobSpec, cost: StepCost, *, mean_output_tokens: int) -> JobSummary:
    clock = PacedClock(cost)
    model = fake_model(on_execute=clock.on_execute, mean_output_tokens=mean_output_tokens)
    with JobRunner(spec, model=model, clock=clock) as runner:
        for shard in runner.pending:
            runner.submit(shard)
        return runner.finish()


def run(tmp_path: Path, policy: str = "hybrid") -> tuple[Any, duckdb.DuckDBPyConnection]:
    engine = {"policy": policy, "max_seqs": 16, "max_batch_tokens": 256}
    spec = make_spec(tmp_path, 300, sampling={"max_tokens": 40}, engine=engine)
    summary = run_paced(spec, COST, mean_output_tokens=20)
    assert summary.complete
    con = duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True)
    return summary, con


def rows(con: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    return con.sql(query).to_arrow_table().to_pylist()


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_has_its_table(event: type) -> None:
    told = {field.name for field in fields(event)}
    if "cost" in told:
        told = told - {"cost"} | {field.name for field in fields(StepCost)}
    columns = set(TABLES[event.table].names) - {"run_id", "step", "at_s"}
    added = {"limit_bytes", "weights_bytes", "activation_bytes", "kv_bytes", "block_size",
             "num_blocks"} if event.table == "memory_plan" else set()  # fmt: skip
    assert columns == told | added


def test_a_job_explains_itself_in_sql_and_in_its_report(tmp_path: Path) -> None:
    summary, con = run(tmp_path)
    looks = rows(con, "SELECT * FROM crossover ORDER BY step")
    assert looks[0]["trigger"] == "unmeasured"
    assert {look["trigger"] for look in looks} >= {"unmeasured", "probed", "completions"}
    assert all(look["reason"] for look in looks)
    measured = looks[-1]
    assert measured["margin"] == pytest.approx(measured["contention"] - measured["amortisation"])
    assert measured["holders"] == 16
    plans = rows(con, "SELECT * FROM memory_plan ORDER BY step")
    assert plans[0]["form"] == "longest"
    assert plans[-1]["form"] == "moments"
    for plan in plans:
        assert plan["capacity_tokens"] == plan["num_blocks"] * plan["block_size"]
        assert plan["overflow_probability"] == 0.01
        assert plan["kv_bytes"] > 0
    switches = rows(con, "SELECT * FROM phases ORDER BY step")
    assert switches[0]["before"] == "idle"
    assert all(switch["reason"] for switch in switches)
    (short,) = rows(
        con, "SELECT count(*) FILTER (num_suspended > 0) AS n, count(*) AS of FROM steps"
    )
    assert (summary.num_short_steps, summary.num_steps) == (short["n"], short["of"])
    assert "bound 1.00%" in dict(summary.lines())["KV memory"]
    page = Path(write_report(summary.output)).read_text()
    assert f"{len(looks)} looks" in page
    for look in looks:
        if look["mode_before"] != look["mode_after"]:
            assert escape(look["reason"]) in page


def test_predicted_stands_beside_realised(tmp_path: Path) -> None:
    """Fitted to earlier steps only, and still right within a few per cent."""
    _, con = run(tmp_path)
    joined = rows(con, "SELECT * FROM step_costs ORDER BY step")
    assert len(joined) == con.sql("SELECT count(*) FROM steps").fetchall()[0][0]
    later = [row for row in joined if row["predicted_s"] is not None]
    assert len(later) > 0.5 * len(joined)
    errors = sorted(abs(row["predicted_s"] / row["realised_s"] - 1) for row in later)
    assert errors[len(errors) // 2] < 0.15


def test_a_calibration_is_found_used_and_kept_beside_the_refit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    sizes = [(p, 0) for p in (16, 64, 256)] + [(0, d) for d in (1, 4, 16)]
    sizes += [(p, d) for p in (16, 64, 256) for d in (2, 8, 14)]
    model = fake_model()
    found = calibrated(
        [StepSample(p, d, 0, COST.step_s(p, d)) for p, d in sizes * 2],
        hardware=hardware_of("cpu"),
        model_fingerprint=model.fingerprint,
        model="fake",
        dtype="float32",
        created=datetime.now(UTC).isoformat(),
        settings={},
    )
    store_calibration(found)
    _, con = run(tmp_path)
    costs = rows(con, "SELECT * FROM costs ORDER BY step, source")
    assert costs[0]["source"] == "calibration"
    assert costs[0]["alpha_d"] == pytest.approx(COST.alpha_d, rel=0.1)
    assert costs[-1]["source"] == "online"
    (first, *_) = rows(con, "SELECT * FROM crossover ORDER BY step")
    assert (first["trigger"], first["step"]) == ("calibrated", 1)


SHIFTY = StepCost(
    alpha_p=1e-3, beta_p=2e-5, alpha_d=1e-3, beta_d=4e-5, alpha_mb=1e-3,
    mix_a=2e-5, mix_b=-4e-5, mix_c=1.6e-4,
)  # fmt: skip
"""Mixing saves while prompts are most of the tokens, and costs when outputs are."""


def test_a_shift_in_the_middle_can_be_pointed_at(tmp_path: Path) -> None:
    """Long prompts, then short ones: the mode changes after the shift, and the page says when and
    why.
    """
    rng = random.Random(1)
    texts = [" ".join(str(rng.randrange(10**6)) for _ in range(n)) for n in [100] * 500 + [2] * 900]
    source = write_table(tmp_path / "in.parquet", text=pa.array(texts))
    engine = {"max_seqs": 16, "max_batch_tokens": 256}
    spec = make_spec(tmp_path, input=source, sampling={"max_tokens": 60}, engine=engine)
    summary = run_paced(spec, SHIFTY, mean_output_tokens=16)
    con = duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True)
    changes = rows(con, "SELECT * FROM crossover WHERE mode_before <> mode_after ORDER BY step")
    assert [change["mode_after"] for change in changes][-2:] == ["mixed", "exclusive"]
    last = changes[-1]
    assert last["decode_share"] > 0.5
    finished = "SELECT sum(num_finished) AS n FROM steps WHERE step < ?"
    (done,) = con.execute(finished, [last["step"]]).fetchone() or (0,)
    assert 350 < done < 1200
    page = Path(write_report(summary.output)).read_text()
    for change in changes:
        assert escape(change["reason"]) in page


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_other_policies_leave_the_crossover_empty(tmp_path: Path, policy: str) -> None:
    summary, con = run(tmp_path, policy=policy)
    assert rows(con, "SELECT * FROM crossover") == []
    assert rows(con, "SELECT * FROM memory_plan") != []
    assert {row["policy_mode"] for row in rows(con, "SELECT policy_mode FROM steps")} == {policy}
    assert Path(write_report(summary.output)).exists()
