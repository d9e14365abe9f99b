"""Row ids and column names that are not plain."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from storage.errors import InputError
from storage.rows import RowReader, check_unique_ids, read_shard, whole
from storage.shards import Shard
from storage.source import open_dataset
from tests.unit.storage.outputs import write_input


def test_ids_that_are_bytes_are_text_or_digits(tmp_path: Path) -> None:
    ids = pa.array([b"a\xc3\xa4", b"\xff\x00"], pa.binary())
    dataset = open_dataset(str(write_input(tmp_path / "in.parquet", {"id": ids})), id_column="id")
    check_unique_ids(dataset)
    batches = read_shard(dataset, Shard(0, tuple(whole(dataset)), 0), ())
    assert [row.row_id for batch in batches for row in batch] == ["a\u00e4", "ff00"]


def test_ids_whose_digests_collide_are_no_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.rows._digest", len)
    path = write_input(tmp_path / "in.parquet", {"id": ["a", "b", "cc"]})
    check_unique_ids(open_dataset(str(path), id_column="id"))
    write_input(path, {"id": ["a", "b", "cc", "b"]})
    with pytest.raises(InputError, match="duplicates, such as 'b'"):
        check_unique_ids(open_dataset(str(path), id_column="id"))


def test_a_column_of_nulls_in_one_file_has_the_type_of_the_others(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.string())]))
    write_input(tmp_path / "a.parquet", {"x": pa.array([None, None], pa.null())})
    write_input(tmp_path / "b.parquet", {"x": pa.array([[{"role": "user"}]], kind)})
    dataset = open_dataset(str(tmp_path))
    shard = Shard(0, tuple(whole(dataset)), 0)
    kept = pa.Table.from_batches(RowReader(dataset, ("x",)).batches(shard))
    assert kept.column("x").type == kind
    assert kept.column("x").to_pylist() == [None, None, [{"role": "user"}]]


@pytest.mark.parametrize(("column", "value"), [("a", "1"), ("a.b", "22"), ("s", {"b": "3"})])
def test_a_column_whose_name_has_dots_is_no_struct(
    tmp_path: Path, column: str, value: object
) -> None:
    path = write_input(tmp_path / "in.parquet", {"a": ["1"], "a.b": ["22"], "s": [{"b": "3"}]})
    dataset = open_dataset(str(path))
    assert set(dataset.files[0].row_groups[0].column_bytes) == {"a", "a.b", "s"}
    rows = next(read_shard(dataset, Shard(0, tuple(whole(dataset)), 0), (column,)))
    assert rows[0].values == {column: value}
