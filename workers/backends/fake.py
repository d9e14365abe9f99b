"""A backend that computes nothing: scripted tokens and faults, for tests and for measuring all the
rest.

It keeps, like a real one, what has been written to each KV slot, and checks before each step that
the slots of a sequence's history hold that sequence's tokens: a scheduling or block-table mistake
shows as a failure and not as plausible text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import xxhash

from schedulers.view import SeqId
from workers.backends.base import Batch, Executed, ModelInfo, Segment
from workers.errors import BackendError, DeviceOutOfMemory
from workers.request import Sampled
from workers.sequence import Sequence

Script = Callable[[str, int, int], int]
"""(request id, sample index, position in the output) -> token id."""


def hashed_script(
    vocab_size: int = 1000, eos_token_id: int = 0, mean_output_tokens: int = 12
) -> Script:
    """Tokens and geometric-like lengths that are a function of the row alone."""

    def script(request_id: str, sample_index: int, position: int) -> int:
        draw = xxhash.xxh64_intdigest(f"{request_id}/{sample_index}/{position}".encode())
        if draw % mean_output_tokens == 0:
            return eos_token_id
        return 1 + (draw >> 8) % (vocab_size - 1)

    return script


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFaults:
    """What goes wrong, and when.

    Attributes:
        max_batch_tokens: bigger batches raise `DeviceOutOfMemory`.
        fail_at_step: this step (from 1) raises `BackendError`.
        nan_request_ids: rows whose logits are not finite.
        oom_request_ids: rows that never fit, however small the batch.
    """

    max_batch_tokens: int | None = None
    fail_at_step: int | None = None
    nan_request_ids: frozenset[str] = field(default_factory=frozenset[str])
    oom_request_ids: frozenset[str] = field(default_factory=frozenset[str])


class FakeBackend:
    """Speaks the `Backend` protocol.

    Args:
        script: which token comes next.
        faults: what goes wrong.
        check_slots: keep and check the content of every KV slot (slow, for tests).
        on_execute: called with every batch before it is computed (to sleep, to count, to kill).
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        faults: FakeFaults | None = None,
        max_model_len: int = 4096,
        vocab_size: int = 1000,
        eos_token_id: int = 0,
        check_slots: bool = True,
        on_execute: Callable[[Batch], None] | None = None,
    ) -> None:
        self.info = ModelInfo(
            name="fake",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({eos_token_id}),
            device="cpu",
            dtype="float32",
            weights_bytes=0,
            kv_bytes_per_token=1024,
            activation_bytes_per_token=0,
            logits_bytes_per_seq=0,
            num_parameters=1,
        )
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.forgotten: int = 0
        self.closed = False
        self._script = script or hashed_script(vocab_size, eos_token_id)
        self._faults = faults or FakeFaults()
        self._check_slots = check_slots
        self._on_execute = on_execute
        self._slots: list[int | None] = []
        self._block_size = 0

    def allocate(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = [None] * (num_blocks * block_size if self._check_slots else 0)

    def execute(self, batch: Batch) -> Executed:
        if self._on_execute is not None:
            self._on_execute(batch)
        self._raise_faults(batch)
        self.num_steps += 1
        if self._check_slots:
            for segment in batch.segments:
                self._write(segment)
        self.num_computed_tokens += batch.num_tokens
        return Executed(tuple(self._sample(item) for item in batch.segments if item.sample))

    def read_kv(self, blocks: Seq[int]) -> list[list[int | None]]:
        size = self._block_size
        return [self._slots[block * size : (block + 1) * size] for block in blocks]

    def write_kv(self, blocks: Seq[int], data: list[list[int | None]], *, skip: int = 0) -> None:
        size = self._block_size
        if self._check_slots:
            for block, slots in zip(blocks, data[skip:], strict=False):
                self._slots[block * size : (block + 1) * size] = slots

    def _raise_faults(self, batch: Batch) -> None:
        faults = self._faults
        if faults.fail_at_step == self.num_steps + 1:
            raise BackendError(f"the device was lost at step {self.num_steps + 1} (scripted)")
        if faults.max_batch_tokens is not None and batch.num_tokens > faults.max_batch_tokens:
            raise DeviceOutOfMemory(
                f"{batch.num_tokens} tokens; {faults.max_batch_tokens} fit (scripted)"
            )
        for segment in batch.segments:
            if segment.seq.request.request_id in faults.oom_request_ids:
                raise DeviceOutOfMemory(
                    f"row {segment.seq.request.request_id} never fits (scripted)"
                )

    def _write(self, segment: Segment[Sequence]) -> None:
        tokens, table, size = segment.seq.token_ids, segment.block_table, self._block_size
        end = segment.start + segment.num_tokens
        if len(table) * size < end:
            raise BackendError(f"{segment.seq}: table of {len(table)} blocks for {end} tokens")
        slots = [table[position // size] * size + position % size for position in range(end)]
        for position, slot in enumerate(slots):
            if position >= segment.start:
                self._slots[slot] = tokens[position]
            elif self._slots[slot] != tokens[position]:
                raise BackendError(
                    f"{segment.seq}: position {position} (slot {slot}) holds {self._slots[slot]}, "
                    f"not {tokens[position]}"
                )

    def _sample(self, segment: Segment[Sequence]) -> Sampled:
        seq = segment.seq
        if seq.request.request_id in self._faults.nan_request_ids:
            return Sampled(token_id=0, error="logits are not finite (scripted)")
        token_id = self._script(seq.request.request_id, seq.sample_index, seq.num_output_tokens)
        return Sampled(token_id=token_id, logprob=-1.0)

    def forget(self, seq_id: SeqId) -> None:  # noqa: ARG002
        self.forgotten += 1

    def close(self) -> None:
        self.closed = True
        self._slots = []
