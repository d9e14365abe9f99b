"""The cost model: fits recover what made the steps, noise and outliers notwithstanding."""

from __future__ import annotations

import random

import pytest

from schedulers.cost import CostFit, StepCost, StepSample

TRUE = StepCost(
    alpha_p=4e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4,
    alpha_mb=1.2e-2, mix_a=6e-5, mix_b=2e-4, mix_c=1e-5, gamma=2e-7,
)  # fmt: skip


def steps(kind: str, count: int, *, noise: float, seed: int = 0) -> list[StepSample]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prefill = rng.randint(16, 4000) if kind != "decode" else 0
        decode = rng.randint(1, 512) if kind != "prefill" else 0
        context = decode * rng.randint(50, 1500)
        elapsed_s = TRUE.step_s(prefill, decode, context) * (1 + rng.gauss(0, noise))
        if noise and rng.random() < 0.03:
            elapsed_s *= 4
        made.append(StepSample(prefill, decode, context, elapsed_s))
    return made


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_fit_predicts_the_steps_that_it_has_not_seen(noise: float) -> None:
    fit = CostFit(min_samples=20)
    for kind in ("prefill", "decode", "mixed"):
        fit.add(steps(kind, 400, noise=noise))
    cost = fit.cost()
    assert cost is not None
    for kind in ("prefill", "decode", "mixed"):
        for step in steps(kind, 50, noise=0.0, seed=9):
            predicted = cost.step_s(*step[:3])
            assert predicted == pytest.approx(step.elapsed_s, rel=0.001 if not noise else 0.05)


def test_nothing_is_said_before_enough_was_seen() -> None:
    fit = CostFit(min_samples=20)
    fit.add(steps("prefill", 400, noise=0.0))
    assert fit.cost() is None
    fit.add(steps("decode", 19, noise=0.0))
    assert fit.cost() is None


KINDS = ("prefill", "decode", "mixed")


def test_a_calibration_stands_in_for_what_was_not_seen() -> None:
    calibration = [step for kind in KINDS for step in steps(kind, 60, noise=0.0, seed=1)]
    fit = CostFit(calibration)
    assert fit.calibrated is not None
    fit.add(steps("decode", 200, noise=0.0))
    cost = fit.cost()
    assert cost is not None
    for step in steps("mixed", 50, noise=0.0, seed=9):
        assert cost.step_s(*step[:3]) == pytest.approx(step.elapsed_s, rel=0.01)


def test_a_calibration_is_scaled_to_the_speed_of_the_day() -> None:
    """A machine that is half as fast today is so for the steps that the job has not taken too."""
    calibration = [step for kind in KINDS for step in steps(kind, 60, noise=0.0, seed=1)]
    fit = CostFit(calibration)
    fit.add(s._replace(elapsed_s=2 * s.elapsed_s) for s in steps("decode", 200, noise=0.0))
    cost = fit.cost()
    assert cost is not None
    for step in steps("mixed", 50, noise=0.0, seed=9):
        assert cost.step_s(*step[:3]) == pytest.approx(2 * step.elapsed_s, rel=0.02)


def test_a_long_stretch_of_equal_steps_does_not_wash_out_the_others() -> None:
    """Fixed and marginal cost are still told apart after 10,000 steps of nearly one size."""
    rng = random.Random(2)
    fit = CostFit()
    fit.add(steps("prefill", 40, noise=0.02))
    for size in [8, 16, 32, 64, 128] * 4 + [*range(250, 256)] * 2000:
        elapsed_s = TRUE.step_s(0, size, 100 * size) * (1 + rng.gauss(0, 0.02))
        fit.add([StepSample(0, size, 100 * size, elapsed_s)])
    cost = fit.cost()
    assert cost is not None
    assert cost.alpha_d == pytest.approx(TRUE.alpha_d, rel=0.1)


def test_the_first_step_after_a_change_of_kind_tells_the_cost_of_a_switch() -> None:
    fit = CostFit()
    for kind in ("prefill", "decode"):
        made = steps(kind, 60, noise=0.0)
        fit.add(made)
        fit.add(s._replace(elapsed_s=s.elapsed_s + 3e-3, switched=True) for s in made[:20])
    cost = fit.cost()
    assert cost is not None
    assert cost.alpha_switch == pytest.approx(6e-3, rel=0.35)


def test_without_mixed_steps_mixing_costs_what_its_parts_cost() -> None:
    fit = CostFit(min_samples=20)
    fit.add(steps("prefill", 200, noise=0.0))
    fit.add(steps("decode", 200, noise=0.0))
    cost = fit.cost()
    assert cost is not None
    parts = TRUE.alpha_d + 300 * TRUE.beta_p + 100 * TRUE.beta_d
    assert cost.step_s(300, 100) == pytest.approx(parts, rel=0.02)


def test_no_fixed_cost_is_negative() -> None:
    fit = CostFit(min_samples=5)
    fit.add(StepSample(n, 0, 0, 1e-4 * n - 1e-3) for n in range(20, 200))
    fit.add(StepSample(0, n, 0, 1e-4 * n) for n in range(20, 200))
    cost = fit.cost()
    assert cost is not None
    assert cost.alpha_p == 0.0


def test_the_interference_threshold_of_the_papers_coefficients() -> None:
    """r* = 0.206 on RTX PRO 6000 and 0.365 on H200, with the coefficients in the paper notes."""
    rtx = StepCost(
        alpha_p=4.691e-3, beta_p=5.008e-5, alpha_d=1.0376e-2, beta_d=1.0388e-4,
        alpha_mb=1.0376e-2, mix_a=6.293e-5, mix_b=1.969e-4, mix_c=9.90e-6,
    )  # fmt: skip
    h200 = StepCost(
        alpha_p=1.279e-3, beta_p=2.485e-5, alpha_d=8.921e-3, beta_d=4.586e-5,
        alpha_mb=8.921e-3, mix_a=2.494e-5, mix_b=5.193e-5, mix_c=1.478e-5,
    )  # fmt: skip
    assert rtx.interference_threshold() == pytest.approx(0.206, abs=0.002)
    assert h200.interference_threshold() == pytest.approx(0.365, abs=0.002)
