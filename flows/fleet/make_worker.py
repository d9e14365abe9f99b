"""Which kind of worker a job needs: the one place that knows both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flows.busy import BusyTimes
from flows.fleet.messages import Command, Event, Ready, WorkerSetup
from flows.model import Model


class AnyWorker(Protocol):
    """A worker, as its link sees it."""

    def load(self) -> Ready:
        """Load the model.

        Raises:
            ModelError, NotEnoughMemory, ValueError: the user's to mend.
        """
        ...

    def run(self) -> None:
        """Work until told to end; the last event says how it ended. Does not raise."""
        ...

    def handle(self, command: Command) -> None:
        """Do what the coordinator says. Returns at once."""
        ...


def make_worker(
    setup: WorkerSetup,
    emit: Callable[[Event], None],
    *,
    model: Model | None = None,
    clock: Callable[[], float] = time.monotonic,
    busy: BusyTimes | None = None,
) -> AnyWorker:
    """A worker for the job's task; the arguments are those of `flows.fleet.life.WorkerLife`."""
    if setup.spec.task == "generate":
        from flows.fleet.worker import Worker

        return Worker(setup, emit, model=model, clock=clock, busy=busy)
    from flows.fleet.encode_worker import EncodeWorker

    return EncodeWorker(setup, emit, model=model, clock=clock, busy=busy)
