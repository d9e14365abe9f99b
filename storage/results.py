"""Result rows and their one schema: the same on every row, good or bad, in any batch (C19)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from storage.errors import InputError
from storage.merge import ORDINAL
from storage.vectors import VectorSpec, computed_vector_fields

Status = Literal["ok", "error", "invalid_output", "skipped"]

TOP = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))
LOGPROBS = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("top", TOP)]))
SAMPLES = pa.list_(
    pa.struct(
        [
            ("text", pa.large_string()),
            ("finish_reason", pa.string()),
            ("completion_tokens", pa.int32()),
        ]
    )
)


@dataclass(slots=True, kw_only=True)
class ResultRow:
    """One row's result.

    Attributes:
        ordinal: position within its shard.
        row_id: identity of the input row.
        status: `ok`; `error`: no text; `invalid_output`: text that breaks the output schema;
            `skipped`: null in, null out.
        text: of the first sample.
        completion_tokens: of all samples.
        attempts: runs that computed this row.
        queue_s: seconds until the engine started it.
        run_s: seconds in the engine.
    """

    ordinal: int
    row_id: str
    status: Status
    text: str | None = None
    finish_reason: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 1
    queue_s: float = 0.0
    run_s: float = 0.0
    cumulative_logprob: float | None = None
    logprobs: list[dict[str, Any]] | None = None
    samples: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumns:
    """Which optional columns a job's results have.

    Attributes:
        kept: input columns repeated in the results.
        logprobs: log-probabilities of the first sample.
        samples: all samples, when there are several.
        vector: the results are vectors; None: they are texts.
        partition_by: input columns that name the folder of a row's file, in order; no files have
            them. Without any, a shard is a file.
    """

    kept: tuple[str, ...] = ()
    logprobs: bool = False
    samples: bool = False
    vector: VectorSpec | None = None
    partition_by: tuple[str, ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The kept columns that the files repeat: those that no folder names."""
        return tuple(name for name in self.kept if name not in self.partition_by)


_COMMON = (
    ("status", pa.string()),
    ("text", pa.large_string()),
    ("finish_reason", pa.string()),
    ("error_type", pa.string()),
    ("error_message", pa.large_string()),
    ("prompt_tokens", pa.int32()),
    ("cached_tokens", pa.int32()),
    ("completion_tokens", pa.int32()),
    ("attempts", pa.int32()),
    ("queue_s", pa.float32()),
    ("run_s", pa.float32()),
)


def computed_fields(columns: ResultColumns) -> list[pa.Field]:
    """The columns that a run computes, without the kept ones."""
    if columns.vector is not None:
        return computed_vector_fields(columns.vector)
    fields = [pa.field("row_id", pa.string(), nullable=False), *(pa.field(*f) for f in _COMMON)]
    if columns.logprobs:
        fields += [
            pa.field("cumulative_logprob", pa.float64()),
            pa.field("logprobs", LOGPROBS),
        ]
    if columns.samples:
        fields.append(pa.field("samples", SAMPLES))
    return fields


def result_schema(input_schema: pa.Schema, columns: ResultColumns) -> pa.Schema:
    """The schema of the committed files: row_id, the kept columns, then what was computed.

    Raises:
        InputError: a kept column, or one of `partition_by`, is missing, or has a name that the
            results need.
    """
    first, *rest = computed_fields(columns)
    taken = {field.name for field in (first, *rest)}
    for name in columns.partition_by:
        if name not in input_schema.names:
            raise InputError(
                f"the input is to be partitioned by {name!r}, but it has "
                f"{', '.join(input_schema.names)}"
            )
        if name.lower() in taken:  # SQL does not tell them apart
            raise InputError(
                f"the input cannot be partitioned by {name!r}: the results have a column of that "
                "name; rename it"
            )
    for name in columns.kept:
        if columns.kept.count(name) > 1:
            raise InputError(f"column {name!r} is to be kept twice; name it once")
        if name not in input_schema.names:
            raise InputError(
                f"column {name!r} is to be kept, but the input has {', '.join(input_schema.names)}"
            )
        if name in taken:
            raise InputError(
                f"column {name!r} cannot be kept: the results have a column of that name; rename it"
            )
    kept = [input_schema.field(name).with_nullable(True) for name in columns.beside]
    return pa.schema([first, *kept, *rest])


def part_schema(columns: ResultColumns) -> pa.Schema:
    """The schema of checkpoint parts."""
    return pa.schema([pa.field(ORDINAL, pa.int64(), nullable=False), *computed_fields(columns)])


def rows_to_table(rows: Sequence[ResultRow], columns: ResultColumns) -> pa.Table:
    """A part of these rows. Columns of vectors are null."""
    schema = part_schema(columns)
    arrays = [
        _array(
            [
                row.ordinal if field.name == ORDINAL else getattr(row, field.name, None)
                for row in rows
            ],
            field.type,
        )
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column. Text that is no Unicode (lone surrogates, from a broken input) gets a `?` there:
    one such row must not keep the others from being written.
    """
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], kind)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return value
