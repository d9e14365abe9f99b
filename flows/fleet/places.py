"""Where the workers of a machine run: which GPU, which cores, how many threads each."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from flows.errors import SpecError

_log = logging.getLogger(__name__)
GPUS = Path("/proc/driver/nvidia/gpus")


class Place(NamedTuple):
    """Of one worker process.

    Attributes:
        environ: variables of the process.
        cores: that it may use; None: all.
    """

    environ: dict[str, str]
    cores: tuple[int, ...] | None


def visible_gpus() -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them. Asks no driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    if not GPUS.is_dir():
        return []
    return [str(index) for index in range(len(list(GPUS.iterdir())))]


def default_workers(device: str) -> int | None:
    """How many worker processes a job has if nobody said: one a GPU where there are several; None:
    it runs in its own process.
    """
    num_gpus = len(visible_gpus()) if device in ("auto", "cuda") else 0
    return num_gpus if num_gpus > 1 else None


def places(num_workers: int, device: str) -> list[Place]:
    """Share a machine out among workers: a GPU each, cores evenly.

    Raises:
        SpecError: there are fewer GPUs than workers.
    """
    gpus = visible_gpus() if device in ("auto", "cuda") else []
    if gpus and num_workers > len(gpus):
        raise SpecError(
            f"workers is {num_workers}, but there are {len(gpus)} GPUs here; each needs one for "
            "itself: ask for fewer, or for --device cpu"
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not gpus and num_workers > len(cores) > 0:
        _log.warning(
            "%d workers share %d cores: fewer of them would be as fast", num_workers, len(cores)
        )
    return [_place(index, num_workers, gpus, cores) for index in range(num_workers)]


def _place(index: int, num_workers: int, gpus: list[str], cores: list[int]) -> Place:
    share = _share(cores, index, num_workers)
    num_threads = max(1, len(share) or (os.cpu_count() or 1) // num_workers)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        num_threads = min(num_threads, int(asked))
    environ = {"OMP_NUM_THREADS": str(num_threads)}
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
    # Several workers on one core would only push each other around.
    return Place(environ, tuple(share) if len(cores) >= num_workers else None)


def _share(cores: list[int], index: int, num_workers: int) -> list[int]:
    """Neighbouring cores, which mostly share caches and memory."""
    if len(cores) < num_workers:
        return []
    return cores[len(cores) * index // num_workers : len(cores) * (index + 1) // num_workers]
