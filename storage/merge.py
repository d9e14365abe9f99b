"""Rows from several sorted sources as one stream: in order, each once, in bounded memory.

A shard's rows may lie in many parts, which two workers wrote in turn. Each part is sorted, so the
rows of a window of ordinals are the heads of the sources that reach it; no more than one batch of
each of those is held. Where a row is in several sources, the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from storage.errors import LedgerError

ORDINAL = "__ordinal"
"""Position within the shard; in checkpoint parts only."""
WINDOW_ROWS = 2048


class SortedRows(NamedTuple):
    """Rows with strictly ascending ordinals.

    Attributes:
        first: smallest ordinal.
        last: largest ordinal.
        open: begins to read them; closing the iterator closes the file.
    """

    first: int
    last: int
    open: Callable[[], Iterator[pa.Table]]


def in_order(table: pa.Table) -> pa.Table:
    """Rows sorted by ordinal; as they are, without a copy, where they are sorted already."""
    ordinals = table.column(ORDINAL).to_numpy()
    if len(ordinals) < 2 or (np.diff(ordinals) > 0).all():
        return table
    return table.take(np.argsort(ordinals, kind="stable"))


def last_of_each(table: pa.Table) -> pa.Table:
    """The last row of each ordinal, in order of ordinals."""
    ordinals = table.column(ORDINAL).to_numpy()
    _, from_end = np.unique(ordinals[::-1], return_index=True)
    return table.take(len(ordinals) - 1 - from_end)


def merged(sources: Sequence[SortedRows], *, window_rows: int = WINDOW_ROWS) -> Iterator[pa.Table]:
    """All rows in order, each as the last source has it.

    Args:
        sources: later ones count more.
        window_rows: ordinals that are looked at together.
    """
    if not sources:
        return
    heads = [_Head(source) for source in sources]
    try:
        stop = min(source.first for source in sources)
        last = max(source.last for source in sources)
        while stop <= last:
            stop = _next_stop(sources, stop, window_rows)
            pieces = [piece for head in heads for piece in head.take_below(stop)]
            in_turn = sorted(pieces, key=_first)
            if all(_last(one) < _first(other) for one, other in pairwise(in_turn)):
                yield from in_turn
            else:
                yield last_of_each(pa.concat_tables(pieces))
    finally:
        for head in heads:
            head.close()


def _first(table: pa.Table) -> int:
    return table.column(ORDINAL)[0].as_py()


def _last(table: pa.Table) -> int:
    return table.column(ORDINAL)[-1].as_py()


def _next_stop(sources: Sequence[SortedRows], start: int, window_rows: int) -> int:
    """Where the window that starts at `start` ends; it skips what no source has."""
    start = min(max(start, source.first) for source in sources if source.last >= start)
    return start + window_rows


class _Head:
    """A source, read as far as the window reaches."""

    def __init__(self, source: SortedRows) -> None:
        self._source = source
        self._rows: Iterator[pa.Table] | None = None
        self._held: pa.Table | None = None
        self._ended = False

    def take_below(self, stop: int) -> list[pa.Table]:
        """The next rows with ordinals below `stop`."""
        if self._ended or stop <= self._source.first:
            return []
        if self._rows is None:
            self._rows = self._source.open()
        pieces: list[pa.Table] = []
        while True:
            held = next(self._rows, None) if self._held is None else self._held
            if held is None:
                self.close()
                return pieces
            count = int(np.searchsorted(held.column(ORDINAL).to_numpy(), stop))
            if count:
                pieces.append(held.slice(0, count))
            if count < held.num_rows:
                self._held = held.slice(count)
                return pieces
            self._held = None

    def close(self) -> None:
        """Give up what is held. Without effect the second time."""
        self._ended, self._held = True, None
        closing = getattr(self._rows, "close", None)
        if callable(closing):
            closing()
        self._rows = None


def checked(tables: Iterable[pa.Table], num_rows: int, name: str) -> Iterator[pa.Table]:
    """The same tables without their ordinals: rows 0 to N - 1, each once, in order (C16).

    Raises:
        LedgerError: they are not.
    """
    position = 0
    for table in tables:
        stop = position + table.num_rows
        if not np.array_equal(table.column(ORDINAL).to_numpy(), np.arange(position, stop)):
            raise LedgerError(f"{name}: rows {position} to {stop - 1} are not in order, each once")
        position = stop
        yield table.drop_columns([ORDINAL])
    if position != num_rows:
        raise LedgerError(f"{name} has {position} results for {num_rows} rows")
