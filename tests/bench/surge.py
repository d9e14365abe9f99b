"""Ways of encoding a partitioned dataset: superbatches, one call a partition, one call for all.

    python -m tests.bench.surge --json FILE [--quick] [--rounds N] [--ways "A;B"] [--dtype D]

Short real texts (windows of package descriptions, 47 bytes on average) in partitions of lognormal
size, grouped by key; and fewer texts in as many partitions, where the fixed cost of calls weighs
more: what the costs of the first predict for the second is shown beside what is measured. Each way
runs in a process of its own whose model is loaded beforehand; what is timed ends when every
partition's file is there. Memory is that of the process and its children, read from outside, above
what it was when the model was loaded. The first output is the first file.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from schedulers.sizes import SizeStats
from tests.bench.common import (
    ROOT,
    SAMPLE,
    Check,
    Sense,
    argument_parser,
    show_checks,
    write_report,
)
from tests.bench.machine import measure_machine

FULL, SMALL = (200_000, 4_000), (20_000, 4_000)
QUICK, QUICK_SMALL = (10_000, 200), (1_000, 200)
THEIRS_SHARE = 0.2
"""Of the partitions, for sentence-transformers: all of them would take it half an hour."""
SIGMA = 1.72
"""Of the logarithm of a partition's size (`surge.md`, the production fit)."""
MEAN_BYTES = 47
POLL_S = 0.02
MIB = 1 << 20

WAYS = (
    "ours",
    "per partition",
    "fixed batch",
    "sentence-transformers",
    "sentence-transformers, pool",
    "per partition, sentence-transformers, pool",
)
SMALL_WAYS = ("ours", "per partition", "fixed batch")
"""Done on the small partitions, too."""
ABLATION = ("without asynchronous writing", "without zero-copy")
"""Ours with one part taken out; without superbatches it is "per partition"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way, once.

    Attributes:
        total_s: from the loaded model to the last file.
        first_s: to the first file.
        memory_bytes: highest, above that of the loaded model.
        calls: of ours: (texts, tokens, seconds) of each encode call.
    """

    way: str
    num_rows: int
    num_partitions: int
    small: bool
    total_s: float
    first_s: float
    memory_bytes: int
    loaded_bytes: int
    calls: tuple[tuple[int, int, float], ...] = ()

    @property
    def rate(self) -> float:
        """Texts a second."""
        return self.num_rows / self.total_s


# -- the dataset --


def partition_sizes(num_rows: int, num_partitions: int, sigma: float, seed: int = 0) -> list[int]:
    """Lognormal sizes of at least 1 with that sum."""
    rng = random.Random(seed)
    raw = [math.exp(rng.gauss(0.0, sigma)) for _ in range(num_partitions)]
    spare = num_rows - num_partitions
    sizes = [1 + int(spare * value / sum(raw)) for value in raw]
    for index in rng.sample(range(num_partitions), k=num_rows - sum(sizes)):
        sizes[index] += 1
    return sizes


def short_texts(count: int, seed: int = 0) -> list[str]:
    """Windows of words of real descriptions, 47 bytes on average."""
    words = " ".join(pq.read_table(SAMPLE)["description"].to_pylist()).split()
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        wanted = rng.expovariate(1 / (MEAN_BYTES - 12)) + 12
        at = rng.randrange(len(words) - 200)
        text = words[at]
        while len(text) < wanted and at + 1 < len(words):
            at += 1
            text += " " + words[at]
        texts.append(text)
    return texts


def write_dataset(path: Path, sizes: Sequence[int]) -> None:
    keys = [f"p{index:05d}" for index, size in enumerate(sizes) for _ in range(size)]
    table = pa.table({"key": keys, "text": short_texts(len(keys))})
    pq.write_table(table, path, row_group_size=20_000)


# -- a run --


class Watch:
    """Reads a process's memory, and looks for its first file, until it ends."""

    def __init__(self, child: subprocess.Popen[str], output: Path) -> None:
        self._child = child
        self._output = output
        self.loaded_bytes = self.peak_bytes = 0
        self.started_s: float | None = None
        self.first_s: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ready(self) -> None:
        self.started_s = time.monotonic()
        self.loaded_bytes = self.peak_bytes = _memory(self._child.pid)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while self._child.poll() is None:
            if self.started_s is not None:
                if turn % 5 == 0:
                    self.peak_bytes = max(self.peak_bytes, _memory(self._child.pid))
                if self.first_s is None and _has_file(self._output):
                    self.first_s = time.monotonic() - self.started_s
            turn += 1
            time.sleep(POLL_S)


