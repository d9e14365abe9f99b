"""The coordinator over workers that are threads here: they answer, give work back, and die."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flows.collector import FromWorker, Item, Note
from flows.errors import JobFailed
from flows.fleet import coordinator as module
from flows.fleet import health
from flows.fleet.coordinator import Coordinator
from flows.fleet.links import Deliver
from flows.fleet.messages import (
    Adopt,
    Assign,
    Began,
    Block,
    Command,
    Ended,
    Event,
    Failed,
    Finish,
    Give,
    Given,
    Gone,
    Parcel,
    Ready,
    Report,
    Rows,
    Started,
    Stop,
)
from flows.queues import RowKey, RowRef, Stopped
from schedulers.load import Load
from schedulers.memory import MemoryPlan
from storage.results import ResultRow
from storage.shards import Shard, Span
from workers.errors import BackendError, ModelError

MEMORY = MemoryPlan(*[0] * len(MemoryPlan._fields))
ROW_S = 0.002


def shard(index: int, num_rows: int) -> Shard:
    return Shard(index, (Span(0, 0, 0, num_rows, 0),), 10 * num_rows)


@dataclass
class Behaviour:
    """What the workers of a test do.

    Attributes:
        killers: rows that end whoever computes them.
        death_chance: of ending at any row.
        slow: seconds a row, by worker.
        fault: raised instead of being ready.
        stillborn: a worker that dies before it is ready.
        late: seconds until a worker is ready.
        blocks: rows are answered several at a time, and given back unread, as encoders do.
    """

    killers: frozenset[RowKey] = frozenset()
    death_chance: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    fault: BaseException | None = None
    stillborn: int | None = None
    late: dict[int, float] = field(default_factory=dict)
    blocks: bool = False
    seed: int = 0
    is_deaf: Callable[[int, int], bool] = lambda _index, _life: False


class FakeLink:
    """A worker in a thread: answers its rows one after another, eight at a time "started"."""

    def __init__(self, index: int, life: int, behaviour: Behaviour, deliver: Deliver) -> None:
        self.index = index
        self.life = life
        self._behaviour = behaviour
        self._deliver = deliver
        self._rng = random.Random(f"{behaviour.seed}/{index}/{life}")
        self._commands: list[Command] = []
        self._changed = threading.Condition()
        self._killed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def kill(self) -> None:
        with self._changed:
            self._killed = True
            self._changed.notify_all()

    def close(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        behaviour = self._behaviour
        if behaviour.fault is not None:
            self._deliver(Failed(behaviour.fault))
            return
        if behaviour.stillborn == self.index:
            self._deliver(Gone("exit status 1"))
            return
        with self._changed:
            late_s = behaviour.late.get(self.index, 0.0)
            if self._changed.wait_for(lambda: self._killed, timeout=late_s):
                self._deliver(Gone("killed by the test"))
                return
        self._deliver(Ready(MEMORY, "fake"))
        self._deliver(self._work())

    def _work(self) -> Event:
        self._rows: list[RowRef] = []
        self._finishing = False
        while True:
            for command in self._next_commands():
                if isinstance(command, Stop):
                    return Ended()
                self._obey(command)
            if self._killed:
                return Gone("killed by the test")
            if self._finishing:
                assert not self._rows
                return Ended()
            if self._rows:
                blocks = self._behaviour.blocks
                end = self._encode() if blocks else self._compute(self._rows[0])
                if end is not None:
                    return end
            elif not self._is_deaf:
                self._deliver(Report(Load()))

    @property
    def _is_deaf(self) -> bool:
        return self._behaviour.is_deaf(self.index, self.life)

    def _next_commands(self) -> list[Command]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._rows or self._commands or self._killed, timeout=0.05
            )
            if self._is_deaf:
                return []
            commands, self._commands = self._commands, []
            return commands

    def _obey(self, command: Command) -> None:
        if isinstance(command, Assign):
            index = command.shard.index
            self._rows += [RowRef(index, n, f"{index}/{n}") for n in command.ordinals.tolist()]
        elif isinstance(command, Adopt):
            self._rows += [parcel.ref for parcel in command.parcels]
        elif isinstance(command, Give):
            count = max(0, min(len(self._rows) - 1, int(command.share_s / self._row_s)))
            kept = len(self._rows) - count
            given, self._rows = self._rows[kept:], self._rows[:kept]
            if self._behaviour.blocks:
                self._deliver(Given(unread=tuple(parts_of(given))))
            else:
                self._deliver(Given(tuple(Parcel(ref, (1,), None) for ref in given)))
        elif isinstance(command, Finish):
            self._finishing = True

    def _compute(self, ref: RowRef) -> Event | None:
        """One row, or the end that it brings."""
        self._deliver(Started(tuple(self._rows[:8])))
        if ref[:2] in self._behaviour.killers:
            return Gone("killed by SIGKILL")
        if self._rng.random() < self._behaviour.death_chance:
            return Gone("killed by SIGSEGV")
        time.sleep(self._row_s)
        del self._rows[0]
        row = ResultRow(ordinal=ref.ordinal, row_id=ref.row_id, status="ok")
        self._deliver(Rows(((ref, row),)))
        self._deliver(Report(Load(len(self._rows), 0.0, len(self._rows) * self._row_s)))
        return None

    def _encode(self) -> Event | None:
        """Some rows of one shard at once, or the end that they bring."""
        index = self._rows[0].shard_index
        refs = [ref for ref in self._rows if ref.shard_index == index][:7]
        ordinals = np.array(sorted(ref.ordinal for ref in refs), dtype=np.int64)
        self._deliver(Began(index, ordinals))
        if any(ref[:2] in self._behaviour.killers for ref in refs):
            return Gone("killed by SIGKILL")
        if self._rng.random() < self._behaviour.death_chance:
            return Gone("killed by SIGSEGV")
        time.sleep(self._row_s * len(refs))
        self._rows = [ref for ref in self._rows if ref not in refs]
        names = [f"{index}/{n}" for n in ordinals.tolist()]
        table = pa.table({"row_id": names, "status": ["ok"] * len(names)})
        self._deliver(Block(index, ordinals, table))
        self._deliver(Report(Load(len(self._rows), 0.0, len(self._rows) * self._row_s)))
        return None

    @property
    def _row_s(self) -> float:
        return self._behaviour.slow.get(self.index, ROW_S)


def parts_of(refs: list[RowRef]) -> list[Assign]:
    """Rows by shard."""
    indices = sorted({ref.shard_index for ref in refs})
    return [
        Assign(
            shard(index, 1000),
            np.array(sorted(r.ordinal for r in refs if r.shard_index == index), dtype=np.int64),
        )
        for index in indices
    ]


class Job:
    """A coordinator, its workers, and what came of them."""

    def __init__(self, num_workers: int, behaviour: Behaviour) -> None:
        self.links: list[FakeLink] = []
        self.items: list[Item] = []
        self.workers_of: defaultdict[int, set[str]] = defaultdict(set)
        lives = dict.fromkeys(range(num_workers), 0)

        def make_link(index: int, deliver: Deliver) -> FakeLink:
            lives[index] += 1
            self.links.append(FakeLink(index, lives[index], behaviour, deliver))
            return self.links[-1]

        self.coordinator = Coordinator(
            names=[f"worker-{index}" for index in range(num_workers)],
            make_link=make_link,
            collect=self.items.extend,
            find_row_id=lambda part, ordinal: f"{part.index}/{ordinal}",
            kv_bytes_per_s=1e9,
            on_assign=lambda index, worker: self.workers_of[index].add(worker),
        )

    def run(self, *shards: Shard) -> None:
        self.coordinator.start()
        thread = threading.Thread(target=self._submit, args=(shards,))
        thread.start()
        try:
            self.coordinator.run()
        finally:
            thread.join()

    def _submit(self, shards: tuple[Shard, ...]) -> None:
        with suppress(Stopped):  # the run has ended
            for part in shards:
                self.coordinator.submit(part, np.arange(part.num_rows, dtype=np.int64))
            self.coordinator.close()

    @property
    def rows(self) -> dict[RowKey, ResultRow]:
        """Every row once."""
        found: dict[RowKey, ResultRow] = {}
        for item in self.items:
            if isinstance(item, FromWorker) and isinstance(item.event, Rows):
                for ref, row in item.event.rows:
                    assert ref[:2] not in found
                    found[ref[:2]] = row
            if isinstance(item, FromWorker) and isinstance(item.event, Block):
                index, ordinals, table = item.event
                for ordinal, name in zip(
                    ordinals.tolist(), table["row_id"].to_pylist(), strict=True
                ):
                    assert (index, ordinal) not in found
                    assert name == f"{index}/{ordinal}"
                    found[index, ordinal] = ResultRow(ordinal=ordinal, row_id=name, status="ok")
        return found

    def notes(self, table: str) -> list[dict[str, Any]]:
        return [
            item.values for item in self.items if isinstance(item, Note) and item.table == table
        ]


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Delays of a test, not of a data centre; a few rows ahead; a move that pays soon."""
    monkeypatch.setattr(health, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(module, "ROWS_AHEAD", 20)
    monkeypatch.setattr(module, "STEAL_AHEAD_S", 0.02)
    monkeypatch.setattr("schedulers.route.MOVE_S", 0.005)


def keys(*shards: Shard) -> set[RowKey]:
    return {(part.index, n) for part in shards for n in range(part.num_rows)}


blocks = pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])


