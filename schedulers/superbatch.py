"""Which partitions share one encode call: the two-threshold policy and its memory bound. Pure.

Source: `surge.md` 3.3. Whole partitions are gathered in their order until they hold `min_texts`
(B_min: the fixed cost of a call is then shared by enough texts), and never more than `max_texts`
(B_max). What was gathered is a superbatch: one encode call, one commit. A partition of more than
`max_texts` is a superbatch of its own, encoded in slices of at most that.

The bound. Before a partition is added the buffer holds fewer than B_min texts, so after it fewer
than B_min + n_max (n_max: the largest partition), and at most B_max; a slice holds at most B_max.
With q calls' texts in memory beside those of the call that is encoded, no more than
(1 + q) min(B_max, B_min + n_max) texts are resident, however many there are in all.

The number of calls. Where B_max >= 3 B_min, it is at most N / B_min + 1 in any order: what is
flushed early and the partition that did not fit beside it fill their calls by B_min on average,
slices included.

The start. The first superbatches may be closed by fewer texts, twice as many with each, until it
takes B_min: results come at once, and calls of all sizes tell their fixed cost from that of texts,
for log2(B_min / first) calls more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_TO_MIN = 3
"""Least B_max / B_min at which calls hold B_min texts on average in any order of the partitions."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a superbatch is closed.

    Attributes:
        min_texts: B_min, that close it.
        max_texts: B_max, that it never exceeds; at least `min_texts`.

    Raises:
        ValueError: they are not 1 <= min_texts <= max_texts.
    """

    min_texts: int
    max_texts: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_texts <= self.max_texts:
            raise ValueError(
                f"a superbatch of {self.min_texts} to {self.max_texts} texts cannot be formed; "
                "the first must be at least 1, and the second no less than it"
            )


class Superbatch(NamedTuple):
    """Whole partitions that are encoded and committed together.

    Attributes:
        first: its first partition, by its index in the input.
        stop: the one behind its last.
        num_texts: in all of them.
        num_slices: encode calls that it takes: 1, or more for a single oversize partition.
    """

    first: int
    stop: int
    num_texts: int
    num_slices: int = 1

    @property
    def num_partitions(self) -> int:
        return self.stop - self.first


def form_superbatches(
    sizes: Iterable[int], thresholds: Thresholds, *, first_texts: int | None = None
) -> Iterator[Superbatch]:
    """Partitions of these sizes as superbatches, in their order; each partition is in one.

    A stream: a superbatch comes as soon as it holds `min_texts`, or else when the next partition
    does not fit beside it or there is none. The sizes behind that one play no part.

    Args:
        sizes: texts of each partition.
        thresholds: that close a superbatch.
        first_texts: that close the first one, twice as many the next, and so on up to `min_texts`;
            None: `min_texts` close all.

    Raises:
        ValueError: a size is negative, or `first_texts` is not above 0.
    """
    if first_texts is not None and first_texts < 1:
        raise ValueError(f"a superbatch of {first_texts} texts cannot be formed; 1 is the least")
    enough = min(first_texts or thresholds.min_texts, thresholds.min_texts)
    first = stop = num_texts = 0
    for size in sizes:
        if size < 0:
            raise ValueError(f"partition {stop} has {size} texts; it cannot have fewer than 0")
        if stop > first and num_texts + size > thresholds.max_texts:
            yield Superbatch(first, stop, num_texts)
            first, num_texts = stop, 0
        stop += 1
        num_texts += size
        if num_texts >= enough:
            yield Superbatch(first, stop, num_texts, num_slices(num_texts, thresholds.max_texts))
            first, num_texts = stop, 0
            enough = min(2 * enough, thresholds.min_texts)
    if stop > first:
        yield Superbatch(first, stop, num_texts)


def num_slices(num_texts: int, max_texts: int) -> int:
    """Encode calls of at most `max_texts` that so many texts need; at least 1."""
    return max(1, -(-num_texts // max_texts))


def slices(num_texts: int, max_texts: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of texts that cover a superbatch in order, each of at most `max_texts`.
    Their lengths differ by one at most, so that no small one is left for the end.
    """
    count = num_slices(num_texts, max_texts)
    start = 0
    for index in range(1, count + 1):
        stop = num_texts * index // count
        yield start, stop
        start = stop


def count_calls(
    sizes: Iterable[int], thresholds: Thresholds, *, first_texts: int | None = None
) -> int:
    """K: the encode calls of these partitions in this order, exactly."""
    formed = form_superbatches(sizes, thresholds, first_texts=first_texts)
    return sum(item.num_slices for item in formed)


# -- memory --


def call_bound(thresholds: Thresholds, largest: int) -> int:
    """Most texts of one encode call: min(B_max, B_min + n_max).

    Args:
        thresholds: of the superbatches.
        largest: n_max, texts of the largest partition.
    """
    return min(thresholds.max_texts, thresholds.min_texts + largest)


def resident_bound(thresholds: Thresholds, largest: int, queue_depth: int) -> int:
    """Most texts in memory at a time, however many there are in all.

    Args:
        thresholds: of the superbatches.
        largest: n_max, texts of the largest partition.
        queue_depth: q, calls whose texts may be in memory beside those of the call that is
            encoded: encoded ones that wait for their writing or are being written, and any that are
            read ahead.
    """
    return (1 + queue_depth) * call_bound(thresholds, largest)
