"""Exclusive, mixed and hybrid batching on this machine, interleaved, with its interference curve.

    python -m tests.bench.crossover --json FILE [--quick] [--rounds N]

The paper's table scaled down to SmolLM2-135M in bfloat16 on this machine: its three length mixes at
about an eighth of the tokens, three concurrencies, a shift of lengths and one of concurrency.
Prompts are real text; outputs are geometric, and end by a token that no policy can foresee. First
the step costs of the machine are measured as `flows calibrate` does, and every policy is given
them. All steps of all runs then make one cost model, and each setting is simulated with it: the
simulator against reality.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from flows.calibrate import curve_table
from schedulers.calibration import Calibration, calibrated, interference
from schedulers.cost import StepCost, StepSample
from schedulers.estimate import Estimator
from schedulers.policies import make_policy
from schedulers.sim.arrivals import ClosedLoop, SimRequest, Stage, geometric_requests
from schedulers.sim.recorded import (
    RecordedStep,
    fit_schedule_cost,
    fit_step_cost,
    step_samples,
)
from schedulers.sim.simulator import ScheduleCost, SimConfig, Simulator
from tests.bench.common import SAMPLE, Check, arguments, show_checks, write_report
from tests.bench.machine import measure_machine
from tests.bench.traffic import ClosedSource, ForcedLengths, Traffic
from workers.calibrate import measure_steps
from workers.loading.files import ModelFiles, resolve_model
from workers.request import EventRecord, StepRecord
from workers.setup import EngineOptions, make_engine, size_engine

MODEL = "smollm2"
DTYPE = "bfloat16"
POLICIES = ("exclusive", "mixed", "hybrid")
BOUND = EngineOptions().overflow_probability
MIXES = {"decode-heavy": (16, 96), "balanced": (64, 48), "prefill-heavy": (128, 16)}
CONCURRENCY = {4: 12, 16: 48, 64: 128}
"""Requests in flight, and how many there are in all."""


def traffics(*, quick: bool) -> Iterator[Traffic]:
    """The settings."""
    rng = np.random.default_rng(5)

    def stage(lengths: tuple[int, int], count: int, concurrency: int) -> Stage[SimRequest]:
        prompt, output = lengths
        requests = geometric_requests(
            count, mean_prompt_tokens=prompt, mean_output_tokens=output, rng=rng
        )
        return Stage(requests, concurrency)

    concurrency = {4: 8, 32: 32} if quick else CONCURRENCY
    for mix, lengths in MIXES.items():
        for in_flight, count in concurrency.items():
            yield Traffic(f"{mix}, {in_flight}", [stage(lengths, count, in_flight)])
    order = ("prefill-heavy", "balanced", "decode-heavy")
    count = 32 if quick else 80
    yield Traffic("lengths shift", [stage(MIXES[mix], count, 64) for mix in order])
    few, many = (4, 64) if quick else (8, 160)
    parts = ((few, 4), (many, 64), (few, 4))
    yield Traffic("concurrency shift", [stage(MIXES["balanced"], n, c) for n, c in parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one policy over one setting."""

    traffic: str
    policy: str
    elapsed_s: float
    num_requests: int
    num_tokens: int
    num_steps: int
    num_overflow_steps: int
    num_suspensions: int
    switches: tuple[str, ...]
    steps: tuple[StepRecord, ...] = field(repr=False)

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "steps"}


