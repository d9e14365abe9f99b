"""A group of threads of which the first failure ends all, and is what the caller sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from flows.queues import Stopped


class ThreadGroup:
    """Starts named threads, keeps the first exception that escapes from one, and fails futures that
    would otherwise wait for ever.

    Args:
        on_failure: makes the other threads end; called once, in the failing thread.
    """

    def __init__(self, *, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._threads: dict[str, threading.Thread] = {}
        self._failure: BaseException | None = None
        self._watched: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._ended = False

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` in a thread."""
        thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as failure:  # kept, and raised to the caller by `raise_failure`
            with self._lock:
                first = self._failure is None
                self._failure = self._failure or failure
            if first:
                self._on_failure()
                self.release(failure)

    def watch(self, future: Future[Any]) -> None:
        """Fail a future when the group fails or is released before it is done."""
        with self._lock:
            self._watched = [item for item in self._watched if not item.done()]
            if not self._ended:
                self._watched.append(future)
                return
        future.set_exception(self._failure or Stopped())

    def release(self, reason: BaseException) -> None:
        """Fail every watched future that is not done; later ones fail at once."""
        with self._lock:
            self._ended = True
            waiting, self._watched = self._watched, []
        for future in waiting:
            if not future.done():
                future.set_exception(reason)

    def join(self, *names: str, timeout_s: float | None = None) -> bool:
        """Wait for threads; False when one has not ended in time."""
        for name in names:
            self._threads[name].join(timeout_s)
        return not any(self._threads[name].is_alive() for name in names)

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure
