"""Closed forms of exclusive batching and of its crossover with mixed batching. Pure arithmetic.

Source: `exclusive_batching.md` A3 and A6; marks there say which forms were derived again. Notation:
N holders, k completions per phase switch, theta = k / N, zeta = -ln(1 - theta), hazard
h(t) = p0 + eta t of ending at the t-th token of a phase, mu_L and mu_O mean prompt and output
lengths.
"""

from __future__ import annotations

from math import ceil, log
from typing import NamedTuple

from schedulers.cost import StepCost

MIN_THETA, MAX_THETA = 0.01, 0.99


def optimal_threshold(hazard: float, switch_cost_ratio: float) -> float:
    """theta_0 of Prop. 1: the share of holders that should finish before a refill.

    Solves theta / (1 - theta) + ln(1 - theta) = p0 alpha_p / alpha_d.

    Args:
        hazard: p0, chance that a sequence ends at its next token, in (0, 1].
        switch_cost_ratio: fixed cost of a switch to prefill in decode steps' fixed costs, at least
            0.

    Returns:
        theta in [0.01, 0.99], by bisection (the left side grows with theta from 0 to infinity).
    """
    target = hazard * switch_cost_ratio
    low, high = MIN_THETA, MAX_THETA
    for _ in range(50):
        theta = (low + high) / 2
        if theta / (1 - theta) + log(1 - theta) < target:
            low = theta
        else:
            high = theta
    return (low + high) / 2


def hazard_correction(
    theta: float, hazard: float, slope: float, holders_cost_ratio: float
) -> float:
    """dtheta of Thm. 2: how an increasing hazard moves the threshold, to first order in its slope.

    Args:
        theta: theta_0.
        hazard: p0.
        slope: eta, at least 0.
        holders_cost_ratio: rho = beta_d N / alpha_d.

    Returns:
        dtheta, between 0 and 5 theta_0 (the first order holds no further).
    """
    zeta = -log(1 - theta)
    inner = zeta * (theta / (1 - theta) - zeta / 2) + holders_cost_ratio * (zeta - theta)
    shift = slope * (1 - theta) ** 2 / (hazard**2 * theta) * inner
    return min(max(0.0, shift), 5 * theta)


def exact_refill_size(
    holders: int, hazard: float, *, alpha_p: float, alpha_d: float, beta_d: float
) -> int:
    """k* for finite N ("direct" rule): stop decoding when the next completion would take longer
    than the average completion of the cycle so far has.

    tau(j) = (alpha_d + beta_d j) / (1 - (1 - p)^j) is the expected time to the next completion
    among j sequences; k* is the smallest k with k tau(N - k) - sum_{j > N - k} tau(j) >= alpha_p.
    O(N).

    Returns:
        k in [1, N].
    """

    def next_completion_s(decoding: int) -> float:
        return (alpha_d + beta_d * decoding) / (1.0 - (1.0 - hazard) ** decoding)

    spent = 0.0
    for k in range(1, holders):
        spent += next_completion_s(holders - k + 1)
        if k * next_completion_s(holders - k) - spent >= alpha_p:
            return k
    return max(1, holders)


class CycleRate(NamedTuple):
    """Completions per second of a cycle, and its parts in seconds."""

    per_s: float
    prefill_s: float
    decode_s: float


def cycle_throughput(
    theta: float, holders: int, hazard: float, mean_prompt_tokens: float, cost: StepCost
) -> CycleRate:
    """TP_EB of A3: requests per second of prefill k, decode until k have finished (constant
    hazard).
    """
    zeta, refill = -log(1 - theta), theta * holders
    prefill_s = cost.alpha_p + cost.beta_p * refill * mean_prompt_tokens
    decode_s = cost.alpha_d * zeta / hazard + cost.beta_d * refill / hazard
    return CycleRate(refill / (prefill_s + decode_s), prefill_s, decode_s)


def switch_cost(cost: StepCost, refill_tokens: float, max_batch_tokens: int) -> float:
    """Fixed seconds of a phase switch: what does not grow with the number of refilled prompts.

    A refill that needs several steps pays alpha_p for each; all but the first grow with the refill
    and belong to its marginal cost. Of the first, half a step is what a partly filled one wastes.
    """
    num_steps = max(1, ceil(refill_tokens / max_batch_tokens))
    fixed = cost.alpha_p if num_steps == 1 else 0.5 * cost.alpha_p
    return cost.alpha_switch + fixed


class Crossover(NamedTuple):
    """Both sides of Prop. 4's inequality, seconds per token, and the N at which they are equal.

    Attributes:
        contention: beta_MB^e(rbar) - beta_EB^w: what mixing costs per token.
        amortisation: what mixing saves per token by never running half-empty steps, ~ 1 / N.
        margin: contention - amortisation; above 0 exclusive batching wins.
        holders: N_cross; None when mixed batching wins at every N.
    """

    contention: float
    amortisation: float
    margin: float
    holders: float | None


def crossover(
    cost: StepCost,
    *,
    holders: float,
    theta: float,
    mean_prompt_tokens: float,
    mean_output_tokens: float,
    switch_s: float | None = None,
) -> Crossover:
    """Compare exclusive and mixed batching at N holders (Prop. 4).

    The cost of the KV positions that decode tokens read is on both sides alike, and cancels.

    Args:
        cost: of steps.
        holders: N, sequences in flight.
        theta: the threshold that exclusive batching would use.
        mean_prompt_tokens: mu_L.
        mean_output_tokens: mu_O.
        switch_s: fixed cost of a phase switch; None: alpha_p + alpha_switch.
    """
    tokens = mean_prompt_tokens + mean_output_tokens
    share = mean_output_tokens / tokens
    zeta = -log(1 - theta)
    exclusive = (cost.beta_p * mean_prompt_tokens + cost.beta_d * mean_output_tokens) / tokens
    contention = cost.mixed_marginal_s(share) - exclusive
    fixed = cost.alpha_p + cost.alpha_switch if switch_s is None else switch_s
    saved = (fixed + cost.alpha_d * zeta * mean_output_tokens) / theta
    paid = cost.alpha_mb * (1 + mean_output_tokens)
    amortisation = (saved - paid) / (holders * tokens)
    at = (saved - paid) / (tokens * contention) if contention > 0 else None
    return Crossover(
        contention=contention,
        amortisation=amortisation,
        margin=contention - amortisation,
        holders=None if at is None else max(0.0, at),
    )
