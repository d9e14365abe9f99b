"""The choice of thresholds: what it promises, its bounds, and what it says; when batching pays."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.advice import PAYS_FROM, Choice, advise, choose_thresholds
from schedulers.encode_cost import EncodeCost, predicted_s
from schedulers.sizes import SizeStats, expected_calls
from schedulers.superbatch import Thresholds, count_calls, resident_bound

MINILM = EncodeCost(91.6e-3, 36.0e-6)
BGE = EncodeCost(82.2e-3, 106.9e-6)
PLENTY = 2**40


def lognormal(count: int, mean: float, sigma: float, seed: int = 0) -> list[int]:
    raw = np.random.default_rng(seed).lognormal(0, sigma, count)
    return [max(1, round(size)) for size in raw * mean / raw.mean()]


def choose(
    cost: EncodeCost,
    stats: SizeStats,
    *,
    memory_bytes: float = PLENTY,
    overhead: float = 0.02,
    most_s: float = 1e9,
    queue_depth: int = 1,
) -> Choice:
    return choose_thresholds(
        cost,
        stats,
        text_bytes=2000,
        memory_bytes=memory_bytes,
        queue_depth=queue_depth,
        overhead=overhead,
        most_s=most_s,
    )


@pytest.mark.parametrize(("mean", "sigma"), [(50, 1.0), (50, 1.72), (2500, 1.72), (2500, 2.5)])
@pytest.mark.parametrize("cost", [MINILM, BGE, EncodeCost(0.02, 5e-4), EncodeCost(0.1, 4e-5, 0.01)])
def test_calls_take_what_was_asked_in_random_orders(
    mean: float, sigma: float, cost: EncodeCost
) -> None:
    """At most 15 % more than the overhead, where one call is not too many; and half of the
    threshold would be too little.
    """
    sizes = lognormal(4000, mean, sigma)
    stats = SizeStats.of(sizes)
    choice = choose(cost, stats)
    rng = np.random.default_rng(1)

    def share(limits: Thresholds) -> float:
        calls = fmean(count_calls(rng.permutation(sizes).tolist(), limits) for _ in range(8))
        rest_s = predicted_s(cost, stats.total, 0, num_partitions=stats.count)
        return calls * cost.call_s / rest_s

    if choice.thresholds.min_texts == stats.total:
        assert choice.num_calls == 1
        assert f"All {stats.total:,} texts in one call" in choice.reasons[0]
        return
    assert share(choice.thresholds) <= 1.15 * 0.02 + cost.call_s / (stats.total * cost.text_s)
    if choice.thresholds.min_texts > 1:
        low = max(1, choice.thresholds.min_texts // 2)
        assert share(Thresholds(low, low + stats.largest)) > 0.02
    assert choice.num_calls == expected_calls(stats, choice.thresholds)
    assert len(choice.reasons) >= 1


def test_the_thresholds_of_the_paper() -> None:
    """Superbatches of about 100,000 texts: what 2 to 3 % of overhead ask for."""
    stats = SizeStats.of(lognormal(4000, 2500, 1.72))
    assert 90_000 < choose(MINILM, stats, overhead=0.025).thresholds.min_texts < 130_000
    assert choose(BGE, stats, overhead=0.025).thresholds.min_texts < 50_000


COSTS = st.builds(
    EncodeCost, st.floats(0, 1), st.floats(1e-6, 1e-2), st.one_of(st.just(0.0), st.floats(0, 0.1))
)
SIZES = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 3000)), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(
    COSTS, SIZES, st.floats(1e3, 1e8), st.floats(0.1, 100), st.integers(0, 3),
    st.floats(0.005, 0.2),
)  # fmt: skip
def test_bounds_are_kept(
    cost: EncodeCost,
    sizes: list[int],
    memory_bytes: float,
    most_s: float,
    queue_depth: int,
    overhead: float,
) -> None:
    stats = SizeStats.of(sizes)
    choice = choose(
        cost, stats, memory_bytes=memory_bytes, overhead=overhead, most_s=most_s,
        queue_depth=queue_depth,
    )  # fmt: skip
    limits = choice.thresholds
    assert 1 <= limits.min_texts <= limits.max_texts
    assert limits.min_texts <= max(1, stats.total)
    assert choice.resident_texts == resident_bound(limits, stats.largest, queue_depth)
    if limits.max_texts > 1:
        assert (1 + queue_depth) * limits.max_texts * 2000 <= memory_bytes * (1 + 1e-12)
        assert cost.call_of(limits.max_texts) <= most_s * (1 + 1e-9)
    assert 0 <= choice.call_share < 1
    assert all(reason.endswith(".") for reason in choice.reasons)
    # Where the promise is not kept there is a reason.
    rest_s = predicted_s(cost, stats.total, 0, num_partitions=stats.count)
    if choice.num_calls * cost.call_s > 1.7 * overhead * rest_s + 1.5 * cost.call_s:
        assert any("falls short" in reason or "no larger" in reason for reason in choice.reasons)


@settings(deadline=None, max_examples=15)
@given(COSTS, SIZES, st.lists(st.floats(1, 4), min_size=1, max_size=3), st.floats(1e4, 1e7))
def test_thresholds_grow_with_the_cost_of_a_call_and_with_memory(
    cost: EncodeCost, sizes: list[int], factors: list[float], memory_bytes: float
) -> None:
    stats = SizeStats.of(sizes)
    before = choose(cost, stats, memory_bytes=memory_bytes).thresholds
    dearer, memory, slower = cost, memory_bytes, cost
    for factor in factors:
        dearer = EncodeCost(dearer.call_s * factor, cost.text_s, cost.partition_s)
        memory *= factor
        slower = EncodeCost(cost.call_s, slower.text_s * factor, slower.partition_s * factor)
        with_dearer = choose(dearer, stats, memory_bytes=memory_bytes).thresholds
        with_more = choose(cost, stats, memory_bytes=memory).thresholds
        with_slower = choose(slower, stats, memory_bytes=memory_bytes).thresholds
        assert with_dearer.min_texts >= before.min_texts
        assert with_more.min_texts >= before.min_texts
        assert with_more.max_texts >= before.max_texts
        assert with_slower.min_texts <= before.min_texts


@settings(deadline=None, max_examples=15)
@given(COSTS, SIZES, st.floats(0.001, 0.1), st.floats(1, 10))
def test_thresholds_fall_with_the_overhead_allowed(
    cost: EncodeCost, sizes: list[int], overhead: float, factor: float
) -> None:
    stats = SizeStats.of(sizes)
    strict = choose(cost, stats, overhead=overhead)
    loose = choose(cost, stats, overhead=overhead * factor)
    assert loose.thresholds.min_texts <= strict.thresholds.min_texts


STATS = SizeStats.of(lognormal(4000, 50, 1.72))


def test_too_little_memory_is_said() -> None:
    free = choose(MINILM, STATS)
    choice = choose(MINILM, STATS, memory_bytes=2 * 2000 * 1500)
    assert choice.thresholds == Thresholds(1500, 1500)
    assert "Memory allows calls of 1,500 texts." in choice.reasons
    assert f"falls short of {free.thresholds.min_texts:,} texts" in choice.reasons[-1]
    assert choice.call_share > free.call_share
    assert any("slices" in reason for reason in choice.reasons)
    assert choice.resident_texts == 3000


def test_memory_for_less_than_a_text_is_said() -> None:
    choice = choose(MINILM, STATS, memory_bytes=100)
    assert choice.thresholds == Thresholds(1, 1)
    assert "too small for a single text" in choice.reasons[1]


def test_a_bound_of_time_is_said() -> None:
    slow = EncodeCost(0.5, 0.01)
    choice = choose(slow, STATS, most_s=10)
    assert choice.thresholds == Thresholds(950, 950)
    assert "In 10 s a call encodes 950 texts." in choice.reasons
    slower = choose(EncodeCost(0.5, 0.5), STATS, most_s=0.7)
    assert slower.thresholds == Thresholds(1, 1)
    assert "A single text takes more than 0.7 s" in slower.reasons[1]


def test_the_upper_threshold_yields_before_the_lower_one() -> None:
    free = choose(MINILM, STATS).thresholds
    cap = free.min_texts + 10
    bound = choose(MINILM, STATS, memory_bytes=2 * 2000 * cap)
    assert bound.thresholds == Thresholds(free.min_texts, cap)
    assert not any("falls short" in reason for reason in bound.reasons)


def test_free_calls_leave_partitions_alone_and_whole() -> None:
    choice = choose(EncodeCost(0.0, 1e-4), STATS)
    assert choice.thresholds.min_texts == 1
    assert choice.thresholds.max_texts >= 1000
    assert "one for each partition" in choice.reasons[0]
    assert choice.call_share == 0


def test_partitions_that_are_large_enough_stay_alone() -> None:
    stats = SizeStats.of([300_000, 200_000, 150_000])
    choice = choose(MINILM, stats)
    assert choice.thresholds.min_texts == 1
    assert choice.num_calls == 3
    assert choice.thresholds.max_texts > 300_000


def test_what_is_not_known_at_all() -> None:
    none = choose(EncodeCost(0.0, 0.0), STATS)
    assert none.thresholds.min_texts == 1
    empty = choose(MINILM, SizeStats.of([]))
    assert empty.thresholds == Thresholds(1, 1)
    assert empty.num_calls == 0
    free_texts = choose(EncodeCost(0.1, 0.0), STATS)
    assert free_texts.thresholds.min_texts == STATS.total


def test_no_overhead_at_all_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        choose(MINILM, STATS, overhead=0.0)


# -- whether it pays --

LIMITS = Thresholds(100_000, 300_000)


def test_it_pays_in_the_setting_of_the_paper() -> None:
    sizes = lognormal(4000, 2500, 1.72)
    stats = SizeStats.of(sizes)
    advice = advise(MINILM, stats, LIMITS)
    assert advice.pays
    assert advice.verdict == "pays"
    assert advice.phi == pytest.approx(0.504, abs=0.002)
    assert advice.speed_up == pytest.approx(1.97, abs=0.02)
    assert advice.most_speed_up == pytest.approx(2.017, abs=0.01)
    assert advice.cv == stats.cv
    assert advice.break_even == pytest.approx(2544, abs=1)
    assert 0.5 < advice.share_below < 0.9
    assert advice.text.startswith("Superbatching pays: ")
    assert "instead of 4,000" in advice.text
    assert "1.97 times" in advice.text or "1.96 times" in advice.text
    known = count_calls(sizes, LIMITS)
    assert advise(MINILM, stats, LIMITS, num_calls=known).calls == known


@pytest.mark.parametrize(
    ("cost", "sizes", "limits", "verdict", "said"),
    [
        (MINILM, [], LIMITS, "no_texts", "nothing to encode"),
        (MINILM, [0, 0, 0], LIMITS, "no_texts", "nothing to encode"),
        (MINILM, [500_000], LIMITS, "one_partition", "there is one partition"),
        (MINILM, [40_000] * 50, LIMITS, "large_partitions", "40,000 texts on average"),
        (EncodeCost(1e-4, 1e-3), [20] * 500, LIMITS, "cheap_calls", "costs 0.1 ms"),
        (MINILM, [1000] * 50, Thresholds(1000, 1500), "few_calls_saved", "still take 50 calls"),
        (MINILM, [9_000, 9_500], Thresholds(3000, 9_600), "few_calls_saved", "2 partitions"),
        (MINILM, [4_000] * 3, Thresholds(3000, 3000), "few_calls_saved", "6 calls"),
    ],
)
def test_it_says_why_it_does_not_pay(
    cost: EncodeCost, sizes: list[int], limits: Thresholds, verdict: str, said: str
) -> None:
    advice = advise(cost, SizeStats.of(sizes), limits)
    assert not advice.pays
    assert advice.verdict == verdict
    assert said in advice.text
    if advice.verdict != "no_texts":
        assert advice.speed_up < 1 / (1 - PAYS_FROM)
        assert advice.text.startswith("Superbatching does not pay: ")


def test_what_fits_into_one_superbatch_is_said() -> None:
    advice = advise(MINILM, SizeStats.of([10] * 1000), LIMITS)
    assert advice.pays
    assert advice.calls == 1
    assert "fixed batch of the whole dataset does the same" in advice.text
    larger = advise(MINILM, SizeStats.of([10_000] * 1000), LIMITS)
    assert "fixed batch" not in larger.text


def test_a_partition_file_that_costs_as_much_as_a_call_is_counted() -> None:
    """The gain is what is left of it: files stay, one for each partition."""
    stats = SizeStats.of([50] * 4000)
    apart = advise(EncodeCost(0.02, 4e-5), stats, LIMITS)
    files = advise(EncodeCost(0.02, 4e-5, partition_s=0.2), stats, LIMITS)
    assert apart.speed_up > 8
    assert not files.pays
    assert files.speed_up < 1.1


@settings(deadline=None, max_examples=60)
@given(COSTS, SIZES, st.integers(1, 4000), st.integers(1, 5))
def test_advice_is_sound(cost: EncodeCost, sizes: list[int], low: int, factor: int) -> None:
    stats = SizeStats.of(sizes)
    limits = Thresholds(low, factor * low)
    calls = count_calls(sizes, limits)
    advice = advise(cost, stats, limits, num_calls=calls)
    assert 0 <= advice.phi <= 1
    assert advice.speed_up <= advice.most_speed_up * (1 + 1e-9)
    if advice.speed_up != pytest.approx(1 / (1 - PAYS_FROM)):
        assert advice.pays == (len(sizes) > 1 and advice.speed_up * (1 - PAYS_FROM) > 1)
    assert advice.text.endswith(".")