@blocks
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_row_is_answered_once(num_workers: int, blocks: bool) -> None:
    shards = [shard(index, 1 + 17 * index % 40) for index in range(12)]
    job = Job(num_workers, Behaviour(blocks=blocks))
    job.run(*shards)
    assert set(job.rows) == keys(*shards)
    job.coordinator._owners.check_integrity(num_workers)
    assert {row["event"] for row in job.notes("workers")} == {"started", "ready", "ended"}


@blocks
@pytest.mark.parametrize("seed", range(6))
def test_workers_that_die_at_any_row_lose_none(seed: int, blocks: bool) -> None:
    shards = [shard(index, 30) for index in range(6)]
    job = Job(3, Behaviour(death_chance=0.2 if blocks else 0.03, seed=seed, blocks=blocks))
    job.run(*shards)
    assert set(job.rows) == keys(*shards)
    died = [row for row in job.notes("workers") if row["event"] == "died"]
    assert died
    assert len(job.links) >= 3 + 1
    assert all(row.status in ("ok", "error") for row in job.rows.values())


@blocks
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_row_that_kills_its_worker_becomes_an_error_row_and_no_other_does(
    num_workers, blocks
) -> None:
    shards = [shard(0, 40), shard(1, 40)]
    killers = frozenset({(0, 17), (1, 0)})
    job = Job(num_workers, Behaviour(killers=killers, blocks=blocks))
    job.run(*shards)
    assert set(job.rows) == keys(*shards)
    bad = {key: row for key, row in job.rows.items() if row.status != "ok"}
    assert set(bad) == killers
    row = bad[0, 17]
    assert (row.row_id, row.error_type) == ("0/17", "worker_died")
    assert "killed by SIGKILL" in (row.error_message or "")


