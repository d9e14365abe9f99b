"""Many workers in virtual time: the router's own decisions over a coarse engine.

What is the coordinator's is real: `schedulers.route` and `schedulers.load` decide who gets a shard
and what moves at the tail, knowing lengths only from the rows that have ended. What is the engine's
is coarse: all of a worker's running sequences take a step together, at `alpha_d + beta_d n`
seconds, and prompts are computed when their sequences are admitted. So thousands of steps are one
event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from schedulers.cost import StepCost
from schedulers.load import Load, OutputLengths, Part, choose_given, load_of, part_of
from schedulers.route import next_receiver, plan_steal


class SimRow(NamedTuple):
    """A row's lengths; the router does not know the second."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Workers and how they are coordinated.

    Attributes:
        num_workers: W.
        max_seqs: that run at a time on each.
        cost: of its steps.
        max_output_tokens: what a row may take, as the router knows.
        steal: even out the tail.
        steal_ahead_s: a worker with less work than that looks for more.
        rows_ahead: rows that a worker has before it while there are any.
        report_s: seconds between two looks of the router.
        move_s: seconds that sequences are under way.
        carries_kv: their keys and values go with them; else the receiver computes them again.
    """

    num_workers: int
    max_seqs: int
    cost: StepCost
    max_output_tokens: int
    steal: bool = True
    steal_ahead_s: float = 1.0
    rows_ahead: int = 512
    report_s: float = 0.5
    move_s: float = 0.1
    carries_kv: bool = True


class FleetResult(NamedTuple):
    """What came of it.

    Attributes:
        makespan_s: until the last row ended.
        busy_s: seconds in which workers had work, summed.
        num_rows: that ended.
        num_moves: of work between workers.
        num_moved_rows: in them.
        serial_s: what the longest row takes by itself: no job is shorter.
    """

    makespan_s: float
    busy_s: float
    num_rows: int
    num_moves: int
    num_moved_rows: int
    serial_s: float
    num_workers: int

    @property
    def idle_share(self) -> float:
        """Of all workers' seconds until the end."""
        return 1.0 - self.busy_s / (self.makespan_s * self.num_workers)


class _Seq:
    """A sequence, as `schedulers.load` looks at it."""

    __slots__ = (
        "end_step", "max_total_tokens", "num_computed_tokens", "num_prompt_tokens", "num_tokens",
        "row",
    )  # fmt: skip

    def __init__(self, row: SimRow, max_output_tokens: int) -> None:
        self.row = row
        self.num_prompt_tokens = self.num_tokens = row.num_prompt_tokens
        self.num_computed_tokens = 0
        self.max_total_tokens = row.num_prompt_tokens + max_output_tokens
        self.end_step = 0

    @property
    def remaining(self) -> int:
        return self.row.num_prompt_tokens + self.row.num_output_tokens - self.num_tokens


@dataclass(slots=True)
class _Worker:
    """One engine, as of `at_s`: it has taken `step` steps."""

    index: int
    config: FleetConfig
    at_s: float = 0.0
    step: int = 0
    busy_s: float = 0.0
    waiting: deque[_Seq] = field(default_factory=deque[_Seq])
    running: list[tuple[int, int, _Seq]] = field(default_factory=list[tuple[int, int, _Seq]])
    serial: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def step_s(self) -> float:
        cost = self.config.cost
        return cost.alpha_d + cost.beta_d * len(self.running)

    @property
    def next_s(self) -> float:
        """When its next sequence ends; infinite without one."""
        if not self.running:
            return float("inf")
        return self.at_s + (self.running[0][0] - self.step) * self.step_s

    def advance(self, now_s: float) -> list[_Seq]:
        """Work until `now_s`, in whole steps; returns what has ended."""
        ended: list[_Seq] = []
        while self.running and self.at_s < now_s:
            num_steps = self.running[0][0] - self.step
            whole = int((now_s - self.at_s) / self.step_s + 1e-9)
            if whole < num_steps:
                self._take(whole)
                return ended
            self._take(num_steps)
            while self.running and self.running[0][0] <= self.step:
                ended.append(heappop(self.running)[2])
            self.admit()
        if not self.running:
            self.at_s = max(self.at_s, now_s)
        return ended

    def _take(self, num_steps: int) -> None:
        seconds = num_steps * self.step_s
        self.step += num_steps
        self.at_s += seconds
        self.busy_s += seconds

    def admit(self) -> None:
        """Fill free places, computing the prompts."""
        cost = self.config.cost
        num_tokens = 0
        while self.waiting and len(self.running) < self.config.max_seqs:
            seq = self.waiting.popleft()
            num_tokens += seq.num_tokens - seq.num_computed_tokens
            seq.end_step = self.step + max(1, seq.remaining)
            self.serial += 1
            heappush(self.running, (seq.end_step, self.serial, seq))
        if num_tokens:
            seconds = cost.alpha_p + cost.beta_p * num_tokens
            self.at_s += seconds
            self.busy_s += seconds

    def look(self) -> list[_Seq]:
        """All its sequences, those that run as far as they have come."""
        for end_step, _, seq in self.running:
            left = end_step - self.step
            seq.num_tokens = seq.row.num_prompt_tokens + seq.row.num_output_tokens - left
            seq.num_computed_tokens = seq.num_tokens - 1
        return [*(seq for _, _, seq in self.running), *self.waiting]

    def take_out(self, gone: set[int]) -> None:
        self.running = [item for item in self.running if id(item[2]) not in gone]
        heapify(self.running)
        self.waiting = deque(seq for seq in self.waiting if id(seq) not in gone)


