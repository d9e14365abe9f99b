"""The input: files, globs and folders of Parquet, of which only footers are read here."""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.errors import InputError

MAGIC = b"PAR1"


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
        fingerprint: of size and footer. Every edit of a Parquet file changes its footer; a copy
            does not.
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
            are
            left out) or an fsspec URL of any of these.
        storage_options: for fsspec.
        id_column: the column that names the rows.

    Raises:
        InputError: nothing there, not Parquet, or files that do not go together.
    """
    try:
        fs, root = fsspec.core.url_to_fs(path, **dict(storage_options or {}))
    except (ImportError, ValueError) as fault:
        raise InputError(f"the input {path!r} cannot be opened: {fault}") from fault
    names = _find(fs, path, root.rstrip("/"))
    files: list[InputFile] = []
    schema: pa.Schema | None = None
    for full, name in names:
        file, own = _read_footer(fs, full, name)
        schema = own if schema is None else _same_schema(schema, own, names[0][1], name)
        files.append(file)
    assert schema is not None
    keys = _partition_keys(files)
    clash = [key for key in keys if key in schema.names]
    if clash:
        raise InputError(f"column {clash[0]!r} is both in the files and in their folders' names")
    for key in keys:
        schema = schema.append(pa.field(key, pa.string()))
    if id_column is not None and id_column not in schema.names:
        raise InputError(
            f"the id column {id_column!r} is not in the input; columns: {', '.join(schema.names)}"
        )
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.fingerprint}\0".encode())
    return Dataset(
        files=tuple(files),
        schema=schema,
        num_rows=sum(file.num_rows for file in files),
        fingerprint=digest.hexdigest(),
        id_column=id_column,
        fs=fs,
    )


def _find(fs: Any, path: str, root: str) -> list[tuple[str, str]]:
    """(full path, relative name) of every data file, sorted by name."""
    try:
        if any(mark in path for mark in "*?["):
            found = [full for full in fs.glob(root) if not fs.isdir(full)]
            base = posixpath.dirname(root.split("*")[0].split("?")[0].split("[")[0])
            if not found:
                raise InputError(f"no file matches {path!r}")
        elif fs.isdir(root):
            found, base = fs.find(root), root
        elif fs.exists(root):
            return [(root, posixpath.basename(root))]
        else:
            raise InputError(f"there is nothing at {path!r}")
    except PermissionError as fault:
        raise InputError(f"no permission to read {path!r}: {fault}") from fault
    files = sorted((full[len(base) :].lstrip("/"), full) for full in found)
    shown = [(full, name) for name, full in files if not _hidden(name)]
    parquet = [(full, name) for full, name in shown if name.endswith((".parquet", ".parq", ".pq"))]
    if not parquet:
        raise InputError(f"no .parquet file in {path!r} ({len(files)} other files)")
    return parquet


def _hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


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
    groups = tuple(_row_group(metadata, index) for index in range(metadata.num_row_groups))
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
    handle.seek(size - 8 - length)
    digest = xxhash.xxh3_128(handle.read(length))
    digest.update(str(size).encode())
    return digest.hexdigest()


def _row_group(metadata: Any, index: int) -> RowGroup:
    group = metadata.row_group(index)
    column_bytes: dict[str, int] = {}
    for column in range(group.num_columns):
        chunk = group.column(column)
        top = chunk.path_in_schema.split(".", 1)[0]
        column_bytes[top] = column_bytes.get(top, 0) + chunk.total_uncompressed_size
    return RowGroup(group.num_rows, column_bytes)


def _partitions(name: str) -> dict[str, str | None]:
    """Hive columns from the folders of a relative name."""
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        if equals:
            text = unquote(value)
            found[unquote(key)] = None if text == "__HIVE_DEFAULT_PARTITION__" else text
    return found


def _partition_keys(files: list[InputFile]) -> list[str]:
    keys = list(files[0].partitions)
    for file in files:
        if list(file.partitions) != keys:
            raise InputError(
                f"{file.name} has the folder columns {list(file.partitions)}, {files[0].name} has {keys}"
            )
    return keys


def _same_schema(first: pa.Schema, other: pa.Schema, first_name: str, name: str) -> pa.Schema:
    for column in sorted(set(first.names) ^ set(other.names)):
        have, lack = (first_name, name) if column in first.names else (name, first_name)
        raise InputError(f"column {column!r} is in {have} but not in {lack}")
    for column in first.names:
        kinds = first.field(column).type, other.field(column).type
        if (
            kinds[0] != kinds[1]
            and not pa.types.is_null(kinds[0])
            and not pa.types.is_null(kinds[1])
        ):
            raise InputError(
                f"column {column!r} is {kinds[0]} in {first_name} and {kinds[1]} in {name}"
            )
    return pa.schema(
        [
            other.field(column)
            if pa.types.is_null(first.field(column).type)
            else first.field(column)
            for column in first.names
        ]
    )
