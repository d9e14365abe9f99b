"""Decoders that read texts: embeddings and log-likelihoods against transformers."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.workers.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import Encoder, PackedTexts
from workers.errors import ModelError
from workers.kernels import decoder as kernel
from workers.loading.files import resolve_model
from workers.models import heads
from workers.models.causal import NativeCausal, lay_out_texts, shared_prefixes
from workers.models.heads import ScoreOutput, scored_tokens

LENGTHS = (7, 60, 1, 23, 23, 2, 41, 16, 100, 17)
needs_kernel = pytest.mark.skipif(not kernel.is_available(), reason="no native decoder here")


def make_texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    @cache
    def make(family: str) -> Path:
        return make_tiny_model(family, tmp_path_factory.mktemp(family))

    return make


@pytest.fixture(scope="module")
def reference(tiny_folder):
    """Last hidden states (L, D) and log-likelihoods (L - 1) of a text by transformers."""

    @cache
    def model(family: str):
        return transformers.AutoModelForCausalLM.from_pretrained(
            tiny_folder(family), attn_implementation="eager", dtype=torch.float32
        )

    def states(family: str, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            out = model(family)(torch.tensor([ids]), output_hidden_states=True)
        log_probs = out.logits[0, :-1].double().log_softmax(dim=1)
        wanted = log_probs.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
        return out.hidden_states[-1][0].numpy(), wanted.numpy()

    return states


def load(folder: Path, *, task: str, dtype: str = "float32") -> TorchEncoder:
    return TorchEncoder.load(resolve_model(str(folder)), task=task, device="cpu", dtype=dtype)


def cosine_distance(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return float((1 - (got * want).sum(axis=1) / lengths).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_token_is_the_embedding_of_a_plain_decoder(family, tiny_folder, reference) -> None:
    texts = make_texts(*LENGTHS)
    backend = load(tiny_folder(family), task="embed")
    got = backend.execute(PackedTexts.from_lists(texts))
    want = np.stack([reference(family, ids)[0][-1] for ids in texts])
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert backend.info.width == 144


@pytest.mark.parametrize("family", FAMILIES)
def test_log_likelihoods_are_those_of_transformers(family, tiny_folder, reference) -> None:
    texts = make_texts(*LENGTHS)
    got = load(tiny_folder(family), task="score").execute(PackedTexts.from_lists(texts))
    want = [reference(family, ids)[1].sum() for ids in texts]
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-5, atol=1e-4)
    assert got[2, 0] == 0  # a single token has nothing before it


def test_only_what_follows_a_prompt_is_scored(tiny_folder, reference) -> None:
    texts = make_texts(*LENGTHS, seed=1)
    first = [0, 10, 5, 1, 22, 2, 40, 3, 99, 100]
    packed = PackedTexts.from_lists(texts, first=first)
    backend = load(tiny_folder("llama"), task="score")
    want = [
        reference("llama", ids)[1][max(start, 1) - 1 :].sum()
        for ids, start in zip(texts, first, strict=True)
    ]
    np.testing.assert_allclose(backend.execute(packed)[:, 0], want, rtol=1e-5, atol=1e-4)
    encoded = Encoder(backend, max_batch_tokens=50, clock=lambda: 0.0).encode(packed)
    np.testing.assert_allclose(encoded.vectors[:, 0], want, rtol=1e-5, atol=1e-4)
    assert packed.num_scored_N.tolist() == [6, 50, 0, 22, 1, 0, 1, 13, 1, 0]


def test_scored_tokens_by_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randrange(6) for _ in range(rng.randrange(1, 8))]
        first = [rng.randrange(7) for _ in lengths] if rng.random() < 0.7 else None
        texts = PackedTexts.from_lists([[5] * length for length in lengths], first=first)
        want, begin = [], 0
        for index, length in enumerate(lengths):
            start = max(1, first[index] if first else 0)
            want += [begin + position for position in range(start, length)]
            begin += length
        assert scored_tokens(texts).tolist() == want


def test_logits_are_never_all_there(tiny_folder, monkeypatch) -> None:
    texts = PackedTexts.from_lists(make_texts(*LENGTHS))
    backend = load(tiny_folder("llama"), task="score")
    want = backend.execute(texts)
    seen: list[int] = []
    model = backend._output._model
    logits = model.logits
    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", 10 * VOCAB_SIZE)
    monkeypatch.setattr(model, "logits", lambda x: (seen.append(len(x)), logits(x))[1])
    np.testing.assert_allclose(backend.execute(texts), want, rtol=1e-6)
    assert max(seen) == 10 and sum(seen) == texts.num_scored_N.sum()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_is_close(family, native, tiny_folder, reference, monkeypatch) -> None:
    if native and not kernel.is_available():
        pytest.skip("no native decoder here")
    monkeypatch.setattr("workers.models.native.supports", lambda *_, **__: native)
    texts = make_texts(*LENGTHS, seed=2)
    packed = PackedTexts.from_lists(texts)
    embedded = load(tiny_folder(family), task="embed", dtype="bfloat16").execute(packed)
    scorer = load(tiny_folder(family), task="score", dtype="bfloat16")
    assert isinstance(scorer._output._model, NativeCausal) == native
    scores = scorer.execute(packed)
    want = [reference(family, ids) for ids in texts]
    assert cosine_distance(embedded, np.stack([states[-1] for states, _ in want])) < 1e-2
    sums = np.array([logs.sum() for _, logs in want])
    np.testing.assert_allclose(scores[:, 0], sums, rtol=0.02, atol=1)


@needs_kernel
@pytest.mark.parametrize("task", ["embed", "score"])
def test_native_results_do_not_depend_on_the_batch(task, tiny_folder) -> None:
    """Bit by bit, and over memory that other texts have used."""
    texts = make_texts(*LENGTHS, seed=3)
    backend = load(tiny_folder("mistral"), task=task, dtype="bfloat16")
    assert isinstance(backend._output._model, NativeCausal)
    together = backend.execute(PackedTexts.from_lists(texts))
    alone = [backend.execute(PackedTexts.from_lists([ids])) for ids in texts]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    again = backend.execute(PackedTexts.from_lists(texts[::-1]))
    np.testing.assert_array_equal(again[::-1], together)


def make_choices(num_prompts: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Texts of prompts and choices, and where the choices begin."""
    rng = random.Random(seed)
    texts, first = list[list[int]](), list[int]()
    for _ in range(num_prompts):
        (prompt,) = make_texts(rng.randrange(1, 80), seed=rng.randrange(10**6))
        for _ in range(rng.randrange(1, 5)):
            (choice,) = make_texts(rng.randrange(1, 20), seed=rng.randrange(10**6))
            texts.append(prompt + choice)
            first.append(len(prompt))
    return texts, first


