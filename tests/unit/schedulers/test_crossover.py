"""Closed forms of EB, MB and their crossover, against exhaustive search and simulation."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from schedulers.cost import StepCost
from schedulers.crossover import (
    crossover,
    cycle_throughput,
    exact_refill_size,
    hazard_correction,
    optimal_threshold,
)

H200 = StepCost(
    alpha_p=1.279e-3, beta_p=2.485e-5, alpha_d=8.921e-3, beta_d=4.586e-5,
    alpha_mb=8.921e-3, mix_a=2.494e-5, mix_b=5.193e-5, mix_c=1.478e-5,
)  # fmt: skip
HAZARDS = [1 / 16, 1 / 128, 1 / 1024]
RATIOS = [0.25, 1.0, 3.0]


def simulate_cycles(
    theta: float, holders: int, hazard: float, mean_prompt: float, cost: StepCost, *, seed: int
) -> float:
    """Requests per second of EB with a full queue, step by step, every sequence a coin a step."""
    rng = np.random.default_rng(seed)
    refill = max(1, round(theta * holders))
    time_s, finished = 0.0, 0
    for _ in range(400):
        decoding = holders
        while holders - decoding < refill:
            time_s += cost.step_s(0, decoding)
            decoding -= rng.binomial(decoding, hazard)
        done = holders - decoding
        finished += done
        time_s += cost.alpha_p + cost.beta_p * done * mean_prompt
    return finished / time_s


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_threshold_maximises_the_throughput_of_a_cycle(hazard: float, ratio: float) -> None:
    """theta_0 by exhaustive search over the cost per completion that depends on theta."""
    grid = np.arange(0.01, 0.99, 1e-4)
    best = grid[np.argmin((ratio - np.log(1 - grid) / hazard) / grid)]
    assert optimal_threshold(hazard, ratio) == pytest.approx(best, abs=2e-3)


@pytest.mark.parametrize("hazard", HAZARDS)
def test_the_small_threshold_form(hazard: float) -> None:
    """s (1 - 2 s / 3) with s = sqrt(2 p0 alpha_p / alpha_d), as derived in the paper notes."""
    s = (2 * hazard * 0.2) ** 0.5
    assert optimal_threshold(hazard, 0.2) == pytest.approx(s * (1 - 2 * s / 3), rel=0.01)


@pytest.mark.parametrize("theta", [0.05, 0.2, 0.5, 0.7])
@pytest.mark.parametrize("hazard", [1 / 32, 1 / 128])
def test_the_throughput_of_a_cycle_is_that_of_a_simulated_one(theta: float, hazard: float) -> None:
    formula = cycle_throughput(theta, 400, hazard, 256, H200).per_s
    simulated = simulate_cycles(theta, 400, hazard, 256, H200, seed=1)
    assert formula == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize("holders", [8, 64, 400])
def test_the_exact_refill_size_is_the_best_of_all(hazard: float, holders: int) -> None:
    """Brute force: expected seconds per completion of every k, by its definition."""

    def next_s(decoding: int) -> float:
        return (H200.alpha_d + H200.beta_d * decoding) / (1 - (1 - hazard) ** decoding)

    per_completion = [
        (H200.alpha_p + sum(next_s(j) for j in range(holders - k + 1, holders + 1))) / k
        for k in range(1, holders + 1)
    ]
    best = int(np.argmin(per_completion))
    found = exact_refill_size(
        holders, hazard, alpha_p=H200.alpha_p, alpha_d=H200.alpha_d, beta_d=H200.beta_d
    )
    assert per_completion[found - 1] <= per_completion[best] * (1 + 1e-9)


@pytest.mark.parametrize("theta", [0.1, 0.3])
@pytest.mark.parametrize("slope_share", [0.02, 0.05])
def test_the_hazard_correction_moves_towards_the_true_optimum(
    theta: float, slope_share: float
) -> None:
    """An increasing hazard h(t) = p0 + eta t, integrated numerically, has its optimum near
    theta_0 + dtheta: nearer than theta_0 is.
    """
    hazard, rho = 1 / 64, 0.4
    ratio = (theta / (1 - theta) + log(1 - theta)) / hazard
    slope = slope_share * hazard**2
    times = np.arange(0, 3000, 0.05)
    alive = np.exp(-(hazard * times + slope * times**2 / 2))
    token_s = np.concatenate([[0.0], np.cumsum(alive[:-1] * 0.05)])
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = (ratio + times + rho * token_s) / (1 - alive)
    best = 1 - alive[np.nanargmin(np.where(alive < 0.99, cost, np.inf))]
    corrected = theta + hazard_correction(theta, hazard, slope, rho)
    assert abs(corrected - best) < 0.35 * abs(theta - best)


@pytest.mark.parametrize(("mean_prompt", "mean_output"), [(128, 1024), (512, 512), (1024, 128)])
def test_the_crossover_is_where_the_two_costs_per_request_are_equal(
    mean_prompt: float, mean_output: float
) -> None:
    """Costs per request of both kinds, written out; their difference changes sign at N_cross."""
    theta = 0.3
    zeta = -log(1 - theta)
    tokens = mean_prompt + mean_output
    share = mean_output / tokens

    def exclusive_s(holders: float) -> float:
        own = H200.beta_p * mean_prompt + H200.beta_d * mean_output
        return own + (H200.alpha_p + H200.alpha_d * zeta * mean_output) / (theta * holders)

    def mixed_s(holders: float) -> float:
        own = H200.mixed_marginal_s(share) * tokens
        return own + H200.alpha_mb * (1 + mean_output) / holders

    def at(holders: float):
        return crossover(
            H200, holders=holders, theta=theta,
            mean_prompt_tokens=mean_prompt, mean_output_tokens=mean_output,
        )  # fmt: skip

    cross = at(100).holders
    assert cross is not None
    for holders in (0.5 * cross, 0.98 * cross, 1.02 * cross, 3 * cross):
        gain = (mixed_s(holders) - exclusive_s(holders)) / tokens
        assert at(holders).margin == pytest.approx(gain, rel=1e-6, abs=1e-12)
        assert (at(holders).margin > 0) == (holders > cross)


def test_without_contention_mixed_batching_wins_at_every_size() -> None:
    cheap = StepCost(
        alpha_p=1e-3, beta_p=2e-5, alpha_d=1e-3, beta_d=5e-5, alpha_mb=1e-3, mix_a=1e-5
    )
    found = crossover(cheap, holders=500, theta=0.3, mean_prompt_tokens=500, mean_output_tokens=500)
    assert found.holders is None
    assert found.margin < 0
