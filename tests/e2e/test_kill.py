"""A job that is killed, at any moment, again and again, ends as one that was left alone.

The bound on tokens: one pass, plus per kill what one checkpoint interval and the rows in flight
hold. An interval holds at most the most tokens that the undisturbed run computed in any window of
that length (from its telemetry); it is `checkpoint_s` plus `WRITE_S` for writing the part or
committing the shard that was under way. A row in flight holds at most prompt and completion.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.runner import run_job
from flows.spec import JobSpec
from storage.status import read_status
from tests.e2e.cases import Witness, durable, make_spec, results
from tests.e2e.conftest import SAMPLE
from tests.e2e.jobs import (
    TokenLog,
    comparable,
    counted_real_model,
    fake_model,
    read_results,
    write_dataset,
)

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
WRITE_S = 0.3


@dataclass
class Reader:
    """Reads an output over and over, as somebody else's program would; keeps what was broken."""

    output: Path
    num_reads: int = 0
    faults: list[str] = field(default_factory=list)

    @contextmanager
    def reading(self):
        ended = threading.Event()

        def body() -> None:
            while not ended.wait(0.02):
                self.read_once()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()
        assert self.faults == []
        assert self.num_reads > 20

    def read_once(self) -> None:
        for file in self.output.glob("results/*"):
            self._try(file, lambda path: pq.ParquetFile(path).read())
        self._try(self.output / "job.json", lambda path: json.loads(path.read_bytes()))
        self.num_reads += 1

    def _try(self, file: Path, read: Any) -> None:
        if not file.exists():
            return
        try:
            read(file)
        except Exception as fault:  # noqa: BLE001 - any fault is one, and fails the test
            self.faults.append(f"{file.name}: {fault!r}")


def busiest_window_tokens(output: Path, window_s: float) -> int:
    """Most tokens that an undisturbed run computed in any window of that length."""
    files = sorted((output / "telemetry" / "steps").glob("*.parquet"))
    steps = sorted(
        (row["started_s"] + row["elapsed_s"], row["num_prefill_tokens"] + row["num_decode_tokens"])
        for file in files
        for row in pq.read_table(file).to_pylist()
    )
    assert steps
    most = tokens = first = 0
    for ended_s, num_tokens in steps:
        tokens += num_tokens
        while steps[first][0] < ended_s - window_s:
            tokens -= steps[first][1]
            first += 1
        most = max(most, tokens)
    return most


def longest_row_tokens(rows: list[dict[str, Any]], max_tokens: int) -> int:
    return max(row["prompt_tokens"] for row in rows) + max_tokens


def kill_and_finish(
    folder: Path, spec: JobSpec, log: TokenLog, *options: str, pauses_s: list[float]
) -> int:
    """Start the job, kill it that long after its first step, and again; then let it end. Returns
    how many were killed while they ran.
    """
    job = folder / "job.json"
    job.write_text(json.dumps(spec.model_dump(mode="json")))
    command = [sys.executable, "-m", "tests.e2e.jobs", str(job), "--log", str(log.path), *options]
    num_killed = 0
    for pause_s in [*pauses_s, None]:
        before = log.total()
        with subprocess.Popen(command, cwd=ROOT) as child:
            if pause_s is None:
                break
            while log.total() == before and child.poll() is None:
                time.sleep(0.01)
            time.sleep(pause_s)
            num_killed += child.poll() is None
            child.kill()
    assert child.returncode == 0
    return num_killed


def check_bound(
    spent: int, one_pass: int, spec: JobSpec, whole: Path, rows: list[dict[str, Any]], kills: int
) -> None:
    in_flight = (spec.engine.max_seqs or 0) * longest_row_tokens(rows, spec.sampling.max_tokens)
    interval = busiest_window_tokens(whole, spec.checkpoint_s + WRITE_S)
    print(
        f"one pass {one_pass}, spent {spent} over {kills} kills: {(spent - one_pass) / kills:.0f} "
        f"a kill; bound {interval} an interval + {in_flight} in flight"
    )
    assert spent <= one_pass + kills * (interval + in_flight)
    assert interval + in_flight < one_pass / 2, "the bound would say nothing"


def test_ten_kills_of_2000_rows(tmp_path: Path) -> None:
    fields = {
        "checkpoint_s": 0.3, "shard_tokens": 12_000, "keep_columns": ["n"],
        "sampling": {"max_tokens": 20}, "engine": {"max_seqs": 32},
    }  # fmt: skip
    delay_s = 0.008
    whole = make_spec(tmp_path, 2000, output=str(tmp_path / "whole"), **fields)
    one_pass = Witness(delay_s=delay_s)
    run_job(whole, model=fake_model(on_execute=one_pass))

    spec = make_spec(tmp_path, 2000, **fields)
    rng = random.Random(20)
    pauses_s = [rng.uniform(0.0, 1.0) for _ in range(10)]
    log = TokenLog(tmp_path / "tokens.log")
    with Reader(Path(spec.output)).reading():
        kills = kill_and_finish(tmp_path, spec, log, "--delay-s", str(delay_s), pauses_s=pauses_s)
    assert kills == 10
    rows = results(spec)
    assert [row["n"] for row in rows] == list(range(2000))
    assert comparable(rows) == comparable(results(whole))
    check_bound(log.total(), one_pass.num_tokens, spec, Path(whole.output), rows, kills)


def test_kills_of_a_real_model(tiny_model: Path, tmp_path: Path) -> None:
    """A small Llama in float32, 200 rows, three kills."""
    write_dataset(tmp_path / "in-200.parquet", 200)
    fields = {
        "model": str(tiny_model), "checkpoint_s": 0.3, "shard_tokens": 6000,
        "keep_columns": ["n"], "sampling": {"max_tokens": 24, "temperature": 1.0},
        "engine": {"max_seqs": 8, "dtype": "float32", "memory": "64MiB"},
    }  # fmt: skip
    whole = make_spec(tmp_path, 200, output=str(tmp_path / "whole"), **fields)
    one_pass = TokenLog(tmp_path / "one-pass.log", delay_s=0.004)
    run_job(whole, model=counted_real_model(whole, one_pass))

    spec = make_spec(tmp_path, 200, **fields)
    log = TokenLog(tmp_path / "tokens.log")
    with Reader(Path(spec.output)).reading():
        kills = kill_and_finish(
            tmp_path, spec, log, "--real", "--delay-s", "0.004", pauses_s=[0.8, 0.2, 0.5]
        )
    assert kills >= 2
    rows = results(spec)
    assert [row["n"] for row in rows] == list(range(200))
    assert comparable(rows) == comparable(results(whole))
    check_bound(log.total(), one_pass.total(), spec, Path(whole.output), rows, kills)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_keeps_what_is_finished(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """`flows run`, told to stop, ends in seconds with status 1; the rerun goes on from there."""
    output = tmp_path / "out"
    command = [
        sys.executable, "-m", "flows.cli", "run", str(SAMPLE), "--model", str(tiny_model),
        "--prompt", "{{ description }}", "--limit", "90", "--max-tokens", "80", "--ignore-eos",
        "--local", "--dtype", "float32", "--memory", "64MiB", "--max-seqs", "4",
        "--checkpoint-s", "0.2", "--shard-tokens", "3000", "--output", str(output),
    ]  # fmt: skip
    environment = {**os.environ, "COLUMNS": "200"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        started = time.monotonic()
        while len(durable(output)) < 8:
            assert child.poll() is None, child.stderr and child.stderr.read()
            assert time.monotonic() - started < 60
            time.sleep(0.05)
        child.send_signal(number)
        told = time.monotonic()
        said, _ = child.communicate(timeout=30)
        assert time.monotonic() - told < 10
    assert child.returncode == 1
    assert number.name in said

    kept = durable(output)
    status = read_status(str(output))
    assert 8 <= status.done_rows == len(kept) < 90
    assert status.lease is None, "the output was given back"
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["row_id"]: row for row in read_results(output)}
    assert len(rows) == 90
    for row_id, row in kept.items():
        assert rows[row_id]["run_s"] == row["run_s"], "it was computed again"
