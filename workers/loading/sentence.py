"""What the files of sentence-transformers say of a model: pooling, what follows it, prompts.

    modules.json                        the modules in order, and their folders
    sentence_bert_config.json           longest text; whether texts are put in lower case
    1_Pooling/config.json               how token vectors become one
    2_Dense/config.json, .safetensors   a projection behind it
    config_sentence_transformers.json   prompts

A folder without modules.json is a plain transformer: mean pooling, but the last token for language
models, and no normalisation, as sentence-transformers has it. (It also makes a chat of each text
where a plain language model has a chat template; here texts are read as they are.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from workers.errors import ModelError, UnsafeModelError
from workers.loading.folder import ModelFiles
from workers.loading.jsonfile import parse_list, read_json, read_optional_json

PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"]
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid", "silu"]

_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
_POOLING_KEYS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which several are put side by side."""

_ACTIVATIONS: Mapping[str, DenseActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.SiLU": "silu",
}
_WANTED_FOR = "how texts become vectors"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A projection behind the pooling: `activation(linear(x))`.

    Attributes:
        weights: safetensors file with linear.weight (outputs, inputs) and linear.bias.
    """

    num_inputs: int
    num_outputs: int
    bias: bool
    activation: DenseActivation
    weights: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceConfig:
    """How a text becomes a vector.

    Attributes:
        pooling: one or several, whose vectors are put side by side.
        dense: projections behind it, in order.
        normalize: the vector is divided by its length at the end.
        prompts: what may be put before a text, by name.
        default_prompt: name of the prompt that is put before each text unless another is asked for.
        include_prompt: the prompt's tokens are pooled like the text's.
        max_seq_length: most tokens of a text, special ones included; None: as the model.
        lower_case: texts are put in lower case before they are tokenised.
    """

    pooling: tuple[PoolingMode, ...]
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    include_prompt: bool = True
    max_seq_length: int | None = None
    lower_case: bool = False

    def prompt(self, name: str | None = None) -> str:
        """What to put before each text.

        Args:
            name: of a prompt; None: the default one, if any.

        Raises:
            ModelError: there is no prompt of that name.
        """
        wanted = self.default_prompt if name is None else name
        if wanted is None:
            return ""
        if wanted not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise ModelError(f"the model has no prompt {wanted!r}; it has {known}")
        return self.prompts[wanted]

    @property
    def pools_first_or_last(self) -> bool:
        """Whether only a text's first or last token is pooled."""
        return set(self.pooling) <= {"cls", "lasttoken"}


def read_sentence_config(files: ModelFiles, *, is_decoder: bool = False) -> SentenceConfig:
    """What the folder says, or the defaults for a plain transformer.

    Args:
        files: the model.
        is_decoder: the transformer is causal. One that was made to continue texts (...ForCausalLM)
            has read a text when it comes to its last token.

    Raises:
        ModelError: a file is damaged, or asks for something that is not supported.
    """
    path = files.folder / "modules.json"
    if not path.exists():
        continues = is_decoder and "ForCausalLM" in str(files.config.get("architectures"))
        return SentenceConfig(pooling=("lasttoken",) if continues else ("mean",))
    found = _Found()
    for module in _modules(path):
        _READERS[_kind(path, module)](files.folder, module, found)
    if not found.pooling:
        raise ModelError(f"{path} has no Pooling module, so tokens do not become one vector")
    transformer = found.transformer
    prompts, default_prompt = _prompts(files.folder)
    return SentenceConfig(
        pooling=found.pooling,
        dense=tuple(found.dense),
        normalize=found.normalize,
        prompts=prompts,
        default_prompt=default_prompt,
        include_prompt=found.include_prompt,
        max_seq_length=_max_seq_length(files.folder, transformer),
        lower_case=transformer.get("do_lower_case") is True,
    )


@dataclass(slots=True)
class _Found:
    """What the modules read so far have said."""

    transformer: Mapping[str, object] = field(default_factory=dict[str, object])
    pooling: tuple[PoolingMode, ...] = ()
    include_prompt: bool = True
    dense: list[DenseConfig] = field(default_factory=list[DenseConfig])
    normalize: bool = False


def _modules(path: Path) -> list[Mapping[str, object]]:
    modules = parse_list(path.read_bytes(), where=str(path))
    found = [cast("Mapping[str, object]", item) for item in modules if isinstance(item, dict)]
    if len(found) != len(modules):
        raise ModelError(f"{path} holds something other than modules; copy the model again")
    return found


def _kind(path: Path, module: Mapping[str, object]) -> str:
    """The class of a module, whatever package of sentence-transformers it is in."""
    name = str(module.get("type"))
    kind = name.rsplit(".", 1)[-1]
    if not name.startswith("sentence_transformers.") or kind not in _READERS:
        raise ModelError(
            f"{path} asks for a module {name}, which is not supported; supported are "
            f"{', '.join(_READERS)} of sentence_transformers"
        )
    return kind


