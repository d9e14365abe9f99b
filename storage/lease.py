"""A lease in the output: one run at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass

import orjson
import psutil

from storage.errors import OutputInUse
from storage.objects import ObjectStore

LEASE = "_lease.json"
STALE_S = 120.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease.

    Attributes:
        owner: unique for a run.
        pid: its process.
        host: where that is.
        heartbeat_s: last sign of life, seconds since the epoch.
        started_s: when the process began, by its host; tells it from a later one of the same pid.
    """

    owner: str
    pid: int
    host: str
    heartbeat_s: float
    started_s: float | None = None


class Lease:
    """Held while a run writes. A holder that is gone (its process on this host, or its heartbeat
    elsewhere) is replaced.

    Args:
        store: the output.
        owner: unique for this run.
        wall_clock: seconds since the epoch.
    """

    def __init__(self, store: ObjectStore, owner: str, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._owner = owner
        self._wall_clock = wall_clock
        self._beaten_s = 0.0

    def acquire(self) -> None:
        """Take the lease.

        Raises:
            OutputInUse: another run holds it; says which.
        """
        for _ in range(3):
            if self._store.create(LEASE, self._data()):
                self._beaten_s = self._wall_clock()
                return
            data = self._store.read_or_none(LEASE)
            if data is None:
                continue
            holder, now_s = _parse(data), self._wall_clock()
            if holder is not None and not _is_gone(holder, now_s):
                age_s = now_s - holder.heartbeat_s
                raise OutputInUse(
                    f"{self._store.url} is being written by process {holder.pid} on "
                    f"{holder.host} (last sign of life {age_s:.0f} s ago); wait for it, or stop it"
                )
            if self._store.swap(LEASE, data, self._data()):
                self._beaten_s = self._wall_clock()
                return
        raise OutputInUse(f"{self._store.url}: another run took the lease at the same moment")

    def beat(self, *, every_s: float = 15.0) -> None:
        """Show that the run is alive, not more often than `every_s`.

        Raises:
            OutputInUse: another run has taken the lease (this one seemed to be gone).
        """
        now_s = self._wall_clock()
        if now_s - self._beaten_s >= every_s:
            data = self._store.read_or_none(LEASE)
            holder = None if data is None else _parse(data)
            if holder is not None and holder.owner != self._owner:
                raise OutputInUse(
                    f"{self._store.url} was taken over by process {holder.pid} on {holder.host}"
                )
            self._rewrite(data)
            self._beaten_s = now_s

    def _rewrite(self, old: bytes | None) -> None:
        """Write one's own lease again. On a remote store only over what was seen: a run that slept
        for so long that another took the output must not write over that one's lease.
        """
        if self._store.is_local:
            self._store.write(LEASE, self._data())
            return
        new = self._data()
        written = (
            self._store.create(LEASE, new) if old is None else self._store.swap(LEASE, old, new)
        )
        if not written:
            raise OutputInUse(f"{self._store.url} was taken over by another run")

    def release(self) -> None:
        """Give it back, if it is still ours."""
        data = self._store.read_or_none(LEASE)
        holder = None if data is None else _parse(data)
        if data is not None and holder is not None and holder.owner == self._owner:
            self._store.take_away(LEASE, data)

    def _data(self) -> bytes:
        pid = os.getpid()
        holder = Holder(
            self._owner, pid, socket.gethostname(), self._wall_clock(), _process_start_s(pid)
        )
        return orjson.dumps(asdict(holder))


def living_holder(store: ObjectStore, wall_clock: Callable[[], float]) -> Holder | None:
    """The run that seems to be writing to an output; None when there is none."""
    data = store.read_or_none(LEASE)
    holder = None if data is None else _parse(data)
    return None if holder is None or _is_gone(holder, wall_clock()) else holder


def _parse(data: bytes) -> Holder | None:
    """The holder that a lease names; None when it is damaged, and so nobody's."""
    try:
        return Holder(**orjson.loads(data))
    except (orjson.JSONDecodeError, TypeError):
        return None


def _is_gone(holder: Holder, now_s: float) -> bool:
    """Its process has ended, if it was on this host; else its heartbeat is old."""
    if holder.host == socket.gethostname():
        started_s = _process_start_s(holder.pid)
        if started_s is None or holder.started_s not in (None, started_s):
            return True
    return now_s - holder.heartbeat_s > STALE_S


def _process_start_s(pid: int) -> float | None:
    """When a process of this host began; None when there is none that lives (or only a zombie)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
