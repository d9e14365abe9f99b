"""Reading rows: every type of text and messages, streamed, whatever the files look like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from storage.errors import InputError
from storage.rows import RowReader, check_unique_ids, read_shard, sample_rows, to_values, whole
from storage.shards import Shard, Span
from storage.source import Dataset, open_dataset
from tests.unit.storage.outputs import write_input

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
CHAT = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], None, []]


def everything(dataset: Dataset) -> Shard:
    return Shard(0, tuple(whole(dataset)), 0)


def column_of(path: Path, column: str = "x") -> list[Any]:
    dataset = open_dataset(str(path))
    batches = read_shard(dataset, everything(dataset), (column,))
    return [row.values[column] for batch in batches for row in batch]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["a", None, "\u00e4\U0001f600", ""]),
        (pa.large_string(), ["a", None, "b"]),
        (pa.string_view(), ["a", None, "longer than twelve bytes"]),
        (pa.dictionary(pa.int32(), pa.string()), ["a", None, "a", "b"]),
        (pa.dictionary(pa.int8(), pa.large_string()), ["a", None, "a"]),
        (pa.binary(), [b"a", None, b"\xff"]),
        (pa.large_binary(), [b"a", None]),
        (pa.list_(MESSAGE), CHAT),
        (pa.large_list(MESSAGE), CHAT),
        (pa.list_(pa.string()), [["a", None], None, []]),
        (pa.map_(pa.string(), pa.int64()), [{"a": 1, "b": None}, None, {}]),
        (
            pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
            [{"a": 1, "b": ["x"]}, None],
        ),
        (pa.int64(), [1, None]),
        (pa.float64(), [1.5, None]),
        (pa.bool_(), [True, None]),
        (pa.null(), [None, None]),
    ],
    ids=str,
)
def test_c43_every_type_comes_out_as_it_went_in_and_can_be_kept(
    tmp_path: Path, kind: pa.DataType, values: list[Any]
) -> None:
    stored = [list(v.items()) if pa.types.is_map(kind) and v is not None else v for v in values]
    path = write_input(tmp_path / "in.parquet", {"x": pa.array(stored, kind)}, row_group_size=2)
    assert column_of(path) == values
    dataset = open_dataset(str(path))
    kept = pa.Table.from_batches(RowReader(dataset, ("x",)).batches(everything(dataset)))
    assert kept.schema == dataset.schema
    assert kept.column("x").to_pylist(maps_as_pydicts="strict") == values


def test_c43_row_groups_without_rows_and_files_without_rows_are_passed_over(
    tmp_path: Path,
) -> None:
    schema = pa.schema([("x", pa.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for rows in ([], ["1"], [], ["2", "3"], []):
            writer.write_table(pa.table({"x": pa.array(rows, pa.string())}))
    write_input(tmp_path / "b.parquet", schema.empty_table())
    write_input(tmp_path / "c.parquet", {"x": ["4"]})
    dataset = open_dataset(str(tmp_path))
    rows = [r for batch in read_shard(dataset, everything(dataset), ("x",)) for r in batch]
    assert [(r.row_id, r.values["x"]) for r in rows] == [
        ("a.parquet:0", "1"), ("a.parquet:1", "2"), ("a.parquet:2", "3"), ("c.parquet:0", "4"),
    ]  # fmt: skip
    assert [r.ordinal for r in rows] == [0, 1, 2, 3]


def test_c43_files_with_a_page_index_are_read(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    values = [str(i) for i in range(1000)]
    pq.write_table(pa.table({"x": values}), path, write_page_index=True, data_page_size=64)
    assert column_of(path) == values


def test_c17_text_that_is_not_utf8_comes_as_bytes_and_stops_no_other_row() -> None:
    raw = pa.array([b"ok", b"\xff\xfe", None])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers(), raw.null_count)
    assert to_values(text) == ["ok", b"\xff\xfe", None]
    pairs = pa.StructArray.from_arrays([pa.array(["u"] * 3), text], ["role", "content"])
    chat = pa.ListArray.from_arrays([0, 1, 3], pairs)
    assert to_values(chat) == [
        [{"role": "u", "content": "ok"}],
        [{"role": "u", "content": b"\xff\xfe"}, {"role": "u", "content": None}],
    ]


def test_c17_times_that_python_cannot_hold_come_as_text() -> None:
    assert to_values(pa.array([1], pa.timestamp("ns"))) == ["1970-01-01 00:00:00.000000001"]
    assert to_values(pa.array([[1]], pa.list_(pa.timestamp("ns")))) == [
        ["1970-01-01 00:00:00.000000001"]
    ]
    assert isinstance(to_values(pa.array([2**61], pa.timestamp("s")))[0], str)


def test_a_shard_inside_a_row_group_has_its_rows_and_their_place_in_the_file(
    tmp_path: Path,
) -> None:
    values = {"x": list(range(100)), "y": [str(i) for i in range(100)]}
    dataset = open_dataset(str(write_input(tmp_path / "in.parquet", values, row_group_size=40)))
    shard = Shard(3, (Span(0, 0, 30, 40, 0), Span(0, 1, 0, 7, 40)), 0)
    reader = RowReader(dataset, ("x",), batch_rows=8)
    rows = [r for batch in reader.rows(shard, skip={0, 16}) for r in batch]
    assert [r.values for r in rows] == [{"x": i} for i in range(31, 46)]
    assert [r.ordinal for r in rows] == list(range(1, 16))
    assert [r.row_id for r in rows] == [f"in.parquet:{i}" for i in range(31, 46)]
    reader.close()


def test_shards_in_order_open_each_row_group_once_and_any_order_is_right(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"x": list(range(60))}, row_group_size=30)
    dataset = open_dataset(str(path))
    shards = [
        Shard(i, (Span(0, i // 3, i % 3 * 10, i % 3 * 10 + 10, i // 3 * 30),), 0) for i in range(6)
    ]
    opened: list[str] = []

    class Watched:
        def open(self, path: str, mode: str, **options: Any) -> Any:
            opened.append(path)
            return dataset.fs.open(path, mode, **options)

    watched = Dataset(dataset.files, dataset.schema, 60, "", None, Watched())
    reader = RowReader(watched, ("x",), batch_rows=7)
    for shard in shards:
        values = [r.values["x"] for batch in reader.rows(shard) for r in batch]
        assert values == list(range(shard.index * 10, shard.index * 10 + 10))
    assert len(opened) == 2
    for shard in reversed(shards):
        values = [r.values["x"] for batch in reader.rows(shard) for r in batch]
        assert values == list(range(shard.index * 10, shard.index * 10 + 10))
    reader.close()


def test_hive_columns_are_columns_of_rows_and_of_kept_batches(tmp_path: Path) -> None:
    write_input(tmp_path / "lang=de" / "a.parquet", {"x": ["eins", "zwei"]})
    write_input(tmp_path / "lang=en%20gb" / "a.parquet", {"x": ["one"]})
    write_input(tmp_path / "lang=__HIVE_DEFAULT_PARTITION__" / "a.parquet", {"x": ["?"]})
    dataset = open_dataset(str(tmp_path))
    shard = everything(dataset)
    rows = [r for batch in read_shard(dataset, shard, ("lang", "x")) for r in batch]
    assert {(r.values["lang"], r.values["x"]) for r in rows} == {
        ("de", "eins"), ("de", "zwei"), ("en gb", "one"), (None, "?"),
    }  # fmt: skip
    only = [r.values for batch in read_shard(dataset, shard, ("lang",)) for r in batch]
    assert sorted(str(v["lang"]) for v in only) == ["None", "de", "de", "en gb"]
    assert rows[0].row_id.startswith("lang=")


def test_an_id_column_names_the_rows(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"x": ["a", "b"], "id": [7, 9]})
    dataset = open_dataset(str(path), id_column="id")
    check_unique_ids(dataset)
    rows = [r for batch in read_shard(dataset, everything(dataset), ("x",)) for r in batch]
    assert [r.row_id for r in rows] == ["7", "9"]


def test_duplicate_and_null_ids_are_refused_by_name(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"id": ["a", "b", "c", "b"]}, row_group_size=2)
    with pytest.raises(InputError, match="duplicates, such as 'b'"):
        check_unique_ids(open_dataset(str(path), id_column="id"))
    write_input(path, {"id": ["a", None]})
    with pytest.raises(InputError, match=r"'id' has a null \(row 1 of row group 0 in in.parquet\)"):
        check_unique_ids(open_dataset(str(path), id_column="id"))


def test_a_sample_is_spread_over_the_dataset_and_always_the_same(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"x": list(range(1000))}, row_group_size=10)
    dataset = open_dataset(str(path))
    sample = [row["x"] for row in sample_rows(dataset, ("x",), 32)]
    assert len(sample) == 32 and len(set(sample)) == 32
    assert min(sample) < 100 and max(sample) > 800
    assert sample == [row["x"] for row in sample_rows(dataset, ("x",), 32)]
    assert sample_rows(dataset, ("x",), 0) == []


def test_a_file_that_shrank_or_went_is_an_input_error(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"x": list(range(10))})
    dataset = open_dataset(str(path))
    write_input(path, {"x": [1]})
    with pytest.raises(InputError, match="fewer rows than its footer said"):
        list(read_shard(dataset, everything(dataset), ("x",)))
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        list(read_shard(dataset, everything(dataset), ("x",)))


MEASURE = """
import json, psutil, sys
from storage.rows import RowReader, whole
from storage.shards import Shard
from storage.source import open_dataset
dataset = open_dataset(sys.argv[1])
reader = RowReader(dataset, ("x",))
memory = psutil.Process().memory_info  # not ru_maxrss: a child begins with its parent's
before = memory().rss
rows = most = 0
for batch in reader.rows(Shard(0, tuple(whole(dataset)), 0)):
    rows += len(batch)
    most = max(most, memory().rss)
