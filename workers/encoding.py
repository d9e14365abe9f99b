"""Texts to vectors: what goes in and out of an encoder, and the executor that feeds it.

Legend: N texts of a batch, T tokens of all of them.

An *encode call* maps N texts to N vectors. Which number a vector holds depends on the task:

    embed      the text's embedding
    classify   a probability for each label
    score      the sum of the log-likelihoods, in nats, of the text's tokens given those before

`Encoder` sorts the texts of a call by length, cuts them into micro-batches by tokens, so that
nothing is padded, and puts the vectors back into the texts' order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.errors import DeviceOutOfMemory, InternalError

EncodeTask = Literal["embed", "classify", "score"]
EncodeFault = Literal["empty", "not_finite", "out_of_memory"]
"""Why a text has no vector: no tokens; NaN or infinity in it; too long for the device's memory."""

TokenIds = NDArray[np.int32]
Places = NDArray[np.int64]
Floats = NDArray[np.float32]

RECOVER_AFTER = 256
"""Healthy micro-batches after which a limit that was lowered is doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    """What the rest of the system may know of a loaded encoder.

    Attributes:
        name: as the user gave it.
        task: what its vectors are.
        width: numbers of a vector: dimension, number of labels, or 1.
        labels: of classify, in the order of a vector's numbers; else empty.
        vocab_size: token ids are below it.
        max_len: most tokens of a text, special ones included.
        device: as torch names it.
        dtype: what is multiplied: "float32", "bfloat16", "float16", "int16" (the native encoder)
            or "int8" (the native decoder). All between two products is float32.
        weights_bytes: resident size of the weights.
        activation_bytes_per_token: upper estimate of scratch memory per token of a micro-batch.
        num_parameters: those each token is multiplied with, embeddings not counted (2 x FLOP).
        scratch_bytes: upper estimate of scratch memory whatever the micro-batch.
    """

    name: str
    task: EncodeTask
    width: int
    labels: tuple[str, ...] = ()
    vocab_size: int
    max_len: int
    device: str
    dtype: str
    weights_bytes: int
    activation_bytes_per_token: int
    num_parameters: int
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PackedTexts:
    """Token ids of N texts, one after another. Not changed by anyone.

    Attributes:
        token_ids_T: int32.
        ends_N: int64, the row behind each text.
        first_N: int64, position of each text's first token that counts: that is scored, or pooled
            where a model leaves its prompt out; None: all count. The first token of a text has
            nothing before it, so it is never scored.
    """

    token_ids_T: TokenIds
    ends_N: Places
    first_N: Places | None = None

    @classmethod
    def from_lists(
        cls, texts: Sequence[Sequence[int]], *, first: Sequence[int] | None = None
    ) -> PackedTexts:
        """Pack lists of token ids."""
        lengths_N = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        ends_N = lengths_N.cumsum()
        total = int(ends_N[-1]) if len(texts) else 0
        flat = np.fromiter(chain.from_iterable(texts), dtype=np.int32, count=total)
        return cls(flat, ends_N, None if first is None else np.asarray(first, dtype=np.int64))

    @classmethod
    def concatenate(cls, parts: Sequence[PackedTexts]) -> PackedTexts:
        """All texts of the parts, in order; `first_N` must be in all of them or in none."""
        if not parts:
            return cls(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        firsts = [part.first_N for part in parts if part.first_N is not None]
        lengths_N = np.concatenate([part.lengths_N for part in parts])
        flat = np.concatenate([part.token_ids_T for part in parts])
        return cls(flat, lengths_N.cumsum(), np.concatenate(firsts) if firsts else None)

    def __len__(self) -> int:
        return len(self.ends_N)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def lengths_N(self) -> Places:
        """Tokens of each text."""
        return np.diff(self.ends_N, prepend=0)

    @property
    def begins_N(self) -> Places:
        """First row of each text."""
        return self.ends_N - self.lengths_N

    @property
    def num_scored_N(self) -> Places:
        """Tokens of each text that the task score adds up."""
        first = 1 if self.first_N is None else self.first_N
        return np.maximum(self.lengths_N - np.maximum(first, 1), 0)

    def take(self, index: Places) -> PackedTexts:
        """Some of the texts, in the given order. A copy."""
        lengths_N = self.lengths_N[index]
        ends_N = lengths_N.cumsum()
        total = int(ends_N[-1]) if len(index) else 0
        rows_T = np.arange(total) + np.repeat(self.begins_N[index] - ends_N + lengths_N, lengths_N)
        first_N = None if self.first_N is None else self.first_N[index]
        return PackedTexts(self.token_ids_T[rows_T], ends_N, first_N)

    def slice(self, start: int, stop: int) -> PackedTexts:
        """Texts [start, stop), over the same tokens."""
        begin = int(self.ends_N[start - 1]) if start else 0
        ends_N = self.ends_N[start:stop]
        end = int(ends_N[-1]) if len(ends_N) else begin
        first_N = None if self.first_N is None else self.first_N[start:stop]
        return PackedTexts(self.token_ids_T[begin:end], ends_N - begin, first_N)


class EncodeBackend(Protocol):
    """Computes micro-batches. One per device; not thread-safe."""

    @property
    def info(self) -> EncoderInfo: ...

    def execute(self, texts: PackedTexts) -> Floats:
        """The vectors (N, width) of a micro-batch, in the order of its texts.

        Each text has at least one token and at most `info.max_len`. Texts of equal length should
        stand together, which is how they are computed.

        Raises:
            DeviceOutOfMemory: a smaller micro-batch may succeed.
            BackendError: nothing will.
        """
        ...

    def close(self) -> None:
        """Give the weights back. The backend is unusable afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeStep:
    """Telemetry of one micro-batch; `started_s` and `elapsed_s` by the encoder's clock."""

    num_texts: int
    num_tokens: int
    started_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What came of an encode call.

    Attributes:
        vectors: (N, width), float32 and contiguous, in the texts' order. Rows of texts that are not
            done, or that have a fault, are NaN; a score of nothing is 0.
        done: which texts were computed (faults included); all, unless the call was stopped.
        faults: why a text has no vector, by its index.
    """

    vectors: Floats
    done: NDArray[np.bool_]
    faults: Mapping[int, EncodeFault] = field(default_factory=dict[int, EncodeFault])


class _Work(NamedTuple):
    """A micro-batch, and which texts of the call are in it."""

    chosen: Places
    texts: PackedTexts


class Encoder:
    """Runs encode calls on a backend, micro-batch by micro-batch, longest texts first: if the
    device's memory does not hold a micro-batch, the first one says so.

    Args:
        backend: a loaded encoder.
        max_batch_tokens: of a micro-batch; a longer text is one of its own.
        clock: seconds, monotonic.
        on_step: called after each micro-batch.
        should_stop: asked before each micro-batch; True ends the call early.
    """

    def __init__(
        self,
        backend: EncodeBackend,
        *,
        max_batch_tokens: int,
        clock: Callable[[], float],
        on_step: Callable[[EncodeStep], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens is {max_batch_tokens}; 1 or more is wanted")
        self._backend = backend
        self._most_tokens = max_batch_tokens
        self._limit_tokens = max_batch_tokens
        self._num_healthy = 0
        self._clock = clock
        self._on_step = on_step
        self._should_stop = should_stop

    @property
    def limit_tokens(self) -> int:
        """Most tokens of a micro-batch, as memory allows at present."""
        return self._limit_tokens

    def encode(self, texts: PackedTexts) -> Encoded:
        """One encode call. Texts longer than the model are the caller's to cut.

        Raises:
            BackendError: the device failed; the call may be repeated on another.
        """
        width = self._backend.info.width
        vectors = np.full((len(texts), width), np.nan, dtype=np.float32)
        found = Encoded(vectors, np.zeros(len(texts), dtype=np.bool_), dict[int, EncodeFault]())
        lengths_N = texts.lengths_N
        self._skip_empty(found, lengths_N)
        order = np.argsort(-self._sort_key(texts), kind="stable")
        order = order[lengths_N[order] > 0]
        start = 0
        while start < len(order) and not self._should_stop():
            count = _count_within(lengths_N[order[start:]], self._limit_tokens)
            chosen = order[start : start + count]
            self._run(_Work(chosen, texts.take(chosen)), found)
            start += count
        return found

    def _sort_key(self, texts: PackedTexts) -> Places:
        """Texts of equal length should stand together; where what follows prompts is scored, those
        of one prompt, as choices are, because a backend may compute it once.
        """
        if self._backend.info.task == "score" and texts.first_N is not None:
            return texts.first_N
        return texts.lengths_N

    def _skip_empty(self, found: Encoded, lengths_N: Places) -> None:
        """A text without tokens has no embedding; its score is that of nothing."""
        empty = np.flatnonzero(lengths_N == 0)
        found.done[empty] = True
        if self._backend.info.task == "score":
            found.vectors[empty] = 0
        else:
            _add_faults(found, empty, "empty")

    def _run(self, work: _Work, found: Encoded) -> None:
        """Compute a micro-batch, in halves where the device has no memory for it."""
        largest = 0
        waiting = [work]
        while waiting:
            part = waiting.pop()
            try:
                self._execute(part, found)
            except DeviceOutOfMemory:
                if len(part.chosen) > 1:
                    waiting.extend(_halves(part))
                    continue
                found.done[part.chosen] = True
                _add_faults(found, part.chosen, "out_of_memory")
            else:
                largest = max(largest, part.texts.num_tokens)
        self._learn(work.texts.num_tokens, largest)

    def _execute(self, work: _Work, found: Encoded) -> None:
        started_s = self._clock()
        vectors = self._backend.execute(work.texts)
        elapsed_s = self._clock() - started_s
        wanted = (len(work.chosen), self._backend.info.width)
        if vectors.shape != wanted:
            raise InternalError(f"an encoder gave vectors of {vectors.shape}, not of {wanted}")
        found.vectors[work.chosen] = vectors
        found.done[work.chosen] = True
        bad = work.chosen[~np.isfinite(vectors).all(axis=1)]
        found.vectors[bad] = np.nan
        _add_faults(found, bad, "not_finite")
        step = EncodeStep(
            num_texts=len(work.chosen),
            num_tokens=work.texts.num_tokens,
            started_s=started_s,
            elapsed_s=elapsed_s,
        )
        self._on_step(step)

    def _learn(self, num_tokens: int, largest: int) -> None:
        """Lower the limit to what was computed; raise it again after a healthy while."""
        if largest < num_tokens:
            fits = max(1, largest or num_tokens // 2)
            self._limit_tokens = min(self._limit_tokens, fits)
            self._num_healthy = 0
        elif self._limit_tokens < self._most_tokens:
            self._num_healthy += 1
            if self._num_healthy >= RECOVER_AFTER:
                self._limit_tokens = min(self._most_tokens, 2 * self._limit_tokens)
                self._num_healthy = 0


def _count_within(lengths_N: Places, most_tokens: int) -> int:
    """How many of the first texts have at most so many tokens together; at least 1."""
    head = lengths_N[:most_tokens]
    return max(1, int(np.searchsorted(head.cumsum(), most_tokens, side="right")))


def _halves(work: _Work) -> Iterator[_Work]:
    """The longer half last, as the caller takes from the end."""
    middle, count = len(work.chosen) // 2, len(work.chosen)
    yield _Work(work.chosen[middle:], work.texts.slice(middle, count))
    yield _Work(work.chosen[:middle], work.texts.slice(0, middle))


def _add_faults(found: Encoded, index: Places, fault: EncodeFault) -> None:
    assert isinstance(found.faults, dict)
    found.faults.update(dict.fromkeys(index.tolist(), fault))
