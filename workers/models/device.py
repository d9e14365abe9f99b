"""Which device and which number format, as asked for or as the hardware suggests."""

from __future__ import annotations

from typing import Literal

import torch

from workers.errors import ModelError

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8"]

FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16", "amx_tile")
"""Processor features with which bfloat16 is faster than float32; without them it is slower."""


def pick_device(name: DeviceName) -> torch.device:
    """The device of that name; `auto` takes a GPU where there is one.

    Raises:
        ModelError: there is no such device.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise ModelError(f"the device {name!r} is not available; there is {there}")
    return torch.device(name)


def pick_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The number format of weights and what they are multiplied with; `auto` takes the fastest
    sound one, which int8 is not: it changes results. With int8 all else is bfloat16.

    Raises:
        ModelError: the device cannot compute in it.
    """
    if name == "auto":
        return _fastest(device)
    if name == "int8" and device.type != "cpu":
        raise ModelError(f"int8 is for CPUs, not for {device.type}; use bfloat16 or float16")
    if name == "float16" and device.type == "cpu":
        raise ModelError("float16 is not supported on the CPU; use bfloat16 or float32")
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ModelError("this GPU has no bfloat16; use float16 or float32")
    return _DTYPES[name]


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


def _fastest(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if cpu_has_fast_bfloat16() else torch.float32


def cpu_has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware, as torch reports it."""
    if not _cpu_capabilities():  # before torch 2.10
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        return bool(probe())
    return any(cpu_has(feature) for feature in FAST_BFLOAT16)


def cpu_has(feature: str) -> bool:
    """Whether the processor has a feature, by torch's name of it; False where torch cannot say."""
    return bool(_cpu_capabilities().get(feature))


def _cpu_capabilities() -> dict[str, object]:
    return getattr(torch.cpu, "get_capabilities", dict)()
