"""Turns a GGUF file into a Hugging Face folder, once.

Tensors are dequantised one at a time and streamed into model.safetensors, so memory stays at the
size of one tensor. Those stored as float16 or bfloat16 keep their type; quantised ones become
float32, which is exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.errors import ModelError
from workers.loading.gguf_file import BLOCKS, GgufFile, read_gguf
from workers.loading.gguf_tokenizer import write_tokenizer


class _Family(NamedTuple):
    architecture: str
    model_type: str
    attention_bias: bool
    pairs_rotated: bool
    """GGUF holds query and key rows in the order of llama.cpp's rotary pairs (x0 x1) instead of
    halves (x0 x_d/2).
    """


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", "llama", False, True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", True, False),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", False, False),
}

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)", re.ASCII)
_KEPT = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


def convert(path: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model.safetensors into
    an empty folder.

    Raises:
        ModelError: the file is damaged, or of a family or feature that is not supported.
    """
    gguf = read_gguf(path)
    family = _family(gguf)
    config = _config(gguf, family)
    write_tokenizer(gguf.metadata, folder, where=str(path))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_weights(gguf, family, config, folder / "model.safetensors")


def _family(gguf: GgufFile) -> _Family:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{gguf.path} has architecture {name!r}; GGUF files of {', '.join(FAMILIES)} can be "
            "converted. "
            "Give the model's Hugging Face folder instead"
        )
    scaling = gguf.metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in gguf.tensors:
        raise ModelError(
            f"{gguf.path} scales its rotary positions, which the conversion does not carry over; "
            "give the model's Hugging Face folder instead"
        )
    return FAMILIES[name]


def _config(gguf: GgufFile, family: _Family) -> dict[str, object]:
    prefix = str(gguf.metadata["general.architecture"])
    read = _MetadataReader(gguf, prefix)
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    num_layers = read.count("block_count")
    _check_layers(gguf, num_layers)
    vocab_size = _rows(gguf, "token_embd.weight")
    if hidden % heads:
        raise ModelError(
            f"{gguf.path}: embedding length {hidden} is no multiple of {heads} heads; fetch the "
            "file again"
        )
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("attention.head_count_kv", default=heads),
        "head_dim": read.count("attention.key_length", default=hidden // heads),
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", default=10000.0),
        "hidden_act": "silu",
        "attention_bias": family.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
        **_special_ids(gguf.metadata, vocab_size),
    }


def _check_layers(gguf: GgufFile, num_layers: int) -> None:
    matches = (_LAYER_NAME.fullmatch(name) for name in gguf.tensors)
    found = {int(match[1]) for match in matches if match}
    if len(found) != num_layers or max(found) != num_layers - 1:
        raise ModelError(
            f"{gguf.path} claims {num_layers} layers and has {len(found)}; fetch it again"
        )


def _special_ids(metadata: Mapping[str, object], vocab_size: int) -> dict[str, object]:
    """`eos_token_id` and the like, where the file gives ids inside the vocabulary; a turn's end
    also ends a completion.
    """
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found: dict[str, object] = {}
    for name, key in keys.items():
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int and 0 <= value < vocab_size:
            found[name] = value
    turn_end = metadata.get("tokenizer.ggml.eot_token_id")
    if (
        type(turn_end) is int
        and 0 <= turn_end < vocab_size
        and found.get("eos_token_id") != turn_end
    ):
        found["eos_token_id"] = [
            *([found["eos_token_id"]] if "eos_token_id" in found else []),
            turn_end,
        ]
    return found


def _generation_config(config: Mapping[str, object]) -> dict[str, object]:
    return {
        name: config[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if name in config
    }


class _MetadataReader:
    """The family's own metadata, with errors that name the key."""

    def __init__(self, gguf: GgufFile, prefix: str) -> None:
        self._gguf = gguf
        self._prefix = prefix

    def count(self, key: str, *, default: int | None = None) -> int:
        value = self._gguf.metadata.get(f"{self._prefix}.{key}", default)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self._missing(key, value)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._gguf.metadata.get(f"{self._prefix}.{key}", default)
        if not isinstance(value, float) or not 0.0 < value < 1e12:
            raise self._missing(key, value)
        return float(f"{value:.7g}")  # stored as float32: 1e-05, not 9.999999747378752e-06

    def _missing(self, key: str, value: object) -> ModelError:
        return ModelError(
            f"{self._gguf.path}: metadata {self._prefix}.{key} is {value!r}; fetch the file again"
        )


def _rows(gguf: GgufFile, name: str) -> int:
    if name not in gguf.tensors:
        raise ModelError(f"{gguf.path} has no tensor {name}; fetch the file again")
    return gguf.tensors[name].shape[0]


def _target_name(gguf: GgufFile, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise ModelError(
            f"{gguf.path} has a tensor {name!r} that its family does not have; it is not supported"
        )
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _write_weights(
    gguf: GgufFile, family: _Family, config: Mapping[str, object], target: Path
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in gguf.tensors.items():
        dtype = _KEPT.get(BLOCKS[tensor.type_id][0], "F32")
        size = int(np.prod(tensor.shape, dtype=np.int64)) * (4 if dtype == "F32" else 2)
        shape, interval = list(tensor.shape), [position, position + size]
        header[_target_name(gguf, name)] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": interval,
        }
        position += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in gguf.tensors:
            file.write(_tensor_data(gguf, name, _row_order(name, family, config)))


def _tensor_data(gguf: GgufFile, name: str, reorder: Callable[[_Rows], _Rows]) -> memoryview:
    tensor = gguf.tensors[name]
    kind = BLOCKS[tensor.type_id][0]
    stored = gguf.raw(name)
    if tensor.shape[:-1] == ():  # a vector is one row; its elements are what may be reordered
        stored = stored.reshape(tensor.shape[0], -1) if kind in _KEPT else stored
    rows = stored if kind in _KEPT else _dequantise(stored, tensor.type_id)
    return np.ascontiguousarray(reorder(rows)).data.cast("B")


_Rows = npt.NDArray[np.generic]


def _dequantise(stored: npt.NDArray[np.uint8], type_id: int) -> npt.NDArray[np.float32]:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as fault:
        raise ModelError(
            "quantised GGUF files need the package gguf; install the extra: pip install "
            "'headrace[gguf]'"
        ) from fault
    return dequantize(stored, GGMLQuantizationType(type_id))


def _row_order(
    name: str, family: _Family, config: Mapping[str, object]
) -> Callable[[_Rows], _Rows]:
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    match = _LAYER_NAME.fullmatch(name)
    count = heads.get(match[2]) if match else None
    if not family.pairs_rotated or not isinstance(count, int):
        return _as_stored

    def halves(rows: _Rows) -> _Rows:
        """From (head, pair, 2) to (head, 2, pair)."""
        if rows.shape[0] % (2 * count):
            raise ModelError(
                f"tensor {name!r} has {rows.shape[0]} rows for {count} heads; fetch the file again"
            )
        pairs = rows.reshape(count, rows.shape[0] // count // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return halves


def _as_stored(rows: _Rows) -> _Rows:
    return rows


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
