"""One run at a time on an output, and none locked out for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import psutil
import pytest

from storage.errors import OutputInUse
from storage.lease import LEASE, STALE_S, Holder, Lease, living_holder
from storage.objects import ObjectStore


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path) if request.param == "local" else f"memory:/{tmp_path}")


def holder_in(store: ObjectStore) -> Holder:
    return Holder(**orjson.loads(store.read(LEASE)))


def test_a_second_run_is_refused_while_the_first_lives(store: ObjectStore, clock: Clock) -> None:
    Lease(store, "first", clock).acquire()
    clock.now_s += 7
    with pytest.raises(OutputInUse, match=rf"process {os.getpid()} on .*7 s ago.*stop it"):
        Lease(store, "second", clock).acquire()
    assert holder_in(store).owner == "first"


def test_a_released_output_is_free(store: ObjectStore, clock: Clock) -> None:
    first = Lease(store, "first", clock)
    first.acquire()
    first.release()
    assert not store.exists(LEASE)
    Lease(store, "second", clock).acquire()
    assert holder_in(store).owner == "second"


def test_a_lease_without_a_heartbeat_goes_stale(store: ObjectStore, clock: Clock) -> None:
    Lease(store, "first", clock).acquire()
    clock.now_s += STALE_S + 1
    assert living_holder(store, clock) is None
    Lease(store, "second", clock).acquire()
    assert holder_in(store).owner == "second"


def test_a_heartbeat_keeps_a_lease_alive(store: ObjectStore, clock: Clock) -> None:
    first = Lease(store, "first", clock)
    first.acquire()
    for _ in range(5):
        clock.now_s += STALE_S / 2
        first.beat()
    with pytest.raises(OutputInUse):
        Lease(store, "second", clock).acquire()
    living = living_holder(store, clock)
    assert living is not None and living.owner == "first"


def test_heartbeats_are_not_written_more_often_than_asked(store: ObjectStore, clock: Clock) -> None:
    first = Lease(store, "first", clock)
    first.acquire()
    clock.now_s += 14
    first.beat(every_s=15)
    assert holder_in(store).heartbeat_s == 1000.0
    clock.now_s += 1
    first.beat(every_s=15)
    assert holder_in(store).heartbeat_s == 1015.0


def test_a_run_that_was_taken_over_learns_of_it_and_leaves_the_lease(
    store: ObjectStore, clock: Clock
) -> None:
    first = Lease(store, "first", clock)
    first.acquire()
    clock.now_s += STALE_S + 1
    Lease(store, "second", clock).acquire()
    with pytest.raises(OutputInUse, match="taken over"):
        first.beat()
    first.release()
    assert holder_in(store).owner == "second"


def test_a_process_that_ended_on_this_host_holds_nothing(store: ObjectStore, clock: Clock) -> None:
    Lease(store, "first", clock).acquire()
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    gone = replace(holder_in(store), pid=child.pid)
    store.write(LEASE, orjson.dumps(asdict(gone)))
    Lease(store, "second", clock).acquire()
    assert holder_in(store).owner == "second"


def test_a_later_process_with_the_same_pid_is_another(store: ObjectStore, clock: Clock) -> None:
    """In a container every run may be process 1."""
    Lease(store, "first", clock).acquire()
    before = replace(holder_in(store), started_s=1.0)
    store.write(LEASE, orjson.dumps(asdict(before)))
    Lease(store, "second", clock).acquire()
    assert holder_in(store).owner == "second"


def test_a_process_of_another_host_is_judged_by_its_heartbeat(
    store: ObjectStore, clock: Clock
) -> None:
    elsewhere = Holder("first", 2**30, "elsewhere", clock.now_s)
    store.write(LEASE, orjson.dumps(asdict(elsewhere)))
    with pytest.raises(OutputInUse, match="on elsewhere"):
        Lease(store, "second", clock).acquire()
    clock.now_s += STALE_S + 1
    Lease(store, "second", clock).acquire()


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"owner": "x"}'])
def test_a_damaged_lease_is_nobodys(store: ObjectStore, clock: Clock, damaged: bytes) -> None:
    store.write(LEASE, damaged)
    assert living_holder(store, clock) is None
    Lease(store, "second", clock).acquire()
    assert holder_in(store).owner == "second"


def test_a_killed_holder_that_nobody_has_reaped_is_gone(store: ObjectStore, clock: Clock) -> None:
    """As in a container whose first process reaps no orphans."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_s = psutil.Process(child.pid).create_time()
        Lease(store, "first", clock).acquire()
        holder = replace(holder_in(store), pid=child.pid, started_s=started_s)
        store.write(LEASE, orjson.dumps(asdict(holder)))
        assert living_holder(store, wall_clock=clock) == holder
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        assert living_holder(store, wall_clock=clock) is None
