"""What the case tests share: a job over generated rows, and eyes on what a fake model computes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.spec import JobSpec
from tests.e2e.jobs import read_results, write_dataset
from workers.backends.base import Batch


def make_spec(folder: Path, num_rows: int = 200, **fields: Any) -> JobSpec:
    """A job over `num_rows` generated rows; `fields` win over its defaults."""
    if "input" not in fields:
        source = folder / f"in-{num_rows}.parquet"
        if not source.exists():
            write_dataset(source, num_rows)
        fields["input"] = str(source)
    defaults: dict[str, Any] = {"prompt": "{{ text }}", "output": str(folder / "out")}
    defaults["sampling"] = {"max_tokens": 12}
    return JobSpec.model_validate({**defaults, **fields})


def fleet_spec(
    folder: Path,
    num_rows: int,
    *,
    workers: int,
    cluster: str | None = None,
    max_seqs: int | None = None,
    **fields: Any,
) -> JobSpec:
    """As `make_spec`, on worker processes or on a cluster."""
    engine = {"workers": workers, "cluster": cluster, "max_seqs": max_seqs}
    return make_spec(folder, num_rows, engine=engine, **fields)


def in_one_process(spec: JobSpec, output: Path, **fields: Any) -> JobSpec:
    """The same job without workers, into another output."""
    engine = spec.engine.model_copy(update={"workers": None, "cluster": None})
    return spec.model_copy(update={"engine": engine, "output": str(output), **fields})


def write_table(path: Path, **columns: Any) -> str:
    """A Parquet file of these columns; its path."""
    pq.write_table(pa.table(columns), path)
    return str(path)


def results(spec: JobSpec) -> list[dict[str, Any]]:
    """All committed rows of a job, in order."""
    return read_results(Path(spec.output))


def durable(output: Path) -> dict[str, dict[str, Any]]:
    """Rows in result files and checkpoint parts, by row id. May be called while a run goes on."""
    rows: dict[str, dict[str, Any]] = {}
    for file in [*output.glob("_checkpoints/*/*.parquet"), *output.glob("results/*.parquet")]:
        with suppress(FileNotFoundError):  # merged, or its shard committed, while we looked
            rows |= {row["row_id"]: row for row in pq.read_table(file).to_pylist()}
    return rows


def statuses(spec: JobSpec) -> Counter[str]:
    return Counter(row["status"] for row in results(spec))


@dataclass
class Witness:
    """Sees every batch of a fake model: which rows, what prompts, how many tokens.

    Args:
        delay_s: sleep so long in every step.
        break_at_token: raise once that many tokens have been computed, as a crash would.
    """

    delay_s: float = 0.0
    break_at_token: int | None = None
    num_tokens: int = 0
    num_steps: int = 0
    prompts: dict[str, Sequence[int]] = field(default_factory=dict)
    first_step_s: float | None = None

    def __call__(self, batch: Batch) -> None:
        if self.first_step_s is None:
            self.first_step_s = time.monotonic()
        if self.break_at_token is not None and self.num_tokens >= self.break_at_token:
            raise Crash(f"after {self.num_tokens} tokens")
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        for segment in batch.segments:
            request = segment.seq.request
            self.prompts[request.request_id] = request.prompt_token_ids
        if self.delay_s:
            time.sleep(self.delay_s)


class Crash(Exception):
    """The scripted end of a run."""


@contextmanager
def within(seconds: float):
    """Fail when the block has not ended in time; dumps all threads and ends the process then."""
    import faulthandler

    faulthandler.dump_traceback_later(seconds, exit=True)
    started = time.monotonic()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert time.monotonic() - started < seconds


def run_threads() -> list[str]:
    """Threads of a run that are alive."""
    ours = {"feeder", "engine", "collector", "watchdog"}
    return [thread.name for thread in threading.enumerate() if thread.name in ours]
