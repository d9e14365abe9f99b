"""Keys as folder names: no two alike, and read back as they were by pyarrow and by DuckDB."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from storage.catalogue import hive_source
from storage.errors import InputError
from storage.hive import NULL_FOLDER, as_keys, folders, key_schema, runs_of, segment
from storage.source import open_dataset

TEXTS = st.text(max_size=12) | st.text("a/%=?\\*[]'\" :+.~\n\0_", max_size=8)
ODD = [
    "",
    "null",
    "NULL",
    NULL_FOLDER,
    "a/b",
    "a%2Fb",
    ".",
    "..",
    "a=b",
    "\0",
    "é",
    "e\u0301",
    "漢字😀",
]
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), TEXTS | st.sampled_from(ODD)),
    "large text": (pa.large_string(), TEXTS),
    "i8": (pa.int8(), st.integers(-128, 127)),
    "i64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "u64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "f64": (pa.float64(), st.floats()),
    "f32": (pa.float32(), st.floats(width=32)),
    "flag": (pa.bool_(), st.booleans()),
    "day": (pa.date32(), st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31))),
    "when": (
        pa.timestamp("us"),
        st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)),  # noqa: DTZ001
    ),
    "when there": (
        pa.timestamp("us", "UTC"),
        st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC)),  # noqa: DTZ001
    ),
}


def table_of(names: list[str], rows: list[tuple[Any, ...]]) -> pa.Table:
    """Rows of key columns, as the input has them."""
    arrays = [pa.array([row[n] for row in rows], TYPES[name][0]) for n, name in enumerate(names)]
    return pa.table(dict(zip(names, arrays, strict=True)))


@st.composite
def key_tables(draw: st.DrawFn) -> pa.Table:
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3, unique=True))
    row = st.tuples(*(st.none() | TYPES[name][1] for name in names))
    return table_of(names, draw(st.lists(row, min_size=1, max_size=8)))


def keys_of(table: pa.Table) -> pa.Table:
    (batch,) = table.combine_chunks().to_batches()
    return as_keys(batch, key_schema(table.schema, table.column_names))


def plain(value: Any) -> Any:
    """Equal for equal keys."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return value


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(plain(value) for value in row.values()) for row in table.to_pylist()]


@given(key_tables())
def test_two_keys_never_share_a_folder_and_one_key_has_one(table: pa.Table) -> None:
    rows, paths = rows_of(table), folders(keys_of(table)).to_pylist()
    assert len(set(paths)) == len(set(rows)) == len(set(zip(rows, paths, strict=True)))
    for path in paths:
        assert path.count("/") == table.num_columns - 1
        for part in path.split("/"):
            assert part.count("=") == 1 and part not in (".", "..")


@given(key_tables())
def test_runs_begin_where_the_key_changes(table: pa.Table) -> None:
    rows = rows_of(table)
    expected = [n for n in range(1, len(rows)) if rows[n] != rows[n - 1]]
    assert runs_of(keys_of(table)).tolist() == expected


def write_files(root: Path, table: pa.Table) -> dict[str, int]:
    """A file with a number for each key; the numbers by folder."""
    numbers: dict[str, int] = {}
    for path in folders(keys_of(table)).to_pylist():
        numbers.setdefault(path, len(numbers))
    for path, number in numbers.items():
        (root / path).mkdir(parents=True)
        pq.write_table(pa.table({"number": [number]}), root / path / "part-00000.parquet")
    return numbers


def as_read(name: str, kind: pa.DataType, value: Any) -> Any:
    """What pyarrow makes of a key: it cannot tell one string from null."""
    return None if value == NULL_FOLDER else value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(table=key_tables())
