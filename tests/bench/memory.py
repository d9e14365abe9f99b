"""Memory and time to first result from 10 k to 1 M rows: the real runner with a fake model.

    python -m tests.bench.memory --json FILE [--quick] [--rounds N]

Each job runs in a process of its own; its resident memory is read from outside, every 50 ms. The
fake model costs nothing, so what is measured is reading, rendering, tokenising, the engine's loop,
the writing of results and the telemetry.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from tests.bench.common import ROOT, Check, arguments, show_checks, write_report
from tests.bench.machine import measure_machine

FULL = (10_000, 100_000, 1_000_000)
QUICK = (10_000, 40_000)
POLL_S = 0.05
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One job. Times are seconds since its process was started."""

    num_rows: int
    peak_bytes: int
    first_result_s: float
    total_s: float


def write_rows(path: Path, num_rows: int) -> None:
    """`text`: 5 to 40 words a row, in row groups of 50,000, never all in memory."""
    rng = random.Random(num_rows)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(500)]
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 50_000):
            count = min(50_000, num_rows - start)
            texts = [" ".join(rng.choices(words, k=rng.randint(5, 40))) for _ in range(count)]
            writer.write_table(pa.table({"text": texts}, schema=schema))


def run_job_apart(source: Path, output: Path, num_rows: int) -> JobRun:
    """Run the job in a child process and watch its memory."""
    started = time.time()
    command = [sys.executable, "-m", "tests.bench.memory_child", str(source), str(output)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        peak_bytes = peak_of(child)
        printed = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise SystemExit(f"the job of {num_rows} rows ended with status {child.returncode}")
    told = json.loads(printed.splitlines()[-1])
    if told["num_rows"] != num_rows:
        raise SystemExit(f"the job of {num_rows} rows has {told['num_rows']} results")
    return JobRun(
        num_rows=num_rows,
        peak_bytes=peak_bytes,
        first_result_s=told["first_result"] - started,
        total_s=told["end"] - started,
    )


def peak_of(child: subprocess.Popen[str]) -> int:
    """Highest resident memory of a process until it ends, its own children included."""
    process = psutil.Process(child.pid)
    peak_bytes = 0
    while child.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            peak_bytes = max(peak_bytes, sum(one.memory_info().rss for one in family))
        except psutil.NoSuchProcess:
            pass  # one of them ended between the listing and the reading
        time.sleep(POLL_S)
    return peak_bytes


def measure(sizes: Sequence[int], rounds: int, console: Console) -> list[JobRun]:
    """All sizes in turns, `rounds` times."""
    runs: list[JobRun] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in sizes:
            write_rows(Path(folder) / f"{num_rows}.parquet", num_rows)
        for round_index in range(rounds):
            for num_rows in sizes:
                output = Path(folder) / f"out-{num_rows}-{round_index}"
                run = run_job_apart(Path(folder) / f"{num_rows}.parquet", output, num_rows)
                console.print(describe(run))
                runs.append(run)
    return runs


def describe(run: JobRun) -> str:
    return (
        f"{run.num_rows:,} rows: peak {run.peak_bytes / MIB:.0f} MiB, "
        f"first result after {run.first_result_s:.1f} s, all after {run.total_s:.1f} s"
    )


def by_size(runs: Sequence[JobRun], field: str) -> dict[int, float]:
    """Median of one figure, by number of rows."""
    sizes = sorted({run.num_rows for run in runs})
    return {
        size: median(getattr(run, field) for run in runs if run.num_rows == size) for size in sizes
    }


def growth(runs: Sequence[JobRun], field: str) -> float:
    """A figure's highest median of all sizes, as a multiple of that at the smallest size."""
    medians = by_size(runs, field)
    return max(medians.values()) / medians[min(medians)]


def checks_of(runs: Sequence[JobRun]) -> list[Check]:
    sizes = by_size(runs, "peak_bytes")
    span = f"from {min(sizes):,} to {max(sizes):,} rows"
    return [
        Check(
            name=f"peak resident memory {span}, as a multiple of the smallest job's",
            value=growth(runs, "peak_bytes"),
            bound=1.10,
            sense="<=",
        ),
        Check(
            name=f"time to the first result {span}, as a multiple of the smallest job's",
            value=growth(runs, "first_result_s"),
            bound=1.25,
            sense="<=",
        ),
    ]


def show(console: Console, runs: Sequence[JobRun]) -> None:
    table = Table(title="Medians", title_justify="left")
    for column in ("rows", "peak MiB", "first result s", "rows/s"):
        table.add_column(column, justify="right")
    peaks, firsts = by_size(runs, "peak_bytes"), by_size(runs, "first_result_s")
    totals = by_size(runs, "total_s")
    for size, peak_bytes in peaks.items():
        rate = size / (totals[size] - firsts[size])
        cells = (f"{peak_bytes / MIB:.0f}", f"{firsts[size]:.1f}", f"{rate:.0f}")
        table.add_row(f"{size:,}", *cells)
    console.print(table)
    show_checks(console, checks_of(runs))


def main() -> None:
    options = arguments(__doc__)
    sizes = QUICK if options.quick else FULL
    rounds = options.rounds or 1
    console = Console()
    runs = measure(sizes, rounds, console)
    show(console, runs)
    write_report(
        options.json,
        machine=measure_machine().as_json(),
        settings={"sizes": sizes, "rounds": rounds, "quick": options.quick},
        runs=[asdict(run) for run in runs],
        summary={
            field: by_size(runs, field) for field in ("peak_bytes", "first_result_s", "total_s")
        },
        checks=checks_of(runs),
    )


if __name__ == "__main__":
    main()
