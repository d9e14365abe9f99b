"""The paper's comparisons of exclusive, mixed and hybrid batching, simulated beside its figures.

    python -m tests.bench.paper_table --json FILE [--quick]

Qwen3-8B on H200 and RTX PRO 6000, by the coefficients of `schedulers.sim.hardware`: the shipped
ones, and those with decode tokens charged what the paper's end-to-end runs say (`-e2e`). Three
length mixes and the traffic mix 512/256, at 32, 512 and 2048 requests in flight; a shift of lengths
and one of concurrency. Virtual time, so there is nothing to repeat: the same seed gives the same
figures on any machine. No calibration is given to the policies: what they know, they learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from flows.calibration import num_cores
from schedulers.estimate import Estimator
from schedulers.policies import make_policy
from schedulers.sim.arrivals import ClosedLoop, SimRequest, Stage, geometric_requests
from schedulers.sim.hardware import HARDWARE
from schedulers.sim.simulator import SimConfig, SimResult, Simulator
from schedulers.view import Budget
from tests.bench.common import Check, arguments, show_checks, write_report

POLICIES = ("exclusive", "mixed", "hybrid")
FLOOR = "exclusive, theta 0.7"
"""As the authors ran it: a floor of 0.7 under theta."""
MIXES = {"decode-heavy": (128, 1024), "balanced": (512, 512), "prefill-heavy": (1024, 128)}
TRAFFIC = (512, 256)
CONCURRENCY = {32: 400, 512: 2000, 2048: 4000}
"""Requests in flight, and how many there are in all."""

PAPER: dict[tuple[str, str], tuple[float, float | None]] = {
    ("h200", "decode-heavy, 2048"): (13.58 / 13.85, None),
    ("h200", "balanced, 2048"): (20.41 / 20.26, None),
    ("h200", "prefill-heavy, 2048"): (28.72 / 28.55, None),
    ("rtx-pro-6000", "decode-heavy, 2048"): (6.04 / 5.36, None),
    ("rtx-pro-6000", "balanced, 2048"): (9.21 / 7.72, None),
    ("rtx-pro-6000", "prefill-heavy, 2048"): (14.70 / 10.36, None),
    ("h200", "traffic, 32"): (8609 / 11584, 11586 / 11584),
    ("h200", "traffic, 512"): (27207 / 27464, 27460 / 27464),
    ("h200", "traffic, 2048"): (27198 / 26368, 27043 / 26368),
    ("rtx-pro-6000", "traffic, 2048"): (13179 / 8830, 13214 / 8830),
    ("h200", "lengths shift"): (20762 / 20396, 21182 / 20396),
    ("rtx-pro-6000", "lengths shift"): (1.373, 1.364),
    ("h200", "concurrency shift"): (0.964, 1.006),
    ("rtx-pro-6000", "concurrency shift"): (1.237, 1.226),
}
"""EB / MB and EB+ / MB, throughput, where the paper (its notes) reports them."""


class Cell(NamedTuple):
    """A setting of the table."""

    hardware: str
    workload: str
    policy: str
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated cell did."""

    hardware: str
    workload: str
    policy: str
    job_s: float
    tokens_per_s: float
    num_steps: int
    overflow_share: float
    num_suspensions: int
    num_switches: int


