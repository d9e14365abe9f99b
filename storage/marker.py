"""Markers: a shard with a marker is committed. What a marker says, how it is made and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import LedgerError, OutputInUse
from storage.objects import ObjectStore

MARKERS = "_markers"
BEING_REPLACED = -1
"""The `num_bytes` of a marker whose result file is about to be replaced: whoever finds it counts
the file's rows anew.
"""
MIXED = ("\0",)
"""The `kept` of a shard of which some files have other columns than others: no column has this
name, so all are written anew.
"""
COUNTED = ("status", "finish_reason", "prompt_tokens", "completion_tokens")
"""Of results that have them: vectors have no finish reason and no completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What a marker says of a committed shard.

    Attributes:
        index: of the shard.
        file: the result file, relative to the output; of a shard of several partitions the folder
            that holds theirs.
        num_rows: rows in it.
        num_bytes: its size, or theirs together.
        by_status: rows by status.
        by_finish_reason: rows by finish reason, where they have one.
        prompt_tokens: of all rows.
        completion_tokens: of all rows.
        kept: the input columns that the file repeats.
        round: 0 for the first commit, one more each time its error rows were computed again.
        num_files: result files; one a partition.
    """

    index: int
    file: str
    num_rows: int
    num_bytes: int
    by_status: Mapping[str, int]
    by_finish_reason: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    kept: tuple[str, ...] = ()
    round: int = 0
    num_files: int = 1

    @property
    def num_errors(self) -> int:
        return self.by_status.get("error", 0)

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ShardSummary:
        known = dict(raw)
        known["kept"] = tuple(raw.get("kept", ()))
        return cls(**known)


def marker_name(shard_name: str) -> str:
    return f"{MARKERS}/{shard_name}.json"


def read_marker(store: ObjectStore, name: str) -> ShardSummary | None:
    """A marker; None when it is gone.

    Raises:
        LedgerError: it is damaged. Markers appear whole, so somebody else wrote it.
    """
    data = store.read_or_none(name)
    if data is None:
        return None
    try:
        return ShardSummary.from_json(orjson.loads(data))
    except (orjson.JSONDecodeError, TypeError, AttributeError) as fault:
        raise LedgerError(
            f"{store.path(name)} is damaged ({fault}); delete it, and its shard is computed again"
        ) from fault


def write_marker(store: ObjectStore, shard_name: str, summary: ShardSummary) -> None:
    store.write(marker_name(shard_name), summary.to_json())


def commit_marker(store: ObjectStore, shard_name: str, summary: ShardSummary) -> None:
    """Write the first marker of a shard. On a remote store only if there is none: a run that was
    cut off for so long that another took the output must not write over that one's markers.

    Raises:
        OutputInUse: another run has committed the shard.
    """
    if store.is_local:
        write_marker(store, shard_name, summary)
    elif not store.create(marker_name(shard_name), summary.to_json()):
        raise OutputInUse(
            f"{store.url}: another run has taken the output over and committed {shard_name}"
        )


def announce_replacement(store: ObjectStore, shard_name: str, summary: ShardSummary) -> None:
    """Say that a committed shard's file is about to be replaced by another whole one."""
    write_marker(store, shard_name, replace(summary, num_bytes=BEING_REPLACED))


class Tally(NamedTuple):
    """Counts over result rows.

    Attributes:
        by_status: rows by status.
        by_finish_reason: rows by finish reason, where they have one.
        prompt_tokens: of all rows.
        completion_tokens: of all rows.
    """

    by_status: Mapping[str, int]
    by_finish_reason: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int


def counted(names: Iterable[str]) -> list[str]:
    """The columns in `COUNTED` that results have."""
    there = set(names)
    return [name for name in COUNTED if name in there]


class Counting:
    """Counts rows as they pass."""

    def __init__(self) -> None:
        self._status: Counter[str] = Counter()
        self._reason: Counter[str] = Counter()
        self._prompt = 0
        self._completion = 0
        self.num_rows = 0

    def add(self, table: pa.Table) -> None:
        """Take rows that have the columns of `counted`."""
        names = table.column_names
        self.num_rows += table.num_rows
        self._status.update(_values(table.column("status")))
        if "finish_reason" in names:
            self._reason.update(_values(table.column("finish_reason")))
        self._prompt += _sum(table.column("prompt_tokens"))
        if "completion_tokens" in names:
            self._completion += _sum(table.column("completion_tokens"))

    def passing(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """The same tables, counted."""
        for table in tables:
            self.add(table)
            yield table

    def tally(self) -> Tally:
        """What was counted."""
        return Tally(dict(self._status), dict(self._reason), self._prompt, self._completion)


def _values(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each value is there, without nulls."""
    found = column.value_counts().to_pylist()
    return {row["values"]: row["counts"] for row in found if row["values"] is not None}


def _sum(column: pa.ChunkedArray) -> int:
    return int(pc.call_function("sum", [column]).as_py() or 0)


def tally(table: pa.Table) -> Tally:
    """Count rows that have the columns of `counted`."""
    counting = Counting()
    counting.add(table)
    return counting.tally()


def summarise(
    index: int,
    file: str,
    counting: Counting,
    *,
    num_bytes: int,
    kept: tuple[str, ...],
    round_: int,
    num_files: int = 1,
) -> ShardSummary:
    """The marker of a shard whose rows have been written.

    Args:
        index: of the shard.
        file: see `ShardSummary`, as of the others.
        counting: has counted its rows.
        num_bytes: of its files.
        kept: see `ShardSummary`.
        round_: see `ShardSummary`.
        num_files: files.
    """
    return ShardSummary(
        index=index,
        file=file,
        num_rows=counting.num_rows,
        num_bytes=num_bytes,
        **counting.tally()._asdict(),
        kept=kept,
        round=round_,
        num_files=num_files,
    )


def count_again(
    store: ObjectStore, summary: ShardSummary, files: Sequence[str], computed: set[str]
) -> ShardSummary:
    """The marker that result files should have, from the files themselves: they are whole at any
    time.

    Raises:
        LedgerError: they do not have the shard's rows.
    """
    counting = Counting()
    kept: set[tuple[str, ...]] = set()
    num_bytes = 0
    for name in files:
        with store.fs.open(store.path(name), "rb") as handle:
            parquet = pq.ParquetFile(handle)
            names = parquet.schema_arrow.names
            kept.add(tuple(name for name in names if name not in computed))
            counting.add(parquet.read(columns=counted(names)))
        num_bytes += int(store.fs.size(store.path(name)))
    if counting.num_rows != summary.num_rows:
        raise LedgerError(
            f"{store.path(summary.file)} has {counting.num_rows} rows, its marker says "
            f"{summary.num_rows}; delete both, and the shard is computed again"
        )
    return summarise(
        summary.index,
        summary.file,
        counting,
        num_bytes=num_bytes,
        kept=kept.pop() if len(kept) == 1 else MIXED,
        round_=summary.round,
        num_files=len(files),
    )
