"""Our engine against its peers, on six workloads, with the floor of the machine.

    python -m tests.bench.throughput --peers vllm,llamacpp,openvino,transformers --json FILE
        [--workloads mixed,...] [--dtype bfloat16|float32|int8] [--rounds N] [--quick]

Every side runs in a process of its own, each peer in an environment of its own
(`tests.bench.peers.environments`), with the settings that served it best. Prompts are real text,
answers greedy and of forced lengths (`tests.bench.workloads`). Sides take turns run by run, and
whoever has no turn is stopped. `tiny` is done in a fresh process each time and timed from its
start. A peer is NAME[:DTYPE][@OPTION=VALUE]...: `openvino:bfloat16` takes part in a run of int8.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.common import Workload, argument_parser, show_checks, write_report
from tests.bench.figures import Line, Run, checks_of, lines_of
from tests.bench.fleet import Fleet
from tests.bench.floor import Floor, Shape, floor_of
from tests.bench.machine import Machine, measure_machine
from tests.bench.peers.environments import ENVIRONMENTS
from tests.bench.peers.process import RunnerError
from tests.bench.sides import DTYPES, KV_BYTES, OURS, Side, Variant, agreement, parse_sides
from tests.bench.workloads import FRESH, NAMES, SHARED, Source, make_workload
from workers.loading.files import ModelFiles, resolve_model
from workers.loading.tokenizer import Tokenizer

MODEL = "smollm2"
WARM_UP_ROWS = 4
AGREEING_TOKENS = 8
KV_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "int8": 2}
MIB = float(1 << 20)


@dataclass(slots=True)
class Found:
    """What has been measured so far."""

    runs: list[Run] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)

    def has_failed(self, side: Side) -> bool:
        return any(failure["side"] == side.label for failure in self.failures)


def variant_for(workload: str, *, quick: bool) -> Variant:
    return Variant(prefix_caching=workload == SHARED, quick_start=quick or workload == FRESH)


def turns(sides: Sequence[Side], rounds: int) -> Iterator[tuple[int, Side]]:
    """Who runs when: every side in each round, slow ones in the first alone, another one first in
    each round.
    """
    for round_number in range(rounds):
        start = round_number % len(sides)
        for side in [*sides[start:], *sides[:start]]:
            if round_number == 0 or not side.kind.is_slow:
                yield round_number, side


def measure(
    options: Namespace,
    sides: Sequence[Side],
    workloads: Sequence[Workload],
    fleet: Fleet,
    console: Console,
) -> Found:
    """Workload by workload; a side that fails takes no further part."""
    found = Found()
    for workload in workloads:
        variant = variant_for(workload.name, quick=options.quick)
        fleet.keep_only([(side.label, variant) for side in sides])
        reference: list[list[int]] | None = None
        for round_number, side in turns(sides, options.rounds):
            if found.has_failed(side):
                continue
            run_in = fleet.run_fresh if workload.name == FRESH else fleet.run
            try:
                run, answer = run_in(side, variant, workload)
            except RunnerError as error:
                if side.label == OURS:
                    raise
                console.print(f"[red]{side.label} takes no further part: {error}", markup=True)
                found.failures.append({"side": side.label, "error": str(error)})
                continue
            reference = reference or answer.token_ids  # ours is first in the first round
            equal = agreement(reference, answer.token_ids, num_tokens=AGREEING_TOKENS)
            found.runs.append(replace(run, round=round_number, first_tokens_equal=equal))
            console.print(described(run))
    return found


def described(run: Run) -> str:
    return (
        f"{run.workload}, {run.side}: {run.elapsed_s:.1f} s, "
        f"{run.output_tokens_per_s:.0f} out tok/s; with start-up {run.job_s:.1f} s"
    )


def show(
    console: Console,
    machine: Machine,
    workloads: Sequence[Workload],
    lines: Sequence[Line],
    floors: dict[str, Floor],
) -> None:
    ceilings = machine.ceilings
    rates = (ceilings.bfloat16_flops / 1e9, ceilings.float32_flops / 1e9)
    console.print(
        f"{machine.cpu}, {machine.cores} cores: bfloat16 {rates[0]:.0f}, float32 {rates[1]:.0f} "
        f"GFLOP/s, copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    for workload in workloads:
        of_it = [line for line in lines if line.workload == workload.name]
        console.print(table_of(workload, of_it, floors[workload.name]))


COLUMNS = (
    "", "job s", "with start-up", "rows/s", "out tok/s", "total tok/s", "peak MiB", "x floor",
    "ours is", "with start-up", "ready s", "1st token s", "8 tokens equal",
)  # fmt: skip


def table_of(workload: Workload, lines: Sequence[Line], floor: Floor) -> Table:
    title = (
        f"{workload.name}: {len(workload.items)} prompts, {workload.num_prompt_tokens:,} prompt "
        f"and {workload.num_output_tokens:,} output tokens; floor {floor.total_s:.1f} s"
    )
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for line in lines:
        table.add_row(
            line.side,
            *(f"{value:.1f}" for value in (line.elapsed_s, line.job_s, line.rows_per_s)),
            *(f"{value:.0f}" for value in (line.output_tokens_per_s, line.total_tokens_per_s)),
            f"{line.peak_bytes / MIB:.0f}",
            f"{line.multiple_of_floor:.2f}",
            f"{line.ratio:.2f} x",
            f"{line.ratio_with_start:.2f} x",
            *(f"{value:.1f}" for value in (line.ready_s, line.first_token_s)),
            "" if line.first_tokens_equal is None else f"{line.first_tokens_equal:.0%}",
        )
    return table


def parsed() -> tuple[Namespace, tuple[Side, ...]]:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--peers", default="", metavar="NAME,...", help="see above; none by default"
    )
    parser.add_argument("--workloads", default=",".join(NAMES), metavar="NAME,...")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.workloads = options.workloads.split(",")
    if unknown := set(options.workloads) - set(NAMES):
        parser.error(f"no workload: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    try:
        return options, parse_sides(options.peers, options.dtype)
    except ValueError as error:
        parser.error(str(error))


def settings_of(
    options: Namespace, sides: Sequence[Side], workloads: Sequence[Workload]
) -> dict[str, object]:
    environments = {side.kind.environment for side in sides} - {None}
    return {
        "model": MODEL,
        "dtype": options.dtype,
        "quick": options.quick,
        "rounds": options.rounds,
        "kv_bytes": KV_BYTES,
        "sides": [asdict(side) for side in sides],
        "environments": {name: asdict(ENVIRONMENTS[name]) for name in environments if name},
        "workloads": [workload.as_json() for workload in workloads],
    }


def floors_of(
    workloads: Sequence[Workload], files: ModelFiles, machine: Machine, dtype: str
) -> dict[str, Floor]:
    shape = Shape.of_config(dict(files.config), dtype_bytes=KV_ELEMENT_BYTES[dtype])
    return {
        workload.name: floor_of(workload, shape, machine.ceilings, dtype=dtype)
        for workload in workloads
    }


def main() -> None:
    options, sides = parsed()
    console = Console(width=160)
    files = resolve_model(MODEL)
    for side in sides:
        side.prepare(files)
    machine = measure_machine()
    if machine.load_1min > 0.5:
        console.print(f"The load is {machine.load_1min:.1f}: these figures will not hold.")
    source = Source.of_sample(Tokenizer.load(files), quick=options.quick)
    # Sharing prefixes takes other processes than the rest: last, when theirs can be ended.
    names = sorted(options.workloads, key=lambda name: name == SHARED)
    workloads = [make_workload(name, source) for name in names]
    warm_up = make_workload("mixed", source).items[:WARM_UP_ROWS]
    with tempfile.TemporaryDirectory() as folder, Fleet(files, Path(folder), warm_up) as fleet:
        found = measure(options, sides, workloads, fleet, console)
    floors = floors_of(workloads, files, machine, options.dtype)
    lines = lines_of(found.runs, floors)
    checks = checks_of(lines, options.dtype)
    show(console, machine, workloads, lines, floors)
    show_checks(console, checks)
    write_report(
        options.json,
        machine=machine.as_json(),
        settings=settings_of(options, sides, workloads),
        runs=[run.as_json() for run in found.runs],
        summary={
            "lines": [asdict(line) for line in lines],
            "floors": {
                name: {**asdict(floor), "total_s": floor.total_s} for name, floor in floors.items()
            },
            "failures": found.failures,
        },
        checks=checks,
    )


if __name__ == "__main__":
    main()
