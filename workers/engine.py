"""The engine: plan, apply, execute, resume.

One engine drives one backend, in one thread, over any number of requests. It owns the sequences and
the block tables; the policy decides, the backend computes, the coroutines advance. A row ends in
exactly one `Result`, whatever happens to it on the way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from schedulers.blocks import BlockManager, blocks_for
from schedulers.loop import Loop, NothingPlanned
from schedulers.view import Budget, Finished, Outcome, Plan, Policy, SeqId
from workers.backends.base import Backend, Batch
from workers.errors import DeviceOutOfMemory, InternalError
from workers.intake import IterableSource, RequestSource
from workers.pressure import MemoryPressure, split
from workers.request import (
    Completion,
    EventRecord,
    KVState,
    Request,
    RequestId,
    Result,
    Resume,
    RowError,
    Sampled,
    StepRecord,
)
from workers.rows import RowTable
from workers.sequence import FindStop, Sequence
from workers.times import EngineTimes, ExecuteTimes, Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one engine.

    Attributes:
        num_blocks: KV blocks in the pool (`schedulers.memory.plan_memory` computes it).
        block_size: KV positions per block.
        budget: tokens and holders of one step, and how admission reserves memory.
        window: requests taken in at a time; longest first within it.
        share_prefixes: reuse KV blocks of equal prompt prefixes.
        row_timeout_s: a row that has run for longer becomes an error row; None: never.
    """

    num_blocks: int
    block_size: int = 16
    budget: Budget
    window: int = 1024
    share_prefixes: bool = True
    row_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1")
        if self.row_timeout_s is not None and self.row_timeout_s <= 0:
            raise ValueError(f"row_timeout_s is {self.row_timeout_s}; it must be above 0")


