"""Grouping by keys: what a stable sort gives, with types left as they are, in bounded memory."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import grouping
from storage.errors import InputError, LedgerError, OutputInUse
from storage.grouping import GROUPED, group_by_keys, open_grouped
from storage.objects import ObjectStore
from storage.partitions import find_partitions
from storage.source import Dataset, open_dataset
from tests.unit.storage.outputs import write_input

MEMORY = 64 << 20


def grouped(dataset: Dataset, keys: list[str], folder: Path, **options: Any) -> Dataset:
    return group_by_keys(
        dataset,
        keys,
        columns=options.pop("columns", list(dataset.schema.names)),
        store=ObjectStore(str(folder / "out")),
        spill=folder / "spill",
        memory_bytes=options.pop("memory_bytes", MEMORY),
        **options,
    )


def table_of(dataset: Dataset) -> pa.Table:
    return pa.concat_tables([pq.ParquetFile(file.path).read() for file in dataset.files])


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)
@given(
    keys=st.lists(
        st.tuples(st.sampled_from(["a", "b", "ä", "", None]), st.sampled_from([1, 2, None])),
        max_size=40,
    ),
    group=st.integers(1, 9),
    bucket_bytes=st.sampled_from([1, 300, 1 << 20]),
    limit=st.none() | st.integers(1, 50),
)
def test_it_is_a_stable_sort_by_key(
    keys: list[tuple[str | None, int | None]],
    group: int,
    bucket_bytes: int,
    limit: int | None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "READ_ROWS", 5)
    monkeypatch.setattr("storage.identified.READ_ROWS", 5)
    monkeypatch.setattr(grouping, "MIN_MEMORY_BYTES", 1)
    order = grouping._order
    monkeypatch.setattr(
        grouping, "_order", lambda setting, _, threads: order(setting, MEMORY, threads)
    )
    folder = tmp_path_factory.mktemp("in")
    half = len(keys) // 2
    for number, held in enumerate([keys[:half], keys[half:]]):
        rows = {
            "s": pa.array([key[0] for key in held], pa.string()),
            "i": pa.array([key[1] for key in held], pa.int32()),
            "n": pa.array([number * half + n for n in range(len(held))], pa.int64()),
        }
        write_input(folder / "data" / f"{number}.parquet", pa.table(rows), row_group_size=group)
    dataset = open_dataset(str(folder / "data"))
    result = grouped(
        dataset, ["s", "i"], folder, columns=["n"], memory_bytes=4 * bucket_bytes, limit=limit
    )
    found = table_of(result)
    names = [f"0.parquet:{n}" for n in range(half)]
    names += [f"1.parquet:{n}" for n in range(len(keys) - half)]
    rows = list(zip(keys, range(len(keys)), names, strict=True))[:limit]
    runs: dict[Any, list[tuple[int, str]]] = {}
    for key, number, name in rows:
        runs.setdefault(key, []).append((number, name))
    shown: dict[Any, list[tuple[int, str]]] = {}
    for row in found.to_pylist():
        shown.setdefault((row["s"], row["i"]), []).append((row["n"], row["__row_id"]))
    assert shown == runs and found.num_rows == len(rows)
    assert find_partitions(result, ["s", "i"]).grouped
    assert result.id_column == "__row_id"
    assert not list((folder / "spill").iterdir())


def test_every_type_comes_out_as_it_was(tmp_path: Path) -> None:
    texts = pa.array([b"ok", b"\xff", None, b"\0", b""]).cast(pa.string(), safe=False)
    moment = 1_700_000_000_123_456_789
    columns: dict[str, pa.Array] = {
        "key": pa.array(["b", "a", "b", None, "a"]),
        "broken": texts,
        "large": pa.array(["x", None, "y", "z", "w"], pa.large_string()),
        "view": pa.array(["v" * 20, None, "y", "z", "w"], pa.string_view()),
        "bytes": pa.array([b"\xff", b"", None, b"a", b"b"]),
        "fixed": pa.array([b"ab", None, b"cd", b"ef", b"gh"], pa.binary(2)),
        "word": pa.array(["p", "q", None, "p", "q"]).dictionary_encode(),
        "coarse": pa.array(["p", "q", None, "p", "q"]).dictionary_encode().cast(
            pa.dictionary(pa.int8(), pa.string())
        ),
        "ns": pa.array([moment, None, 1, 2, 3], pa.timestamp("ns", "Europe/Berlin")),
        "time": pa.array([1, None, 2, 3, 4], pa.time64("ns")),
        "span": pa.array([1, None, 2, 3, 4], pa.duration("ns")),
        "day": pa.array([dt.date(1, 1, 1), None, dt.date(9999, 12, 31), dt.date.min, None]),
        "price": pa.array([Decimal("1.10"), None, Decimal("-3.00")] * 2)[:5],
        "half": pa.array(np.array([1, 2, 3, 4, 5], np.float16)),
        "wide": pa.array([2**64 - 1, None, 0, 1, 2], pa.uint64()),
        "none": pa.nulls(5),
        "chat": pa.array([[{"role": "user", "text": "a"}], [], None, [None], [{"role": "b"}]]),
        "map": pa.array(
            [[("k", 1)], [], None, [("l", None)], []], pa.map_(pa.string(), pa.int32())
        ),
        "vector": pa.array(
            [[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], pa.list_(pa.float32(), 2)
        ),
    }  # fmt: skip
    dataset = open_dataset(
        str(write_input(tmp_path / "in.parquet", pa.table(columns), row_group_size=2))
    )
    result = grouped(dataset, ["key"], tmp_path)
    assert result.schema == pa.schema([("__row_id", pa.string()), *dataset.schema])
    order = [3, 1, 4, 0, 2]
    views = pa.schema([f.with_type(pa.string()) if f.name == "view" else f for f in dataset.schema])
    stored = table_of(dataset).cast(views).take(order)
    found = table_of(result)
    assert found.schema.field("view").type == pa.string_view()
    found = found.cast(pa.schema([found.schema.field(0), *views]))
    keys = found.column("key").to_pylist()
    assert sorted(map(str, keys)) == ["None", "a", "a", "b", "b"]
    by_id = {name: n for n, name in enumerate(found.column("__row_id").to_pylist())}
    ours = found.take([by_id[f"in.parquet:{n}"] for n in order])
    for name in dataset.schema.names:
        assert ours.column(name).type == stored.column(name).type
        same = ours.column(name).combine_chunks(), stored.column(name).combine_chunks()
        if pa.types.is_dictionary(same[0].type):
            same = same[0].dictionary_decode(), same[1].dictionary_decode()
        assert same[0].equals(same[1]), name


def test_the_ids_of_the_input_are_kept(tmp_path: Path) -> None:
    rows = {"key": ["b", "a", "b"], "id": [b"x", b"\xff", b"y"]}
    file = write_input(tmp_path / "in.parquet", rows)
    result = grouped(open_dataset(str(file), id_column="id"), ["key"], tmp_path, columns=[])
    assert table_of(result).to_pylist() == [
        {"__row_id": "ff", "key": "a"},
        {"__row_id": "x", "key": "b"},
        {"__row_id": "y", "key": "b"},
    ]


def test_files_and_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "FILE_ROWS", 300)
    monkeypatch.setattr(grouping, "GROUP_ROWS", 100)
    monkeypatch.setattr("storage.files.GROUP_ROWS", 100)
    file = write_input(tmp_path / "in.parquet", {"key": [n % 7 for n in range(1000)]})
    result = grouped(open_dataset(str(file)), ["key"], tmp_path)
    assert [held.num_rows for held in result.files] == [300, 300, 300, 100]
    assert {group.num_rows for held in result.files for group in held.row_groups} == {100}


def test_an_empty_input_is_an_empty_file(tmp_path: Path) -> None:
    schema = pa.schema([("key", pa.string()), ("text", pa.string())])
    file = write_input(tmp_path / "in.parquet", schema.empty_table())
    result = grouped(open_dataset(str(file)), ["key"], tmp_path)
    assert result.num_rows == 0 and result.schema.names == ["__row_id", "key", "text"]


def test_an_error_of_the_caller_comes_through(tmp_path: Path) -> None:
    file = write_input(tmp_path / "in.parquet", {"key": ["a"] * 50}, row_group_size=5)
    for at in range(12):
        left = [at]

        def beat(left: list[int] = left) -> None:
            if left[0] == 0:
                raise OutputInUse("taken over")
            left[0] -= 1

        with pytest.raises(OutputInUse, match="taken over"):
            grouped(open_dataset(str(file)), ["key"], tmp_path, on_batch=beat)
        assert not list((tmp_path / "spill").iterdir())


def test_what_cannot_be_grouped_is_named(tmp_path: Path) -> None:
    file = write_input(tmp_path / "in.parquet", {"key": [[1]], "text": ["a"]})
    with pytest.raises(InputError, match="by 'key': a folder name cannot hold list"):
        grouped(open_dataset(str(file)), ["key"], tmp_path)
    (tmp_path / "spill").write_text("in the way")
    with pytest.raises(InputError, match="cannot be grouped by text within 64 MiB"):
        grouped(open_dataset(str(file)), ["text"], tmp_path)


def test_a_grouped_input_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"grouped input of .* is gone or damaged"):
        open_grouped(ObjectStore(str(tmp_path)))


def test_what_an_earlier_try_left_goes(tmp_path: Path) -> None:
    write_input(tmp_path / "out" / GROUPED / "part-00009.parquet", {"x": [1]})
    file = write_input(tmp_path / "in.parquet", {"key": ["b", "a"]})
    assert len(grouped(open_dataset(str(file)), ["key"], tmp_path).files) == 1


PEAK = """
import sys, threading, time
from pathlib import Path
import psutil
from storage.allocator import use_system_allocator
from storage.grouping import group_by_keys
from storage.objects import ObjectStore
from storage.partitions import find_partitions
from storage.source import open_dataset

