"""Which steps a calibration measures, in which order, and how it divides KV memory. No tensors.

Source: `exclusive_batching.md` A2 (calibration). Unlike there, prefill steps also hold several
prompts, contexts differ, so that reading them has a cost of its own, and mixed steps are measured
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from random import Random
from typing import NamedTuple

from schedulers.blocks import blocks_for
from schedulers.memory import NotEnoughMemory

SHORT_CONTEXT, LONG_CONTEXT = 32, 512
"""Positions that a decode token reads, itself apart."""
PROMPT_TOKENS = (128, 256, 192, 160, 224)
"""Lengths of the prompts that fill a step, in turn."""
DECODE_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
SMALLEST_PREFILL, SMALLEST_MIXED = 16, 64
SWITCH_PREFILL_TOKENS, SWITCH_DECODES, SWITCH_PAIRS = 64, 16, 4
MAX_ROUNDS = 20
FIRST_TIME_TOKENS = 256


class Limits(NamedTuple):
    """What a step, a sequence and KV memory may hold."""

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_seqs: int
    max_model_len: int

    def blocks(self, lengths: tuple[int, ...]) -> int:
        """Blocks that prompts of these lengths occupy."""
        return sum(blocks_for(length, self.block_size) for length in lengths)


class Layout(NamedTuple):
    """How KV memory is divided.

    Attributes:
        prompt_blocks: left for the prompts of one step.
        num_short: sequences that stay, with `short_context` computed positions.
        num_long: sequences that stay, with `long_context` computed positions.
    """

    prompt_blocks: int
    num_short: int
    short_context: int
    num_long: int
    long_context: int


class Point(NamedTuple):
    """A step to measure: prompts computed whole, and so many decodes at either context."""

    prompts: tuple[int, ...] = ()
    num_short: int = 0
    num_long: int = 0

    @property
    def num_decodes(self) -> int:
        return self.num_short + self.num_long

    @property
    def num_tokens(self) -> int:
        return sum(self.prompts) + self.num_decodes

    @property
    def num_seqs(self) -> int:
        return len(self.prompts) + self.num_decodes


class Turn(NamedTuple):
    """A step in its place in a round.

    Attributes:
        measured: false for the step that only leads in.
        switched: the step before it is of another kind.
    """

    point: Point
    measured: bool = True
    switched: bool = False


def plan_layout(limits: Limits, *, fill_tokens: int) -> Layout:
    """Divide KV memory: half of it at most for prompts, the rest for the two contexts.

    Args:
        limits: what there is.
        fill_tokens: tokens that there is time to compute for the contexts; a sequence of each is
            made in any case.

    Raises:
        NotEnoughMemory: there is no room for a prompt of one block and one short context.
    """
    size, longest = limits.block_size, limits.max_model_len - 2
    short_context = min(SHORT_CONTEXT, longest)
    per_short = blocks_for(short_context + 1, size)
    wanted = limits.blocks(packed(limits, limits.max_batch_tokens))
    prompt_blocks = min(wanted, limits.num_blocks // 2, limits.num_blocks - per_short)
    left = limits.num_blocks - prompt_blocks
    if short_context < 1 or prompt_blocks < 1:
        raise NotEnoughMemory(
            f"KV memory of {limits.num_blocks} blocks of {size} tokens is too little to calibrate; "
            "raise --memory or lower --max-batch-tokens"
        )
    fillable = max(1, fill_tokens // 2 // short_context)
    num_short = min(limits.max_seqs, max(1, left // 2 // per_short), fillable)
    left -= num_short * per_short
    # In little memory the long context is shorter, but there is one: without two contexts the cost
    # of a decode token and that of what it reads cannot be told apart.
    long_context = min(LONG_CONTEXT, longest, left * size - 1)
    if long_context < 2 * short_context:
        return Layout(prompt_blocks, num_short, short_context, 0, 0)
    fillable = max(1, (fill_tokens - num_short * short_context) // long_context)
    num_long = min(limits.max_seqs, left // blocks_for(long_context + 1, size), fillable)
    return Layout(prompt_blocks, num_short, short_context, num_long, long_context)


def affordable(limits: Limits, layout: Layout, *, max_tokens: int) -> Limits:
    """Limits with a step size at which a round computes no more than `max_tokens`, so that a big
    model on a slow machine is measured in bounded time. Not below 64 tokens a step.
    """
    while limits.max_batch_tokens >= 2 * SMALLEST_MIXED:
        turns = (turn for group in round_groups(limits, layout) for turn in group)
        if sum(turn.point.num_tokens for turn in turns) <= max_tokens:
            break
        limits = limits._replace(max_batch_tokens=limits.max_batch_tokens // 2)
    return limits


def packed(limits: Limits, num_tokens: int) -> tuple[int, ...]:
    """Prompts of 128 to 256 tokens that make `num_tokens`; the last is what is left."""
    lengths: list[int] = []
    for usual in cycle(PROMPT_TOKENS):
        left = num_tokens - sum(lengths)
        if not left:
            break
        lengths.append(min(usual, left, limits.max_model_len - 1))
    return tuple(lengths)


def prefill_points(limits: Limits) -> Iterator[Point]:
    """One prompt of each size, and the bigger sizes as several prompts too."""
    for size in _powers(min(SMALLEST_PREFILL, limits.max_batch_tokens), limits.max_batch_tokens):
        if size < limits.max_model_len:
            yield Point((size,))
        several = packed(limits, size)
        if len(several) > 1:
            yield Point(several)


def largest_prefill(limits: Limits) -> Point:
    """The biggest prefill step that is measured."""
    layout = plan_layout(limits, fill_tokens=0)
    fitting = (point for point in prefill_points(limits) if _fits(point, limits, layout))
    return max(fitting, key=lambda point: sum(point.prompts))


def decode_points(layout: Layout) -> Iterator[Point]:
    """1, 2, 4, ... sequences at either context."""
    for count in _powers(1, layout.num_short):
        yield Point(num_short=count)
    for count in _powers(1, layout.num_long):
        yield Point(num_long=count)


def mixed_points(limits: Limits, layout: Layout) -> Iterator[Point]:
    """A grid of sizes and decode shares; a share that takes more sequences than there may be is
    lowered to what there may. Both contexts are in each step in the same proportion.
    """
    num_filled = layout.num_short + layout.num_long
    for size in _powers(min(SMALLEST_MIXED, limits.max_batch_tokens), limits.max_batch_tokens):
        most = min(num_filled, limits.max_seqs - len(packed(limits, size)), size - 1)
        for count in sorted({min(round(share * size), most) for share in DECODE_SHARES}):
            if count > 0:
                num_long = count * layout.num_long // num_filled
                yield Point(packed(limits, size - count), count - num_long, num_long)


def _powers(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... and high."""
    sizes: list[int] = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high] if high else []