@needs_kernel
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_prompt_is_computed_once_for_all_its_choices(family, tiny_folder, reference) -> None:
    """And the numbers are, to the bit, those of each text alone."""
    texts, first = make_choices(12)
    backend = load(tiny_folder(family), task="score", dtype="bfloat16")
    packed = PackedTexts.from_lists(texts, first=first)
    layout = lay_out_texts(packed, scored_tokens(packed) - 1, 16)
    assert layout.num_tokens < 0.7 * packed.num_tokens
    together = backend.execute(packed)
    alone = [
        backend.execute(PackedTexts.from_lists([ids], first=[start]))
        for ids, start in zip(texts, first, strict=True)
    ]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    encoded = Encoder(backend, max_batch_tokens=256, clock=lambda: 0.0).encode(packed)
    np.testing.assert_array_equal(encoded.vectors, together)
    want = [
        reference(family, ids)[1][start - 1 :].sum()
        for ids, start in zip(texts, first, strict=True)
    ]
    np.testing.assert_allclose(together[:, 0], want, rtol=0.03, atol=1)


def test_shared_prefixes_by_brute_force() -> None:
    """Small blocks and few different tokens, so that much is shared and much differs."""
    rng = random.Random(0)
    num_shared = 0
    for _ in range(300):
        lists = [[rng.randrange(2) for _ in range(rng.randrange(1, 9))] for _ in range(5)]
        first = [rng.randrange(1, 9) for _ in lists]
        texts = PackedTexts.from_lists(lists, first=first)
        rows_S = scored_tokens(texts) - 1
        shared_N, leader_N = shared_prefixes(texts, rows_S, 2)
        leader = 0
        for index, ids in enumerate(lists):
            wanted = [row - texts.begins_N[index] for row in rows_S.tolist()]
            wanted = [row for row in wanted if 0 <= row < len(ids)]
            most = min([len(ids) - 1, *wanted])
            same = [a == b for a, b in zip(ids, lists[leader], strict=False)]
            common = same.index(False) if False in same else len(same)
            want = min(common, most) // 2 * 2 if index else 0
            assert shared_N[index] == want
            leader = leader if want else index
            assert leader_N[index] == leader
            num_shared += want
    assert num_shared > 300


