"""Weights from safetensors into a model's own tensors, one tensor at a time.

Names, shapes and types are checked from the files' headers before any memory is taken, so a wrong
file costs nothing. Then each tensor is copied into its place, which may be a part of a fused one;
there are never two copies of a model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import ModelError
from workers.loading.safetensors_file import TensorEntry, read_header

DTYPES = frozenset({"F32", "F16", "BF16"})


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
    """Fill the places. The files have passed `check_weights`.

    Raises:
        ModelError: a file changed or cannot be read.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    if name in places:
                        places[name].part.copy_(file.get_tensor(name))
        except (OSError, SafetensorError) as fault:
            raise ModelError(f"{path} cannot be read ({fault}); copy the model again") from fault


def unique_tensors(places: Places) -> list[Tensor]:
    """The places' own memory, each once: fused tensors whole."""
    by_address = {
        place.part.untyped_storage().data_ptr(): place.part.untyped_storage()
        for place in places.values()
    }
    dtype = next(iter(places.values())).part.dtype
    return [torch.empty(0, dtype=dtype).set_(storage) for storage in by_address.values()]
