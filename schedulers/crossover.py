"""Closed forms of exclusive batching and of its crossover with mixed batching. Pure arithmetic.

Source: `exclusive_batching.md` A3 and A6; marks there say which forms were derived again. Notation:
N holders, k completions per phase switch, theta = k / N, zeta = -ln(1 - theta), hazard
h(t) = p0 + eta t of ending at the t-th token of a phase, mu_L and mu_O mean prompt and output
lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, exp, lgamma, log, log1p, sqrt
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


def step_refill_size(holders: int, hazard: float, fixed_steps: float) -> int:
    """k for many completions a step (the midpoint rule of A3's "cfr" mode): the best whole number
    of decode steps m, and the k that is reached between the last two of them.

    The rule that counts single completions breaks here: it takes each for a step of its own.

    Args:
        holders: N.
        hazard: p.
        fixed_steps: fixed cost of a phase switch, in fixed costs of a decode step.

    Returns:
        k in [1, N].
    """
    alive, best, best_m = 1.0, float("inf"), 1
    for m in range(1, 64 + int(8.0 / hazard)):
        alive *= 1.0 - hazard
        per_completion = (fixed_steps + m) / max(1e-12, 1.0 - alive)
        if per_completion > best:
            break
        best, best_m = per_completion, m
    ended = [1.0 - (1.0 - hazard) ** m for m in (best_m - 1, best_m)]
    return min(holders, max(1, round(holders * sum(ended) / 2)))


def refill_size(
    holders: int, hazard: float, *, switch_s: float, alpha_d: float, beta_d: float
) -> int:
    """k*: by single completions while less than one falls on a step, else by whole steps."""
    if holders * hazard < 1.0:
        return exact_refill_size(holders, hazard, alpha_p=switch_s, alpha_d=alpha_d, beta_d=beta_d)
    return step_refill_size(holders, hazard, switch_s / max(alpha_d, 1e-12))


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


class Lengths(NamedTuple):
    """Mean lengths of a workload, and the decode tokens that follow from them.

    The first output token comes with the last chunk of its prompt, so a request decodes one token
    less than it generates.

    Attributes:
        context_tokens: positions that a decode token reads on average: the prompt, and half the
            output as a decode token sees it, E O^2 / 2 E O.
    """

    mean_prompt_tokens: float
    mean_output_tokens: float
    context_tokens: float

    @property
    def decode_tokens(self) -> float:
        return max(0.0, self.mean_output_tokens - 1.0)

    @property
    def tokens(self) -> float:
        """Tokens computed for a request."""
        return self.mean_prompt_tokens + self.decode_tokens


class RequestCost(NamedTuple):
    """Seconds of a request, steps shared out between those that run together.

    Attributes:
        fixed_s: its share of what steps and phase switches cost whatever their size.
        marginal_s: what its own tokens cost.
    """

    fixed_s: float
    marginal_s: float

    @property
    def total_s(self) -> float:
        return self.fixed_s + self.marginal_s


def exclusive_request_cost(
    cost: StepCost, lengths: Lengths, *, holders: int, refill: int, max_batch_tokens: int
) -> RequestCost:
    """Exclusive batching with N holders, refilled after k completions.

    A cycle is ceil(k mu_L / B) prefill steps and the decode steps until k have finished; slots have
    all ages, so each ends with probability 1 / mu_O a step, whatever the law of outputs.
    """
    hazard = 1.0 / max(1.0 + 1e-9, lengths.mean_output_tokens)
    rate = -log1p(-hazard)
    # Completions come at rate n p, so k of N take H_N - H_(N-k) over p; then the step is finished.
    steps = max(1.0, (_harmonic(holders) - _harmonic(holders - refill)) / rate + 0.5)
    # The step that reaches k may end more: N - (k - 1) / 2 decode on average until then.
    ended = min(float(holders), (holders - (refill - 1) / 2) * hazard * steps)
    # Some end with their first token, in the prefill step, and leave room for another.
    ended /= max(1.0 - hazard, 1.0 / (1.0 + ended))
    prefills = ceil(refill * lengths.mean_prompt_tokens / max_batch_tokens)
    prefills += 1.0 - (1.0 - hazard) ** refill
    fixed_s = (prefills * cost.alpha_p + cost.alpha_switch + steps * cost.alpha_d) / ended
    decode_s = cost.decode_marginal_s(lengths.context_tokens)
    marginal_s = cost.beta_p * lengths.mean_prompt_tokens + decode_s * lengths.decode_tokens
    return RequestCost(fixed_s, marginal_s)


def _harmonic(count: int) -> float:
    """1 + 1/2 + ... + 1 / count, to six places."""
    at = count + 0.5
    return log(at) + 0.5772156649 + 1 / (24 * at * at) if count else 0.0


def mixed_request_cost(
    cost: StepCost, lengths: Lengths, *, holders: int, max_batch_tokens: int
) -> RequestCost:
    """Mixed batching with N holders, refilled as soon as one ends.

    With a = N / mu_O requests a step, the number that a step takes in is near Poisson: a step
    without any is a decode step, and at small N most are, which the mean mix of Prop. 4 leaves
    out. Where a step of the mean mix is larger than B tokens, steps are full, and a request takes
    its tokens' share of them.
    """
    rate = min(float(holders), holders / max(1.0, lengths.mean_output_tokens))
    step_tokens = rate * lengths.mean_prompt_tokens + holders - rate
    context_s = cost.gamma * lengths.context_tokens
    if step_tokens >= max_batch_tokens:
        share = lengths.decode_tokens / lengths.tokens
        fixed_s = cost.alpha_mb * lengths.tokens / max_batch_tokens
        marginal_s = cost.mixed_marginal_s(share) * lengths.tokens
        return RequestCost(fixed_s, marginal_s + context_s * lengths.decode_tokens)
    fixed_s = marginal_s = 0.0
    for arrivals, chance in _poisson(rate):
        decode = max(0.0, holders - arrivals)
        if not arrivals:
            fixed_s += chance * cost.alpha_d
            marginal_s += chance * (cost.beta_d + context_s) * decode
            continue
        tokens = arrivals * lengths.mean_prompt_tokens + decode
        if not decode:
            fixed_s += chance * cost.alpha_p
            marginal_s += chance * cost.beta_p * tokens
            continue
        fixed_s += chance * cost.alpha_mb * max(1.0, tokens / max_batch_tokens)
        marginal_s += chance * (cost.mixed_marginal_s(decode / tokens) * tokens)
        marginal_s += chance * context_s * decode
    return RequestCost(fixed_s / rate, marginal_s / rate)


def _poisson(rate: float) -> Iterator[tuple[int, float]]:
    """Counts and their probabilities, without the far tails; they sum to 1."""
    low = max(0, int(rate - 6 * sqrt(rate) - 1))
    high = int(rate + 6 * sqrt(rate) + 6)
    chances = [exp(count * log(rate) - rate - lgamma(count + 1)) for count in range(low, high)]
    total = sum(chances)
    yield from ((low + index, chance / total) for index, chance in enumerate(chances))


class Crossover(NamedTuple):
    """Both sides of Prop. 4's inequality, seconds per token.

    Attributes:
        contention: what mixing costs: marginal cost of mixed less that of exclusive batching.
        amortisation: what mixing saves: fixed cost of exclusive less that of mixed batching.
        exclusive: costs of a request.
        mixed: likewise.
    """

    contention: float
    amortisation: float
    exclusive: RequestCost
    mixed: RequestCost

    @property
    def margin(self) -> float:
        """Above 0 exclusive batching wins."""
        return self.contention - self.amortisation

    @property
    def gain(self) -> float:
        """What the cheaper of the two saves, as a share of the dearer one's cost."""
        low, high = sorted((self.exclusive.total_s, self.mixed.total_s))
        return (high - low) / high if high > 0 else 0.0


def crossover(
    cost: StepCost, lengths: Lengths, *, holders: int, refill: int, max_batch_tokens: int
) -> Crossover:
    """Compare exclusive and mixed batching at N holders.

    Prop. 4 is the limit of this for many arrivals a step and small refills: there the mean mix
    describes every step. At small N, and where the token budget binds, it does not, so costs are
    taken over the steps that really occur.
    """
    exclusive = exclusive_request_cost(
        cost, lengths, holders=holders, refill=refill, max_batch_tokens=max_batch_tokens
    )
    mixed = mixed_request_cost(cost, lengths, holders=holders, max_batch_tokens=max_batch_tokens)
    return Crossover(
        contention=(mixed.marginal_s - exclusive.marginal_s) / lengths.tokens,
        amortisation=(exclusive.fixed_s - mixed.fixed_s) / lengths.tokens,
        exclusive=exclusive,
        mixed=mixed,
    )


def crossover_holders(margin_at: Callable[[int], float], *, most: int) -> int | None:
    """N_cross: the smallest N in [1, most] from which on exclusive batching wins, by bisection.

    None when it does not win at `most`. The margin grows with N in all but exotic cases: what is
    saved falls with 1 / N.
    """
    if most < 1 or margin_at(most) <= 0:
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if margin_at(middle) > 0:
            high = middle
        else:
            low = middle
    return high


class Proposition(NamedTuple):
    """Prop. 4 as published: both sides in seconds per token, and N_cross.

    Attributes:
        holders: None when mixed batching wins at every N.
    """

    contention: float
    amortisation: float
    holders: float | None

    @property
    def margin(self) -> float:
        return self.contention - self.amortisation


def proposition_4(cost: StepCost, lengths: Lengths, *, holders: float, theta: float) -> Proposition:
    """The closed form of Prop. 4, with a fixed cost of mixed steps of its own (A6). For
    comparison: decisions are made by `crossover`.
    """
    prompt, output = lengths.mean_prompt_tokens, lengths.mean_output_tokens
    tokens = prompt + output
    zeta = -log(1 - theta)
    exclusive = (cost.beta_p * prompt + cost.beta_d * output) / tokens
    contention = cost.mixed_marginal_s(output / tokens) - exclusive
    saved = (cost.alpha_p + cost.alpha_switch + cost.alpha_d * zeta * output) / theta
    paid = cost.alpha_mb * (1 + output)
    at = (saved - paid) / (tokens * contention) if contention > 0 else None
    return Proposition(
        contention=contention,
        amortisation=(saved - paid) / (holders * tokens),
        holders=None if at is None else max(0.0, at),
    )
