"""Closed forms of EB, MB and their crossover, against exhaustive search and simulation."""

from __future__ import annotations

from math import lgamma, log

import numpy as np
import pytest

from schedulers.cost import StepCost
from schedulers.crossover import (
    Crossover,
    Lengths,
    crossover,
    crossover_holders,
    cycle_throughput,
    exact_refill_size,
    hazard_correction,
    optimal_threshold,
    proposition_4,
    refill_size,
    step_refill_size,
)
from schedulers.estimate import Estimator, Threshold
from schedulers.policies import make_policy
from schedulers.sim.arrivals import AllAtOnce, SimRequest, geometric_requests
from schedulers.sim.simulator import SimConfig, Simulator
from schedulers.view import Budget

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


@pytest.mark.parametrize("hazard", [1 / 16, 1 / 128, 1 / 1024])
@pytest.mark.parametrize("holders", [8, 64, 400])
@pytest.mark.parametrize("alpha_p", [1.279e-3, 2e-2])
def test_the_refill_size_is_as_good_as_the_best(
    holders: int, hazard: float, alpha_p: float
) -> None:
    """The exact chain of the number that decodes, for a grid of k: none is 0.5 % better."""
    found = refill_size(holders, hazard, switch_s=alpha_p, alpha_d=H200.alpha_d, beta_d=H200.beta_d)
    grid = {max(1, round(holders * share)) for share in np.geomspace(1 / holders, 0.95, 24)}
    rates = expected_rates(sorted(grid | {found}), holders, hazard, alpha_p)
    assert rates[found] >= 0.995 * max(rates.values())


def test_counting_single_completions_breaks_where_many_fall_on_a_step() -> None:
    """Why the published "direct" rule is not used there: with 25 completions a step it waits for
    nearly all, and loses a third.
    """
    direct = exact_refill_size(
        400, 1 / 16, alpha_p=H200.alpha_p, alpha_d=H200.alpha_d, beta_d=H200.beta_d
    )
    found = step_refill_size(400, 1 / 16, H200.alpha_p / H200.alpha_d)
    rates = expected_rates([direct, found], 400, 1 / 16, H200.alpha_p)
    assert rates[direct] < 0.7 * rates[found]


def expected_rates(
    refills: list[int], holders: int, hazard: float, alpha_p: float
) -> dict[int, float]:
    """Requests per second for each k, but for what each costs by itself: the number that decodes is
    a Markov chain with binomial losses, solved from below.
    """
    factorial = np.array([lgamma(count + 1) for count in range(holders + 1)])
    after = np.zeros((holders + 1, holders + 1))
    for n in range(holders + 1):
        ended = np.arange(n + 1)
        ways = factorial[n] - factorial[ended] - factorial[n - ended]
        after[n, n - ended] = np.exp(ways + ended * log(hazard) + (n - ended) * np.log1p(-hazard))
    rates = {}
    for k in refills:
        low = holders - k
        spent_s, left = np.zeros(holders + 1), np.arange(holders + 1.0)
        for n in range(low + 1, holders + 1):
            moves = 1 - after[n, n]
            step_s = H200.alpha_d + H200.beta_d * n
            spent_s[n] = (step_s + after[n, :n] @ spent_s[:n]) / moves
            left[n] = after[n, :n] @ left[:n] / moves
        rates[k] = (holders - left[holders]) / (alpha_p + spent_s[holders])
    return rates


RTX = StepCost(
    alpha_p=4.691e-3, beta_p=5.008e-5, alpha_d=1.0376e-2, beta_d=1.0388e-4,
    alpha_mb=1.0376e-2, mix_a=6.293e-5, mix_b=1.969e-4, mix_c=9.90e-6,
)  # fmt: skip
CPU = StepCost(
    alpha_p=1e-2, beta_p=4.5e-4, alpha_d=1.3e-2, beta_d=5.5e-4,
    alpha_mb=1.4e-2, mix_a=4.4e-4, mix_b=1.5e-4, gamma=3e-7,
)  # fmt: skip
COSTS = {"h200": (H200, 8192), "rtx": (RTX, 8192), "cpu": (CPU, 512)}


class FixedRefill(Estimator):
    """Knows nothing, and refills after k completions."""

    def __init__(self, refill: int) -> None:
        super().__init__()
        self._refill = refill

    def threshold(self, holders: int, max_batch_tokens: int) -> Threshold:
        return Threshold(0.0, 0.0, min(self._refill, holders), holders, 0.0)


def simulated_request_s(
    policy: str,
    cost: StepCost,
    requests: list[SimRequest],
    *,
    holders: int,
    refill: int,
    batch: int,
) -> float:
    """Seconds per request in the steady state of a saturated engine: the real policy, blocks and
    loop.
    """
    simulator = Simulator(
        make_policy(policy, FixedRefill(refill)),
        SimConfig(
            num_blocks=10**6,
            budget=Budget(max_batch_tokens=batch, max_seqs=holders),
            window=2 * holders,
        ),
        cost,
    )
    ends = simulator.run(AllAtOnce(requests)).finished_s
    first, last = len(ends) // 5, len(ends) - 2 * holders
    return (ends[last] - ends[first]) / (last - first)


