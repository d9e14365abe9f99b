"""Filling a plan under a budget: what all policies share.

A `PlanBuilder` holds what is left of one step's budget (tokens, holders, blocks) and offers four
moves: decode, chunk, admit, suspend. Each move either fits, and is then part of the plan, or
returns without effect. So a policy is only the order of its moves.

Blocks are promised before they are taken: `num_promised_blocks` is what the holders still need to
compute the tokens they know (with full reservation: to reach their longest end). Admission leaves
that untouched, so whatever is admitted can be prefilled to its end; only generated tokens can make
memory run short.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from schedulers.blocks import blocks_for
from schedulers.events import Mode, PolicyEvent
from schedulers.view import Budget, Phase, Plan, PrefixMatch, Scheduled, SeqId, SequenceView, View


def is_decoding(seq: SequenceView) -> bool:
    """True when a running sequence waits for nothing but its next token."""
    return seq.num_tokens - seq.num_computed_tokens == 1 and seq.num_tokens > seq.num_prompt_tokens


class PlanBuilder:
    """Collects the moves of one step."""

    def __init__(self, view: View, budget: Budget) -> None:
        self._view = view
        self._budget = budget
        self.num_tokens_left = budget.max_batch_tokens
        self.num_holders = len(view.running)
        self.num_blocks_left = view.num_free_blocks
        self.num_promised_blocks = sum(self._promise(seq) for seq in view.running)
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._scheduled: dict[SeqId, int] = {}
        self._admitted: list[SeqId] = []
        self._suspended: list[SeqId] = []
        self._computing: set[Hashable] = set()

    def _reach(self, seq: SequenceView) -> int:
        full = self._budget.reservation == "full"
        return seq.max_total_tokens if full else seq.num_tokens

    def _promise(self, seq: SequenceView) -> int:
        size = self._view.block_size
        return blocks_for(self._reach(seq), size) - blocks_for(seq.num_computed_tokens, size)

    def is_suspended(self, seq: SequenceView) -> bool:
        return seq.seq_id in self._suspended

    @property
    def num_scheduled(self) -> int:
        return len(self._scheduled)

    @property
    def num_suspended(self) -> int:
        return len(self._suspended)

    def _take(self, seq: SequenceView, start: int, num_tokens: int) -> None:
        size = self._view.block_size
        new_blocks = blocks_for(start + num_tokens, size) - blocks_for(start, size)
        self.num_blocks_left -= new_blocks
        self.num_promised_blocks -= new_blocks
        self.num_tokens_left -= num_tokens
        self._scheduled[seq.seq_id] = num_tokens

    def decode(self, seq: SequenceView) -> bool:
        """Schedule the one uncomputed token of a running sequence. False when it does not fit."""
        new_blocks = int(seq.num_computed_tokens % self._view.block_size == 0)
        if self.num_tokens_left < 1 or new_blocks > self.num_blocks_left:
            return False
        self._take(seq, seq.num_computed_tokens, 1)
        self.num_decode_tokens += 1
        return True

    def chunk(self, seq: SequenceView) -> int:
        """Schedule as many uncomputed tokens of a running sequence as fit; returns their number."""
        return self._chunk(seq, seq.num_computed_tokens)

    def _chunk(self, seq: SequenceView, start: int) -> int:
        size = self._view.block_size
        room = -start % size + self.num_blocks_left * size
        want = seq.num_tokens - start
        if self._budget.chunk_tokens is not None:
            want = min(want, self._budget.chunk_tokens - start % self._budget.chunk_tokens)
            if want > min(self.num_tokens_left, room):
                return 0
        fits = min(want, self.num_tokens_left, room)
        if fits < 1:
            return 0
        self._take(seq, start, fits)
        self.num_prefill_tokens += fits
        return fits

    def admit(self, seq: SequenceView, *, spare_blocks: int = 0) -> bool:
        """Take a waiting sequence in and schedule its first chunk.

        Only when all that it needs fits beside what is promised to others, with `spare_blocks`
        left over.
        """
        if self.num_tokens_left < 1 or self.num_holders >= self._budget.max_seqs:
            return False
        size = self._view.block_size
        match = self._view.match_prefix(seq)
        promise = blocks_for(self._reach(seq), size) - match.num_tokens // size
        needed = promise + match.num_revived_blocks
        if needed + self.num_promised_blocks + spare_blocks > self.num_blocks_left:
            return False
        self.num_blocks_left -= match.num_revived_blocks
        self.num_promised_blocks += promise
        if not self._chunk(seq, match.num_tokens):
            self.num_blocks_left += match.num_revived_blocks
            self.num_promised_blocks -= promise
            return False
        self.num_holders += 1
        self._admitted.append(seq.seq_id)
        self._note_computing(match)
        return True

    def note_prefilling(self, seq: SequenceView) -> None:
        """Remember what a running sequence computes: whoever needs the same can wait for it."""
        self._note_computing(self._view.match_prefix(seq))

    def _note_computing(self, match: PrefixMatch) -> None:
        if match.next_block is not None:
            self._computing.add(match.next_block)

    def is_being_computed(self, seq: SequenceView) -> bool:
        """Whether the next block of a waiting sequence is computed in this step for another one: a
        step later it is there to be shared.
        """
        return bool(self._computing) and self._view.match_prefix(seq).next_block in self._computing

    def suspend(self, seq: SequenceView) -> None:
        """Take a running sequence's blocks away. It must not be scheduled in this plan."""
        assert seq.seq_id not in self._scheduled, f"sequence {seq.seq_id} is scheduled already"
        self._suspended.append(seq.seq_id)
        self.num_holders -= 1
        self.num_promised_blocks -= self._promise(seq)
        # Shared blocks come back only with their last holder: this counts too few, never too many.
        self.num_blocks_left += self._view.private_blocks(seq)

    def build(
        self, reason: str, *, mode: Mode | None = None, events: tuple[PolicyEvent, ...] = ()
    ) -> Plan:
        """The plan of all moves so far."""
        return Plan(
            phase=self._phase(),
            scheduled=tuple(Scheduled(seq_id, num) for seq_id, num in self._scheduled.items()),
            admitted=tuple(self._admitted),
            suspended=tuple(self._suspended),
            reason=reason,
            mode=mode,
            events=events,
        )

    def _phase(self) -> Phase:
        phases: dict[tuple[bool, bool], Phase] = {
            (True, True): "mixed",
            (True, False): "prefill",
            (False, True): "decode",
            (False, False): "idle",
        }
        return phases[self.num_prefill_tokens > 0, self.num_decode_tokens > 0]


