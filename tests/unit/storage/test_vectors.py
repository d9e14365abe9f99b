"""Vector columns: over the encoder's own memory, null where there is none, cheap to slice."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.files import result_options
from storage.record import JobRecord
from storage.results import ResultColumns, computed_fields, part_schema, result_schema
from storage.vectors import (
    VectorErrors,
    VectorSpec,
    to_numpy,
    vector_array,
    vectors_table,
)

EMBED = VectorSpec(task="embed", width=4)


def vectors_of(count: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(count + width)
    return rng.standard_normal((count, width), dtype=np.float32)


def table_of(spec: VectorSpec, vectors: np.ndarray, **options: Any) -> pa.Table:
    return vectors_table(
        spec,
        vectors,
        row_ids=[f"f:{n}" for n in range(len(vectors))],
        prompt_tokens=np.arange(len(vectors)),
        **options,
    )


def errors_of(missing: list[bool]) -> VectorErrors:
    return VectorErrors(
        types=["null_prompt" if gone else None for gone in missing],
        messages=["null" if gone else None for gone in missing],
    )


def address(column: pa.ChunkedArray) -> int:
    return column.chunk(0).values.buffers()[1].address


def test_the_table_is_over_the_vectors_own_memory() -> None:
    vectors = vectors_of(10, 4)
    table = table_of(EMBED, vectors)
    assert table.schema == pa.schema(computed_fields(ResultColumns(vector=EMBED)))
    assert address(table.column("embedding")) == vectors.ctypes.data
    part = table.slice(3, 4)
    assert np.shares_memory(to_numpy(part.column("embedding")), vectors)
    assert np.array_equal(to_numpy(part.column("embedding")), vectors[3:7])


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 5), st.data())
def test_rows_without_a_vector_are_null(missing: list[bool], width: int, data: Any) -> None:
    spec = VectorSpec(task="embed", width=width)
    vectors = vectors_of(len(missing), width)
    vectors[missing] = np.nan
    table = table_of(spec, vectors, errors=errors_of(missing))
    start = data.draw(st.integers(0, len(missing) - 1))
    rows = table.slice(start).to_pylist()
    assert [row["embedding"] for row in rows] == [
        None if gone else vector.tolist()
        for gone, vector in zip(missing[start:], vectors[start:], strict=True)
    ]
    assert [row["status"] for row in rows] == [
        "error" if gone else "ok" for gone in missing[start:]
    ]
    back = to_numpy(table.slice(start).column("embedding"))
    assert np.array_equal(back, np.where(np.array(missing)[start:, None], 0, vectors[start:]))


def test_half_precision_is_rounded_once() -> None:
    spec = VectorSpec(task="embed", width=4, dtype="float16")
    vectors = vectors_of(6, 4)
    vectors[0, 0] = 1e6
    array = vector_array(spec, vectors)
    assert array.type.value_type == pa.float16()
    with np.errstate(over="ignore"):
        assert np.array_equal(to_numpy(array), vectors.astype(np.float16))
    assert np.isinf(to_numpy(array)[0, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_slice_in_parquet_comes_back(tmp_path: Path, dtype: Any) -> None:
    spec = VectorSpec(task="embed", width=3, dtype=dtype)
    missing = [False, True, False, False]
    table = table_of(spec, vectors_of(4, 3), errors=errors_of(missing)).slice(1)
    columns = ResultColumns(vector=spec)
    schema = pa.schema(computed_fields(columns))
    with pq.ParquetWriter(tmp_path / "f", schema, **result_options(schema, columns)) as writer:
        writer.write_table(table)
    file = pq.ParquetFile(tmp_path / "f")
    assert file.read().to_pylist() == table.to_pylist()
    assert file.schema_arrow.equals(schema)
    named = {
        file.metadata.row_group(0).column(n).path_in_schema: file.metadata.row_group(0).column(n)
        for n in range(file.metadata.num_columns)
    }
    assert named["embedding.list.element"].compression == "UNCOMPRESSED"
    assert named["embedding.list.element"].statistics is None
    assert named["row_id"].compression == "ZSTD" and named["row_id"].statistics is not None


def test_pickle_carries_all_of_a_slice_and_a_filtered_copy_only_itself() -> None:
    table = table_of(EMBED, vectors_of(10_000, 4))
    wanted = np.zeros(10_000, np.bool_)
    wanted[100:110] = True
    few = table.filter(pa.array(wanted))
    assert few.equals(table.slice(100, 10))
    assert len(pickle.dumps(few)) < 10_000 < 100_000 < len(pickle.dumps(table.slice(100, 10)))


def test_labels_and_their_scores() -> None:
    spec = VectorSpec(task="classify", width=3, labels=("a", "b", "c"))
    vectors = np.array([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0, 0, 0]], np.float32)
    rows = table_of(spec, vectors, errors=errors_of([False, False, True])).to_pylist()
    assert [row["label"] for row in rows] == ["b", "a", None]
    assert [row["score"] for row in rows] == [vectors[0, 1], vectors[1, 0], None]
    assert [row["scores"] for row in rows] == [*vectors[:2].tolist(), None]


def test_scores_and_their_perplexity() -> None:
    spec = VectorSpec(task="score", width=1)
    vectors = np.array([[-3.0], [0.0], [5.0], [-1e30]], np.float32)
    table = table_of(
        spec,
        vectors,
        num_scored_tokens=np.array([3, 0, 2, 1]),
        errors=errors_of([False, False, True, False]),
    )
    assert table.column("logprob").to_pylist() == [-3.0, 0.0, None, float(np.float32(-1e30))]
    assert table.column("perplexity").to_pylist() == [np.exp(1.0), None, None, np.inf]
    assert table.column("num_scored_tokens").to_pylist() == [3, 0, None, 1]


def test_shapes_that_do_not_go_together_are_named() -> None:
    with pytest.raises(ValueError, match=r"float32 vectors \[2, 4\], got float32 \[2, 3\]"):
        table_of(EMBED, vectors_of(2, 3))
    with pytest.raises(ValueError, match="got float64"):
        table_of(EMBED, vectors_of(2, 4).astype(np.float64))
    with pytest.raises(ValueError, match="1 error types and 1 messages for 2 rows"):
        table_of(EMBED, vectors_of(2, 4), errors=errors_of([True]))
    with pytest.raises(ValueError, match="number of tokens"):
        table_of(VectorSpec(task="score", width=1), vectors_of(2, 1))
    for bad in (
        {"task": "embed", "width": 0},
        {"task": "score", "width": 2},
        {"task": "classify", "width": 2, "labels": ("a",)},
        {"task": "generate", "width": 2},
    ):
        with pytest.raises(ValueError, match=r"vectors|labels"):
            VectorSpec(**bad)  # type: ignore[arg-type]


def test_the_record_keeps_the_spec_and_says_nothing_of_texts() -> None:
    plain = JobRecord(
        job_id="j", created="", spec={}, generation={}, output={},
        columns=ResultColumns(kept=("a",)), shards=(),
    )  # fmt: skip
    assert b"vector" not in plain.to_bytes() and b"partition" not in plain.to_bytes()
    from dataclasses import replace

    spec = VectorSpec(task="classify", width=2, dtype="float16", labels=("x", "y"))
    record = replace(plain, columns=ResultColumns(vector=spec, partition_by=("k", "l")))
    assert JobRecord.from_bytes(record.to_bytes(), "job.json") == record


def test_key_columns_are_in_no_file() -> None:
    schema = pa.schema([("k", pa.string()), ("n", pa.int32())])
    columns = ResultColumns(vector=EMBED, kept=("k", "n"), partition_by=("k",))
    names = result_schema(schema, columns).names
    assert names[:3] == ["row_id", "n", "status"] and "k" not in names
    assert part_schema(columns).names[0] == "__ordinal"