@pytest.mark.parametrize("hardware", COSTS)
@pytest.mark.parametrize("holders", [8, 96])
@pytest.mark.parametrize(("prompt", "output"), [(64, 128), (256, 32)])
def test_the_costs_of_a_request_are_those_of_the_simulated_engine(
    hardware: str, holders: int, prompt: int, output: int
) -> None:
    """Both kinds of batching within 2 %, so the sign of their difference where it matters."""
    cost, batch = COSTS[hardware]
    rng = np.random.default_rng(3)
    requests = geometric_requests(
        2400, mean_prompt_tokens=prompt, mean_output_tokens=output, rng=rng, longest_factor=1e3
    )
    outputs = np.array([item.num_output_tokens for item in requests], float)
    prompts = np.array([item.num_prompt_tokens for item in requests], float)
    lengths = Lengths(
        prompts.mean(), outputs.mean(), prompts.mean() + (outputs**2).mean() / outputs.mean() / 2
    )
    hazard = 1 / outputs.mean()
    refill = refill_size(
        holders, hazard, switch_s=cost.alpha_p, alpha_d=cost.alpha_d, beta_d=cost.beta_d
    )
    found = crossover(cost, lengths, holders=holders, refill=refill, max_batch_tokens=batch)
    sizes = {"holders": holders, "refill": refill, "batch": batch}
    exclusive_s = simulated_request_s("exclusive", cost, requests, **sizes)
    mixed_s = simulated_request_s("mixed", cost, requests, **sizes)
    assert found.exclusive.total_s == pytest.approx(exclusive_s, rel=0.02)
    assert found.mixed.total_s == pytest.approx(mixed_s, rel=0.02)
    assert found.margin == pytest.approx(
        (found.mixed.total_s - found.exclusive.total_s) / lengths.tokens, rel=1e-9, abs=1e-12
    )
    if abs(mixed_s / exclusive_s - 1) > 0.02:
        assert (found.margin > 0) == (mixed_s > exclusive_s)


@pytest.mark.parametrize("hardware", ["h200", "rtx", "cpu"])
@pytest.mark.parametrize(("prompt", "output"), [(128, 1024), (512, 512), (1024, 128)])
def test_the_crossover_is_the_first_number_of_holders_at_which_exclusive_wins(
    hardware: str, prompt: int, output: int
) -> None:
    """Exhaustive search over N: the sign changes there, and beyond it mixed batching wins by no
    more than what whole numbers of k are worth, half a per cent.
    """
    cost, batch = COSTS[hardware]
    lengths = Lengths(prompt, output, prompt + output)

    def at(holders: int) -> Crossover:
        refill = refill_size(
            holders, 1 / output, switch_s=cost.alpha_p, alpha_d=cost.alpha_d, beta_d=cost.beta_d
        )
        return crossover(cost, lengths, holders=holders, refill=refill, max_batch_tokens=batch)

    found = crossover_holders(lambda holders: at(holders).margin, most=512)
    if at(512).margin <= 0:
        assert found is None
        return
    assert found is not None
    assert at(found).margin > 0
    assert found == 1 or at(found - 1).margin <= 0
    assert all(at(n).gain < 0.005 for n in range(found, 513) if at(n).margin <= 0)
    assert all(at(n).gain < 0.005 for n in range(3, found) if at(n).margin > 0)


@pytest.mark.parametrize(("prompt", "output"), [(128, 1024), (512, 512), (1024, 128)])
def test_proposition_4_is_where_its_two_costs_per_request_are_equal(
    prompt: float, output: float
) -> None:
    """Costs per request of both kinds as published, written out."""
    theta = 0.3
    zeta = -log(1 - theta)
    tokens = prompt + output
    lengths = Lengths(prompt, output, tokens)

    def exclusive_s(holders: float) -> float:
        own = H200.beta_p * prompt + H200.beta_d * output
        return own + (H200.alpha_p + H200.alpha_d * zeta * output) / (theta * holders)

    def mixed_s(holders: float) -> float:
        own = H200.mixed_marginal_s(output / tokens) * tokens
        return own + H200.alpha_mb * (1 + output) / holders

    cross = proposition_4(H200, lengths, holders=100, theta=theta).holders
    assert cross is not None
    for holders in (0.5 * cross, 0.98 * cross, 1.02 * cross, 3 * cross):
        at = proposition_4(H200, lengths, holders=holders, theta=theta)
        gain = (mixed_s(holders) - exclusive_s(holders)) / tokens
        assert at.margin == pytest.approx(gain, rel=1e-6, abs=1e-12)
        assert (at.margin > 0) == (holders > cross)


def test_the_sound_form_becomes_proposition_4_for_many_arrivals_and_small_refills() -> None:
    """Its limit: a hundred arrivals a step, theta small, no budget in the way."""
    lengths = Lengths(100, 50, 150)
    holders, refill = 5000, 250
    theta = refill / holders
    sound = crossover(H200, lengths, holders=holders, refill=refill, max_batch_tokens=10**9)
    published = proposition_4(H200, lengths, holders=holders, theta=theta)
    assert sound.contention == pytest.approx(published.contention, rel=0.06)


def test_without_contention_mixed_batching_wins_at_every_size() -> None:
    cheap = StepCost(
        alpha_p=1e-3, beta_p=2e-5, alpha_d=1e-3, beta_d=5e-5, alpha_mb=1e-3, mix_a=1e-5
    )
    lengths = Lengths(500, 500, 1000)
    found = crossover(cheap, lengths, holders=500, refill=20, max_batch_tokens=8192)
    assert found.margin < 0
    assert proposition_4(cheap, lengths, holders=500, theta=0.3).holders is None
