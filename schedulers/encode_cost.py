"""What encoding costs: a fixed part per call, and one that grows with the texts. Pure arithmetic.

Source: `surge.md` 3.2. P partitions with N texts in K encode calls take

    T(K) = K c + P f + N t

c: seconds of a call whatever is in it, t: seconds of a text, f: seconds that each partition takes
by itself (its file), where they are not hidden behind encoding. Gathering partitions saves calls,
K c, and nothing of the rest. The paper has no f, and counts what a file takes in c; then predicted
speed-ups are too large where much of c stays.

    phi   = P c / (P c + P f + N t)    share of the calls where each partition has its own
    alpha = c / (n_bar t + f)          phi = alpha / (1 + alpha)
    T(P) / T(K) = 1 / (1 - phi (1 - K / P))
    n*    = c / t                      texts that take as long as their call
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import NamedTuple

import numpy as np

from schedulers.cost import non_negative_fit
from schedulers.sizes import SizeStats


@dataclass(frozen=True, slots=True)
class EncodeCost:
    """Of one encoder on one device, for texts of one mean length.

    Attributes:
        call_s: c, seconds per encode call.
        text_s: t, seconds per text.
        partition_s: f, seconds per partition that no batching saves and no queue hides.
        mean_tokens: of a text, to which `text_s` belongs.

    Raises:
        ValueError: one is negative or not finite, or `mean_tokens` is not above 0.
    """

    call_s: float
    text_s: float
    partition_s: float = 0.0
    mean_tokens: float = 1.0

    def __post_init__(self) -> None:
        values = (self.call_s, self.text_s, self.partition_s, self.mean_tokens)
        if not all(isfinite(value) and value >= 0 for value in values) or not self.mean_tokens:
            raise ValueError(f"{self} is no cost; seconds are at least 0, and texts have tokens")

    @classmethod
    def of_tokens(
        cls, *, call_s: float, token_s: float, mean_tokens: float, partition_s: float = 0.0
    ) -> EncodeCost:
        """From seconds per token."""
        return cls(call_s, token_s * mean_tokens, partition_s, mean_tokens)

    @property
    def token_s(self) -> float:
        """Seconds per token."""
        return self.text_s / self.mean_tokens

    def at_length(self, mean_tokens: float) -> EncodeCost:
        """The same for texts of another mean length."""
        return EncodeCost(self.call_s, self.token_s * mean_tokens, self.partition_s, mean_tokens)

    def call_of(self, num_texts: float, num_tokens: float | None = None) -> float:
        """Predicted seconds of one encode call, without its partitions' own.

        Args:
            num_texts: of the call.
            num_tokens: of the texts; without it they have the mean length.
        """
        if num_tokens is None:
            return self.call_s + num_texts * self.text_s
        return self.call_s + num_tokens * self.token_s


def break_even(cost: EncodeCost) -> float:
    """n* = c / t: texts that take as long as the call that they share; infinite where texts cost
    nothing.
    """
    if not cost.call_s:
        return 0.0
    return cost.call_s / cost.text_s if cost.text_s else inf


def alpha(cost: EncodeCost, stats: SizeStats) -> float:
    """Seconds of a call in those of a mean partition's texts and file."""
    if not cost.call_s:
        return 0.0
    own_s = stats.mean * cost.text_s + cost.partition_s
    return cost.call_s / own_s if own_s else inf


def phi(cost: EncodeCost, stats: SizeStats) -> float:
    """Share of the fixed cost of calls in all time, where each partition has a call of its own."""
    ratio = alpha(cost, stats)
    return ratio / (1 + ratio) if isfinite(ratio) else 1.0


def predicted_s(
    cost: EncodeCost, num_texts: int, num_calls: float, *, num_partitions: int = 0
) -> float:
    """T(K) = K c + P f + N t, seconds."""
    return num_calls * cost.call_s + num_partitions * cost.partition_s + num_texts * cost.text_s


def saved_share(cost: EncodeCost, stats: SizeStats, num_calls: float) -> float:
    """phi (1 - K / P): the share of the time of per-partition encoding that fewer calls save;
    negative for more of them.
    """
    if not stats.count:
        return 0.0
    return phi(cost, stats) * (1 - num_calls / stats.count)


