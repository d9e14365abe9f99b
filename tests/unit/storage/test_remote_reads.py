"""What is fetched from a remote store: the wanted columns, once (C39)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from storage.rows import read_shard, whole
from storage.shards import Shard, Span
from storage.source import Dataset, open_dataset


class RangeFile(AbstractBufferedFile):
    """A file that is fetched by ranges, with fsspec's own buffering, as a file of s3fs is."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.fetched.append(end - start)
        return Path(self.path).read_bytes()[start:end]


class RangeFileSystem(AbstractFileSystem):
    """A folder as an object store that notes how many bytes it sends."""

    protocol = "ranged"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fetched: list[int] = []

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        place = Path(self._strip_protocol(path))
        if not place.exists():
            raise FileNotFoundError(path)
        kind = "directory" if place.is_dir() else "file"
        return {"name": str(place), "type": kind, "size": place.stat().st_size}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> RangeFile:
        options = {name: value for name, value in options.items() if value is not None}
        return RangeFile(self, path, mode, **options)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three columns of 4.9 MB in each of two row groups."""
    path = tmp_path_factory.mktemp("remote") / "big.parquet"
    columns = {
        name: [f"{name}{i:06}" * 120 for i in range(8192)] for name in ("aaaa", "bbbb", "cc")
    }
    pq.write_table(
        pa.table(columns), path, row_group_size=4096, compression="none", use_dictionary=False
    )
    return path


@pytest.fixture
def dataset(big: Path) -> Dataset:
    fsspec.register_implementation("ranged", RangeFileSystem, clobber=True)
    return open_dataset(f"ranged://{big}")


def read(dataset: Dataset, span: Span, *columns: str) -> int:
    dataset.fs.fetched.clear()
    return sum(map(len, read_shard(dataset, Shard(0, (span,), 0), columns)))


def test_c39_only_footers_are_read_to_open_a_dataset(big: Path, dataset: Dataset) -> None:
    assert sum(dataset.fs.fetched) < big.stat().st_size / 40


def test_c39_a_small_slice_fetches_a_small_part(big: Path, dataset: Dataset) -> None:
    span = list(whole(dataset))[1]
    assert read(dataset, span._replace(stop=50), "cc") == 50
    assert sum(dataset.fs.fetched) < big.stat().st_size / 5


def test_c39_columns_side_by_side_are_fetched_once(dataset: Dataset) -> None:
    """A read-ahead with one window for the file would fetch each of them several times."""
    span = next(whole(dataset))
    assert read(dataset, span, "aaaa", "bbbb") == 4096
    group = dataset.files[0].row_groups[0]
    needed = group.column_bytes["aaaa"] + group.column_bytes["bbbb"]
    assert needed < sum(dataset.fs.fetched) < 1.05 * needed
    assert len(dataset.fs.fetched) < 12
