"""From the rows of a superbatch to packed token ids, and to the rows that have none.

For the tasks that give numbers for a text. A row has one text, or one for each choice that a
language model is to weigh behind the row's prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flows.busy import Meter
from flows.cutting import shorten_prompt
from flows.feeder import PromptTooLong
from flows.fleet.messages import Assign, Ordinals
from flows.model import Model
from flows.prompts import PromptRenderer, Rendered
from flows.spec_model import JobSpec
from storage.results import Status
from storage.rows import Row
from workers.encoding import PackedTexts
from workers.request import RowError

NO_TOKENS = RowError("empty_prompt", "the text has no tokens")


class TextEncoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]: ...
    def truncate(
        self, texts: PackedTexts, max_len: int, *, side: str | None = None
    ) -> tuple[PackedTexts, NDArray[np.bool_]]:
        """Cut between the special tokens."""
        ...


class RowFault(NamedTuple):
    """Why a row has no vector."""

    status: Status
    error: RowError


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """The rows of one encode call. R rows, N texts.

    Attributes:
        part: which rows.
        row_ids: of all R.
        packed: token ids of the N texts.
        where: position in `part` of each row that has texts; the texts of a row are together.
        texts_a_row: 1, or the number of choices.
        num_tokens: int32 [R], tokens of each row's prompt as it is encoded.
        truncated: bool [R], rows whose text was cut.
        faults: why rows have no text, by position.
    """

    part: Assign
    row_ids: list[str]
    packed: PackedTexts
    where: Ordinals
    texts_a_row: int
    num_tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    faults: dict[int, RowFault] = field(default_factory=dict[int, RowFault])

    def rows_done(self, texts_done: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of the R rows are finished when these of the N texts are."""
        done = np.ones(len(self.row_ids), dtype=np.bool_)
        done[self.where] = texts_done.reshape(-1, self.texts_a_row).all(axis=1)
        return done


@dataclass(slots=True)
class _Made:
    """The rows that have been made into texts so far."""

    num_tokens: NDArray[np.int32]
    row_ids: list[str] = field(default_factory=list[str])
    packed: list[PackedTexts] = field(default_factory=list[PackedTexts])
    where: list[int] = field(default_factory=list[int])
    truncated: list[int] = field(default_factory=list[int])
    faults: dict[int, RowFault] = field(default_factory=dict[int, RowFault])


