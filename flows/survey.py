"""A look at a job's prompts before it runs: how long they are, and which rows have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from flows.prompts import PromptRenderer

BATCH_ROWS = 256
NUM_EXAMPLES = 3


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]: ...


class Prompt(NamedTuple):
    """One row's prompt and its length."""

    row_id: str
    text: str
    num_tokens: int


class Bin(NamedTuple):
    """Prompts of `low` to `high` tokens, both included."""

    low: int
    high: int
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found in the rows looked at.

    Attributes:
        num_rows: rows looked at.
        lengths: tokens of each prompt.
        without_prompt: rows that have none, by error type.
        longest: the longest prompt.
        examples: the first few.
    """

    num_rows: int
    lengths: tuple[int, ...]
    without_prompt: Mapping[str, int]
    longest: Prompt | None
    examples: tuple[Prompt, ...]

    @property
    def mean_tokens(self) -> float:
        """Mean prompt length over all rows, those without a prompt counted as 0."""
        return sum(self.lengths) / self.num_rows if self.num_rows else 0.0


def survey(
    rows: Iterable[tuple[str, Mapping[str, Any]]], renderer: PromptRenderer, encoder: Encoder
) -> Survey:
    """Render and tokenise `rows` (id and values), a batch at a time."""
    lengths: list[int] = []
    without: Counter[str] = Counter()
    examples: list[Prompt] = []
    longest: Prompt | None = None
    for prompt in _prompts(iter(rows), renderer, encoder, without):
        lengths.append(prompt.num_tokens)
        if len(examples) < NUM_EXAMPLES:
            examples.append(prompt)
        if longest is None or prompt.num_tokens > longest.num_tokens:
            longest = prompt
    return Survey(
        num_rows=len(lengths) + without.total(),
        lengths=tuple(lengths),
        without_prompt=dict(without),
        longest=longest,
        examples=tuple(examples),
    )


def _prompts(
    rows: Iterator[tuple[str, Mapping[str, Any]]],
    renderer: PromptRenderer,
    encoder: Encoder,
    without: Counter[str],
) -> Iterator[Prompt]:
    """The rows' prompts; rows without one are counted in `without`."""
    while batch := list(islice(rows, BATCH_ROWS)):
        rendered = [(row_id, renderer.render(values)) for row_id, values in batch]
        without.update(item.error.type for _, item in rendered if item.error is not None)
        good = [(row_id, item.text) for row_id, item in rendered if item.error is None]
        encoded = encoder.encode_batch(
            [text for _, text in good], add_special_tokens=renderer.add_special_tokens
        )
        for (row_id, text), ids in zip(good, encoded, strict=True):
            yield Prompt(row_id, text, len(ids))


def histogram(lengths: Sequence[int]) -> tuple[Bin, ...]:
    """Bins that double: 1, 2-3, 4-7, 8-15, ...; from the shortest prompt's to the longest's."""
    if not lengths:
        return ()
    counts = Counter(length.bit_length() for length in lengths)
    return tuple(
        Bin(1 << (bits - 1) if bits else 0, (1 << bits) - 1, counts[bits])
        for bits in range(min(counts), max(counts) + 1)
    )