print(json.dumps({"rows": rows, "grown": most - before}))
"""


def test_c38_a_large_row_group_is_read_in_little_memory(tmp_path: Path) -> None:
    path, text = tmp_path / "in.parquet", "0123456789abcdef" * 512
    schema = pa.schema([("x", pa.string())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        texts = pa.array([text] * 16384)
        writer.write_table(pa.table([texts], schema=schema), row_group_size=1 << 20)
    assert pq.ParquetFile(path).num_row_groups == 1
    size = path.stat().st_size
    assert size > 128 << 20
    command = [sys.executable, "-c", MEASURE, str(path)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert found["rows"] == 16384
    assert found["grown"] < size * 0.6  # a whole column chunk is read at once without care


class CountingFileSystem(MemoryFileSystem):
    """An object store that counts the bytes it hands out, and the largest piece."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    ranges: list[int] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode != "rb":
            return file
        data = file.getvalue()
        ranges = self.ranges

        class Ranged(fsspec.spec.AbstractBufferedFile):
            def _fetch_range(self, start: int, end: int) -> bytes:
                ranges.append(end - start)
                return data[start:end]

        return Ranged(self, path, mode, size=len(data), block_size=1 << 16)


def test_c39_one_column_of_one_shard_is_read_by_ranges_not_the_whole_file(tmp_path: Path) -> None:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    texts = [str(i) * 200 for i in range(8192)]
    path = tmp_path / "in.parquet"
    table = pa.table({"other": [text[::-1] for text in texts], "x": texts})
    pq.write_table(table, path, row_group_size=1024, compression="none", use_dictionary=False)
    size = path.stat().st_size
    CountingFileSystem().pipe_file("/bucket/in.parquet", path.read_bytes())
    dataset = open_dataset("counted://bucket/in.parquet")
    assert sum(CountingFileSystem.ranges) < 2 << 20 < size // 4  # the end of the file only
    CountingFileSystem.ranges.clear()
    group = next(iter(whole(dataset)))
    rows = [r for batch in read_shard(dataset, Shard(0, (group,), 0), ("x",)) for r in batch]
    assert [r.values["x"] for r in rows] == texts[:1024]
    assert sum(CountingFileSystem.ranges) < size // 8
    assert max(CountingFileSystem.ranges) < 3 << 20


