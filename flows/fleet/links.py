"""How a coordinator reaches a worker: in its own process, or in another one on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Protocol

from flows.fleet.make_worker import AnyWorker
from flows.fleet.messages import (
    Command,
    Ended,
    Event,
    Failed,
    Gone,
    Stop,
    WorkerSetup,
    dumps,
    loads,
)

Deliver = Callable[[Event], None]
"""Takes what a worker says, in order; the last is `Ended`, `Failed` or `Gone`."""

_log = logging.getLogger(__name__)


class Link(Protocol):
    """One life of a worker, as the coordinator sees it."""

    def start(self) -> None:
        """Bring the worker to life. What it says from then on is delivered."""
        ...

    def send(self, command: Command) -> None:
        """Tell it something. Without effect on one that is gone."""
        ...

    def kill(self) -> None:
        """End it at once, wherever it is in its work."""
        ...

    def close(self) -> None:
        """Wait for its end, and give back what it held."""
        ...


class LocalLink:
    """A worker in threads of this process. It cannot be killed, and its end is the run's.

    Args:
        worker: whose `emit` delivers.
        deliver: takes what the worker says.
    """

    def __init__(self, worker: AnyWorker, deliver: Deliver) -> None:
        self._worker = worker
        self._deliver = deliver
        self._thread = threading.Thread(target=worker.run, name="worker", daemon=True)

    def start(self) -> None:
        """Load the model in this thread: what is wrong with it is raised here.

        Raises:
            ModelError, NotEnoughMemory, ValueError: see `AnyWorker.load`.
        """
        self._deliver(self._worker.load())
        self._thread.start()

    def send(self, command: Command) -> None:
        self._worker.handle(command)

    def kill(self) -> None:
        """A thread cannot be killed: it is told to stop."""
        self._worker.handle(Stop())

    def close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()


class ProcessLink:
    """A worker in a process of its own, over a socket pair: it ends when this end is closed,
    however that comes about.

    Args:
        setup: for the worker.
        environ: of the process, beside this one's.
        cores: that it may use; None: all.
        deliver: takes what the worker says, in a thread of this link.
        name: for messages.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        environ: Mapping[str, str],
        cores: tuple[int, ...] | None,
        deliver: Deliver,
        name: str,
    ) -> None:
        self._setup = setup
        self._environ = environ
        self._cores = cores
        self._deliver = deliver
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "flows.fleet.process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **self._environ, "PYTHONPATH": os.pathsep.join(_import_path())},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._send(dumps((self._cores, self._setup)))
        self._listener.start()

    def send(self, command: Command) -> None:
        self._send(dumps(command))

    def _send(self, data: bytes) -> None:
        with self._lock:
            if self._connection is None:
                return
            try:
                self._connection.send_bytes(data)
            except (BrokenPipeError, ConnectionError, OSError):
                return  # it is gone: the listener says so

    def _listen(self) -> None:
        assert self._connection is not None
        last: Event | None = None
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                break
            last = event = loads(data)
            self._deliver(event)
        if not isinstance(last, Failed | Ended):
            self._deliver(Gone(self._why()))

    def _why(self) -> str:
        """How the process ended."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            _log.warning("%s has not ended after 20 s; it is killed", self._name)
            self._process.kill()
            self._process.wait()
        if self._listener.is_alive():
            self._listener.join(timeout=10.0)
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _import_path() -> list[str]:
    """Where this process finds its modules: what was pickled by name is found there, too."""
    return [entry or os.getcwd() for entry in sys.path]
