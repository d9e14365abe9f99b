"""The model of an encoding job: what can be known of it before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from flows.model import Vectors
from workers.errors import ModelError
from workers.loading.folder import ModelFiles, is_decoder
from workers.loading.sentence import PoolingMode, SentenceConfig, read_sentence_config

if TYPE_CHECKING:
    from flows.spec_model import JobSpec, PoolingName
    from workers.encoding import EncodeBackend

_POOLINGS: dict[PoolingName, PoolingMode] = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "last": "lasttoken",
}


def describe_vectors(files: ModelFiles, spec: JobSpec) -> Vectors:
    """What a row gets.

    Raises:
        ModelError: the model does not serve the task, or its files are damaged.
    """
    choices = spec.encode.choices
    if spec.task == "score":
        return Vectors(1)
    if spec.task == "classify":
        if choices:
            return Vectors(len(choices), choices)
        from workers.models.heads import read_labels

        labels = read_labels(files.config).names
        return Vectors(len(labels), labels)
    sentence = sentence_config(files, spec)
    if sentence.dense:
        return Vectors(sentence.dense[-1].num_outputs)
    return Vectors(_hidden_size(files) * len(sentence.pooling))


def sentence_config(files: ModelFiles, spec: JobSpec) -> SentenceConfig:
    """How a text becomes an embedding: as the model's files say, where the job says nothing.

    Raises:
        ModelError: the files are damaged, there is no prompt of the name, or the model's projection
            takes what another pooling gives.
    """
    found = read_sentence_config(files, is_decoder=is_decoder(files.config))
    encode = spec.encode
    if encode.pooling is not None:
        found = replace(found, pooling=(_POOLINGS[encode.pooling],))
        _check_projection(files, found)
    if encode.normalize is not None:
        found = replace(found, normalize=encode.normalize)
    if encode.prompt_name is not None:
        found = replace(found, default_prompt=encode.prompt_name)
    found.prompt()
    return found


def _check_projection(files: ModelFiles, sentence: SentenceConfig) -> None:
    """Of a model that puts several poolings side by side, none fits by itself."""
    if sentence.dense and sentence.dense[0].num_inputs != _hidden_size(files):
        raise ModelError(
            f"{files.name} projects {sentence.dense[0].num_inputs} numbers, and one pooling gives "
            f"{_hidden_size(files)}; leave --pooling out"
        )


def load_encoder(files: ModelFiles, spec: JobSpec) -> Callable[[], EncodeBackend]:
    """Loads the weights when it is called."""

    def load() -> EncodeBackend:
        from workers.backends.torch_encoder import TorchEncoder

        assert spec.task != "generate"
        return TorchEncoder.load(
            files,
            task="score" if spec.encode.choices else spec.task,
            device=spec.engine.device,
            dtype=spec.engine.dtype,
            sentence=sentence_config(files, spec) if spec.task == "embed" else None,
        )

    return load


def _hidden_size(files: ModelFiles) -> int:
    for key in ("hidden_size", "dim"):
        value = files.config.get(key)
        if type(value) is int and value > 0:
            return value
    raise ModelError(f"{files.name}: config.json has no hidden_size, so it is no encoder's")
