"""The values that pass between the engine and a policy.

A policy sees a `View` (read-only), answers with a `Plan` (a value: it can be logged, replayed and
simulated) and learns what happened from an `Outcome`. Nothing here holds a tensor, a clock or a
random generator, so the simulator uses the very same types.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, Protocol

from schedulers.events import Mode, Phase, PolicyEvent

SeqId = NewType("SeqId", int)
"""Serial number of a sequence in its engine: unique, growing in order of arrival."""


class SequenceView(Protocol):
    """What a policy may know of a sequence.

    The law: `num_cached_tokens <= num_computed_tokens <= num_tokens`, and a running sequence whose
    prompt is in KV memory has exactly one uncomputed token. A suspended sequence is a waiting one
    with generated tokens and nothing computed.
    """

    @property
    def seq_id(self) -> SeqId: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in KV memory."""
        ...

    @property
    def admission(self) -> int:
        """Serial number of its first admission; -1 before."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """The most tokens the sequence can ever have: prompt and the longest allowed completion."""
        ...


class PrefixMatch(NamedTuple):
    """What shared blocks would bring a waiting sequence.

    Attributes:
        num_tokens: tokens that need not be computed (whole blocks).
        num_revived_blocks: matched blocks without a holder, which would no longer count as free.
        next_block: stands for the content of the first whole block behind the match, which nobody
            has computed; equal for sequences that would compute the same. None: there is none.
    """

    num_tokens: int
    num_revived_blocks: int
    next_block: Hashable = None


class View(NamedTuple):
    """The engine's state as a policy sees it, taken between two steps. Read-only."""

    waiting: Sequence[SequenceView]
    """In the order in which they should be admitted; suspended sequences first."""
    running: Sequence[SequenceView]
    """Holders of KV blocks, oldest admission first."""
    num_free_blocks: int
    num_blocks: int
    block_size: int
    match_prefix: Callable[[SequenceView], PrefixMatch]
    """What a waiting sequence would find in shared blocks. A pure look-up."""
    private_blocks: Callable[[SequenceView], int]
    """Blocks that suspending a running sequence would free for certain."""
    input_exhausted: bool
    """True when nothing will arrive behind `waiting`."""
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one step may use.

    Attributes:
        max_batch_tokens: most tokens scheduled in one step.
        max_seqs: most sequences that hold KV blocks at once.
        reservation: "expected" admits on expected lengths and suspends when KV memory runs short;
            "full" admits only what can
            run to its longest end, so that nothing is ever suspended (deterministic mode).
        chunk_tokens: None: a chunk is as long as fits. A number: chunks end at its multiples or at
            the end of the known tokens,
            so that where a prompt is cut does not depend on what else is in the batch
            (deterministic mode).
    """

    max_batch_tokens: int
    max_seqs: int
    reservation: Literal["expected", "full"] = "expected"
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens is {self.max_batch_tokens}; it must be at least 1")
        if self.max_seqs < 1:
            raise ValueError(f"max_seqs is {self.max_seqs}; it must be at least 1")
        if self.chunk_tokens is not None and not 1 <= self.chunk_tokens <= self.max_batch_tokens:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens}; it must be between 1 and max_batch_tokens "
                f"({self.max_batch_tokens})"
            )


class Scheduled(NamedTuple):
    """`num_tokens` uncomputed tokens of one sequence are computed in this step."""

    seq_id: SeqId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step will do. Applied in this order: suspend, admit, grow block tables, execute.

    Attributes:
        phase: the kind of step.
        scheduled: sequences and their token counts, at most one entry a sequence.
        admitted: sequences that go from waiting to running before the step.
        suspended: sequences that give their blocks back and go to the head of waiting, before
            anything is admitted.
        reason: why this and not something else, in a few words, for the telemetry.
        mode: which kind of batching the policy is in.
        events: decisions that led to the plan, for the telemetry.
    """

    phase: Phase
    scheduled: tuple[Scheduled, ...] = ()
    admitted: tuple[SeqId, ...] = ()
    suspended: tuple[SeqId, ...] = ()
    reason: str = ""
    mode: Mode | None = None
    events: tuple[PolicyEvent, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class Finished(NamedTuple):
    """Lengths of a sequence that ended, and when it was first admitted.

    Attributes:
        admission: see `SequenceView`.
        num_cached_tokens: of the prompt, brought by shared blocks.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    admission: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step did, told to the policy afterwards.

    Attributes:
        num_prefill_tokens: tokens computed by chunks (the final one of a prompt included).
        num_decode_tokens: tokens computed one a sequence.
        num_context_tokens: KV positions that the decode tokens read, summed over sequences.
        elapsed_s: seconds in the backend.
        finished: the sequences that ended in this step.
        num_suspended: sequences that the plan suspended.
    """

    phase: Phase
    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    elapsed_s: float
    finished: tuple[Finished, ...] = ()
    num_suspended: int = 0


class Policy(Protocol):
    """Decides which yielded work merges into the next step. One value per engine; picked by name
    from `policies.POLICIES`.
    """

    name: str

    def plan(self, view: View, budget: Budget) -> Plan:
        """Plan the next step. Deterministic: the same history of views and outcomes gives the same
        plans.

        Never plans more tokens than `budget.max_batch_tokens`, more holders than `budget.max_seqs`,
        or more blocks than are free after its own suspensions. Returns an idle plan only when
        nothing can be scheduled.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step that was executed."""
        ...
