"""Results that are vectors: their columns, and tables of them over one contiguous buffer.

A vector column is a fixed-size list over the very memory that the encoder filled (`vectors_table`
copies nothing in float32), and a partition's rows are a slice of it, so a superbatch is scattered
to its partitions without touching a number. Two things of pyarrow to know: pickling a slice carries
the whole buffers behind it, so what goes to another process is a whole table or a filtered one,
which is a copy; and a slice keeps the whole buffer alive for as long as it lives itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa

VectorTask = Literal["embed", "classify", "score"]
VectorDtype = Literal["float32", "float16"]
VECTORS: Mapping[VectorTask, str] = {"embed": "embedding", "classify": "scores"}
"""The vector column of a task that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """What a job's vectors are.

    Attributes:
        task: `embed`: column `embedding`; `classify`: `label`, `score` and `scores`; `score`:
            `logprob`, `num_scored_tokens` and `perplexity`.
        width: numbers of a vector: dimensions, labels, or 1 for `score`.
        dtype: of the stored vectors; computed ones are float32.
        labels: of `classify`, in the order of the numbers.
    """

    task: VectorTask
    width: int
    dtype: VectorDtype = "float32"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.task not in get_args(VectorTask) or self.dtype not in get_args(VectorDtype):
            raise ValueError(f"there are no {self.dtype} vectors for the task {self.task!r}")
        if self.width < 1 or (self.task == "score" and self.width != 1):
            raise ValueError(f"vectors of {self.task} cannot have {self.width} numbers")
        if self.task == "classify" and len(self.labels) != self.width:
            raise ValueError(f"{len(self.labels)} labels for {self.width} scores; one each")

    @property
    def column(self) -> str | None:
        """The vector column; None for `score`, whose vector is one number."""
        return VECTORS.get(self.task)

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "width": self.width,
            "dtype": self.dtype,
            "labels": list(self.labels),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> VectorSpec:
        return cls(
            task=raw["task"], width=raw["width"], dtype=raw["dtype"], labels=tuple(raw["labels"])
        )


def vector_type(spec: VectorSpec) -> pa.DataType:
    """The type of the vector column."""
    numbers = pa.float16() if spec.dtype == "float16" else pa.float32()
    return pa.list_(pa.field("element", numbers), spec.width)


def vector_fields(spec: VectorSpec) -> list[pa.Field]:
    """The columns of the vectors, null in rows that have none."""
    if spec.task == "embed":
        return [pa.field("embedding", vector_type(spec))]
    if spec.task == "classify":
        return [
            pa.field("label", pa.string()),
            pa.field("score", pa.float32()),
            pa.field("scores", vector_type(spec)),
        ]
    return [
        pa.field("logprob", pa.float64()),
        pa.field("num_scored_tokens", pa.int32()),
        pa.field("perplexity", pa.float64()),
    ]


