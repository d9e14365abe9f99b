"""How large partitions are, and how many encode calls follow from it. Pure arithmetic.

Source: `surge.md` 3.2. `SizeStats` keeps, beside the moments, the partitions by classes of size, a
hundred or so for any number of them: with heavy-tailed sizes the moments alone do not say how many
calls there will be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from math import ceil, exp, log2, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from schedulers.superbatch import Thresholds, call_bound, count_calls, num_slices

EXACT_SIZE = 64
"""Sizes up to that are a class each."""
CLASSES_PER_OCTAVE = 8
"""Classes of larger sizes, in each factor of two: 9 % wide."""


class SizeClass(NamedTuple):
    """Partitions of about one size.

    Attributes:
        num_partitions: at least 1.
        num_texts: in all of them.
    """

    num_partitions: int
    num_texts: int

    @property
    def size(self) -> float:
        """Mean texts of one."""
        return self.num_texts / self.num_partitions


@dataclass(frozen=True, slots=True)
class SizeStats:
    """Sizes of partitions, in texts.

    Attributes:
        count: P, partitions.
        total: N, texts in all of them.
        cv: coefficient of variation of the sizes: standard deviation in means, over all of them.
        largest: n_max.
        classes: by size, the smallest first.
    """

    count: int
    total: int
    cv: float
    largest: int
    classes: tuple[SizeClass, ...]

    @property
    def mean(self) -> float:
        """n_bar; 0 without partitions."""
        return self.total / self.count if self.count else 0.0

    def share_below(self, size: float) -> float:
        """Share of the partitions that are smaller, to the width of a class."""
        below = sum(item.num_partitions for item in self.classes if item.size < size)
        return below / self.count if self.count else 0.0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> SizeStats:
        """Of these sizes, each looked at once and not kept.

        Raises:
            ValueError: a size is negative.
        """
        counts: dict[int, int] = {}
        totals: dict[int, int] = {}
        squares = 0
        largest = 0
        for size in sizes:
            if size < 0:
                raise ValueError(f"a partition has {size} texts; it cannot have fewer than 0")
            key = _class_of(size)
            counts[key] = counts.get(key, 0) + 1
            totals[key] = totals.get(key, 0) + size
            squares += size * size
            largest = max(largest, size)
        classes = tuple(SizeClass(counts[key], totals[key]) for key in sorted(counts))
        count, total = sum(counts.values()), sum(totals.values())
        return cls(count, total, _variation(count, total, squares), largest, classes)

    @classmethod
    def lognormal(cls, count: int, mean: float, sigma: float) -> SizeStats:
        """As if the sizes were lognormal, where they are not known: at its quantiles, so cut off at
        1 / (2 count) from either end, and scaled to the mean.

        Args:
            count: partitions, at least 1.
            mean: texts of a partition.
            sigma: of the logarithm of the size.
        """
        normal = NormalDist()
        raw = [exp(sigma * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
        scale = mean * count / sum(raw)
        return cls.of(max(1, round(scale * size)) for size in raw)


def _class_of(size: int) -> int:
    if size <= EXACT_SIZE:
        return size
    return EXACT_SIZE + 1 + int(CLASSES_PER_OCTAVE * log2(size / EXACT_SIZE))


def _variation(count: int, total: int, squares: int) -> float:
    """In whole numbers until the root, so that equal sizes have exactly none."""
    return sqrt(count * squares - total * total) / total if total else 0.0


# -- calls --


LEVELS = 128
"""Fill levels of a superbatch that the chain tells apart."""


def expected_calls(stats: SizeStats, thresholds: Thresholds) -> float:
    """K: mean number of encode calls over all orders of the partitions.

    A Markov chain: the state is how much the superbatch holds, in `LEVELS` steps up to `min_texts`,
    and each partition is of a class with the class's share. Upper threshold, slices and the last
    superbatch included; exact where all sizes are equal. Where the order is known, `count_calls` is
    exact.

    Errors (tests): within 4 % or half a call of the mean over random orders.
    """
    if not stats.count:
        return 0.0
    if stats.cv == 0:
        return count_calls(repeat(stats.largest, stats.count), thresholds)
    if stats.total <= thresholds.min_texts:
        return 1.0
    moves, calls, closes = _chain(stats, thresholds)
    # With the calls so far as one more coordinate, all steps but the last are one power.
    counting = np.block([[moves, calls[:, None]], [np.zeros((1, len(moves))), np.ones((1, 1))]])
    before = np.linalg.matrix_power(counting, stats.count - 1)[0]
    level, made = before[:-1], before[-1]
    found = float(made + level @ calls + 1 - level @ closes)
    # The chain draws sizes anew, so its total is N only on average.
    return max(found, ceil(stats.total / call_bound(thresholds, stats.largest)))


def _chain(stats: SizeStats, thresholds: Thresholds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What one more partition does at each fill level; 0 is empty.

    Returns:
        Chance of each next level, (levels, levels); mean number of calls that it makes, (levels,);
        chance that nothing is left to flush behind it, (levels,).
    """
    num_levels = min(LEVELS, thresholds.min_texts)
    width = thresholds.min_texts / num_levels
    levels = np.arange(num_levels) * width
    size = np.array([item.size for item in stats.classes])[:, None]
    share = np.array([item.num_partitions for item in stats.classes])[:, None] / stats.count
    num_calls = np.array([num_slices(round(s), thresholds.max_texts) for s in size[:, 0]])[:, None]

    early = (levels > 0) & (levels + size > thresholds.max_texts)
    after = np.where(early, size, levels + size) / width
    low = np.minimum(after.astype(int), num_levels)
    # Between two levels: either, so that the mean is kept.
    to_high = np.where(low < num_levels, after - low, 0.0)
    moves = np.zeros((num_levels, num_levels + 1))
    origin = np.broadcast_to(np.arange(num_levels), low.shape)
    np.add.at(moves, (origin, low), share * (1 - to_high))
    np.add.at(moves, (origin, np.minimum(low + 1, num_levels)), share * to_high)

    closes = moves[:, num_levels].copy()
    extra = (share * (early + (num_calls - 1))).sum(axis=0)
    moves[:, 0] += closes
    return moves[:, :num_levels], closes + extra, closes
