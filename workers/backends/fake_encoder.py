"""An encoder that computes nothing: vectors that are a function of the token ids, scripted speed
and faults; for tests and for measuring all the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from workers.encoding import EncoderInfo, EncodeTask, Floats, PackedTexts
from workers.errors import BackendError, DeviceOutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEncodeFaults:
    """What goes wrong, and when.

    Attributes:
        max_batch_tokens: bigger micro-batches raise `DeviceOutOfMemory`.
        fail_at_call: this `execute` (from 1) raises `BackendError`.
        nan_token_ids: a text that has one of them gets NaN in its vector.
        oom_token_ids: a micro-batch with one of them never fits.
    """

    max_batch_tokens: int | None = None
    fail_at_call: int | None = None
    nan_token_ids: frozenset[int] = field(default_factory=frozenset[int])
    oom_token_ids: frozenset[int] = field(default_factory=frozenset[int])


class FakeEncoder:
    """Speaks the `EncodeBackend` protocol.

    Args:
        width: numbers of a vector; the number of labels for classify.
        task: what the vectors are said to be. Those of classify add up to 1.
        call_s: seconds that a micro-batch takes whatever is in it.
        text_s: seconds for each text.
        token_s: seconds for each token.
        sleep: how time passes.
        faults: what goes wrong.
        on_execute: called with every micro-batch before it is computed (to count, to kill).
        max_len: most tokens of a text.
        vocab_size: token ids are below it.

    Attributes:
        num_calls: of `execute`.
        num_texts: computed.
        num_tokens: computed.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        width: int,
        *,
        task: EncodeTask = "embed",
        call_s: float = 0.0,
        text_s: float = 0.0,
        token_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        faults: FakeEncodeFaults | None = None,
        on_execute: Callable[[PackedTexts], None] | None = None,
        max_len: int = 512,
        vocab_size: int = 30522,
    ) -> None:
        self.info = EncoderInfo(
            name="fake",
            task=task,
            width=width,
            labels=tuple(f"LABEL_{index}" for index in range(width)) if task == "classify" else (),
            vocab_size=vocab_size,
            max_len=max_len,
            device="cpu",
            dtype="float32",
            weights_bytes=0,
            activation_bytes_per_token=0,
            num_parameters=1,
        )
        self.num_calls = self.num_texts = self.num_tokens = 0
        self.closed = False
        self._seconds = call_s, text_s, token_s
        self._sleep = sleep
        self._faults = faults or FakeEncodeFaults()
        self._on_execute = on_execute

    def execute(self, texts: PackedTexts) -> Floats:
        if self._on_execute is not None:
            self._on_execute(texts)
        self.num_calls += 1
        self._raise_faults(texts)
        call_s, text_s, token_s = self._seconds
        elapsed_s = call_s + text_s * len(texts) + token_s * texts.num_tokens
        if elapsed_s:
            self._sleep(elapsed_s)
        vectors = np.empty((len(texts), self.info.width), dtype=np.float32)
        runs = np.split(texts.token_ids_T, texts.ends_N[:-1])
        for row, token_ids in enumerate(runs):
            vectors[row] = self.vector(token_ids)
        self.num_texts += len(texts)
        self.num_tokens += texts.num_tokens
        return vectors

    def vector(self, token_ids: np.ndarray) -> Floats:
        """(width), between 0 and 1: what a text of these token ids gets."""
        if self._faults.nan_token_ids.intersection(token_ids.tolist()):
            return np.full(self.info.width, np.nan, dtype=np.float32)
        seed = xxhash.xxh64_intdigest(np.ascontiguousarray(token_ids, dtype=np.int32).tobytes())
        vector = np.random.default_rng(seed).random(self.info.width, dtype=np.float32)
        return vector / vector.sum() if self.info.task == "classify" else vector

    def _raise_faults(self, texts: PackedTexts) -> None:
        faults = self._faults
        if faults.fail_at_call == self.num_calls:
            raise BackendError(f"the device was lost at call {self.num_calls} (scripted)")
        most = faults.max_batch_tokens
        if most is not None and texts.num_tokens > most:
            raise DeviceOutOfMemory(f"{texts.num_tokens} tokens; {most} fit (scripted)")
        if faults.oom_token_ids.intersection(texts.token_ids_T.tolist()):
            raise DeviceOutOfMemory("a text that never fits (scripted)")

    def close(self) -> None:
        self.closed = True
