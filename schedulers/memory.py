"""How many sequences fit: the memory plan and the memory-safe batch size. Pure arithmetic.

Source: `exclusive_batching.md` A5. The default form is distribution-free: it uses measured moments
of prompt and output lengths and a bound on the chance of running out, and assumes no output law.
The paper's two forms assume geometric outputs and a threshold; they are kept for comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from schedulers.lengths import LengthWindow, survival
from schedulers.view import Finished


class NotEnoughMemory(ValueError):
    """The memory there is does not hold the model and a smallest batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """Bytes that a model takes, as a backend reports them.

    Attributes:
        weights_bytes: resident weights.
        kv_bytes_per_token: keys and values of one token, all layers.
        activation_bytes_per_token: scratch memory per token of a batch.
        logits_bytes_per_seq: scratch memory per sampled sequence.
        scratch_bytes: scratch memory whatever the batch.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    activation_bytes_per_token: int
    logits_bytes_per_seq: int
    scratch_bytes: int = 0


class MemoryPlan(NamedTuple):
    """Where the memory of one worker goes, in bytes, and what it allows."""

    limit_bytes: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_seqs: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that KV memory holds."""
        return self.num_blocks * self.block_size


def plan_memory(
    footprint: ModelFootprint,
    *,
    limit_bytes: int,
    max_batch_tokens: int,
    max_seqs: int,
    max_model_len: int,
    block_size: int = 16,
) -> MemoryPlan:
    """Divide `limit_bytes` between weights, one batch's activations and KV blocks.

    KV memory takes what is left, but no more than `max_seqs` sequences of `max_model_len` can use.

    Raises:
        NotEnoughMemory: not even one sequence of 2 blocks fits.
    """
    activation_bytes = (
        max_batch_tokens * footprint.activation_bytes_per_token
        + max_seqs * footprint.logits_bytes_per_seq
        + footprint.scratch_bytes
    )
    block_bytes = footprint.kv_bytes_per_token * block_size
    left_bytes = limit_bytes - footprint.weights_bytes - activation_bytes
    useful_blocks = max_seqs * -(-max_model_len // block_size)
    num_blocks = min(left_bytes // block_bytes, useful_blocks)
    if num_blocks < 2:
        raise NotEnoughMemory(
            f"{limit_bytes / 2**30:.2f} GiB is too little: weights take "
            f"{footprint.weights_bytes / 2**30:.2f} GiB, a batch of {max_batch_tokens} tokens "
            f"{activation_bytes / 2**30:.2f} GiB; raise --memory or lower --max-batch-tokens"
        )
    return MemoryPlan(
        limit_bytes=limit_bytes,
        weights_bytes=footprint.weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=num_blocks * block_bytes,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_seqs,
    )


class ResidentMoments(NamedTuple):
    """Moments of the KV positions that a holder has at a random instant.

    Attributes:
        mean_tokens: per holder.
        std_tokens: standard deviation between holders.
        skewness: third standardised moment, dimensionless.
        error_tokens: standard error of the mean, as it is itself an estimate.
    """

    mean_tokens: float
    std_tokens: float
    skewness: float = 0.0
    error_tokens: float = 0.0


def resident_moments(lengths: Iterable[Finished], block_size: int) -> ResidentMoments:
    """Moments of L + A under continuous refilling, for any output law (A5, distribution-free form).

    L is the prompt length; A the tokens generated so far by a holder seen at a random instant
    (length-biased): E A^j = E O^(j+1) / ((j+1) E O). Half a block is added for rounding. The mean
    is a ratio of two sums; its standard error is the delta method's.
    """
    pairs = [(item.num_prompt_tokens, max(1, item.num_output_tokens)) for item in lengths]
    # Holders are seen in proportion to how long they stay: prompts are weighted by output length,
    # and given its row a holder's age is uniform on its output.
    weight = sum(out for _, out in pairs)
    raw = [sum(_age_moment(pair, power) for pair in pairs) / weight for power in (1, 2, 3)]
    mean = raw[0]
    variance = max(0.0, raw[1] - mean**2)
    third = raw[2] - 3 * mean * raw[1] + 2 * mean**3
    skewness = third / variance**1.5 if variance > 1e-9 else 0.0
    off = sum((_age_moment(pair, 1) - mean * pair[1]) ** 2 for pair in pairs)
    return ResidentMoments(mean + block_size / 2, sqrt(variance), skewness, sqrt(off) / weight)


class Running(NamedTuple):
    """A holder: its prompt, what it has generated, the most that it may, and its admission."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    admission: int


def cohort_moments(
    ended: Sequence[Finished], running: Sequence[Running], block_size: int
) -> ResidentMoments:
    """The same of a cohort of which some still run: neither the ended ones alone, of which the
    short are too many while lengths change, nor the running ones, of which the long are.

    Ages by the Kaplan-Meier estimate of output lengths; prompts of those that are resident, and of
    the ended ones by how long they stayed. Both are taken as independent.
    """
    longest = max((item.max_output_tokens for item in running), default=1)
    outputs = [max(1, item.num_output_tokens) for item in ended]
    known = survival(outputs, [item.num_output_tokens for item in running], longest)
    # E A^j = E O^(j + 1) / ((j + 1) E O); the central moments of L and A add up.
    mean_output = known.moment(0)
    age, age2, age3 = (known.moment(power) / mean_output for power in (1, 2, 3))
    prompts = np.array([item.num_prompt_tokens for item in (*ended, *running)], float)
    stays = np.array([*outputs, *(max(1, item.num_output_tokens) for item in running)], float)
    prompt = float(np.average(prompts, weights=stays))
    off = prompts - prompt
    variance = float(np.average(off**2, weights=stays)) + max(0.0, age2 - age**2)
    third = float(np.average(off**3, weights=stays)) + age3 - 3 * age * age2 + 2 * age**3
    # Of E A as a ratio of two sums over the ended ones, whose own moments are E O^j.
    spread = max(0.0, known.moment(3) - 3 * age * known.moment(2) + 2 * age**2 * known.moment(1))
    error = sqrt(spread / known.num_ended) / mean_output
    return ResidentMoments(
        prompt + age + block_size / 2,
        sqrt(variance),
        third / variance**1.5 if variance > 1e-9 else 0.0,
        error,
    )


def _age_moment(pair: tuple[int, int], power: int) -> float:
    """Integral of (L + a)^power over the ages a of [0, O]."""
    prompt, out = pair
    return ((prompt + out) ** (power + 1) - prompt ** (power + 1)) / (power + 1)


def safe_batch_size(
    capacity_tokens: int, moments: ResidentMoments, overflow_probability: float
) -> int:
    """Largest N with N m + z sqrt(N s^2 + N^2 e^2) + s g (z^2 - 1) / 6 <= C: N holders overflow
    with at most the given probability.

    z is the normal quantile, g the skewness and e the standard error of m: for sums of holders,
    Cornish and Fisher's first correction of the central limit theorem, which matters while N is
    small; e matters when N is large, as chance averages out over holders and a wrong mean does not.
    Never below 1.
    """
    z = NormalDist().inv_cdf(1.0 - overflow_probability)
    mean, std, skewness, error = moments
    skewed = std * max(0.0, skewness) * max(0.0, z * z - 1.0) / 6.0

    def needed(holders: int) -> float:
        return holders * mean + z * sqrt(holders * std**2 + (holders * error) ** 2) + skewed

    low, high = 1, max(2, int(capacity_tokens / mean) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= capacity_tokens else (low, middle)
    return low


class Geometric(NamedTuple):
    """What the paper's forms assume: geometric outputs, refilled at a threshold."""

    theta: float
    hazard: float
    mean_prompt_tokens: float


def resident_tokens(law: Geometric) -> float:
    """D(theta) = mu_L + (1 - theta) zeta / (theta p0): mean tokens of a holder right after a refill
    (A5).
    """
    zeta = -log(1.0 - law.theta)
    return law.mean_prompt_tokens + (1.0 - law.theta) * zeta / (law.theta * law.hazard)


def paper_batch_size(capacity_tokens: int, law: Geometric, overflow_probability: float) -> int:
    """N of Prop. 3 as the text has it: floor((C - nu ln(1 / eps)) / D), nu = 1 / (p0^2 mu_L).

    The slack does not grow with N, so that large batches overflow more often than stated.
    """
    slack = log(1.0 / overflow_probability) / (law.hazard**2 * law.mean_prompt_tokens)
    return max(1, int((capacity_tokens - slack) / resident_tokens(law)))


def paper_sigma_batch_size(
    capacity_tokens: int, law: Geometric, overflow_probability: float
) -> int:
    """N of the form behind the paper's results: N D + sigma sqrt(N ln(1 / eps)) <= C with
    sigma^2 = 2 zeta (1 + (p0 mu_L + zeta / theta)^2) / p0^2.

    It stands and falls with p0: an estimate that is half too low halves the batch.
    """
    zeta = -log(1.0 - law.theta)
    inner = law.hazard * law.mean_prompt_tokens + zeta / law.theta
    sigma = sqrt(2.0 * zeta * (1.0 + inner**2)) / law.hazard
    slack = sigma * sqrt(log(1.0 / overflow_probability))
    mean = resident_tokens(law)
    root = (-slack + sqrt(slack**2 + 4.0 * mean * capacity_tokens)) / (2.0 * mean)
    return max(1, int(root**2))


SizingForm = Literal["moments", "paper", "paper_sigma"]


class Sizing(NamedTuple):
    """A memory-safe number of holders, and what it was computed from.

    Attributes:
        form: the form used; "longest" before lengths are known.
        holders: N, at least 1.
        moments: of a holder.
        paper: N of the paper's text form; None before lengths are known.
        paper_sigma: N of the paper's code; None likewise.
        num_samples: lengths behind it.
    """

    form: SizingForm | Literal["longest"]
    holders: int
    moments: ResidentMoments
    paper: int | None
    paper_sigma: int | None
    num_samples: int


PATIENCE = 6
"""Computations of N in a row that must allow an increase: holders can be added at once and not
taken back, so that they would follow the highest of the estimates and not their mean."""


class BatchSizer:
    """Memory-safe number of holders, from a window of finished lengths.

    Until `min_samples` sequences have finished, nothing is known of output lengths: then the
    longest allowed ends of the sequences at hand are taken, which is safe and, with forced lengths,
    exact.

    Args:
        lengths: of finished sequences; filled by somebody else.
        overflow_probability: eps, in (0, 1).
        form: which N counts.
        min_samples: lengths that make a window worth believing.
        update_every: completions between two computations.
    """

    def __init__(
        self,
        lengths: LengthWindow,
        *,
        overflow_probability: float = 0.01,
        form: SizingForm = "moments",
        min_samples: int = 30,
        update_every: int = 25,
    ) -> None:
        if not 0.0 < overflow_probability < 1.0:
            raise ValueError(
                f"overflow_probability is {overflow_probability}; it must be above 0 and below 1"
            )
        self.overflow_probability = overflow_probability
        self._form: SizingForm = form
        self._lengths = lengths
        self._min_samples = min_samples
        self._update_every = update_every
        self._latest: deque[int] = deque(maxlen=PATIENCE)
        self._known: Sizing | None = None
        self._known_for = (-1, -1)

    def size(
        self,
        capacity_tokens: int,
        longest_ends: Iterable[int],
        block_size: int,
        running: Iterable[Running],
        geometric: Callable[[], Geometric],
    ) -> Sizing:
        """Safe N for KV memory of `capacity_tokens`.

        `longest_ends` is consulted before samples exist, `running` when N is computed anew,
        `geometric` for the paper's forms.
        """
        if len(self._lengths) < self._min_samples:
            ends = list(longest_ends)
            mean = (sum(ends) / len(ends) if ends else 1.0) + block_size / 2
            holders = max(1, int(capacity_tokens / mean))
            return Sizing("longest", holders, ResidentMoments(mean, 0.0), None, None, 0)
        key = (self._lengths.num_added // self._update_every, capacity_tokens)
        if self._known is None or key != self._known_for:
            self._known_for = key
            self._known = self._compute(capacity_tokens, block_size, running, geometric())
        return self._known

    def _compute(
        self, capacity_tokens: int, block_size: int, running: Iterable[Running], law: Geometric
    ) -> Sizing:
        first = self._lengths.first_complete
        ended = [item for item in self._lengths.items if item.admission >= first]
        moments = cohort_moments(
            ended or self._lengths.items,
            [item for item in running if item.admission >= first],
            block_size,
        )
        eps = self.overflow_probability
        by_form: dict[SizingForm, int] = {
            "moments": safe_batch_size(capacity_tokens, moments, eps),
            "paper": paper_batch_size(capacity_tokens, law, eps),
            "paper_sigma": paper_sigma_batch_size(capacity_tokens, law, eps),
        }
        self._latest.append(by_form[self._form])
        return Sizing(
            form=self._form,
            holders=min(self._latest),
            moments=moments,
            paper=by_form["paper"],
            paper_sigma=by_form["paper_sigma"],
            num_samples=len(self._lengths),
        )
