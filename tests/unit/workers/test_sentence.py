"""Pooling, projections, normalisation and prompts as sentence-transformers has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.workers.tiny_encoders import make_tiny_encoder
from tests.unit.workers.tiny_models import SENTENCES, make_tiny_model
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import PackedTexts
from workers.errors import ModelError, UnsafeModelError
from workers.loading.files import resolve_model
from workers.loading.sentence import read_sentence_config
from workers.loading.tokenizer import Tokenizer

TEXTS = [*SENTENCES, "Water", "grain " * 150, " the mill ", ""]
MODULES = "sentence_transformers.models"


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """Files as sentence-transformers writes them, for a transformer, pooling and what follows."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.Transformer"}]
    for index, kind in enumerate(kinds, start=1):
        path = f"{index}_{kind}"
        name = f"{MODULES}.{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": name})
        (folder / path).mkdir(exist_ok=True)
    write(folder / "modules.json", modules)
    if "Pooling" in kinds:
        config = {"word_embedding_dimension": 48, **(pooling or {"pooling_mode_mean_tokens": True})}
        write(folder / f"{kinds.index('Pooling') + 1}_Pooling" / "config.json", config)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_encoder("bert", tmp_path / "model")


def embed(folder: Path, texts: list[str], prompt: str = "") -> np.ndarray:
    files = resolve_model(str(folder))
    config = read_sentence_config(files)
    tokenizer = Tokenizer.load(files, lower_case=config.lower_case)
    backend = TorchEncoder.load(files, task="embed", device="cpu", dtype="float32")
    packed = tokenizer.encode_packed([prompt + text for text in texts])
    packed = tokenizer.truncate(packed, backend.info.max_len).texts
    if prompt and not config.include_prompt:
        length = len(tokenizer.encode_batch([prompt], add_special_tokens=True)[0])
        first_N = np.full(len(texts), length - tokenizer.affixes.num_behind)
        packed = PackedTexts(packed.token_ids_T, packed.ends_N, first_N)
    return backend.execute(packed)


def reference(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return model.encode(texts, show_progress_bar=False, **options)


POOLINGS: dict[str, dict[str, Any]] = {
    "mean": {"pooling_mode_mean_tokens": True},
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "max": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False},
    "sqrt": {"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_mean_tokens": False},
    "weighted": {"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False},
    "last": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
    "several": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
    "by name": {"pooling_mode": "weightedmean"},
    "by names": {"pooling_mode": ["max", "mean_sqrt_len_tokens", "cls"]},
    "none": {"pooling_mode_mean_tokens": False},
}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling(pooling, folder) -> None:
    write_modules(folder, "Pooling", pooling=POOLINGS[pooling])
    want = reference(folder, TEXTS)
    np.testing.assert_allclose(embed(folder, TEXTS), want, atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "sqrt", "weighted", "last"])
def test_a_prompt_that_is_not_pooled(pooling, folder) -> None:
    write_modules(folder, "Pooling", pooling=POOLINGS[pooling] | {"include_prompt": False})
    prompt = "What is it: "
    texts = TEXTS[:5]
    want = reference(folder, texts, prompt=prompt)
    assert not np.allclose(want, reference(folder, texts), atol=1e-2)
    np.testing.assert_allclose(embed(folder, texts, prompt), want, atol=2e-5)