class FleetSimulator:
    """Runs shards of rows on workers. Deterministic."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._workers = [_Worker(index, config) for index in range(config.num_workers)]
        self._ended: list[int] = []
        self._num_moves = self._num_moved_rows = 0
        self._last_s = 0.0

    def run(self, shards: Iterable[Sequence[SimRow]]) -> FleetResult:
        """Do all rows of all shards, handed out in their order."""
        pieces = deque(shards)
        num_rows = sum(len(piece) for piece in pieces)
        longest = max((row.num_output_tokens for piece in pieces for row in piece), default=0)
        now_s = 0.0
        while len(self._ended) < num_rows:
            self._hand_out(pieces)
            if self._config.steal and not pieces:
                self._even_out(now_s)
            now_s = self._next_look(now_s)
            for worker in self._workers:
                self._advance(worker, now_s)
        return FleetResult(
            self._last_s,
            sum(worker.busy_s for worker in self._workers),
            len(self._ended),
            self._num_moves,
            self._num_moved_rows,
            longest * (self._config.cost.alpha_d + self._config.cost.beta_d),
            self._config.num_workers,
        )

    def _next_look(self, now_s: float) -> float:
        """The router's next look; later where nothing happens before."""
        soonest_s = min(worker.next_s for worker in self._workers)
        return max(now_s + self._config.report_s, soonest_s)

    def _advance(self, worker: _Worker, now_s: float) -> None:
        ended = worker.advance(now_s)
        if ended:
            self._last_s = max(self._last_s, worker.at_s)
            self._ended.extend(seq.row.num_output_tokens for seq in ended)

    def _hand_out(self, pieces: deque[Sequence[SimRow]]) -> None:
        loads = {worker.index: Load(worker.num_rows) for worker in self._workers}
        while pieces:
            rows = {worker.index: worker.num_rows for worker in self._workers}
            index = next_receiver(loads, rows_ahead=self._config.rows_ahead, rows=rows)
            if index is None:
                return
            worker = self._workers[index]
            limit = self._config.max_output_tokens
            worker.waiting.extend(_Seq(row, limit) for row in pieces.popleft())
            worker.admit()

    def _even_out(self, now_s: float) -> None:
        cost = self._config.cost
        recent = self._ended[-2000:]
        lengths = OutputLengths(recent)
        seqs = {worker.index: worker.look() for worker in self._workers}
        parts = {
            index: [part_of(seq, lengths, cost) for seq in found] for index, found in seqs.items()
        }
        loads = {index: load_of(found, cost) for index, found in parts.items()}
        busy: set[int] = set()
        while (
            steal := plan_steal(loads, ahead_s=self._config.steal_ahead_s, busy=frozenset(busy))
        ) is not None:
            busy |= {steal.thief, steal.victim}
            self._move(
                self._workers[steal.victim],
                self._workers[steal.thief],
                seqs[steal.victim],
                parts[steal.victim],
                steal.share_s,
                now_s,
            )

    def _move(
        self,
        victim: _Worker,
        thief: _Worker,
        seqs: list[_Seq],
        parts: list[Part],
        share_s: float,
        now_s: float,
    ) -> None:
        num_running = len(victim.running)
        waiting = [index >= num_running for index in range(len(seqs))]
        again_s = 0.0 if self._config.carries_kv else self._config.cost.beta_p
        move_s = [again_s * seq.num_computed_tokens for seq in seqs]
        chosen = choose_given(parts, waiting, share_s, move_s=move_s)
        moved = [seqs[index] for index in chosen]
        if not moved:
            return
        victim.take_out({id(seq) for seq in moved})
        if not self._config.carries_kv:
            for seq in moved:
                seq.num_computed_tokens = 0
        thief.waiting.extend(moved)
        thief.at_s = max(thief.at_s, now_s) + (self._config.move_s if not thief.running else 0.0)
        thief.admit()
        victim.admit()
        self._num_moves += 1
        self._num_moved_rows += len(moved)
