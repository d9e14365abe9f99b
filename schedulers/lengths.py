"""What is known of output lengths: hazard of ending, and means, over a sliding window.

Source: `exclusive_batching.md` A7. The hazard at t is the share of the sequences that reach t
tokens and end there; a line p0 + eta t is fitted to it by least squares, weighted with the
survivors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


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