class TextMaker:
    """Makes the texts of a superbatch.

    Args:
        spec: the job.
        read: the rows of a part, in batches.
        renderer: row values to text, or to the reason why there is none.
        tokenizer: text to token ids.
        model: whose texts are made: a prompt of its own may come before each.
        max_len: most tokens of a text, special ones included.
        meter: of the thread.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        read: Callable[[Assign], Iterator[list[Row]]],
        renderer: PromptRenderer,
        tokenizer: TextEncoder,
        model: Model,
        max_len: int,
        meter: Meter,
    ) -> None:
        self._read = read
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._prefix = model.text_prefix
        self._num_before, self._num_around = self._count_around()
        self._num_prefix = 0 if model.pools_prefix else self._num_before
        self._max_len = max_len
        self._on_too_long = spec.on_too_long or "error"
        self._choices = spec.encode.choices
        self._meter = meter

    def __call__(self, part: Assign) -> Texts:
        """Read, render and tokenise, a batch at a time: only token ids are kept.

        Raises:
            PromptTooLong: a text is too long, and the job says that it should fail then.
            InputError: the input is gone or damaged.
        """
        made = _Made(num_tokens=np.zeros(part.num_rows, dtype=np.int32))
        batches = self._read(part)
        while (rows := self._next(batches)) is not None:
            first = len(made.row_ids)
            made.row_ids.extend(row.row_id for row in rows)
            with self._meter("templating"):
                prompts, where = self._render(rows, first, made.faults)
            with self._meter("tokenising"):
                self._encode(prompts, where, made)
        return Texts(
            part=part,
            row_ids=made.row_ids,
            packed=PackedTexts.concatenate(made.packed),
            where=np.array(made.where, dtype=np.int64),
            texts_a_row=max(1, len(self._choices)),
            num_tokens=made.num_tokens,
            truncated=np.isin(np.arange(part.num_rows), made.truncated),
            faults=made.faults,
        )

    def _next(self, batches: Iterator[list[Row]]) -> list[Row] | None:
        with self._meter("reading"):
            return next(batches, None)

    def _render(
        self, rows: list[Row], first: int, faults: dict[int, RowFault]
    ) -> tuple[list[Rendered], list[int]]:
        """Texts of some rows, and the positions of these; the others have a fault."""
        prompts: list[Rendered] = []
        where: list[int] = []
        for position, row in enumerate(rows, first):
            rendered = self._renderer.render(row.values)
            if rendered.error is None:
                prompts.append(rendered)
                where.append(position)
            else:
                skipped = rendered.error.type == "null_prompt"
                status: Status = "skipped" if skipped else "error"
                faults[position] = RowFault(status, rendered.error)
        return prompts, where

    def _encode(self, prompts: list[Rendered], where: list[int], made: _Made) -> None:
        texts = [self._prefix + prompt.text for prompt in prompts]
        special = self._renderer.add_special_tokens
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=special)
        behind = self._behind(texts, encoded) if self._choices else None
        lists: list[list[int]] = []
        first: list[int] = []
        for index, position in enumerate(where):
            answers = behind[index] if behind is not None else [[]]
            room = self._max_len - max(map(len, answers))
            ids = encoded[index]
            if len(ids) > room:
                cut = self._cut(prompts[index], ids, room, made.row_ids[position])
                if isinstance(cut, RowError):
                    made.faults[position] = RowFault("error", cut)
                    continue
                ids = cut
                made.truncated.append(position)
            if len(ids) <= self._num_prefix:
                made.faults[position] = RowFault("error", NO_TOKENS)
                continue
            made.where.append(position)
            made.num_tokens[position] = len(ids)
            lists.extend([*ids, *answer] for answer in answers)
            first.extend([len(ids) if self._choices else self._num_prefix] * len(answers))
        counts = bool(self._choices or self._num_prefix)
        made.packed.append(PackedTexts.from_lists(lists, first=first if counts else None))

    def _count_around(self) -> tuple[int, int]:
        """Tokens of the model's own prompt and the special ones: those before a text, and all."""
        if not self._prefix:
            return 0, len(self._special(""))
        (plain,) = self._tokenizer.encode_batch([self._prefix], add_special_tokens=False)
        around = self._special(self._prefix)
        starts = range(len(around) - len(plain) + 1)
        before = next((n for n in starts if around[n : n + len(plain)] == plain), 0)
        return before + len(plain), len(around)

    def _special(self, text: str) -> list[int]:
        special = self._renderer.add_special_tokens
        (ids,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        return ids

    def _behind(self, texts: list[str], encoded: list[list[int]]) -> list[list[list[int]]]:
        """Token ids of each choice behind each text: what the text with it has beyond the text's
        own, so that the tokenizer joins them as it would.
        """
        glue = "" if not self._renderer.add_special_tokens else " "
        behind: list[list[list[int]]] = [[] for _ in texts]
        for choice in self._choices:
            (alone,) = self._tokenizer.encode_batch([glue + choice], add_special_tokens=False)
            whole = self._tokenizer.encode_batch(
                [text + glue + choice for text in texts],
                add_special_tokens=self._renderer.add_special_tokens,
            )
            for index, ids in enumerate(whole):
                own = encoded[index]
                fits = len(ids) > len(own) and ids[: len(own)] == own
                behind[index].append(ids[len(own) :] if fits else alone)
        return behind

    def _cut(
        self, prompt: Rendered, ids: list[int], room: int, row_id: str
    ) -> list[int] | RowError:
        """The tokens of a text that is too long: cut between its special tokens, or inside its
        chat.
        """
        message = f"the text has {len(ids)} tokens; the model takes {room} here (see --on-too-long)"
        if self._on_too_long == "fail":
            raise PromptTooLong(f"row {row_id}: {message}")
        if self._on_too_long == "error":
            return RowError("prompt_too_long", message)
        side = "left" if self._on_too_long == "truncate_left" else "right"
        if not self._renderer.add_special_tokens:
            return shorten_prompt(
                self._renderer, self._tokenizer, prompt, ids, limit=room, side=side
            )
        if room <= self._num_around:
            return RowError("prompt_too_long", f"{room} tokens leave no room for the text")
        if self._prefix and side == "left":  # the model's own prompt stays
            return ids[: self._num_before] + ids[self._num_before + len(ids) - room :]
        cut, _ = self._tokenizer.truncate(PackedTexts.from_lists([ids]), room, side=side)
        return cut.token_ids_T.tolist()