def speed_up(cost: EncodeCost, stats: SizeStats, num_calls: float) -> float:
    """T(P) / T(K): against one call for each partition; infinite where nothing is left to do."""
    left = 1 - saved_share(cost, stats, num_calls)
    return 1 / left if left > 0 else inf


# -- fitting --


class EncodeSample(NamedTuple):
    """A measured encode call."""

    num_texts: int
    num_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeFit:
    """A cost model of measured calls, and what is known of it.

    Attributes:
        call_s: c, seconds per call.
        token_s: seconds per token.
        mean_tokens: of the measured texts.
        call_error_s: standard error of c; NaN where it was not fitted.
        error: median distance of a measured call from the fit, as a share of it.
        num_samples: calls that were fitted to.
        num_outliers: calls that were left out: something else held the machine.
        is_identified: the calls differ enough to tell c from t. Else c is that of an earlier cost,
            or 0, so that no gain is claimed that was not measured.
        note: why not; empty if it is.
    """

    call_s: float
    token_s: float
    mean_tokens: float
    call_error_s: float
    error: float
    num_samples: int
    num_outliers: int
    is_identified: bool
    note: str = ""

    @property
    def cost(self) -> EncodeCost:
        """For texts as long as the measured ones, without files."""
        return EncodeCost.of_tokens(
            call_s=self.call_s, token_s=self.token_s, mean_tokens=self.mean_tokens
        )


MIN_SAMPLES = 4
"""Calls that tell a line and how far they are from it."""
MIN_SPREAD = 3.0
"""Largest over smallest call, in tokens, that tells fixed from marginal cost."""
MAX_CALL_ERROR = 0.5
"""Most standard error of c, in c, where it is not small beside the smallest call."""
MAX_ERROR = 0.3
"""Most `EncodeFit.error` of calls that follow the model."""
SMALL_CALL_ERROR = 0.05
"""A standard error of c that does not matter, in the smallest call."""
NOISE_FLOOR = 0.1
"""Relative distance from the fit that is no outlier, however well the others lie on it."""


def fit_cost(samples: Iterable[EncodeSample]) -> EncodeCost | None:
    """The cost at the samples' mean length; None where they do not tell c from t."""
    fit = fit_encode(samples)
    return fit.cost if fit is not None and fit.is_identified else None


def fit_encode(
    samples: Iterable[EncodeSample], *, earlier: EncodeCost | None = None
) -> EncodeFit | None:
    """c and the seconds of a token, from measured calls; None without any.

    Non-negative least squares of relative distances, as noise grows with the call. The first are
    relative to the measured times, where a slow call counts as no more than one that took no time;
    then calls above 3 median absolute deviations are left out. A quarter of the calls may be up to
    20 times too slow (tests); near a half it fails, and says so by its `error`.

    Args:
        samples: those without tokens or time are not looked at.
        earlier: a cost of this encoder and device, for c where the samples do not tell it: then
            they say by how much the machine is slower or faster than it was.
    """
    kept = [item for item in samples if item.num_tokens > 0 and item.elapsed_s > 0]
    if not kept:
        return None
    data = _Data.of(kept)
    solution, good = _robust(data)
    call_s, token_s = solution
    call_error_s = _call_error(data, solution, good)
    note = _unidentified(data, good, solution, call_error_s)
    if note:
        call_s, token_s = _assumed(data, earlier)
        call_error_s = nan
        good = np.ones(len(kept), bool)
    return EncodeFit(
        call_s=call_s,
        token_s=token_s,
        mean_tokens=float(data.tokens.sum() / max(1, sum(item.num_texts for item in kept))),
        call_error_s=call_error_s,
        error=_median_error(data, good, (call_s, token_s)),
        num_samples=int(good.sum()),
        num_outliers=int((~good).sum()),
        is_identified=not note,
        note=note,
    )


class _Data(NamedTuple):
    """Columns of the samples, one entry each.

    Attributes:
        octave: class of size: powers of two of the tokens.
    """

    tokens: np.ndarray
    elapsed_s: np.ndarray
    octave: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[EncodeSample]) -> _Data:
        return cls(
            np.array([item.num_tokens for item in samples], float),
            np.array([item.elapsed_s for item in samples]),
            np.array([item.num_tokens.bit_length() for item in samples]),
        )

    def solve(self, weight: np.ndarray, scale_s: np.ndarray) -> np.ndarray:
        """(c, seconds of a token) by weighted least squares of distances in `scale_s`."""
        factor = np.sqrt(weight) / scale_s
        x = np.stack([np.ones_like(self.tokens), self.tokens], axis=1)
        return non_negative_fit(x * factor[:, None], self.elapsed_s * factor)

    def usual_distance(self, distance: np.ndarray) -> float:
        """The median over classes of size of their medians. Small calls are noisier: measured by
        the spread of many equal large ones, most of those that tell c would be outliers.
        """
        classes = np.unique(self.octave)
        return float(np.median([np.median(distance[self.octave == one]) for one in classes]))


