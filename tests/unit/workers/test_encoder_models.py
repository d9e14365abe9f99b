"""Hidden states and probabilities of every encoder family against transformers, packed anyhow."""

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

from tests.unit.workers.tiny_encoders import ENCODERS, VOCAB_SIZE, make_tiny_encoder
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import Encoder, PackedTexts
from workers.errors import InternalError, ModelError
from workers.loading.files import resolve_model
from workers.loading.folder import OWN_ARCHITECTURES
from workers.models.encoders import CLASSIFIER, ENCODER_FAMILIES, SUFFIXES
from workers.models.registry import FAMILIES

TOLERANCE = 2e-5
LENGTHS = (7, 60, 1, 23, 23, 2, 41, 7, 100)


def make_texts(*lengths: int, seed: int = 0, lowest: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(lowest, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    @cache
    def make(name: str, kind: str = "Model", **changes) -> Path:
        return make_tiny_encoder(name, tmp_path_factory.mktemp(name), kind=kind, **changes)

    return make


def load(folder: Path, *, task: str = "embed", dtype: str = "float32") -> TorchEncoder:
    return TorchEncoder.load(resolve_model(str(folder)), task=task, device="cpu", dtype=dtype)


def mean_states(folder: Path, texts: list[list[int]]) -> np.ndarray:
    """What a plain transformer embeds to: the mean of its last hidden states."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0) for ids in texts]
    return torch.stack(states).numpy()


def labels_of(folder: Path, texts: list[list[int]]) -> torch.Tensor:
    """Logits by transformers, eager attention."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    )
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids])).logits for ids in texts])


def cosine_distance(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return float((1 - (got * want).sum(axis=1) / lengths).max())


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_are_those_of_transformers(name, tiny_folder) -> None:
    texts = make_texts(*LENGTHS)
    got = load(tiny_folder(name)).execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, mean_states(tiny_folder(name), texts), atol=TOLERANCE)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_vector_does_not_depend_on_the_batch(name, tiny_folder) -> None:
    texts = make_texts(*LENGTHS, seed=1)
    backend = load(tiny_folder(name))
    alone = np.concatenate([backend.execute(PackedTexts.from_lists([ids])) for ids in texts])
    for order in ((8, 3, 1, 0, 5, 2, 4, 7, 6), (2, 0), (4, 3), (6, 6, 6)):
        together = backend.execute(PackedTexts.from_lists([texts[index] for index in order]))
        np.testing.assert_allclose(together, alone[list(order)], atol=5e-6)
    for most in (1, 64, 1000):
        encoded = Encoder(backend, max_batch_tokens=most, clock=lambda: 0.0).encode(
            PackedTexts.from_lists(texts)
        )
        np.testing.assert_allclose(encoded.vectors, alone, atol=5e-6)


@pytest.mark.parametrize("name", ENCODERS)
def test_bfloat16_is_close(name, tiny_folder) -> None:
    texts = make_texts(*LENGTHS, seed=2)
    got = load(tiny_folder(name), dtype="bfloat16").execute(PackedTexts.from_lists(texts))
    assert got.dtype == np.float32
    assert cosine_distance(got, mean_states(tiny_folder(name), texts)) < 2e-4


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("num_labels", [2, 5])
def test_probabilities_are_those_of_transformers(name, num_labels, tiny_folder) -> None:
    folder = tiny_folder(name, "ForSequenceClassification", num_labels=num_labels)
    texts = make_texts(*LENGTHS, seed=3)
    backend = load(folder, task="classify")
    assert backend.info.labels == tuple(f"LABEL_{index}" for index in range(num_labels))
    got = backend.execute(PackedTexts.from_lists(texts))
    want = labels_of(folder, texts).softmax(dim=1)
    np.testing.assert_allclose(got, want.numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", ["multi_label_classification", "one label"])
def test_labels_that_do_not_exclude_each_other(kind, tiny_folder) -> None:
    changes = {"num_labels": 1} if kind == "one label" else {"num_labels": 3, "problem_type": kind}
    folder = tiny_folder("bert", "ForSequenceClassification", **changes)
    texts = make_texts(5, 9)
    got = load(folder, task="classify").execute(PackedTexts.from_lists(texts))
    want = labels_of(folder, texts).sigmoid()
    np.testing.assert_allclose(got, want.numpy(), atol=TOLERANCE)


def test_names_of_labels_come_from_the_config(tiny_folder) -> None:
    names = {0: "bad", 1: "so-so", 2: "good"}
    folder = tiny_folder("roberta", "ForSequenceClassification", num_labels=3)
    rewrite(folder / "config.json", id2label=names)
    assert load(folder, task="classify").info.labels == ("bad", "so-so", "good")


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_regression_is_refused(tmp_path) -> None:
    folder = make_tiny_encoder(
        "bert",
        tmp_path,
        kind="ForSequenceClassification",
        num_labels=1,
        problem_type="regression",
    )
    with pytest.raises(ModelError, match=r"regression.*give a model with"):
        load(folder, task="classify")


@pytest.mark.parametrize("id2label", [{"1": "x"}, {"0": 3}, [], {"a": "b"}])
def test_damaged_labels_are_refused(id2label, tmp_path) -> None:
    folder = make_tiny_encoder("bert", tmp_path, kind="ForSequenceClassification")
    rewrite(folder / "config.json", id2label=id2label)
    with pytest.raises(ModelError, match="id2label"):
        load(folder, task="classify")


def test_tasks_that_an_encoder_cannot_serve(tiny_folder) -> None:
    with pytest.raises(ModelError, match="no log-likelihoods"):
        load(tiny_folder("bert"), task="score")
    with pytest.raises(ModelError, match="no classification head"):
        load(tiny_folder("bert"), task="classify")
    with pytest.raises(ModelError, match="int8"):
        load(tiny_folder("bert"), dtype="int8")


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForSequenceClassification"])
def test_a_model_with_another_head_embeds_as_without(name, kind, tiny_folder) -> None:
    folder = tiny_folder(name, kind)
    texts = make_texts(12, 30)
    got = load(folder).execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, mean_states(folder, texts), atol=TOLERANCE)