def _memory(pid: int) -> int:
    """Of a process and its children; pages that they share count once for each."""
    total = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:
        return total
    return total


def _has_file(output: Path) -> bool:
    root = output / "results" if (output / "job.json").exists() else output
    return next(root.glob("key=*/*.parquet"), None) is not None


def run_way(
    way: str, source: Path, folder: Path, model: str, dtype: str, *, small: bool = False
) -> Run:
    output = folder / f"out-{time.monotonic_ns()}"
    arguments = [way, str(source), str(output), model, dtype]
    command = [sys.executable, "-m", "tests.bench.surge_child", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        watch = Watch(child, output)
        told: dict[str, float] = {}
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == "ready":
                watch.ready()
            elif line.startswith("{"):
                told = json.loads(line)
        watch.join()
    keys = pq.read_table(source, columns=["key"])["key"]
    if child.returncode or told.get("num_rows") != len(keys):
        raise SystemExit(f"{way} ended with status {child.returncode} and told {told}")
    num_files = sum(1 for _ in output.rglob("key=*/*.parquet"))
    num_partitions = len(keys.unique())
    assert num_files == num_partitions, (way, num_files, num_partitions)
    return Run(
        way=way,
        num_rows=len(keys),
        num_partitions=num_partitions,
        small=small,
        total_s=told["total_s"],
        first_s=watch.first_s or told["total_s"],
        memory_bytes=watch.peak_bytes - watch.loaded_bytes,
        loaded_bytes=watch.loaded_bytes,
        calls=calls_of(output),
    )


def calls_of(output: Path) -> tuple[tuple[int, int, float], ...]:
    """The encode calls that a job's telemetry tells of."""
    files = sorted((output / "telemetry" / "encodes").glob("*.parquet"))
    if not files:
        return ()
    table = pa.concat_tables([pq.read_table(file) for file in files])
    columns = (table[name].to_pylist() for name in ("num_texts", "num_tokens", "elapsed_s"))
    return tuple(zip(*columns, strict=True))


# -- figures --


class Medians:
    """The runs of one dataset, by way."""

    def __init__(self, runs: Sequence[Run], *, small: bool) -> None:
        self.runs = [run for run in runs if run.small == small]
        self.ways = list(dict.fromkeys(run.way for run in self.runs))

    def of(self, way: str, value: Callable[[Run], float]) -> float:
        return median(value(run) for run in self.runs if run.way == way)

    def total_s(self, way: str) -> float:
        return self.of(way, lambda run: run.total_s)

    def rate(self, way: str) -> float:
        return self.of(way, lambda run: run.rate)

    def memory(self, way: str) -> float:
        return self.of(way, lambda run: run.memory_bytes)

    def calls(self, way: str) -> float:
        return self.of(way, lambda run: len(run.calls))

    @property
    def call_s(self) -> float:
        """c: what a call costs all in all, its commit included: by two jobs that differ in the
        number of calls alone.
        """
        more_s = self.total_s("per partition") - self.total_s("fixed batch")
        return max(0.0, more_s / (self.calls("per partition") - self.calls("fixed batch")))

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = {
            way: {
                "texts_per_s": self.rate(way),
                "total_s": self.total_s(way),
                "first_s": self.of(way, lambda run: run.first_s),
                "memory_mib": self.memory(way) / MIB,
                "num_calls": self.calls(way),
            }
            for way in self.ways
        }
        if {"per partition", "fixed batch"} <= set(self.ways):
            found["call_ms"] = 1e3 * self.call_s
        return found


def predicted_gain(small: Medians, call_s: float) -> float:
    """T(P) / T(K) of the small partitions, by the cost of a call on the large ones."""
    rest_s = small.total_s("fixed batch") - small.calls("fixed batch") * call_s
    many_s, few_s = (rest_s + small.calls(way) * call_s for way in ("per partition", "ours"))
    return many_s / few_s


def checks_of(runs: Sequence[Run]) -> list[Check]:
    """Those of which both sides have run."""
    large, small = Medians(runs, small=False), Medians(runs, small=True)
    checks: list[Check] = []

    def add(name: str, value: float, bound: float, sense: Sense = ">=") -> None:
        checks.append(Check(name=name, value=round(value, 3), bound=bound, sense=sense))

    def ratio(name: str, other: str, bound: float) -> None:
        if {"ours", other} <= set(large.ways):
            add(name, large.rate("ours") / large.rate(other), bound)

    if set(SMALL_WAYS) <= set(small.ways) & set(large.ways):
        gain = predicted_gain(small, large.call_s)
        add(
            "small partitions: texts/s, ours / a call for each, where the cost model predicts "
            f"{gain:.2f}",
            small.rate("ours") / small.rate("per partition"),
            1.9 if gain >= 1.9 else 1.0,
        )
    ratio("texts/s, ours / sentence-transformers' pool, a call for each partition",
          "per partition, sentence-transformers, pool", 1.9)  # fmt: skip
    ratio("texts/s, ours / the fixed batch", "fixed batch", 0.97)
    theirs = [way for way in large.ways if way.startswith("sentence-transformers")]
    if theirs and "ours" in large.ways:
        best = max(theirs, key=large.rate)
        ratio(f"texts/s, ours / {best} (its best way)", best, 1.3)
    if {"ours", "fixed batch"} <= set(large.ways):
        add(
            "memory above the loaded model, ours / the fixed batch",
            large.memory("ours") / large.memory("fixed batch"), 0.1, "<=",
        )  # fmt: skip
    return checks


def show(console: Console, runs: Sequence[Run]) -> None:
    for small in (False, True):
        found = Medians(runs, small=small)
        title = "Small partitions" if small else "All"
        table = Table(
            "way", "texts/s", "seconds", "first file s", "memory MiB", "calls", title=title
        )
        for way in found.ways:
            table.add_row(
                way,
                f"{found.rate(way):,.0f}",
                f"{found.total_s(way):.1f}",
                f"{found.of(way, lambda run: run.first_s):.2f}",
                f"{found.memory(way) / MIB:.0f}",
                f"{found.calls(way):,.0f}",
            )
        if found.ways:
            console.print(table)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the partitions of both datasets."""

    large: list[int]
    small: list[int]


def measure(
    ways: Sequence[str], rounds: int, sizes: Sizes, dtype: str, console: Console
) -> Iterator[Run]:
    """Each way on the large partitions, and some on the small ones, in turns."""
    from workers.loading.files import resolve_model

    model = str(resolve_model("minilm").folder)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, part, small = (folder / f"{kind}.parquet" for kind in ("all", "part", "small"))
        write_dataset(whole, sizes.large)
        write_dataset(part, sizes.large[: max(1, int(len(sizes.large) * THEIRS_SHARE))])
        write_dataset(small, sizes.small)
        jobs = [(way, part if "sentence-transformers" in way else whole) for way in ways]
        jobs += [(way, small) for way in SMALL_WAYS if way in ways]
        for round_ in range(rounds):
            for way, source in jobs if round_ % 2 == 0 else jobs[::-1]:
                run = run_way(way, source, folder, model, dtype, small=source == small)
                console.print(
                    f"{way}{', small partitions' * run.small}: {run.rate:,.0f} texts/s, "
                    f"{run.total_s:.1f} s, first file after {run.first_s:.2f} s, "
                    f"{run.memory_bytes / MIB:.0f} MiB, {len(run.calls)} calls"
                )
                yield run


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ways", help="of: " + ", ".join((*WAYS, *ABLATION)))
    parser.add_argument("--dtype", default="auto", help="of the engine, for ours")
    options = parser.parse_args()
    shapes = (QUICK, QUICK_SMALL) if options.quick else (FULL, SMALL)
    ways = options.ways.split(";") if options.ways else [*WAYS, *ABLATION]
    sizes = Sizes(*(partition_sizes(rows, count, SIGMA) for rows, count in shapes))
    console = Console()
    machine = measure_machine().as_json()
    stats = SizeStats.of(sizes.large)
    settings = {
        "num_rows": shapes[0][0],
        "num_partitions": shapes[0][1],
        "small": shapes[1],
        "sigma": SIGMA,
        "cv": stats.cv,
        "largest": stats.largest,
        "dtype": options.dtype,
        "theirs_share": THEIRS_SHARE,
    }
    runs: list[Run] = []
    checks: list[Check] = []
    for run in measure(ways, options.rounds or 1, sizes, options.dtype, console):
        runs.append(run)
        checks = checks_of(runs)
        write_report(  # again after each run: a way that fails costs itself alone
            options.json,
            machine=machine,
            settings=settings,
            runs=[{**asdict(run), "calls": len(run.calls)} for run in runs],
            summary={
                "large": Medians(runs, small=False).summary(),
                "small": Medians(runs, small=True).summary(),
            },
            checks=checks,
        )
    show(console, runs)
    show_checks(console, checks)


if __name__ == "__main__":
    main()
