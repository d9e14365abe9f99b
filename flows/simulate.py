"""`flows simulate`: what a job would take under each policy, in virtual time.

    recording          a job's rows and steps, read from its output
    simulate_options   what was asked for, and whether it makes sense
    simulate           lengths, sizes and costs to one simulated job for each policy
    simulate_tables    what is shown

A replay takes everything from the job that is not given: rows, policy, sizes, step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flows.errors import SpecError
from flows.recording import Recording, read_recording
from flows.simulate_options import SimulateOptions, Synthetic
from schedulers.calibration import Calibration
from schedulers.cost import StepCost, StepSample
from schedulers.estimate import Estimator
from schedulers.events import CrossoverEvaluation
from schedulers.memory import SizingForm
from schedulers.policies import POLICIES, make_policy
from schedulers.sim.arrivals import AllAtOnce, ClosedLoop, SimRequest, Stage, geometric_requests
from schedulers.sim.hardware import HARDWARE
from schedulers.sim.recorded import (
    fit_schedule_cost,
    fit_step_cost,
    samples_like,
    span_s,
    step_samples,
    with_shared_context,
)
from schedulers.sim.simulator import (
    RequestTooLong,
    ScheduleCost,
    SimConfig,
    SimResult,
    Simulator,
)
from schedulers.view import Budget
from workers.setup import BLOCK_SIZE, DEFAULTS, DETERMINISTIC_CHUNK_TOKENS, SizeDefaults


class Costs(NamedTuple):
    """What steps take, and where that is from.

    Attributes:
        source: in words.
        cost: of a step.
        schedule: beside it.
        calibration: what a policy knows of step costs at the start.
        scale: recorded seconds of a job's own steps over those of a robust fit to them; far from 1:
            something else used the machine.
    """

    source: str
    cost: StepCost
    schedule: ScheduleCost = ScheduleCost()
    calibration: tuple[StepSample, ...] = ()
    scale: float = 1.0


class Learning(NamedTuple):
    """How a policy's estimator is set up."""

    overflow_probability: float = 0.01
    sizing: SizingForm = "moments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that one simulation is made of.

    Attributes:
        requests: in order of arrival.
        config: sizes.
        costs: of steps.
        concurrency: requests in flight; None: all are offered at once.
        learning: of the policies.
    """

    requests: Sequence[SimRequest]
    config: SimConfig
    costs: Costs
    concurrency: int | None = None
    learning: Learning = field(default_factory=Learning)


class PolicyRun(NamedTuple):
    """A simulated job."""

    policy: str
    result: SimResult

    @property
    def num_switches(self) -> int:
        """Changes of a hybrid's mode."""
        return sum(
            isinstance(item.event, CrossoverEvaluation)
            and item.event.mode_before != item.event.mode_after
            for item in self.result.events
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Simulated jobs that differ in the policy alone.

    Attributes:
        runs: one for each policy.
        setup: what they have in common.
        recording: of a replay.
        measured_s: what the recorded job took, where `runs` are to be compared with it.
    """

    runs: tuple[PolicyRun, ...]
    setup: Setup
    recording: Recording | None = None
    measured_s: float | None = None

    @property
    def recorded_run(self) -> PolicyRun | None:
        """The simulation under the recorded policy."""
        if self.recording is None:
            return None
        return next((run for run in self.runs if run.policy == self.recording.policy), None)

    @property
    def ratio(self) -> float | None:
        """Simulated over measured seconds."""
        run = self.recorded_run
        return run.result.job_s / self.measured_s if run and self.measured_s else None


def run_simulation(options: SimulateOptions) -> Simulation:
    """Simulate a recorded job or a synthetic one.

    Raises:
        SpecError: options that do not go together, or that the recording cannot answer.
        InputError: there is no job at that place.
    """
    asked = options.checked()
    if asked.synthetic is not None:
        return _simulate_synthetic(options, asked.synthetic)
    assert options.output is not None
    return _replay(options, read_recording(options.output, credentials=options.credentials))


def simulate(setup: Setup, policy: str) -> SimResult:
    """One simulated job.

    Raises:
        SpecError: a request that KV memory cannot hold.
    """
    learning = setup.learning
    estimator = Estimator(
        overflow_probability=learning.overflow_probability,
        sizing=learning.sizing,
        calibration=setup.costs.calibration,
    )
    simulator = Simulator(
        make_policy(policy, estimator),
        setup.config,
        setup.costs.cost,
        schedule=setup.costs.schedule,
    )
    if setup.concurrency is None:
        arrivals = AllAtOnce(setup.requests)
    else:
        arrivals = ClosedLoop([Stage(setup.requests, setup.concurrency)])
    try:
        return simulator.run(arrivals)
    except RequestTooLong as fault:
        raise SpecError(f"{fault}; raise --capacity-tokens") from fault


def _runs(setup: Setup, first: str, policy: str | None) -> tuple[PolicyRun, ...]:
    """The policy that was asked for, or all of them, the recorded one first."""
    names = [policy or first]
    if policy == "all":
        names = [first, *(name for name in POLICIES if name != first)]
    return tuple(PolicyRun(name, simulate(setup, name)) for name in names)


# -- a synthetic job --


def _simulate_synthetic(options: SimulateOptions, lengths: Synthetic) -> Simulation:
    name = options.hardware or "h200"
    hardware = HARDWARE[name]
    setup = Setup(
        requests=geometric_requests(
            options.num_rows,
            mean_prompt_tokens=lengths.prompt_tokens,
            mean_output_tokens=lengths.output_tokens,
            rng=np.random.default_rng(options.seed or 0),
        ),
        config=_config(
            options,
            SizeDefaults(hardware.max_batch_tokens, hardware.max_seqs),
            hardware.capacity_tokens,
        ),
        costs=Costs(f"named hardware {name}", hardware.cost),
        concurrency=options.concurrency,
    )
    return Simulation(runs=_runs(setup, "hybrid", options.policy), setup=setup)


def _config(
    options: SimulateOptions,
    sizes: SizeDefaults,
    capacity_tokens: int,
    *,
    block_size: int = BLOCK_SIZE,
    deterministic: bool = False,
) -> SimConfig:
    """Sizes as an engine would take them, with what was given in place of the defaults."""
    max_batch_tokens, max_seqs = _sizes(options.max_batch_tokens, options.max_seqs, sizes)
    num_blocks = (options.capacity_tokens or capacity_tokens) // block_size
    if num_blocks < 1:
        raise SpecError(
            f"--capacity-tokens is {options.capacity_tokens}; it must be at least {block_size}, "
            "a block"
        )
    return SimConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        budget=Budget(
            max_batch_tokens=max_batch_tokens,
            max_seqs=max_seqs,
            reservation="full" if deterministic else "expected",
            chunk_tokens=(
                min(DETERMINISTIC_CHUNK_TOKENS, max_batch_tokens) if deterministic else None
            ),
        ),
        window=4 * max_seqs,
    )


# -- a replay --


def _replay(options: SimulateOptions, recording: Recording) -> Simulation:
    if recording.policy not in POLICIES:
        raise SpecError(
            f"{recording.url} was run with the policy {recording.policy!r}; this version has "
            f"{', '.join(POLICIES)}"
        )
    engine = recording.engine
    setup = Setup(
        requests=recording.requests,
        config=_replay_config(options, recording),
        costs=_replay_costs(options, recording),
        concurrency=options.concurrency,
        learning=Learning(
            float(engine.get("overflow_probability", 0.01)), engine.get("sizing", "moments")
        ),
    )
    comparable = options.is_as_recorded and bool(recording.steps)
    return Simulation(
        runs=_runs(setup, recording.policy, options.policy),
        setup=setup,
        recording=recording,
        measured_s=span_s(recording.steps) if comparable else None,
    )


def _replay_config(options: SimulateOptions, recording: Recording) -> SimConfig:
    """Sizes of the recorded job, or of the hardware where one is named."""
    named = HARDWARE.get(options.hardware or "job")
    if named is not None:
        sizes = SizeDefaults(named.max_batch_tokens, named.max_seqs)
        return _config(options, sizes, named.capacity_tokens)
    pool = recording.pool
    if pool is None and options.capacity_tokens is None:
        raise SpecError(
            f"{recording.url} does not say how much KV memory it had; give --capacity-tokens"
        )
    return _config(
        options,
        recorded_sizes(recording),
        pool.capacity_tokens if pool is not None else 0,
        block_size=pool.block_size if pool is not None else BLOCK_SIZE,
        deterministic=bool(recording.engine.get("deterministic")),
    )


def recorded_sizes(recording: Recording) -> SizeDefaults:
    """Step sizes of the recorded job: as given, else the defaults of its device.

    A record says `auto` where the device was found when the job ran: steps that a CPU's defaults do
    not allow were a GPU's.
    """
    engine, cpu = recording.engine, DEFAULTS["cpu"]
    largest = max((s.num_prefill_tokens + s.num_decode_tokens for s in recording.steps), default=0)
    widest = max((step.num_seqs for step in recording.steps), default=0)
    device = str(engine.get("device", "auto"))
    if device == "auto" and (largest > cpu.max_batch_tokens or widest > cpu.max_seqs):
        device = "cuda"
    defaults = DEFAULTS.get(device, cpu)
    return _sizes(engine.get("max_batch_tokens"), engine.get("max_seqs"), defaults)


def _sizes(
    max_batch_tokens: int | None, max_seqs: int | None, defaults: SizeDefaults
) -> SizeDefaults:
    """What is given; of what is not, the default as far as it goes with the other."""
    tokens = max_batch_tokens or max(defaults.max_batch_tokens, max_seqs or 0)
    return SizeDefaults(tokens, max_seqs or min(defaults.max_seqs, tokens))


def _replay_costs(options: SimulateOptions, recording: Recording) -> Costs:
    hardware = options.hardware or "job"
    shared = recording.shared_context_tokens
    if hardware in HARDWARE:
        cost = with_shared_context(HARDWARE[hardware].cost, shared)
        return Costs(f"named hardware {hardware}", cost)
    schedule = fit_schedule_cost(recording.steps)
    if hardware == "calibration":
        found = stored_calibration(recording)
        cost = with_shared_context(found.cost, shared)
        source = f"calibration of {found.created} ({found.model}, {found.dtype})"
        return Costs(source, cost, schedule, found.prior_samples)
    fit = fit_step_cost(step_samples(recording.steps))
    if fit is None:
        raise SpecError(
            f"{recording.url} has no {'decode steps' if recording.steps else 'steps'} to fit step "
            f"costs to; give --hardware calibration, or one of {', '.join(HARDWARE)}"
        )
    source = f"the job's own steps, which took {fit.scale:.3f} times a robust fit to them"
    schedule = schedule._replace(fixed_s=schedule.fixed_s + fit.rest_s)
    known = recording.calibrated
    return Costs(
        source,
        with_shared_context(fit.cost, shared),
        schedule,
        calibration=() if known is None else samples_like(known),
        scale=fit.scale,
    )


def stored_calibration(recording: Recording) -> Calibration:
    """What `flows calibrate` measured on this machine for the job's model.

    Raises:
        SpecError: there is none.
    """
    from flows.calibration import hardware_of, load_calibration
    from workers.models.device import pick_device, pick_dtype

    spec, generation = recording.record.spec, recording.record.generation
    device = pick_device(recording.engine.get("device", "auto"))
    dtype = str(pick_dtype(generation.get("dtype", "auto"), device)).removeprefix("torch.")
    found = load_calibration(
        hardware=hardware_of(str(device)),
        model_fingerprint=str(generation.get("model")),
        dtype=dtype,
    )
    if found is None:
        raise SpecError(
            f"there is no calibration of {spec.get('model')} in {dtype} on this machine; "
            f"run `flows calibrate --model {spec.get('model')}`"
        )
    return found
