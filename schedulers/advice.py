"""Which thresholds to take, and whether superbatching pays at all. Pure.

Source: `surge.md` 3.2 and 3.3; what is chosen and why is a table in this room's README.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor
from typing import Literal, NamedTuple

from schedulers.encode_cost import EncodeCost, alpha, break_even, phi, saved_share, speed_up
from schedulers.sizes import SizeStats, expected_calls
from schedulers.superbatch import MAX_TO_MIN, Thresholds, call_bound, resident_bound

FIRST_SHARE = 64
"""The first superbatch takes so much less than B_min: six calls more tell what a call costs."""
SMALLEST_MAX = 1024
"""Texts up to which partitions are kept whole where memory and time allow, however cheap calls are:
a slice should keep a device busy."""


class Choice(NamedTuple):
    """Thresholds and why.

    Attributes:
        thresholds: B_min and B_max.
        num_calls: K, expected over all orders of the partitions.
        call_share: of the calls' fixed cost in all time, expected.
        resident_texts: that are never exceeded in memory.
        reasons: one sentence for each bound that decided.
        first_texts: that close the first superbatch (`form_superbatches`); None: as all others.
    """

    thresholds: Thresholds
    num_calls: float
    call_share: float
    resident_texts: int
    reasons: tuple[str, ...]
    first_texts: int | None = None


def choose_thresholds(
    cost: EncodeCost,
    stats: SizeStats,
    *,
    text_bytes: float,
    memory_bytes: float,
    queue_depth: int,
    overhead: float = 0.02,
    most_s: float = 30.0,
) -> Choice:
    """The smallest superbatches that make calls cheap, within memory and time.

    `min_texts` is the smallest at which calls are expected to cost `overhead` of what cannot be
    saved, large partitions counted in: smaller ones come sooner, lose less and need less memory.
    `max_texts` is three times what makes a call cheap by itself, so that slices are, and the number
    of calls is bounded in any order; but no more than memory and `most_s` allow. Those bounds win
    over `overhead`, and the reasons say so. Slices can bring calls to 1.7 `overhead`, where most
    texts are in oversize partitions.

    Args:
        cost: measured (`encode_cost.fit_encode`).
        stats: of the partitions.
        text_bytes: memory of a resident text: its text, its tokens and its vector.
        memory_bytes: that all resident texts may take.
        queue_depth: q, as in `resident_bound`.
        overhead: K c in P f + N t; above 0.
        most_s: most seconds of an encode call: until something is written, and what a kill loses.

    Raises:
        ValueError: `overhead` is not above 0.
    """
    if overhead <= 0:
        raise ValueError(f"calls cannot take {overhead:g} of the rest; allow more than 0")
    cap, cap_reason = _largest_call(cost, text_bytes, memory_bytes / (1 + queue_depth), most_s)
    wanted = _amortised(cost, stats, overhead)
    min_texts = min(wanted, cap)
    whole = MAX_TO_MIN * max(min_texts, _cheap_call(cost, stats, overhead))
    # Above B_min + n_max the upper threshold does nothing, and above N there are no texts.
    useful = min(max(whole, SMALLEST_MAX), min_texts + stats.largest, max(1, stats.total))
    thresholds = Thresholds(min_texts, min(useful, cap))
    num_calls = expected_calls(stats, thresholds)
    spent_s, rest_s = num_calls * cost.call_s, _rest_s(cost, stats)
    share = spent_s / (spent_s + rest_s) if spent_s else 0.0
    reasons = _reasons(thresholds, stats, wanted, overhead, cap_reason if useful > cap else "")
    if wanted > cap:
        reasons = (*reasons, f"That falls short of {wanted:,} texts, so calls take {share:.1%}.")
    elif useful > cap and spent_s > overhead * rest_s:
        reasons = (*reasons, f"With calls no larger than that they take {share:.1%}.")
    resident = resident_bound(thresholds, stats.largest, queue_depth)
    first_texts = max(1, thresholds.min_texts // FIRST_SHARE)
    return Choice(thresholds, num_calls, share, resident, reasons, first_texts)


def _rest_s(cost: EncodeCost, stats: SizeStats) -> float:
    """P f + N t."""
    return stats.count * cost.partition_s + stats.total * cost.text_s


def _cheap_call(cost: EncodeCost, stats: SizeStats, overhead: float) -> int:
    """Texts of a call that costs `overhead` of them and their files; all where none is enough."""
    if not stats.total:
        return 1
    wanted = alpha(cost, stats) * stats.mean / overhead
    return min(stats.total, ceil(min(wanted, 2**62))) if wanted > 0 else 1


def _amortised(cost: EncodeCost, stats: SizeStats, overhead: float) -> int:
    """Smallest B_min with calls of at most `overhead` of the rest, were there no upper threshold;
    all texts where none is enough.

    Halving over a fixed range: never decreasing in c, and never increasing in t and `overhead`,
    even where `expected_calls` is not quite monotone.
    """
    low, high = 1, max(1, stats.total)
    limit_s = overhead * _rest_s(cost, stats)
    while low < high:
        middle = (low + high) // 2
        num_calls = expected_calls(stats, Thresholds(middle, middle + stats.largest))
        if num_calls * cost.call_s <= limit_s:
            high = middle
        else:
            low = middle + 1
    return low


def _largest_call(
    cost: EncodeCost, text_bytes: float, call_bytes: float, most_s: float
) -> tuple[int, str]:
    """Most texts of a call within memory and time, at least 1, and which of the two it was."""
    by_memory = floor(min(call_bytes / text_bytes, 2**62)) if text_bytes > 0 else 2**62
    by_time = floor(min((most_s - cost.call_s) / cost.text_s, 2**62)) if cost.text_s else 2**62
    if by_memory <= by_time:
        if by_memory < 1:
            return 1, "Memory is too small for a single text; calls have one all the same."
        return by_memory, f"Memory allows calls of {by_memory:,} texts."
    if by_time < 1:
        return 1, f"A single text takes more than {most_s:g} s; calls have one all the same."
    return by_time, f"In {most_s:g} s a call encodes {by_time:,} texts."


def _reasons(
    thresholds: Thresholds, stats: SizeStats, wanted: int, overhead: float, cap_reason: str
) -> tuple[str, ...]:
    """One sentence for each bound that decided."""
    if wanted == 1:
        first = f"Calls take at most {overhead:.0%} even with one for each partition."
    elif wanted >= stats.total:
        first = (
            f"All {stats.total:,} texts in one call are needed to keep calls near {overhead:.0%}."
        )
    else:
        first = f"Calls of {wanted:,} texts and more keep their fixed cost at {overhead:.0%}."
    reasons = [first]
    if cap_reason:
        reasons.append(cap_reason)
    if stats.largest > thresholds.max_texts:
        reasons.append(
            f"Partitions of more than {thresholds.max_texts:,} texts (the largest has "
            f"{stats.largest:,}) are encoded in slices."
        )
    return tuple(reasons)


# -- whether it pays --

Verdict = Literal[
    "pays", "no_texts", "one_partition", "few_calls_saved", "cheap_calls", "large_partitions"
]

PAYS_FROM = 0.1
"""Share of the time of per-partition encoding that must be saved: a gain of 1 / 0.9."""
FEW_TEXTS = 16
"""A call that costs no more than so many texts is cheap for any partition."""


class Advice(NamedTuple):
    """Whether superbatching pays, and the figures behind it.

    Attributes:
        verdict: `pays`, or why not.
        phi: share of calls in the time of per-partition encoding.
        cv: of the sizes.
        calls: K, of encode calls.
        speed_up: against one call for each partition.
        most_speed_up: if all were one call.
        break_even: n*, texts that take as long as their call.
        share_below: of the partitions that are smaller than n*.
        text: all this in sentences.
    """

    verdict: Verdict
    phi: float
    cv: float
    calls: float
    speed_up: float
    most_speed_up: float
    break_even: float
    share_below: float
    text: str

    @property
    def pays(self) -> bool:
        return self.verdict == "pays"


def advise(
    cost: EncodeCost,
    stats: SizeStats,
    thresholds: Thresholds,
    *,
    num_calls: float | None = None,
) -> Advice:
    """Compare superbatches with one call for each partition.

    Args:
        cost: measured.
        stats: of the partitions.
        thresholds: of the superbatches.
        num_calls: K, where the order is known (`count_calls`); else expected over all orders.
    """
    calls = expected_calls(stats, thresholds) if num_calls is None else num_calls
    verdict = _verdict(cost, stats, calls)
    advice = Advice(
        verdict=verdict,
        phi=phi(cost, stats) if stats.count else 0.0,
        cv=stats.cv,
        calls=calls,
        speed_up=speed_up(cost, stats, calls),
        most_speed_up=speed_up(cost, stats, min(1, stats.count)),
        break_even=break_even(cost),
        share_below=stats.share_below(break_even(cost)),
        text="",
    )
    return advice._replace(text=" ".join(_sentences(advice, cost, stats, thresholds)))


def _verdict(cost: EncodeCost, stats: SizeStats, calls: float) -> Verdict:
    if not stats.total:
        return "no_texts"
    if stats.count == 1:
        return "one_partition"
    if saved_share(cost, stats, calls) >= PAYS_FROM:
        return "pays"
    if phi(cost, stats) >= PAYS_FROM:
        return "few_calls_saved"
    return "cheap_calls" if break_even(cost) <= FEW_TEXTS else "large_partitions"


def _sentences(
    advice: Advice, cost: EncodeCost, stats: SizeStats, thresholds: Thresholds
) -> Iterator[str]:
    call_ms, texts = cost.call_s * 1e3, advice.break_even
    equal = f"{texts:,.0f}" if texts >= 10 else f"{texts:.2g}"
    share = f"{advice.phi:.1%}"
    match advice.verdict:
        case "no_texts":
            yield "There is nothing to encode."
            return
        case "one_partition":
            yield "Superbatching does not pay: there is one partition, and nothing to gather."
        case "few_calls_saved":
            yield (
                f"Superbatching does not pay: {stats.count:,} partitions would still take "
                f"{advice.calls:,.0f} calls within {thresholds.max_texts:,} texts."
            )
        case "cheap_calls":
            yield (
                f"Superbatching does not pay: a call costs {call_ms:.3g} ms, as much as {equal} "
                f"texts, so with one for each partition calls take {share} of the time."
            )
        case "large_partitions":
            yield (
                f"Superbatching does not pay: partitions have {stats.mean:,.0f} texts on average, "
                f"and a call costs no more than {equal} of them, so with one for each partition "
                f"calls take {share} of the time."
            )
        case "pays":
            yield (
                f"Superbatching pays: with a call for each partition, calls would take {share} of "
                f"the time; {advice.calls:,.0f} instead of {stats.count:,} of them make it "
                f"{advice.speed_up:.2f} times as fast (at most {advice.most_speed_up:.2f})."
            )
            yield (
                f"{advice.share_below:.0%} of the partitions are smaller than the {equal} texts "
                f"that take as long as a call."
            )
    if stats.total <= call_bound(thresholds, stats.largest) and stats.count > 1:
        yield "All texts fit into one superbatch: a fixed batch of the whole dataset does the same."
