"""The result schema: declared, never inferred."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pyarrow as pa
import pytest

from storage.errors import InputError
from storage.results import (
    ORDINAL,
    ResultColumns,
    ResultRow,
    part_schema,
    result_schema,
    rows_to_table,
)

ALL = ResultColumns(kept=("n",), logprobs=True, samples=True)
INPUT = pa.schema([("n", pa.int16()), ("status", pa.string()), ("list", pa.list_(pa.string()))])


def row(**values: Any) -> ResultRow:
    return ResultRow(**{"ordinal": 0, "row_id": "r", "status": "ok", **values})


def test_c19_a_schema_does_not_depend_on_the_rows() -> None:
    bad = row(status="error", error_type="x", error_message="y")
    for rows in ([], [row()], [bad], [row(), bad]):
        assert rows_to_table(rows, ALL).schema == part_schema(ALL)


def test_columns_come_in_order_with_the_inputs_own_types() -> None:
    schema = result_schema(INPUT, ResultColumns(kept=("list", "n")))
    assert schema.names[:4] == ["row_id", "list", "n", "status"]
    assert schema.field("n").type == pa.int16()
    assert not {"logprobs", "samples"} & set(schema.names)
    assert {"logprobs", "cumulative_logprob", "samples"} <= set(result_schema(INPUT, ALL).names)
    assert {*part_schema(ALL).names} - {ORDINAL} == {f.name for f in fields(ResultRow)} - {
        "ordinal"
    }


def test_a_kept_column_that_is_missing_or_clashes_is_named() -> None:
    with pytest.raises(InputError, match="'gone' is to be kept, but the input has n, status, list"):
        result_schema(INPUT, ResultColumns(kept=("gone",)))
    with pytest.raises(InputError, match="'status' cannot be kept"):
        result_schema(INPUT, ResultColumns(kept=("status",)))


def test_a_column_kept_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'n' is to be kept twice"):
        result_schema(INPUT, ResultColumns(kept=("n", "list", "n")))


def test_nested_values_come_out_as_they_went_in() -> None:
    logprobs = [{"token_id": 1, "logprob": -0.5, "top": [{"token_id": 2, "logprob": -1.0}]}]
    samples = [{"text": "a", "finish_reason": "stop", "completion_tokens": 1}]
    table = rows_to_table([row(logprobs=logprobs, samples=samples), row(ordinal=1)], ALL)
    assert table.column("logprobs").to_pylist() == [logprobs, None]
    assert table.column("samples").to_pylist() == [samples, None]


@pytest.mark.parametrize("broken", ["\ud800", "a\udcffb", "\udc00\ud83d"])
def test_lone_surrogates_are_replaced_and_spare_other_rows(broken: str) -> None:
    marked = "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in broken)
    samples = [{"text": broken, "finish_reason": None, "completion_tokens": 0}]
    rows = [
        row(text="\u00e4\U0001f600"),
        row(ordinal=1, row_id=broken, text=broken, error_message=broken, samples=samples),
    ]
    table = rows_to_table(rows, ALL)
    assert table.column("text").to_pylist() == ["\u00e4\U0001f600", marked]
    assert table.column("row_id").to_pylist() == ["r", marked]
    assert table.column("error_message").to_pylist() == [None, marked]
    assert table.column("samples").to_pylist()[1][0]["text"] == marked
