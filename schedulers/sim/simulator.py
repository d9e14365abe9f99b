"""Discrete-event simulation of a job: the engine's loop with a cost model in place of the backend.

Policies, block accounting, admission order and outcomes are the engine's own (`schedulers.loop`);
only the seconds of a step come from a `StepCost`, and the end of a sequence from its known length.
Time is virtual: a step takes what the cost model says, and scheduling what `ScheduleCost` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedulers.blocks import BlockManager, blocks_for
from schedulers.cost import StepCost
from schedulers.events import PolicyEvent
from schedulers.loop import Loop, Segment
from schedulers.sim.arrivals import Arrivals, SimRequest
from schedulers.view import Budget, Finished, Outcome, Plan, Policy, SeqId


class ScheduleCost(NamedTuple):
    """Seconds of a step outside the backend: planning, applying, resuming, and the job's threads.

    Attributes:
        fixed_s: per step.
        per_seq_s: per scheduled sequence.
        per_request_s: per finished request (detokenising, writing, as far as it delays steps).
    """

    fixed_s: float = 0.0
    per_seq_s: float = 0.0
    per_request_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Sizes of a simulated engine; as `workers.engine.EngineConfig`."""

    num_blocks: int
    block_size: int = 16
    budget: Budget
    window: int = 1024


class SimSequence:
    """A sequence without tokens: only how many there are, and how many there will be."""

    __slots__ = (
        "admission",
        "max_total_tokens",
        "num_computed_tokens",
        "num_end_tokens",
        "num_prompt_tokens",
        "num_suspensions",
        "num_tokens",
        "seq_id",
        "token_ids",
    )

    def __init__(self, seq_id: SeqId, request: SimRequest) -> None:
        self.seq_id = seq_id
        self.token_ids: Sequence[int] = ()
        self.num_prompt_tokens = self.num_tokens = request.num_prompt_tokens
        self.num_end_tokens = request.num_prompt_tokens + request.num_output_tokens
        self.max_total_tokens = request.num_prompt_tokens + request.max_output_tokens
        self.num_computed_tokens = 0
        self.num_suspensions = 0
        self.admission = -1


class SimStep(NamedTuple):
    """One simulated step."""

    started_s: float
    elapsed_s: float
    plan: Plan
    outcome: Outcome
    num_running: int
    num_waiting: int
    num_free_blocks: int