class Bench:
    """Loads what all runs share.

    Args:
        files: the model.
        samples: of the calibration.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        texts = pq.read_table(SAMPLE)["description"].to_pylist()
        tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
        self._text = tokenizer.encode("\n\n".join(texts), add_special_tokens=False).ids
        self.samples: tuple[StepSample, ...] = ()

    def _backend(self):
        from workers.backends.torch_backend import TorchBackend

        return TorchBackend.load(self._files, device="cpu", dtype=DTYPE)

    def calibrate(self, budget_s: float) -> Calibration:
        """What `flows calibrate` measures."""
        backend = self._backend()
        setup = size_engine(backend.info, EngineOptions())
        budget = setup.config.budget
        samples = measure_steps(
            backend,
            block_size=setup.config.block_size,
            num_blocks=setup.config.num_blocks,
            max_batch_tokens=budget.max_batch_tokens,
            max_seqs=budget.max_seqs,
            clock=time.perf_counter,
            budget_s=budget_s,
        )
        backend.close()
        found = calibrated(
            samples,
            hardware={},
            model_fingerprint=self._files.fingerprint,
            model=MODEL,
            dtype=DTYPE,
            created="",
            settings={},
        )
        self.samples = found.prior_samples
        return found

    def run(self, traffic: Traffic, policy: str) -> Run:
        made = list(traffic.requests(self._text))
        lengths = {request.request_id: item.num_output_tokens for item, request, _ in made}
        source = ClosedSource([Stage([request], at_most) for _, request, at_most in made])
        steps: list[StepRecord] = []
        events: list[EventRecord] = []
        engine = make_engine(
            ForcedLengths(self._backend(), lengths),
            EngineOptions(policy=policy),
            clock=time.perf_counter,
            calibration=self.samples,
            on_step=steps.append,
            on_event=events.append,
        ).engine
        num_tokens, num_suspensions = 0, 0
        started_s = time.perf_counter()
        for result in engine.run(source):
            source.finish(1)
            output = len(result.completions[0].token_ids)
            assert output == lengths[result.request_id], (output, lengths[result.request_id])
            num_tokens += result.num_prompt_tokens + output
            num_suspensions += result.num_suspensions
        elapsed_s = time.perf_counter() - started_s
        engine.backend.close()
        return Run(
            traffic=traffic.name,
            policy=policy,
            elapsed_s=elapsed_s,
            num_requests=len(made),
            num_tokens=num_tokens,
            num_steps=len(steps),
            num_overflow_steps=sum(step.num_suspended > 0 for step in steps),
            num_suspensions=num_suspensions,
            switches=tuple(switches(events, started_s)),
            steps=tuple(steps),
        )


def switches(events: Sequence[EventRecord], started_s: float) -> Iterator[str]:
    """When the mode changed, and why."""
    for record in events:
        row = record.event
        if row.table == "crossover" and row.mode_before != row.mode_after:  # type: ignore[union-attr]
            yield f"{record.at_s - started_s:.1f} s, {row.trigger}: {row.reason}"  # type: ignore[union-attr]


def recorded(run: Run, index: int) -> list[RecordedStep]:
    return [
        RecordedStep(
            str(index), s.started_s, s.elapsed_s, s.schedule_s, s.num_prefill_tokens,
            s.num_decode_tokens, s.num_context_tokens, s.num_seqs, s.num_finished,
        )
        for s in run.steps
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One cost model of all runs."""

    cost: StepCost
    schedule: ScheduleCost

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Model:
        steps = [step for index, run in enumerate(runs) for step in recorded(run, index)]
        fitted = fit_step_cost(step_samples(steps))
        assert fitted is not None
        return cls(cost=fitted.cost, schedule=fit_schedule_cost(steps))