@blocks
def test_work_goes_from_a_slow_worker_to_an_idle_one(blocks: bool) -> None:
    parts = [shard(0, 200), shard(1, 20)]
    job = Job(2, Behaviour(slow={0: 0.004, 1: 0.004}, blocks=blocks))
    job.run(*parts)
    assert set(job.rows) == keys(*parts)
    moves = job.notes("moves")
    assert sum(move["num_rows"] for move in moves) >= 40
    assert {move["victim"] for move in moves} >= {"worker-0"}
    assert job.workers_of[0] == {"worker-0", "worker-1"}


def test_a_worker_that_starts_late_finds_its_part(monkeypatch) -> None:
    """Without moving any work afterwards."""
    monkeypatch.setattr(module, "ROWS_AHEAD", 10_000)
    monkeypatch.setattr(module, "STEAL_AHEAD_S", -1.0)
    parts = [shard(index, 20) for index in range(10)]
    job = Job(2, Behaviour(late={1: 0.1}))
    job.run(*parts)
    assert set(job.rows) == keys(*parts)
    done = {row["worker"]: row["num_rows_done"] for row in job.notes("workers")}
    # While the other one starts, the first does some, but keeps to half of what is left.
    assert done["worker-0"] + done["worker-1"] == 200
    assert done["worker-1"] >= 40


