"""Rows from many parts as one stream: as sorting all of them would give, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import LedgerError
from storage.merge import ORDINAL, SortedRows, checked, in_order, last_of_each, merged

PARTS = st.lists(
    st.tuples(st.sets(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 9)),
    max_size=5,
)


class Part:
    """A sorted part that counts how much of it is held."""

    def __init__(self, number: int, ordinals: set[int], batch_rows: int) -> None:
        self.ordinals = sorted(ordinals)
        self.number = number
        self.batch_rows = batch_rows
        self.is_open = False
        self.num_opened = 0

    def source(self) -> SortedRows:
        return SortedRows(self.ordinals[0], self.ordinals[-1], self._rows)

    def _rows(self) -> Iterator[pa.Table]:
        self.is_open = True
        self.num_opened += 1
        try:
            for start in range(0, len(self.ordinals), self.batch_rows):
                held = self.ordinals[start : start + self.batch_rows]
                yield pa.table(
                    {ORDINAL: pa.array(held, pa.int64()), "part": [self.number] * len(held)}
                )
        finally:
            self.is_open = False


@given(PARTS, st.integers(1, 30))
def test_the_stream_is_what_sorting_gives(
    parts: list[tuple[set[int], int]], window_rows: int
) -> None:
    made = [Part(number, *part) for number, part in enumerate(parts)]
    last = {ordinal: part.number for part in made for ordinal in part.ordinals}
    found: list[tuple[int, int]] = []
    for table in merged([part.source() for part in made], window_rows=window_rows):
        found += zip(*(column.to_pylist() for column in table.columns), strict=True)
    assert found == sorted(last.items())
    assert all(part.num_opened == 1 and not part.is_open for part in made)


def test_disjoint_parts_are_open_one_at_a_time() -> None:
    made = [Part(n, set(range(n * 10, n * 10 + 10)), 5) for n in reversed(range(6))]
    most = 0
    for _ in merged([part.source() for part in made], window_rows=10):
        most = max(most, sum(part.is_open for part in made))
    assert most <= 2


def test_a_stream_that_is_given_up_closes_its_files() -> None:
    made = [Part(n, set(range(n, 40, 2)), 3) for n in range(2)]
    rows = merged([part.source() for part in made], window_rows=4)
    next(rows)
    assert all(part.is_open for part in made)
    rows.close()  # type: ignore[attr-defined]
    assert not any(part.is_open for part in made)


@given(st.lists(st.integers(0, 20), max_size=20))
def test_the_last_of_each_counts(ordinals: list[int]) -> None:
    table = pa.table({ORDINAL: pa.array(ordinals, pa.int64()), "at": list(range(len(ordinals)))})
    last = {ordinal: at for at, ordinal in enumerate(ordinals)}
    assert last_of_each(table).column("at").to_pylist() == [last[o] for o in sorted(last)]


def test_sorted_rows_are_not_copied() -> None:
    table = pa.table({ORDINAL: pa.array([1, 4, 9], pa.int64()), "x": np.arange(3)})
    assert in_order(table) is table
    turned = table.take([2, 0, 1])
    assert in_order(turned).column("x").to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("ordinals", [[0, 1], [0, 2, 1], [0, 1, 1], [1, 2, 3], [0, 1, 2, 3]])
def test_c16_rows_that_are_not_each_there_once_are_refused(ordinals: list[int]) -> None:
    tables = [pa.table({ORDINAL: pa.array([ordinal], pa.int64())}) for ordinal in ordinals]
    with pytest.raises(LedgerError, match="shard-0"):
        list(checked(tables, 3, "shard-0"))