def test_old_names_of_norms_are_known(tmp_path) -> None:
    folder = make_tiny_encoder("bert", tmp_path, kind="ForMaskedLM")
    texts = make_texts(12, 30)
    want = mean_states(folder, texts)
    path = folder / "model.safetensors"
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(old, path)
    got = load(folder).execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta"])
def test_a_padding_token_inside_a_text_is_not_counted(name, tiny_folder) -> None:
    """Its place is that of padding, and the tokens behind it move up."""
    texts = make_texts(9, 9, 14)
    for ids in texts[1:]:
        ids[3] = ids[5] = 1
    got = load(tiny_folder(name)).execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, mean_states(tiny_folder(name), texts), atol=TOLERANCE)


def test_the_longest_text(tiny_folder) -> None:
    """The tokenizer allows 100 tokens; RoBERTa has positions behind the padding's only."""
    assert load(tiny_folder("bert")).info.max_len == 100
    folder = tiny_folder("roberta", seed=7)
    rewrite(folder / "tokenizer_config.json", model_max_length=10**30)
    backend = load(folder)
    assert backend.info.max_len == 126
    texts = make_texts(126)
    got = backend.execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, mean_states(folder, texts), atol=TOLERANCE)
    with pytest.raises(InternalError, match="1 to 126"):
        backend.execute(PackedTexts.from_lists(make_texts(127)))


def test_ids_beyond_the_vocabulary_are_refused(tiny_folder) -> None:
    backend = load(tiny_folder("bert"))
    with pytest.raises(ModelError, match="belong together"):
        backend.execute(PackedTexts.from_lists([[5, VOCAB_SIZE]]))


def test_windows_longer_than_a_tile_of_queries(tmp_path) -> None:
    folder = make_tiny_encoder(
        "modernbert", tmp_path, max_position_embeddings=2048, local_attention=128
    )
    rewrite(folder / "tokenizer_config.json", model_max_length=2048)
    texts = make_texts(700, 300, 129)
    got = load(folder).execute(PackedTexts.from_lists(texts))
    np.testing.assert_allclose(got, mean_states(folder, texts), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "mish"}, "mish"),
        ({"hidden_size": 50}, "no multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"intermediate_size": 81}, "has shape"),
        ({"num_hidden_layers": 4}, "lack tensor"),
        ({"num_hidden_layers": 2}, "has not"),
        ({"architectures": ["T5EncoderModel"]}, "families"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_configs_that_are_refused(changes, fault, tmp_path) -> None:
    folder = make_tiny_encoder("bert", tmp_path)
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=fault):
        load(folder)


def test_a_window_of_a_modernbert_and_its_layers_are_checked(tmp_path) -> None:
    folder = make_tiny_encoder("modernbert", tmp_path)
    rewrite(folder / "config.json", layer_types=["full_attention"])
    with pytest.raises(ModelError, match="layer_types"):
        load(folder)


def test_models_that_we_run_need_no_remote_code() -> None:
    """The list that is read without torch is that of the tables."""
    ours = {stem + suffix for stem in ENCODER_FAMILIES for suffix in SUFFIXES}
    for name in FAMILIES:
        stem = name.removesuffix("ForCausalLM")
        ours |= {name, stem + "Model", stem + CLASSIFIER}
    assert ours == OWN_ARCHITECTURES


def test_what_the_info_says(tiny_folder) -> None:
    info = load(tiny_folder("bert")).info
    assert (info.task, info.width, info.vocab_size, info.dtype) == (
        "embed",
        48,
        VOCAB_SIZE,
        "float32",
    )
    assert info.num_parameters == 3 * (4 * 48 * 48 + 2 * 48 * 80)
    path = tiny_folder("bert") / "model.safetensors"
    pooler = sum(t.nbytes for name, t in load_file(path).items() if name.startswith("pooler"))
    stored = sum(tensor.nbytes for tensor in load_file(path).values())
    assert info.weights_bytes == stored - pooler
