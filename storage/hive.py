"""Keys as folder names, `key=value`, as Hive, pyarrow and DuckDB read them.

Two keys never share a folder, and what reads the folders reads the keys: letters (of any script)
and digits stand for themselves, everything else is percent-encoded. Null is `NULL_FOLDER`, and an
empty string nothing. Words that readers take for null are encoded where they are strings: DuckDB
then reads them as they were; pyarrow decodes before it compares, so it alone reads the one string
`__HIVE_DEFAULT_PARTITION__` as null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import InputError

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
MAX_SEGMENT_BYTES = 255
"""File systems take no longer names."""
_PLAIN = re.compile(r"[A-Za-z0-9._~-]*")


def key_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The key columns with the types that readers of the folders give them.

    Raises:
        InputError: a column is missing, named twice, or of a type that no folder name can hold.
    """
    lower = [name.lower() for name in columns]
    for name in columns:
        if lower.count(name.lower()) > 1:
            raise InputError(f"the input is to be partitioned by {name!r} twice; name it once")
        if name not in schema.names:
            raise InputError(
                f"the input is to be partitioned by {name!r}, but it has {', '.join(schema.names)}"
            )
    return pa.schema([pa.field(name, _key_type(name, schema.field(name).type)) for name in columns])


def _key_type(name: str, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _key_type(name, kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_null(kind):
        return pa.string()
    if (
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_timestamp(kind)
        or kind in (pa.float32(), pa.float64())
    ):
        return kind
    raise InputError(
        f"the input cannot be partitioned by {name!r}: a folder name cannot hold {kind}; make a "
        "column of text, numbers, dates or times of it"
    )


def as_keys(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """The key columns of a batch, in the types of `key_schema`.

    Raises:
        InputError: a key is text that is no Unicode.
    """
    arrays: list[pa.Array] = []
    for field in schema:
        column = batch.column(field.name)
        if column.type != field.type:
            column = column.cast(field.type)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as fault:
            raise InputError(
                f"the input cannot be partitioned by {field.name!r}: a key is not UTF-8 ({fault})"
            ) from fault
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=schema)


def key_texts(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Keys as text, null where they are: equal texts are equal keys. Zero has one sign."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no rows
        array = pa.array([], array.type)
    if pa.types.is_floating(array.type):
        array = pc.call_function("add", [array, pa.scalar(0.0, array.type)])
    return array.cast(pa.string())


def folders(keys: pa.Table) -> pa.Array:
    """The folder of each row's key, such as `country=de/city=a%2Fb`.

    Args:
        keys: the key columns, of `as_keys`.

    Raises:
        InputError: a name would be longer than file systems take.
    """
    segments = [_segments(name, keys.column(name)) for name in keys.column_names]
    if len(segments) == 1:
        return segments[0]
    return pc.call_function("binary_join_element_wise", [*segments, pa.scalar("/")])


def _segments(name: str, column: pa.ChunkedArray) -> pa.Array:
    texts = key_texts(column).dictionary_encode()
    array = cast("pa.DictionaryArray", texts)
    names = [segment(name, value) for value in array.dictionary.to_pylist()]
    indices = array.indices
    if indices.null_count:
        names.append(segment(name, None))
        indices = indices.fill_null(len(names) - 1)
    return pa.array(names, pa.string()).take(indices)


def segment(column: str, text: str | None) -> str:
    """The folder name of one key column's value.

    Args:
        column: its name.
        text: see `key_texts`.

    Raises:
        InputError: it is longer than file systems take.
    """
    value = NULL_FOLDER if text is None else encoded(text)
    found = f"{encoded(column)}={value}"
    if len(found.encode()) > MAX_SEGMENT_BYTES:
        raise InputError(
            f"the key {column!r} has the value {_short(text)}, whose folder name would have "
            f"{len(found.encode())} bytes, and file systems take {MAX_SEGMENT_BYTES}; partition by "
            "something shorter, such as an id"
        )
    return found


def encoded(text: str) -> str:
    """A text as a part of a folder's name."""
    if text.upper() in (NULL_FOLDER, "NULL"):
        return f"%{ord(text[0]):02X}{text[1:]}"
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        letter if letter.isalnum() and letter.isprintable() else quote(letter, safe="-._~")
        for letter in text
    )


def _short(text: str | None, limit: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def runs_of(keys: pa.Table) -> np.ndarray:
    """The rows at which another key begins than that of the row before, without row 0; int64."""
    changed = np.zeros(max(0, keys.num_rows - 1), np.bool_)
    for column in keys.columns:
        array = key_texts(column) if pa.types.is_floating(column.type) else _whole(column)
        changed |= _changes(array)
    return np.flatnonzero(changed) + 1


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _changes(array: pa.Array) -> np.ndarray:
    """bool [N - 1]: a value is another one than that before it."""
    after, before = array.slice(1), array.slice(0, max(0, len(array) - 1))
    differ = pc.call_function("not_equal", [after, before]).fill_null(False)
    nulls = pc.call_function("xor", [after.is_null(), before.is_null()])
    return pc.call_function("or", [differ, nulls]).to_numpy(zero_copy_only=False)