@pytest.mark.parametrize("activation", ["Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "Identity"])
def test_projections_and_normalisation(activation, folder) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    write_modules(folder, "Pooling", "Dense", "Dense", "Normalize")
    torch.manual_seed(0)
    function = getattr(torch.nn, activation)()
    Dense(48, 20, activation_function=function).save(str(folder / "2_Dense"))
    Dense(20, 9, bias=False, activation_function=function).save(str(folder / "3_Dense"))
    want = reference(folder, TEXTS)
    assert want.shape == (len(TEXTS), 9)
    np.testing.assert_allclose(embed(folder, TEXTS), want, atol=1e-5)
    assert len(read_sentence_config(resolve_model(str(folder))).dense) == 2


def test_lower_case_and_the_longest_text(folder) -> None:
    """The tokenizer keeps capitals here, and texts are put in lower case before it."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"]["lowercase"] = False
    write(path, tokenizer)
    write_modules(folder, "Pooling")
    plain = reference(folder, TEXTS)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": True})
    want = reference(folder, TEXTS)
    assert not np.allclose(want, plain, atol=1e-2)
    np.testing.assert_allclose(embed(folder, TEXTS), want, atol=2e-5)
    config = read_sentence_config(resolve_model(str(folder)))
    assert config.max_seq_length == 12 and config.lower_case


def test_a_plain_transformer_is_pooled_by_the_mean(folder) -> None:
    config = read_sentence_config(resolve_model(str(folder)))
    assert (config.pooling, config.normalize, config.dense) == (("mean",), False, ())
    assert config.prompt() == ""
    np.testing.assert_allclose(embed(folder, TEXTS), reference(folder, TEXTS), atol=2e-5)


@pytest.mark.parametrize("modules", [None, "last", "mean", "weighted"])
@pytest.mark.parametrize("family", ["llama-plain", "mistral", "qwen3"])
def test_decoders_embed_as_in_sentence_transformers(family, modules, tmp_path) -> None:
    """As they are, by their last token; or as their files say. (Of a plain language model with a
    chat template, sentence-transformers makes each text a chat, which we leave to prompts.)
    """
    folder = make_tiny_model(family, tmp_path)
    (folder / "chat_template.jinja").unlink()
    if modules is not None:
        pooling = POOLINGS[modules] | {"word_embedding_dimension": 144}
        write_modules(folder, "Pooling", "Normalize", pooling=pooling)
        write(folder / "sentence_bert_config.json", {"max_seq_length": 70})
    texts = [text for text in TEXTS if text]
    want = reference(folder, texts)
    np.testing.assert_allclose(embed(folder, texts), want, atol=1e-4)


def test_prompts(folder) -> None:
    write_modules(folder, "Pooling", "Normalize")
    prompts = {"query": "query: ", "passage": "passage: "}
    settings = {"prompts": prompts, "default_prompt_name": "query"}
    write(folder / "config_sentence_transformers.json", settings)
    config = read_sentence_config(resolve_model(str(folder)))
    assert config.prompt() == "query: " and config.prompt("passage") == "passage: "
    with pytest.raises(ModelError, match=r"'title'.*passage, query"):
        config.prompt("title")
    want = reference(folder, TEXTS)
    np.testing.assert_allclose(embed(folder, TEXTS, config.prompt()), want, atol=1e-5)


def test_the_embedded_encoder_is_described() -> None:
    try:
        files = resolve_model("MiniLM")
    except ModelError as fault:
        pytest.skip(f"no embedded encoder: {fault}")
    config = read_sentence_config(files)
    assert config.pooling == ("mean",) and config.normalize
    assert config.max_seq_length == 256 and config.default_prompt is None


def test_the_fingerprint_knows_the_modules(folder) -> None:
    before = resolve_model(str(folder)).fingerprint
    write_modules(folder, "Pooling", pooling=POOLINGS["mean"])
    mean = resolve_model(str(folder)).fingerprint
    write_modules(folder, "Pooling", pooling=POOLINGS["cls"])
    assert len({before, mean, resolve_model(str(folder)).fingerprint}) == 3


def dense_config(**changes: Any) -> dict[str, Any]:
    activation = "torch.nn.modules.activation.Tanh"
    return {"in_features": 48, "out_features": 8, "activation_function": activation, **changes}


def broken(
    *kinds: str,
    pooling: dict[str, Any] | None = None,
    files: dict[str, object] | None = None,
    replace: tuple[str, str] = ("", ""),
) -> Callable[[Path], None]:
    """A change of a folder: modules, more files, something replaced in modules.json."""

    def change(folder: Path) -> None:
        write_modules(folder, *kinds, pooling=pooling)
        for name, value in (files or {}).items():
            write(folder / name, value)
        path = folder / "modules.json"
        path.write_text(path.read_text().replace(*replace) if replace[0] else path.read_text())

    return change


def dense(**changes: Any) -> Callable[[Path], None]:
    files = {"2_Dense/config.json": dense_config(**changes)}
    return broken("Pooling", "Dense", files=files)


BREAKAGES = {
    "WordWeights, which is not supported": broken("Pooling", "WordWeights"),
    "evil_package": broken("Pooling", replace=("sentence_transformers.", "evil_package.")),
    "no Pooling module": broken("Normalize"),
    "elsewhere than between": broken(
        "Pooling", "Normalize", "Dense", files={"3_Dense/config.json": dense_config()}
    ),
    "array is expected": broken("Pooling", files={"modules.json": {"a": 1}}),
    "names the folder": broken("Pooling", replace=("1_Pooling", "../1_Pooling")),
    "'median' is not supported": broken("Pooling", pooling={"pooling_mode": "median"}),
    "'os.system' is not supported": dense(activation_function="os.system"),
    "use_residual": dense(use_residual=True),
    "out_features is 0": dense(out_features=0),
    "is missing": dense(),
    "default_prompt_name is 'query'": broken(
        "Pooling", files={"config_sentence_transformers.json": {"default_prompt_name": "query"}}
    ),
    "max_seq_length is 'long'": broken(
        "Pooling", files={"sentence_bert_config.json": {"max_seq_length": "long"}}
    ),
    "transformer_task is 'fill-mask'": broken(
        "Pooling", files={"sentence_bert_config.json": {"transformer_task": "fill-mask"}}
    ),
}


@pytest.mark.parametrize("message", BREAKAGES)
def test_what_is_refused(message, folder) -> None:
    BREAKAGES[message](folder)
    with pytest.raises(ModelError, match=message):
        read_sentence_config(resolve_model(str(folder)))


def test_pickled_projections_are_refused(folder) -> None:
    write_modules(folder, "Pooling", "Dense")
    write(folder / "2_Dense" / "config.json", dense_config())
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsafeModelError, match="never loaded"):
        read_sentence_config(resolve_model(str(folder)))


def test_a_projection_of_another_width_is_refused(folder) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    write_modules(folder, "Pooling", "Dense")
    Dense(40, 20).save(str(folder / "2_Dense"))
    with pytest.raises(ModelError, match="in_features is 40"):
        embed(folder, TEXTS)
