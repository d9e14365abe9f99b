"""How much memory a worker may use: one place for the run and for the plan."""

from __future__ import annotations

from typing import NamedTuple

from flows.spec_model import EngineSpec


class WorkerMemory(NamedTuple):
    """What a worker has of its machine.

    Attributes:
        limit_bytes: what the user allows; None: nothing was said.
        host_share: of the host's memory, 0 to 1; a GPU is a worker's own.
    """

    limit_bytes: int | None
    host_share: float


def worker_memory(engine: EngineSpec, device: str, num_workers: int) -> WorkerMemory:
    """The share of one of `num_workers` workers of a machine.

    Args:
        engine: of the job; its memory is for all of them together.
        device: torch's name for it.
        num_workers: on this host.
    """
    from workers.setup import device_memory_bytes

    share = 1.0 if device.startswith("cuda") else 1.0 / num_workers
    limit = engine.memory_bytes(device_memory_bytes(device))
    return WorkerMemory(None if limit is None else int(limit * share), share)
