"""Which device and which number format, as asked for or as the hardware suggests."""

from __future__ import annotations

from typing import Literal

import torch

from workers.errors import ModelError

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

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
    """The number format of weights, keys and values; `auto` takes the fastest sound one.

    Raises:
        ModelError: the device cannot compute in it.
    """
    if name == "auto":
        return _fastest(device)
    if name == "float16" and device.type == "cpu":
        raise ModelError("float16 is not supported on the CPU; use bfloat16 or float32")
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ModelError("this GPU has no bfloat16; use float16 or float32")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _fastest(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if cpu_has_fast_bfloat16() else torch.float32


def cpu_has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware, as torch reports it."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if not capabilities:  # before torch 2.10
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        return bool(probe())
    return any(capabilities.get(feature) for feature in FAST_BFLOAT16)
