"""The tail of a job on several workers.

    python -m tests.bench.tail --json FILE [--quick] [--rounds N]

Real: two workers of one core each, the embedded model, and a job whose last shard holds the longest
rows, though all shards look alike beforehand; with and without moving work. The ideal is half of
what one such worker takes. Seconds are from the first step of any engine to the last one's end.

Simulated: 128 workers, outputs whose 99th percentile is 3.78 times the 95th and whose longest is
9.2 times as long (`batchgen.md`, the production trace), the longest of all in the last shards; the
same router in virtual time.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist, median

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from flows.fleet import coordinator
from flows.runner import run_job
from flows.spec import JobSpec
from schedulers.sim.fleet import FleetConfig, FleetResult, FleetSimulator, SimRow
from schedulers.sim.hardware import HARDWARE
from tests.bench.common import SAMPLE, Check, arguments, show_checks, write_report
from tests.bench.machine import measure_machine

SHORT_WORDS, LONG_WORDS = 20, 260
OUTPUT_TOKENS = 48
WAYS = ("moving", "not moving", "one worker")

P99_BY_P95, LONGEST_BY_P95 = 3.78, 9.2
_NORMAL = NormalDist()
SPREAD = math.log(P99_BY_P95) / (_NORMAL.inv_cdf(0.99) - _NORMAL.inv_cdf(0.95))
"""Standard deviation of the logarithm of an output's length."""
P95_TOKENS = 1024
NUM_WORKERS = 128
SHARD_ROWS = 256
LAST_SHARE = 1 / 64
"""Of the rows: the longest ones, which come last."""


# -- real --


def write_rows(path: Path, num_short: int, num_long: int) -> None:
    """Short rows, then long ones, in one row group: nobody can tell before they are read."""
    words = " ".join(pq.read_table(SAMPLE)["description"].to_pylist()).split()
    rng = random.Random(0)
    lengths = [SHORT_WORDS] * num_short + [LONG_WORDS] * num_long
    starts = [rng.randrange(len(words) - length) for length in lengths]
    texts = [" ".join(words[s : s + n]) for s, n in zip(starts, lengths, strict=True)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=len(texts))


def run_way(way: str, source: Path, num_shards: int) -> dict[str, object]:
    """One job; its figures from its own telemetry."""
    with tempfile.TemporaryDirectory() as folder:
        rows = pq.read_metadata(source).num_rows
        spec = JobSpec.model_validate(
            {
                "input": str(source),
                "prompt": "{{ text }}",
                "output": str(Path(folder) / "out"),
                "engine": {"workers": 1 if way == "one worker" else 2},
                "sampling": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
                "shard_tokens": tokens_of_a_shard(source, rows, num_shards),
            }
        )
        with cores_of(way), stealing(way == "moving"):
            summary = run_job(spec)
        assert summary.by_status == {"ok": rows}, summary.by_status
        return {"way": way, **figures(Path(spec.output) / "job.duckdb")}


def tokens_of_a_shard(source: Path, rows: int, num_shards: int) -> int:
    """So that the job has about that many shards, by the estimate that cuts them."""
    from flows.estimate import estimate_cost
    from flows.model import open_model
    from flows.prepare import prepare

    spec = JobSpec.model_validate(
        {
            "input": str(source),
            "prompt": "{{ text }}",
            "sampling": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
        }
    )
    job = prepare(spec)
    cost = estimate_cost(job, open_model(spec))
    (group,) = job.dataset.files[0].row_groups
    return max(1, round(cost.of(group) * rows / num_shards))


