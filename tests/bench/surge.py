"""Ways of encoding a partitioned dataset: superbatches, one call a partition, one call for all.

    python -m tests.bench.surge --json FILE [--quick] [--rounds N] [--ways A,B] [--dtype D]

Short real texts (windows of package descriptions, 47 bytes on average) in partitions of lognormal
size, grouped by key. Each way runs in a process of its own whose model is loaded beforehand; what
is timed ends when every partition's file is there. Memory is that of the process and its children,
read from outside, above what it was when the model was loaded. The first output is the first file.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from schedulers.encode_cost import EncodeCost, EncodeSample, fit_encode, speed_up
from schedulers.sizes import SizeStats
from schedulers.superbatch import Thresholds, count_calls
from tests.bench.common import ROOT, SAMPLE, Check, argument_parser, show_checks, write_report
from tests.bench.machine import measure_machine

FULL = (200_000, 4_000)
QUICK = (10_000, 200)
THEIRS_SHARE = 0.2
"""Of the partitions, for sentence-transformers with a call for each: it takes too long."""
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
ABLATION = ("without superbatch", "without asynchronous writing", "without zero-copy")


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


def run_way(way: str, source: Path, folder: Path, model: str, dtype: str) -> Run:
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


def measured_cost(runs: Sequence[Run]) -> EncodeCost:
    """c and t from two jobs that differ in the number of calls: what a call costs all in all, its
    commit included, and what a text costs.
    """
    one = [run for run in runs if run.way == "per partition"]
    all_in_one = [run for run in runs if run.way == "fixed batch"]
    many_s, few_s = (median(run.total_s for run in found) for found in (one, all_in_one))
    num_rows, num_calls = one[0].num_rows, one[0].num_partitions
    call_s = max(0.0, (many_s - few_s) / (num_calls - 1))
    return EncodeCost(call_s=call_s, text_s=(few_s - call_s) / num_rows)


def summary_of(runs: Sequence[Run], sizes: Sequence[int]) -> dict[str, object]:
    """Medians by way."""
    ways = list(dict.fromkeys(run.way for run in runs))
    found: dict[str, object] = {}
    for way in ways:
        own = [run for run in runs if run.way == way]
        found[way] = {
            "texts_per_s": median(run.rate for run in own),
            "total_s": median(run.total_s for run in own),
            "first_s": median(run.first_s for run in own),
            "memory_mib": median(run.memory_bytes for run in own) / MIB,
            "num_calls": median(len(run.calls) for run in own),
        }
    stats = SizeStats.of(sizes)
    found["partitions"] = {"cv": stats.cv, "mean": stats.mean, "largest": stats.largest}
    if {"per partition", "fixed batch"} <= set(ways):
        found["cost"] = asdict(measured_cost(runs))
    calls = [
        EncodeSample(*call) for run in runs if run.way == "per partition" for call in run.calls
    ]
    fit = fit_encode(calls)
    if fit is not None:
        found["encode_fit"] = asdict(fit)
    return found


def checks_of(runs: Sequence[Run]) -> list[Check]:
    rate = {
        way: median(run.rate for run in runs if run.way == way)
        for way in dict.fromkeys(run.way for run in runs)
    }
    memory = {way: median(run.memory_bytes for run in runs if run.way == way) for way in rate}
    checks: list[Check] = []

    def ratio(name: str, other: str, bound: float) -> None:
        if other in rate:
            value = rate["ours"] / rate[other]
            checks.append(Check(name=name, value=round(value, 3), bound=bound, sense=">="))

    theirs = [way for way in rate if way.startswith("sentence-transformers")]
    ratio("texts/s, ours / sentence-transformers' pool, a call for each partition",
          "per partition, sentence-transformers, pool", 1.9)  # fmt: skip
    ratio("texts/s, ours / the fixed batch", "fixed batch", 0.97)
    if theirs:
        best = max(theirs, key=lambda way: rate[way])
        ratio(f"texts/s, ours / {best} (its best way)", best, 1.3)
    if "fixed batch" in memory:
        value = memory["ours"] / memory["fixed batch"]
        checks.append(
            Check(name="memory above the loaded model, ours / the fixed batch",
                  value=round(value, 3), bound=0.1, sense="<=")
        )  # fmt: skip
    return checks


def predicted_gain(runs: Sequence[Run], sizes: Sequence[int], thresholds: Thresholds) -> float:
    """T(P) / T(K) by the measured cost."""
    cost, stats = measured_cost(runs), SizeStats.of(sizes)
    return speed_up(cost, stats, count_calls(sizes, thresholds))


def show(console: Console, runs: Sequence[Run]) -> None:
    table = Table("way", "texts/s", "seconds", "first file s", "memory MiB", "calls")
    for way in dict.fromkeys(run.way for run in runs):
        own = [run for run in runs if run.way == way]
        table.add_row(
            way,
            f"{median(run.rate for run in own):,.0f}",
            f"{median(run.total_s for run in own):.1f}",
            f"{median(run.first_s for run in own):.2f}",
            f"{median(run.memory_bytes for run in own) / MIB:.0f}",
            f"{median(len(run.calls) for run in own):,.0f}",
        )
    console.print(table)


def measure(
    ways: Sequence[str], rounds: int, sizes: Sequence[int], dtype: str, console: Console
) -> list[Run]:
    from workers.loading.files import resolve_model

    model = str(resolve_model("minilm").folder)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, part = folder / "all.parquet", folder / "part.parquet"
        write_dataset(whole, sizes)
        write_dataset(part, sizes[: max(1, int(len(sizes) * THEIRS_SHARE))])
        for round_ in range(rounds):
            for way in ways if round_ % 2 == 0 else ways[::-1]:
                theirs = way.startswith("per partition, ")
                runs.append(run_way(way, part if theirs else whole, folder, model, dtype))
                run = runs[-1]
                console.print(
                    f"{way}: {run.rate:,.0f} texts/s, {run.total_s:.1f} s, first file after "
                    f"{run.first_s:.2f} s, {run.memory_bytes / MIB:.0f} MiB, {len(run.calls)} calls"
                )
    return runs


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ways", help="of: " + ", ".join((*WAYS, *ABLATION)))
    parser.add_argument("--dtype", default="auto", help="of the engine, for ours")
    parser.add_argument("--texts", type=int, default=None)
    parser.add_argument("--partitions", type=int, default=None)
    options = parser.parse_args()
    num_rows, num_partitions = QUICK if options.quick else FULL
    num_rows, num_partitions = options.texts or num_rows, options.partitions or num_partitions
    ways = options.ways.split(";") if options.ways else [*WAYS, *ABLATION]
    sizes = partition_sizes(num_rows, num_partitions, SIGMA)
    console = Console()
    runs = measure(ways, options.rounds or 1, sizes, options.dtype, console)
    show(console, runs)
    checks = checks_of(runs) if any(run.way == "ours" for run in runs) else []
    show_checks(console, checks)
    write_report(
        options.json,
        machine=measure_machine().as_json(),
        settings={
            "num_rows": num_rows,
            "num_partitions": num_partitions,
            "sigma": SIGMA,
            "dtype": options.dtype,
            "theirs_share": THEIRS_SHARE,
        },
        runs=[{**asdict(run), "calls": len(run.calls)} for run in runs],
        summary=summary_of(runs, sizes),
        checks=checks,
    )


if __name__ == "__main__":
    main()
