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
from dataclasses import dataclass, replace
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
        call_error_s: standard error of `call_s`; 0: it was not measured.

    Raises:
        ValueError: one is negative or not finite, or `mean_tokens` is not above 0.
    """

    call_s: float
    text_s: float
    partition_s: float = 0.0
    mean_tokens: float = 1.0
    call_error_s: float = 0.0

    def __post_init__(self) -> None:
        values = (
            self.call_s, self.text_s, self.partition_s, self.mean_tokens, self.call_error_s,
        )  # fmt: skip
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
        return replace(self, text_s=self.token_s * mean_tokens, mean_tokens=mean_tokens)

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
    """A measured encode call.

    Attributes:
        num_texts: of it.
        num_tokens: of its texts.
        elapsed_s: until the call behind it could begin.
        num_partitions: whose files were written meanwhile: those of the call before.
    """

    num_texts: int
    num_tokens: int
    elapsed_s: float
    num_partitions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeFit:
    """A cost model of measured calls, and what is known of it.

    Attributes:
        call_s: c, seconds per call.
        token_s: seconds per token.
        partition_s: f, seconds per partition.
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
    partition_s: float
    mean_tokens: float
    call_error_s: float
    error: float
    num_samples: int
    num_outliers: int
    is_identified: bool
    note: str = ""

    @property
    def cost(self) -> EncodeCost:
        """For texts as long as the measured ones."""
        cost = EncodeCost.of_tokens(
            call_s=self.call_s,
            token_s=self.token_s,
            mean_tokens=self.mean_tokens,
            partition_s=self.partition_s,
        )
        return replace(cost, call_error_s=self.call_error_s) if self.is_identified else cost


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
FILE_SAMPLES = 8
"""Calls that tell f, too."""
MAX_CORRELATION = 0.95
"""Of files and tokens, above which either could have taken the time."""
FORGETTING = 1.2
"""Times that the standard error of an earlier c counts: machines change slowly."""
WELL_KNOWN = 0.1
"""Standard error of c, in c, at which it can say that the machine has changed at once."""
NOISE_FLOOR = 0.1
"""Relative distance from the fit that is no outlier, however well the others lie on it."""


def fit_encode(
    samples: Iterable[EncodeSample], *, earlier: EncodeCost | None = None
) -> EncodeFit | None:
    """c, the seconds of a token and f, from measured calls; None without any.

    Non-negative least squares of relative distances, as noise grows with the call. The first are
    relative to the measured times, where a slow call counts as no more than one that took no time;
    then calls above 3 median absolute deviations are left out. A quarter of the calls may be up to
    20 times too slow (tests); near a half it fails, and says so by its `error`.

    Args:
        samples: those without tokens or time are not looked at.
        earlier: a cost of this encoder and device. Where the samples do not tell c, it is that,
            scaled by how much slower or faster the machine is now; where they do, it is the mean of
            the two by how well each is known, so that large calls, which say little of c, do not
            make it drift. The same f where the samples do not tell that.
    """
    kept = [item for item in samples if item.num_tokens > 0 and item.elapsed_s > 0]
    if not kept:
        return None
    data = _Data.of(kept, 0.0 if earlier is None else earlier.partition_s)
    solution, good = _robust(data)
    call_error_s = _call_error(data, solution, good)
    note = _unidentified(data, good, solution, call_error_s)
    if note:
        solution = _assumed(data, earlier)
        call_error_s = nan
        good = np.ones(len(kept), bool)
    elif earlier is not None and earlier.call_error_s:
        call_s, call_error_s = _pooled(float(solution[0]), call_error_s, earlier)
        solution = data.solve(good.astype(float), _predicted(data, solution), call_s=call_s)
    return EncodeFit(
        call_s=float(solution[0]),
        token_s=float(solution[1]),
        partition_s=float(solution[2]),
        mean_tokens=float(data.tokens.sum() / max(1, sum(item.num_texts for item in kept))),
        call_error_s=call_error_s,
        error=_median_error(data, good, solution),
        num_samples=int(good.sum()),
        num_outliers=int((~good).sum()),
        is_identified=not note,
        note=note,
    )


