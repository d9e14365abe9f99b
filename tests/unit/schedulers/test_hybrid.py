"""EB+: when it looks, what it decides, and that a change of mode loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedulers.cost import StepCost, StepSample
from schedulers.estimate import Estimator
from schedulers.events import CostModel, CrossoverEvaluation
from schedulers.policies import make_policy
from schedulers.policies.hybrid import Hybrid
from schedulers.sim.arrivals import AllAtOnce, ClosedLoop, SimRequest, Stage, geometric_requests
from schedulers.sim.simulator import SimConfig, SimResult, SimStep, Simulator
from schedulers.view import Budget, Policy

EXCLUSIVE_WINS = StepCost(
    alpha_p=4.7e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4,
    alpha_mb=1e-2, mix_a=6e-5, mix_b=2e-4,
)  # fmt: skip
MIXED_WINS = StepCost(
    alpha_p=1e-2, beta_p=5e-5, alpha_d=1e-2, beta_d=5e-5, alpha_mb=1e-2, mix_a=4e-5, mix_b=1e-5
)
DEPENDS = StepCost(
    alpha_p=2e-2, beta_p=5e-5, alpha_d=2e-2, beta_d=5e-5, alpha_mb=2e-2, mix_a=5e-5, mix_b=4e-5
)
"""Mixed batching wins while few are in flight, exclusive batching when many are."""


def requests(count: int, *, prompt: int = 128, output: int = 64, seed: int = 0) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    return geometric_requests(count, mean_prompt_tokens=prompt, mean_output_tokens=output, rng=rng)


def simulate(policy: Policy, cost: StepCost, arrivals: Any, **options: Any) -> SimResult:
    sizes = {"num_blocks": 20_000, "max_seqs": 256, **options}
    config = SimConfig(
        num_blocks=sizes["num_blocks"],
        budget=Budget(max_batch_tokens=2048, max_seqs=sizes["max_seqs"]),
        window=2048,
    )
    return Simulator(policy, config, cost, on_step=options.get("on_step")).run(arrivals)


def evaluations(result: SimResult) -> list[CrossoverEvaluation]:
    return [e.event for e in result.events if isinstance(e.event, CrossoverEvaluation)]


@pytest.mark.parametrize(
    ("cost", "expected"), [(EXCLUSIVE_WINS, "exclusive"), (MIXED_WINS, "mixed")]
)
def test_it_finds_the_cheaper_mode_without_being_told(cost: StepCost, expected: str) -> None:
    """No calibration: it probes what it has not seen, then stays with the right one."""
    policy = Hybrid()
    result = simulate(policy, cost, AllAtOnce(requests(1500)))
    assert policy.mode == expected
    found = evaluations(result)
    assert found[0].trigger == "unmeasured"
    assert {item.mode_after for item in found[2:]} == {expected}


@pytest.mark.parametrize("cost", [EXCLUSIVE_WINS, MIXED_WINS, DEPENDS])
@pytest.mark.parametrize("concurrency", [32, 200])
def test_it_is_as_good_as_the_better_of_the_two(cost: StepCost, concurrency: int) -> None:
    times = {
        name: simulate(
            make_policy(name), cost, ClosedLoop([Stage(requests(12 * concurrency), concurrency)])
        ).job_s
        for name in ("exclusive", "mixed", "hybrid")
    }
    assert min(times["exclusive"], times["mixed"]) / times["hybrid"] >= 0.98


def shifting() -> ClosedLoop[SimRequest]:
    """Few in flight, then many, then few again."""
    return ClosedLoop(
        [
            Stage(requests(400, output=128, seed=1), 4),
            Stage(requests(3000, seed=2), 256),
            Stage(requests(400, output=128, seed=3), 4),
        ]
    )


def test_under_shifting_traffic_it_changes_both_ways_and_beats_both() -> None:
    policy = Hybrid()
    result = simulate(policy, DEPENDS, shifting())
    changes = [
        (item.mode_before, item.mode_after)
        for item in evaluations(result)
        if item.mode_before != item.mode_after
    ]
    assert ("mixed", "exclusive") in changes
    assert ("exclusive", "mixed") in changes
    for name in ("exclusive", "mixed"):
        assert result.job_s < simulate(make_policy(name), DEPENDS, shifting()).job_s


def test_a_change_of_mode_loses_and_recomputes_nothing() -> None:
    """Every token is computed once: those of prompts, and all but the last of each output."""
    items = requests(400, output=128, seed=1) + requests(3000, seed=2)
    items += requests(400, output=128, seed=3)
    computed = 0

    def count(step: SimStep) -> None:
        nonlocal computed
        computed += step.outcome.num_prefill_tokens + step.outcome.num_decode_tokens

    result = simulate(Hybrid(), DEPENDS, shifting(), on_step=count)
    assert any(item.mode_before != item.mode_after for item in evaluations(result))
    assert result.num_requests == len(items)
    assert result.num_suspensions == 0
    assert computed == sum(item.num_prompt_tokens + item.num_output_tokens - 1 for item in items)


def test_a_jump_in_demand_is_looked_at_at_once() -> None:
    arrivals = ClosedLoop([Stage(requests(260, seed=1), 4), Stage(requests(1500, seed=2), 256)])
    found = evaluations(simulate(Hybrid(), DEPENDS, arrivals))
    (surge, *_) = (item for item in found if item.trigger == "surge")
    assert surge.demand < 128


def test_after_a_change_the_mode_stays_for_the_cooldown() -> None:
    found = evaluations(simulate(Hybrid(), DEPENDS, shifting()))
    changed_at = [i for i, item in enumerate(found) if item.mode_before != item.mode_after]
    assert len(changed_at) >= 3
    for index in changed_at[1:]:  # the first choice has no cooldown
        after = found[index + 1 : index + 4]
        assert all(item.mode_before == item.mode_after for item in after)


def test_within_the_hysteresis_it_stays() -> None:
    policy = Hybrid(hysteresis=0.9)
    found = evaluations(simulate(policy, MIXED_WINS, AllAtOnce(requests(1500))))
    assert policy.mode == "exclusive"
    assert any("within the hysteresis" in item.reason for item in found)


def calibration(cost: StepCost) -> list[StepSample]:
    sizes = [(p, 0) for p in (64, 256, 1024, 2048)] + [(0, d) for d in (1, 8, 64, 256)]
    sizes += [(p, d) for p in (64, 512, 1500) for d in (4, 64, 256)]
    return [StepSample(p, d, 0, cost.step_s(p, d)) for p, d in sizes]


def test_with_a_calibration_it_decides_before_the_first_step() -> None:
    policy = Hybrid(Estimator(calibration=calibration(MIXED_WINS)))
    result = simulate(policy, MIXED_WINS, AllAtOnce(requests(300)))
    first = evaluations(result)[0]
    assert first.trigger == "calibrated"
    assert first.mode_after == "mixed"
    assert result.events[0].step == 1
    sources = [e.event.source for e in result.events if isinstance(e.event, CostModel)]
    assert sources[0] == "calibration"
    assert "online" in sources


def test_each_evaluation_is_told_whole() -> None:
    """Sides, margin, N_cross and modes agree with each other."""
    for item in evaluations(simulate(Hybrid(), DEPENDS, shifting())):
        assert item.margin == pytest.approx(item.contention - item.amortisation, abs=1e-12)
        assert 0 < item.decode_share < 1
        assert item.theta == pytest.approx(item.refill / item.holders)
        assert item.holders <= item.max_holders
        if item.mode_before != item.mode_after:
            assert (item.margin > 0) == (item.mode_after == "exclusive")
            assert abs(item.margin) > item.hysteresis * 0.99
            assert item.reason.startswith(f"{item.mode_after} batching is")


def test_same_history_same_decisions() -> None:
    assert (
        simulate(Hybrid(), DEPENDS, shifting()).events
        == simulate(Hybrid(), DEPENDS, shifting()).events
    )
