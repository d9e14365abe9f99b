"""Ctrl-C and SIGTERM: the first stops the run in good order, the second at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """What a signal stops; `flows.runner.JobRunner` is one."""

    def stop(self, reason: str) -> None:
        """Begin to end: finished rows are committed. Returns at once."""
        ...


class StopOnSignal:
    """While entered, signals stop the attached run; before one is attached they interrupt.

    Example:
        >>> with StopOnSignal() as signals:
        ...     run_job(spec, on_start=signals.attach)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._run: Stoppable | None = None
        self._before: dict[signal.Signals, Any] = {}

    def attach(self, run: Stoppable) -> None:
        """From now on the first signal stops `run`."""
        self._run = run

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        run, self._run = self._run, None
        if run is None:
            raise KeyboardInterrupt
        run.stop(signal.Signals(number).name)
