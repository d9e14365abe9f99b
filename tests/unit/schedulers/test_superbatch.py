"""The two-threshold policy against the paper's loop, and its memory bound under any timing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.superbatch import (
    Superbatch,
    Thresholds,
    call_bound,
    count_calls,
    form_superbatches,
    num_slices,
    resident_bound,
    slices,
)

SIZES = st.lists(
    st.one_of(st.integers(0, 5), st.integers(0, 60), st.integers(0, 1000)), max_size=60
)


class Resident:
    """Counts the texts in memory, and holds them to `resident_bound`.

    Owned by the one who encodes. A call enters before its texts are read and leaves when what was
    made of them is durable; the next may enter while at most `queue_depth` are inside.

    Attributes:
        bound: texts that are never exceeded.
        num_texts: now.
        peak_texts: most so far.
    """

    def __init__(self, thresholds: Thresholds, *, largest: int, queue_depth: int) -> None:
        if queue_depth < 0:
            raise ValueError(f"a queue depth of {queue_depth} is impossible; 0 writes in turn")
        self._most_of_call = call_bound(thresholds, largest)
        self._most_calls = 1 + queue_depth
        self._calls: dict[int, int] = {}
        self.bound = resident_bound(thresholds, largest, queue_depth)
        self.num_texts = 0
        self.peak_texts = 0

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether some call must leave before another enters."""
        return len(self._calls) >= self._most_calls

    def enter(self, call: int, num_texts: int) -> None:
        """A call's texts are about to be read.

        Args:
            call: its number; not inside already.
            num_texts: at most `call_bound`.
        """
        assert not self.is_full, f"{self.num_calls} calls are in memory, and none may be added"
        assert call not in self._calls, f"call {call} is in memory already"
        assert 0 <= num_texts <= self._most_of_call, (
            f"call {call} has {num_texts} texts, and at most {self._most_of_call} were promised"
        )
        self._calls[call] = num_texts
        self.num_texts += num_texts
        self.peak_texts = max(self.peak_texts, self.num_texts)

    def leave(self, call: int) -> None:
        """A call's results are durable and its texts are gone from memory."""
        assert call in self._calls, f"call {call} is not in memory"
        self.num_texts -= self._calls.pop(call)

    def check_integrity(self) -> None:
        """Compute everything anew, and assert that it is so and within the bound."""
        assert self.num_texts == sum(self._calls.values())
        assert len(self._calls) <= self._most_calls
        assert all(0 <= size <= self._most_of_call for size in self._calls.values())
        assert self.num_texts <= self.peak_texts <= self.bound


@st.composite
def thresholds(draw: st.DrawFn) -> Thresholds:
    low = draw(st.integers(1, 80))
    return Thresholds(low, low + draw(st.one_of(st.just(0), st.integers(0, 300))))


def published(sizes: list[int], low: int, high: int) -> list[tuple[list[int], int]]:
    """The paper's loop, written out: partitions and encode calls of each commit."""
    commits: list[tuple[list[int], int]] = []
    buffer: list[int] = []
    held = 0

    def flush() -> None:
        nonlocal held
        if buffer:
            commits.append((buffer.copy(), 1))
        buffer.clear()
        held = 0

    for index, size in enumerate(sizes):
        if size > high:
            flush()
            calls = 0
            left = size
            while left > 0:
                left -= high
                calls += 1
            commits.append(([index], calls))
            continue
        if held + size > high:
            flush()
        buffer.append(index)
        held += size
        if held >= low:
            flush()
    flush()
    return commits


@settings(deadline=None)
@given(SIZES, thresholds())
def test_it_is_the_published_loop(sizes: list[int], limits: Thresholds) -> None:
    made = list(form_superbatches(sizes, limits))
    expected = published(sizes, limits.min_texts, limits.max_texts)
    assert [(list(range(item.first, item.stop)), item.num_slices) for item in made] == expected
    assert [item.num_texts for item in made] == [sum(sizes[i] for i in c) for c, _ in expected]
    assert count_calls(sizes, limits) == sum(calls for _, calls in expected)


@settings(deadline=None)
@given(SIZES, thresholds())
def test_every_partition_is_in_one_superbatch_whole_and_in_order(
    sizes: list[int], limits: Thresholds
) -> None:
    made = list(form_superbatches(sizes, limits))
    assert [i for item in made for i in range(item.first, item.stop)] == list(range(len(sizes)))
    for item in made:
        assert item.num_partitions >= 1
        assert item.num_texts == sum(sizes[item.first : item.stop])


@settings(deadline=None)
@given(SIZES, thresholds())
def test_the_thresholds_hold(sizes: list[int], limits: Thresholds) -> None:
    largest = max(sizes, default=0)
    made = list(form_superbatches(sizes, limits))
    for item in made:
        before_last = item.num_texts - sizes[item.stop - 1]
        assert before_last < limits.min_texts
        if item.num_texts > limits.max_texts:
            assert item.num_partitions == 1
            assert item.num_slices > 1
        else:
            assert item.num_slices == 1
            assert item.num_texts <= call_bound(limits, largest)
    for item, follower in pairwise(made):
        if item.num_texts < limits.min_texts:
            assert item.num_texts + sizes[follower.first] > limits.max_texts


class Counted:
    """Tells how many sizes were taken."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        for size in self._sizes:
            self.taken += 1
            yield size


@settings(deadline=None)
@given(SIZES, thresholds())
def test_a_superbatch_comes_before_what_lies_behind_it_is_looked_at(
    sizes: list[int], limits: Thresholds
) -> None:
    """One that is full needs nothing behind it; another only the partition that does not fit."""
    source = Counted(sizes)
    for item in form_superbatches(source, limits):
        if item.num_texts >= limits.min_texts:
            assert source.taken == item.stop
        else:
            assert source.taken <= item.stop + 1


@settings(deadline=None)
@given(SIZES, SIZES, thresholds())
def test_later_partitions_change_no_earlier_superbatch(
    sizes: list[int], more: list[int], limits: Thresholds
) -> None:
    alone = list(form_superbatches(sizes, limits))
    followed = list(form_superbatches(sizes + more, limits))
    certain = max(0, len(alone) - 1)
    assert followed[:certain] == alone[:certain]
    if alone and alone[-1].num_texts >= limits.min_texts:
        assert followed[: len(alone)] == alone


@settings(deadline=None)
@given(SIZES, thresholds())
def test_the_superbatches_behind_one_can_be_formed_from_there(
    sizes: list[int], limits: Thresholds
) -> None:
    """What a resumed job does: it starts behind what is committed."""
    made = list(form_superbatches(sizes, limits))
    for position, item in enumerate(made):
        rest = form_superbatches(sizes[item.stop :], limits)
        shifted = [one._replace(first=one.first + item.stop, stop=one.stop + item.stop)
                   for one in rest]  # fmt: skip
        assert shifted == made[position + 1 :]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 400))
def test_slices_cover_all_texts_and_are_nearly_equal(num_texts: int, max_texts: int) -> None:
    parts = list(slices(num_texts, max_texts))
    assert len(parts) == num_slices(num_texts, max_texts)
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(num_texts))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= max_texts
    assert len(parts) == max(1, -(-num_texts // max_texts))


@settings(deadline=None)
@given(SIZES, st.integers(1, 80), st.integers(3, 9))
def test_with_room_for_three_the_number_of_calls_is_bounded_in_any_order(
    sizes: list[int], low: int, factor: int
) -> None:
    assert count_calls(sizes, Thresholds(low, factor * low)) <= sum(sizes) / low + 1


def test_with_room_for_less_than_three_it_is_not() -> None:
    sizes = [1, 21] * 50
    assert count_calls(sizes, Thresholds(10, 20)) > sum(sizes) / 10 + 1


@settings(deadline=None)
@given(SIZES, thresholds(), st.integers(0, 4), st.randoms(use_true_random=False))
def test_texts_in_memory_never_exceed_the_bound_whatever_the_timing(
    sizes: list[int], limits: Thresholds, queue_depth: int, random: Random
) -> None:
    """An encoder and a writer that take turns at random, and a count by hand."""
    largest = max(sizes, default=0)
    resident = Resident(limits, largest=largest, queue_depth=queue_depth)
    bound = (1 + queue_depth) * min(limits.max_texts, limits.min_texts + largest)
    assert resident.bound == resident_bound(limits, largest, queue_depth) == bound
    calls = deque(
        stop - start
        for item in form_superbatches(sizes, limits)
        for start, stop in slices(item.num_texts, limits.max_texts)
    )
    inside: deque[tuple[int, int]] = deque()
    number = peak = 0
    while calls or inside:
        encoder_may = bool(calls) and not resident.is_full
        if encoder_may and (not inside or random.random() < 0.7):
            size = calls.popleft()
            resident.enter(number, size)
            inside.append((number, size))
            number += 1
        else:
            resident.leave(inside.popleft()[0])
        peak = max(peak, sum(size for _, size in inside))
        assert resident.num_texts == sum(size for _, size in inside) <= bound
        assert resident.num_calls == len(inside) <= 1 + queue_depth
        resident.check_integrity()
    assert resident.peak_texts == peak <= bound
    assert resident.num_texts == 0


def test_the_bound_is_reached_but_for_one_text_a_call() -> None:
    """So a smaller one would be wrong."""
    limits = Thresholds(10, 100)
    made = list(form_superbatches([9, 40, 9, 40], limits))
    assert [item.num_texts for item in made] == [49, 49]
    resident = Resident(limits, largest=40, queue_depth=1)
    for call, item in enumerate(made):
        resident.enter(call, item.num_texts)
    assert resident.num_texts == resident.bound - 2
    assert resident.is_full


def test_resident_refuses_what_would_break_it() -> None:
    resident = Resident(Thresholds(10, 20), largest=5, queue_depth=1)
    with pytest.raises(AssertionError, match="at most 15"):
        resident.enter(0, 16)
    resident.enter(0, 15)
    with pytest.raises(AssertionError, match="already"):
        resident.enter(0, 1)
    resident.enter(1, 15)
    with pytest.raises(AssertionError, match="none may be added"):
        resident.enter(2, 1)
    with pytest.raises(AssertionError, match="not in memory"):
        resident.leave(7)
    resident.check_integrity()
    resident.num_texts += 1
    with pytest.raises(AssertionError):
        resident.check_integrity()
    with pytest.raises(ValueError, match="queue depth"):
        Resident(Thresholds(1, 1), largest=1, queue_depth=-1)


def test_cases_by_hand() -> None:
    limits = Thresholds(10, 20)
    assert list(form_superbatches([], limits)) == []
    assert list(form_superbatches([7], limits)) == [Superbatch(0, 1, 7)]
    assert list(form_superbatches([20], limits)) == [Superbatch(0, 1, 20)]
    assert list(form_superbatches([4, 21, 4], limits)) == [
        Superbatch(0, 1, 4),
        Superbatch(1, 2, 21, 2),
        Superbatch(2, 3, 4),
    ]
    assert list(form_superbatches([9, 12, 3], limits)) == [
        Superbatch(0, 1, 9),
        Superbatch(1, 2, 12),
        Superbatch(2, 3, 3),
    ]
    assert list(form_superbatches([1000], limits)) == [Superbatch(0, 1, 1000, 50)]
    ones = list(form_superbatches([1] * 100_000, limits))
    assert len(ones) == 10_000
    assert {item.num_texts for item in ones} == {10}


@pytest.mark.parametrize(("low", "high"), [(0, 5), (-1, 5), (6, 5)])
def test_impossible_thresholds_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="cannot be formed"):
        Thresholds(low, high)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="partition 1 has -3 texts"):
        list(form_superbatches([4, -3], Thresholds(10, 20)))


# -- the start --


@settings(deadline=None)
@given(sizes=SIZES, limits=thresholds(), first_texts=st.integers(1, 60))
def test_the_first_superbatches_grow_until_they_are_as_all_others(
    sizes: list[int], limits: Thresholds, first_texts: int
) -> None:
    made = list(form_superbatches(sizes, limits, first_texts=first_texts))
    assert [item.first for item in made] == [0, *(item.stop for item in made[:-1])][: len(made)]
    assert (made[-1].stop if made else 0) == len(sizes)
    enough = min(first_texts, limits.min_texts)
    for item, after in pairwise(made):
        if item.num_texts < enough:  # the next partition did not fit beside it
            assert item.num_texts + sizes[after.first] > limits.max_texts
        # Without its last partition it was not enough.
        assert sum(sizes[item.first : item.stop - 1]) < enough
        if item.num_texts >= enough:
            enough = min(2 * enough, limits.min_texts)
    num_calls = count_calls(sizes, limits, first_texts=first_texts)
    assert num_calls == sum(item.num_slices for item in made)


def test_a_start_costs_a_call_for_each_doubling() -> None:
    limits = Thresholds(640, 2000)
    made = list(form_superbatches([1] * 100_000, limits, first_texts=10))
    assert [item.num_texts for item in made[:8]] == [10, 20, 40, 80, 160, 320, 640, 640]
    assert len(made) - count_calls([1] * 100_000, limits) <= 6
    with pytest.raises(ValueError, match="0 texts"):
        list(form_superbatches([1], limits, first_texts=0))
