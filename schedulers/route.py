"""Which worker gets what: the router. Pure; the coordinator and the simulator drive the same one.

Whole shards go out largest first, each to the worker with the least work, a little ahead of need
(Graham's longest processing time first). When none is left, a worker that runs dry takes work from
the one that would end last, unless moving it costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from schedulers.load import Load

MOVE_S = 0.1
"""Seconds that a move takes beside what the moved sequences cost: two messages, and a step of each
engine during which they wait.
"""


class Steal(NamedTuple):
    """Work goes from one worker to another.

    Attributes:
        thief: who runs dry.
        victim: who would end last.
        share_s: seconds of work that should go.
        gain_s: by which the later of the two ends sooner.
    """

    thief: int
    victim: int
    share_s: float
    gain_s: float


def next_receiver(
    loads: Mapping[int, Load], *, rows_ahead: int, rows: Mapping[int, int]
) -> int | None:
    """Who gets the next shard: of the workers with less than `rows_ahead` rows, the one with the
    least work; None when all have enough.

    Args:
        loads: of the workers that take work, by index.
        rows_ahead: rows that keep a worker busy until more can come.
        rows: rows without a result that each worker has been given.
    """
    hungry = [index for index in loads if rows.get(index, 0) < rows_ahead]
    if not hungry:
        return None
    return min(hungry, key=lambda index: (loads[index].total_s, rows.get(index, 0), index))


def plan_steal(
    loads: Mapping[int, Load], *, ahead_s: float, busy: frozenset[int] = frozenset()
) -> Steal | None:
    """The best move of work to a worker that runs dry; None when none pays.

    Args:
        loads: of the workers that take work.
        ahead_s: a worker with less work than that runs dry.
        busy: workers that give or take already.
    """
    free = {index: load for index, load in loads.items() if index not in busy}
    dry = [index for index, load in free.items() if load.total_s < ahead_s]
    if not dry:
        return None
    thief = min(dry, key=lambda index: (free[index].total_s, index))
    moves = [
        move
        for victim, load in free.items()
        if victim != thief
        and load.num_rows > 1
        and (move := _move(thief, victim, free[thief], load)) is not None
    ]
    return max(moves, key=lambda move: (move.gain_s, -move.victim), default=None)


def _move(thief: int, victim: int, own: Load, other: Load) -> Steal | None:
    """Level the work of two. The fixed cost of the victim's steps stays with both: long sequences
    go along, and what stays may be as long.
    """
    share_s = (other.work_s - own.work_s) / 2
    later_s = max(other.total_s - share_s, other.serial_s + own.work_s + share_s) + MOVE_S
    gain_s = other.total_s - later_s
    if share_s <= 0 or gain_s <= MOVE_S:
        return None
    return Steal(thief, victim, share_s, gain_s)


class Way(NamedTuple):
    """How a half-done sequence's keys and values come to another worker.

    Attributes:
        token_s: seconds to compute one token of it again.
        token_bytes: of its keys and values.
        bytes_per_s: of the way between the two, copies at both ends included; 0: there is none.
    """

    token_s: float
    token_bytes: int
    bytes_per_s: float

    @property
    def carries_kv(self) -> bool:
        """Whether they travel, or are computed again: whichever is sooner."""
        return self._carried_s < self.token_s

    def move_s(self, num_tokens: int) -> float:
        """Seconds that it takes both workers together, with so many tokens in KV memory: carrying
        keeps each from its steps, computing again only the one that receives.
        """
        return num_tokens * (2 * self._carried_s if self.carries_kv else self.token_s)

    @property
    def _carried_s(self) -> float:
        return self.token_bytes / self.bytes_per_s if self.bytes_per_s else math.inf
