"""Lost work, resume, exactly once: the cases of section A, on whole jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.runner import run_job
from storage.errors import OutputMismatch
from tests.e2e.cases import Crash, Witness, durable, make_spec, results, write_table
from tests.e2e.jobs import TokenLog, comparable, fake_model
from workers.backends.fake import FakeFaults
from workers.errors import BackendError

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def test_c01_c02_c14_killed_at_half_costs_one_pass(tmp_path: Path) -> None:
    """5,000 rows, 8 ms a step, SIGKILL at half: the rest is all that is computed afterwards.

    What a kill loses is a constant (a checkpoint interval and the rows in flight), so its share
    falls with the length of the job: this one runs for about half a minute undisturbed.
    """
    fields = {
        "shard_tokens": 20_000, "checkpoint_s": 0.1, "keep_columns": ["n"],
        "engine": {"max_seqs": 16},
    }  # fmt: skip
    whole = make_spec(tmp_path, 5000, output=str(tmp_path / "whole"), **fields)
    one_pass = Witness()
    run_job(whole, model=fake_model(on_execute=one_pass, check_slots=False))

    spec = make_spec(tmp_path, 5000, **fields)
    job, log = tmp_path / "job.json", TokenLog(tmp_path / "tokens.log")
    job.write_text(json.dumps(spec.model_dump(mode="json")))
    command = [sys.executable, "-m", "tests.e2e.jobs", str(job), "--log", str(log.path)]
    with subprocess.Popen([*command, "--delay-s", "0.008"], cwd=ROOT) as child:
        while log.total() < one_pass.num_tokens / 2:
            assert child.poll() is None
            time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
    spent = log.total()
    kept = durable(Path(spec.output))
    assert 1000 < len(kept) < 4000

    rest = Witness()
    summary = run_job(spec, model=fake_model(on_execute=rest, check_slots=False))
    assert summary.complete
    assert rest.prompts.keys() == one_pass.prompts.keys() - kept.keys()
    assert comparable(results(spec)) == comparable(results(whole))
    print(f"tokens: {(spent + rest.num_tokens) / one_pass.num_tokens:.4f} of one pass")
    assert spent + rest.num_tokens <= 1.02 * one_pass.num_tokens


def test_c08_identical_rows_are_all_answered_across_a_crash(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", text=["the same"] * 40)
    spec = make_spec(tmp_path, input=source, engine={"max_seqs": 4})
    with pytest.raises(Crash):
        run_job(spec, model=fake_model(on_execute=Witness(break_at_token=100)))
    assert 0 < len(durable(Path(spec.output))) < 40
    assert run_job(spec, model=fake_model()).complete
    ids = [row["row_id"] for row in results(spec)]
    assert ids == [f"in.parquet:{index}" for index in range(40)]


def test_c11_resume_with_other_settings_is_refused_by_key(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    run_job(spec, model=fake_model())
    before = results(spec)
    warmer = make_spec(tmp_path, sampling={"max_tokens": 12, "temperature": 0.7})
    with pytest.raises(OutputMismatch, match="temperature"):
        run_job(warmer, model=fake_model())
    with pytest.raises(OutputMismatch, match="model"):
        run_job(spec, model=replace(fake_model(), fingerprint="fake-2"))
    assert results(spec) == before
    fresh = make_spec(tmp_path, sampling={"max_tokens": 12, "temperature": 0.7}, overwrite=True)
    assert run_job(fresh, model=fake_model()).complete


def test_c12_other_kept_columns_load_no_model(tmp_path: Path) -> None:
    first = make_spec(tmp_path, shard_tokens=1000)
    run_job(first, model=fake_model())
    texts = [row["text"] for row in results(first)]

    def load_backend():
        raise AssertionError("the model was loaded")

    idle = replace(fake_model(), load_backend=load_backend)
    second = make_spec(tmp_path, shard_tokens=1000, keep_columns=["n", "id"])
    assert run_job(second, model=idle).complete
    rows = results(second)
    assert [row["text"] for row in rows] == texts
    assert [(row["n"], row["id"]) for row in rows] == [(i, f"row-{i:07d}") for i in range(200)]


def test_c13_retry_errors_computes_only_error_rows(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, shard_tokens=1500, retry_errors=False)
    lost = {f"in-200.parquet:{index}" for index in (3, 4, 77, 199)}
    broken = FakeFaults(nan_request_ids=frozenset(lost))
    first = run_job(spec, model=fake_model(faults=broken))
    assert first.by_status == {"ok": 196, "error": 4}
    before = {row["row_id"]: row for row in results(spec)}

    again = Witness()
    assert run_job(spec, model=fake_model(on_execute=again)).by_status["error"] == 4
    assert not again.prompts, "without --retry-errors nothing is computed"

    retry = Witness()
    mended = make_spec(tmp_path, shard_tokens=1500, retry_errors=True)
    summary = run_job(mended, model=fake_model(on_execute=retry))
    assert (summary.by_status, summary.complete) == ({"ok": 200}, True)
    assert retry.prompts.keys() == lost
    for row in results(spec):
        if row["row_id"] in lost:
            assert (row["attempts"], row["status"]) == (2, "ok")
        else:
            assert row == before[row["row_id"]]


def test_c13_retry_that_dies_keeps_what_it_mended(tmp_path: Path) -> None:
    lost = [f"in-200.parquet:{index}" for index in range(0, 200, 2)]
    broken = FakeFaults(nan_request_ids=frozenset(lost))
    run_job(make_spec(tmp_path), model=fake_model(faults=broken))
    retry = make_spec(tmp_path, retry_errors=True, engine={"max_seqs": 4})
    with pytest.raises(Crash):
        run_job(retry, model=fake_model(on_execute=Witness(break_at_token=800)))
    mended = {
        row["row_id"]
        for file in Path(retry.output).glob("_checkpoints/*/*.parquet")
        for row in pq.read_table(file).to_pylist()
    }
    assert 0 < len(mended) < 100
    rest = Witness()
    assert run_job(retry, model=fake_model(on_execute=rest)).by_status == {"ok": 200}
    assert rest.prompts.keys() == set(lost) - mended


def test_c16_every_row_once_whatever_happens_to_it(tmp_path: Path) -> None:
    """Over-long, empty, null, failing and good rows mixed, over a crash and a rerun."""
    texts = ["a b c", "", None, "w " * 5000, "x y"] * 30
    source = write_table(tmp_path / "in.parquet", text=texts)
    fields = {"input": source, "prompt": {"column": "text"}, "engine": {"max_seqs": 4}}
    spec = make_spec(tmp_path, shard_tokens=500, **fields)
    faults = FakeFaults(
        nan_request_ids=frozenset({"in.parquet:5"}), oom_request_ids=frozenset({"in.parquet:9"})
    )
    with pytest.raises(BackendError):
        run_job(spec, model=fake_model(faults=replace(faults, fail_at_step=60)))
    summary = run_job(spec, model=fake_model(faults=faults))
    rows = results(spec)
    assert [row["row_id"] for row in rows] == [f"in.parquet:{i}" for i in range(150)]
    assert Counter(row["error_type"] for row in rows if row["status"] == "error") == {
        "prompt_too_long": 30, "empty_prompt": 30, "numerical_error": 1, "out_of_memory": 1,
    }  # fmt: skip
    assert summary.by_status == {"ok": 58, "error": 62, "skipped": 30}
