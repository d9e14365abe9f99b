"""ModernBERT: norms before attention and MLP, rotary positions, a gated MLP, and most layers see
only a window around a token.

Legend: T tokens of a batch, D hidden size, I intermediate size, N heads, H head size, V vocabulary.

Source: "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder" (2024); the names of
tensors and settings are those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from workers.encoding import PackedTexts
from workers.errors import ModelError
from workers.models.config import ConfigReader, RopeConfig
from workers.models.encoder import (
    Configured,
    LayerNorm,
    Named,
    apply,
    find_activation,
    num_bytes,
    whole,
)
from workers.models.layers import Linear, Make, Rotary, rotate_
from workers.models.packed import EVERYTHING, PackedBatch, Reach, attend, to_device
from workers.models.weights import Places

Sight = Literal["full_attention", "sliding_attention"]
_THETAS: Mapping[Sight, float] = {"full_attention": 160000.0, "sliding_attention": 10000.0}
_OLD_KEYS: Mapping[Sight, str] = {
    "full_attention": "global_rope_theta",
    "sliding_attention": "local_rope_theta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig:
    """Sizes and options.

    Attributes:
        activation: of the MLP's gate, a name of `encoder.ACTIVATIONS`.
        sights: per layer, what its tokens see.
        window: tokens that a sliding layer's token sees, half of them on each side.
        ropes: rotary embedding of each kind of layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    norm_bias: bool
    activation: str
    attention_bias: bool
    mlp_bias: bool
    max_len: int
    sights: tuple[Sight, ...]
    window: int
    ropes: Mapping[Sight, RopeConfig]

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ModelError(
                f"config.json: the hidden size {self.hidden_size} does not give "
                f"{self.num_heads} heads of an even size"
            )
        find_activation("hidden_activation", self.activation)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def read_modernbert(reader: ConfigReader) -> ModernBertConfig:
    """Options of a ModernBERT model.

    Raises:
        ModelError: values that cannot be, or that are not supported.
    """
    return ModernBertConfig(
        vocab_size=reader.integer("vocab_size", 50368),
        hidden_size=reader.integer("hidden_size", 768),
        intermediate_size=reader.integer("intermediate_size", 1152),
        num_heads=reader.integer("num_attention_heads", 12),
        norm_eps=reader.number("norm_eps", 1e-5),
        norm_bias=reader.flag("norm_bias", default=False),
        activation=str(reader.raw.get("hidden_activation", "gelu")),
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        max_len=reader.integer("max_position_embeddings", 8192),
        sights=_sights(reader),
        window=reader.integer("local_attention", 128),
        ropes={sight: _rope(reader, sight) for sight in _THETAS},
    )


def _sights(reader: ConfigReader) -> tuple[Sight, ...]:
    num_layers = reader.integer("num_hidden_layers", 22)
    types: Any = reader.raw.get("layer_types")
    if types is None:
        every = reader.integer("global_attn_every_n_layers", 3)
        return tuple(
            "sliding_attention" if layer % every else "full_attention"
            for layer in range(num_layers)
        )
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(_THETAS):
        raise ModelError(
            f"config.json: layer_types must give {num_layers} layers one of {', '.join(_THETAS)} "
            f"each, but is {types!r}"
        )
    return tuple(types)


def _rope(reader: ConfigReader, sight: Sight) -> RopeConfig:
    """Settings of one kind of layer, from `rope_parameters` (new) or a theta of its own."""
    own: Any = reader.raw.get("rope_parameters") or {}
    nested: Any = own.get(sight) if isinstance(own, dict) else own
    default = reader.number(_OLD_KEYS[sight], _THETAS[sight])
    if not isinstance(nested, dict):
        nested = {}
    return ConfigReader({"rope_theta": default, "rope_parameters": nested}).rope()


