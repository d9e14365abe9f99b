"""What is known of lengths: a sliding window of finished ones, and the hazard of ending.

Source: `exclusive_batching.md` A7. The hazard at t is the share of the sequences that reach t
tokens and end there; a line p0 + eta t is fitted to it by least squares, weighted with the
survivors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import numpy as np

from schedulers.view import Finished


class Hazard(NamedTuple):
    """h(t) = p0 + eta t: chance of ending at the t-th token, having come so far.

    Attributes:
        p0: in (0, 1].
        eta: per token, at least 0 (a falling hazard is taken as constant: the closed forms assume
            that it does not fall).
    """

    p0: float
    eta: float


def fit_hazard(output_tokens: Iterable[int], *, min_survivors: int = 5) -> Hazard:
    """Fit a hazard to finished lengths.

    Args:
        output_tokens: lengths, at least one.
        min_survivors: times reached by fewer sequences are left out.
    """
    lengths = sorted(max(1, length) for length in output_tokens)
    num, mean = len(lengths), sum(lengths) / len(lengths)
    floor = 1.0 / mean
    low, high = lengths[int(0.05 * (num - 1))], lengths[int(0.95 * (num - 1))]
    if high - low < 10:
        return Hazard(min(1.0, floor), 0.0)
    ends = Counter(lengths)
    points: list[tuple[int, float, int]] = []
    survivors = num
    for time in range(1, high + 1):
        if time >= low and survivors >= min_survivors:
            points.append((time, ends[time] / survivors, survivors))
        survivors -= ends[time]
    p0, eta = _weighted_line(points)
    if eta < 0:
        weight = sum(w for _, _, w in points)
        p0, eta = sum(h * w for _, h, w in points) / weight, 0.0
    return Hazard(min(1.0, max(p0, floor if eta == 0.0 else 1e-6)), eta)


def _weighted_line(points: list[tuple[int, float, int]]) -> tuple[float, float]:
    """Intercept and slope by weighted least squares."""
    weight = sum(w for _, _, w in points)
    if len(points) < 2 or not weight:
        return (points[0][1], 0.0) if points else (0.0, 0.0)
    mean_t = sum(t * w for t, _, w in points) / weight
    mean_h = sum(h * w for _, h, w in points) / weight
    spread = sum(w * (t - mean_t) ** 2 for t, _, w in points)
    slope = sum(w * (t - mean_t) * (h - mean_h) for t, h, w in points) / spread if spread else 0.0
    return mean_h - slope * mean_t, slope


def phase_slope(hazard: Hazard, output_tokens: Sequence[int]) -> float:
    """How the chance of ending rises with the time in a decode phase, per token.

    Thm. 2 counts a sequence's age from the start of the phase. Holders have all ages, so what rises
    is their mean hazard: by eta a step as they age, less the variance of the hazard between them,
    as the likeliest to end leave first. With narrow outputs the two cancel.
    """
    mean = fmean(output_tokens)
    first, second = (
        fmean(out ** (power + 1) for out in output_tokens) / ((power + 1) * mean)
        for power in (1, 2)
    )
    return max(0.0, hazard.eta - hazard.eta**2 * max(0.0, second - first**2))


class Survival(NamedTuple):
    """Chances that an output is longer than t tokens, t = 0, 1, ...

    Attributes:
        chances: (t,), falling from 1.
        num_ended: outputs behind it that have ended.
    """

    chances: np.ndarray
    num_ended: int

    def moment(self, power: int) -> float:
        """E O^(power + 1) / (power + 1), a sum over t; `power` 0: the mean output."""
        return float((self.chances * (np.arange(len(self.chances)) + 0.5) ** power).sum())


def survival(ended: Sequence[int], running: Sequence[int], longest: int) -> Survival:
    """Kaplan and Meier's estimate of output lengths, from those of sequences that have ended and
    those that running ones have reached.

    Args:
        ended: output lengths, at least one, each at least 1.
        running: output lengths so far.
        longest: the most an output can have. Behind the longest one seen the mean hazard holds.
    """
    size = max(longest, *ended, *running, 1) + 1
    ends = np.bincount(ended, minlength=size).astype(float)
    left = ends + np.bincount(running, minlength=size)
    at_risk = left[::-1].cumsum()[::-1]  # of ending at the t-th token: all that have reached it
    exposure = sum(ended) + sum(running)
    hazard = np.where(at_risk > 0, ends / np.maximum(at_risk, 1), len(ended) / max(1, exposure))
    hazard[-1] = 1.0
    chances = np.cumprod(1.0 - hazard)
    return Survival(np.concatenate([[1.0], chances[1:]])[: size - 1], len(ended))


class LengthWindow:
    """The lengths of the last finished sequences.

    A window of finished sequences is biased while lengths change: after a start or a shift, the
    short ones finish first. So the mean output is also measured as a flow, decode tokens generated
    over sequences ended: by renewal theory the same in a steady state, and right during a start,
    as what runs on counts too.

    Args:
        size: sequences kept.
        recent: the newest of them, which the hazard is fitted to; the flow is taken over half as
            many.
    """

    def __init__(self, *, size: int = 500, recent: int = 500) -> None:
        self._items: deque[Finished] = deque(maxlen=size)
        self._recent = recent
        self._generated: deque[int] = deque([0], maxlen=recent // 2 + 1)
        self._num_generated = 0
        self.num_added = 0
        self._first_complete = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Sequence[Finished]:
        """Oldest first. A live view."""
        return self._items

    @property
    def first_complete(self) -> int:
        """Admission from which on every sequence that has ended is in the window: with those that
        run, a cohort that is not chosen by how long they lasted.
        """
        return self._first_complete

    @property
    def recent(self) -> Sequence[Finished]:
        """The newest, oldest first."""
        skipped = max(0, len(self._items) - self._recent)
        return list(islice(self._items, skipped, None))

    def add(self, finished: Iterable[Finished], num_decode_tokens: int = 0) -> None:
        """Take in a step: the sequences that ended in it, and its decode tokens."""
        self._num_generated += num_decode_tokens
        for item in finished:
            if len(self._items) == self._items.maxlen:
                self._first_complete = max(self._first_complete, self._items[0].admission + 1)
            self._items.append(item)
            self._generated.append(self._num_generated)
            self.num_added += 1

    @property
    def flow_mean_output_tokens(self) -> float:
        """Decode tokens per completion, and the one that came with the prompt."""
        spent = self._num_generated - self._generated[0]
        return 1.0 + spent / max(1, len(self._generated) - 1)