def _robust(data: _Data) -> tuple[tuple[float, float], np.ndarray]:
    """The solution, and which samples it is of."""
    good, limit = np.ones(len(data.tokens), bool), inf
    solution = data.solve(good.astype(float), data.elapsed_s)
    for _ in range(4):
        predicted = _predicted(data, solution)
        distance = np.abs(data.elapsed_s / predicted - 1)
        # Never wider than before: slow calls would draw the fit to them, and so let in more.
        limit = min(limit, max(NOISE_FLOOR, 3 * 1.4826 * data.usual_distance(distance)))
        good = distance <= limit
        solution = data.solve(good.astype(float), predicted)
    return (float(solution[0]), float(solution[1])), good


def _predicted(data: _Data, solution: np.ndarray) -> np.ndarray:
    return np.maximum(solution[0] + solution[1] * data.tokens, 1e-12)


def _call_error(data: _Data, solution: tuple[float, float], good: np.ndarray) -> float:
    """Standard error of c, from the distances of the samples that were fitted to."""
    tokens = data.tokens[good]
    if len(tokens) <= 2 or tokens.min() == tokens.max():
        return inf
    predicted = solution[0] + solution[1] * tokens
    # Tokens in those of the largest call, as they are many orders of magnitude above seconds.
    x = np.stack([1 / predicted, tokens / tokens.max() / predicted], axis=1)
    distance = data.elapsed_s[good] / predicted - 1
    inverse = np.linalg.pinv(x.T @ x)
    # Each call's own noise (White's form), as it differs between sizes.
    noise = (x * distance[:, None]).T @ (x * distance[:, None])
    variance = (inverse @ noise @ inverse)[0, 0] * len(tokens) / (len(tokens) - 2)
    return float(np.sqrt(max(0.0, variance)))


def _median_error(data: _Data, good: np.ndarray, solution: tuple[float, float]) -> float:
    """Of the distances of a solution, relative to it."""
    predicted = solution[0] + solution[1] * data.tokens[good]
    return float(np.median(np.abs(data.elapsed_s[good] / predicted - 1)))


def _unidentified(
    data: _Data, good: np.ndarray, solution: tuple[float, float], call_error_s: float
) -> str:
    """Why the samples do not tell c from t; empty if they do."""
    tokens, call_s = data.tokens[good], solution[0]
    if len(tokens) < MIN_SAMPLES:
        return (
            f"{len(tokens)} calls are too few to tell a call's fixed cost; it takes {MIN_SAMPLES}"
        )
    if tokens.max() < MIN_SPREAD * tokens.min():
        return (
            f"all calls have {tokens.min():,.0f} to {tokens.max():,.0f} tokens; to tell the fixed "
            f"cost of a call, some must have {MIN_SPREAD:g} times as many as others"
        )
    error = _median_error(data, good, solution)
    if error > MAX_ERROR:
        return f"half of the calls are more than {error:.0%} off any line: the machine was busy"
    smallest_s = float(data.elapsed_s[good].min())
    if call_error_s > max(MAX_CALL_ERROR * call_s, SMALL_CALL_ERROR * smallest_s):
        return (
            f"the calls are too large or too noisy to tell the fixed cost of one: "
            f"{call_s * 1e3:.3g} ms, give or take {call_error_s * 1e3:.3g} ms"
        )
    return ""


def _assumed(data: _Data, earlier: EncodeCost | None) -> tuple[float, float]:
    """Where c is not known: that of an earlier cost, scaled by how fast the machine is today; else
    none.
    """
    if earlier is None or not (earlier.call_s or earlier.text_s):
        return 0.0, float(np.median(data.elapsed_s / data.tokens))
    before_s = earlier.call_s + earlier.token_s * data.tokens
    drift = float(np.median(data.elapsed_s / before_s))
    return earlier.call_s * drift, earlier.token_s * drift
