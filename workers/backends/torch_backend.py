"""The backend that is ours: torch on a CPU or GPU.

Legend: S sampled rows, V vocabulary.

`execute` is: integers of the step (numpy), the model (tensors), one batched draw. Everything runs
in inference mode, on the calling thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq

import numpy as np
import torch

from schedulers.view import SeqId
from workers.attention import MAX_BUCKET_POSITIONS, QUERY_TILE
from workers.backends.base import Batch, Executed, ModelInfo
from workers.backends.translated import translated
from workers.errors import BackendError, InternalError, ModelError
from workers.kv import KVPool
from workers.loading.files import ModelFiles
from workers.models import native
from workers.models.config import ModelConfig
from workers.models.decoder import Model
from workers.models.device import DeviceName, DtypeName, pick_device, pick_dtype
from workers.models.registry import find_family
from workers.models.step import lay_out
from workers.models.weights import check_weights, load_weights, unique_tensors
from workers.sampling import BatchSampler
from workers.times import ExecuteTimes, Stopwatch

_log = logging.getLogger(__name__)


class TorchBackend:
    """Executes batches with torch. Made by `load`."""

    def __init__(self, model: Model, info: ModelInfo, device: torch.device) -> None:
        self._model: Model | None = model
        self._info = info
        self._device = device
        self._pool: KVPool | None = None
        self._sampler = BatchSampler(info.vocab_size, info.eos_token_ids, device)

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        device: DeviceName = "auto",
        dtype: DtypeName = "auto",
        deterministic: bool = False,
    ) -> TorchBackend:
        """Load a model's weights.

        Args:
            files: the checked folder.
            device: `auto` takes a GPU where there is one.
            dtype: `auto` takes bfloat16 where the hardware multiplies it, else float32 (CPU) or
                float16 (GPU).
            deterministic: a row's result does not depend, to the bit, on what else is in its
                batch, at some cost.

        Raises:
            ModelError: the architecture, the device or the number format is not supported, or the
                weights do not belong to config.json.
            DeviceOutOfMemory: the device does not hold the weights.
        """
        place = pick_device(device)
        number = pick_dtype(dtype, place)
        values = _values(number)
        family = find_family(files.config)
        config = family.read_config(files.config)
        outline = family.build(config, dtype=values, device=torch.device("meta"))
        check_weights(files.weight_files, outline.places(), is_ignored=outline.is_ignored)
        if number == torch.int8 and not native.supports(outline, dtype=number, device=place):
            raise ModelError(
                "int8 needs a processor with AVX-512 (BF16 and VNNI), a C++ compiler, and layer "
                f"sizes that are multiples of {native.LANES}; use bfloat16 or float32"
            )
        with translated(f"loading {files.name}"):
            model = family.build(config, dtype=values, device=place, deterministic=deterministic)
            load_weights(files.weight_files, model.places())
            num_parameters = sum(tensor.numel() for tensor in unique_tensors(model.places()))
            runner: Model = model
            if native.supports(model, dtype=number, device=place):
                runner = native.NativeDecoder(model, number)
        info = _describe(files, runner, num_parameters, number, place)
        _log.info("%s: %d parameters, %s on %s", info.name, info.num_parameters, number, place)
        return cls(runner, info, place)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, *, num_blocks: int, block_size: int) -> None:
        config = self._loaded().config
        self._pool = None  # before the new one takes memory
        with translated(f"reserving {num_blocks} KV blocks of {block_size} positions"):
            self._pool = KVPool(
                num_layers=config.num_layers,
                num_blocks=num_blocks,
                num_kv_heads=config.num_kv_heads,
                block_size=block_size,
                head_size=config.head_size,
                dtype=_values(getattr(torch, self._info.dtype)),
                device=self._device,
            )

    def execute(self, batch: Batch) -> Executed:
        model, pool = self._loaded(), self._pool
        if pool is None:
            raise InternalError("execute was called before allocate")
        watch = Stopwatch(time.perf_counter)
        before = model.times()
        seqs = [segment.seq for segment in batch.segments if segment.sample]
        with translated(f"a batch of {batch.num_tokens} tokens"), torch.inference_mode():
            layout = lay_out(batch, pool.block_size)
            layout_s = watch.lap()
            logits = model.logits(layout, pool)
            model_s, behind = watch.lap(), model.times()
            sampled = self._sampler.sample(logits, seqs) if seqs else ()
        sampling_s, after = watch.lap(), model.times()
        if before is None or behind is None or after is None:
            return Executed(sampled, ExecuteTimes(layout_s, device_s=model_s + sampling_s))
        # Logits may be computed as they are asked for, by the sampler.
        layout_s += model_s - sum(behind.since(before))
        sampling_s -= sum(after.since(behind))
        return Executed(sampled, ExecuteTimes(layout_s, *after.since(before), sampling_s))

    def read_kv(self, blocks: Seq[int]) -> list[np.ndarray]:
        """One array of bytes a layer: (*, blocks, bytes of a block)."""
        chosen = torch.tensor(blocks, dtype=torch.long, device=self._device)
        return [
            piece.index_select(1, chosen).cpu().contiguous().view(torch.uint8).numpy()
            for piece in self._pieces()
        ]

    def write_kv(self, blocks: Seq[int], data: list[np.ndarray], *, skip: int = 0) -> None:
        chosen = torch.tensor(blocks, dtype=torch.long, device=self._device)
        for piece, layer in zip(self._pieces(), data, strict=True):
            values = torch.from_numpy(layer[:, skip : skip + len(blocks)]).contiguous()
            values = values.view(piece.dtype)
            if values.shape[::2] != piece.shape[::2] or values.shape[1] != len(blocks):
                raise BackendError(
                    f"keys and values of shape {tuple(values.shape)} do not fit into {len(blocks)} "
                    f"blocks of {tuple(piece.shape)}: they are of another model"
                )
            piece.index_copy_(1, chosen, values.to(self._device))

    def _pieces(self) -> list[torch.Tensor]:
        """KV memory layer by layer: (*, blocks, values of a block)."""
        if self._pool is None:
            raise InternalError("KV memory was asked for before allocate")
        return [
            memory.view(self._loaded().kv_divisions, self._pool.num_blocks, -1)
            for memory in self._pool.memory
        ]

    def forget(self, seq_id: SeqId) -> None:
        self._sampler.forget(seq_id)

    def close(self) -> None:
        self._model = None
        self._pool = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _loaded(self) -> Model:
        if self._model is None:
            raise InternalError("the backend is closed")
        return self._model


def scratch_bytes(config: ModelConfig, itemsize: int) -> int:
    """Upper estimate of scratch memory whatever the batch: the history of one chunk's sequence as
    it is gathered, and its mask; or one bucket of single-token segments.
    """
    position_bytes = 2 * config.num_kv_heads * config.head_size * itemsize
    chunk = config.max_model_len * (2 * position_bytes + QUERY_TILE * (2 + itemsize))
    bucket_positions = max(MAX_BUCKET_POSITIONS, config.max_model_len)
    return max(chunk, bucket_positions * (2 * position_bytes + 24))


def _values(dtype: torch.dtype) -> torch.dtype:
    """The number format of keys, values and what flows between layers."""
    return torch.bfloat16 if dtype == torch.int8 else dtype


def _describe(
    files: ModelFiles,
    model: Model,
    num_parameters: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelInfo:
    config = model.config
    size = _values(dtype).itemsize
    eos_token_ids = frozenset(i for i in files.eos_token_ids if i < config.vocab_size)
    if not eos_token_ids:
        _log.warning(
            "%s names no end-of-sequence token: completions end at max_tokens or a stop string",
            files.name,
        )
    return ModelInfo(
        name=files.name,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=eos_token_ids,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_size * size,
        activation_bytes_per_token=model.activation_bytes_per_token,
        scratch_bytes=scratch_bytes(config, size),
        logits_bytes_per_seq=(size + 3 * 4) * config.vocab_size,
        num_parameters=num_parameters,
    )