def test_c42_nested_messages_are_read_by_slices_inside_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`read_table` and `to_batches` fail on such a column when it holds over 2 GB."""
    chats = [[{"role": "user", "content": f"{i} " * 50}] * 3 for i in range(2000)]
    path = write_input(tmp_path / "in.parquet", {"x": pa.array(chats, pa.list_(MESSAGE))})
    assert pq.ParquetFile(path).num_row_groups == 1

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a whole row group was asked for")

    for name in ("read", "read_row_group", "read_row_groups"):
        monkeypatch.setattr(pq.ParquetFile, name, refused)
    sizes: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def watched(self: Any, **options: Any) -> Any:
        for batch in iter_batches(self, **options):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    assert column_of(path) == chats
    assert max(sizes) <= 256 and sum(sizes) == 2000


def test_batches_have_fewer_rows_where_rows_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.rows.BATCH_BYTES", 1 << 16)
    path = tmp_path / "in.parquet"
    table = pa.table({"x": [f"{i:04}" * 2048 for i in range(64)]})
    pq.write_table(table, path, use_dictionary=False, compression="none")
    dataset = open_dataset(str(path))
    sizes = [len(batch) for batch in read_shard(dataset, everything(dataset), ("x",))]
    assert sum(sizes) == 64 and max(sizes) <= 8
