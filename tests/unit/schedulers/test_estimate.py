"""What a policy learns: lengths after enough completions, costs after enough steps."""

from __future__ import annotations

import random

import pytest

from schedulers.cost import StepCost, StepSample
from schedulers.crossover import refill_size
from schedulers.estimate import Estimator
from schedulers.events import CostModel
from schedulers.lengths import LengthWindow
from schedulers.view import Finished, Outcome
from schedulers.workload import Present, measured_workload
from tests.unit.schedulers.test_exclusive import view

COST = StepCost(alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4, alpha_mb=1e-2, mix_a=6e-5)


EMPTY = view(running=0, waiting=0)


def feed(estimator: Estimator, *, mean_output: int, steps: int = 400, seed: int = 0) -> None:
    """Decode steps of 10 to 200 sequences in which each ends with the chance 1 / mean_output."""
    rng = random.Random(seed)
    for index in range(steps):
        prefill = rng.randint(50, 900) if index % 4 == 0 else 0
        decode = 0 if prefill else rng.randint(10, 200)
        finished = tuple(
            Finished(100, 1 + int(rng.expovariate(1 / mean_output)))
            for _ in range(decode)
            if rng.random() < 1 / mean_output
        )
        estimator.observe(
            Outcome(
                phase="prefill" if prefill else "decode",
                num_prefill_tokens=prefill,
                num_decode_tokens=decode,
                num_context_tokens=0,
                elapsed_s=COST.step_s(prefill, decode),
                finished=finished,
            )
        )


def test_before_anything_is_known_the_assumed_length_counts() -> None:
    estimator = Estimator(cold_mean_output_tokens=64)
    assert estimator.workload.num_samples == 0
    assert estimator.workload.mean_output_tokens == 64
    assert 1 <= estimator.threshold(100, 512).refill < 100


def test_lengths_and_costs_are_learned_and_the_refill_follows_from_them() -> None:
    estimator = Estimator()
    feed(estimator, mean_output=80)
    estimator.update(EMPTY)
    workload = estimator.workload
    assert workload.mean_output_tokens == pytest.approx(80, rel=0.15)
    cost = estimator.costs.cost()
    assert cost is not None
    assert cost.alpha_p == pytest.approx(COST.alpha_p, rel=0.01)
    found = estimator.threshold(128, 100_000)
    assert found.switch_s == pytest.approx(5e-3, rel=0.01)
    best = refill_size(128, workload.phase_hazard, switch_s=5e-3, alpha_d=1e-2, beta_d=1e-4)
    assert found.refill == pytest.approx(best + round(found.correction * 128), abs=1)


def test_longer_outputs_and_dearer_switches_mean_other_refills() -> None:
    refills = {}
    for mean_output in (20, 400):
        estimator = Estimator()
        feed(estimator, mean_output=mean_output)
        estimator.update(EMPTY)
        refills[mean_output] = estimator.threshold(256, 100_000).refill
    assert refills[20] > refills[400] >= 1


def test_a_change_of_lengths_is_followed_within_a_window() -> None:
    estimator = Estimator(window=200)
    feed(estimator, mean_output=20)
    estimator.update(EMPTY)
    before = estimator.workload.mean_output_tokens
    feed(estimator, mean_output=300, seed=1)
    assert before < 30
    estimator.update(EMPTY)
    assert estimator.workload.mean_output_tokens > 200


def test_what_is_computed_is_told_once() -> None:
    estimator = Estimator()
    feed(estimator, mean_output=20)
    estimator.update(EMPTY)
    told = estimator.take_events()
    assert [event.table for event in told] == ["costs"]
    assert estimator.take_events() == ()


def test_a_calibration_is_told_and_used_before_the_first_step() -> None:
    calibration = [StepSample(n, 0, 0, COST.step_s(n, 0)) for n in (64, 128, 256, 512)]
    calibration += [StepSample(0, n, 0, COST.step_s(0, n)) for n in (1, 8, 64, 256)]
    estimator = Estimator(calibration=calibration)
    (told,) = estimator.take_events()
    assert isinstance(told, CostModel)
    assert told.source == "calibration"
    assert estimator.cost is not None
    assert estimator.cost.alpha_d == pytest.approx(COST.alpha_d, rel=0.05)


def test_what_shared_prefixes_bring_is_no_part_of_the_prompt() -> None:
    """Prompts of 100 tokens of which 20 are computed for each row."""
    window = LengthWindow()
    window.add([Finished(100, 11, num_cached_tokens=80)] * 50, 500)
    assert measured_workload(window, None).mean_prompt_tokens == pytest.approx(20)
    present = Present(num_seqs=64, mean_prompt_tokens=200, mean_allowed_tokens=64)
    assert measured_workload(window, present).mean_prompt_tokens == pytest.approx(40)
