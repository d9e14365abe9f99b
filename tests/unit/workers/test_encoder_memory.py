"""Scratch memory of encoders stays below what their info says, and is what sizes micro-batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from schedulers.memory import NotEnoughMemory
from tests.unit.workers.test_torch_backend import peak_bytes
from tests.unit.workers.tiny_encoders import VOCAB_SIZE, make_tiny_encoder
from tests.unit.workers.tiny_models import make_tiny_model
from workers.backends.fake_encoder import FakeEncoder
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import EncodeTask, PackedTexts
from workers.loading.files import resolve_model
from workers.models import heads
from workers.models.device import DtypeName
from workers.setup import EngineOptions, size_encoder

WIDE = {"hidden_size": 96, "intermediate_size": 192}


def make_texts(*lengths: int) -> PackedTexts:
    rng = random.Random(0)
    return PackedTexts.from_lists(
        [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    )


def check_bound(folder: Path, task: EncodeTask, dtype: DtypeName) -> None:
    backend = TorchEncoder.load(resolve_model(str(folder)), task=task, device="cpu", dtype=dtype)
    info, texts = backend.info, make_texts(*[90] * 10, *[33] * 20, *range(2, 32))
    backend.execute(make_texts(2))
    peak = peak_bytes(lambda: backend.execute(texts))
    bound = texts.num_tokens * info.activation_bytes_per_token + info.scratch_bytes
    assert peak <= bound
    assert peak >= texts.num_tokens * info.activation_bytes_per_token / 8, "far too high"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_encoders(name, dtype, tmp_path) -> None:
    check_bound(make_tiny_encoder(name, tmp_path, **WIDE), "embed", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("task", ["embed", "score"])
def test_decoders_in_torch(task, dtype, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("workers.models.native.supports", lambda *_, **__: False)
    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", 1 << 15)
    check_bound(make_tiny_model("mistral", tmp_path), task, dtype)


def test_micro_batches_are_sized_by_memory() -> None:
    info = FakeEncoder(8).info
    assert size_encoder(info, EngineOptions(max_batch_tokens=777)) == 777
    assert size_encoder(info, EngineOptions(memory_bytes=1 << 30)) == 4096
    from dataclasses import replace

    large = replace(info, weights_bytes=1 << 29, activation_bytes_per_token=1 << 19, max_len=512)
    assert size_encoder(large, EngineOptions(memory_bytes=1 << 30)) == 1024
    assert size_encoder(large, EngineOptions(memory_bytes=1 << 30, max_batch_tokens=600)) == 600
    with pytest.raises(NotEnoughMemory, match=r"0\.70 GiB is too little.*512 tokens"):
        size_encoder(large, EngineOptions(memory_bytes=int(0.7 * 2**30)))
