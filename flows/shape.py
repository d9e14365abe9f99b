"""What a model's config.json and file sizes tell without loading it: sizes for `flows plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.errors import ModelError

if TYPE_CHECKING:
    from workers.loading.files import ModelFiles

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 2}
"""Of keys, values and what flows between layers."""
UNKNOWN_DTYPE = "float32"
"""What `auto` is counted as, on the safe side: the hardware decides when the model is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model at a data type. Activations are an upper estimate.

    Attributes:
        dtype: that the bytes are for.
        weights_bytes: of all weights.
        kv_bytes_per_token: keys and values of a token, over all layers.
    """

    dtype: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    activation_bytes_per_token: int
    logits_bytes_per_seq: int


def model_shape(files: ModelFiles, dtype: str) -> ModelShape:
    """The sizes of a model, from its configuration and its files' sizes.

    Raises:
        ModelError: config.json lacks a size or has nonsense in its place.
    """
    config = files.config
    item_bytes = ITEM_BYTES.get(dtype, ITEM_BYTES[UNKNOWN_DTYPE])
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    head_size = _size(config, "head_dim", default=hidden // heads)
    inner = _size(config, "intermediate_size")
    vocab_size = _size(config, "vocab_size")
    stored_bytes = sum(path.stat().st_size for path in files.weight_files)
    num_parameters = stored_bytes // ITEM_BYTES[_stored_dtype(config)]
    return ModelShape(
        dtype=dtype if dtype in ITEM_BYTES else UNKNOWN_DTYPE,
        vocab_size=vocab_size,
        max_model_len=_size(config, "max_position_embeddings"),
        num_parameters=num_parameters,
        weights_bytes=num_parameters * (1 if dtype == "int8" else item_bytes),
        kv_bytes_per_token=2
        * _size(config, "num_hidden_layers") * kv_heads * head_size * item_bytes,
        activation_bytes_per_token=(8 * hidden + 3 * inner) * item_bytes,
        logits_bytes_per_seq=2 * 4 * vocab_size,
    )  # fmt: skip


def _stored_dtype(config: Mapping[str, object]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in ITEM_BYTES else UNKNOWN_DTYPE


def _size(config: Mapping[str, object], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ModelError(
            f"the model's config.json says {key}: {value!r}; a whole number above 0 is wanted"
        )
    return value
