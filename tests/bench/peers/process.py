"""The benchmark's end of a runner: start it, ask it, and stop it while others have their turn."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.bench.peers.protocol import Item, write_items

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 1800.0
END_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 4000


class RunnerError(Exception):
    """A runner ended, was silent for too long or did other work than it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a runner did with a workload. `ended_at` is wall-clock time."""

    elapsed_s: float
    ended_at: float
    token_ids: list[list[int]]
    peak_bytes: int


class RunnerProcess:
    """A side's process, stopped whenever it has nothing to do.

    Stopped means SIGSTOP for its whole process group: idle threads that spin, pools and background
    work of one side take no time from another. A context manager; leaving it ends the group. If the
    benchmark itself is killed, the kernel ends the group: it is of our session, and a stopped group
    that loses its last parent there gets SIGHUP and SIGCONT.

    Args:
        name: for messages.
        command: starts the runner.
        log: gets what it prints to stderr.
        cwd: where it runs.
        environ: its whole environment; None inherits ours.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        cwd: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._unread = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started_at = time.time()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> float:
        """Seconds from the start of the process to the loaded model."""
        ready = self._receive("ready", START_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        return ready["moments"]["loaded"] - self.started_at

    def run(self, items: Sequence[Item], file: Path) -> Answer:
        """Wake it, have it do the workload, stop it again.

        Args:
            items: the workload.
            file: where the runner will read it.

        Raises:
            RunnerError: no answer, or not the tokens asked for.
        """
        write_items(file, items)
        self._signal(signal.SIGCONT)
        self._ask({"workload": str(file)})
        done = self._receive("done", RUN_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        done.pop("event")
        answer = Answer(**done)
        self._check(items, answer)
        return answer

    def close(self) -> None:
        """Ask it to end, then make it."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _check(self, items: Sequence[Item], answer: Answer) -> None:
        wanted = [item.num_output_tokens for item in items]
        got = [len(ids) for ids in answer.token_ids]
        if wanted != got:
            wrong = sum(map(int.__ne__, wanted, got)) + abs(len(wanted) - len(got))
            raise RunnerError(f"{self.name}: {wrong} of {len(wanted)} answers have another length")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, message: Mapping[str, object]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, event: str, timeout_s: float) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RunnerError(
                    f"{self.name}: no {event!r} within {timeout_s:.0f} s; {self._log}"
                )
            part = os.read(pipe.fileno(), 1 << 20)
            if not part:
                raise self._ended()
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if message.get("event") != event:
            raise RunnerError(f"{self.name}: said {message.get('event')!r}, not {event!r}")
        return message

    def _ended(self) -> RunnerError:
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return RunnerError(f"{self.name} ended with status {self._process.wait()}:\n{tail}")