class ModernBertLayer:
    """Attention and gated MLP, each behind a norm and around a residual.

    Attributes:
        sight: what its tokens see.
        attention_norm: None in the first layer, whose input is normalised already.
        qkv: (3 D, D), queries, keys, values.
        out: (D, D), behind attention.
        mlp_norm: before the MLP.
        up: (2 I, D): what is activated, then what it is multiplied with.
        down: (D, I).
    """

    def __init__(self, config: ModernBertConfig, index: int, make: Make) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        eps, bias = config.norm_eps, config.norm_bias
        self.sight = config.sights[index]
        self.attention_norm = LayerNorm(make.device, hidden, eps, bias=bias) if index else None
        self.qkv = Linear(make, 3 * hidden, hidden, bias=config.attention_bias)
        self.out = Linear(make, hidden, hidden, bias=config.attention_bias)
        self.mlp_norm = LayerNorm(make.device, hidden, eps, bias=bias)
        self.up = Linear(make, 2 * inner, hidden, bias=config.mlp_bias)
        self.down = Linear(make, hidden, inner, bias=config.mlp_bias)

    def places(self, name: str) -> Iterator[Named]:
        if self.attention_norm is not None:
            yield from self.attention_norm.places(f"{name}.attn_norm")
        yield from self.qkv.places(f"{name}.attn.Wqkv")
        yield from self.out.places(f"{name}.attn.Wo")
        yield from self.mlp_norm.places(f"{name}.mlp_norm")
        yield from self.up.places(f"{name}.mlp.Wi")
        yield from self.down.places(f"{name}.mlp.Wo")


class ModernBertModel(Configured[ModernBertConfig]):
    """Embedding, layers, norm; an `EncoderModel`.

    Attributes:
        config: sizes and options.
        dtype: of the projections; all else is float32.
        word_VD: float32.
        embedding_norm: behind the embedding.
        layers: see `ModernBertLayer`.
        final_norm: behind the last layer.
    """

    def __init__(
        self, config: ModernBertConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        make, exact = Make(dtype, device), Make(torch.float32, device)
        size, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        self.config = config
        self.dtype = dtype
        self.device = device
        self.word_VD = exact(config.vocab_size, size)
        self.embedding_norm = LayerNorm(device, size, eps, bias=bias)
        self.layers = [ModernBertLayer(config, i, make) for i in range(len(config.sights))]
        self.final_norm = LayerNorm(device, size, eps, bias=bias)
        self._rotaries = {
            sight: Rotary(rope, config.head_size, exact) for sight, rope in config.ropes.items()
        }
        self._activate = find_activation("hidden_activation", config.activation)

    @property
    def weights_bytes(self) -> int:
        return num_bytes(self.places())

    @property
    def activation_bytes_per_token(self) -> int:
        """What one layer has alive at once, rotary tables and the batch's integers."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        tables = 4 * 4 * self.config.head_size
        return 32 * hidden + self.dtype.itemsize * (6 * hidden + 4 * inner) + tables + 32

    @property
    def num_parameters(self) -> int:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return len(self.layers) * (4 * hidden * hidden + 3 * hidden * inner)

    def hidden(self, batch: PackedTexts) -> Tensor:
        packed = to_device(batch, self.device)
        tables = {
            sight: rotary.tables(packed.position_T, packed.longest - 1)
            for sight, rotary in self._rotaries.items()
        }
        x_TD = self.embedding_norm(functional.embedding(packed.token_ids_T, self.word_VD))
        for layer in self.layers:
            x_TD = x_TD + layer.out(self._attend(layer, x_TD, tables[layer.sight], packed))
            inner_TI, gate_TI = apply(layer.up, layer.mlp_norm(x_TD)).chunk(2, dim=1)
            x_TD = x_TD + layer.down(self._activate(inner_TI) * gate_TI)
        return self.final_norm(x_TD)

    def _attend(
        self,
        layer: ModernBertLayer,
        x_TD: Tensor,
        tables: tuple[Tensor, Tensor],
        packed: PackedBatch,
    ) -> Tensor:
        config = self.config
        normed_TD = x_TD if layer.attention_norm is None else layer.attention_norm(x_TD)
        heads_TAH = apply(layer.qkv, normed_TD).unflatten(1, (-1, config.head_size))
        qk_TAH = heads_TAH[:, : 2 * config.num_heads].float()
        rotate_(qk_TAH, *tables)
        q_TNH, k_TNH = qk_TAH.to(self.dtype).split(config.num_heads, dim=1)
        v_TNH = heads_TAH[:, 2 * config.num_heads :]
        half = config.window // 2
        reach = Reach(half, half) if layer.sight == "sliding_attention" else EVERYTHING
        scale = config.head_size**-0.5
        return attend(q_TNH, k_TNH, v_TNH, packed.runs, scale=scale, reach=reach).flatten(1)

    def places(self) -> Places:
        places = {"embeddings.tok_embeddings.weight": whole(self.word_VD)}
        places.update(self.embedding_norm.places("embeddings.norm"))
        for index, layer in enumerate(self.layers):
            places.update(layer.places(f"layers.{index}"))
        places.update(self.final_norm.places("final_norm"))
        return places
