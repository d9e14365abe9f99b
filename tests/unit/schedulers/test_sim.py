"""The simulator: the engine's own steps in virtual time; arrivals; costs of a recording."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from schedulers.cost import CostFit, StepCost, StepSample
from schedulers.estimate import Estimator
from schedulers.policies import POLICIES, make_policy
from schedulers.sim.arrivals import AllAtOnce, ClosedLoop, SimRequest, Stage, geometric_requests
from schedulers.sim.hardware import HARDWARE
from schedulers.sim.recorded import (
    RecordedStep,
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
    SimStep,
    Simulator,
)
from schedulers.view import Budget, Policy
from tests.unit.workers.harness import Clock, check_idle, make_engine, request
from workers.backends.base import Batch
from workers.backends.fake import FakeBackend
from workers.request import StepRecord

TICK_S = 2.0**-20
"""Sums of multiples of it are exact, so that the engine's clock and the simulator's agree."""
COST = StepCost(
    alpha_p=2000 * TICK_S, beta_p=50 * TICK_S, alpha_d=9000 * TICK_S, beta_d=60 * TICK_S,
    alpha_mb=9500 * TICK_S, mix_a=70 * TICK_S, gamma=TICK_S,
)  # fmt: skip
SIZES = {"num_blocks": 40, "block_size": 4, "max_batch_tokens": 32, "max_seqs": 16, "window": 20}


def lengths(
    num: int, *, seed: int = 0, longest: int = 40, longest_prompt: int = 30
) -> list[SimRequest]:
    """Short completions first, long ones later: what was learned holds too little memory then."""
    rng = random.Random(seed)
    return [
        SimRequest(
            rng.randint(1, longest_prompt),
            rng.randint(1, longest // 5 if row < num // 2 else longest),
            longest,
        )
        for row in range(num)
    ]


def config(
    *,
    num_blocks: int = 40,
    block_size: int = 4,
    max_batch_tokens: int = 32,
    max_seqs: int = 16,
    window: int = 20,
) -> SimConfig:
    budget = Budget(max_batch_tokens=max_batch_tokens, max_seqs=max_seqs)
    return SimConfig(num_blocks=num_blocks, block_size=block_size, budget=budget, window=window)


def bold_policy(name: str) -> Policy:
    """One that takes in more than memory is safe for."""
    return make_policy(name, Estimator(overflow_probability=0.5))


def simulated(policy: str, requests: Sequence[SimRequest]) -> tuple[list[SimStep], SimResult]:
    steps: list[SimStep] = []
    simulator = Simulator(bold_policy(policy), config(**SIZES), COST, on_step=steps.append)
    return steps, simulator.run(AllAtOnce(requests))


def executed(policy: str, requests: Sequence[SimRequest]) -> list[StepRecord]:
    """The engine's own steps, over a backend that takes what `COST` says."""
    clock, steps = Clock(), list[StepRecord]()

    def pass_time(batch: Batch) -> None:
        decodes = [s for s in batch.segments if s.is_decode]
        prefill = batch.num_tokens - len(decodes)
        clock.now_s += COST.step_s(prefill, len(decodes), sum(s.start + 1 for s in decodes))

    def script(row: str, _sample: int, position: int) -> int:
        return 0 if position + 1 == requests[int(row)].num_output_tokens else 1

    engine = make_engine(
        bold_policy(policy),
        backend=FakeBackend(script=script, on_execute=pass_time),
        share_prefixes=False,
        on_step=steps.append,
        clock=clock,
        **SIZES,
    )
    rows = [
        request(row, [1] * item.num_prompt_tokens, max_tokens=item.max_output_tokens)
        for row, item in enumerate(requests)
    ]
    assert sum(1 for _ in engine.run(rows)) == len(requests)
    check_idle(engine)
    return steps


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_the_engines_steps_and_the_simulators_are_the_same(policy: str, seed: int) -> None:
    requests = lengths(150, seed=seed)
    steps, result = simulated(policy, requests)
    real = executed(policy, requests)

    def of_sim(step: SimStep) -> tuple:
        o = step.outcome
        counts = o.num_prefill_tokens, o.num_decode_tokens, o.num_context_tokens, o.num_suspended
        return (o.phase, *counts, o.elapsed_s, len(o.finished), step.started_s, step.plan.reason)

    def of_engine(s: StepRecord) -> tuple:
        counts = s.num_prefill_tokens, s.num_decode_tokens, s.num_context_tokens, s.num_suspended
        return (s.phase, *counts, s.elapsed_s, s.num_finished, s.started_s, s.reason)

    assert [of_sim(step) for step in steps] == [of_engine(step) for step in real]
    assert result.job_s == real[-1].started_s + real[-1].elapsed_s
    assert result.num_suspensions == sum(step.num_suspended for step in real) > 0
    assert result.num_output_tokens == sum(item.num_output_tokens for item in requests)
    assert result.num_requests == len(requests)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_same_seed_same_result(policy: str) -> None:
    assert simulated(policy, lengths(80)) == simulated(policy, lengths(80))
    assert simulated(policy, lengths(80))[1] != simulated(policy, lengths(80, seed=1))[1]


