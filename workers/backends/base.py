"""The seam between the engine, which counts, and a backend, which computes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from schedulers.loop import Segment
from schedulers.view import SeqId
from workers.request import Sampled
from workers.times import ExecuteTimes

if TYPE_CHECKING:
    from workers.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the rest of the system may know of a loaded model.

    Attributes:
        name: as the user gave it.
        max_model_len: most tokens (prompt and completion) of one sequence.
        eos_token_ids: ids that end a completion, from generation_config, else config.
        dtype: "float32", "bfloat16", "float16" or "int8" (weights and what they are multiplied
            with; all else is bfloat16 then).
        weights_bytes: resident size of the weights.
        kv_bytes_per_token: bytes of keys and values of one token over all layers.
        activation_bytes_per_token: upper estimate of scratch memory per token of a batch.
        logits_bytes_per_seq: scratch memory per sampled sequence.
        num_parameters: for FLOP counts (2 x parameters per token).
        scratch_bytes: upper estimate of scratch memory whatever the batch.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    device: str
    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    activation_bytes_per_token: int
    logits_bytes_per_seq: int
    num_parameters: int
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Segments of several tokens (chunks) come first, single-token ones (decodes)
    after them.
    """

    segments: tuple[Segment[Sequence], ...]

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


KVBlocks = Any
"""Keys and values of blocks, of a form that only backends of one kind know. Can be pickled."""


class Executed(NamedTuple):
    """What came of a batch.

    Attributes:
        sampled: one token for each segment with `sample`, in their order.
        times: where the time went, as far as the backend can tell; the rest is its own.
    """

    sampled: tuple[Sampled, ...]
    times: ExecuteTimes = ExecuteTimes()


class Backend(Protocol):
    """Executes batches. One per engine and device; not thread-safe."""

    @property
    def info(self) -> ModelInfo: ...

    def allocate(self, *, num_blocks: int, block_size: int) -> None:
        """Reserve KV memory: `num_blocks` blocks of `block_size` positions. Called once, before
        `execute`.

        Raises:
            DeviceOutOfMemory: the device has not that much.
        """
        ...

    def execute(self, batch: Batch) -> Executed:
        """Compute a batch, write its keys and values, and draw one token for each segment with
        `sample`.

        Does not change the sequences. Safe to repeat: writing the same positions again has the same
        effect.

        Raises:
            DeviceOutOfMemory: a smaller batch may succeed.
            BackendError: nothing will.
        """
        ...

    def read_kv(self, blocks: Seq[int]) -> KVBlocks:
        """A copy of the keys and values in some blocks, for the `write_kv` of a backend that runs
        the same model in the same way.
        """
        ...

    def write_kv(self, blocks: Seq[int], data: KVBlocks, *, skip: int = 0) -> None:
        """Fill blocks with what another backend's `read_kv` gave, from its block `skip` on.

        Raises:
            BackendError: it is of another model or layout.
        """
        ...

    def forget(self, seq_id: SeqId) -> None:
        """Drop whatever the backend keeps for a sequence that ended (penalty counts, say)."""
        ...

    def close(self) -> None:
        """Give weights and KV memory back. The backend is unusable afterwards."""
        ...
