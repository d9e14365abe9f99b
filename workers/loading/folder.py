"""A Hugging Face folder, checked before anything in it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from workers.errors import ModelError, UnsafeModelError
from workers.loading.fingerprint import fingerprint
from workers.loading.jsonfile import read_json, read_optional_json
from workers.loading.safetensors_file import read_header

_ENCODERS = ("Bert", "Camembert", "DistilBert", "ModernBert", "Roberta", "XLMRoberta")
_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
OWN_ARCHITECTURES = frozenset(
    [
        stem + kind
        for stem in _DECODERS
        for kind in ("ForCausalLM", "ForSequenceClassification", "Model")
    ]
    + [
        stem + kind
        for stem in _ENCODERS
        for kind in ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "Model")
    ]
)
"""Architectures that we run with our own code, so that a model's remote code is not needed."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SMALL_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
MODULE_FILES = ("[0-9]_*/config.json", "[0-9]_*/model.safetensors")
"""Of the modules of sentence-transformers, which are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on disk, checked: safetensors whole, nothing pickled, no remote code wanted.

    Attributes:
        name: as the user gave it.
        folder: holds config.json, the weights and the tokenizer's files.
        config: config.json.
        weight_files: the safetensors files, in order of name.
        generation_config: generation_config.json, empty when there is none.
        fingerprint: 32 hex digits, the same for every copy of the model.
    """

    name: str
    folder: Path
    config: Mapping[str, object]
    weight_files: tuple[Path, ...]
    generation_config: Mapping[str, object]
    fingerprint: str

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion: generation_config's, else config's, else none."""
        for source in (self.generation_config, self.config):
            ids = token_ids(source.get("eos_token_id"))
            if ids:
                return ids
        return frozenset()


def token_ids(value: object) -> frozenset[int]:
    """An id or a list of ids, as configurations give them."""
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    return frozenset(item for item in items if type(item) is int and item >= 0)


def open_folder(name: str, folder: Path, *, identity: str | None = None) -> ModelFiles:
    """Check a model folder and describe it. `identity` replaces the fingerprint (of converted
    models).

    Raises:
        UnsafeModelError: only pickled weights, or an architecture that lives in remote code.
        ModelError: something is missing, damaged or not supported.
    """
    config = read_json(folder / "config.json", wanted_for="the model's shape")
    _refuse_remote_code(folder, config)
    _refuse_quantised(folder, config)
    weight_files = _weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder / 'tokenizer.json'} is missing; save it with the model's tokenizer "
            "(a fast tokenizer's save_pretrained writes it)"
        )
    wanted_for = "the model's generation defaults"
    generation_config = read_optional_json(folder / "generation_config.json", wanted_for=wanted_for)
    small = [folder / item for item in SMALL_FILES if (folder / item).is_file()]
    small += sorted(path for pattern in MODULE_FILES for path in folder.glob(pattern))
    return ModelFiles(
        name=name,
        folder=folder,
        config=config,
        weight_files=weight_files,
        generation_config=generation_config,
        fingerprint=identity or fingerprint(small, weight_files),
    )


def is_decoder(config: Mapping[str, object]) -> bool:
    """Whether a config.json is of one of our decoders, with or without its head."""
    names = config.get("architectures")
    found = cast("list[object]", names) if isinstance(names, list) else []
    stems = (str(name).removesuffix("ForCausalLM").removesuffix("Model") for name in found)
    return any(stem in _DECODERS for stem in stems)


def _refuse_remote_code(folder: Path, config: Mapping[str, object]) -> None:
    architectures = config.get("architectures")
    names = cast("list[object]", architectures) if isinstance(architectures, list) else []
    if "auto_map" in config and not OWN_ARCHITECTURES.intersection(str(name) for name in names):
        raise UnsafeModelError(
            f"{folder / 'config.json'} names remote code (auto_map) for architectures {names}; "
            "remote code is never "
            f"run. Architectures that need none: {', '.join(sorted(OWN_ARCHITECTURES))}"
        )


def _refuse_quantised(folder: Path, config: Mapping[str, object]) -> None:
    if config.get("quantization_config"):
        raise ModelError(
            f"{folder / 'config.json'} has a quantization_config, which is not supported; "
            "use the model's unquantised version or a GGUF file"
        )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        read_header(single)
        return (single,)
    if index.is_file():
        return _sharded(folder, index)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(found) == 1:
        read_header(found[0])
        return (found[0],)
    raise _no_weights(folder, found)


def _no_weights(folder: Path, found: list[Path]) -> ModelError:
    if found:
        names = ", ".join(path.name for path in found)
        return ModelError(
            f"{folder} has {names} but no model.safetensors.index.json to say which are its weights"
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        return UnsafeModelError(
            f"{folder} has pickled weights only ({', '.join(pickled)}), which can run any code and "
            "are never loaded; "
            "convert them to safetensors (save_pretrained of transformers writes safetensors)"
        )
    return ModelError(
        f"{folder} has no weights: model.safetensors or model.safetensors.index.json is expected"
    )


def _sharded(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index, wanted_for="the list of weight files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; copy the model again")
    by_shard: dict[str, set[str]] = {}
    for tensor, shard in cast("dict[str, object]", weight_map).items():
        by_shard.setdefault(_shard_name(index, tensor, shard), set()).add(tensor)
    for shard, tensors in by_shard.items():
        missing = tensors - read_header(folder / shard).keys()
        if missing:
            raise ModelError(
                f"{folder / shard} lacks tensor {min(missing)!r}, which {index.name} places in it"
            )
    return tuple(folder / shard for shard in sorted(by_shard))


def _shard_name(index: Path, tensor: str, shard: object) -> str:
    plain = (
        isinstance(shard, str)
        and shard == Path(shard).name
        and "\\" not in shard
        and "\0" not in shard
    )
    if not plain or not str(shard).endswith(".safetensors"):
        raise ModelError(
            f"{index} places tensor {tensor!r} in {shard!r}; only safetensors files of the same "
            "folder are read"
        )
    return str(shard)
