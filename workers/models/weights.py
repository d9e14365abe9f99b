"""Weights from safetensors into a model's own tensors, one tensor at a time.

Names, shapes and types are checked from the files' headers before any memory is taken, so a wrong
file costs nothing. Then each tensor is copied into its place, which may be a part of a fused one;
there are never two copies of a model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.loading.safetensors_file import TensorEntry, data_start, read_header

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 4 << 20


class Place(NamedTuple):
    """Where a tensor of a file goes. `part` broadcasts from the file's `shape`."""

    part: Tensor
    shape: tuple[int, ...]


Places = Mapping[str, Place]
"""By the tensor's name in the files."""


def check_weights(
    files: Sequence[Path], places: Places, *, is_ignored: Callable[[str], bool]
) -> None:
    """Compare what the files hold with what the model needs; `places` may be on the meta device.

    Raises:
        ModelError: a tensor is missing, unexpected, twice there, or of another shape or type.
    """
    found: dict[str, Path] = {}
    for path in files:
        for name, entry in read_header(path).items():
            if is_ignored(name):
                continue
            if name in found:
                raise ModelError(f"tensor {name!r} is in {found[name]} and again in {path}")
            found[name] = path
            _check_tensor(path, name, entry, places)
    missing = sorted(places.keys() - found.keys())
    if missing:
        raise ModelError(
            f"the weight files lack tensor {missing[0]!r} ({len(missing)} are missing of "
            f"{len(places)}); copy the model again, or check that config.json belongs to it"
        )


def _check_tensor(path: Path, name: str, entry: TensorEntry, places: Places) -> None:
    place = places.get(name)
    if place is None:
        raise ModelError(
            f"{path} has tensor {name!r}, which this architecture has not; "
            "check that config.json belongs to the weights"
        )
    if entry.shape != place.shape:
        raise ModelError(
            f"{path}: tensor {name!r} has shape {list(entry.shape)}, and config.json asks for "
            f"{list(place.shape)}"
        )
    if entry.dtype not in DTYPES:
        raise ModelError(
            f"{path}: tensor {name!r} is of type {entry.dtype}; only unquantised weights "
            f"({', '.join(sorted(DTYPES))}) are supported"
        )


def load_weights(files: Sequence[Path], places: Places) -> None:
    """Fill the places, piece by piece: beside the model itself a few megabytes are needed. (Files
    mapped into memory would count as the process's own until they are closed.) The files have
    passed `check_weights`.

    Raises:
        ModelError: a file changed or cannot be read.
    """
    for path in files:
        try:
            _load_file(path, places)
        except (OSError, ValueError) as fault:
            raise ModelError(f"{path} cannot be read ({fault}); copy the model again") from fault


def _load_file(path: Path, places: Places) -> None:
    start = data_start(path)
    with path.open("rb") as file:
        for name, entry in sorted(read_header(path).items(), key=lambda item: item[1].begin):
            if name in places:
                file.seek(start + entry.begin)
                _load_tensor(file, entry, places[name])


def _load_tensor(file: BufferedReader, entry: TensorEntry, place: Place) -> None:
    """Rows of the first dimension, as many at a time as a piece holds; whole what broadcasts."""
    num_bytes = entry.end - entry.begin
    if not num_bytes:
        return
    in_pieces = tuple(place.part.shape) == entry.shape and len(entry.shape) > 1
    num_rows = len(place.part) if in_pieces else 1
    row_bytes = num_bytes // num_rows
    rows_a_piece = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, num_rows, rows_a_piece):
        count = min(rows_a_piece, num_rows - first)
        piece = bytearray(count * row_bytes)
        if file.readinto(piece) != len(piece):
            raise ValueError("it ended too early")
        values = torch.frombuffer(piece, dtype=DTYPES[entry.dtype])
        if in_pieces:
            place.part[first : first + count].copy_(values.view(count, *entry.shape[1:]))
        else:
            place.part.copy_(values.view(entry.shape))


def unique_tensors(places: Places) -> list[Tensor]:
    """The places' own memory, each once: fused tensors whole."""
    by_address = {
        place.part.untyped_storage().data_ptr(): place.part.untyped_storage()
        for place in places.values()
    }
    dtype = next(iter(places.values())).part.dtype
    return [torch.empty(0, dtype=dtype).set_(storage) for storage in by_address.values()]