def simulated_s(
    traffic: Traffic, policy: str, model: Model, bench: Bench, config: SimConfig
) -> float:
    estimator = Estimator(calibration=bench.samples)
    simulator = Simulator(
        make_policy(policy, estimator), config, model.cost, schedule=model.schedule
    )
    return simulator.run(ClosedLoop(traffic.stages)).job_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A setting: median seconds by policy, measured and simulated."""

    traffic: str
    measured_s: dict[str, float]
    simulated_s: dict[str, float]

    @property
    def hybrid_to_better(self) -> float:
        return min(self.measured_s[p] for p in POLICIES[:2]) / self.measured_s["hybrid"]

    @property
    def exclusive_to_mixed(self) -> float:
        return self.measured_s["mixed"] / self.measured_s["exclusive"]

    def simulation_error(self, policy: str) -> float:
        return self.simulated_s[policy] / self.measured_s[policy] - 1


def lines_of(
    settings: Sequence[Traffic], runs: Sequence[Run], bench: Bench, config: SimConfig
) -> list[Line]:
    model = Model.of(runs)
    return [
        Line(
            traffic=traffic.name,
            measured_s={
                p: median(r.elapsed_s for r in runs if (r.traffic, r.policy) == (traffic.name, p))
                for p in POLICIES
            },
            simulated_s={p: simulated_s(traffic, p, model, bench, config) for p in POLICIES},
        )
        for traffic in settings
    ]


def checks(lines: Sequence[Line], runs: Sequence[Run]) -> list[Check]:
    shifts = [line for line in lines if line.traffic.endswith("shift")]
    errors = {
        policy: median(abs(line.simulation_error(policy)) for line in lines) for policy in POLICIES
    }
    worst = {
        policy: max(abs(line.simulation_error(policy)) for line in lines) for policy in POLICIES
    }
    overflow = sum(run.num_overflow_steps for run in runs) / sum(run.num_steps for run in runs)
    return [
        Check(name="hybrid, in the better of exclusive and mixed: the least of all settings",
              value=min(line.hybrid_to_better for line in lines), bound=0.98, sense=">="),
        Check(name="the same, median of all settings",
              value=median(line.hybrid_to_better for line in lines), bound=0.98, sense=">="),
        Check(name="hybrid, in the better of both, under a shift: the least",
              value=min(line.hybrid_to_better for line in shifts), bound=1.0, sense=">="),
        Check(name="steps short of KV memory, share of all", value=overflow, bound=BOUND,
              sense="<="),
        *(Check(name=f"simulated job time of {policy}, error: median of all settings",
                value=errors[policy], bound=0.10, sense="<=") for policy in POLICIES),
        *(Check(name=f"simulated job time of {policy}, error: the most of all settings",
                value=worst[policy], bound=0.10, sense="<=") for policy in POLICIES),
    ]  # fmt: skip


def show(console: Console, lines: Sequence[Line], calibration: Calibration) -> None:
    console.print(curve_table(calibration))
    shown = Table(title="Job time in seconds (medians), simulated in brackets")
    for column in ("setting", *POLICIES, "EB/MB", "EB+/better"):
        shown.add_column(column, justify="right")
    for line in lines:
        cells = (f"{line.measured_s[p]:.1f} ({line.simulated_s[p]:.1f})" for p in POLICIES)
        shown.add_row(
            line.traffic, *cells, f"{line.exclusive_to_mixed:.3f}", f"{line.hybrid_to_better:.3f}"
        )
    console.print(shown)


def run_all(
    options: Namespace, console: Console, bench: Bench, settings: Sequence[Traffic]
) -> list[Run]:
    runs: list[Run] = []
    for round_number in range(options.rounds):
        for traffic in settings:
            for turn in range(len(POLICIES)):
                policy = POLICIES[(turn + round_number) % len(POLICIES)]
                run = bench.run(traffic, policy)
                runs.append(run)
                told = "; ".join(run.switches)
                console.print(f"{traffic.name}, {policy}: {run.elapsed_s:.1f} s {told}")
    return runs


def main() -> None:
    options = arguments(__doc__)
    options.rounds = options.rounds or (1 if options.quick else 3)
    console = Console(width=150)
    machine = measure_machine()
    if machine.load_1min > 0.5:
        console.print(f"The load is {machine.load_1min:.1f}: these figures will not hold.")
    bench = Bench(resolve_model(MODEL))
    calibration = bench.calibrate(15.0 if options.quick else 60.0)
    settings = list(traffics(quick=options.quick))
    bench.run(settings[0], "exclusive")  # warms up
    runs = run_all(options, console, bench, settings)
    setup = size_engine(bench._backend().info, EngineOptions())
    config = SimConfig(
        num_blocks=setup.config.num_blocks,
        budget=setup.config.budget,
        window=setup.config.window,
    )
    lines = lines_of(settings, runs, bench, config)
    show(console, lines, calibration)
    curve = interference(calibration.samples, calibration.cost)
    found = checks(lines, runs)
    show_checks(console, found)
    write_report(
        options.json,
        machine=machine.as_json(),
        settings={"model": MODEL, "dtype": DTYPE, "quick": options.quick,
                  "rounds": options.rounds, "overflow_probability": BOUND},
        runs=[run.as_json() for run in runs],
        summary={
            "calibration": dict(calibration.cost.to_json()),
            "interference_threshold": calibration.cost.interference_threshold(),
            "interference": [at._asdict() | {"ratio": at.ratio} for at in curve],
            "cost": asdict(Model.of(runs).cost),
            "lines": [asdict(line) for line in lines],
        },
        checks=found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
