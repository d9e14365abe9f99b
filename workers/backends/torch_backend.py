"""The backend of our own: torch on CPU, CUDA and MPS."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Literal

import torch

from schedulers.view import SeqId
from workers.attention import build_step
from workers.backends.base import Batch, ModelInfo
from workers.errors import BackendError, DeviceOutOfMemory, ModelError
from workers.kv import KVPool
from workers.loading.files import ModelFiles
from workers.models.config import ModelConfig
from workers.models.layers import CausalLM, ModelWeights
from workers.models.registry import read_config
from workers.models.weights import load_weights
from workers.request import Sampled
from workers.sampling import BatchSampler

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend:
    """Runs a model of ours. Made by `load`."""

    def __init__(self, model: CausalLM, info: ModelInfo) -> None:
        self.info = info
        self._model: CausalLM | None = model
        self._device = model.weights.embedding_VD.device
        self._pool: KVPool | None = None
        self._sampler = BatchSampler(model.config.vocab_size, info.eos_token_ids, self._device)

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
            files: the model.
            device: `auto` takes CUDA, else MPS, else the CPU.
            dtype: `auto` takes bfloat16 where the hardware computes with it, else float32 (CPU) or
                float16 (GPU).
            deterministic: a row's logits do not depend on what else is in its batch.

        Raises:
            ModelError: unsupported model, damaged weights, or a device or dtype that is not to be
                had.
            DeviceOutOfMemory: the weights do not fit.
        """
        config = read_config(files.config)
        chosen = choose_device(device)
        kind = choose_dtype(dtype, chosen)
        try:
            weights = load_weights(files.weight_files, config, dtype=kind, device=chosen)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(f"the weights of {files.name} do not fit: {error}") from error
        model = CausalLM(config, weights, deterministic=deterministic)
        return cls(model, _info(files, config, weights, kind, chosen))

    def allocate(self, *, num_blocks: int, block_size: int) -> None:
        model = self._open_model()
        config = model.config
        try:
            self._pool = KVPool(
                num_layers=config.num_layers,
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                dtype=model.weights.embedding_VD.dtype,
                device=self._device,
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise DeviceOutOfMemory(f"{num_blocks} KV blocks do not fit: {error}") from error

    def execute(self, batch: Batch) -> tuple[Sampled, ...]:
        model, pool = self._open_model(), self._pool
        if pool is None:
            raise BackendError("allocate was not called")
        try:
            with torch.inference_mode():
                step = build_step(batch, block_size=pool.block_size, device=self._device)
                logits_SV = model.forward(step, pool)
                sampling = [segment.seq for segment in batch.segments if segment.sample]
                return self._sampler.sample(logits_SV, sampling) if sampling else ()
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._after_out_of_memory()
            raise DeviceOutOfMemory(f"a batch of {batch.num_tokens} tokens: {error}") from error
        except RuntimeError as error:
            # torch's CPU allocator has no exception type of its own.
            if "DefaultCPUAllocator" in str(error):
                raise DeviceOutOfMemory(f"a batch of {batch.num_tokens} tokens: {error}") from error
            raise BackendError(f"a batch of {batch.num_tokens} tokens failed: {error}") from error

    def _after_out_of_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self, seq_id: SeqId) -> None:
        self._sampler.forget(seq_id)

    def close(self) -> None:
        self._model = None
        self._pool = None
        gc.collect()
        self._after_out_of_memory()

    def _open_model(self) -> CausalLM:
        if self._model is None:
            raise BackendError("the backend is closed")
        return self._model


def choose_device(name: DeviceName) -> torch.device:
    """The device that a name stands for.

    Raises:
        ModelError: this machine has none of that kind.
    """
    has = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in has.items() if there))
    if not has[name]:
        raise ModelError(
            f"device {name!r} was asked for, but this machine has none; use --device auto"
        )
    return torch.device(name)


def choose_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The dtype that a name stands for on a device.

    Raises:
        ModelError: float16 on a CPU, which computes it slowly and overflows.
    """
    if name == "float16" and device.type == "cpu":
        raise ModelError("float16 is not supported on a CPU; use bfloat16 or float32")
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices itself (AVX512-BF16 or AMX)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def _info(
    files: ModelFiles,
    config: ModelConfig,
    weights: ModelWeights,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelInfo:
    num_parameters = sum(tensor.numel() for tensor in _tensors(weights))
    item = dtype.itemsize
    # At the widest point of a layer: the residual, its norm, gate, up and their product, and q, k,
    # v with their rotated copies; doubled for what the libraries pack.
    widest = 3 * config.hidden_size + 4 * config.intermediate_size
    heads = 4 * (config.num_heads + 2 * config.num_kv_heads) * config.head_size
    return ModelInfo(
        name=files.name,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=files.eos_token_ids,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=num_parameters * item,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_size * item,
        activation_bytes_per_token=2 * (widest + heads) * item,
        logits_bytes_per_seq=config.vocab_size * (4 * 3 + item),
        num_parameters=num_parameters,
    )


def _tensors(weights: ModelWeights) -> list[torch.Tensor]:
    """Every weight once; a tied head is the embedding itself."""
    found = [weights.embedding_VD, weights.norm_D]
    if weights.head_VD is not weights.embedding_VD:
        found.append(weights.head_VD)
    for layer in weights.layers:
        found += [t for name in layer.__slots__ if (t := getattr(layer, name)) is not None]
    return found
