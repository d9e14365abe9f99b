"""Finding an input: one file, a glob, a folder or a URL; and saying what is wrong with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputError
from storage.source import open_dataset
from tests.unit.storage.outputs import write_input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """b.parquet, a.parquet and deep/c.parquet of 2 rows each, and names to leave out."""
    root = tmp_path / "data"
    for name in ("b", "a", "deep/c"):
        write_input(root / f"{name}.parquet", {"x": [f"{name}1", f"{name}2"]})
    for name in ("_SUCCESS", ".crc.parquet", "_tmp/d.parquet", ".hidden/e.parquet", "note.txt"):
        place = root / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"not parquet")
    return root


def names(path: str | Path) -> list[str]:
    return [file.name for file in open_dataset(str(path)).files]


def test_a_folder_is_read_deeply_in_order_of_names(folder: Path) -> None:
    dataset = open_dataset(str(folder))
    assert [file.name for file in dataset.files] == ["a.parquet", "b.parquet", "deep/c.parquet"]
    assert dataset.num_rows == 6
    assert dataset.schema.names == ["x"]
    assert names(f"{folder}/") == names(folder)


def test_a_file_a_glob_and_a_url_are_read_by_the_same_code(folder: Path) -> None:
    assert names(folder / "a.parquet") == ["a.parquet"]
    assert names(f"{folder}/*.parquet") == ["a.parquet", "b.parquet"]
    assert names(f"{folder}/[ab].parquet") == ["a.parquet", "b.parquet"]
    assert names(f"{folder}/**/*.parquet") == ["a.parquet", "b.parquet", "deep/c.parquet"]
    assert names(f"{folder}/dee*") == ["deep/c.parquet"]
    assert names(f"file://{folder}") == names(folder)


def test_an_object_store_is_read_by_the_same_code(folder: Path) -> None:
    fs = fsspec.filesystem("memory")
    for path in sorted(folder.rglob("*.parquet")):
        fs.pipe_file(f"{folder}/{path.relative_to(folder)}", path.read_bytes())
    url = f"memory:/{folder}"
    local, remote = open_dataset(str(folder)), open_dataset(url)
    assert [f.name for f in remote.files] == [f.name for f in local.files]
    assert remote.fingerprint == local.fingerprint
    assert names(f"{url}/*.parquet") == ["a.parquet", "b.parquet"]
    assert names(f"{url}/a.parquet") == ["a.parquet"]


def test_a_name_with_glob_characters_is_first_a_name(tmp_path: Path) -> None:
    path = write_input(tmp_path / "part[1]*.parquet", {"x": [1]})
    write_input(tmp_path / "part1.parquet", {"x": [1]})
    assert names(path) == ["part[1]*.parquet"]


def test_files_that_appear_later_are_found(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", {"x": [1]})
    assert names(tmp_path) == ["a.parquet"]
    write_input(tmp_path / "b.parquet", {"x": [1]})
    assert names(tmp_path) == ["a.parquet", "b.parquet"]


def test_hive_folders_are_columns_of_text(tmp_path: Path) -> None:
    for year, lang in (
        ("2024", "de"),
        ("2025", "a%2Fb%3D c%C3%A4"),
        ("2025", "__HIVE_DEFAULT_PARTITION__"),
    ):
        write_input(tmp_path / f"_year={year}" / f"lang={lang}" / "f.parquet", {"x": [1]})
    dataset = open_dataset(str(tmp_path))
    assert dataset.schema.names == ["x", "_year", "lang"]
    assert dataset.schema.field("lang").type == pa.string()
    assert [tuple(file.partitions.values()) for file in dataset.files] == [
        ("2024", "de"), ("2025", None), ("2025", "a/b= c\u00e4"),
    ]  # fmt: skip


def test_row_groups_and_column_bytes_come_from_the_footer(tmp_path: Path) -> None:
    rows = {"x": ["abc"] * 5, "s": [{"p": 1, "q": 2}] * 5}
    file = open_dataset(str(write_input(tmp_path / "a.parquet", rows, row_group_size=2))).files[0]
    assert [group.num_rows for group in file.row_groups] == [2, 2, 1]
    assert all(set(g.column_bytes) == {"x", "s"} for g in file.row_groups)
    assert all(size > 0 for g in file.row_groups for size in g.column_bytes.values())


def test_c09_a_copy_has_the_same_fingerprint_and_an_edit_has_not(tmp_path: Path) -> None:
    path = write_input(tmp_path / "one" / "a.parquet", {"x": ["a", "m", "z"]})
    first = open_dataset(str(path)).fingerprint
    copy = tmp_path / "two" / "a.parquet"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    os.utime(copy, (1, 1))
    assert open_dataset(str(copy)).fingerprint == first
    assert open_dataset(str(copy.parent)).fingerprint == first


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_c09_an_edit_that_keeps_size_and_statistics_is_noticed(
    tmp_path: Path, compression: str
) -> None:
    """The footers are the same: one letter between the column's extremes has changed."""
    path = tmp_path / "a.parquet"
    seen: set[tuple[int, bytes]] = set()
    prints: set[str] = set()
    for middle in ("m", "n"):
        pq.write_table(pa.table({"x": ["a", middle, "z"]}), path, compression=compression)
        data = path.read_bytes()
        length = int.from_bytes(data[-8:-4], "little")
        seen.add((len(data), data[-8 - length :]))
        prints.add(open_dataset(str(path)).fingerprint)
    assert len(seen) == 1
    assert len(prints) == 2


