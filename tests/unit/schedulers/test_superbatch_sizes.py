"""Sizes by class against the sizes themselves, and expected calls against random orders."""

from __future__ import annotations

from itertools import permutations
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.sizes import (
    SizeStats,
    expected_calls,
)
from schedulers.superbatch import Thresholds, count_calls


def lognormal(count: int, mean: float, sigma: float, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    raw = rng.lognormal(0, sigma, count)
    return [max(1, round(size)) for size in raw * mean / raw.mean()]


def mean_calls(sizes: list[int], limits: Thresholds, orders: int = 12) -> float:
    rng = np.random.default_rng(1)
    return fmean(count_calls(rng.permutation(sizes).tolist(), limits) for _ in range(orders))


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=80))
def test_moments_are_those_of_the_sizes(sizes: list[int]) -> None:
    stats = SizeStats.of(iter(sizes))
    assert (stats.count, stats.total, stats.largest) == (len(sizes), sum(sizes), max(sizes))
    assert stats.mean == pytest.approx(fmean(sizes))
    if sum(sizes):
        assert stats.cv == pytest.approx(pstdev(sizes) / fmean(sizes), abs=1e-9)
    assert sum(item.num_partitions for item in stats.classes) == stats.count
    assert sum(item.num_texts for item in stats.classes) == stats.total
    assert [item.size for item in stats.classes] == sorted(item.size for item in stats.classes)
    for item in stats.classes:
        near = [size for size in sizes if item.size / 1.1 <= size <= item.size * 1.1]
        assert len(near) >= item.num_partitions


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**5), min_size=1, max_size=80), st.integers(0, 10**5))
def test_the_share_below_a_size_is_right_to_a_class(sizes: list[int], size: int) -> None:
    share = SizeStats.of(sizes).share_below(size)
    assert sum(one < size / 1.1 for one in sizes) <= share * len(sizes) + 1e-9
    assert share * len(sizes) <= sum(one <= size * 1.1 for one in sizes) + 1e-9


def test_any_number_of_partitions_makes_few_classes() -> None:
    assert len(SizeStats.of(lognormal(50_000, 2500, 2.5)).classes) < 230


def test_none_and_negative() -> None:
    none = SizeStats.of([])
    assert (none.count, none.total, none.cv, none.mean, none.largest) == (0, 0, 0.0, 0.0, 0)
    assert none.share_below(10) == 0
    assert expected_calls(none, Thresholds(1, 1)) == 0
    assert SizeStats.of([0, 0]).cv == 0
    with pytest.raises(ValueError, match="-1 texts"):
        SizeStats.of([3, -1])


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.72])
def test_assumed_lognormal_sizes_are_so(sigma: float) -> None:
    stats = SizeStats.lognormal(4000, 2500, sigma)
    assert stats.count == 4000
    assert stats.mean == pytest.approx(2500, rel=1e-3)
    exact_cv = np.sqrt(np.expm1(sigma**2))
    # The far tail, cut off, holds part of the second moment.
    assert 0.75 * exact_cv < stats.cv <= exact_cv


CASES = [
    (4000, 50, 1.0), (4000, 50, 1.72), (4000, 2500, 2.5), (1000, 20, 0.3), (300, 700, 1.72),
]  # fmt: skip


@pytest.mark.parametrize(("count", "mean", "sigma"), CASES)
@pytest.mark.parametrize("per_mean", [0.3, 3, 30, 300])
@pytest.mark.parametrize("factor", [1, 3, 20])
def test_expected_calls_are_those_of_random_orders(
    count: int, mean: float, sigma: float, per_mean: float, factor: int
) -> None:
    """Within 4 % or half a call (the stated error)."""
    sizes = lognormal(count, mean, sigma)
    low = max(1, round(per_mean * mean))
    limits = Thresholds(low, factor * low)
    measured = mean_calls(sizes, limits)
    assert expected_calls(SizeStats.of(sizes), limits) == pytest.approx(measured, rel=0.04, abs=0.5)


@pytest.mark.parametrize("low", [1, 2, 5, 9, 40])
def test_one_partition_takes_no_more_than_its_slices(low: int) -> None:
    for size in (1, 3, 8, 100):
        limits = Thresholds(low, 2 * low)
        assert expected_calls(SizeStats.of([size]), limits) == count_calls([size], limits)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=5), st.integers(1, 60), st.integers(1, 4))
def test_few_small_partitions_against_all_orders(sizes: list[int], low: int, factor: int) -> None:
    """Within half a call and a fifth: the chain draws partitions anew, where an order has each
    once.
    """
    limits = Thresholds(low, factor * low)
    exact = fmean(count_calls(order, limits) for order in permutations(sizes))
    found = expected_calls(SizeStats.of(sizes), limits)
    assert abs(found - exact) <= 0.5 + 0.2 * exact


@pytest.mark.parametrize("size", [1, 7, 334, 1000, 5000])
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_equal_sizes_are_exact(size: int, count: int) -> None:
    limits = Thresholds(1000, 3000)
    stats = SizeStats.of([size] * count)
    assert expected_calls(stats, limits) == count_calls([size] * count, limits)


def mean_excess(stats: SizeStats) -> float:
    """n_bar (1 + CV^2) / 2: by how much a superbatch exceeds a far larger B_min on average."""
    return stats.mean * (1 + stats.cv**2) / 2


def renewal_calls(stats: SizeStats, thresholds: Thresholds) -> float:
    """N / (B_min + n_bar (1 + CV^2) / 2): the published form (`surge.md`), by renewal theory, for
    an order that is independent of size and without the upper threshold.
    """
    return max(1.0, stats.total / (thresholds.min_texts + mean_excess(stats)))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.72])
def test_the_published_form_is_the_limit_of_large_superbatches(sigma: float) -> None:
    """Within 3 % of random orders where B_min is 8 times the excess and there are many calls."""
    sizes = lognormal(20_000, 50, sigma)
    stats = SizeStats.of(sizes)
    low = round(8 * mean_excess(stats))
    limits = Thresholds(low, low + stats.largest)
    assert renewal_calls(stats, limits) == pytest.approx(mean_calls(sizes, limits), rel=0.03)


def test_the_published_form_says_far_too_few_for_heavy_tails() -> None:
    """Why the chain is there."""
    sizes = lognormal(4000, 2500, 2.5)
    limits = Thresholds(2500, 2500 + max(sizes))
    measured = mean_calls(sizes, limits)
    stats = SizeStats.of(sizes)
    assert renewal_calls(stats, limits) < measured / 3
    assert expected_calls(stats, limits) == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("sigma", [1.0, 1.72, 2.5])
def test_expected_calls_fall_with_the_lower_threshold(sigma: float) -> None:
    stats = SizeStats.of(lognormal(2000, 100, sigma))
    found = [expected_calls(stats, Thresholds(low, 3 * low)) for low in (10, 30, 100, 300, 1000)]
    assert found == sorted(found, reverse=True)
    # N / B_min + 1 is the most.
    assert all(k <= stats.total / low + 1 for k, low in zip(found, (10, 30, 100, 300, 1000),
               strict=True))  # fmt: skip