class _Data(NamedTuple):
    """Columns of the samples, one entry each. A solution is (c, seconds of a token, f).

    Attributes:
        terms: what c, tokens and f are multiplied with, (samples, 3).
        elapsed_s: of the calls.
        octave: class of size: powers of two of the tokens.
        partition_s: f, where the samples do not tell it; None: they do.
    """

    terms: np.ndarray
    elapsed_s: np.ndarray
    octave: np.ndarray
    partition_s: float | None

    @classmethod
    def of(cls, samples: Sequence[EncodeSample], partition_s: float) -> _Data:
        tokens = np.array([item.num_tokens for item in samples], float)
        files = np.array([item.num_partitions for item in samples], float)
        return cls(
            np.stack([np.ones_like(tokens), tokens, files], axis=1),
            np.array([item.elapsed_s for item in samples]),
            np.array([item.num_tokens.bit_length() for item in samples]),
            None if _tell_files(tokens, files) else partition_s,
        )

    @property
    def tokens(self) -> np.ndarray:
        return self.terms[:, 1]

    @property
    def num_free(self) -> int:
        """Numbers of a solution that are fitted."""
        return 3 if self.partition_s is None else 2

    def solve(
        self, weight: np.ndarray, scale_s: np.ndarray, *, call_s: float | None = None
    ) -> np.ndarray:
        """A solution, by weighted least squares of distances in `scale_s`; with `call_s` the c."""
        given = np.array([call_s or 0.0, 0.0, self.partition_s or 0.0])
        free = slice(0 if call_s is None else 1, self.num_free)
        factor = np.sqrt(weight) / scale_s
        rest_s = self.elapsed_s - self.terms @ given
        given[free] = non_negative_fit(self.terms[:, free] * factor[:, None], rest_s * factor)
        return given

    def usual_distance(self, distance: np.ndarray) -> float:
        """The median over classes of size of their medians. Small calls are noisier: measured by
        the spread of many equal large ones, most of those that tell c would be outliers.
        """
        classes = np.unique(self.octave)
        return float(np.median([np.median(distance[self.octave == one]) for one in classes]))


def _tell_files(tokens: np.ndarray, files: np.ndarray) -> bool:
    """Whether calls differ enough in their files to tell f from c and from the tokens."""
    if len(files) < FILE_SAMPLES or files.max() < MIN_SPREAD * max(1.0, files.min()):
        return False
    centred = (files - files.mean(), tokens - tokens.mean())
    spread = float(np.linalg.norm(centred[0]) * np.linalg.norm(centred[1]))
    return not spread or abs(float(centred[0] @ centred[1])) < MAX_CORRELATION * spread


def _robust(data: _Data) -> tuple[np.ndarray, np.ndarray]:
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
    return solution, good


def _predicted(data: _Data, solution: np.ndarray) -> np.ndarray:
    return np.maximum(data.terms @ solution, 1e-12)


def _call_error(data: _Data, solution: np.ndarray, good: np.ndarray) -> float:
    """Standard error of c, from the distances of the samples that were fitted to."""
    terms = data.terms[good, : data.num_free]
    if len(terms) <= data.num_free or terms[:, 1].min() == terms[:, 1].max():
        return inf
    predicted = _predicted(data, solution)[good]
    # All in those of the largest call, as they are many orders of magnitude above seconds.
    x = terms / np.maximum(terms.max(axis=0), 1.0) / predicted[:, None]
    distance = data.elapsed_s[good] / predicted - 1
    inverse = np.linalg.pinv(x.T @ x)
    # Each call's own noise (White's form), as it differs between sizes.
    noise = (x * distance[:, None]).T @ (x * distance[:, None])
    variance = (inverse @ noise @ inverse)[0, 0] * len(terms) / (len(terms) - data.num_free)
    return float(np.sqrt(max(0.0, variance)))


def _pooled(call_s: float, error_s: float, earlier: EncodeCost) -> tuple[float, float]:
    """c and its standard error, from a measured and an earlier one; the measured one alone where it
    is well known and something has changed.
    """
    before_s = FORGETTING * earlier.call_error_s
    changed = abs(call_s - earlier.call_s) > 3 * float(np.hypot(error_s, before_s))
    if not error_s or (changed and error_s <= WELL_KNOWN * call_s):
        return call_s, error_s
    weight, before = 1 / error_s**2, 1 / before_s**2
    pooled = (weight * call_s + before * earlier.call_s) / (weight + before)
    return pooled, (weight + before) ** -0.5


def _median_error(data: _Data, good: np.ndarray, solution: np.ndarray) -> float:
    """Of the distances of a solution, relative to it."""
    predicted = _predicted(data, solution)[good]
    return float(np.median(np.abs(data.elapsed_s[good] / predicted - 1)))


def _unidentified(data: _Data, good: np.ndarray, solution: np.ndarray, call_error_s: float) -> str:
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


def _assumed(data: _Data, earlier: EncodeCost | None) -> np.ndarray:
    """Where c is not known: an earlier cost, scaled by how fast the machine is today; else all is
    the tokens'.
    """
    if earlier is None or not (earlier.call_s or earlier.text_s):
        return np.array([0.0, float(np.median(data.elapsed_s / data.tokens)), 0.0])
    before = np.array([earlier.call_s, earlier.token_s, earlier.partition_s])
    return before * float(np.median(data.elapsed_s / _predicted(data, before)))