@contextmanager
def cores_of(way: str) -> Iterator[None]:
    """One core for one worker; two for two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[: 1 if way == "one worker" else 2]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def stealing(wanted: bool) -> Iterator[None]:
    """With or without work that moves: nobody runs dry below zero seconds."""
    before = coordinator.STEAL_AHEAD_S
    coordinator.STEAL_AHEAD_S = before if wanted else -1.0
    try:
        yield
    finally:
        coordinator.STEAL_AHEAD_S = before


def figures(database: Path) -> dict[str, object]:
    with duckdb.connect(str(database), read_only=True) as con:
        span_s, busy_s = con.execute(
            "select max(started_s + elapsed_s) - min(started_s), sum(elapsed_s) from steps"
        ).fetchone() or (0.0, 0.0)
        ends = con.execute(
            "select run_id, max(started_s + elapsed_s) as e from steps group by run_id order by e"
        ).fetchall()
        moves = con.execute(
            "select count(*), coalesce(sum(num_rows), 0), coalesce(sum(num_with_kv), 0) from moves"
        ).fetchone()
    assert moves is not None
    return {
        "span_s": round(span_s, 3),
        "busy_s": round(busy_s, 3),
        "apart_s": round(ends[-1][1] - ends[0][1], 3),
        "num_moves": moves[0],
        "num_moved_rows": moves[1],
        "num_with_kv": moves[2],
    }


# -- simulated --


def tail_rows(count: int, seed: int = 0) -> list[SimRow]:
    """Outputs as the production trace has them, the longest last; prompts of 128 to 1024 tokens."""
    rng = random.Random(seed)
    median_tokens = P95_TOKENS / math.exp(SPREAD * _NORMAL.inv_cdf(0.95))
    longest = round(LONGEST_BY_P95 * P95_TOKENS)
    rows = [
        SimRow(
            rng.randint(128, 1024),
            min(longest, max(1, round(rng.lognormvariate(math.log(median_tokens), SPREAD)))),
        )
        for _ in range(count)
    ]
    rows.sort(key=lambda row: row.num_output_tokens)
    at = count - int(count * LAST_SHARE)
    most, last = rows[:at], rows[at:]
    rng.shuffle(most)
    return most + last


def simulate(num_rows: int, *, steal: bool, carries_kv: bool = True) -> FleetResult:
    rows = tail_rows(num_rows)
    config = FleetConfig(
        num_workers=NUM_WORKERS,
        max_seqs=256,
        cost=HARDWARE["h200"].cost,
        max_output_tokens=round(LONGEST_BY_P95 * P95_TOKENS),
        steal=steal,
        carries_kv=carries_kv,
    )
    shards = [rows[at : at + SHARD_ROWS] for at in range(0, num_rows, SHARD_ROWS)]
    return FleetSimulator(config).run(shards)


def main() -> None:
    args = arguments(__doc__)
    rounds = args.rounds or (1 if args.quick else 3)
    num_short, num_long = (60, 12) if args.quick else (240, 40)
    num_rows = NUM_WORKERS * (512 if args.quick else 4096)
    machine = measure_machine()
    runs: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.parquet"
        write_rows(source, num_short, num_long)
        for round_ in range(rounds):
            for way in WAYS if round_ % 2 == 0 else WAYS[::-1]:
                runs.append({"round": round_, **run_way(way, source, num_shards=7)})
                print(runs[-1])
    span = {
        way: median(float(str(run["span_s"])) for run in runs if run["way"] == way) for way in WAYS
    }
    ideal_s = span["one worker"] / 2
    simulated = {
        "moving": simulate(num_rows, steal=True),
        "moving, computed again": simulate(num_rows, steal=True, carries_kv=False),
        "not moving": simulate(num_rows, steal=False),
    }
    checks = [
        Check(
            name="job time on 2 workers, in the ideal's (half of one worker's)",
            value=round(span["moving"] / ideal_s, 3), bound=1.15, sense="<=",
        ),
        Check(
            name="idle share of 128 simulated workers with the production trace's tail",
            value=round(simulated["moving"].idle_share, 4), bound=0.05, sense="<=",
        ),
    ]  # fmt: skip
    summary = {
        "ideal_s": ideal_s,
        "span_s": span,
        "in_the_ideal": {way: round(seconds / ideal_s, 3) for way, seconds in span.items()},
        "simulated": {
            name: {**result._asdict(), "idle_share": result.idle_share}
            for name, result in simulated.items()
        },
    }
    write_report(
        args.json,
        machine=machine.as_json(),
        settings={"rounds": rounds, "num_short": num_short, "num_long": num_long},
        runs=runs,
        checks=checks,
        summary=summary,
    )
    show(Console(), span, ideal_s, simulated)
    show_checks(Console(), checks)


def show(
    console: Console, span: dict[str, float], ideal_s: float, simulated: dict[str, FleetResult]
) -> None:
    table = Table("real, 2 workers", "seconds", "of the ideal")
    for way, seconds in span.items():
        table.add_row(way, f"{seconds:.1f}", f"{seconds / ideal_s:.2f}")
    console.print(table)
    table = Table("simulated, 128 workers", "seconds", "idle", "moves", "rows moved")
    for name, result in simulated.items():
        table.add_row(
            name, f"{result.makespan_s:.0f}", f"{result.idle_share:.1%}",
            str(result.num_moves), str(result.num_moved_rows),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
