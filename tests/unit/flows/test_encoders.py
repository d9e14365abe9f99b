"""What a row of an encoding job gets is known from the model's small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.encoders import describe_vectors, sentence_config
from flows.model import Vectors
from flows.spec import JobSpec
from workers.errors import ModelError
from workers.loading.folder import ModelFiles

BERT = {"architectures": ["BertModel"], "hidden_size": 16}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16}


def files(folder: Path, config: dict[str, Any]) -> ModelFiles:
    return ModelFiles(
        name="m", folder=folder, config=config, weight_files=(), generation_config={},
        fingerprint="f",
    )  # fmt: skip


def spec(task: str = "embed", **encode: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"input": "in", "prompt": "{{ a }}", "task": task, "model": "m", "encode": encode}
    )


def sentence_folder(
    folder: Path, *, poolings: tuple[str, ...] = ("cls_token",), dense: int | None = None
) -> Path:
    """A model that normalises, and has two prompts; with a projection to so many numbers."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": "" if kind == "Transformer" else f"{n}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    for module in modules[1:]:
        (folder / module["path"]).mkdir()
    write(folder / "modules.json", modules)
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 16, **{f"pooling_mode_{name}": True for name in poolings}},
    )
    write(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "find: ", "text": "text: "}, "default_prompt_name": "text"},
    )
    if dense:
        config = {
            "in_features": 16 * len(poolings), "out_features": dense, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }  # fmt: skip
        write(folder / "2_Dense" / "config.json", config)
        (folder / "2_Dense" / "model.safetensors").write_bytes(b"")
    return folder


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "pooling"), [(BERT, ("mean",)), (LLAMA, ("lasttoken",)), ({"dim": 16}, ("mean",))]
)
def test_a_plain_transformer_gives_a_hidden_state(tmp_path, config, pooling) -> None:
    model = files(tmp_path, config)
    assert describe_vectors(model, spec()) == Vectors(16)
    found = sentence_config(model, spec())
    assert (found.pooling, found.normalize, found.prompt()) == (pooling, False, "")


@pytest.mark.parametrize("config", [{}, {"hidden_size": 0}, {"hidden_size": "16"}, {"dim": True}])
def test_a_model_without_a_width_is_no_encoder(tmp_path, config) -> None:
    with pytest.raises(ModelError, match="no hidden_size"):
        describe_vectors(files(tmp_path, config), spec())


def test_what_the_files_say_counts_and_what_the_job_says_counts_more(tmp_path) -> None:
    model = files(sentence_folder(tmp_path), BERT)
    found = sentence_config(model, spec())
    assert (found.pooling, found.normalize, found.prompt()) == (("cls",), True, "text: ")
    job = spec(pooling="last", normalize=False, prompt_name="query")
    found = sentence_config(model, job)
    assert (found.pooling, found.normalize, found.prompt()) == (("lasttoken",), False, "find: ")


def test_a_prompt_that_is_not_there_is_told_with_those_that_are(tmp_path) -> None:
    model = files(sentence_folder(tmp_path), BERT)
    with pytest.raises(ModelError, match="no prompt 'passage'; it has query, text"):
        describe_vectors(model, spec(prompt_name="passage"))


def test_poolings_side_by_side_and_a_projection_make_the_width(tmp_path) -> None:
    two = tmp_path / "two"
    two.mkdir()
    both = files(sentence_folder(two, poolings=("cls_token", "mean_tokens")), BERT)
    assert describe_vectors(both, spec()) == Vectors(32)
    assert describe_vectors(both, spec(pooling="max")) == Vectors(16)
    one = tmp_path / "one"
    one.mkdir()
    projected = files(sentence_folder(one, dense=5), BERT)
    assert describe_vectors(projected, spec()) == Vectors(5)
    assert describe_vectors(projected, spec(pooling="max")) == Vectors(5)


def test_a_projection_of_two_poolings_does_not_take_one(tmp_path) -> None:
    folder = sentence_folder(tmp_path, poolings=("cls_token", "mean_tokens"), dense=5)
    model = files(folder, BERT)
    assert describe_vectors(model, spec()) == Vectors(5)
    with pytest.raises(ModelError, match="projects 32 numbers, and one pooling gives 16"):
        describe_vectors(model, spec(pooling="mean"))


def test_labels_are_the_models_or_the_jobs(tmp_path) -> None:
    names = {"0": "bad", "1": "good"}
    headed = {"architectures": ["BertForSequenceClassification"], "id2label": names}
    assert describe_vectors(files(tmp_path, headed), spec("classify")) == Vectors(
        2, ("bad", "good")
    )
    chosen = spec("classify", choices=["x", "y", "z"])
    assert describe_vectors(files(tmp_path, LLAMA), chosen) == Vectors(3, ("x", "y", "z"))
    assert describe_vectors(files(tmp_path, LLAMA), spec("score")) == Vectors(1)