class SimEvent(NamedTuple):
    """A decision of the policy, stamped as the engine does."""

    step: int
    at_s: float
    event: PolicyEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What a simulated job did.

    Attributes:
        job_s: virtual seconds from the first step to the last completion.
        num_recomputed_tokens: tokens computed a second time after a suspension.
        num_overflow_steps: steps in which KV memory ran short.
        finished_s: when each request ended, in order of completion.
    """

    job_s: float
    num_steps: int
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_suspensions: int
    num_overflow_steps: int
    num_recomputed_tokens: int
    finished_s: tuple[float, ...]
    events: tuple[SimEvent, ...]

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.job_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.job_s

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.job_s


class RequestTooLong(ValueError):
    """A request does not fit into the simulated KV memory."""


class Simulator:
    """Runs arrivals to their end under a policy, in virtual time.

    Args:
        policy: as for an engine; owned by the simulator.
        config: sizes.
        cost: seconds of a step.
        schedule: seconds beside it.
        on_step: told of every step.
    """

    def __init__(
        self,
        policy: Policy,
        config: SimConfig,
        cost: StepCost,
        *,
        schedule: ScheduleCost | None = None,
        on_step: Callable[[SimStep], None] | None = None,
    ) -> None:
        self._config = config
        self._cost = cost
        self._schedule = schedule or ScheduleCost()
        self._on_step = on_step
        blocks = BlockManager(config.num_blocks, config.block_size, share_prefixes=False)
        self._loop: Loop[SimSequence] = Loop(policy, blocks, config.budget)
        self._now_s = 0.0
        self._next_seq_id = 0
        self._num_steps = 0
        self._num_suspensions = 0
        self._num_overflow_steps = 0
        self._num_recomputed_tokens = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._finished_s: list[float] = []
        self._events: list[SimEvent] = []
        self._was_prefill = True

    def run(self, arrivals: Arrivals) -> SimResult:
        """Run to the end.

        Raises:
            RequestTooLong: a request that KV memory can never hold.
            RuntimeError: arrivals that neither come nor end.
        """
        loop = self._loop
        while True:
            self._take_in(arrivals)
            if not loop.has_work:
                if arrivals.exhausted:
                    return self._result()
                raise RuntimeError("nothing is in flight, and no request arrives")
            arrivals.finish(self._step(arrivals.exhausted))

    def _take_in(self, arrivals: Arrivals) -> None:
        room = self._config.window - len(self._loop.waiting)
        if room < 1 or arrivals.exhausted:
            return
        for request in arrivals.take(room):
            self._check(request)
            seq = SimSequence(SeqId(self._next_seq_id), request)
            self._next_seq_id += 1
            self._loop.waiting.arrive(seq)

    def _check(self, request: SimRequest) -> None:
        tokens = request.num_prompt_tokens + request.max_output_tokens
        size, capacity = self._config.block_size, self._config.num_blocks
        if blocks_for(tokens, size) > capacity:
            raise RequestTooLong(
                f"a request may take {tokens} tokens; simulated KV memory holds {capacity * size}"
            )

    def _step(self, input_exhausted: bool) -> int:
        """One turn; returns the number of requests that ended in it."""
        loop, started_s = self._loop, self._now_s
        plan = loop.plan(input_exhausted=input_exhausted, now_s=started_s)
        for seq_id in plan.suspended:
            self._num_recomputed_tokens += loop.running[seq_id].num_computed_tokens
        segments = loop.apply(plan)
        elapsed_s = self._elapsed_s(segments)
        schedule = self._schedule
        self._now_s += elapsed_s + schedule.fixed_s + schedule.per_seq_s * len(segments)
        finished = self._resume(segments)
        outcome = loop.observe(plan, segments, finished, elapsed_s)
        self._now_s += schedule.per_request_s * len(finished)
        self._finished_s.extend([self._now_s] * len(finished))
        self._count(plan, outcome, started_s)
        return len(finished)

    def _elapsed_s(self, segments: list[Segment[SimSequence]]) -> float:
        prefill = decode = context = 0
        for segment in segments:
            if segment.is_decode:
                decode += 1
                context += segment.start + 1
            else:
                prefill += segment.num_tokens
        switches = (decode == 0) != self._was_prefill and (prefill == 0 or decode == 0)
        self._was_prefill = decode == 0
        return self._cost.step_s(prefill, decode, context) + self._cost.alpha_switch / 2 * switches

    def _resume(self, segments: list[Segment[SimSequence]]) -> list[Finished]:
        loop = self._loop
        finished: list[Finished] = []
        for segment in segments:
            loop.advance(segment)
            if not segment.sample:
                continue
            seq = segment.seq
            seq.num_tokens += 1
            if seq.num_tokens >= seq.num_end_tokens:
                prompt = seq.num_prompt_tokens
                finished.append(Finished(prompt, seq.num_tokens - prompt, seq.admission))
                loop.release(seq)
        return finished

    def _count(self, plan: Plan, outcome: Outcome, started_s: float) -> None:
        self._num_steps += 1
        self._num_suspensions += len(plan.suspended)
        self._num_overflow_steps += bool(plan.suspended)
        for item in outcome.finished:
            self._prompt_tokens += item.num_prompt_tokens
            self._output_tokens += item.num_output_tokens
        self._events.extend(SimEvent(self._num_steps, started_s, event) for event in plan.events)
        if self._on_step is not None:
            loop = self._loop
            self._on_step(
                SimStep(
                    started_s,
                    outcome.elapsed_s,
                    plan,
                    outcome,
                    len(loop.running),
                    len(loop.waiting),
                    loop.blocks.num_free_blocks,
                )
            )

    def _result(self) -> SimResult:
        self._loop.blocks.check_integrity()
        return SimResult(
            job_s=self._now_s,
            num_steps=self._num_steps,
            num_requests=len(self._finished_s),
            num_prompt_tokens=self._prompt_tokens,
            num_output_tokens=self._output_tokens,
            num_suspensions=self._num_suspensions,
            num_overflow_steps=self._num_overflow_steps,
            num_recomputed_tokens=self._num_recomputed_tokens,
            finished_s=tuple(self._finished_s),
            events=tuple(self._events),
        )
