"""Servers for tests: a process on a free port, whose log is kept, and which ends with the tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path


def free_ports(number: int) -> list[int]:
    """Different ports of this machine that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]


class Server:
    """A process in a session of its own, so that `kill` takes its children too.

    Args:
        name: for messages.
        command: starts it in the foreground.
        log: where its output goes, over all its starts.
        env: its environment.
        is_ready: whether it answers; asked again and again until it does.
        patience_s: how long it may take to answer, and to end when it is told to.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        is_ready: Callable[[], bool] = lambda: True,
        cwd: Path | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._is_ready = is_ready
        self._cwd = cwd
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again if need be, and wait until it answers."""
        assert self._process is None, f"{self.name} is running"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=self._env, cwd=self._cwd, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(self._answers, self._patience_s, f"{self.name} does not answer", self.tail)
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} ended ({self._process.returncode}):\n{self.tail()}")
        return self._is_ready()

    def kill(self) -> None:
        """End it at once, with all its children."""
        self._signal(signal.SIGKILL)
        self._forget(self._patience_s)

    def stop(self) -> None:
        """Tell it to end; kill it when it does not."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self._forget(15.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, num_bytes: int = 6000) -> str:
        """The end of what it said."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _forget(self, patience_s: float) -> None:
        assert self._process is not None
        self._process.wait(patience_s)
        self._process = None


def wait_until(
    is_so: Callable[[], bool],
    patience_s: float,
    otherwise: str,
    explain: Callable[[], str] = lambda: "",
) -> None:
    """Ask until it is so; fails with `otherwise` and an explanation."""
    deadline_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{otherwise} after {patience_s:.0f} s\n{explain()}")
        time.sleep(0.1)