class Watched(ClosedLoop[SimRequest]):
    """A closed loop that keeps how many were in flight, and under which stage."""

    def __init__(self, stages: Sequence[Stage[SimRequest]]) -> None:
        super().__init__(stages)
        self.seen: list[tuple[int, int]] = []
        self.num_taken = self.num_finished = 0

    def take(self, max_requests: int) -> list[SimRequest]:
        taken = super().take(max_requests)
        self.num_taken += len(taken)
        self.seen.append((self.num_taken, self.num_taken - self.num_finished))
        return taken

    def finish(self, num_requests: int) -> None:
        super().finish(num_requests)
        self.num_finished += num_requests


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_closed_loop_keeps_to_its_concurrency_and_stages_change_it(policy: str) -> None:
    loop = Watched([Stage(lengths(40), 3), Stage(lengths(40, seed=1), 9), Stage(lengths(20), 1)])
    result = Simulator(make_policy(policy), config(), COST).run(loop)
    assert result.num_requests == 100
    limits = [(3 if taken <= 40 else 9, n) for taken, n in loop.seen if taken <= 80]
    assert all(num <= limit for limit, num in limits)
    assert {limit for limit, num in limits if num == limit} == {3, 9}, "both are reached"
    last = [num for taken, num in loop.seen if taken > 81]
    assert max(last) == 1


def test_more_in_flight_is_faster() -> None:
    def job_s(concurrency: int) -> float:
        loop = ClosedLoop([Stage(lengths(60), concurrency)])
        return Simulator(make_policy("mixed"), config(), COST).run(loop).job_s

    assert job_s(1) > 2 * job_s(8)


def test_a_request_that_memory_cannot_hold_is_told() -> None:
    simulator = Simulator(make_policy("mixed"), config(), COST)
    with pytest.raises(RequestTooLong, match=r"161 tokens.*holds 160"):
        simulator.run(AllAtOnce([SimRequest(100, 5, 61)]))
    simulator = Simulator(make_policy("mixed"), config(), COST)
    assert simulator.run(AllAtOnce([SimRequest(100, 5, 60)])).num_steps == 4 + 4


def test_arrivals_that_never_end_are_told() -> None:
    class Silent(AllAtOnce):
        def take(self, max_requests: int) -> list[SimRequest]:
            return []

    with pytest.raises(RuntimeError, match="no request arrives"):
        Simulator(make_policy("mixed"), config(), COST).run(Silent([]))


def test_scheduling_and_finished_requests_take_their_time() -> None:
    schedule = ScheduleCost(fixed_s=1.0, per_seq_s=0.5, per_request_s=0.25)

    def run(schedule: ScheduleCost | None) -> SimResult:
        simulator = Simulator(make_policy("mixed"), config(), COST, schedule=schedule)
        return simulator.run(AllAtOnce([SimRequest(4, 3, 3)] * 2))

    plain, slow = run(None), run(schedule)
    assert slow.num_steps == plain.num_steps == 3
    assert slow.job_s - plain.job_s == pytest.approx(3 * 1.0 + 6 * 0.5 + 2 * 0.25)


def test_a_switch_costs_half_of_there_and_back() -> None:
    def run(alpha_switch: float) -> float:
        cost = StepCost(
            alpha_p=1.0, beta_p=0.0, alpha_d=1.0, beta_d=0.0, alpha_mb=1.0, mix_a=0.0,
            alpha_switch=alpha_switch,
        )  # fmt: skip
        simulator = Simulator(make_policy("exclusive"), config(max_seqs=1), cost)
        return simulator.run(AllAtOnce([SimRequest(4, 3, 3)] * 2)).job_s

    assert run(2.0) - run(0.0) == 3.0, "prefill, decode, prefill, decode"


# -- made-up lengths --


def test_geometric_requests_have_their_means() -> None:
    found = geometric_requests(
        20_000, mean_prompt_tokens=512, mean_output_tokens=100, rng=np.random.default_rng(1)
    )
    prompts = np.array([item.num_prompt_tokens for item in found])
    outputs = np.array([item.num_output_tokens for item in found])
    assert (prompts.min(), prompts.max()) == (256, 768)
    assert prompts.mean() == pytest.approx(512, rel=0.01)
    assert outputs.max() == 400
    assert outputs.min() == 1
    cut_mean = 100 * (1 - (1 - 1 / 100) ** 400)
    assert outputs.mean() == pytest.approx(cut_mean, rel=0.02)
    assert {item.max_output_tokens for item in found} == {400}


def test_geometric_requests_may_be_short() -> None:
    found = geometric_requests(
        50, mean_prompt_tokens=1, mean_output_tokens=1, rng=np.random.default_rng(0)
    )
    assert {item.num_output_tokens for item in found} == {1}
    assert {item.num_prompt_tokens for item in found} <= {1, 2}


@pytest.mark.parametrize("name", list(HARDWARE))
def test_named_hardware_costs_more_for_more(name: str) -> None:
    cost = HARDWARE[name].cost
    sizes = [(256, 0, 0), (512, 0, 0), (512, 64, 0), (512, 128, 0)]
    seconds = [cost.step_s(*size) for size in sizes]
    assert seconds == sorted(seconds)
    assert cost.step_s(0, 64) < cost.step_s(0, 128)


# -- costs of a recording --


def recorded(
    policy: str, *, num: int = 150, seed: int = 0, noise: float = 0.0, gap_s: float = 0.0
) -> list[RecordedStep]:
    """A simulated job as if it had been recorded: every tenth step takes three times as long."""
    rng = random.Random(seed)
    at_s, found = 100.0, list[RecordedStep]()
    for step in simulated(policy, lengths(num, seed=seed))[0]:
        o = step.outcome
        elapsed_s = o.elapsed_s * rng.lognormvariate(0, noise)
        elapsed_s *= 3 if noise and len(found) % 10 == 9 else 1
        num_seqs = len(step.plan.scheduled)
        schedule_s = 1e-3 + 1e-4 * num_seqs
        counts = o.num_prefill_tokens, o.num_decode_tokens, o.num_context_tokens, num_seqs
        found.append(RecordedStep("r", at_s, elapsed_s, schedule_s, *counts, len(o.finished)))
        at_s += elapsed_s + schedule_s + gap_s * len(o.finished)
    return found


@pytest.mark.parametrize("policy", list(POLICIES))
def test_costs_are_found_again(policy: str) -> None:
    samples = step_samples(recorded(policy))
    fit = fit_step_cost(samples)
    assert fit is not None
    assert fit.scale == pytest.approx(1.0, abs=0.02)
    for sample in samples:
        if policy == "mixed" and sample.kind == "prefill":
            continue  # taken from mixed steps: these are too few
        if sample.num_prefill_tokens >= 8:  # small ones are few in a job
            assert fit.cost.step_s(*sample[:3]) == pytest.approx(sample.elapsed_s, rel=0.05)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_costs_add_up_to_the_recorded_time_however_slow_some_steps_were(policy: str) -> None:
    samples = step_samples(recorded(policy, noise=0.1))
    fit = fit_step_cost(samples)
    assert fit is not None
    assert fit.scale > 1.05
    predicted_s = sum(fit.cost.step_s(*sample[:3]) for sample in samples)
    num_switches = sum(sample.switched and sample.kind != "mixed" for sample in samples)
    predicted_s += fit.cost.alpha_switch / 2 * num_switches
    measured_s = sum(sample.elapsed_s for sample in samples)
    if policy == "mixed":  # whose few prefill steps do not count for the cost of prefill
        assert predicted_s == pytest.approx(measured_s, rel=0.03)
    else:
        assert fit.rest_s == pytest.approx(0.0, abs=1e-9)
    assert predicted_s + fit.rest_s * len(samples) == pytest.approx(
        max(measured_s, predicted_s), rel=1e-6
    )


def test_prefill_is_taken_from_mixed_steps_where_it_was_hardly_seen() -> None:
    """A mixed job begins with the one full prefill step, which tells nothing of a smaller one."""
    cost = StepCost(
        alpha_p=0.01, beta_p=1e-4, alpha_d=0.01, beta_d=1e-3, alpha_mb=0.01, mix_a=1e-4,
        mix_b=9e-4,
    )  # fmt: skip
    sizes = [(1000, 0), *((p, d) for p in range(100, 1000, 100) for d in (5, 50, 90))]
    sizes += [(0, d) for d in range(5, 100, 5)]
    fit = fit_step_cost([StepSample(p, d, 0, cost.step_s(p, d)) for p, d in sizes])
    assert fit is not None
    assert fit.cost.step_s(100, 0) == pytest.approx(cost.step_s(100, 0), rel=0.1)
    assert fit.cost.step_s(1000, 0) == pytest.approx(cost.step_s(1000, 0), rel=0.05)


def test_without_decode_steps_there_is_no_cost() -> None:
    assert fit_step_cost([StepSample(n, 0, 0, 0.1) for n in range(1, 20)]) is None
    assert fit_step_cost([]) is None


def test_time_between_steps_is_found_again() -> None:
    schedule = fit_schedule_cost(recorded("mixed", gap_s=0.02))
    assert schedule.fixed_s == pytest.approx(1e-3, rel=0.01)
    assert schedule.per_seq_s == pytest.approx(1e-4, rel=0.01)
    assert schedule.per_request_s == pytest.approx(0.02, rel=0.01)
    assert fit_schedule_cost([]) == ScheduleCost()


def test_a_long_wait_is_spread_over_all_steps() -> None:
    steps = [RecordedStep("r", float(n + 5 * (n > 7)), 1.0, 0.0, 0, 4, 40, 4, 0) for n in range(20)]
    assert fit_schedule_cost(steps).fixed_s * 19 == pytest.approx(5.0)


def test_runs_have_clocks_of_their_own() -> None:
    first = [RecordedStep("a", 50.0 + n, 1.0, 0.0, 8, 0, 0, 1, 0) for n in range(4)]
    second = [RecordedStep("b", 3.0 + n, 0.75, 0.25, 0, 4, 40, 4, 0) for n in range(4)]
    assert span_s([*first, *second]) == 8.0
    assert span_s([]) == 0.0
    assert fit_schedule_cost([*first, *second]).per_request_s == 0.0
    assert not any(sample.switched for sample in step_samples([*first, *second]))


def test_switches_are_marked_and_idle_steps_left_out() -> None:
    sizes = [(8, 0), (8, 0), (0, 4), (0, 0), (0, 4), (8, 4), (0, 4)]
    steps = [RecordedStep("r", n, 1, 0, p, d, 9 * d, 4, 0) for n, (p, d) in enumerate(sizes)]
    marks = [sample.switched for sample in step_samples(steps)]
    assert marks == [False, False, True, False, True, True]


def test_a_shared_prompt_is_read_by_every_decode_token() -> None:
    cost = StepCost(
        alpha_p=1.0, beta_p=0.1, alpha_d=1.0, beta_d=0.1, alpha_mb=1.0, mix_a=0.1, mix_b=0.2,
        gamma=0.01,
    )  # fmt: skip
    shifted = with_shared_context(cost, 30)
    for prefill, decode, context in ((5, 0, 0), (0, 4, 50), (6, 3, 40)):
        expected = cost.step_s(prefill, decode, context + 30 * decode)
        assert shifted.step_s(prefill, decode, context) == pytest.approx(expected)


def test_samples_like_a_cost_are_fitted_to_it() -> None:
    cost = StepCost(
        alpha_p=4e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4, alpha_mb=1.2e-2,
        mix_a=6e-5, mix_b=2e-4, mix_c=1e-5, gamma=2e-7,
    )  # fmt: skip
    found = CostFit(samples_like(cost)).calibrated
    assert found is not None
    for prefill, decode in ((100, 0), (0, 30), (300, 60)):
        context = 100 * decode
        want = cost.step_s(prefill, decode, context)
        assert found.step_s(prefill, decode, context) == pytest.approx(want, rel=0.03)
