"""Markers: a shard with a marker is committed. What a marker says, how it is made and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import LedgerError, OutputInUse
from storage.objects import ObjectStore

MARKERS = "_markers"
BEING_REPLACED = -1
"""The `num_bytes` of a marker whose result file is about to be replaced: whoever finds it counts
the file's rows anew.
"""
COUNTED = ("status", "finish_reason", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What a marker says of a committed shard.

    Attributes:
        index: of the shard.
        file: the result file, relative to the output.
        num_rows: rows in it.
        num_bytes: its size.
        by_status: rows by status.
        by_finish_reason: rows by finish reason, where they have one.
        prompt_tokens: of all rows.
        completion_tokens: of all rows.
        kept: the input columns that the file repeats.
        round: 0 for the first commit, one more each time its error rows were computed again.
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


def tally(table: pa.Table) -> Tally:
    """Count rows that have the columns in `COUNTED`."""
    values = {column: table.column(column).to_pylist() for column in COUNTED}
    return Tally(
        by_status=dict(Counter(values["status"])),
        by_finish_reason=dict(Counter(r for r in values["finish_reason"] if r is not None)),
        prompt_tokens=sum(values["prompt_tokens"]),
        completion_tokens=sum(values["completion_tokens"]),
    )


def summarise(
    index: int,
    name: str,
    table: pa.Table,
    store: ObjectStore,
    *,
    kept: tuple[str, ...],
    round_: int,
) -> ShardSummary:
    """The marker of a shard whose result file has been written.

    Args:
        index: of the shard.
        name: of the result file.
        table: its rows; the columns in `COUNTED` suffice.
        store: the output.
        kept: see `ShardSummary`.
        round_: see `ShardSummary`.
    """
    return ShardSummary(
        index=index,
        file=name,
        num_rows=table.num_rows,
        num_bytes=int(store.fs.size(store.path(name))),
        **tally(table)._asdict(),
        kept=kept,
        round=round_,
    )


def count_again(store: ObjectStore, summary: ShardSummary, computed: set[str]) -> ShardSummary:
    """The marker that a result file should have, from the file itself: it is whole at any time.

    Raises:
        LedgerError: it does not have the shard's rows.
    """
    with store.fs.open(store.path(summary.file), "rb") as handle:
        parquet = pq.ParquetFile(handle)
        kept = tuple(name for name in parquet.schema_arrow.names if name not in computed)
        table = parquet.read(columns=list(COUNTED))
    if table.num_rows != summary.num_rows:
        raise LedgerError(
            f"{store.path(summary.file)} has {table.num_rows} rows, its marker says "
            f"{summary.num_rows}; delete both, and the shard is computed again"
        )
    return summarise(summary.index, summary.file, table, store, kept=kept, round_=summary.round)
