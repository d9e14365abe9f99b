"""The cost model against the paper's published figures, and its fit against known coefficients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, inf, isnan
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.encode_cost import (
    EncodeCost,
    EncodeSample,
    alpha,
    break_even,
    fit_encode,
    phi,
    predicted_s,
    saved_share,
    speed_up,
)
from schedulers.sizes import SizeStats

# -- the published figures (10M texts, 4000 partitions, superbatches of about 100,000) --

N, P, K = 10_000_000, 4000, 100
MINILM = EncodeCost(91.6e-3, 36.0e-6)
BGE = EncodeCost(82.2e-3, 106.9e-6)
EQUAL = SizeStats.of([N // P] * P)


def test_phi_and_break_even_of_the_paper() -> None:
    assert phi(MINILM, EQUAL) == pytest.approx(0.50, abs=0.005)
    assert phi(BGE, EQUAL) == pytest.approx(0.235, abs=0.0005)
    assert break_even(MINILM) == pytest.approx(2542, rel=2e-3)
    assert speed_up(MINILM, EQUAL, 0) == pytest.approx(2.0, abs=0.02)
    assert speed_up(BGE, EQUAL, 0) == pytest.approx(1.31, abs=0.005)


def test_throughputs_of_the_paper() -> None:
    """Per partition and in fixed batches (which c and t were taken from), and of SURGE itself,
    which loses another 2.5 % with MiniLM.
    """
    for cost, per_partition, fixed, surge in (
        (MINILM, 13_766, 27_074, 26_413), (BGE, 7154, 9282, 9250),
    ):  # fmt: skip
        assert N / predicted_s(cost, N, P) == pytest.approx(per_partition, rel=1e-3)
        assert N / predicted_s(cost, N, K) == pytest.approx(fixed, rel=1e-3)
        assert N / predicted_s(cost, N, K) == pytest.approx(surge, rel=0.026)
        gained = surge / per_partition
        assert speed_up(cost, EQUAL, K) == pytest.approx(gained, rel=0.026)
    assert speed_up(BGE, EQUAL, K) == pytest.approx(1.293, rel=4e-3)


def test_time_to_first_output_of_the_paper() -> None:
    assert MINILM.call_of(100_000) == pytest.approx(3.6, rel=0.03)
    assert BGE.call_of(100_000) == pytest.approx(10.7, rel=0.01)


def test_share_of_partitions_below_break_even_of_the_paper() -> None:
    stats = SizeStats.lognormal(20_000, exp(9.03 + 1.72**2 / 2), 1.72)
    assert stats.share_below(break_even(MINILM)) == pytest.approx(0.244, abs=0.012)


def test_the_gain_does_not_depend_on_the_shape_of_the_sizes() -> None:
    """It depends on N, P and K only."""
    rng = np.random.default_rng(0)
    gains = set()
    for sigma in (0.0, 1.0, 1.72, 2.5):
        raw = rng.lognormal(0, sigma, P)
        sizes = np.floor(raw * N / raw.sum()).astype(int)
        sizes[0] += N - sizes.sum()
        gains.add(round(speed_up(MINILM, SizeStats.of(sizes.tolist()), K), 9))
    assert len(gains) == 1


# -- identities --

SECONDS = st.floats(1e-6, 10)


@settings(deadline=None)
@given(
    st.tuples(SECONDS, st.floats(1e-8, 1), st.floats(0, 10)),
    st.lists(st.integers(1, 10_000), min_size=1, max_size=50),
    st.floats(0, 1),
)
def test_speed_up_is_the_quotient_of_predicted_times(
    values: tuple[float, float, float], sizes: list[int], share: float
) -> None:
    """A partition's own time included."""
    call_s, text_s, partition_s = values
    cost = EncodeCost(call_s, text_s, partition_s)
    stats = SizeStats.of(sizes)
    num_calls = share * len(sizes)
    total, count = sum(sizes), len(sizes)
    apart = predicted_s(cost, total, count, num_partitions=count)
    gathered = predicted_s(cost, total, num_calls, num_partitions=count)
    assert speed_up(cost, stats, num_calls) == pytest.approx(apart / gathered)
    assert phi(cost, stats) == pytest.approx(count * call_s / apart)
    assert alpha(cost, stats) / (1 + alpha(cost, stats)) == pytest.approx(phi(cost, stats))
    assert saved_share(cost, stats, num_calls) == pytest.approx(1 - gathered / apart, abs=1e-9)


def test_a_file_for_each_partition_bounds_the_gain() -> None:
    with_files = EncodeCost(0.09, 36e-6, partition_s=0.09)
    assert speed_up(with_files, EQUAL, 0) < 1.5 < speed_up(MINILM, EQUAL, K)


