"""The life of a worker, whatever it computes: its four threads, from `load` to the last event.

    feeder   makes work ahead              engine   computes it
    outlet   tells what comes of it        watchdog notices a step that hangs

It lives in the coordinator's process, in one of its own or on another machine, and knows of none of
these: it is told by `handle` and tells by `emit`. It writes nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from flows.busy import BusyTimes
from flows.fleet.messages import Ended, Event, Failed, WorkerSetup
from flows.fleet.reports import Reporter
from flows.model import Model
from flows.queues import Outbox
from flows.threads import ThreadGroup
from flows.watchdog import Step, Watchdog, WatchedBackend, WatchedEncoder
from schedulers.load import Load
from workers.errors import BackendError

STOP_GRACE_S = 15.0
"""Seconds that a step may still take once the worker has been told to stop."""

T = TypeVar("T")


class WorkerLife(ABC, Generic[T]):
    """What all workers share. A kind of worker adds `load`, `handle` and what is abstract here.

    Args:
        setup: the job and the worker's place.
        emit: tells the coordinator; called from several threads.
        model: the job's, opened already; else `setup.open_model` opens it.
        clock: seconds, monotonic.
        busy: what the threads work on; a new one by default.
    """

    OUTBOX_ITEMS = 512
    """That wait for the outlet, at most."""
    STEP = "a step"
    """What is watched, in words."""

    def __init__(
        self,
        setup: WorkerSetup,
        emit: Callable[[Event], None],
        *,
        model: Model | None = None,
        clock: Callable[[], float] = time.monotonic,
        busy: BusyTimes | None = None,
    ) -> None:
        self._setup = setup
        self._spec = setup.spec
        self._emit = emit
        self._model = model
        self._clock = clock
        self._busy = busy or BusyTimes(clock=clock)
        self._threads = ThreadGroup(on_failure=self._interrupt)
        self._outbox: Outbox[T] = Outbox(self.OUTBOX_ITEMS)
        self._reporter = Reporter(emit, self._busy, clock=clock)
        self._watchdog: Watchdog | None = None
        self._lock = threading.Lock()
        self._num_rows = 0
        self._stopping = False
        self._outlet_finishing = False

    # -- what a kind of worker does --

    @abstractmethod
    def _feed(self) -> None:
        """The feeder's thread, until all that was assigned is made or the worker stops."""

    @abstractmethod
    def _drive(self) -> None:
        """The engine's thread, until the feeder's work is done or the worker stops."""

    @abstractmethod
    def _send(self, items: Sequence[T]) -> None:
        """Tell the coordinator what came of the engine. In the outlet's thread."""

    @abstractmethod
    def _let_go(self) -> None:
        """End whatever feeder and engine wait for."""

    @abstractmethod
    def _load_now(self) -> Load:
        """The work that is left."""

    @abstractmethod
    def _hung(self, step: Step) -> str:
        """What a step that hangs is of."""

    # -- the whole life --

    def _watch_over(self, backend: WatchedBackend | WatchedEncoder) -> None:
        """The model is loaded: from now on its steps are watched."""
        self._watchdog = Watchdog(
            backend,
            step_timeout_s=self._setup.step_timeout_s,
            stop_grace_s=STOP_GRACE_S,
            clock=self._clock,
        )

    def run(self) -> None:
        """Work until `Finish` or `Stop`, or until something breaks; says which, as the last event.
        Does not raise.
        """
        if self._stopping:
            self._emit(Ended())
            return
        assert self._watchdog is not None, "load comes first"
        self._threads.start("outlet", self._tell)
        self._threads.start("watchdog", self._watch)
        self._threads.start("engine", self._drive)
        self._threads.start("feeder", self._feed)
        self._threads.join("feeder", "engine")
        self._watchdog.end()
        self._threads.join("watchdog")
        self._outlet_finishing = True
        self._threads.join("outlet")
        fault = self._threads.failure
        self._emit(Ended(tuple(self._busy.works())) if fault is None else Failed(fault))

    def _interrupt(self) -> None:
        self._stopping = True
        if self._watchdog is not None:
            self._let_go()
            self._watchdog.stop()

    def _watch(self) -> None:
        """Wait for a step that hangs, and end the worker around it."""
        assert self._watchdog is not None
        step = self._watchdog.wait()
        if step is None:
            return
        self._threads.abandon("engine")
        if not self._stopping:
            raise BackendError(
                f"the device has not come back from {self.STEP} for "
                f"{self._clock() - step.started_s:.1f} s ({self._hung(step)}). Finished rows are "
                "kept; run the same command again to go on, with a smaller --max-batch-tokens if "
                "steps really take that long"
            )

    def _tell(self) -> None:
        """The outlet: send what comes, in batches, until all has been sent."""
        try:
            while True:
                finishing = self._outlet_finishing
                items = self._outbox.take(timeout_s=0.1)
                if items:
                    self._send(items)
                if self._setup.reports:
                    self._reporter.report(self._load_now)
                if finishing and not len(self._outbox):
                    return
        finally:
            self._outbox.stop()

    def _count(self, num_rows: int) -> None:
        """Rows have come, or have gone."""
        with self._lock:
            self._num_rows += num_rows
