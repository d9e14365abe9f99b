"""Checks of safetensors files before anything maps them into memory.

A file is: 8 bytes (length of the header, little-endian), the header (a JSON object from tensor
names to dtype, shape and the half-open interval of the data they own), the data. The intervals must
tile the data: no overlap, no hole, nothing beyond the end. So a truncated download, a file of
another format and a hostile header are found by reading a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from workers.errors import ModelError
from workers.loading.jsonfile import parse_object

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """One tensor: `[begin, end)` are bytes counted from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The checked header of a safetensors file.

    Raises:
        ModelError: the file is missing, truncated, damaged or no safetensors file.
    """
    header_bytes, file_size = _header_bytes(path)
    raw = parse_object(header_bytes, where=f"the header of {path}")
    raw.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields) for name, fields in raw.items()}
    _check_tiling(path, entries, data_size=file_size - 8 - len(header_bytes))
    return entries


def data_start(path: Path) -> int:
    """Where the data of a file begins, whose header has been read before."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _header_bytes(path: Path) -> tuple[bytes, int]:
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
                raise ModelError(
                    f"{path} is damaged: {file_size} bytes long, with a header said to have "
                    f"{length}; "
                    "copy the file again (a Git LFS pointer in its place has about 130 bytes)"
                )
            return file.read(length), file_size
    except OSError as fault:
        raise ModelError(f"{path} cannot be read ({fault}); copy the model again") from fault


def _entry(path: Path, name: str, fields: object) -> TensorEntry:
    if not isinstance(fields, dict):
        raise ModelError(
            f"{path}: the header entry of tensor {name!r} is no object; copy the file again"
        )
    entry = cast("dict[str, object]", fields)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(
            f"{path}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}"
        )
    dims, interval = _sizes(shape), _sizes(offsets)
    if dims is None or interval is None or len(interval) != 2:
        raise ModelError(
            f"{path}: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}; copy the "
            "file again"
        )
    begin, end = interval
    want = math.prod(dims) * DTYPE_BITS[dtype] // 8
    if end - begin != want:
        raise ModelError(
            f"{path}: tensor {name!r} of {dtype} {list(dims)} needs {want} bytes but owns "
            f"[{begin}, {end}); "
            "copy the file again"
        )
    return TensorEntry(dtype, dims, begin, end)


def _sizes(value: object) -> tuple[int, ...] | None:
    """A JSON list of non-negative integers below 2**63; None for anything else."""
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    if not all(type(item) is int and 0 <= item < 2**63 for item in items):
        return None
    return tuple(cast("list[int]", items))


def _check_tiling(path: Path, entries: Mapping[str, TensorEntry], *, data_size: int) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            fault = (
                "overlaps another tensor" if entry.begin < position else "leaves a hole before it"
            )
            raise ModelError(
                f"{path}: tensor {name!r} at [{entry.begin}, {entry.end}) {fault}; copy the file "
                "again"
            )
        position = entry.end
    if position != data_size:
        raise ModelError(
            f"{path} is {'truncated' if position > data_size else 'too long'}: its tensors need "
            f"{position} bytes "
            f"of data and it has {data_size}; copy the file again"
        )
