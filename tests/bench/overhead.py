"""What a row costs beside the engine: 1 M rows through flow, shards, S3 and DuckDB.

    python -m tests.bench.overhead --json FILE [--quick] [--rounds N] [--local]

The fake model costs nothing: a job's time is the engine's loop and everything around it. The same
rows through the engine alone, in turns with the jobs, tell the two apart. Memory of the job's
process is read from outside, ten times a second; calls to the Prefect server are the lines of its
access log; CPU seconds are those of each process with its children. With --local input and output
are folders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from tests.bench.common import ROOT, Check, argument_parser, show_checks, write_report
from tests.bench.machine import measure_machine
from tests.bench.memory import MIB, write_rows
from tests.bench.overhead_child import MAX_TOKENS, MEMORY_BYTES
from tests.services.composed import ComposedPrefect, ComposedS3, composed_prefect, composed_s3

FULL = 1_000_000
QUICK = 40_000
POLL_S = 0.1
WARM = 0.5
"""Share of a job after which its memory has to stay where it was."""
MICRO = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One job.

    Attributes:
        total_s: from the flow's start to its end.
        cpu_s: of the job's process, of the S3 server and of the Prefect server.
        memory: (seconds since the process was started, resident bytes), in order.
        calls: to the Prefect server, by method and kind of path.
    """

    num_rows: int
    total_s: float
    cpu_s: Mapping[str, float]
    memory: Sequence[tuple[float, int]]
    calls: Mapping[str, int]

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def memory_growth(self) -> float:
        """Highest memory of the second half of the job, as a multiple of that of the first."""
        end_s = self.memory[-1][0]
        early = [size for at_s, size in self.memory if at_s <= WARM * end_s]
        late = [size for at_s, size in self.memory if at_s > WARM * end_s]
        return max(late) / max(early)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The same rows through the engine alone."""

    num_rows: int
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What a job goes through; no S3 server where folders are used."""

    prefect: ComposedPrefect
    s3: ComposedS3 | None

    def environment(self) -> dict[str, str]:
        s3 = {} if self.s3 is None else self.s3.environment()
        return {**os.environ, **s3, "PREFECT_API_URL": self.prefect.api_url}

    def pids(self) -> dict[str, int]:
        s3 = {} if self.s3 is None else {"s3": self.s3.pid}
        return {"prefect": self.prefect.pid, **s3}


@contextmanager
def services(folder: Path, *, local: bool) -> Generator[Services]:
    """Start the servers of infra/compose.yaml."""
    with ExitStack() as stack:
        s3 = None if local else stack.enter_context(composed_s3(_made(folder / "s3")))
        if s3 is not None and s3.make_bucket():
            raise SystemExit("the S3 server has no bucket")
        prefect = stack.enter_context(composed_prefect(_made(folder / "prefect")))
        yield Services(prefect=prefect, s3=s3)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def place(servers: Services, folder: Path, name: str) -> str:
    """Where something of that name lies."""
    return str(folder / name) if servers.s3 is None else f"s3://{servers.s3.bucket}/{name}"


def put_input(servers: Services, folder: Path, file: Path) -> str:
    """The input's file, where jobs read it from."""
    if servers.s3 is None:
        return str(file)
    import s3fs

    target = place(servers, folder, file.name)
    files = s3fs.S3FileSystem(
        key=servers.s3.key, secret=servers.s3.secret, endpoint_url=servers.s3.endpoint
    )
    files.put_file(str(file), target)
    return target


def run_job(servers: Services, folder: Path, source: str, num_rows: int, index: int) -> JobRun:
    """Run the job in a process of its own, and watch it."""
    spec = {
        "input": source,
        "output": place(servers, folder, f"out-{index}"),
        "prompt": {"column": "text", "raw": True},
        "model": "fake",
        "sampling": {"max_tokens": MAX_TOKENS},
        "engine": {"memory": f"{MEMORY_BYTES >> 30}GiB"},
    }
    file = folder / f"job-{index}.json"
    file.write_text(json.dumps(spec))
    before_s = {name: cpu_seconds(pid) for name, pid in servers.pids().items()}
    calls = servers.prefect.calls()
    told, memory, job_cpu_s = watched("job", file, servers.environment())
    if told["code"] or told["num_rows"] != num_rows:
        raise SystemExit(f"the job of {num_rows} rows ended with {told}")
    made = {kind: n - calls.get(kind, 0) for kind, n in servers.prefect.calls().items()}
    spent_s = {name: cpu_seconds(pid) - before_s[name] for name, pid in servers.pids().items()}
    return JobRun(
        num_rows=num_rows,
        total_s=told["total_s"],
        cpu_s={"job": job_cpu_s, **spent_s},
        memory=memory,
        calls={kind: n for kind, n in made.items() if n},
    )


def run_engine(source: Path, num_rows: int) -> EngineRun:
    """Run the engine alone in a process of its own."""
    told, _, _ = watched("engine", source, dict(os.environ))
    if told["num_rows"] != num_rows:
        raise SystemExit(f"the engine gave {told['num_rows']} results for {num_rows} rows")
    return EngineRun(num_rows=num_rows, total_s=told["total_s"])