def _folder(folder: Path, module: Mapping[str, object]) -> Path:
    """The folder of a module: a plain name in the model's."""
    name = module.get("path", "")
    if not isinstance(name, str) or (name and name != Path(name).name) or name == "..":
        raise ModelError(f"{folder / 'modules.json'} names the folder {name!r} of a module")
    return folder / name


def _read_transformer(folder: Path, module: Mapping[str, object], found: _Found) -> None:
    own = _folder(folder, module)
    if own != folder:
        raise ModelError(
            f"{folder / 'modules.json'} has the transformer in {own.name!r}; only a transformer in "
            "the model's own folder is supported"
        )
    path = folder / "sentence_bert_config.json"
    found.transformer = read_optional_json(path, wanted_for=_WANTED_FOR)
    task = found.transformer.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelError(f"{path}: transformer_task is {task!r}; feature-extraction is supported")


def _read_pooling(folder: Path, module: Mapping[str, object], found: _Found) -> None:
    path = _folder(folder, module) / "config.json"
    config = read_json(path, wanted_for=_WANTED_FOR)
    if found.pooling or found.dense or found.normalize:
        raise ModelError(f"{folder / 'modules.json'} pools behind other modules or twice")
    found.pooling = _pooling_modes(path, config)
    found.include_prompt = config.get("include_prompt", True) is not False


def _pooling_modes(path: Path, config: Mapping[str, object]) -> tuple[PoolingMode, ...]:
    named = config.get("pooling_mode")
    modes: list[PoolingMode]
    if named is None:
        modes = [mode for key, mode in _POOLING_KEYS.items() if config.get(key) is True]
    else:
        names = cast("list[object]", named) if isinstance(named, list) else str(named).split("+")
        modes = [_pooling_mode(path, str(name)) for name in names]
    return tuple(modes) or ("mean",)


def _pooling_mode(path: Path, name: str) -> PoolingMode:
    short = name.removesuffix("_tokens").removesuffix("_token")
    for mode in _MODES:
        if short == mode:
            return mode
    raise ModelError(f"{path}: pooling mode {name!r} is not supported; {', '.join(_MODES)} are")


def _read_dense(folder: Path, module: Mapping[str, object], found: _Found) -> None:
    own = _folder(folder, module)
    config = read_json(own / "config.json", wanted_for=_WANTED_FOR)
    if found.normalize or not found.pooling:
        raise ModelError(
            f"{folder / 'modules.json'} has a Dense module elsewhere than between pooling and "
            "normalisation, which is not supported"
        )
    if config.get("use_residual") is True:
        raise ModelError(f"{own / 'config.json'}: use_residual is not supported")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"{own / 'config.json'}: activation_function {activation!r} is not supported; "
            f"{', '.join(_ACTIVATIONS)} are"
        )
    found.dense.append(
        DenseConfig(
            num_inputs=_size(own, config, "in_features"),
            num_outputs=_size(own, config, "out_features"),
            bias=config.get("bias", True) is not False,
            activation=_ACTIVATIONS[activation],
            weights=_dense_weights(own),
        )
    )


def _size(folder: Path, config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(f"{folder / 'config.json'}: {key} is {value!r}; a size is wanted")
    return value


def _dense_weights(folder: Path) -> Path:
    path = folder / "model.safetensors"
    if path.is_file():
        return path
    if (folder / "pytorch_model.bin").exists():
        raise UnsafeModelError(
            f"{folder} has pickled weights only, which can run any code and are never loaded; "
            "convert them to safetensors (saving the model with sentence-transformers does)"
        )
    raise ModelError(f"{path} is missing; copy the whole model folder again")


def _read_normalize(folder: Path, module: Mapping[str, object], found: _Found) -> None:  # noqa: ARG001
    found.normalize = True


_READERS = {
    "Transformer": _read_transformer,
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "Normalize": _read_normalize,
}


def _max_seq_length(folder: Path, transformer: Mapping[str, object]) -> int | None:
    value = transformer.get("max_seq_length")
    if value is None:
        return None
    if type(value) is not int or value < 1:
        path = folder / "sentence_bert_config.json"
        raise ModelError(f"{path}: max_seq_length is {value!r}; a number of tokens is wanted")
    return value


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    config = read_optional_json(path, wanted_for="the model's prompts")
    prompts = config.get("prompts") or {}
    default = config.get("default_prompt_name")
    items = cast("dict[str, object]", prompts).items() if isinstance(prompts, dict) else None
    if items is None or not all(isinstance(text, str) for _, text in items):
        raise ModelError(f"{path}: prompts is {prompts!r}; an object of texts is wanted")
    found = {name: str(text) for name, text in items}
    if default is not None and default not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ModelError(f"{path}: default_prompt_name is {default!r}; the prompts are {known}")
    return found, None if default is None else str(default)
