"""How much work a worker still has, in seconds, and which of it would leave it first.

What the router balances. Steps have a fixed cost, which moving sequences away does not save while
one long sequence remains, and a cost per token, which it does: so a load has two parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from schedulers.cost import StepCost


class Load(NamedTuple):
    """Work that is left.

    Attributes:
        num_rows: rows without a result.
        serial_s: fixed cost of the steps that the longest sequence still takes.
        work_s: cost of all tokens: what can be shared.
    """

    num_rows: int = 0
    serial_s: float = 0.0
    work_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.serial_s + self.work_s

    def plus(self, other: Load) -> Load:
        """Both by one worker: their steps coincide."""
        return Load(
            self.num_rows + other.num_rows,
            max(self.serial_s, other.serial_s),
            self.work_s + other.work_s,
        )


class OpenSequence(Protocol):
    """What is looked at of a sequence that has not ended."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...


class OutputLengths:
    """How long outputs are that have come so far, by those that ended.

    Args:
        ended: their output tokens; may be empty.
        assumed: mean output where nothing is known.
    """

    def __init__(self, ended: Iterable[int], *, assumed: float = 128.0) -> None:
        self._ended = sorted(ended)
        self._sums = [0, *accumulate(self._ended)]
        self._assumed = assumed

    def remaining(self, age: int, *, at_most: int) -> float:
        """Expected further tokens of an output of `age` tokens: the mean over those that were
        longer, or as many again where none was.
        """
        at_most = max(1, at_most)
        first = bisect_right(self._ended, age)
        longer = len(self._ended) - first
        if longer:
            mean = (self._sums[-1] - self._sums[first]) / longer - age
        else:
            mean = max(float(age), self._assumed if not self._ended else 1.0)
        return min(float(at_most), max(1.0, mean))


class Part(NamedTuple):
    """What one sequence adds to a load."""

    steps: float
    work_s: float


def part_of(seq: OpenSequence, lengths: OutputLengths, cost: StepCost) -> Part:
    """Expected decode steps and the cost of all tokens that one sequence still takes."""
    age = max(0, seq.num_tokens - seq.num_prompt_tokens)
    steps = lengths.remaining(age, at_most=seq.max_total_tokens - seq.num_tokens)
    missing = seq.num_tokens - seq.num_computed_tokens
    prefill_s = cost.beta_p * missing if missing > 1 else 0.0
    context_s = cost.gamma * steps * (seq.num_tokens + steps / 2)
    return Part(steps, prefill_s + cost.beta_d * steps + context_s)


def load_of(parts: Sequence[Part], cost: StepCost) -> Load:
    """The load of one worker."""
    if not parts:
        return Load()
    return Load(
        num_rows=len(parts),
        serial_s=cost.alpha_d * max(part.steps for part in parts),
        work_s=sum(part.work_s for part in parts),
    )


def choose_given(
    parts: Sequence[Part], waiting: Sequence[bool], share_s: float, *, move_s: Sequence[float]
) -> list[int]:
    """Which sequences a worker gives away to make about `share_s` of work: some of those that wait,
    or all of them and some of those that run and are worth their way.

    Args:
        parts: of all its sequences.
        waiting: whether each has not started.
        share_s: seconds of work.
        move_s: seconds for which moving each keeps both workers from their steps, once it runs.
    """
    waits = [index for index, waits in enumerate(waiting) if waits]
    waiting_s = sum(parts[index].work_s for index in waits)
    if waiting_s >= share_s:
        return [waits[at] for at in choose_share([parts[index] for index in waits], share_s)]
    runs = [
        index
        for index, waits in enumerate(waiting)
        if not waits and parts[index].work_s > move_s[index]
    ]
    chosen = choose_share([parts[index] for index in runs], share_s - waiting_s)
    return [*waits, *(runs[at] for at in chosen)]


def choose_share(parts: Sequence[Part], share_s: float) -> list[int]:
    """Which sequences make about `share_s` of work, so that what goes looks like what stays: the
    longest first, each where the shares stand worst.

    Args:
        parts: of sequences that may go.
        share_s: seconds of work.
    """
    total_s = sum(part.work_s for part in parts)
    if total_s <= 0 or share_s <= 0:
        return []
    wanted = min(1.0, share_s / total_s)
    chosen: list[int] = []
    seen_s = given_s = 0.0
    for index in sorted(range(len(parts)), key=lambda i: (-parts[i].work_s, i)):
        work_s = parts[index].work_s
        seen_s += work_s
        # Give it if that brings the share given nearer to the one wanted.
        if given_s + work_s / 2 <= wanted * seen_s:
            chosen.append(index)
            given_s += work_s
    return chosen