@needs_kernel
def test_int8_scores(tiny_folder, reference) -> None:
    texts = make_texts(40, 60)
    got = load(tiny_folder("llama"), task="score", dtype="int8").execute(
        PackedTexts.from_lists(texts)
    )
    want = [reference("llama", ids)[1].sum() for ids in texts]
    np.testing.assert_allclose(got[:, 0], want, rtol=0.05)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_bare_decoder_without_prefix_and_head(tmp_path, reference, tiny_folder) -> None:
    """As embedding models are often stored: `layers.0...` of a `Qwen3Model`. Pooled by the mean, as
    it is no language model by name.
    """
    folder = make_tiny_model("qwen3", tmp_path)
    path = folder / "model.safetensors"
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if not name.startswith("lm_head")
    }
    save_file(bare, path)
    rewrite(folder / "config.json", architectures=["Qwen3Model"], tie_word_embeddings=False)
    texts = make_texts(9, 30)
    got = load(folder, task="embed").execute(PackedTexts.from_lists(texts))
    want = np.stack([reference("qwen3", ids)[0].mean(axis=0) for ids in texts])
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_head_of_its_own_takes_no_memory_for_embeddings(tiny_folder) -> None:
    embed = load(tiny_folder("llama"), task="embed").info.weights_bytes
    score = load(tiny_folder("llama"), task="score").info.weights_bytes
    assert score - embed == VOCAB_SIZE * 144 * 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoders_that_classify(family, tmp_path) -> None:
    classes = transformers.AutoModelForSequenceClassification
    folder = make_tiny_model(family, tmp_path)
    model = classes.from_pretrained(folder, num_labels=3, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    texts = make_texts(9, 30, 1, 17)
    backend = load(folder, task="classify")
    assert backend.info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    with torch.inference_mode():
        want = torch.cat([model(torch.tensor([ids])).logits for ids in texts]).softmax(dim=1)
    got = backend.execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, want.numpy(), atol=1e-4)
    assert load(folder, task="embed").info.width == 144


def test_what_is_refused(tmp_path, tiny_folder) -> None:
    with pytest.raises(ModelError, match="choices, which a language model scores"):
        load(tiny_folder("llama"), task="classify")
    folder = make_tiny_model("qwen2", tmp_path)
    rewrite(folder / "config.json", is_causal=False)
    with pytest.raises(ModelError, match="comes after a token"):
        load(folder, task="embed")


def test_scores_are_of_an_output_of_width_one(tiny_folder) -> None:
    backend = load(tiny_folder("llama"), task="score")
    assert backend.info.width == 1 and isinstance(backend._output, ScoreOutput)