def stages(workload: str, scale: float) -> list[Stage[SimRequest]]:
    """Requests in order, with how many of them may be in flight."""
    rng = np.random.default_rng(7)

    def made(lengths: tuple[int, int], count: int, concurrency: int) -> Stage[SimRequest]:
        prompt, output = lengths
        requests = geometric_requests(
            max(concurrency // 2, round(scale * count)),
            mean_prompt_tokens=prompt,
            mean_output_tokens=output,
            rng=rng,
        )
        return Stage(requests, concurrency)

    if workload == "lengths shift":
        order = ("prefill-heavy", "balanced", "decode-heavy")
        return [made(MIXES[mix], 2000, 2048) for mix in order]
    if workload == "concurrency shift":
        return [made(TRAFFIC, count, c) for c, count in ((32, 400), (2048, 4000), (32, 400))]
    mix, _, concurrency = workload.rpartition(", ")
    lengths = TRAFFIC if mix == "traffic" else MIXES[mix]
    return [made(lengths, CONCURRENCY[int(concurrency)], int(concurrency))]


def workloads() -> Iterator[str]:
    for mix in (*MIXES, "traffic"):
        yield from (f"{mix}, {concurrency}" for concurrency in CONCURRENCY)
    yield from ("lengths shift", "concurrency shift")


def simulate(cell: Cell) -> Outcome:
    hardware = HARDWARE[cell.hardware]
    floor = 0.7 if cell.policy == FLOOR else 0.0
    policy = make_policy(cell.policy.partition(",")[0], Estimator(theta_floor=floor))
    config = SimConfig(
        num_blocks=hardware.capacity_tokens // 16,
        budget=Budget(max_batch_tokens=hardware.max_batch_tokens, max_seqs=hardware.max_seqs),
        window=4 * hardware.max_seqs,
    )
    result = Simulator(policy, config, hardware.cost).run(
        ClosedLoop(stages(cell.workload, cell.scale))
    )
    return Outcome(
        hardware=cell.hardware,
        workload=cell.workload,
        policy=cell.policy,
        job_s=result.job_s,
        tokens_per_s=result.tokens_per_s,
        num_steps=result.num_steps,
        overflow_share=result.num_overflow_steps / result.num_steps,
        num_suspensions=result.num_suspensions,
        num_switches=num_switches(result),
    )


def num_switches(result: SimResult) -> int:
    """Changes of mode."""
    rows = [item.event for item in result.events if item.event.table == "crossover"]
    return sum(row.mode_before != row.mode_after for row in rows)  # type: ignore[union-attr]


def cells(scale: float) -> Iterator[Cell]:
    for hardware in HARDWARE:
        for workload in workloads():
            floored = workload.startswith("traffic") or workload.endswith("shift")
            policies = (*POLICIES, FLOOR) if floored else POLICIES
            yield from (Cell(hardware, workload, policy, scale) for policy in policies)


class Line(NamedTuple):
    """A row of the table: throughput of each policy, and the paper's ratios."""

    hardware: str
    workload: str
    by_policy: dict[str, Outcome]

    def ratio(self, policy: str, other: str = "mixed") -> float:
        """Throughput of a policy in another's."""
        return self.by_policy[other].job_s / self.by_policy[policy].job_s

    @property
    def hybrid_to_better(self) -> float:
        better = min(self.by_policy[name].job_s for name in ("exclusive", "mixed"))
        return better / self.by_policy["hybrid"].job_s

    @property
    def paper(self) -> tuple[float, float | None] | None:
        return PAPER.get((self.hardware.removesuffix("-e2e"), self.workload))


def lines(outcomes: list[Outcome]) -> list[Line]:
    keys = dict.fromkeys((item.hardware, item.workload) for item in outcomes)
    return [
        Line(*key, {o.policy: o for o in outcomes if (o.hardware, o.workload) == key})
        for key in keys
    ]


def checks(table: list[Line], outcomes: list[Outcome]) -> list[Check]:
    compared = [line for line in table if line.paper is not None]
    signs = {
        suffix: np.mean(
            [
                (line.ratio("exclusive") > 1) == (line.paper[0] > 1)
                for line in compared
                if line.paper and line.hardware.endswith("-e2e") == (suffix == "-e2e")
            ]
        )
        for suffix in ("", "-e2e")
    }
    shifts = [line for line in table if line.workload.endswith("shift")]
    return [
        Check(name="hybrid, in the better of exclusive and mixed: the least of all settings",
              value=min(line.hybrid_to_better for line in table), bound=0.98, sense=">="),
        Check(name="hybrid, in the better of both, under a shift: the least",
              value=min(line.hybrid_to_better for line in shifts), bound=1.0, sense=">="),
        Check(name="hybrid, in the better of mixed and EB as the authors ran it, under a shift: "
              "the least",
              value=min(min(line.ratio("hybrid"), line.ratio("hybrid", FLOOR))
                        for line in shifts), bound=1.0, sense=">="),
        Check(name="steps short of KV memory, share of all: the most of all settings",
              value=max(item.overflow_share for item in outcomes), bound=0.01, sense="<="),
        Check(name="signs of EB - MB as the paper's, end-to-end coefficients, share",
              value=float(signs["-e2e"]), bound=1.0, sense=">="),
        Check(name="signs of EB - MB as the paper's, shipped coefficients, share",
              value=float(signs[""]), bound=1.0, sense=">="),
    ]  # fmt: skip


def show(console: Console, table: list[Line]) -> None:
    shown = Table(title="Simulated; throughput in tokens per second, ratios to mixed batching")
    for column in ("hardware", "workload", "mixed", "EB/MB", "paper", "EB+/MB", "paper",
                   "EB+/better", "EB theta 0.7", "switches", "short of memory"):  # fmt: skip
        shown.add_column(column)
    for line in table:
        paper = line.paper or (None, None)
        hybrid = line.by_policy["hybrid"]
        floor = f"{line.ratio(FLOOR):.3f}" if FLOOR in line.by_policy else ""
        shown.add_row(
            line.hardware, line.workload, f"{line.by_policy['mixed'].tokens_per_s:,.0f}",
            f"{line.ratio('exclusive'):.3f}", "" if paper[0] is None else f"{paper[0]:.3f}",
            f"{line.ratio('hybrid'):.3f}", "" if paper[1] is None else f"{paper[1]:.3f}",
            f"{line.hybrid_to_better:.3f}", floor, str(hybrid.num_switches),
            f"{max(o.overflow_share for o in line.by_policy.values()):.2%}",
        )  # fmt: skip
    console.print(shown)


def main() -> None:
    options = arguments(__doc__)
    scale = 0.1 if options.quick else 1.0
    console = Console(width=170)
    with ProcessPoolExecutor(num_cores()) as pool:
        outcomes = list(pool.map(simulate, cells(scale)))
    table = lines(outcomes)
    show(console, table)
    found = checks(table, outcomes)
    show_checks(console, found)
    write_report(
        options.json,
        machine={"note": "virtual time: the figures do not depend on the machine"},
        settings={"scale": scale, "hardware": {k: str(v) for k, v in HARDWARE.items()}},
        runs=[{name: getattr(item, name) for name in Outcome.__slots__} for item in outcomes],
        summary={
            f"{line.hardware}, {line.workload}": {
                "exclusive_to_mixed": line.ratio("exclusive"),
                "hybrid_to_mixed": line.ratio("hybrid"),
                "hybrid_to_better": line.hybrid_to_better,
                "paper": line.paper,
            }
            for line in table
        },
        checks=found,
    )


if __name__ == "__main__":
    main()
