"""Which tokens a sequence has had, for the penalties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class SeenTokens:
    """Distinct tokens of one sequence and how often each was generated.

    A cache: all of it follows from the token ids, to which it catches up whenever it is asked. It
        is made anew when the ids are
    not a continuation of those it knows.
    """

    __slots__ = ("_counts", "_ids", "_num_tokens", "_slots")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._slots: dict[int, int] = {}
        self._ids: I64 = np.empty(64, dtype=np.int64)
        self._counts: I64 = np.zeros(64, dtype=np.int64)
        self._num_tokens = len(prompt_ids)
        for token_id in dict.fromkeys(prompt_ids):
            self._slot(token_id)

    def update(self, token_ids: Sequence[int]) -> None:
        """Take the ids that follow the known ones."""
        for token_id in islice(token_ids, self._num_tokens, None):
            slot = self._slot(token_id)  # before the counts are looked at: it may move them
            self._counts[slot] += 1
        self._num_tokens = len(token_ids)

    @property
    def num_tokens(self) -> int:
        """How many token ids have been taken, the prompt included."""
        return self._num_tokens

    @property
    def ids(self) -> I64:
        """Distinct ids of prompt and output, shape (n,)."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> I64:
        """How often each of `ids` is in the output, shape (n,)."""
        return self._counts[: len(self._slots)]

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is not None:
            return slot
        slot = len(self._slots)
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._slots[token_id] = slot
        self._ids[slot] = token_id
        return slot
