"""What the threads beside the engine work on: CPU and elapsed seconds by kind of work.

A thread counts into a meter of its own and a run's meters are read together. CPU seconds are what
the engine's threads cannot have; that libraries compute in threads of their own is not in them, but
in those of the whole process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

MAIN = "main"
"""The run itself, before its first step and behind its last one."""
PROCESS = "process"


class Work(NamedTuple):
    """One kind of work, added up. `cpu_s` is None where it was not measured."""

    thread: str
    work: str
    cpu_s: float | None
    elapsed_s: float


@dataclass(slots=True)
class _Sum:
    """Seconds of one kind of work."""

    cpu_s: float = 0.0
    elapsed_s: float = 0.0


class Meter:
    """Counts the work of one thread. Work inside of other work counts as the inner one alone.

    Example:
        >>> meter = Meter("feeder")
        >>> with meter("tokenising"):
        ...     pass
    """

    def __init__(
        self,
        thread: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.thread = thread
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sums: dict[str, _Sum] = {}
        self._outer: list[str] = []
        self._read_s = self._cpu_read_s = 0.0

    @contextmanager
    def __call__(self, work: str) -> Generator[None]:
        """Count what the block takes."""
        self._count()
        self._outer.append(work)
        try:
            yield
        finally:
            self._count()
            self._outer.pop()

    def _count(self) -> None:
        """Read the clocks, and give what has passed to the work that is going on."""
        now_s, cpu_now_s = self._clock(), self._cpu_clock()
        if self._outer:
            work = self._outer[-1]
            known = self._sums.get(work) or self._sums.setdefault(work, _Sum())
            known.elapsed_s += now_s - self._read_s
            known.cpu_s += cpu_now_s - self._cpu_read_s
        self._read_s, self._cpu_read_s = now_s, cpu_now_s

    def works(self) -> Iterator[Work]:
        """What has been counted so far; from any thread."""
        for work, total in list(self._sums.items()):
            yield Work(self.thread, work, total.cpu_s, total.elapsed_s)


class BusyTimes:
    """The meters of a run, and its own line: what came before the first step, what behind the last.

    Args:
        clock: seconds, monotonic.
        began_s: when the run's process, or whatever wanted the run, began; now if not given.
    """

    def __init__(self, *, clock: Callable[[], float], began_s: float | None = None) -> None:
        self._clock = clock
        self._began_s = self._marked_s = clock() if began_s is None else began_s
        self._cpu_began_s = time.process_time()
        self._line: dict[str, float] = {}
        self._meters: list[Meter] = []

    def meter(self, thread: str) -> Meter:
        """A thread's own meter."""
        meter = Meter(thread, clock=self._clock)
        self._meters.append(meter)
        return meter

    def mark(self, work: str, at_s: float | None = None) -> None:
        """What the run did until now, or until `at_s`, since the mark before it."""
        at_s = self._clock() if at_s is None else at_s
        self._line[work] = self._line.get(work, 0.0) + max(0.0, at_s - self._marked_s)
        self._marked_s = at_s

    def skip_to(self, at_s: float) -> None:
        """The engine's steps lie between the mark before and this one."""
        self._marked_s = max(self._marked_s, at_s)

    def works(self) -> Iterator[Work]:
        """All that has been counted so far."""
        for work, elapsed_s in self._line.items():
            yield Work(MAIN, work, None, elapsed_s)
        for meter in self._meters:
            yield from meter.works()
        cpu_s = time.process_time() - self._cpu_began_s
        yield Work(PROCESS, "all threads", cpu_s, self._clock() - self._began_s)
