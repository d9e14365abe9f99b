"""When a worker that died comes back, and which rows are to blame. Pure.

A row is under suspicion when its worker died while it was being computed. After its second death it
is computed apart from all others, in a cell: cells that die are halved until one row is alone, and
what dies alone is the row's own doing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flows.queues import RowKey

DEATHS_BEFORE_ISOLATION = 2
MAX_FAILURES = 5
"""A worker that dies so often in a row, without a row finished in between, is given up."""
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


@dataclass(slots=True)
class Failures:
    """How often a worker has died in a row."""

    count: int = 0

    def note_progress(self) -> None:
        """A row has finished: what came before is forgiven."""
        self.count = 0

    def note_death(self) -> float | None:
        """Seconds until it should come back; None: it should not."""
        self.count += 1
        if self.count >= MAX_FAILURES:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.count - 1))


Cell = tuple[RowKey, ...]
"""Rows that are computed together and apart from all others."""


@dataclass(slots=True)
class Suspects:
    """Rows that were there when workers died."""

    _deaths: Counter[RowKey] = field(default_factory=Counter[RowKey])
    cells: deque[Cell] = field(default_factory=deque[Cell])

    def note_death(self, running: Sequence[RowKey]) -> list[RowKey]:
        """A worker died over these rows. Returns those that may go back among the others; the rest
        is in cells now.
        """
        self._deaths.update(running)
        isolated = [key for key in running if self._deaths[key] >= DEATHS_BEFORE_ISOLATION]
        if isolated:
            self._halve(tuple(sorted(isolated)))
        return [key for key in running if self._deaths[key] < DEATHS_BEFORE_ISOLATION]

    def note_cell_death(self, cell: Cell) -> RowKey | None:
        """A worker died over what is left of a cell. Returns the row that is to blame, if it was
        alone.
        """
        if len(cell) == 1:
            return cell[0]
        self._halve(tuple(sorted(cell)))
        return None

    def _halve(self, cell: Cell) -> None:
        middle = (len(cell) + 1) // 2
        for part in (cell[middle:], cell[:middle]):
            if part:
                self.cells.appendleft(part)

    def note_answers(self, keys: Collection[RowKey]) -> None:
        """Rows have their results."""
        if self._deaths:
            for key in keys:
                self._deaths.pop(key, None)
