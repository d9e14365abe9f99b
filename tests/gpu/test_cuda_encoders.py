"""Encoders on a GPU: the same vectors as on the CPU, and out of memory that is survived."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.workers.tiny_encoders import ENCODERS, VOCAB_SIZE, make_tiny_encoder
from tests.unit.workers.tiny_models import FAMILIES, make_tiny_model
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import Encoder, EncodeTask, PackedTexts
from workers.errors import DeviceOutOfMemory
from workers.loading.files import resolve_model
from workers.models.device import DeviceName, DtypeName

pytestmark = pytest.mark.gpu


def make_texts(count: int) -> PackedTexts:
    rng = random.Random(count)
    return PackedTexts.from_lists(
        [[rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(2, 90))] for _ in range(count)]
    )


def encode(
    folder: Path, texts: PackedTexts, task: EncodeTask, device: DeviceName, dtype: DtypeName
) -> np.ndarray:
    backend = TorchEncoder.load(resolve_model(str(folder)), task=task, device=device, dtype=dtype)
    encoded = Encoder(backend, max_batch_tokens=1000, clock=lambda: 0.0).encode(texts)
    assert encoded.done.all() and not encoded.faults
    return encoded.vectors


def cosine_distance(got: np.ndarray, want: np.ndarray) -> float:
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return float((1 - (got.astype(np.float64) * want).sum(axis=1) / lengths).max())


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_those_of_the_cpu(name, tmp_path: Path) -> None:
    folder, texts = make_tiny_encoder(name, tmp_path), make_texts(60)
    want = encode(folder, texts, "embed", "cpu", "float32")
    got = encode(folder, texts, "embed", "cuda", "float32")
    np.testing.assert_allclose(got, want, atol=1e-4)
    for dtype in ("bfloat16", "float16"):
        assert cosine_distance(encode(folder, texts, "embed", "cuda", dtype), want) < 1e-3


@pytest.mark.parametrize("name", ENCODERS)
def test_probabilities_are_those_of_the_cpu(name, tmp_path: Path) -> None:
    folder = make_tiny_encoder(name, tmp_path, kind="ForSequenceClassification", num_labels=3)
    texts = make_texts(60)
    want = encode(folder, texts, "classify", "cpu", "float32")
    got = encode(folder, texts, "classify", "cuda", "float32")
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["embed", "score"])
def test_decoders_read_as_on_the_cpu(family, task, tmp_path: Path) -> None:
    folder, texts = make_tiny_model(family, tmp_path), make_texts(60)
    want = encode(folder, texts, task, "cpu", "float32")
    got = encode(folder, texts, task, "cuda", "float32")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_out_of_memory_halves_the_micro_batch(tmp_path: Path) -> None:
    folder = make_tiny_encoder("bert", tmp_path)
    texts = make_texts(4000)
    backend = TorchEncoder.load(
        resolve_model(str(folder)), task="embed", device="cuda", dtype="float32"
    )
    total = torch.cuda.get_device_properties(0).total_memory
    want = Encoder(backend, max_batch_tokens=2000, clock=lambda: 0.0).encode(texts).vectors
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.memory_reserved() + (60 << 20)
    torch.cuda.set_per_process_memory_fraction(free_bytes / total)
    try:
        with pytest.raises(DeviceOutOfMemory):
            backend.execute(texts)
        runner = Encoder(backend, max_batch_tokens=10**6, clock=lambda: 0.0)
        got = runner.encode(texts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert got.done.all() and not got.faults
    assert runner.limit_tokens < texts.num_tokens
    np.testing.assert_allclose(got.vectors, want, atol=1e-4)