def test_costs_that_are_nothing() -> None:
    free_calls, free_texts = EncodeCost(0.0, 1e-3), EncodeCost(1e-3, 0.0)
    nothing = EncodeCost(0.0, 0.0)
    assert (break_even(free_calls), phi(free_calls, EQUAL), alpha(free_calls, EQUAL)) == (0, 0, 0)
    assert break_even(free_texts) == alpha(free_texts, EQUAL) == inf
    assert phi(free_texts, EQUAL) == 1
    assert speed_up(free_texts, EQUAL, P / 4) == pytest.approx(4)
    assert speed_up(free_texts, EQUAL, 0) == inf
    assert speed_up(nothing, EQUAL, 1) == 1
    assert speed_up(MINILM, SizeStats.of([]), 0) == 1


def test_more_calls_than_partitions_are_a_loss() -> None:
    assert speed_up(MINILM, EQUAL, 2 * P) < 1


@pytest.mark.parametrize("values", [(-1.0, 0.0), (0.0, -1.0), (inf, 0.0), (0.0, 1.0, -1.0)])
def test_impossible_costs_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="is no cost"):
        EncodeCost(*values)
    with pytest.raises(ValueError, match="is no cost"):
        EncodeCost(1.0, 1.0, mean_tokens=0.0)


def test_seconds_of_a_text_follow_its_length() -> None:
    cost = EncodeCost.of_tokens(call_s=0.1, token_s=1e-4, mean_tokens=12, partition_s=0.02)
    assert cost.text_s == pytest.approx(1.2e-3)
    assert cost.token_s == pytest.approx(1e-4)
    longer = cost.at_length(120)
    assert longer == EncodeCost.of_tokens(
        call_s=0.1, token_s=1e-4, mean_tokens=120, partition_s=0.02
    )
    assert cost.call_of(10) == pytest.approx(0.1 + 10 * 1.2e-3)
    assert cost.call_of(10, 1000) == pytest.approx(0.1 + 0.1)


# -- the fit --


def measured(
    call_s: float,
    token_s: float,
    sizes: list[int],
    *,
    noise: float = 0.03,
    outliers: float = 0.0,
    seed: int = 0,
) -> list[EncodeSample]:
    """Calls of that cost, with relative noise and a share of calls up to 20 times too slow."""
    rng = np.random.default_rng(seed)
    made = []
    for size in sizes:
        num_tokens = int(rng.integers(8, 17, size).sum())
        elapsed_s = (call_s + token_s * num_tokens) * float(np.exp(noise * rng.normal()))
        if rng.random() < outliers:
            elapsed_s *= float(rng.uniform(1.5, 20))
        made.append(EncodeSample(size, num_tokens, elapsed_s))
    return made


def lognormal_sizes(count: int, sigma: float = 1.72, seed: int = 3) -> list[int]:
    raw = np.random.default_rng(seed).lognormal(4, sigma, count)
    return [max(1, round(size)) for size in raw]


COSTS = [(91.6e-3, 3e-6), (5e-3, 2e-5), (2e-3, 4e-4), (0.3, 1e-3)]


