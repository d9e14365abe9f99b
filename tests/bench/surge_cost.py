"""Does the cost model of encoding hold? Predicted beside measured time of jobs it has not seen.

    python -m tests.bench.surge_cost --json FILE [--quick] [--rounds N]

T(K) = K c + P f + N t (`surge.md` 3.2, with a cost of its own for each partition's file). For three
shapes of models and four distributions of partition sizes, jobs run with large superbatches and
with small ones. The three constants of a shape are fitted to the jobs of three distributions, and
predict those of the fourth. The time of a job is from its first encode call to its last commit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from flows.model import Model, open_model
from flows.runner import run_job
from flows.spec import JobSpec
from schedulers.cost import non_negative_fit
from storage.writer import ShardWriter
from tests.bench.common import Check, arguments, show_checks, write_report
from tests.bench.machine import measure_machine
from tests.bench.surge import partition_sizes, write_dataset
from tests.bench.surge_child import Kept

SHAPES = {"6 x 384": (6, 384, 12), "12 x 384": (12, 384, 12), "12 x 768": (12, 768, 12)}
"""Layers, hidden size, heads: of MiniLM-L6, bge-small and bge-base."""
TEXTS = {"6 x 384": 12_000, "12 x 384": 6_000, "12 x 768": 2_000}
DISTRIBUTIONS = {"equal": 0.0, "sigma 1.0": 1.0, "sigma 1.72": 1.72, "sigma 2.5": 2.5}
"""Standard deviation of the logarithm of a partition's size."""
MEAN_TEXTS = 25
SUPERBATCHES = {"small": (30, 90), "large": (600, 1800)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job."""

    shape: str
    distribution: str
    superbatch: str
    num_texts: int
    num_partitions: int
    num_calls: int
    total_s: float


def make_model(shape: str, folder: Path) -> Model:
    """A random model of that shape, loaded."""
    import torch
    from transformers import BertConfig, BertModel

    from workers.loading.files import resolve_model

    layers, hidden, heads = SHAPES[shape]
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    minilm = resolve_model("minilm").folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder / name)
    model = open_model(spec_of(folder, folder / "in", folder / "out", "large"))
    assert model.load_encoder is not None
    backend, tokenizer = Kept(model.load_encoder()), model.load_tokenizer()
    return replace(model, load_encoder=lambda: backend, load_tokenizer=lambda: tokenizer)


def spec_of(model: Path, source: Path, output: Path, superbatch: str) -> JobSpec:
    low, high = SUPERBATCHES[superbatch]
    return JobSpec.model_validate(
        {
            "input": str(source), "output": str(output), "task": "embed", "model": str(model),
            "prompt": {"column": "text"}, "partition_by": ["key"],
            "encode": {"min_texts": low, "max_texts": high},
        }
    )  # fmt: skip


@contextmanager
def last_commit() -> Iterator[list[float]]:
    """When shards were committed."""
    import time

    ended: list[float] = []
    close: Callable[[ShardWriter], object] = ShardWriter.close

    def noted(self: ShardWriter) -> object:
        summary = close(self)
        ended.append(time.monotonic())
        return summary

    with mock.patch.object(ShardWriter, "close", noted):
        yield ended


def run(model: Model, folder: Path, source: Path, name: tuple[str, str, str]) -> Run:
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    with last_commit() as ended:
        summary = run_job(spec_of(folder / "model", source, output, name[2]), model=model)
    assert summary.complete, summary
    files = (output / "telemetry" / "encodes").glob("*.parquet")
    calls = [row for file in files for row in pq.read_table(file).to_pylist()]
    return Run(
        shape=name[0],
        distribution=name[1],
        superbatch=name[2],
        num_texts=summary.total_rows,
        num_partitions=sum(1 for _ in output.glob("results/key=*/*.parquet")),
        num_calls=len(calls),
        total_s=max(ended) - min(call["started_s"] for call in calls),
    )


def measure(rounds: int, scale: float, console: Console) -> list[Run]:
    runs: list[Run] = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = make_model(shape, folder / "model")
            count = int(TEXTS[shape] * scale)
            for seed, (distribution, sigma) in enumerate(DISTRIBUTIONS.items()):
                sizes = partition_sizes(count, count // MEAN_TEXTS, sigma, seed)
                write_dataset(folder / f"{distribution}.parquet", sizes)
            run(model, folder, folder / "equal.parquet", (shape, "equal", "large"))  # warm
            for _ in range(rounds):
                for distribution in DISTRIBUTIONS:
                    for superbatch in SUPERBATCHES:
                        source = folder / f"{distribution}.parquet"
                        runs.append(run(model, folder, source, (shape, distribution, superbatch)))
                        console.print(runs[-1])
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A job's time and throughput, predicted by the others'."""

    shape: str
    distribution: str
    superbatch: str
    measured_s: float
    predicted_s: float
    call_ms: float
    partition_ms: float
    text_us: float

    @property
    def error(self) -> float:
        """Of the throughput, relative."""
        return self.measured_s / self.predicted_s - 1


def medians(runs: Sequence[Run]) -> list[Run]:
    """One run for each job."""
    names = dict.fromkeys((run.shape, run.distribution, run.superbatch) for run in runs)
    found: list[Run] = []
    for name in names:
        own = [run for run in runs if (run.shape, run.distribution, run.superbatch) == name]
        found.append(replace(own[0], total_s=median(run.total_s for run in own)))
    return found


def predict(runs: Sequence[Run]) -> list[Predicted]:
    """Each distribution's jobs from those of the others."""
    found: list[Predicted] = []
    for one in medians(runs):
        seen = [
            run for run in medians(runs)
            if run.shape == one.shape and run.distribution != one.distribution
        ]  # fmt: skip
        terms = np.array([[run.num_calls, run.num_partitions, run.num_texts] for run in seen])
        times = np.array([run.total_s for run in seen])
        c, f, t = non_negative_fit(terms / times[:, None], np.ones(len(seen)))
        found.append(
            Predicted(
                shape=one.shape,
                distribution=one.distribution,
                superbatch=one.superbatch,
                measured_s=one.total_s,
                predicted_s=float(c * one.num_calls + f * one.num_partitions + t * one.num_texts),
                call_ms=float(1e3 * c),
                partition_ms=float(1e3 * f),
                text_us=float(1e6 * t),
            )
        )
    return found


def report(runs: Sequence[Run], rounds: int, path: Path | None, console: Console) -> None:
    """Predict each job, show it beside what was measured, and write both."""
    found = predict(runs)
    table = Table(
        "shape", "sizes", "superbatch", "measured s", "predicted s", "off", "c ms", "t us"
    )
    for item in found:
        table.add_row(
            item.shape, item.distribution, item.superbatch, f"{item.measured_s:.2f}",
            f"{item.predicted_s:.2f}", f"{item.error:+.1%}", f"{item.call_ms:.1f}",
            f"{item.text_us:.0f}",
        )  # fmt: skip
    console.print(table)
    worst = max(abs(item.error) for item in found)
    checks = [
        Check(
            name="largest error of the predicted throughput, three shapes and four distributions",
            value=round(worst, 4),
            bound=0.05,
            sense="<=",
        )
    ]
    show_checks(console, checks)
    write_report(
        path,
        machine=measure_machine().as_json(),
        settings={"rounds": rounds, "mean_texts": MEAN_TEXTS, "superbatches": SUPERBATCHES},
        runs=[asdict(item) for item in runs],
        summary={"predicted": [{**asdict(item), "error": item.error} for item in found]},
        checks=checks,
    )


def main() -> None:
    args = arguments(__doc__)
    console = Console()
    rounds = args.rounds or (1 if args.quick else 3)
    report(measure(rounds, 0.2 if args.quick else 1.0, console), rounds, args.json, console)


if __name__ == "__main__":
    main()