@example(table=pa.table({"text": ODD}))
@example(table=pa.table({"text": ["a", None, ""], "i64": [1, None, 3]}))
def test_keys_come_back_from_pyarrow_and_duckdb(
    table: pa.Table, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("hive")
    keys = keys_of(table)
    numbers = write_files(root, table)
    paths = folders(keys).to_pylist()
    expected = {numbers[p]: row for p, row in zip(paths, rows_of(keys), strict=True)}

    dataset = pads.dataset(root, partitioning=pads.partitioning(keys.schema, flavor="hive"))
    found = dataset.to_table().select(["number", *keys.column_names])
    shown = {
        number: tuple(None if value == NULL_FOLDER else value for value in row)
        for number, row in expected.items()
    }
    assert {row[0]: row[1:] for row in rows_of(found)} == shown

    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        schema = pa.schema([("number", pa.int64())])
        query = hive_source(con, f"{root}/**/*.parquet", schema, keys.schema)
        answer = con.sql(query).to_arrow_table()
        assert answer.column_names == ["number", *keys.column_names]
        assert {row[0]: row[1:] for row in rows_of(answer)} == expected


def test_our_own_reader_gives_the_texts(tmp_path: Path) -> None:
    write_files(tmp_path, pa.table({"text": [*ODD, None]}))
    dataset = open_dataset(str(tmp_path))
    found = [file.partitions["text"] for file in dataset.files]
    assert sorted(found, key=str) == sorted([*ODD, None], key=str)


@pytest.mark.parametrize("name", ["a b", "a/b", "key=", "schlüssel", "per%cent", 'quo"te'])
def test_the_key_column_may_have_any_name(tmp_path: Path, name: str) -> None:
    table = pa.table({name: ["007", "x/y"]})
    write_files(tmp_path, table)
    schema = key_schema(table.schema, [name])
    dataset = pads.dataset(tmp_path, partitioning=pads.partitioning(schema, flavor="hive"))
    assert set(dataset.to_table().column(name).to_pylist()) == {"007", "x/y"}
    with duckdb.connect() as con:
        query = hive_source(
            con, f"{tmp_path}/**/*.parquet", pa.schema([("number", pa.int64())]), schema
        )
        assert con.sql(query).to_arrow_table().column(name).to_pylist() == ["007", "x/y"]


def test_plain_keys_make_plain_folders() -> None:
    table = pa.table({"country": ["de", "ü", None], "day": [dt.date(2026, 1, 2)] * 3})
    assert folders(keys_of(table)).to_pylist() == [
        "country=de/day=2026-01-02",
        "country=ü/day=2026-01-02",
        f"country={NULL_FOLDER}/day=2026-01-02",
    ]


def test_a_name_that_is_too_long_is_named() -> None:
    assert len(segment("key", "x" * 251)) == 255
    with pytest.raises(InputError, match=r"'key' has the value 'xxx.*256 bytes.*take 255"):
        segment("key", "x" * 252)
    with pytest.raises(InputError, match="file systems take 255"):
        segment("key", "漢" * 90)


def test_columns_that_name_no_folder_are_refused() -> None:
    schema = pa.schema([("a", pa.list_(pa.int32())), ("b", pa.binary()), ("c", pa.string())])
    with pytest.raises(InputError, match=r"by 'a': a folder name cannot hold list"):
        key_schema(schema, ["a"])
    with pytest.raises(InputError, match="cannot hold binary"):
        key_schema(schema, ["b"])
    with pytest.raises(InputError, match="by 'd', but it has a, b, c"):
        key_schema(schema, ["d"])
    with pytest.raises(InputError, match="'c' twice"):
        key_schema(schema, ["c", "c"])


def test_a_key_that_is_no_text_is_refused() -> None:
    broken = pa.array([b"ok", b"\xff"]).cast(pa.string(), safe=False)
    with pytest.raises(InputError, match="'key': a key is not UTF-8"):
        keys_of(pa.table({"key": broken}))


def test_a_dictionary_is_its_values() -> None:
    words = pa.array(["a", None, "a"]).dictionary_encode()
    assert folders(keys_of(pa.table({"key": words}))).to_pylist() == [
        "key=a", f"key={NULL_FOLDER}", "key=a",
    ]  # fmt: skip
