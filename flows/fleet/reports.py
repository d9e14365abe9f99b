"""What a worker says of itself while it works: that it is alive, and what is left."""

from __future__ import annotations

from collections.abc import Callable

from flows.busy import BusyTimes, Work
from flows.fleet.messages import Event, Report
from schedulers.load import Load

REPORT_S = 0.5
"""Seconds between two reports of the load."""

WORKS_S = 10.0
"""Seconds between two reports of what the threads have done."""


class Reporter:
    """Reports now and then. For one thread.

    Args:
        emit: tells the coordinator.
        busy: what the worker's threads have done.
        clock: seconds, monotonic.
    """

    def __init__(
        self, emit: Callable[[Event], None], busy: BusyTimes, *, clock: Callable[[], float]
    ) -> None:
        self._emit = emit
        self._busy = busy
        self._clock = clock
        self._told_s = self._told_works_s = clock()

    def report(self, load: Callable[[], Load]) -> None:
        """Say what is left, if it is time to."""
        now_s = self._clock()
        if now_s < self._told_s + REPORT_S:
            return
        self._told_s = now_s
        works: tuple[Work, ...] = ()
        if now_s >= self._told_works_s + WORKS_S:
            self._told_works_s, works = now_s, tuple(self._busy.works())
        self._emit(Report(load(), works))
