"""A step that does not come back is seen, by the injected clock; its thread can be left behind."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from flows.queues import Stopped
from flows.threads import ThreadGroup
from flows.watchdog import Step, Watchdog, WatchedBackend
from workers.backends.base import Batch
from workers.backends.fake import FakeBackend


class Rig:
    """A backend that hangs in `execute` until it is let go, watched by a clock that we set."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.inside, self.let_go = threading.Event(), threading.Event()
        backend = FakeBackend(on_execute=self._hang)
        self.backend = WatchedBackend(backend, clock=lambda: self.now_s)
        self.watchdog = Watchdog(
            self.backend, step_timeout_s=0.04, stop_grace_s=0.02, clock=lambda: self.now_s
        )

    def _hang(self, batch: Batch) -> None:
        self.inside.set()
        assert self.let_go.wait(10)

    def execute(self) -> threading.Thread:
        thread = threading.Thread(target=self.backend.execute, args=(Batch(()),))
        thread.start()
        assert self.inside.wait(10)
        return thread


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.let_go.set()


def waiting(rig: Rig) -> tuple[threading.Thread, list[Step | None]]:
    found: list[Step | None] = []
    thread = threading.Thread(target=lambda: found.append(rig.watchdog.wait()))
    thread.start()
    return thread, found


def test_step_past_its_time_is_told(rig: Rig) -> None:
    rig.execute()
    thread, found = waiting(rig)
    thread.join(0.1)
    assert thread.is_alive(), "the clock has not moved"
    rig.now_s += 0.05
    thread.join(5)
    assert found == [Step(100.0, 0, 0)]


def test_nothing_is_told_between_steps(rig: Rig) -> None:
    """However long the engine waits for requests."""
    step = rig.execute()
    rig.let_go.set()
    step.join(5)
    assert rig.backend.step is None
    thread, found = waiting(rig)
    rig.now_s += 1000.0
    thread.join(0.1)
    assert thread.is_alive()
    rig.watchdog.end()
    thread.join(5)
    assert found == [None]


def test_grace_counts_from_the_stop(rig: Rig) -> None:
    rig.execute()
    rig.now_s += 0.01
    rig.watchdog.stop()
    thread, found = waiting(rig)
    rig.now_s += 0.015
    thread.join(0.1)
    assert thread.is_alive()
    rig.now_s += 0.01
    thread.join(5)
    assert found == [Step(100.0, 0, 0)]


def test_step_that_fails_is_over() -> None:
    def fail(batch: Batch) -> None:
        raise RuntimeError("lost")

    backend = WatchedBackend(FakeBackend(on_execute=fail), clock=lambda: 0.0)
    with pytest.raises(RuntimeError, match="lost"):
        backend.execute(Batch(()))
    assert backend.step is None


def test_abandoned_thread_is_not_waited_for() -> None:
    forever = threading.Event()
    group = ThreadGroup(on_failure=lambda: None)
    group.start("engine", lambda: forever.wait(10) and None)
    group.abandon("engine")
    group.join("engine", "never started")
    forever.set()


def test_first_failure_is_kept_and_releases_the_futures() -> None:
    calls: list[str] = []
    group = ThreadGroup(on_failure=lambda: calls.append("failed"))
    future: Future[None] = Future()
    done: Future[None] = Future()
    done.set_result(None)
    group.watch(future)
    group.watch(done)

    def fail() -> None:
        raise ValueError("first")

    def fail_again() -> None:
        raise KeyError("second")

    group.start("one", fail)
    group.join("one")
    group.start("two", fail_again)
    group.join("two")
    assert calls == ["failed"]
    with pytest.raises(ValueError, match="first"):
        future.result()
    with pytest.raises(ValueError, match="first"):
        group.raise_failure()
    late: Future[None] = Future()
    group.watch(late)
    with pytest.raises(ValueError, match="first"):
        late.result()


def test_release_fails_what_is_open_and_what_comes_later() -> None:
    group = ThreadGroup(on_failure=lambda: None)
    before: Future[None] = Future()
    group.watch(before)
    group.release(Stopped())
    after: Future[None] = Future()
    group.watch(after)
    for future in (before, after):
        with pytest.raises(Stopped):
            future.result()
    group.raise_failure()
