"""Measures what steps cost: drives a backend with synthetic sequences, without an engine.

Theory of operation. KV memory is divided once (`calibration_points.plan_layout`): sequences that
decode are filled with a short or a long context and then stay; the rest is for prompts, which come
and go with each step. A decode step is repeated at the same position, which writes the same values
again, so nothing grows while it is measured. All steps are executed in rounds, in a new random
order each time, so that a machine that is busy for some seconds spoils a repetition of every step
and not all of one. Within a round the steps of a kind stay together behind one that is not
measured: what is called steady follows a step of its own kind. The phase switch is measured apart,
by alternating a small decode and a small prefill step, where a fixed cost shows best.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from random import Random

from schedulers.blocks import BlockManager
from schedulers.cost import StepSample
from schedulers.view import SeqId
from workers.backends.base import Backend, Batch, Segment
from workers.calibration_points import (
    Layout,
    Limits,
    Turn,
    affordable,
    largest_prefill,
    plan_layout,
    round_groups,
    turns_of,
)
from workers.request import Request, RequestId, Sampled, SamplingParams
from workers.sequence import Sequence

MIN_ROUNDS = 2
FILL_SHARE = 1 / 3
"""Of the time, at most, for filling contexts."""

OnProgress = Callable[[str, float], None]
"""(what is being done, seconds since the start)."""


def measure_steps(
    backend: Backend,
    *,
    block_size: int,
    num_blocks: int,
    max_batch_tokens: int,
    max_seqs: int,
    clock: Callable[[], float],
    budget_s: float = 60.0,
    seed: int = 0,
    on_progress: OnProgress = lambda _what, _elapsed_s: None,
) -> list[StepSample]:
    """Measure prefill, decode and mixed steps of many sizes, and steps after a change of kind.

    Calls `backend.allocate`, and leaves nothing behind in the backend but that memory.

    Args:
        backend: loaded, not yet allocated.
        block_size: KV positions of a block.
        num_blocks: KV blocks there may be.
        max_batch_tokens: most tokens of a step.
        max_seqs: most sequences of a step.
        clock: seconds, monotonic.
        budget_s: no step is measured for a third time after so many seconds; each is measured
            twice, however long that takes. Where that would take much longer, the biggest steps are
            left out.
        seed: of the token ids and of the order.
        on_progress: told about once a step.

    Returns:
        One sample a repetition, up to 20 of each step; those with `switched` come from alternating
        one decode and one prefill step, which are among the steady ones too.

    Raises:
        NotEnoughMemory: KV memory does not hold a block of prompt and one short context.
        DeviceOutOfMemory, BackendError: as the backend does.
    """
    longest = backend.info.max_model_len
    limits = Limits(block_size, num_blocks, max_batch_tokens, max_seqs, longest)
    plan_layout(limits, fill_tokens=0)  # refuses before memory is taken
    backend.allocate(num_blocks=num_blocks, block_size=block_size)
    rng, started_s = Random(seed), clock()

    def tell(what: str) -> None:
        on_progress(what, clock() - started_s)

    with closing(Stage(backend, limits, clock=clock, rng=rng)) as stage:
        tell("warming up")
        token_s = stage.warm_up()
        layout = plan_layout(limits, fill_tokens=int(FILL_SHARE * budget_s / token_s))
        stage.fill(layout, tell)
        round_tokens = int((1 - FILL_SHARE) * budget_s / token_s / MIN_ROUNDS)
        sizes = affordable(limits, layout, max_tokens=round_tokens)
        turns = turns_of(round_groups(sizes, layout), rng)
        samples: list[StepSample] = []
        for number, turn in turns:
            if number > MIN_ROUNDS and clock() - started_s >= budget_s:
                break
            tell(f"round {number}" if number else "first time")
            sample = stage.measure(turn)
            if number and turn.measured:
                samples.append(sample)
    return samples


class Stage:
    """A backend, its KV blocks and the sequences that stay in them. `close` gives all back.

    Args:
        backend: allocated as `limits` say; owned by the caller.
        clock: seconds, monotonic.
        rng: draws the token ids.
    """

    def __init__(
        self, backend: Backend, limits: Limits, *, clock: Callable[[], float], rng: Random
    ) -> None:
        self.blocks = BlockManager(limits.num_blocks, limits.block_size, share_prefixes=False)
        self._backend = backend
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._next_seq_id = 0
        self._short: list[Sequence] = []
        self._long: list[Sequence] = []

    def warm_up(self, *, repeats: int = 3) -> float:
        """Execute a big prefill step a few times. Returns its seconds per token, the last time."""
        point = largest_prefill(self._limits)
        elapsed_s = 0.0
        for _ in range(repeats):
            elapsed_s = self.measure(Turn(point)).elapsed_s
        return max(elapsed_s / sum(point.prompts), 1e-9)

    def fill(self, layout: Layout, tell: Callable[[str], None]) -> None:
        """Compute the contexts of the sequences that stay."""
        self._short = [self._open(layout.short_context, 1) for _ in range(layout.num_short)]
        self._long = [self._open(layout.long_context, 1) for _ in range(layout.num_long)]
        pending = [*self._short, *self._long]
        while pending:
            tell("filling KV memory")
            self._backend.execute(self._chunks(pending))
            pending = [seq for seq in pending if seq.num_computed_tokens < seq.num_prompt_tokens]

    def _chunks(self, seqs: list[Sequence]) -> Batch:
        """As many prompt tokens of `seqs` as a step holds; counts them as computed."""
        room, ends = self._limits.max_batch_tokens, list[tuple[Sequence, int, int]]()
        for seq in seqs[: self._limits.max_seqs]:
            start = seq.num_computed_tokens
            count = min(room, seq.num_prompt_tokens - start)
            if count:
                ends.append((seq, start, count))
                seq.num_computed_tokens += count
                room -= count
        ends.sort(key=lambda item: item[2] == 1)
        table = self.blocks.table
        return Batch(tuple(Segment(s, at, n, table(s.seq_id), False) for s, at, n in ends))

    def measure(self, turn: Turn) -> StepSample:
        """Execute a step and time it; its prompts are gone afterwards."""
        point = turn.point
        prompts = [self._open(length) for length in point.prompts]
        decodes = [*self._short[: point.num_short], *self._long[: point.num_long]]
        batch = self._batch(prompts, decodes)
        started_s = self._clock()
        self._backend.execute(batch)
        elapsed_s = self._clock() - started_s
        for seq in prompts:
            self._release(seq)
        context = sum(seq.num_computed_tokens + 1 for seq in decodes)
        return StepSample(sum(point.prompts), len(decodes), context, elapsed_s, turn.switched)

    def _batch(self, prompts: list[Sequence], decodes: list[Sequence]) -> Batch:
        table = self.blocks.table
        chunks = [Segment(s, 0, s.num_tokens, table(s.seq_id), True) for s in prompts]
        singles = [Segment(s, s.num_computed_tokens, 1, table(s.seq_id), True) for s in decodes]
        return Batch((*chunks, *singles))

    def _open(self, num_prompt_tokens: int, num_output_tokens: int = 0) -> Sequence:
        """A new sequence of random tokens, with blocks for all of them."""
        seq_id = SeqId(self._next_seq_id)
        self._next_seq_id += 1
        seq = Sequence(
            seq_id,
            Request(
                request_id=RequestId(f"calibration-{seq_id}"),
                prompt_token_ids=self._token_ids(num_prompt_tokens),
                sampling=SamplingParams(max_tokens=2, ignore_eos=True),
            ),
            sample_index=0,
            max_model_len=self._limits.max_model_len,
            eos_token_ids=frozenset(),
            find_stop=None,
            arrived_s=0.0,
        )
        seq.coroutine.close()  # nothing here resumes it
        for token_id in self._token_ids(num_output_tokens):
            seq.append(Sampled(token_id))
        self.blocks.open(seq_id, seq.token_ids)
        self.blocks.grow(seq_id, seq.num_tokens)
        return seq

    def _token_ids(self, count: int) -> list[int]:
        return self._rng.choices(range(self._backend.info.vocab_size), k=count)

    def _release(self, seq: Sequence) -> None:
        self.blocks.close(seq.seq_id)
        self._backend.forget(seq.seq_id)

    def close(self) -> None:
        """Give all blocks back and make the backend forget all sequences."""
        for seq_id in list(self.blocks.tables()):
            self.blocks.close(seq_id)
            self._backend.forget(seq_id)
        self._short, self._long = [], []
        self.blocks.check_integrity()
