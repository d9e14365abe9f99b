"""A group of threads of which the first failure ends all, and is what the caller sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
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
        self._over: dict[str, threading.Event] = {}
        self._failure: BaseException | None = None
        self._watched: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._ended = False

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` in a thread."""
        over = self._over[name] = threading.Event()
        thread = threading.Thread(target=self._guarded, args=(body, over), name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def _guarded(self, body: Callable[[], None], over: threading.Event) -> None:
        try:
            body()
        except BaseException as failure:  # noqa: BLE001 - `raise_failure` raises it to the caller
            with self._lock:
                first = self._failure is None
                self._failure = self._failure or failure
            if first:
                self._on_failure()
                self.release(failure)
        finally:
            over.set()

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
            with suppress(InvalidStateError):  # it was done at this moment
                future.set_exception(reason)

    def abandon(self, name: str) -> None:
        """Wait no longer for a thread that hangs: `join` counts it as ended."""
        self._over[name].set()

    def join(self, *names: str) -> None:
        """Wait for threads; those that were never started have ended."""
        for name in names:
            if name in self._over:
                self._over[name].wait()

    @property
    def failure(self) -> BaseException | None:
        """The first failure, if there was one."""
        return self._failure

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure
