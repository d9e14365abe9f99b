"""Reads the header of a GGUF file without trusting it.

A GGUF file (version 2 or 3) is: "GGUF", version, number of tensors, number of metadata pairs, the
pairs, one description a tensor, padding, the data. Every count and length in it is compared with
the bytes that are left before anything is allocated, so a damaged or hostile file costs at most
time and memory in proportion to its size.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from workers.errors import ModelError

MAX_TENSORS = 1 << 16
MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""Tensor types that can be converted: name, elements a block, bytes a block."""


class GgufTensor(NamedTuple):
    """A tensor's description. `shape` is in row-major order (GGUF stores it reversed); the data is
    `[begin, end)` of the file.
    """

    type_id: int
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A checked GGUF header.

    Attributes:
        metadata: scalars, strings and lists by key.
        tensors: descriptions by name; their data lies within the file.
    """

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor as rows, shape (product of leading dimensions, bytes a row),
        mapped and not read.
        """
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        shape = (rows, (tensor.end - tensor.begin) // rows)
        return np.memmap(self.path, dtype=np.uint8, mode="r", offset=tensor.begin, shape=shape)


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a GGUF file.

    Raises:
        ModelError: the file is missing, truncated, damaged, or of a version or tensor type that is
            not supported.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelError(
                    f"{path} is no GGUF file: it has {path.stat().st_size} bytes; fetch it again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as fault:
        raise ModelError(f"{path} cannot be read ({fault})") from fault


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    reader = _Reader(path, data)
    num_tensors, num_pairs = _parse_start(reader)
    metadata: dict[str, object] = {}
    for _ in range(num_pairs):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"the metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.scalar("I"))
    descriptions = [_description(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise reader.damaged(f"its alignment is {alignment!r}")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, type_id, shape, offset in descriptions:
        if name in tensors:
            raise reader.damaged(f"tensor {name!r} appears twice")
        tensors[name] = _placed(reader, name, type_id, shape, start + offset)
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _parse_start(reader: _Reader) -> tuple[int, int]:
    magic, version = reader.take(4), reader.scalar("I")
    if magic != b"GGUF":
        raise ModelError(f"{reader.path} is no GGUF file: it starts with {magic!r}; fetch it again")
    if version not in (2, 3):
        raise ModelError(
            f"{reader.path} has GGUF version {version}; versions 2 and 3 are supported"
        )
    num_tensors, num_pairs = reader.scalar("Q"), reader.scalar("Q")
    if num_tensors > MAX_TENSORS or num_tensors * _MIN_TENSOR_BYTES > reader.left:
        raise reader.damaged(f"it claims {num_tensors} tensors")
    if num_pairs * _MIN_PAIR_BYTES > reader.left:
        raise reader.damaged(f"it claims {num_pairs} metadata pairs")
    return num_tensors, num_pairs


def _description(reader: _Reader) -> tuple[str, int, tuple[int, ...], int]:
    name, num_dims = reader.string(), reader.scalar("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise reader.damaged(f"tensor {name!r} has {num_dims} dimensions")
    dims = [reader.scalar("Q") for _ in range(num_dims)]
    return name, reader.scalar("I"), tuple(reversed(dims)), reader.scalar("Q")


def _placed(
    reader: _Reader, name: str, type_id: int, shape: tuple[int, ...], begin: int
) -> GgufTensor:
    if type_id not in BLOCKS:
        known = ", ".join(kind for kind, _, _ in BLOCKS.values())
        raise ModelError(
            f"{reader.path}: tensor {name!r} has type {type_id}, which is not supported (known: "
            f"{known})"
        )
    kind, block_elements, block_bytes = BLOCKS[type_id]
    if min(shape) < 1 or shape[-1] % block_elements:
        raise reader.damaged(f"tensor {name!r} of type {kind} has shape {list(shape)}")
    end = begin + math.prod(shape) // block_elements * block_bytes
    if end > len(reader.data):
        raise reader.damaged(
            f"tensor {name!r} would end at byte {end} of {len(reader.data)}; it may be truncated"
        )
    return GgufTensor(type_id, shape, begin, end)


class _Reader:
    """A position in the file; nothing is read beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def damaged(self, fault: str) -> ModelError:
        return ModelError(
            f"{self.path} is damaged: {fault} (near byte {self.position}); fetch the file again"
        )

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise self.damaged(f"{size} bytes are expected and {self.left} are left")
        begin = self.position
        self.position += size
        return self.data[begin : self.position]

    def scalar(self, code: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as fault:
            raise self.damaged(f"a string is no UTF-8 ({fault})") from fault

    def value(self, type_id: int) -> object:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array()
        if type_id not in _SCALARS:
            raise self.damaged(f"unknown metadata type {type_id}")
        return self.scalar(_SCALARS[type_id])

    def array(self) -> list[object]:
        item_type, length = self.scalar("I"), self.scalar("Q")
        if item_type == _STRING:
            if length * 8 > self.left:
                raise self.damaged(f"a list claims {length} strings")
            return [self.string() for _ in range(length)]
        if item_type not in _SCALARS:
            raise self.damaged(f"a list has items of type {item_type}")
        code = _SCALARS[item_type]
        raw = self.take(length * struct.calcsize(f"<{code}"))
        return cast("list[object]", list(struct.unpack(f"<{length}{code}", raw)))
