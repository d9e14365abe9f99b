r"""The coordinator: gives rows to workers, evens out the tail, survives the death of any worker.

One thread takes what the workers say, one message after another, and decides; what finished goes on
to the collector. It computes nothing and writes nothing. Which worker gets what is the affair of
`schedulers.route`, which rows are to blame for deaths that of `health`.

Life of a worker:  starting -> ready -> ending -> over
                       \--------\--> waiting (to be started again) -> starting
                                        \--> over (given up)
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from flows.collector import FromWorker, Item, Note
from flows.errors import JobFailed
from flows.fleet.health import Cell, Failures, Suspects
from flows.fleet.links import Deliver, Link
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
    Ready,
    Report,
    Rows,
    Started,
    Steps,
    Stop,
)
from flows.fleet.ownership import NOBODY, RowOwners
from flows.queues import Outbox, RowKey, RowRef, Stopped
from schedulers.load import Load
from schedulers.memory import MemoryPlan
from schedulers.route import next_receiver, plan_steal
from storage.results import ResultRow
from storage.shards import Shard
from workers.errors import BackendError

ROWS_AHEAD = 2048
"""Rows that a worker has before it, at least, while there are any: more than its engine takes
in.
"""

STEAL_AHEAD_S = 1.0
"""A worker with less work than that looks for more."""

SILENCE_S = 60.0
"""A worker that has said nothing for that long is taken for dead, and killed."""

STOP_S = 20.0
"""Seconds after which a worker that was told to stop is killed."""

MESSAGES = 16
"""That wait to be heard, and to be written: whoever says more waits."""

Status = Literal["starting", "ready", "ending", "waiting", "over"]
_log = logging.getLogger(__name__)


class MakeLink(Protocol):
    """Makes the link of a worker's next life."""

    def __call__(self, index: int, deliver: Deliver) -> Link: ...


class Move(NamedTuple):
    """Work that is on its way from one worker to another."""

    thief: int
    share_s: float
    gain_s: float
    asked_s: float


@dataclass(slots=True)
class WorkerState:
    """What the coordinator knows of a worker.

    Attributes:
        life: counts its lives: what an earlier one still says is not heard.
        load: as it last reported; `is_stale` after work has come or gone since.
        started: rows that are being computed.
        cell: rows that it computes apart from all others.
    """

    index: int
    name: str
    link: Link | None = None
    life: int = 0
    status: Status = "over"
    heard_s: float = 0.0
    due_s: float = 0.0
    load: Load = field(default_factory=Load)
    is_stale: bool = False
    started: set[RowKey] = field(default_factory=set[RowKey])
    cell: Cell = ()
    move: Move | None = None
    failures: Failures = field(default_factory=Failures)
    num_rows_done: int = 0


