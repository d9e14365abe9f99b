"""How many sequences fit: the memory plan and the memory-safe batch size. Pure arithmetic.

Source: `exclusive_batching.md` A5. The default form is distribution-free: it uses measured moments
of prompt and output lengths and a bound on the chance of running out, and assumes no output law.
The paper's two forms assume geometric outputs and a threshold; they are kept for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple

from schedulers.lengths import LengthWindow
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
    """

    mean_tokens: float
    std_tokens: float
    skewness: float = 0.0


def resident_moments(lengths: Iterable[Finished], block_size: int) -> ResidentMoments:
    """Moments of L + A under continuous refilling, for any output law (A5, distribution-free form).

    L is the prompt length; A the tokens generated so far by a holder seen at a random instant
    (length-biased): E A^j = E O^(j+1) / ((j+1) E O). Half a block is added for rounding.
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
    return ResidentMoments(mean + block_size / 2, sqrt(variance), skewness)


def _age_moment(pair: tuple[int, int], power: int) -> float:
    """Integral of (L + a)^power over the ages a of [0, O]."""
    prompt, out = pair
    return ((prompt + out) ** (power + 1) - prompt ** (power + 1)) / (power + 1)


def safe_batch_size(
    capacity_tokens: int, moments: ResidentMoments, overflow_probability: float
) -> int:
    """Largest N with N m + z s sqrt(N) + s g (z^2 - 1) / 6 <= C: N holders overflow with at most
    the given probability.

    z is the normal quantile and g the skewness: for sums of holders, Cornish and Fisher's first
    correction of the central limit theorem, which matters while N is small. Never below 1.
    """
    z = NormalDist().inv_cdf(1.0 - overflow_probability)
    mean, slack = moments.mean_tokens, z * moments.std_tokens
    skewed = moments.std_tokens * max(0.0, moments.skewness) * max(0.0, z * z - 1.0) / 6.0
    return _largest(capacity_tokens - skewed, mean, slack)


def _largest(capacity: float, mean: float, slack: float) -> int:
    """Largest whole N, at least 1, with N mean + slack sqrt(N) <= capacity."""
    root = (-slack + sqrt(slack**2 + 4.0 * mean * max(0.0, capacity))) / (2.0 * mean)
    return max(1, int(root**2))


def resident_tokens(theta: float, hazard: float, mean_prompt_tokens: float) -> float:
    """D(theta) = mu_L + (1 - theta) zeta / (theta p0): mean tokens of a holder right after a
    refill, for geometric outputs (A5).
    """
    zeta = -log(1.0 - theta)
    return mean_prompt_tokens + (1.0 - theta) * zeta / (theta * hazard)


def paper_batch_size(
    capacity_tokens: int,
    *,
    theta: float,
    hazard: float,
    mean_prompt_tokens: float,
    overflow_probability: float,
) -> int:
    """N of Prop. 3 as the text has it: floor((C - nu ln(1 / eps)) / D), nu = 1 / (p0^2 mu_L).

    The slack does not grow with N, so that large batches overflow more often than stated.
    """
    slack = log(1.0 / overflow_probability) / (hazard**2 * mean_prompt_tokens)
    mean = resident_tokens(theta, hazard, mean_prompt_tokens)
    return max(1, int((capacity_tokens - slack) / mean))


def paper_sigma_batch_size(
    capacity_tokens: int,
    *,
    theta: float,
    hazard: float,
    mean_prompt_tokens: float,
    overflow_probability: float,
) -> int:
    """N of the form behind the paper's results: N D + sigma sqrt(N ln(1 / eps)) <= C with
    sigma^2 = 2 zeta (1 + (p0 mu_L + zeta / theta)^2) / p0^2.

    It stands and falls with p0: an estimate that is half too low halves the batch.
    """
    zeta = -log(1.0 - theta)
    inner = hazard * mean_prompt_tokens + zeta / theta
    sigma = sqrt(2.0 * zeta * (1.0 + inner**2)) / hazard
    slack = sigma * sqrt(log(1.0 / overflow_probability))
    return _largest(capacity_tokens, resident_tokens(theta, hazard, mean_prompt_tokens), slack)


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


class Geometric(NamedTuple):
    """What the paper's forms assume: geometric outputs, refilled at a threshold."""

    theta: float
    hazard: float
    mean_prompt_tokens: float


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
        self._known: Sizing | None = None
        self._known_for = (-1, -1)

    def size(
        self,
        capacity_tokens: int,
        longest_ends: Iterable[int],
        block_size: int,
        geometric: Callable[[], Geometric],
    ) -> Sizing:
        """Safe N for KV memory of `capacity_tokens`.

        `longest_ends` is consulted before samples exist, `geometric` for the paper's forms.
        """
        if len(self._lengths) < self._min_samples:
            ends = list(longest_ends)
            mean = (sum(ends) / len(ends) if ends else 1.0) + block_size / 2
            holders = max(1, int(capacity_tokens / mean))
            return Sizing("longest", holders, ResidentMoments(mean, 0.0), None, None, 0)
        key = (self._lengths.num_added // self._update_every, capacity_tokens)
        if self._known is None or key != self._known_for:
            self._known_for = key
            self._known = self._compute(capacity_tokens, block_size, geometric())
        return self._known

    def _unbiased(self) -> list[Finished]:
        """The window, with outputs stretched to the mean that their flow says: after a start or a
        shift the short ones are seen first, and would make N too large.
        """
        items = self._lengths.items
        seen = sum(max(1, item.num_output_tokens) for item in items) / len(items)
        stretch = max(1.0, self._lengths.flow_mean_output_tokens / seen)
        return [
            Finished(item.num_prompt_tokens, round(stretch * max(1, item.num_output_tokens)))
            for item in items
        ]

    def _compute(self, capacity_tokens: int, block_size: int, law: Geometric) -> Sizing:
        moments = resident_moments(self._unbiased(), block_size)
        eps = self.overflow_probability
        arguments = {**law._asdict(), "overflow_probability": eps}
        by_form: dict[SizingForm, int] = {
            "moments": safe_batch_size(capacity_tokens, moments, eps),
            "paper": paper_batch_size(capacity_tokens, **arguments),
            "paper_sigma": paper_sigma_batch_size(capacity_tokens, **arguments),
        }
        return Sizing(
            form=self._form,
            holders=by_form[self._form],
            moments=moments,
            paper=by_form["paper"],
            paper_sigma=by_form["paper_sigma"],
            num_samples=len(self._lengths),
        )
