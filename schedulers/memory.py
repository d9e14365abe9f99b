"""How many sequences fit: the memory plan and the memory-safe batch size. Pure arithmetic.

Source: `exclusive_batching.md` A5. The form here is distribution-free: it uses measured moments of
prompt and output lengths and a bound on the chance of running out, and assumes no output law.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

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
    """Mean and standard deviation of the KV positions a holder has at a random instant."""

    mean_tokens: float
    std_tokens: float


def resident_moments(lengths: Iterable[Finished], block_size: int) -> ResidentMoments:
    """Moments of L + A under continuous refilling, for any output law (A5, distribution-free form).

    L is the prompt length; A the tokens generated so far by a holder seen at a random instant
    (length-biased): E A = E O^2 / 2 E O, E A^2 = E O^3 / 3 E O. Half a block is added for rounding.
    """
    pairs = [(item.num_prompt_tokens, max(1, item.num_output_tokens)) for item in lengths]
    num = len(pairs)
    # Holders are seen in proportion to how long they stay, so prompts are weighted by output
    # length.
    weight = sum(out for _, out in pairs)
    mean_prompt = sum(prompt * out for prompt, out in pairs) / weight
    var_prompt = sum((prompt - mean_prompt) ** 2 * out for prompt, out in pairs) / weight
    first, second, third = (sum(out**power for _, out in pairs) / num for power in (1, 2, 3))
    mean_age = second / (2 * first)
    var_age = max(0.0, third / (3 * first) - mean_age**2)
    return ResidentMoments(mean_prompt + mean_age + block_size / 2, sqrt(var_prompt + var_age))


def safe_batch_size(
    capacity_tokens: int, moments: ResidentMoments, overflow_probability: float
) -> int:
    """Largest N with N m + z s sqrt(N) <= C: N holders overflow with at most the given probability.

    z is the normal quantile; for the sums of many holders that this is used for, the central limit
    theorem applies. Never below 1.
    """
    z = NormalDist().inv_cdf(1.0 - overflow_probability)
    mean, slack = moments.mean_tokens, z * moments.std_tokens
    root = (-slack + sqrt(slack**2 + 4.0 * mean * capacity_tokens)) / (2.0 * mean)
    return max(1, int(root**2))


class BatchSizer:
    """Memory-safe number of holders, from a sliding window of finished lengths.

    Until `min_samples` sequences have finished, nothing is known of output lengths: then the
    longest allowed ends of the sequences at hand are taken, which is safe and, with forced lengths,
    exact.
    """

    def __init__(
        self,
        *,
        overflow_probability: float = 0.01,
        window: int = 500,
        min_samples: int = 30,
        update_every: int = 25,
    ) -> None:
        self.overflow_probability = overflow_probability
        self._lengths: deque[Finished] = deque(maxlen=window)
        self._min_samples = min_samples
        self._update_every = update_every
        self._num_new = 0
        self._moments: ResidentMoments | None = None

    def add(self, finished: Iterable[Finished]) -> None:
        """Take in the lengths of sequences that ended."""
        for item in finished:
            self._lengths.append(item)
            self._num_new += 1

    def max_holders(
        self, capacity_tokens: int, longest_ends: Iterable[int], block_size: int
    ) -> int:
        """Safe N for KV memory of `capacity_tokens`; `longest_ends` is consulted before samples
        exist.
        """
        if len(self._lengths) < self._min_samples:
            ends = list(longest_ends)
            mean = sum(ends) / len(ends) if ends else 1.0
            return max(1, int(capacity_tokens / (mean + block_size / 2)))
        if self._moments is None or self._num_new >= self._update_every:
            self._moments = resident_moments(self._lengths, block_size)
            self._num_new = 0
        return safe_batch_size(capacity_tokens, self._moments, self.overflow_probability)
