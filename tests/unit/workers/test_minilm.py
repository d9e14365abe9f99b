"""The embedded encoder on real texts, against sentence-transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from workers import kernels
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import Encoder, PackedTexts
from workers.errors import ModelError
from workers.kernels import encoder
from workers.loading.files import ModelFiles, resolve_model
from workers.loading.tokenizer import Tokenizer
from workers.models.device import cpu_has

SAMPLE = Path(__file__).parents[3] / "flows" / "samples" / "debian_packages.parquet"
MAX_COSINE_DISTANCE = 1e-5


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve_model("minilm")
    except ModelError as fault:
        pytest.skip(f"no embedded encoder: {fault}")


def real_texts(count: int, seed: int = 0) -> Iterator[str]:
    """Stretches of package descriptions: mostly short, some longer than the model reads."""
    rng = random.Random(seed)
    descriptions = [text.split() for text in pq.read_table(SAMPLE)["description"].to_pylist()]
    for index in range(count):
        words = rng.choice(descriptions)
        length = min(len(words), round(rng.lognormvariate(2.2, 0.8)) + 1)
        if index % 100 == 0:
            words = length * 40 * words
            length = 300
        start = rng.randrange(len(words) - length + 1)
        yield " ".join(words[start : start + length])


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(real_texts(1000))


@pytest.fixture(scope="module")
def packed(files, texts) -> PackedTexts:
    tokenizer = Tokenizer.load(files)
    cut = tokenizer.truncate(tokenizer.encode_packed(texts), 256)
    assert cut.cut_N.sum() >= 10
    return cut.texts


@pytest.fixture(scope="module")
def wanted(files, texts) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(files.folder), device="cpu")
    return model.encode(texts, show_progress_bar=False)


def cosine_distances(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    got, want = got.astype(np.float64), want.astype(np.float64)
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return 1 - (got * want).sum(axis=1) / lengths


@pytest.mark.slow
def test_embeddings_are_those_of_sentence_transformers(files, packed, wanted) -> None:
    """On 1,000 real texts, in several compositions of batches."""
    backend = TorchEncoder.load(files, task="embed", device="cpu", dtype="float32")
    assert backend.info.max_len == 256 and backend.info.width == 384
    encoded = Encoder(backend, max_batch_tokens=4096, clock=lambda: 0.0).encode(packed)
    assert encoded.done.all() and not encoded.faults
    assert cosine_distances(encoded.vectors, wanted).max() < MAX_COSINE_DISTANCE
    some = np.random.default_rng(0).permutation(1000)[:200]
    for most in (1, 300):
        runner = Encoder(backend, max_batch_tokens=most, clock=lambda: 0.0)
        again = runner.encode(packed.take(some))
        assert cosine_distances(again.vectors, wanted[some]).max() < MAX_COSINE_DISTANCE
        np.testing.assert_allclose(again.vectors, encoded.vectors[some], atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not encoder.is_available() or cpu_has("amx_tile"),
    reason="no AVX-512 with VNNI, or no compiler, or matrix tiles, which are faster",
)
def test_the_native_encoder_is_nearly_exact(files, packed, wanted) -> None:
    backend = TorchEncoder.load(files, task="embed", device="cpu")
    assert backend.info.dtype == "int16"
    encoded = Encoder(backend, max_batch_tokens=4096, clock=lambda: 0.0).encode(packed)
    assert cosine_distances(encoded.vectors, wanted).max() < MAX_COSINE_DISTANCE / 20
    some = np.random.default_rng(0).permutation(1000)[:200]
    runner = Encoder(backend, max_batch_tokens=300, clock=lambda: 0.0)
    np.testing.assert_allclose(
        runner.encode(packed.take(some)).vectors, encoded.vectors[some], atol=1e-6
    )  # pooling and normalising are torch's


@pytest.mark.slow
def test_what_bfloat16_costs(files, packed, wanted, monkeypatch) -> None:
    """Rounding the weights alone moves some texts by 2e-5: what float32 is for."""
    kernels.load.cache_clear()
    monkeypatch.setenv("HEADRACE_KERNELS", "off")
    backend = TorchEncoder.load(files, task="embed", device="cpu", dtype="bfloat16")
    kernels.load.cache_clear()
    some = np.arange(0, 1000, 4)
    encoded = Encoder(backend, max_batch_tokens=4096, clock=lambda: 0.0).encode(packed.take(some))
    distances = cosine_distances(encoded.vectors, wanted[some])
    assert distances.mean() < 3e-5
    assert distances.max() < 2e-4


def test_minilm_tokenises_as_in_transformers(files, texts) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(files.folder)
    ours = Tokenizer.load(files)
    odd = ["", " ", "[SEP] [CLS]", "na\u00efve caf\u00e9", "\u4f60\u597d", "a" * 300, "\u00a0x\n"]
    for max_len in (16, 256):
        some = [*odd, *texts[:200]]
        got, cut_N = ours.truncate(ours.encode_packed(some), max_len)
        want = theirs(some, truncation=True, max_length=max_len)["input_ids"]
        assert [run.tolist() for run in np.split(got.token_ids_T, got.ends_N[:-1])] == want
        long = [len(ids) > max_len for ids in theirs(some)["input_ids"]]
        assert cut_N.tolist() == long