class Coordinator:
    """Runs the rows of submitted shards on workers. `run` is the body of a thread.

    Args:
        names: of the workers; one that is "" is this process's own, and its failure is the run's.
        make_link: makes a worker's next life.
        collect: takes what goes to the files; may wait.
        find_row_id: the name of a row of a shard.
        clock: seconds, monotonic.
        kv_bytes_per_s: how fast keys and values travel between two workers; 0: they do not.
        start_timeout_s: a worker that is not ready by then is killed, and started again.
        on_ready: told of the memory of the first worker that is ready.
        on_assign: told of shards and the names of workers that get rows of them.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        make_link: MakeLink,
        collect: Callable[[Sequence[Item]], None],
        find_row_id: Callable[[Shard, int], str],
        clock: Callable[[], float] = time.monotonic,
        kv_bytes_per_s: float = 0.0,
        start_timeout_s: float = 600.0,
        on_ready: Callable[[MemoryPlan], None] = lambda _: None,
        on_assign: Callable[[int, str], None] = lambda _index, _worker: None,
    ) -> None:
        self._workers = [WorkerState(index, name) for index, name in enumerate(names)]
        self._make_link = make_link
        self._collect = collect
        self._find_row_id = find_row_id
        self._clock = clock
        self._kv_bytes_per_s = kv_bytes_per_s
        self._start_timeout_s = start_timeout_s
        self._on_ready = on_ready
        self._on_assign = on_assign
        self._inbox: Outbox[tuple[int, int, Event] | Assign] = Outbox(MESSAGES, weigh=_weight)
        self._owners = RowOwners()
        self._pieces: deque[Assign] = deque()
        self._suspects = Suspects()
        self._any_ready = threading.Event()
        self._was_ready = False
        self._closing = False
        self._stopping = False
        self._told_stop = False
        self._minded_s = clock()
        self._handlers: dict[type, Callable[[WorkerState, Any], None]] = {
            Ready: self._ready,
            Started: self._begun,
            Began: self._began,
            Rows: self._answer,
            Block: self._answer_block,
            Steps: self._recorded,
            Report: self._reported,
            Given: self._pass_on,
            Failed: self._failed,
            Gone: self._gone,
            Ended: self._ended,
        }

    # -- from other threads --

    def start(self) -> None:
        """Bring all workers to life. In the caller's thread, before `run`.

        Raises:
            Exception: of a worker in this process, what is wrong with its model.
        """
        for worker in self._workers:
            self._start(worker)

    def wait_ready(self) -> None:
        """Wait until a worker is ready, or `run` has ended."""
        self._any_ready.wait()

    def submit(self, shard: Shard, missing: Any) -> None:
        """Have rows of a shard computed."""
        self._inbox.put([Assign(shard, missing)])

    def close(self) -> None:
        """Nothing more will be submitted: `run` ends when all rows are answered."""
        self._closing = True
        self._inbox.wake()

    def stop(self) -> None:
        """End soon: workers send what has finished, the rest is left."""
        self._stopping = True
        self._inbox.wake()

    # -- the thread --

    def run(self) -> None:
        """Coordinate until all is done, or until `stop`.

        Raises:
            JobFailed: no worker is left.
            Exception: what is wrong with the job, as a worker found it.
        """
        try:
            while not self._is_over():
                for message in self._inbox.take(timeout_s=0.25):
                    if isinstance(message, Assign):
                        self._pieces.append(self._owners.open(*message))
                    else:
                        self._hear(*message)
                self._mind()
                if not self._stopping:
                    self._route()
        finally:
            self._inbox.stop()
            self._any_ready.set()
            self._end_links()

    def _is_over(self) -> bool:
        if not all(worker.status == "over" for worker in self._workers):
            return False
        return self._stopping or (self._closing and not self._owners and not self._pieces)

    def _end_links(self) -> None:
        for worker in self._workers:
            if worker.link is not None:
                if worker.status != "over":
                    worker.link.kill()
                worker.link.close()

    # -- what workers say --

    def _hear(self, index: int, life: int, event: Event) -> None:
        worker = self._workers[index]
        if life != worker.life or worker.status in ("waiting", "over"):
            return
        worker.heard_s = self._clock()
        self._handlers[type(event)](worker, event)

    def _begun(self, worker: WorkerState, event: Started) -> None:
        worker.started.update(ref[:2] for ref in event.refs)

    def _began(self, worker: WorkerState, event: Began) -> None:
        worker.started.update((event.shard_index, n) for n in event.ordinals.tolist())

    def _recorded(self, worker: WorkerState, event: Steps) -> None:
        self._collect([FromWorker(worker.name, event)])

    def _reported(self, worker: WorkerState, event: Report) -> None:
        worker.load, worker.is_stale = event.load, False
        if event.works:
            self._collect([FromWorker(worker.name, event.works)])

    def _gone(self, worker: WorkerState, event: Gone) -> None:
        if worker.status == "ending":
            self._ended(worker, Ended())
        else:
            self._died(worker, event.reason)

    def _ready(self, worker: WorkerState, event: Ready) -> None:
        worker.status = "ready"
        if not self._was_ready:
            self._was_ready = True
            self._on_ready(event.memory)
        self._note(worker, "ready", detail=event.device)
        self._any_ready.set()

    def _answer(self, worker: WorkerState, event: Rows) -> None:
        rows = [
            (ref, row) for ref, row in event.rows if self._owners.owner(ref[:2]) == worker.index
        ]
        _warn_of_strange(worker, len(event.rows) - len(rows))
        keys = {ref[:2] for ref, _ in rows}
        for key in keys:
            self._owners.answer(key)
        self._note_answers(worker, keys)
        self._collect([FromWorker(worker.name, Rows(tuple(rows)))])

    def _answer_block(self, worker: WorkerState, event: Block) -> None:
        index = event.shard_index
        own = self._owners.owned(index, event.ordinals, worker.index)
        if not own.all():
            _warn_of_strange(worker, int((~own).sum()))
            event = event.only(own)
        if len(event.ordinals):
            self._owners.answer_all(index, event.ordinals)
            self._note_answers(worker, {(index, n) for n in event.ordinals.tolist()})
            self._collect([FromWorker(worker.name, event)])

    def _note_answers(self, worker: WorkerState, keys: set[RowKey]) -> None:
        self._suspects.note_answers(keys)
        worker.started -= keys
        worker.failures.note_progress()
        worker.num_rows_done += len(keys)
        worker.cell = tuple(key for key in worker.cell if key not in keys)

    def _ended(self, worker: WorkerState, event: Ended) -> None:
        worker.status = "over"
        if worker.name and event.works:
            self._collect([FromWorker(worker.name, event.works)])
        self._note(worker, "ended")

    # -- deaths --

    def _failed(self, worker: WorkerState, event: Failed) -> None:
        """A worker gave up in good order. What is not its device's doing is the job's."""
        fault = event.fault
        if not worker.name or not self._was_ready or not isinstance(fault, BackendError):
            worker.status = "over"
            raise fault
        self._died(worker, f"{type(fault).__name__}: {fault}")

    def _died(self, worker: WorkerState, reason: str) -> None:
        self._note(worker, "died", detail=reason, num_rows=self._owners.num_rows(worker.index))
        _log.warning("%s died: %s", worker.name, reason)
        blameless = bool(worker.cell)  # it is the rows' doing
        if blameless:
            self._cell_died(worker, reason)
        else:
            self._take_back(worker, blame=worker.status == "ready")
        worker.started.clear()
        worker.move = None
        worker.load, worker.is_stale = Load(), False
        if worker.link is not None:
            worker.link.kill()
        self._restart_later(worker, blameless=blameless, reason=reason)

    def _take_back(self, worker: WorkerState, *, blame: bool) -> None:
        """The rows of a dead worker go back, but those that should be computed apart."""
        lost = self._owners.rows_of(worker.index)
        for part in lost:
            self._owners.give(part, NOBODY)
        if not blame:
            self._pieces.extendleft(reversed(lost))
            return
        keys = [(part.shard.index, n) for part in lost for n in part.ordinals.tolist()]
        running = [key for key in keys if key in worker.started] or keys
        apart = set(running) - set(self._suspects.note_death(running))
        back = [key for key in keys if key not in apart]
        self._pieces.extendleft(reversed(self._owners.parts(back)))

    def _cell_died(self, worker: WorkerState, reason: str) -> None:
        """A worker died over a cell; its rows go on in smaller ones."""
        cell, worker.cell = worker.cell, ()
        for part in self._owners.parts(cell):
            self._owners.give(part, NOBODY)
        culprit = self._suspects.note_cell_death(cell)
        if culprit is not None:
            self._condemn(culprit, reason)

    def _condemn(self, key: RowKey, reason: str) -> None:
        """A row that kills its worker, also when it is alone, becomes an error row."""
        index, ordinal = key
        row_id = self._find_row_id(self._owners.shard(index), ordinal)
        row = ResultRow(
            ordinal=ordinal,
            row_id=row_id,
            status="error",
            finish_reason="error",
            error_type="worker_died",
            error_message=f"computing it ends the worker each time, also by itself: {reason}",
        )
        self._owners.answer(key)
        self._suspects.note_answers({key})
        self._collect([FromWorker("", Rows(((RowRef(index, ordinal, row_id), row),)))])

    def _restart_later(self, worker: WorkerState, *, blameless: bool, reason: str) -> None:
        if self._stopping or worker.status == "ending":
            worker.status = "over"
            return
        delay_s = 0.0 if blameless else worker.failures.note_death()
        if delay_s is not None:
            worker.status, worker.due_s = "waiting", self._clock() + delay_s
            return
        worker.status = "over"
        self._note(worker, "given up", detail=reason)
        _log.error("%s is given up: it died %d times in a row", worker.name, worker.failures.count)
        if all(other.status == "over" for other in self._workers):
            raise JobFailed(
                f"no worker is left: each died {worker.failures.count} times in a row without a "
                f"finished row, {worker.name} last ({reason}). Finished rows are kept; run the "
                "same command again to go on"
            )

    # -- time --

    def _mind(self) -> None:
        """What is due: restarts, silence, the end."""
        now_s = self._clock()
        if now_s > self._minded_s + SILENCE_S / 4:  # nobody was listened to
            for worker in self._workers:
                worker.heard_s = now_s
        self._minded_s = now_s
        for worker in self._workers:
            if worker.status == "waiting" and (self._stopping or self._is_idle()):
                worker.status = "over"
            elif worker.status == "waiting" and now_s >= worker.due_s:
                self._start(worker)
            elif (
                worker.status in ("ready", "ending")
                and worker.name
                and now_s > worker.heard_s + SILENCE_S
            ):
                _log.warning("%s has been silent for %.0f s; it is killed", worker.name, SILENCE_S)
                _kill(worker, now_s)
            elif (
                worker.status == "starting"
                and worker.name
                and now_s > worker.heard_s + self._start_timeout_s
            ):
                _log.warning(
                    "%s has not loaded its model in %.0f s; it is killed (see --start-timeout-s)",
                    worker.name, self._start_timeout_s,
                )  # fmt: skip
                _kill(worker, now_s)
        if self._stopping:
            self._tell_stop(now_s)
        elif self._closing and self._is_idle():
            self._tell_finish()

    def _is_idle(self) -> bool:
        """Everything that was submitted is answered, and nothing will follow."""
        return self._closing and not self._owners and not self._pieces and not len(self._inbox)

    def _tell_finish(self) -> None:
        for worker in self._workers:
            if worker.status == "ready":
                worker.status = "ending"
                self._send(worker, Finish())
            elif worker.status == "starting":
                self._end_unready(worker)

    def _tell_stop(self, now_s: float) -> None:
        if not self._told_stop:
            self._told_stop = True
            for worker in self._workers:
                worker.due_s = now_s + STOP_S
                if worker.status == "starting" and worker.name:
                    self._end_unready(worker)
                elif worker.status in ("ready", "ending", "starting"):
                    worker.status = "ending"
                    self._send(worker, Stop())
        for worker in self._workers:
            if worker.status == "ending" and worker.name and now_s >= worker.due_s:
                assert worker.link is not None
                worker.link.kill()
                worker.due_s = now_s + STOP_S

    def _end_unready(self, worker: WorkerState) -> None:
        """A worker that is still loading is not waited for."""
        assert worker.link is not None
        worker.status = "ending"
        worker.link.kill()

    def _start(self, worker: WorkerState) -> None:
        if worker.link is not None:
            worker.link.close()
        worker.life += 1
        index, life = worker.index, worker.life

        def deliver(event: Event) -> None:
            try:
                self._inbox.put([(index, life, event)])
            except Stopped:
                return  # the run has ended

        worker.status, worker.heard_s = "starting", self._clock()
        worker.link = self._make_link(index, deliver)
        self._note(worker, "started" if life == 1 else "restarted")
        worker.link.start()

    # -- who gets what --

    def _route(self) -> None:
        ready = [worker for worker in self._workers if worker.status == "ready"]
        apart = self._run_cells(ready)
        takers = [worker for worker in ready if worker is not apart]
        while self._pieces and takers:
            loads = {worker.index: self._load(worker) for worker in takers}
            rows = {worker.index: self._owners.num_rows(worker.index) for worker in takers}
            index = next_receiver(loads, rows_ahead=self._rows_ahead(), rows=rows)
            if index is None:
                return
            self._assign(self._workers[index], self._pieces.popleft())
        if not self._pieces:
            self._plan_steals(takers)

    def _rows_ahead(self) -> int:
        """Rows that a worker is given at least, but no more than its part: those that are still
        starting have theirs waiting for them.
        """
        living = sum(worker.status in ("starting", "waiting", "ready") for worker in self._workers)
        return min(ROWS_AHEAD, -(-self._owners.num_open // max(1, living)))

    def _run_cells(self, ready: Sequence[WorkerState]) -> WorkerState | None:
        """The worker that computes cells, or is about to; it gets nothing else."""
        apart = next((worker for worker in ready if worker.cell), None)
        if apart is not None or not self._suspects.cells or not ready:
            return apart
        apart = min(ready, key=lambda worker: self._owners.num_rows(worker.index))
        if self._owners.num_rows(apart.index) == 0 and apart.move is None:
            cell = self._suspects.cells.popleft()
            apart.cell = cell
            for part in self._owners.parts(cell):
                self._assign(apart, part)
        return apart

    def _load(self, worker: WorkerState) -> Load:
        """As reported, with what it has been given since."""
        load, num_rows = worker.load, self._owners.num_rows(worker.index)
        if not num_rows:
            return Load()
        if not load.num_rows:
            return Load(num_rows)
        return load._replace(num_rows=num_rows, work_s=load.work_s * num_rows / load.num_rows)

    def _assign(self, worker: WorkerState, part: Assign) -> None:
        self._owners.give(part, worker.index)
        worker.is_stale = True
        self._on_assign(part.shard.index, worker.name)
        self._send(worker, part)

    def _send(self, worker: WorkerState, command: Command) -> None:
        assert worker.link is not None
        worker.link.send(command)

    # -- moves --

    def _plan_steals(self, takers: Sequence[WorkerState]) -> None:
        loads = {worker.index: self._load(worker) for worker in takers}
        thieves = {worker.move.thief for worker in takers if worker.move is not None}
        unknown = {index for index, load in loads.items() if load.num_rows and not load.total_s}
        busy = unknown | {
            worker.index
            for worker in takers
            if worker.move is not None or worker.is_stale or worker.index in thieves
        }
        while True:
            steal = plan_steal(loads, ahead_s=STEAL_AHEAD_S, busy=frozenset(busy))
            if steal is None:
                return
            busy |= {steal.thief, steal.victim}
            victim = self._workers[steal.victim]
            victim.move = Move(steal.thief, steal.share_s, steal.gain_s, self._clock())
            self._send(victim, Give(steal.share_s, self._kv_bytes_per_s))

    def _pass_on(self, victim: WorkerState, given: Given) -> None:
        """Rows that a worker gave back go to the one they were meant for, or to nobody."""
        move, victim.move = victim.move, None
        parts = self._owners.parts(parcel.ref[:2] for parcel in given.parcels)
        thief = None if move is None else self._workers[move.thief]
        victim.is_stale = True
        victim.started.difference_update(parcel.ref[:2] for parcel in given.parcels)
        if thief is None or thief.status != "ready" or thief.cell:
            for part in (*parts, *given.unread):
                self._owners.give(part, NOBODY)
                self._pieces.appendleft(part)
            return
        thief.is_stale = True
        for part in given.unread:
            self._assign(thief, part)
        for part in parts:
            self._owners.give(part, thief.index)
            self._on_assign(part.shard.index, thief.name)
        if parts:
            self._send(thief, Adopt(given.parcels))
        assert move is not None
        self._note_move(victim, thief, move, given)

    # -- telemetry --

    def _note(
        self, worker: WorkerState, event: str, *, detail: str = "", num_rows: int = 0
    ) -> None:
        if not worker.name:
            return
        self._collect(
            [
                Note(
                    "workers",
                    {
                        "at_s": self._clock(),
                        "worker": worker.name,
                        "life": worker.life,
                        "event": event,
                        "detail": detail,
                        "num_rows": num_rows,
                        "num_rows_done": worker.num_rows_done,
                    },
                )
            ]
        )

    def _note_move(self, victim: WorkerState, thief: WorkerState, move: Move, given: Given) -> None:
        begun = [parcel.resume for parcel in given.parcels if parcel.resume is not None]
        carried = [resume.kv for resume in begun if resume.kv is not None]
        self._collect(
            [
                Note(
                    "moves",
                    {
                        "at_s": self._clock(),
                        "victim": victim.name,
                        "thief": thief.name,
                        "num_rows": given.num_rows,
                        "num_begun": len(begun),
                        "num_with_kv": len(carried),
                        "num_kv_tokens": sum(kv.num_tokens for kv in carried),
                        "share_s": move.share_s,
                        "gain_s": move.gain_s,
                        "elapsed_s": self._clock() - move.asked_s,
                    },
                )
            ]
        )


def _warn_of_strange(worker: WorkerState, num_rows: int) -> None:
    if num_rows:
        _log.error(
            "%s answered %d rows that are not its own; they are left out", worker.name, num_rows
        )


def _kill(worker: WorkerState, now_s: float) -> None:
    assert worker.link is not None
    worker.link.kill()
    worker.heard_s = now_s


def _weight(message: tuple[int, int, Event] | Assign) -> int:
    """A block is a whole superbatch: one at a time waits."""
    return MESSAGES if isinstance(message[-1], Block) else 1
