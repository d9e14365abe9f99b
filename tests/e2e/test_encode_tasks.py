"""The tasks embed, classify and score on real architectures, as jobs, against the libraries that
define them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flows.errors import SpecError
from flows.runner import run_job
from flows.spec import JobSpec
from tests.e2e.cases import write_table
from workers.errors import ModelError
from workers.loading.files import resolve_model

pytestmark = pytest.mark.e2e
FLOAT32 = {"dtype": "float32"}


@pytest.fixture
def source(tmp_path, sample_texts) -> str:
    texts = [text[: 20 + 37 * (n % 29)] for n, text in enumerate(sample_texts[:80])]
    keys = [f"key {n % 7}" for n in range(len(texts))]
    return write_table(
        tmp_path / "in.parquet", id=[f"r{n:03d}" for n in range(len(texts))], key=keys, text=texts
    )


def run(folder: Path, source: str, **fields: Any) -> list[dict[str, Any]]:
    """The job's rows, in the order of their ids."""
    defaults: dict[str, Any] = {
        "input": source, "prompt": {"column": "text"}, "id_column": "id", "engine": FLOAT32,
        "output": str(folder / "out"),
    }  # fmt: skip
    spec = JobSpec.model_validate({**defaults, **fields})
    summary = run_job(spec)
    assert summary.complete
    files = Path(spec.output).glob("results/**/*.parquet")
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted(rows, key=lambda row: row["row_id"])


def texts_of(source: str) -> list[str]:
    return pq.read_table(source)["text"].to_pylist()


@pytest.mark.parametrize("workers", [None, 2])
def test_embeddings_are_those_of_sentence_transformers(tmp_path, source, workers) -> None:
    from sentence_transformers import SentenceTransformer

    rows = run(
        tmp_path, source, task="embed", partition_by=["key"], engine={**FLOAT32, "workers": workers}
    )
    folder = resolve_model("minilm").folder
    wanted = SentenceTransformer(str(folder), device="cpu").encode(texts_of(source))
    got = np.array([row["embedding"] for row in rows])
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    assert (1 - (got * wanted).sum(axis=1) / norms).max() < 1e-5


def tiny_bert(folder: Path, kind: str, **config: Any) -> Path:
    """A random BERT with the tokenizer of MiniLM."""
    import torch
    import transformers

    torch.manual_seed(3)
    small = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=128, **config,
    )  # fmt: skip
    getattr(transformers, kind)(small).eval().save_pretrained(folder)
    minilm = resolve_model("minilm").folder
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (minilm / name).exists():
            shutil.copy(minilm / name, folder / name)
    return folder


def test_classes_are_those_of_transformers(tmp_path, source) -> None:
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    names = {0: "bad", 1: "fair", 2: "good"}
    folder = tiny_bert(tmp_path / "model", "BertForSequenceClassification", id2label=names)
    rows = run(tmp_path, source, task="classify", model=str(folder), on_too_long="truncate_right")
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, text in zip(rows, texts_of(source), strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=128)
        with torch.inference_mode():
            wanted = model(**inputs).logits.softmax(-1)[0].numpy()
        np.testing.assert_allclose(row["scores"], wanted, atol=1e-5)
        assert row["label"] == names[int(wanted.argmax())]
        assert row["score"] == pytest.approx(float(wanted.max()), abs=1e-5)
        assert row["truncated"] == (len(tokenizer(text)["input_ids"]) > 128)


def log_likelihood(model: Any, ids: list[int], first: int) -> float:
    """Of the tokens from `first` on."""
    import torch

    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(float(logprobs[n - 1, ids[n]]) for n in range(max(1, first), len(ids)))


def test_scores_are_log_likelihoods(tmp_path, source, tiny_model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = run(tmp_path, source, task="score", model=str(tiny_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row, text in zip(rows, texts_of(source), strict=True):
        ids = tokenizer(text)["input_ids"]
        wanted = log_likelihood(model, ids, 1)
        assert row["logprob"] == pytest.approx(wanted, rel=1e-4)
        assert row["num_scored_tokens"] == len(ids) - 1
        assert row["perplexity"] == pytest.approx(np.exp(-wanted / (len(ids) - 1)), rel=1e-4)


def test_a_language_model_chooses(tmp_path, source, tiny_model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    choices = ["a library", "a program", "documentation of some kind"]
    rows = run(
        tmp_path, source, task="classify", model=str(tiny_model), encode={"choices": choices},
        prompt="What is this? {{ text }}",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row, text in zip(rows[:20], texts_of(source), strict=False):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is this? {text}"}],
            tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sums = []
        for choice in choices:
            whole = tokenizer(prompt + choice, add_special_tokens=False)["input_ids"]
            assert whole[: len(before)] == before
            sums.append(log_likelihood(model, whole, len(before)))
        wanted = np.exp(np.array(sums) - max(sums))
        np.testing.assert_allclose(row["scores"], wanted / wanted.sum(), atol=1e-4)
        assert row["label"] == choices[int(np.argmax(sums))]


def test_a_decoder_embeds(tmp_path, source, tiny_model) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    rows = run(
        tmp_path, source, task="embed", model=str(tiny_model),
        encode={"pooling": "mean", "normalize": True},
    )  # fmt: skip
    model = AutoModel.from_pretrained(tiny_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row, text in zip(rows, texts_of(source), strict=True):
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        mean = hidden.mean(0)
        np.testing.assert_allclose(row["embedding"], mean / mean.norm(), atol=2e-4)


def test_what_does_not_go_together_is_told_before_weights(tmp_path, source, tiny_model) -> None:
    with pytest.raises(ModelError, match="classification head"):
        run(tmp_path, source, task="classify", model=str(resolve_model("minilm").folder))
    with pytest.raises(ModelError, match="no prompt 'query'"):
        run(tmp_path, source, task="embed", encode={"prompt_name": "query"})
    folder = tmp_path / "odd"
    shutil.copytree(resolve_model("minilm").folder, folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 9, "name": "9", "path": "", "type": "somewhere.Else"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"somewhere\.Else"):
        run(tmp_path, source, task="embed", model=str(folder))
    with pytest.raises((SpecError, ValueError), match="choices"):
        JobSpec.model_validate(
            {"input": source, "task": "embed", "prompt": "{{ text }}",
             "encode": {"choices": ["a", "b"]}}
        )  # fmt: skip