def test_a_worker_that_does_not_get_ready_is_started_again() -> None:
    late = {0: 0.0, 1: 30.0}  # until its second life
    job = Job(2, Behaviour(late=late, slow={0: 0.004}))
    job.coordinator._start_timeout_s = 0.1
    links = job.links
    make_link = job.coordinator._make_link

    def make(index: int, deliver: Deliver) -> Any:
        link = make_link(index, deliver)
        if len([one for one in links if one.index == 1]) > 1:
            late[1] = 0.0
        return link

    job.coordinator._make_link = make
    parts = [shard(index, 40) for index in range(6)]
    job.run(*parts)
    assert set(job.rows) == keys(*parts)
    events = [row["event"] for row in job.notes("workers") if row["worker"] == "worker-1"]
    assert events[:3] == ["started", "died", "restarted"]
    assert "ready" in events


def test_a_worker_that_never_lives_is_given_up_and_the_others_do_its_work() -> None:
    job = Job(2, Behaviour(slow={0: 0.004}, stillborn=1))
    parts = [shard(index, 60) for index in range(8)]
    job.run(*parts)
    assert set(job.rows) == keys(*parts)
    events = [row["event"] for row in job.notes("workers") if row["worker"] == "worker-1"]
    assert events.count("died") == health.MAX_FAILURES
    assert events[-1] == "given up"


def test_when_no_worker_is_left_the_job_fails_and_says_why() -> None:
    job = Job(2, Behaviour(death_chance=1.0))
    with pytest.raises(JobFailed, match=r"no worker is left: .*killed by SIGSEGV"):
        job.run(shard(0, 5000))


@pytest.mark.parametrize("fault", [ModelError("no such model"), BackendError("no device")])
def test_what_is_wrong_before_any_worker_is_ready_is_the_jobs(fault) -> None:
    job = Job(2, Behaviour(fault=fault))
    with pytest.raises(type(fault), match=str(fault)):
        job.run(shard(0, 5))


def test_a_stop_leaves_what_is_not_done() -> None:
    job = Job(2, Behaviour())
    timer = threading.Timer(0.1, job.coordinator.stop)
    timer.start()
    job.run(shard(0, 4000))
    assert 0 < len(job.rows) < 4000


def test_a_worker_that_falls_silent_is_killed_and_replaced(monkeypatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.3)
    job = Job(2, Behaviour(is_deaf=lambda index, life: index == 1 and life == 1))
    parts = [shard(index, 30) for index in range(4)]
    job.run(*parts)
    assert set(job.rows) == keys(*parts)
    assert [row["detail"] for row in job.notes("workers") if row["event"] == "died"] == [
        "killed by the test"
    ]


def test_rows_of_an_earlier_life_are_not_heard() -> None:
    job = Job(1, Behaviour())
    job.coordinator.start()
    late = ResultRow(ordinal=0, row_id="0/0", status="ok")
    job.coordinator._inbox.put([(0, 0, Rows(((RowRef(0, 0, "0/0"), late),)))])
    job.coordinator.submit(shard(0, 3), np.arange(3))
    job.coordinator.close()
    job.coordinator.run()
    assert set(job.rows) == keys(shard(0, 3))
    assert job.rows[0, 0] is not late
