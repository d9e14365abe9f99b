"""What this machine is, and its ceilings: how fast it multiplies matrices and copies memory."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from flows.calibration import num_cores, processor_name

SHAPES = ((512, 1536, 576), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 1024))
"""(m, n, k) of the products tried; the ceiling is the best of them."""

TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured bounds of this machine: FLOP/s, and bytes/s (a copy counts read and write)."""

    bfloat16_flops: float
    float32_flops: float
    copy_bytes_per_s: float

    def matrix_rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in a number format.

        int8's is not measured but twice bfloat16's: an instruction of VNNI or AMX multiplies twice
        as many pairs. torch's own int8 product (`_int_mm`) is below that by far.
        """
        rates = {
            "float32": self.float32_flops,
            "bfloat16": self.bfloat16_flops,
            "int8": 2 * self.bfloat16_flops,
        }
        return rates[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu: str
    cores: int
    threads: int
    flags: tuple[str, ...]
    memory_bytes: int
    python: str
    torch: str
    load_1min: float
    ceilings: Ceilings

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure_machine() -> Machine:
    """Describe the machine and measure its ceilings: about 5 s."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = set(re.findall(r"\w+", (re.search(r"(?:flags|Features)\s*:(.+)", text) or [""])[0]))
    return Machine(
        cpu=processor_name(),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        flags=tuple(flag for flag in TELLING_FLAGS if flag in flags),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        torch=torch.__version__,
        load_1min=psutil.getloadavg()[0],
        ceilings=Ceilings(
            bfloat16_flops=matrix_rate(torch.bfloat16),
            float32_flops=matrix_rate(torch.float32),
            copy_bytes_per_s=copy_rate(),
        ),
    )


def matrix_rate(dtype: torch.dtype, *, seconds: float = 0.4) -> float:
    """FLOP/s of the best of `SHAPES`, each tried for about that long."""
    return max(_product_rate(shape, dtype, seconds) for shape in SHAPES)


def _product_rate(shape: tuple[int, int, int], dtype: torch.dtype, seconds: float) -> float:
    m, n, k = shape
    left_MK = torch.randn(m, k).to(dtype)
    weight_NK = torch.randn(n, k).to(dtype)
    elapsed_s = best_time(lambda: torch.nn.functional.linear(left_MK, weight_NK), seconds)
    return 2.0 * m * n * k / elapsed_s


def copy_rate(*, num_bytes: int = 256 << 20, seconds: float = 1.0) -> float:
    """Bytes read and written per second when copying a stretch that no cache holds."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / best_time(lambda: target.copy_(source), seconds)


def best_time(action: Callable[[], object], seconds: float) -> float:
    """Shortest of the repetitions that fit in `seconds`, after two to warm up."""
    action()
    action()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)
