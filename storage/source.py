"""The input: files, globs and folders of Parquet, of which only footers are read here."""

from __future__ import annotations

import posixpath
import re
import struct
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.errors import InputError
from storage.hive import NULL_FOLDER
from storage.remote import open_filesystem

MAGIC = b"PAR1"
TAIL_BYTES = 256 << 10
REMOTE_FOOTERS = 16
"""So many footers are read at a time from an object store."""
GLOB = re.compile(r"[*?\[]")
ENDINGS = (".parquet", ".parq", ".pq")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group, as its footer tells.

    Attributes:
        num_rows: rows.
        column_bytes: uncompressed bytes by top-level column.
    """

    num_rows: int
    column_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file of a dataset.

    Attributes:
        path: as the file system wants it.
        name: relative to the dataset's root, with slashes; the file's identity.
        num_rows: rows.
        row_groups: in order.
        partitions: hive columns (`key=value` folders) of this file.
        fingerprint: of size, footer and the last `TAIL_BYTES`; a copy has the same. An edit of a
            larger file that keeps its size, and the sizes and extremes of all columns, goes
            unnoticed: to see it, all data would have to be read.
    """

    path: str
    name: str
    num_rows: int
    row_groups: tuple[RowGroup, ...]
    partitions: Mapping[str, str | None]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """All files of an input, in order of their names.

    Attributes:
        schema: of all files, hive columns behind the files' own.
        id_column: the column of row ids, if the user named one.
        fingerprint: of all names and files.
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: int
    fingerprint: str
    id_column: str | None = None
    fs: Any = field(default=None, compare=False, repr=False)


def open_dataset(
    path: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    id_column: str | None = None,
) -> Dataset:
    """Find the files of an input and read their footers.

    Args:
        path: a Parquet file, a glob, a folder (read recursively; names that start with `_` or `.`
            are left out) or an fsspec URL of any of these.
        storage_options: for fsspec.
        id_column: the column that names the rows.

    Raises:
        InputError: nothing there, not Parquet, or files that do not go together.
    """
    try:
        fs, root = open_filesystem(path, storage_options, fault=InputError, cached_listings=True)
    except (ImportError, ValueError) as fault:
        raise InputError(f"the input {path!r} cannot be opened: {fault}") from fault
    read = _read_footers(fs, _find(fs, path, root.rstrip("/")))
    files = tuple(file for file, _ in read)
    schema = _with_partitions(_common_schema(read), files)
    if id_column is not None and id_column not in schema.names:
        raise InputError(
            f"the id column {id_column!r} is not in the input; columns: {', '.join(schema.names)}"
        )
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.fingerprint}\0".encode("utf-8", "surrogatepass"))
    return Dataset(
        files=files,
        schema=schema,
        num_rows=sum(file.num_rows for file in files),
        fingerprint=digest.hexdigest(),
        id_column=id_column,
        fs=fs,
    )


def _find(fs: Any, path: str, root: str) -> list[tuple[str, str]]:
    """(full path, relative name) of every data file, sorted by name."""
    fs.invalidate_cache()  # a long-lived process may have listed it before
    try:
        if fs.isdir(root):
            found, base = fs.find(root), root
        elif fs.exists(root):
            return [(root, posixpath.basename(root))]
        elif GLOB.search(path):
            found = _expand(fs, root)
            base = posixpath.dirname(GLOB.split(root, maxsplit=1)[0])
            if not found:
                raise InputError(f"no file matches {path!r}")
        else:
            raise InputError(f"there is nothing at {path!r}")
    except PermissionError as fault:
        raise InputError(f"no permission to read {path!r}: {fault}") from fault
    files = sorted((full[len(base) :].lstrip("/"), full) for full in found)
    parquet = [(full, name) for name, full in files if name.endswith(ENDINGS) and not _hidden(name)]
    if not parquet:
        raise InputError(f"no .parquet file in {path!r} ({len(files)} other files)")
    return parquet


def _expand(fs: Any, pattern: str) -> list[str]:
    """Files that match, and all files in folders that match."""
    found: set[str] = set()
    for full in fs.glob(pattern):
        found.update(fs.find(full) if fs.isdir(full) else [full])
    return sorted(found)


def _hidden(name: str) -> bool:
    *folders, own = name.split("/")
    return own.startswith(("_", ".")) or any(
        folder.startswith(("_", ".")) and "=" not in folder for folder in folders
    )


def _read_footers(fs: Any, found: list[tuple[str, str]]) -> list[tuple[InputFile, pa.Schema]]:
    """Of all files, in their order. On an object store several at a time: each is a few waits."""
    if not getattr(fs, "async_impl", False):
        return [_read_footer(fs, full, name) for full, name in found]
    with ThreadPoolExecutor(REMOTE_FOOTERS) as pool:
        return list(pool.map(lambda pair: _read_footer(fs, *pair), found))


def _read_footer(fs: Any, full: str, name: str) -> tuple[InputFile, pa.Schema]:
    try:
        size = fs.size(full)
        with fs.open(full, "rb") as handle:
            fingerprint = _footer_fingerprint(handle, size)
            handle.seek(0)
            parquet = pq.ParquetFile(handle)
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except (pa.ArrowException, ValueError, OSError, struct.error) as fault:
        raise InputError(f"{full} is not a readable Parquet file: {fault}") from fault
    _check_names(schema.names, full)
    columns = _column_names(metadata, schema.names)
    groups = tuple(_row_group(metadata, index, columns) for index in range(metadata.num_row_groups))
    schema = schema.remove_metadata()
    partitions = _partitions(name)
    return InputFile(full, name, metadata.num_rows, groups, partitions, fingerprint), schema


def _footer_fingerprint(handle: Any, size: int) -> str:
    if size < 12:
        raise ValueError(f"it has only {size} bytes")
    handle.seek(size - 8)
    tail = handle.read(8)
    if tail[4:] != MAGIC:
        raise ValueError("it does not end as a Parquet file does")
    (length,) = struct.unpack("<I", tail[:4])
    if length + 12 > size:
        raise ValueError(f"its footer of {length} bytes is larger than the file")
    handle.seek(size - min(size, max(TAIL_BYTES, 8 + length)))
    digest = xxhash.xxh3_128(handle.read())
    digest.update(str(size).encode())
    return digest.hexdigest()


def _column_names(metadata: Any, names: list[str]) -> list[str]:
    """The column of the schema that each leaf of a Parquet file belongs to. A column's own name may
    have dots.
    """
    longest_first = sorted(names, key=len, reverse=True)
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    return [
        next(name for name in longest_first if f"{path}.".startswith(f"{name}.")) for path in paths
    ]


def _row_group(metadata: Any, index: int, columns: list[str]) -> RowGroup:
    group = metadata.row_group(index)
    column_bytes = dict.fromkeys(columns, 0)
    for number, name in enumerate(columns):
        column_bytes[name] += group.column(number).total_uncompressed_size
    return RowGroup(group.num_rows, column_bytes)


def _partitions(name: str) -> dict[str, str | None]:
    """Hive columns from the folders of a relative name."""
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        if equals:
            found[unquote(key)] = None if value == NULL_FOLDER else unquote(value)
    return found


def _check_names(names: list[str], full: str) -> None:
    if not names:
        raise InputError(f"{full} has no columns")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{full} has {len(twice)} column names twice, such as {twice[0]!r}")


def _with_partitions(schema: pa.Schema, files: tuple[InputFile, ...]) -> pa.Schema:
    """The files' schema with their hive columns behind."""
    keys = list(files[0].partitions)
    for file in files:
        if list(file.partitions) != keys:
            raise InputError(
                f"{file.name} has the folder columns {list(file.partitions)}, "
                f"{files[0].name} has {keys}"
            )
    for key in keys:
        if key in schema.names:
            raise InputError(f"column {key!r} is both in the files and in their folders' names")
        schema = schema.append(pa.field(key, pa.string()))
    return schema


def _common_schema(read: list[tuple[InputFile, pa.Schema]]) -> pa.Schema:
    """The one schema of all files. Types are the same, but a column of nulls goes with any."""
    first, schema = read[0]
    for file, other in read[1:]:
        for column in sorted(set(schema.names) ^ set(other.names)):
            have, lack = (first, file) if column in schema.names else (file, first)
            raise InputError(f"column {column!r} is in {have.name} but not in {lack.name}")
        schema = pa.schema(
            [_common_field(field, other.field(field.name), first, file) for field in schema]
        )
    return schema


def _common_field(a: pa.Field, b: pa.Field, first: InputFile, file: InputFile) -> pa.Field:
    if pa.types.is_null(a.type):
        return b
    if a.type != b.type and not pa.types.is_null(b.type):
        raise InputError(
            f"column {a.name!r} is {a.type} in {first.name} and {b.type} in {file.name}"
        )
    return a
