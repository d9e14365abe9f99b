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


def test_a_prior_stands_in_for_what_was_not_seen() -> None:
    fit = CostFit(TRUE, min_samples=20)
    fit.add(steps("decode", 200, noise=0.0))
    cost = fit.cost()
    assert cost is not None
    assert (cost.alpha_p, cost.mix_b) == (TRUE.alpha_p, TRUE.mix_b)
    assert cost.beta_d == pytest.approx(TRUE.beta_d, rel=1e-6)


def test_without_mixed_steps_mixing_costs_what_its_parts_cost() -> None:
    fit = CostFit(min_samples=20)
    fit.add(steps("prefill", 200, noise=0.0))
    fit.add(steps("decode", 200, noise=0.0))
    cost = fit.cost()
    assert cost is not None
    parts = TRUE.alpha_d + 300 * TRUE.beta_p + 100 * TRUE.beta_d
    assert cost.step_s(300, 100) == pytest.approx(parts, rel=1e-3)


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
