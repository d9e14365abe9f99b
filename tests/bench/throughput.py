"""Our engine against transformers `generate` on the mixed workload, with the floor of the machine.

    python -m tests.bench.throughput --json FILE [--quick] [--rounds N]

200 prompts of 16 to 512 tokens of real text, 8 to 256 forced output tokens each (both log-uniform),
SmolLM2-135M in bfloat16. transformers runs static batches of 16, in arrival order and
sorted by prompt length, and the better median counts. Runs of the sides take turns. Start-up is
from the start of a fresh process to the first token.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from tests.bench.common import (
    Check,
    Measurement,
    Workload,
    arguments,
    median_rate,
    mixed_workload,
    show_checks,
    write_report,
)
from tests.bench.floor import Floor, Shape, floor_of
from tests.bench.machine import Machine, measure_machine
from tests.bench.sides import Answers, OurSide, TransformersSide, agreement
from tests.bench.startup import SIDES as STARTUP_SIDES
from tests.bench.startup import Startup, measure_startup
from workers.loading.files import resolve_model

MODEL = "smollm2"
DTYPE = "bfloat16"
OURS = "headrace"
PEERS = ("transformers, arrival", "transformers, sorted")
TARGET = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the report says, from the raw runs."""

    runs: tuple[Measurement, ...]
    floor: Floor
    startups: tuple[Startup, ...]
    first_tokens_equal: float

    def rate(self, side: str) -> float:
        return median_rate(self.runs, side)

    def job_s(self, side: str) -> float:
        return median(run.elapsed_s for run in self.runs if run.side == side)

    def multiple_of_floor(self, side: str) -> float:
        return self.job_s(side) / self.floor.total_s

    @property
    def best_peer(self) -> str:
        return max(PEERS, key=self.rate)

    @property
    def ratio(self) -> float:
        return self.rate(OURS) / self.rate(self.best_peer)

    def startup_s(self, side: str) -> float:
        return median(item.first_token_s for item in self.startups if item.side == side)

    def checks(self) -> list[Check]:
        name = "output tokens per second, as a multiple of transformers generate's"
        return [Check(name=name, value=self.ratio, bound=TARGET, sense=">=")]

    def as_json(self) -> dict[str, object]:
        sides = (OURS, *PEERS)
        return {
            "tokens_per_s": {side: self.rate(side) for side in sides},
            "job_s": {side: self.job_s(side) for side in sides},
            "ratio": self.ratio,
            "floor": {**asdict(self.floor), "total_s": self.floor.total_s},
            "multiple_of_floor": self.multiple_of_floor(OURS),
            "startup_s": {side: self.startup_s(side) for side in STARTUP_SIDES},
            "first_tokens_equal": self.first_tokens_equal,
        }


def workload_for(tokenizer: Tokenizer, *, quick: bool) -> Workload:
    if quick:
        return mixed_workload(
            tokenizer, num_prompts=32, prompt_tokens=(16, 256), output_tokens=(8, 64)
        )
    return mixed_workload(tokenizer, num_prompts=200)


def run_sides(
    ours: OurSide, peer: TransformersSide, workload: Workload, rounds: int
) -> Iterator[tuple[Measurement, Answers]]:
    """All runs, the sides taking turns."""
    for _ in range(rounds):
        yield ours.run(workload)
        yield peer.run(workload, "arrival")
        yield peer.run(workload, "sorted")


def warm_up(ours: OurSide, peer: TransformersSide, workload: Workload) -> None:
    """Both sides once over a few items: first calls build caches and start threads."""
    few = Workload(name="warm-up", items=workload.items[:4])
    ours.run(few)
    peer.run(few, "arrival")


def measure(options: Namespace, machine: Machine, console: Console) -> tuple[Workload, Figures]:
    files = resolve_model(MODEL)
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    workload = workload_for(tokenizer, quick=options.quick)
    ours = OurSide(files, dtype=DTYPE)
    peer = TransformersSide(files.folder, dtype=DTYPE)
    warm_up(ours, peer, workload)
    runs: list[Measurement] = []
    answers: dict[str, Answers] = {}
    for run, answer in run_sides(ours, peer, workload, options.rounds):
        console.print(f"{run.side}: {run.elapsed_s:.1f} s, {run.tokens_per_s:.1f} tok/s")
        runs.append(run)
        answers[run.side] = answer
    shape = Shape.of_config(dict(files.config), dtype_bytes=2)
    figures = Figures(
        runs=tuple(runs),
        floor=floor_of(workload, shape, machine.ceilings, dtype=DTYPE),
        startups=measure_startup(MODEL, dtype=DTYPE, rounds=options.rounds),
        first_tokens_equal=agreement(answers[OURS], answers[PEERS[0]], num_tokens=1),
    )
    return workload, figures


def show(console: Console, machine: Machine, workload: Workload, figures: Figures) -> None:
    ceilings = machine.ceilings
    rates = (ceilings.bfloat16_flops / 1e9, ceilings.float32_flops / 1e9)
    console.print(
        f"{machine.cpu}, {machine.cores} cores: bfloat16 {rates[0]:.0f}, float32 {rates[1]:.0f} "
        f"GFLOP/s, copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    console.print(table_of(workload, figures))
    startups = ", ".join(f"{side} {figures.startup_s(side):.1f} s" for side in STARTUP_SIDES)
    console.print(
        f"{figures.ratio:.2f} times {figures.best_peer}. Process start to first token: "
        f"{startups}. First tokens equal: {figures.first_tokens_equal:.0%}."
    )
    show_checks(console, figures.checks())


def table_of(workload: Workload, figures: Figures) -> Table:
    title = (
        f"{MODEL}, {DTYPE}: {len(workload.items)} prompts, "
        f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "job s", "out tok/s", "times the floor"):
        table.add_column(column, justify="right" if column else "left")
    for side in (OURS, *PEERS):
        cells = (figures.job_s(side), figures.rate(side), figures.multiple_of_floor(side))
        table.add_row(side, *(f"{cell:.1f}" for cell in cells))
    floor_s = figures.floor.total_s
    table.add_row("floor", f"{floor_s:.1f}", f"{workload.num_output_tokens / floor_s:.1f}", "1.0")
    return table


def main() -> None:
    options = arguments(__doc__)
    options.rounds = options.rounds or (1 if options.quick else 3)
    console = Console()
    machine = measure_machine()
    if machine.load_1min > 0.5:
        console.print(f"The load is {machine.load_1min:.1f}: these figures will not hold.")
    workload, figures = measure(options, machine, console)
    show(console, machine, workload, figures)
    settings = {"model": MODEL, "dtype": DTYPE, "quick": options.quick, "rounds": options.rounds}
    write_report(
        options.json,
        machine=machine.as_json(),
        settings={**settings, "batch_size_of_transformers": 16, "workload": workload.as_json()},
        runs=[{**asdict(run), "tokens_per_s": run.tokens_per_s} for run in figures.runs]
        + [asdict(item) for item in figures.startups],
        summary=figures.as_json(),
        checks=figures.checks(),
    )


if __name__ == "__main__":
    main()