def decode_running(builder: PlanBuilder, running: Sequence[SequenceView]) -> None:
    """Schedule a token for every decoding sequence, oldest first.

    When blocks run short the newest holder gives way: it has the least to compute again, and the
    oldest always goes on, which is why nothing starves. Half-prefilled sequences are the first to
    give way, as they are no use to a decode step.
    """
    decoding = [seq for seq in running if is_decoding(seq)]
    victims = decoding + [seq for seq in running if not is_decoding(seq)]
    for seq in decoding:
        if builder.is_suspended(seq):
            return
        while not builder.decode(seq):
            if builder.num_tokens_left < 1 or victims[-1] is seq:
                return
            builder.suspend(victims.pop())


def chunk_running(builder: PlanBuilder, running: Sequence[SequenceView]) -> None:
    """Schedule chunks of the half-prefilled sequences, oldest first.

    When not one fits and nothing else is scheduled, the newest holders give way to the oldest.
    """
    prefilling = [s for s in running if not is_decoding(s) and not builder.is_suspended(s)]
    for seq in prefilling:
        if builder.chunk(seq):
            builder.note_prefilling(seq)
    if builder.num_scheduled or not prefilling:
        return
    oldest = prefilling[0]
    for victim in reversed([seq for seq in running if not builder.is_suspended(seq)]):
        if victim is oldest:
            continue
        builder.suspend(victim)
        if builder.chunk(oldest):
            return


def admit_waiting(
    builder: PlanBuilder, waiting: Sequence[SequenceView], *, max_holders: int, spare_blocks: int
) -> int:
    """Admit from the head of `waiting` while it fits; returns how many.

    Stops at the first that does not fit: whoever waits longest is not overtaken by something small.
    Who would compute what is being computed for another in this step is passed over: it is admitted
    when it can share that.
    Admits nothing in a plan that suspends, as that would undo it. An empty engine is given its
    first sequence without spare blocks and whatever `max_holders` says, so that it cannot stall.
    """
    if builder.num_suspended:
        return 0
    num_admitted = 0
    for seq in waiting:
        alone = builder.num_holders == 0
        if not alone and builder.num_holders >= max_holders:
            break
        if builder.is_being_computed(seq):
            continue
        if not builder.admit(seq, spare_blocks=0 if alone else spare_blocks):
            break
        num_admitted += 1
    return num_admitted


def spare_blocks(num_holders: int, budget: Budget) -> int:
    """Blocks kept free at admission against thrashing: one for every other holder to grow into."""
    return 0 if budget.reservation == "full" else num_holders // 2
