"""The integers of the engine's loop: what runs, what waits, whose blocks.

Theory of operation. One turn is plan -> apply -> execute -> resume. This class owns the two turns
that are integers and leaves the others to its driver: the engine executes with tensors and resumes
coroutines, the simulator executes with a cost model and counts tokens. Both drive the same loop,
so policies, admission order, block accounting and outcomes cannot differ between them.

    driver                               loop
    arrivals into `waiting`
                                         plan()     policy, over a read-only view
                                         apply()    tables and states as planned -> segments
    compute the segments
    advance() / finish, per segment      tables and counters
                                         observe()  outcome, to the policy
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from schedulers.blocks import BlockManager, blocks_for
from schedulers.view import Budget, Finished, Outcome, Plan, Policy, SeqId, View
from schedulers.waiting import Waiting


class LoopSequence(Protocol):
    """A `SequenceView` as the loop moves it: it writes the three numbers."""

    num_computed_tokens: int
    num_suspensions: int
    admission: int

    @property
    def seq_id(self) -> SeqId: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...


S = TypeVar("S", bound=LoopSequence)


class Segment(NamedTuple, Generic[S]):
    """Tokens `[start, start + num_tokens)` of one sequence, computed in this step.

    Positions `[0, start)` are in KV memory already; the block table covers `start + num_tokens`
    positions. `sample` is true when the segment ends the known tokens, so that the next one is
    drawn from its last position's logits.
    """

    seq: S
    start: int
    num_tokens: int
    block_table: Sequence[int]
    sample: bool

    @property
    def is_decode(self) -> bool:
        """A token computed by itself, behind the prompt."""
        return self.num_tokens == 1 and self.start >= self.seq.num_prompt_tokens


class NothingPlanned(Exception):
    """A policy found nothing to do although there is work. Always a bug, never a user's fault."""


class Loop(Generic[S]):
    """Owner of the running and waiting sequences and of the block tables.

    Args:
        policy: decides; owned by this loop.
        blocks: the pool.
        budget: of a step; may be replaced between steps.
        on_admit: told of every admission, with the number of tokens that shared blocks brought.
    """

    def __init__(
        self,
        policy: Policy,
        blocks: BlockManager,
        budget: Budget,
        *,
        on_admit: Callable[[S, int], None] = lambda _seq, _cached: None,
    ) -> None:
        self.policy = policy
        self.blocks = blocks
        self.budget = budget
        self.waiting: Waiting[S] = Waiting()
        self.running: dict[SeqId, S] = {}
        self._on_admit = on_admit
        self._num_admitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    # -- plan --

    def plan(self, *, input_exhausted: bool, now_s: float) -> Plan:
        """The policy's plan for the next step.

        Raises:
            NothingPlanned: the plan is empty.
        """
        plan = self.policy.plan(self._view(input_exhausted, now_s), self.budget)
        if not plan.scheduled:
            raise NothingPlanned(
                f"policy {self.policy.name!r} planned nothing ({plan.reason!r}) with "
                f"{len(self.running)} running, {len(self.waiting)} waiting and "
                f"{self.blocks.num_free_blocks} of {self.blocks.num_blocks} blocks free; "
                f"running: {list(self.running.values())[:5]}"
            )
        return plan

    def _view(self, input_exhausted: bool, now_s: float) -> View:
        return View(
            waiting=self.waiting.ordered(),
            running=list(self.running.values()),
            num_free_blocks=self.blocks.num_free_blocks,
            num_blocks=self.blocks.num_blocks,
            block_size=self.blocks.block_size,
            match_prefix=lambda seq: self.blocks.match_prefix(seq.token_ids),  # type: ignore[attr-defined]
            private_blocks=lambda seq: self.blocks.private_blocks(seq.seq_id),
            input_exhausted=input_exhausted,
            now_s=now_s,
        )

    # -- apply --

    def apply(self, plan: Plan) -> list[Segment[S]]:
        """Move sequences and blocks as planned. Chunks come before single tokens."""
        for seq_id in plan.suspended:
            self._suspend(self.running.pop(seq_id))
        if plan.admitted:
            candidates = {seq.seq_id: seq for seq in self.waiting.ordered()}
            for seq_id in plan.admitted:
                self._admit(candidates[seq_id])
        segments = [
            self._segment(self.running[seq_id], num_tokens) for seq_id, num_tokens in plan.scheduled
        ]
        segments.sort(key=lambda segment: segment.num_tokens == 1)
        return segments

    def _suspend(self, seq: S) -> None:
        self.blocks.seal(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        self.blocks.close(seq.seq_id)
        seq.num_computed_tokens = 0
        seq.num_suspensions += 1
        self.waiting.suspend(seq)

    def _admit(self, seq: S) -> None:
        self.waiting.admit(seq)
        self._enter(seq)

    def _enter(self, seq: S) -> None:
        num_cached = self.blocks.open(seq.seq_id, seq.token_ids)
        seq.num_computed_tokens = num_cached
        if seq.admission < 0:
            seq.admission = self._num_admitted
            self._num_admitted += 1
        self.running[seq.seq_id] = seq
        self._on_admit(seq, num_cached)

    def adopt(self, seq: S, num_computed_tokens: int) -> Sequence[int] | None:
        """Take in a sequence whose keys and values come with it, past the policy: its block table,
        to be filled from position `seq.num_computed_tokens` on; None when there is no room, or when
        admission reserves memory to the end, which the policy alone may do.
        """
        if self.budget.reservation == "full":
            return None
        needed = blocks_for(num_computed_tokens, self.blocks.block_size)
        if len(self.running) >= self.budget.max_seqs or needed >= self.blocks.num_free_blocks:
            return None
        self._enter(seq)
        return self.blocks.grow(seq.seq_id, num_computed_tokens)

    def _segment(self, seq: S, num_tokens: int) -> Segment[S]:
        start = seq.num_computed_tokens
        end = start + num_tokens
        table = self.blocks.grow(seq.seq_id, end)
        return Segment(seq, start, num_tokens, table, end == seq.num_tokens)

    # -- resume --

    def advance(self, segment: Segment[S]) -> None:
        """A segment was computed: count it, and let others share what it made of the prompt."""
        seq, start, num_tokens, _, sample = segment
        end = seq.num_computed_tokens = start + num_tokens
        if (num_tokens > 1 or sample) and seq.num_tokens == seq.num_prompt_tokens:
            self.blocks.seal(seq.seq_id, seq.token_ids, end)

    def release(self, seq: S) -> None:
        """Forget a sequence that ended, wherever it is, and take its blocks back."""
        if self.running.pop(seq.seq_id, None) is not None:
            self.blocks.close(seq.seq_id)
        else:
            self.waiting.remove(seq)

    def observe(
        self,
        plan: Plan,
        segments: Iterable[Segment[S]],
        finished: Sequence[Finished],
        elapsed_s: float,
    ) -> Outcome:
        """Tell the policy what the step was."""
        num_tokens = num_decode = num_context = 0
        for segment in segments:
            num_tokens += segment.num_tokens
            if segment.is_decode:
                num_decode += 1
                num_context += segment.start + 1
        outcome = Outcome(
            phase=plan.phase,
            num_prefill_tokens=num_tokens - num_decode,
            num_decode_tokens=num_decode,
            num_context_tokens=num_context,
            elapsed_s=elapsed_s,
            finished=tuple(finished),
            num_suspended=len(plan.suspended),
        )
        self.policy.observe(outcome)
        return outcome
