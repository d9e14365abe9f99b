"""What a model hands to the sampler: logits that need not have been written down.

Legend: S sampled rows, R of them, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workers.sampling import filters


class Logits(Protocol):
    """Logits of the sampled rows of one batch. Nearly all rows of most jobs need the likeliest
    token alone, and a model may find it without writing a row down.
    """

    def likeliest(self) -> tuple[Tensor, Tensor]:
        """Ids (S,) of the likeliest tokens, the first of equals, and their logits, float32. A row
        that holds NaN has NaN.
        """
        ...

    def rows(self, index_R: Tensor) -> Tensor:
        """(R, V), float32, in memory that the caller may change."""
        ...


class DenseLogits:
    """Logits that are all there, in float32."""

    def __init__(self, logits_SV: Tensor) -> None:
        self._logits_SV = logits_SV

    def likeliest(self) -> tuple[Tensor, Tensor]:
        return filters.likeliest(self._logits_SV)

    def rows(self, index_R: Tensor) -> Tensor:
        return self._logits_SV.index_select(0, index_R)