def computed_vector_fields(spec: VectorSpec) -> list[pa.Field]:
    """All columns that a run computes."""
    return [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("status", pa.string()),
        *vector_fields(spec),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.large_string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("truncated", pa.bool_()),
        pa.field("attempts", pa.int32()),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorErrors:
    """Why rows have no vector.

    Attributes:
        types: of N rows; None where there is a vector.
        messages: the same.
        statuses: of rows without a vector, by type; `error` where it does not say.
    """

    types: Sequence[str | None]
    messages: Sequence[str | None]
    statuses: Mapping[str, str] | None = None


def vectors_table(
    spec: VectorSpec,
    vectors: np.ndarray,
    *,
    row_ids: pa.Array | Sequence[str],
    prompt_tokens: np.ndarray,
    truncated: np.ndarray | None = None,
    num_scored_tokens: np.ndarray | None = None,
    errors: VectorErrors | None = None,
) -> pa.Table:
    """Rows of a block, for `ShardWriter.add_block`.

    Args:
        spec: what the vectors are.
        vectors: [N, width] float32, C-contiguous. The table's memory when the dtype is float32, so
            it is not to be written to any more. Rows without a vector may hold anything.
        row_ids: of N rows.
        prompt_tokens: int [N], tokens of each text.
        truncated: bool [N], texts that were cut; None: none was.
        num_scored_tokens: int [N], for `score`.
        errors: of rows that have no vector; None: every row has one.

    Raises:
        ValueError: the shapes do not go together.
    """
    num_rows = len(row_ids)
    if vectors.shape != (num_rows, spec.width) or vectors.dtype != np.float32:
        raise ValueError(
            f"{num_rows} rows of {spec.task} need float32 vectors [{num_rows}, {spec.width}], got "
            f"{vectors.dtype} {list(vectors.shape)}"
        )
    missing = _missing(errors, num_rows)
    columns = {
        "row_id": pa.array(row_ids, pa.string()),
        "status": _statuses(errors, num_rows),
        **_columns(spec, np.ascontiguousarray(vectors), missing, num_scored_tokens),
        "error_type": _text(None if errors is None else errors.types, num_rows, pa.string()),
        "error_message": _text(
            None if errors is None else errors.messages, num_rows, pa.large_string()
        ),
        "prompt_tokens": pa.array(prompt_tokens.astype(np.int32, copy=False)),
        "truncated": pa.array(np.zeros(num_rows, np.bool_) if truncated is None else truncated),
        "attempts": pa.array(np.ones(num_rows, np.int32)),
    }
    schema = pa.schema(computed_vector_fields(spec))
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _missing(errors: VectorErrors | None, num_rows: int) -> np.ndarray | None:
    """bool [N]: rows without a vector; None when there is none."""
    if errors is None:
        return None
    if len(errors.types) != num_rows or len(errors.messages) != num_rows:
        raise ValueError(
            f"{len(errors.types)} error types and {len(errors.messages)} messages for {num_rows} "
            "rows; one each, None where there is a vector"
        )
    missing = np.fromiter((kind is not None for kind in errors.types), np.bool_, num_rows)
    return missing if missing.any() else None


def _statuses(errors: VectorErrors | None, num_rows: int) -> pa.Array:
    if errors is None:
        return pa.repeat("ok", num_rows)
    known = errors.statuses or {}
    return pa.array(
        ["ok" if kind is None else known.get(kind, "error") for kind in errors.types], pa.string()
    )


def _text(values: Sequence[str | None] | None, num_rows: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(num_rows, kind) if values is None else pa.array(values, kind)


def _columns(
    spec: VectorSpec,
    vectors: np.ndarray,
    missing: np.ndarray | None,
    num_scored_tokens: np.ndarray | None,
) -> dict[str, pa.Array]:
    if spec.task == "embed":
        return {"embedding": vector_array(spec, vectors, missing)}
    if spec.task == "classify":
        best = np.argmax(vectors, axis=1)
        score = vectors[np.arange(len(vectors)), best]
        labels = pa.array(spec.labels, pa.string()).take(pa.array(best, mask=missing))
        return {
            "label": labels,
            "score": pa.array(score, mask=missing),
            "scores": vector_array(spec, vectors, missing),
        }
    if num_scored_tokens is None:
        raise ValueError("a score needs the number of tokens that it is the sum of")
    return _scores(vectors[:, 0].astype(np.float64), num_scored_tokens, missing)


def _scores(
    logprob: np.ndarray, num_tokens: np.ndarray, missing: np.ndarray | None
) -> dict[str, pa.Array]:
    """`perplexity` is null where no token was scored, as its text is too short to say anything."""
    none = num_tokens < 1
    with np.errstate(over="ignore", invalid="ignore"):
        perplexity = np.exp(-logprob / np.maximum(num_tokens, 1))
    return {
        "logprob": pa.array(logprob, mask=missing),
        "num_scored_tokens": pa.array(num_tokens.astype(np.int32, copy=False), mask=missing),
        "perplexity": pa.array(perplexity, mask=none if missing is None else none | missing),
    }


def vector_array(
    spec: VectorSpec, vectors: np.ndarray, missing: np.ndarray | None = None
) -> pa.FixedSizeListArray:
    """Vectors as an Arrow array over their own memory; float16 ones are rounded, once.

    Args:
        spec: width and dtype.
        vectors: [N, width] float32, C-contiguous.
        missing: bool [N], rows that are null; None: none is.
    """
    if spec.dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):  # too large is infinite
            vectors = vectors.astype(np.float16)
    numbers = pa.array(vectors.reshape(-1))
    mask = None if missing is None else pa.array(missing)
    return pa.FixedSizeListArray.from_arrays(numbers, type=vector_type(spec), mask=mask)


def to_numpy(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """A vector column as [N, width]; without a copy where it is in one piece without nulls. Null
    rows are zeros.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    array = cast("pa.FixedSizeListArray", column)
    width = array.type.list_size
    numbers = array.values.slice(array.offset * width, len(array) * width)
    vectors = numbers.to_numpy(zero_copy_only=False).reshape(len(array), width)
    if array.null_count:
        present = ~array.is_null().to_numpy(zero_copy_only=False)
        vectors = np.where(present[:, None], vectors, vectors.dtype.type(0))
    return vectors