class Engine:
    """Runs requests through a backend under a policy.

    Args:
        backend: computes; `allocate` is called here.
        policy: decides; owned by this engine.
        config: sizes.
        clock: seconds, monotonic.
        find_stop: makes the stop-string finder of a request; needed for requests with stop strings.
        on_step: told of every step.
        on_event: told of every decision that the policy reports.
        on_start: told of the requests whose computation begins, before it does.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        find_stop: Callable[[tuple[str, ...]], FindStop] | None = None,
        on_step: Callable[[StepRecord], None] = lambda _: None,
        on_event: Callable[[EventRecord], None] = lambda _: None,
        on_start: Callable[[list[RequestId]], None] = lambda _: None,
    ) -> None:
        self.backend = backend
        self.policy = policy
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks, config.block_size, share_prefixes=config.share_prefixes
        )
        backend.allocate(num_blocks=config.num_blocks, block_size=config.block_size)
        self._loop: Loop[Sequence] = Loop(
            policy, self.blocks, config.budget, on_admit=self._admitted
        )
        self._pressure = MemoryPressure(config.budget)
        self._clock = clock
        self._find_stop = find_stop
        self._on_step = on_step
        self._on_event = on_event
        self._on_start = on_start
        self._starting: list[RequestId] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._rows = RowTable()
        self._source: RequestSource = IterableSource(())
        self._next_seq_id = 0
        self._num_steps = 0
        self._intake_s = 0.0
        self._stopping = False

    # -- the loop --

    def run(self, requests: Iterable[Request] | RequestSource) -> Iterator[Result]:
        """Yield one result per request, in order of completion.

        Takes requests as it needs them. May be called again when it has ended: the engine is
        reusable. Ends early after `stop`; what had not finished then has no result.
        """
        self._source = requests if hasattr(requests, "take") else IterableSource(requests)  # type: ignore[assignment, arg-type]
        self._stopping = False
        while not self._stopping:
            self._answer_calls()
            self._take_in()
            if self._loop.has_work:
                self.step()
            elif self._source.exhausted and not self._rows.has_results:
                break
            yield from self._rows.drain()
        self._abandon()

    def stop(self) -> None:
        """End `run` after the current step. Safe from other threads and signal handlers."""
        self._stopping = True

    def call(self, function: Callable[[], None]) -> None:
        """Have something done in the engine's thread, between two steps of `run`, which ends with
        what it raises. Safe from other threads.
        """
        self._calls.append(function)

    def _answer_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def step(self) -> None:
        """One turn of the wheel."""
        watch = Stopwatch(self._clock)
        started_s = watch.last_s
        try:
            plan = self._loop.plan(input_exhausted=self._source.exhausted, now_s=started_s)
        except NothingPlanned as bug:
            raise InternalError(str(bug)) from bug
        plan_s = watch.lap()
        batch = Batch(tuple(self._loop.apply(plan)))
        self._tell_started()
        apply_s = watch.lap()
        sampled, execute = self._execute(batch)
        elapsed_s = watch.lap()
        finished = self._resume(batch, sampled)
        resume_s = watch.lap()
        outcome = self._account(plan, batch, finished, started_s, elapsed_s)
        intake_s, self._intake_s = self._intake_s, 0.0
        parts = EngineTimes(intake_s, plan_s, apply_s, resume_s, watch.lap())
        self._on_step(self._record(plan, batch, outcome, started_s, parts, execute))

    def _tell_started(self) -> None:
        if self._starting:
            self._on_start(self._starting)
            self._starting = []

    @property
    def num_in_flight(self) -> int:
        """Requests taken in that have no result yet."""
        return self._rows.num_open

    # -- execute --

    def _execute(self, batch: Batch) -> tuple[dict[SeqId, Sampled], ExecuteTimes]:
        """Compute, in smaller batches when the device has no memory for this one."""
        sampled: dict[SeqId, Sampled] = {}
        times = ExecuteTimes()
        largest = 0
        pending = [batch]
        while pending:
            part = Batch(tuple(s for s in pending.pop().segments if s.seq.state != "finished"))
            if not part.segments:
                continue
            try:
                done = self.backend.execute(part)
            except DeviceOutOfMemory as error:
                pending.extend(self._halve(part, error))
                continue
            largest = max(largest, part.num_tokens)
            sampling = [segment.seq.seq_id for segment in part.segments if segment.sample]
            sampled.update(zip(sampling, done.sampled, strict=True))
            times = times.plus(done.times)
        loop = self._loop
        loop.budget = self._pressure.after_step(loop.budget, batch.num_tokens, largest)
        return sampled, times

    def _halve(self, batch: Batch, error: DeviceOutOfMemory) -> list[Batch]:
        """Two halves of a batch that did not fit, the second first; a single token's row fails."""
        if batch.num_tokens > 1:
            return list(reversed(split(batch)))
        self._fail(batch.segments[0].seq, RowError("out_of_memory", str(error)))
        return []

    # -- resume --

    def _resume(self, batch: Batch, sampled: dict[SeqId, Sampled]) -> list[Finished]:
        """Give every sequence of the batch what it waited for, and let its coroutine go on."""
        finished: list[Finished] = []
        for segment in batch.segments:
            seq = segment.seq
            if seq.state == "finished":
                continue  # its row failed in this step
            self._loop.advance(segment)
            seq.sampled = sampled.get(seq.seq_id)
            if segment.sample and not seq.num_output_tokens:
                self._start_siblings(seq)
            try:
                seq.coroutine.send(None)
            except StopIteration as end:
                finished.append(
                    Finished(
                        seq.num_prompt_tokens,
                        seq.num_output_tokens,
                        seq.admission,
                        seq.num_cached_tokens,
                    )
                )
                self._complete(seq, end.value)
        self._expire()
        return finished

    def _admitted(self, seq: Sequence, num_cached_tokens: int) -> None:
        if seq.started_s is None:
            seq.started_s = self._clock()
            seq.num_cached_tokens = num_cached_tokens
            self._starting.append(seq.request.request_id)

    def _start_siblings(self, seq: Sequence) -> None:
        """A row's first sample has its prompt in KV memory: the others may share it now."""
        row = self._rows[seq]
        if not row.siblings_started:
            row.siblings_started = True
            self._loop.waiting.add_siblings(row.sequences[1:])

    def _complete(self, seq: Sequence, completion: Completion) -> None:
        """A sample has ended, well or not."""
        if seq.error is not None:
            self._fail(seq, RowError("numerical_error", seq.error))
            return
        self._release(seq)
        self._rows.complete(seq, completion, now_s=self._clock())

    def _fail(self, seq: Sequence, error: RowError) -> None:
        """End a whole row with an error, wherever its samples are."""
        for item in self._rows[seq].sequences:
            self._release(item)
        self._rows.fail(seq, error, now_s=self._clock())

    def _release(self, seq: Sequence) -> None:
        """Give back all that a sample holds. Without effect on one that has ended."""
        if seq.state == "finished":
            return
        self._loop.release(seq)
        seq.coroutine.close()
        seq.state = "finished"
        self.backend.forget(seq.seq_id)

    def _expire(self) -> None:
        """Rows that have run for too long become error rows."""
        limit_s = self.config.row_timeout_s
        if limit_s is None:
            return
        now_s = self._clock()
        for seq in list(self._loop.running.values()):
            if (
                seq.state != "finished"
                and seq.started_s is not None
                and now_s - seq.started_s > limit_s
            ):
                message = (
                    f"not finished after {limit_s:g} s ({seq.num_output_tokens} tokens generated)"
                )
                self._fail(seq, RowError("timeout", message))

    # -- intake --

    def _take_in(self) -> None:
        room = self.config.window - len(self._loop.waiting)
        if room < 1 or self._source.exhausted:
            return
        watch = Stopwatch(self._clock)
        for request in self._source.take(room, wait=not self._loop.has_work):
            self._arrive(request)
        self._intake_s += watch.lap()

    def _arrive(self, request: Request) -> None:
        error = self._refusal(request)
        if error is not None:
            self._rows.refuse(request, error)
            return
        sequences = [self._sequence(request, index) for index in range(request.sampling.n)]
        self._rows.open(request, sequences)
        if request.resume is not None:
            self._resume_elsewhere(sequences[0], request.resume)
            return
        for seq in sequences:
            seq.coroutine.send(None)
        self._loop.waiting.arrive(sequences[0])

    def _sequence(self, request: Request, sample_index: int) -> Sequence:
        seq_id = SeqId(self._next_seq_id)
        self._next_seq_id += 1
        stops = request.sampling.stop
        if stops and self._find_stop is None:
            raise ValueError("a request has stop strings, but the engine was given no find_stop")
        return Sequence(
            seq_id,
            request,
            sample_index=sample_index,
            max_model_len=self.backend.info.max_model_len,
            eos_token_ids=self.backend.info.eos_token_ids,
            find_stop=self._find_stop(stops) if stops and self._find_stop else None,
            arrived_s=self._clock(),
        )

    # -- rows that come from another engine, and go to one --

    def _resume_elsewhere(self, seq: Sequence, resume: Resume) -> None:
        """Go on with what another engine has begun: at once with its keys and values, else as if it
        had been suspended.
        """
        seq.restore(resume)
        kv = resume.kv
        table = None if kv is None else self._loop.adopt(seq, kv.num_tokens)
        if kv is not None and table is not None:
            first = seq.num_computed_tokens // self.blocks.block_size
            self.backend.write_kv(table[first:], kv.blocks, skip=first)
            seq.num_computed_tokens = kv.num_tokens
        elif resume.output_token_ids:
            self._loop.waiting.suspend(seq)
        else:
            self._loop.waiting.arrive(seq)
        seq.coroutine.send(None)

    def open_sequences(self) -> list[Sequence]:
        """The first sample of every row that has no result, in order of arrival. For `call`."""
        return [row.sequences[0] for row in self._rows.open_rows()]

    def take_out(
        self, request_ids: Iterable[RequestId], *, with_kv: Callable[[Sequence], bool]
    ) -> list[Request]:
        """Give rows up, for another engine to go on with: they get no result here. For `call`.

        Rows of several samples begin anew there. Ids that are not open are left out.

        Args:
            request_ids: which.
            with_kv: whether a running sequence's keys and values go with it.
        """
        rows = {row.request.request_id: row for row in self._rows.open_rows()}
        found = [rows[request_id] for request_id in request_ids if request_id in rows]
        taken: list[Request] = []
        for row in found:
            seq = row.sequences[0]
            resume = self._resume_of(seq, with_kv) if row.request.sampling.n == 1 else None
            for item in row.sequences:
                self._release(item)
            self._rows.remove(row)
            taken.append(replace(row.request, resume=resume))
        return taken

    def _resume_of(self, seq: Sequence, with_kv: Callable[[Sequence], bool]) -> Resume | None:
        if not seq.num_output_tokens:
            return None
        num_computed, kv = seq.num_computed_tokens, None
        if num_computed == seq.num_tokens - 1 and with_kv(seq):
            table = self.blocks.table(seq.seq_id)
            num_blocks = blocks_for(num_computed, self.blocks.block_size)
            kv = KVState(num_computed, self.backend.read_kv(table[:num_blocks]))
        return Resume(tuple(seq.output_token_ids), tuple(seq.logprobs), kv, seq.num_suspensions)

    def _refusal(self, request: Request) -> RowError | None:
        """Why a request cannot run here at all, if so."""
        num_prompt, longest = len(request.prompt_token_ids), self.backend.info.max_model_len
        if num_prompt == 0:
            return RowError("empty_prompt", "the prompt has no tokens")
        strange = max(request.prompt_token_ids, key=abs)
        if not 0 <= strange < self.backend.info.vocab_size:
            return RowError(
                "invalid_prompt",
                f"token id {strange} is not in the model's vocabulary of "
                f"{self.backend.info.vocab_size}; the tokenizer belongs to another model",
            )
        if num_prompt >= longest:
            return RowError(
                "prompt_too_long",
                f"the prompt has {num_prompt} tokens; the model takes {longest}, "
                "completion included",
            )
        end = min(num_prompt + request.sampling.max_tokens, longest)
        if blocks_for(end, self.blocks.block_size) > self.blocks.num_blocks:
            return RowError(
                "exceeds_kv_memory",
                f"prompt and completion may take {end} tokens; KV memory holds "
                f"{self.blocks.num_blocks * self.blocks.block_size}",
            )
        return None

    # -- bookkeeping --

    def _abandon(self) -> None:
        """Give everything back that is still in flight after a stop."""
        self._answer_calls()
        for seq in self._rows.clear():
            self._release(seq)

    def _account(
        self, plan: Plan, batch: Batch, finished: list[Finished], started_s: float, elapsed_s: float
    ) -> Outcome:
        """Tell the policy what the step was, and who listens what the policy decided."""
        outcome = self._loop.observe(plan, batch.segments, finished, elapsed_s)
        self._num_steps += 1
        for event in plan.events:
            self._on_event(EventRecord(step=self._num_steps, at_s=started_s, event=event))
        return outcome

    def _record(
        self,
        plan: Plan,
        batch: Batch,
        outcome: Outcome,
        started_s: float,
        parts: EngineTimes,
        execute: ExecuteTimes,
    ) -> StepRecord:
        return StepRecord(
            step=self._num_steps,
            started_s=started_s,
            elapsed_s=outcome.elapsed_s,
            phase=plan.phase,
            reason=plan.reason,
            num_prefill_tokens=outcome.num_prefill_tokens,
            num_decode_tokens=outcome.num_decode_tokens,
            num_context_tokens=outcome.num_context_tokens,
            num_seqs=len(batch.segments),
            num_running=len(self._loop.running),
            num_waiting=len(self._loop.waiting),
            num_admitted=len(plan.admitted),
            num_suspended=len(plan.suspended),
            num_finished=len(outcome.finished),
            num_free_blocks=self.blocks.num_free_blocks,
            num_blocks=self.blocks.num_blocks,
            schedule_s=parts.plan_s + parts.apply_s + parts.resume_s + parts.account_s,
            policy_mode=plan.mode or "",
            engine=parts,
            execute=execute,
        )