@pytest.mark.parametrize(("call_s", "token_s"), COSTS)
@pytest.mark.parametrize("outliers", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("count", [40, 400])
def test_the_fit_finds_the_cost(call_s: float, token_s: float, outliers: float, count: int) -> None:
    """Calls of all sizes within 5 %, a quarter of the samples far too slow or not."""
    samples = measured(call_s, token_s, lognormal_sizes(count), outliers=outliers)
    fit = fit_encode(samples)
    assert fit is not None
    true_small, true_large = call_s + 12 * token_s, call_s + 5e4 * token_s
    assert fit.cost.call_of(1, 12) == pytest.approx(true_small, rel=0.05)
    assert fit.cost.call_of(4000, 5e4) == pytest.approx(true_large, rel=0.05)
    assert fit.is_identified
    assert fit.note == ""
    assert fit.mean_tokens == pytest.approx(12, rel=0.05)
    assert fit.num_samples + fit.num_outliers == count
    assert fit.num_outliers >= 0.6 * outliers * count
    assert fit.error < 0.05
    assert abs(fit.call_s - call_s) < 4 * fit.call_error_s


@pytest.mark.parametrize(("call_s", "token_s"), COSTS)
def test_many_calls_of_one_size_do_not_wash_out_the_few_that_tell(
    call_s: float, token_s: float
) -> None:
    """Small calls are noisier: measured by the spread of the many, most would be outliers."""
    found, outliers = [], 0
    for seed in range(20):
        few = measured(call_s, token_s, [1, 4, 16, 60, 250] * 4, noise=0.12, seed=seed)
        many = measured(call_s, token_s, [1000] * 500, noise=0.005, seed=seed + 100)
        fit = fit_encode(few + many)
        assert fit is not None
        assert fit.is_identified
        outliers += fit.num_outliers
        found.append(fit.cost.call_of(1, 12))
    assert outliers <= 3 * 20
    assert fmean(found) == pytest.approx(call_s + 12 * token_s, rel=0.03)


@pytest.mark.parametrize(("call_s", "token_s"), COSTS)
def test_standard_errors_of_c_are_right(call_s: float, token_s: float) -> None:
    """Of repeated fits: within a third."""
    fits = [
        fit_encode(measured(call_s, token_s, [2, 8, 32, 128, 512] * 6, noise=0.05, seed=seed))
        for seed in range(60)
    ]
    found = [fit for fit in fits if fit is not None]
    spread = float(np.std([fit.call_s for fit in found]))
    assert np.median([fit.call_error_s for fit in found]) == pytest.approx(spread, rel=0.34)


def test_equal_calls_do_not_tell_their_fixed_cost_and_no_gain_is_claimed() -> None:
    samples = measured(0.05, 1e-4, [100] * 50)
    fit = fit_encode(samples)
    assert fit is not None
    assert not fit.is_identified
    assert fit.call_s == 0
    assert isnan(fit.call_error_s)
    assert "all calls have" in fit.note
    # The time of such calls is right all the same.
    assert fit.cost.call_of(100, 1200) == pytest.approx(0.05 + 0.12, rel=0.05)
    assert phi(fit.cost, EQUAL) == 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_calls_do_not_tell_it_either(count: int) -> None:
    samples = measured(0.05, 1e-4, [1, 100, 1000][:count])
    fit = fit_encode(samples)
    assert fit is not None
    assert not fit.is_identified
    assert "too few" in fit.note


def test_large_noisy_calls_do_not_tell_a_small_fixed_cost() -> None:
    """c is a thousandth of a call here, and the noise a tenth."""
    samples = measured(0.05, 1e-4, [20_000, 30_000, 50_000, 80_000] * 4, noise=0.1)
    fit = fit_encode(samples)
    assert fit is not None
    assert not fit.is_identified
    assert "noisy" in fit.note


def test_a_machine_too_busy_to_measure_is_said() -> None:
    rng = np.random.default_rng(0)
    samples = [
        item._replace(elapsed_s=item.elapsed_s * float(rng.uniform(1, 9)))
        for item in measured(5e-3, 2e-5, lognormal_sizes(80))
    ]
    fit = fit_encode(samples)
    assert fit is not None
    assert not fit.is_identified
    assert "busy" in fit.note


def test_a_fixed_cost_near_nothing_is_known_where_calls_are_small() -> None:
    fit = fit_encode(measured(0.0, 1e-4, lognormal_sizes(300)))
    assert fit is not None
    assert fit.is_identified
    assert fit.call_s < 0.05 * 12 * 1e-4


def test_an_earlier_cost_tells_c_where_the_calls_do_not() -> None:
    """Scaled: the machine is a fifth slower than it was."""
    earlier = EncodeCost.of_tokens(call_s=0.05, token_s=1e-4, mean_tokens=40)
    samples = measured(0.06, 1.2e-4, [100] * 50)
    fit = fit_encode(samples, earlier=earlier)
    assert fit is not None
    assert not fit.is_identified
    assert fit.call_s == pytest.approx(0.06, rel=0.03)
    assert fit.token_s == pytest.approx(1.2e-4, rel=0.03)
    assert fit.mean_tokens == pytest.approx(12, rel=0.05)
    told = fit_encode(measured(0.2, 1e-4, lognormal_sizes(100)), earlier=earlier)
    assert told is not None
    assert told.call_s == pytest.approx(0.2, rel=0.05)


def test_no_calls_and_empty_ones() -> None:
    assert fit_encode([]) is None
    assert fit_encode([EncodeSample(0, 0, 0.1), EncodeSample(3, 10, 0.0)]) is None
    samples = measured(0.05, 1e-4, lognormal_sizes(50))
    assert fit_encode([*samples, EncodeSample(4, 0, 9.0)]) == fit_encode(samples)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(EncodeSample, st.integers(1, 50), st.integers(1, 10**6), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_was_measured_the_cost_is_sound(samples: list[EncodeSample]) -> None:
    fit = fit_encode(samples)
    assert fit is not None
    assert fit.call_s >= 0
    assert fit.token_s >= 0
    assert fit.call_s + fit.token_s > 0
    assert fit.is_identified == (not fit.note)


def test_times_of_a_whole_job_are_predicted_from_a_few_of_its_calls() -> None:
    """Per partition and in superbatches, within 5 %, from 100 calls of either."""
    sizes = lognormal_sizes(4000)
    calls = measured(0.02, 1e-5, sizes, outliers=0.05)
    large = measured(0.02, 1e-5, [20_000] * 10, seed=9)
    fit = fit_encode(calls[:100] + large)
    assert fit is not None
    cost = fit.cost
    stats = SizeStats.of(sizes)
    true_s = sum(0.02 + 1e-5 * item.num_tokens for item in calls)
    assert predicted_s(cost, stats.total, len(sizes)) == pytest.approx(true_s, rel=0.05)
    few_s = 12 * 0.02 + sum(1e-5 * item.num_tokens for item in calls)
    assert predicted_s(cost, stats.total, 12) == pytest.approx(few_s, rel=0.05)


# -- files --


def with_files(
    cost: EncodeCost, sizes: list[tuple[int, int]], *, noise: float = 0.02, seed: int = 0
) -> list[EncodeSample]:
    """Calls of (texts, files of the call before) at that cost, with relative noise."""
    rng = np.random.default_rng(seed)
    made = []
    for num_texts, files in sizes:
        elapsed_s = cost.call_of(num_texts) + files * cost.partition_s
        elapsed_s *= float(np.exp(noise * rng.normal()))
        made.append(EncodeSample(num_texts, 12 * num_texts, elapsed_s, files))
    return made


def superbatches(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Small ones first, then of a thousand texts in any number of partitions."""
    rng = np.random.default_rng(seed)
    ramp = [(16 << step, 1 + step) for step in range(6)]
    return ramp + [(int(rng.integers(1000, 1400)), int(rng.integers(1, 80))) for _ in range(count)]


FILES = EncodeCost(8e-3, 8e-4, partition_s=2e-3, mean_tokens=12)


def test_files_are_told_from_calls_and_texts() -> None:
    fit = fit_encode(with_files(FILES, superbatches(100)))
    assert fit is not None and fit.is_identified
    assert fit.partition_s == pytest.approx(FILES.partition_s, rel=0.05)
    assert fit.call_s == pytest.approx(FILES.call_s, rel=0.1)
    assert fit.cost.text_s == pytest.approx(FILES.text_s, rel=0.01)
    assert abs(fit.call_s - FILES.call_s) < 4 * fit.call_error_s


@pytest.mark.parametrize("files", [lambda _: 1, lambda texts: 1 + texts // 20])
def test_files_that_go_with_calls_or_texts_cost_what_they_did(files: Callable[[int], int]) -> None:
    """One for each call, or as many as there are texts: then either could have taken the time."""
    sizes = [(texts, files(texts)) for texts in (10, 40, 160, 640, 2560)] * 4
    fit = fit_encode(with_files(FILES, sizes), earlier=FILES)
    assert fit is not None and fit.is_identified
    assert fit.partition_s == FILES.partition_s
    assert fit.call_s == pytest.approx(FILES.call_s, rel=0.1)
    alone = fit_encode(with_files(FILES, sizes))
    assert alone is not None
    assert alone.partition_s == 0


def test_large_calls_do_not_make_a_known_fixed_cost_drift() -> None:
    """Twenty jobs of nothing but large calls, each of which by itself says anything."""
    first = fit_encode(with_files(FILES, superbatches(100)))
    assert first is not None
    cost, alone = first.cost, []
    for seed in range(20):
        sizes = [(texts, 1) for texts in (4000, 9000, 13_000, 18_000, 11_000, 7000)]
        samples = with_files(FILES, sizes, seed=seed)
        fit, other = fit_encode(samples, earlier=cost), fit_encode(samples)
        assert fit is not None and other is not None
        cost, alone = fit.cost, [*alone, other.call_s]
    assert cost.call_s == pytest.approx(FILES.call_s, rel=0.25)
    assert max(alone) > 5 * FILES.call_s


def test_a_call_that_has_become_dearer_is_learnt() -> None:
    before = fit_encode(with_files(FILES, superbatches(100)))
    assert before is not None
    cost, now = before.cost, replace(FILES, call_s=4 * FILES.call_s)
    for seed in range(4):
        fit = fit_encode(with_files(now, superbatches(100), seed=seed), earlier=cost)
        assert fit is not None
        cost = fit.cost
    assert cost.call_s == pytest.approx(now.call_s, rel=0.1)
