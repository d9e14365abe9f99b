"""From a loaded model and what the user allows to an engine: sizes, budget, memory plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from schedulers.cost import StepSample
from schedulers.estimate import Estimator
from schedulers.memory import (
    MemoryPlan,
    ModelFootprint,
    NotEnoughMemory,
    SizingForm,
    plan_memory,
)
from schedulers.policies import make_policy
from schedulers.view import Budget
from workers.backends.base import Backend, ModelInfo
from workers.encoding import EncoderInfo
from workers.engine import Engine, EngineConfig
from workers.request import EventRecord, RequestId, StepRecord
from workers.sequence import FindStop

BLOCK_SIZE = 16
DETERMINISTIC_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the user may say about an engine; None leaves it to the hardware.

    Attributes:
        policy: name in `schedulers.policies.POLICIES`.
        overflow_probability: bound on the chance that the holders outgrow KV memory.
        sizing: the form of the memory-safe number of holders.
        memory_bytes: limit for weights, activations and KV memory together.
        max_batch_tokens: most tokens of a step.
        max_seqs: most sequences that hold KV memory.
        deterministic: a row's result does not depend on what else is in its batch.
        row_timeout_s: when a row is given up.
        host_share: part of the host's memory and cores that is this engine's, where several run.
    """

    policy: str = "hybrid"
    overflow_probability: float = 0.01
    sizing: SizingForm = "moments"
    memory_bytes: int | None = None
    max_batch_tokens: int | None = None
    max_seqs: int | None = None
    deterministic: bool = False
    row_timeout_s: float | None = None
    host_share: float = 1.0


class SizeDefaults(NamedTuple):
    """Step sizes that serve a kind of device well (`tests/bench`)."""

    max_batch_tokens: int
    max_seqs: int


DEFAULTS = {"cpu": SizeDefaults(1024, 256), "cuda": SizeDefaults(8192, 1024)}

ENCODE_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens of a micro-batch of an encoder."""


class EngineSetup(NamedTuple):
    """A sized engine and where its memory goes."""

    config: EngineConfig
    memory: MemoryPlan


class MadeEngine(NamedTuple):
    """An engine, where its memory goes, and what its policy learns through."""

    engine: Engine
    memory: MemoryPlan
    estimator: Estimator


def default_memory_bytes(device: str, weights_bytes: int, *, host_share: float = 1.0) -> int:
    """What a worker may use when nobody said: half of the free memory on a CPU, which it shares
    with everything else, nine tenths of a GPU's; the weights, loaded already, come on top.
    """
    if device.startswith("cuda"):
        import torch

        free_bytes, _ = torch.cuda.mem_get_info(device)
        return weights_bytes + int(0.9 * free_bytes)
    import psutil

    return weights_bytes + int(psutil.virtual_memory().available / 2 * host_share)


def device_memory_bytes(device: str) -> int:
    """All memory of a device, of which a share such as 50% is taken."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return psutil.virtual_memory().total


def size_engine(info: ModelInfo, options: EngineOptions) -> EngineSetup:
    """Sizes for a model on its device.

    Raises:
        NotEnoughMemory: the limit does not hold the model and a smallest batch.
    """
    defaults = DEFAULTS.get(info.device.split(":")[0], DEFAULTS["cpu"])
    max_batch_tokens = options.max_batch_tokens or max(
        defaults.max_batch_tokens, options.max_seqs or 0
    )
    max_seqs = options.max_seqs or min(defaults.max_seqs, max_batch_tokens)
    limit_bytes = options.memory_bytes or default_memory_bytes(
        info.device, info.weights_bytes, host_share=options.host_share
    )
    memory = plan_memory(
        ModelFootprint(
            weights_bytes=info.weights_bytes,
            kv_bytes_per_token=info.kv_bytes_per_token,
            activation_bytes_per_token=info.activation_bytes_per_token,
            logits_bytes_per_seq=info.logits_bytes_per_seq,
            scratch_bytes=info.scratch_bytes,
        ),
        limit_bytes=limit_bytes,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_seqs,
        max_model_len=info.max_model_len,
        block_size=BLOCK_SIZE,
    )
    chunk = min(DETERMINISTIC_CHUNK_TOKENS, max_batch_tokens) if options.deterministic else None
    config = EngineConfig(
        num_blocks=memory.num_blocks,
        block_size=BLOCK_SIZE,
        budget=Budget(
            max_batch_tokens=max_batch_tokens,
            max_seqs=max_seqs,
            reservation="full" if options.deterministic else "expected",
            chunk_tokens=chunk,
        ),
        window=4 * max_seqs,
        share_prefixes=not options.deterministic,
        row_timeout_s=options.row_timeout_s,
    )
    return EngineSetup(config, memory)


def size_encoder(info: EncoderInfo, options: EngineOptions) -> int:
    """Most tokens of a micro-batch, for a model on its device: what is usual for the device, or
    what was asked for, as far as memory holds it.

    Args:
        info: of the loaded encoder.
        options: `memory_bytes`, `max_batch_tokens` and `host_share` count.

    Raises:
        NotEnoughMemory: the limit does not hold the model and a longest text, or what was asked.
    """
    usual = ENCODE_BATCH_TOKENS.get(info.device.split(":")[0], ENCODE_BATCH_TOKENS["cpu"])
    wanted = options.max_batch_tokens or usual
    limit_bytes = options.memory_bytes or default_memory_bytes(
        info.device, info.weights_bytes, host_share=options.host_share
    )
    free_bytes = limit_bytes - info.weights_bytes - info.scratch_bytes
    fits = free_bytes // max(1, info.activation_bytes_per_token)
    needed = min(info.max_len, wanted)
    if fits < needed:
        raise NotEnoughMemory(
            f"{limit_bytes / 2**30:.2f} GiB is too little: weights take "
            f"{info.weights_bytes / 2**30:.2f} GiB, and {needed} tokens "
            f"{needed * info.activation_bytes_per_token / 2**30:.2f} GiB; raise --memory"
        )
    return min(wanted, fits)


def make_engine(
    backend: Backend,
    options: EngineOptions,
    *,
    clock: Callable[[], float],
    calibration: Iterable[StepSample] = (),
    find_stop: Callable[[tuple[str, ...]], FindStop] | None = None,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    on_event: Callable[[EventRecord], None] = lambda _: None,
    on_start: Callable[[list[RequestId]], None] = lambda _: None,
) -> MadeEngine:
    """An engine over a loaded backend.

    Args:
        backend: a loaded model.
        options: what the user says.
        clock: seconds, monotonic.
        calibration: steps measured earlier on this hardware and model.
        find_stop: see `Engine`.
        on_step: see `Engine`.
        on_event: see `Engine`.
        on_start: see `Engine`.

    Raises:
        NotEnoughMemory: see `size_engine`.
    """
    setup = size_engine(backend.info, options)
    estimator = Estimator(
        overflow_probability=options.overflow_probability,
        sizing=options.sizing,
        calibration=calibration,
    )
    engine = Engine(
        backend,
        make_policy(options.policy, estimator),
        setup.config,
        clock=clock,
        find_stop=find_stop,
        on_step=on_step,
        on_event=on_event,
        on_start=on_start,
    )
    return MadeEngine(engine, setup.memory, estimator)
