"""Shards: what is committed together. Cut by estimated tokens, inside row groups where need be.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from storage.source import Dataset, RowGroup


class Span(NamedTuple):
    """Rows `[start, stop)` of one row group, whose first row is `first_row` of its file."""

    file_index: int
    row_group: int
    start: int
    stop: int
    first_row: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of rows, in input order."""

    index: int
    spans: tuple[Span, ...]
    est_tokens: int

    @property
    def num_rows(self) -> int:
        return sum(span.stop - span.start for span in self.spans)

    @property
    def name(self) -> str:
        return f"shard-{self.index:05d}"

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "spans": [list(span) for span in self.spans],
            "est_tokens": self.est_tokens,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Shard:
        return cls(raw["index"], tuple(Span(*span) for span in raw["spans"]), raw["est_tokens"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """How many tokens a row takes, for cutting shards and for estimates.

    Attributes:
        columns: the columns that make the prompt.
        tokens_per_byte: prompt tokens per uncompressed byte of those columns.
        tokens_per_row: what every row adds: template and completion.
    """

    columns: tuple[str, ...]
    tokens_per_byte: float
    tokens_per_row: float

    def of(self, group: RowGroup) -> float:
        """Estimated tokens per row of a row group."""
        if not group.num_rows:
            return 0.0
        num_bytes = sum(group.column_bytes.get(column, 0) for column in self.columns)
        return self.tokens_per_row + self.tokens_per_byte * num_bytes / group.num_rows


def cut_shards(
    dataset: Dataset, *, cost: TokenCost, target_tokens: int, limit: int | None = None
) -> tuple[Shard, ...]:
    """Cut a dataset into shards of about `target_tokens`.

    Args:
        dataset: the input.
        cost: of rows.
        target_tokens: estimated tokens of a shard; a shard has at least one row.
        limit: only the first rows.
    """
    shards: list[Shard] = []
    spans: list[Span] = []
    tokens = 0.0
    for span, per_row in _row_groups(dataset, cost, limit):
        start = span.start
        while start < span.stop:
            room, left = target_tokens - tokens, span.stop - start
            count = max(_fitting(per_row, room, left), 0 if spans else 1)
            if count:
                spans.append(span._replace(start=start, stop=start + count))
                tokens += count * per_row
                start += count
            if start < span.stop:
                shards.append(Shard(len(shards), tuple(spans), round(tokens)))
                spans, tokens = [], 0.0
    if spans:
        shards.append(Shard(len(shards), tuple(spans), round(tokens)))
    return tuple(shards)


def shards_at(dataset: Dataset, stops: Sequence[int], *, cost: TokenCost) -> tuple[Shard, ...]:
    """Cut a dataset where the caller says.

    Args:
        dataset: the input.
        stops: the row behind each shard's last one, counted from the first row of the dataset;
            ascending. Rows behind the last stop are left out.
        cost: of rows.

    Raises:
        ValueError: a shard would have no row, or rows that the dataset has not.
    """
    shards: list[Shard] = []
    left = _Uncut(_row_groups(dataset, cost, None))
    start = 0
    for stop in stops:
        if stop <= start:
            raise ValueError(f"shard {len(shards)} would end at row {stop}, and start at {start}")
        spans, tokens = left.take(stop - start)
        shards.append(Shard(len(shards), spans, round(tokens)))
        start = stop
    return tuple(shards)


class _Uncut:
    """Row groups of which the first rows are taken."""

    def __init__(self, groups: Iterator[tuple[Span, float]]) -> None:
        self._groups = groups
        self._held: tuple[Span, float] | None = None

    def take(self, count: int) -> tuple[tuple[Span, ...], float]:
        """The next rows, and their estimated tokens."""
        spans: list[Span] = []
        tokens = 0.0
        while count:
            held = self._held or next(self._groups, None)
            if held is None:
                raise ValueError(f"the dataset has {count} rows less than its shards")
            span, per_row = held
            taken = min(count, span.stop - span.start)
            spans.append(span._replace(stop=span.start + taken))
            tokens += taken * per_row
            count -= taken
            rest = span._replace(start=span.start + taken)
            self._held = (rest, per_row) if rest.start < rest.stop else None
        return tuple(spans), tokens


def _fitting(per_row: float, room: float, left: int) -> int:
    """How many of `left` rows fit. None where a row above the target has taken all room, even if
    they cost nothing.
    """
    if room < 0:
        return 0
    return left if left * per_row <= room else int(room / per_row)


def _row_groups(
    dataset: Dataset, cost: TokenCost, limit: int | None
) -> Iterator[tuple[Span, float]]:
    left = dataset.num_rows if limit is None else limit
    for file_index, file in enumerate(dataset.files):
        first_row = 0
        for index, group in enumerate(file.row_groups):
            count = min(group.num_rows, left)
            if count:
                yield Span(file_index, index, 0, count, first_row), cost.of(group)
            left -= count
            first_row += group.num_rows