def watched(
    kind: str, path: Path, env: Mapping[str, str]
) -> tuple[dict[str, float], list[tuple[float, int]], float]:
    """What a child prints, its memory over time, and its CPU seconds."""
    command = [sys.executable, "-m", "tests.bench.overhead_child", kind, str(path)]
    memory: list[tuple[float, int]] = []
    cpu_s, started_s = 0.0, time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                memory.append((time.monotonic() - started_s, process.memory_info().rss))
                cpu_s = cpu_seconds(child.pid)
            except psutil.NoSuchProcess:
                pass  # it has just ended
            time.sleep(POLL_S)
        printed = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise SystemExit(f"the {kind} process ended with status {child.returncode}")
    return json.loads(printed.splitlines()[-1]), memory, cpu_s


def cpu_seconds(pid: int) -> float:
    """Of a process and its children, those that have ended included."""
    process = psutil.Process(pid)
    total_s = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue  # counted with its parent's ended children
        total_s += times.user + times.system
        total_s += times.children_user + times.children_system
    return total_s


def measure(
    num_rows: int, rounds: int, *, local: bool, console: Console
) -> tuple[list[JobRun], list[EngineRun]]:
    """Jobs and the engine alone, in turns."""
    jobs: list[JobRun] = []
    engines: list[EngineRun] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "rows.parquet"
        write_rows(file, num_rows)
        with services(folder, local=local) as servers:
            source = put_input(servers, folder, file)
            for index in range(rounds):
                engines.append(run_engine(file, num_rows))
                jobs.append(run_job(servers, folder, source, num_rows, index))
                console.print(describe(jobs[-1], engines[-1]))
    return jobs, engines


def describe(job: JobRun, engine: EngineRun) -> str:
    return (
        f"{job.num_rows:,} rows: {job.total_s:.1f} s, the engine alone {engine.total_s:.1f} s, "
        f"{job.num_calls:,} calls to Prefect, "
        f"memory at most {max(size for _, size in job.memory) / MIB:.0f} MiB"
    )


def figures(jobs: Sequence[JobRun], engines: Sequence[EngineRun]) -> dict[str, float]:
    """Medians: microseconds a row, and the rest."""
    num_rows = jobs[0].num_rows

    def a_row(seconds: Sequence[float]) -> float:
        return MICRO * median(seconds) / num_rows

    job_us = a_row([job.total_s for job in jobs])
    engine_us = a_row([engine.total_s for engine in engines])
    return {
        "job_us": job_us,
        "engine_us": engine_us,
        "overhead_us": job_us - engine_us,
        **{f"{name}_cpu_us": a_row([job.cpu_s[name] for job in jobs]) for name in jobs[0].cpu_s},
        "prefect_calls": median(job.num_calls for job in jobs),
        "peak_bytes": median(max(size for _, size in job.memory) for job in jobs),
        "memory_growth": median(job.memory_growth for job in jobs),
    }


def checks_of(jobs: Sequence[JobRun], engines: Sequence[EngineRun]) -> list[Check]:
    found = figures(jobs, engines)
    rows = f"{jobs[0].num_rows:,} rows"
    return [
        Check(
            name=f"coordinator memory, {rows}: highest of the second half of the job, as a "
            "multiple of that of the first",
            value=found["memory_growth"],
            bound=1.10,
            sense="<=",
        ),
        Check(
            name=f"Prefect API calls, {rows}",
            value=found["prefect_calls"],
            bound=1999,
            sense="<=",
        ),
    ]


def thinned(memory: Sequence[tuple[float, int]], most: int = 200) -> list[tuple[float, int]]:
    """The highest readings of at most `most` stretches, for the report."""
    size = -(-len(memory) // most) or 1
    return [
        max(memory[start : start + size], key=lambda reading: reading[1])
        for start in range(0, len(memory), size)
    ]


def show(console: Console, jobs: Sequence[JobRun], engines: Sequence[EngineRun]) -> None:
    found = figures(jobs, engines)
    table = Table(title="A row, in microseconds", title_justify="left")
    table.add_column("what")
    table.add_column("us", justify="right")
    table.add_row("the whole job", f"{found['job_us']:.1f}")
    table.add_row("the engine alone", f"{found['engine_us']:.1f}")
    table.add_row("everything that is not the engine", f"{found['overhead_us']:.1f}")
    for name in jobs[0].cpu_s:
        table.add_row(f"CPU: {name}", f"{found[f'{name}_cpu_us']:.1f}")
    console.print(table)
    calls = Table(title="Calls to the Prefect server, first round", title_justify="left")
    calls.add_column("what")
    calls.add_column("calls", justify="right")
    for kind, number in sorted(jobs[0].calls.items(), key=lambda item: -item[1]):
        calls.add_row(kind, f"{number:,}")
    console.print(calls)
    show_checks(console, checks_of(jobs, engines))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--local", action="store_true", help="folders in place of the S3 server")
    options = parser.parse_args()
    num_rows = QUICK if options.quick else FULL
    rounds = options.rounds or 1
    console = Console()
    jobs, engines = measure(num_rows, rounds, local=options.local, console=console)
    show(console, jobs, engines)
    write_report(
        options.json,
        machine=measure_machine().as_json(),
        settings={
            "num_rows": num_rows,
            "rounds": rounds,
            "quick": options.quick,
            "local": options.local,
        },
        runs=[
            *({"side": "job", **asdict(job), "memory": thinned(job.memory)} for job in jobs),
            *({"side": "engine", **asdict(engine)} for engine in engines),
        ],
        summary=figures(jobs, engines),
        checks=checks_of(jobs, engines),
    )


if __name__ == "__main__":
    main()