def test_c09_renamed_added_and_lost_files_change_the_fingerprint(folder: Path) -> None:
    prints = [open_dataset(str(folder)).fingerprint]
    (folder / "a.parquet").rename(folder / "aa.parquet")
    prints.append(open_dataset(str(folder)).fingerprint)
    write_input(folder / "z.parquet", {"x": ["1"]})
    prints.append(open_dataset(str(folder)).fingerprint)
    (folder / "b.parquet").unlink()
    prints.append(open_dataset(str(folder)).fingerprint)
    assert len(set(prints)) == 4


def test_empty_files_are_files(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", pa.schema([("x", pa.string())]).empty_table())
    dataset = open_dataset(str(tmp_path))
    assert (dataset.num_rows, len(dataset.files)) == (0, 1)


def test_a_column_of_nulls_goes_with_any_type(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", {"x": pa.nulls(1)})
    write_input(tmp_path / "b.parquet", {"x": pa.array([1.5])})
    write_input(tmp_path / "c.parquet", {"x": pa.nulls(1)})
    assert open_dataset(str(tmp_path)).schema.field("x").type == pa.float64()


def test_files_that_differ_are_named_with_the_column(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", {"x": [1], "y": [1]})
    write_input(tmp_path / "b.parquet", {"x": ["1"], "y": [1]})
    with pytest.raises(InputError, match=r"'x' is int64 in a.parquet and string in b.parquet"):
        open_dataset(str(tmp_path))
    write_input(tmp_path / "b.parquet", {"x": [1]})
    with pytest.raises(InputError, match=r"'y' is in a.parquet but not in b.parquet"):
        open_dataset(str(tmp_path))


def test_folder_columns_that_differ_or_clash_are_named(tmp_path: Path) -> None:
    write_input(tmp_path / "k=1" / "a.parquet", {"x": [1]})
    write_input(tmp_path / "b.parquet", {"x": [1]})
    with pytest.raises(InputError, match=r"folder columns \['k'\]"):
        open_dataset(str(tmp_path))
    (tmp_path / "b.parquet").unlink()
    write_input(tmp_path / "k=1" / "a.parquet", {"k": [1]})
    with pytest.raises(InputError, match="'k' is both in the files and in their folders"):
        open_dataset(str(tmp_path))


def test_what_cannot_be_read_is_an_input_error(folder: Path, tmp_path: Path) -> None:
    cases = {
        "nowhere": "there is nothing at",
        "data/*.csv": "no file matches",
        "data/*.txt": "no .parquet file",
        "empty": "no .parquet file",
        "gone://bucket": "cannot be opened",
    }
    (tmp_path / "empty").mkdir()
    for name, message in cases.items():
        path = name if "://" in name else str(tmp_path / name)
        with pytest.raises(InputError, match=message):
            open_dataset(path)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"x" * 100, b"\xff" * 92 + b"\xff\xff\xff\x7fPAR1"])
def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"bad\.parquet is not a readable Parquet file"):
        open_dataset(str(path))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_input(tmp_path / "cut.parquet", {"x": list(range(1000))})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut\.parquet is not a readable"):
        open_dataset(str(path))


def test_a_missing_id_column_is_named_with_those_there_are(folder: Path) -> None:
    with pytest.raises(InputError, match="'id' is not in the input; columns: x"):
        open_dataset(str(folder), id_column="id")