def round_groups(limits: Limits, layout: Layout) -> list[list[Turn]]:
    """The steps of a round, by kind: each group starts with a step that only leads in."""
    prefill, decode, mixed = (
        [point for point in points if _fits(point, limits, layout)]
        for points in (prefill_points(limits), decode_points(layout), mixed_points(limits, layout))
    )
    steady = [[Turn(point) for point in points] for points in (prefill, decode, mixed)]
    return [group for group in (*steady, _switches(prefill, decode)) if group]


def _fits(point: Point, limits: Limits, layout: Layout) -> bool:
    fits_memory = limits.blocks(point.prompts) <= layout.prompt_blocks
    fits_step = point.num_tokens <= limits.max_batch_tokens
    return fits_memory and fits_step and point.num_seqs <= limits.max_seqs


def _switches(prefill: list[Point], decode: list[Point]) -> list[Turn]:
    """A decode and a prefill step in turn, of sizes that are measured steadily too."""
    if not prefill or not decode:
        return []
    into = min(prefill, key=lambda p: (abs(sum(p.prompts) - SWITCH_PREFILL_TOKENS), len(p.prompts)))
    back = min(decode, key=lambda p: (abs(p.num_decodes - SWITCH_DECODES), p.num_long))
    return [Turn(point, switched=True) for _ in range(SWITCH_PAIRS) for point in (into, back)]


def turns_of(groups: list[list[Turn]], rng: Random) -> Iterator[tuple[int, Turn]]:
    """All rounds, each with its number. Round 0 is not to be measured: it executes each step once,
    the big ones apart, for which a first time makes no difference.
    """
    for number in range(MAX_ROUNDS + 1):
        for group in rng.sample(groups, len(groups)):
            switches = any(turn.switched for turn in group)
            order = group if switches else rng.sample(group, len(group))
            # What leads in is of the kind that the first one is to follow.
            first = group[-1] if switches else min(group, key=lambda turn: turn.point.num_tokens)
            yield number, first._replace(measured=False)
            for turn in order:
                if number or turn.point.num_tokens <= FIRST_TIME_TOKENS:
                    yield number, turn