use_system_allocator()
folder, memory = Path(sys.argv[1]), int(sys.argv[2])
dataset = open_dataset(str(folder / "in.parquet"))
me = psutil.Process()
find_partitions(dataset, ["key"])  # what is loaded once is no part of the peak
before, peak, ended = me.memory_info().rss, 0, False

def watch():
    global peak
    while not ended:
        peak = max(peak, me.memory_info().rss)
        time.sleep(0.005)

thread = threading.Thread(target=watch)
thread.start()
try:
    result = group_by_keys(
        dataset, ["key"], columns=["text"], store=ObjectStore(str(folder / "out")),
        spill=folder / "spill", memory_bytes=memory,
    )
finally:
    ended = True
    thread.join()
assert find_partitions(result, ["key"]).grouped and result.num_rows == dataset.num_rows
print(peak - before)
"""


@pytest.mark.slow
def test_an_input_much_larger_than_memory_is_grouped_within_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    num_bytes = 0
    schema = pa.schema([("key", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        for _ in range(40):
            numbers = rng.integers(0, 1 << 30, 10_000)
            table = pa.table(
                {
                    "key": [f"key-{number % 500}" for number in numbers],
                    "text": [f"{number} " * 140 for number in numbers],
                },
                schema=schema,
            )
            num_bytes += table.nbytes
            writer.write_table(table)
    assert num_bytes > 8 * MEMORY
    found = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), str(MEMORY)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(found.stdout) < 2.5 * MEMORY
