"""BERT and what is built like it: RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT.

Legend: T tokens of a batch, D hidden size, I intermediate size, N heads, H head size, V vocabulary,
P positions, X token types.

Source: "BERT: Pre-training of Deep Bidirectional Transformers" (2018); the names of tensors are
those of transformers. A layer is attention and MLP, each followed by residual and norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from workers.encoding import PackedTexts
from workers.errors import ModelError
from workers.models.config import ConfigReader
from workers.models.encoder import (
    Configured,
    LayerNorm,
    Named,
    apply,
    find_activation,
    num_bytes,
    whole,
)
from workers.models.layers import Linear, Make
from workers.models.packed import PackedBatch, attend, to_device
from workers.models.weights import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class BertNames:
    """How the weight files call the tensors of a family; `layer` is before those of a layer."""

    word: str = "embeddings.word_embeddings"
    position: str = "embeddings.position_embeddings"
    types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"


DISTILBERT_NAMES = BertNames(
    types=None,
    layer="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Sizes and options of an encoder of the BERT kind.

    Attributes:
        activation: of the MLP, a name of `encoder.ACTIVATIONS`.
        num_positions: rows of the position table.
        num_types: rows of the token type table, of which the first is used; 0: there is none.
        padding_id: of families that count positions from behind this id on, and do not count tokens
            that have it (RoBERTa); None: positions are 0, 1, 2, ...
        names: of the tensors.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    num_positions: int
    num_types: int
    padding_id: int | None
    names: BertNames

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ModelError(
                f"config.json: the hidden size {self.hidden_size} is no multiple of the number of "
                f"attention heads {self.num_heads}"
            )
        if self.max_len < 1:
            raise ModelError(
                f"config.json: max_position_embeddings {self.num_positions} leaves no position "
                f"behind the padding id {self.padding_id}"
            )
        find_activation("the activation", self.activation)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def first_position(self) -> int:
        """Row of the position table that a text's first token has."""
        return 0 if self.padding_id is None else self.padding_id + 1

    @property
    def max_len(self) -> int:
        return self.num_positions - self.first_position


def read_bert(reader: ConfigReader) -> BertConfig:
    """Options of a BERT model.

    Raises:
        ModelError: values that cannot be, or that are not supported.
    """
    return _read(reader, padding_id=None, norm_eps=1e-12, num_types=2)


def read_roberta(reader: ConfigReader) -> BertConfig:
    """Options of a RoBERTa, XLM-RoBERTa or CamemBERT model. Raises as `read_bert`."""
    padding_id = reader.raw.get("pad_token_id", 1)
    if type(padding_id) is not int or padding_id < 0:
        raise ModelError(f"config.json: pad_token_id is {padding_id!r}; a token id is wanted")
    return _read(reader, padding_id=padding_id, norm_eps=1e-5, num_types=1)


def read_distilbert(reader: ConfigReader) -> BertConfig:
    """Options of a DistilBERT model. Raises as `read_bert`."""
    return BertConfig(
        vocab_size=reader.integer("vocab_size", 30522),
        hidden_size=reader.integer("dim", 768),
        intermediate_size=reader.integer("hidden_dim", 3072),
        num_layers=reader.integer("n_layers", 6),
        num_heads=reader.integer("n_heads", 12),
        norm_eps=1e-12,
        activation=str(reader.raw.get("activation", "gelu")),
        num_positions=reader.integer("max_position_embeddings", 512),
        num_types=0,
        padding_id=None,
        names=DISTILBERT_NAMES,
    )


def _read(
    reader: ConfigReader, *, padding_id: int | None, norm_eps: float, num_types: int
) -> BertConfig:
    _refuse_variants(reader)
    return BertConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size", 768),
        intermediate_size=reader.integer("intermediate_size", 3072),
        num_layers=reader.integer("num_hidden_layers", 12),
        num_heads=reader.integer("num_attention_heads", 12),
        norm_eps=reader.number("layer_norm_eps", norm_eps),
        activation=str(reader.raw.get("hidden_act", "gelu")),
        num_positions=reader.integer("max_position_embeddings", 512),
        num_types=reader.integer("type_vocab_size", num_types),
        padding_id=padding_id,
        names=BertNames(),
    )


def _refuse_variants(reader: ConfigReader) -> None:
    kind = reader.raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(
            f"config.json: position_embedding_type is {kind!r}; only absolute is supported"
        )
    if reader.flag("is_decoder", default=False):
        raise ModelError("config.json: is_decoder is true; a BERT that sees everything is wanted")


class BertLayer:
    """Attention and MLP, each followed by residual and norm.

    Attributes:
        qkv: (3 D, D), queries, keys, values.
        out: (D, D), behind attention.
        attention_norm: of the stream behind attention.
        up: (I, D).
        down: (D, I).
        output_norm: of the stream behind the MLP.
    """

    def __init__(self, config: BertConfig, make: Make) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.qkv = Linear(make, 3 * hidden, hidden, bias=True)
        self.out = Linear(make, hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(make.device, hidden, config.norm_eps)
        self.up = Linear(make, inner, hidden, bias=True)
        self.down = Linear(make, hidden, inner, bias=True)
        self.output_norm = LayerNorm(make.device, hidden, config.norm_eps)

    def places(self, names: BertNames, name: str) -> Iterator[Named]:
        size = len(self.out.weight_OI)
        for index, part in enumerate((names.query, names.key, names.value)):
            yield from self.qkv.places(f"{name}.{part}", index * size, (index + 1) * size)
        yield from self.out.places(f"{name}.{names.out}")
        yield from self.attention_norm.places(f"{name}.{names.attention_norm}")
        yield from self.up.places(f"{name}.{names.up}")
        yield from self.down.places(f"{name}.{names.down}")
        yield from self.output_norm.places(f"{name}.{names.output_norm}")


class BertModel(Configured[BertConfig]):
    """Embeddings and layers; an `EncoderModel`.

    Attributes:
        config: sizes and options.
        dtype: of the projections; all else is float32.
        word_VD: float32.
        position_PD: float32; a text's first token has row `config.first_position`.
        types_XD: float32, of which row 0 is added to each token; None: there is none.
        embedding_norm: of the sum of the embeddings.
        layers: see `BertLayer`.
    """

    def __init__(self, config: BertConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        make, exact = Make(dtype, device), Make(torch.float32, device)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.word_VD = exact(config.vocab_size, config.hidden_size)
        self.position_PD = exact(config.num_positions, config.hidden_size)
        self.types_XD = exact(config.num_types, config.hidden_size) if config.num_types else None
        self.embedding_norm = LayerNorm(device, config.hidden_size, config.norm_eps)
        self.layers = [BertLayer(config, make) for _ in range(config.num_layers)]
        self._activate = find_activation("the activation", config.activation)

    @property
    def weights_bytes(self) -> int:
        return num_bytes(self.places())

    @property
    def activation_bytes_per_token(self) -> int:
        """What one layer has alive at once, and the batch's integers."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return 16 * hidden + self.dtype.itemsize * (6 * hidden + 2 * inner) + 32

    @property
    def num_parameters(self) -> int:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return self.config.num_layers * (4 * hidden * hidden + 2 * hidden * inner)

    def hidden(self, batch: PackedTexts) -> Tensor:
        packed = to_device(batch, self.device)
        x_TD = self._embed(packed)
        for layer in self.layers:
            x_TD = self._run_layer(layer, x_TD, packed)
        return x_TD

    def _embed(self, packed: PackedBatch) -> Tensor:
        x_TD = functional.embedding(packed.token_ids_T, self.word_VD)
        if self.types_XD is not None:
            x_TD += self.types_XD[0]
        x_TD += functional.embedding(find_positions(packed, self.config), self.position_PD)
        return self.embedding_norm(x_TD)

    def _run_layer(self, layer: BertLayer, x_TD: Tensor, packed: PackedBatch) -> Tensor:
        config = self.config
        heads_T3NH = apply(layer.qkv, x_TD).unflatten(1, (3, config.num_heads, config.head_size))
        q_TNH, k_TNH, v_TNH = heads_T3NH.unbind(1)
        attended_TNH = attend(q_TNH, k_TNH, v_TNH, packed.runs, scale=config.head_size**-0.5)
        x_TD = layer.attention_norm(x_TD + layer.out(attended_TNH.flatten(1)))
        inner_TI = self._activate(apply(layer.up, x_TD))
        return layer.output_norm(x_TD + layer.down(inner_TI))

    def places(self) -> Places:
        names = self.config.names
        places = {
            f"{names.word}.weight": whole(self.word_VD),
            f"{names.position}.weight": whole(self.position_PD),
        }
        if self.types_XD is not None and names.types is not None:
            places[f"{names.types}.weight"] = whole(self.types_XD)
        places.update(self.embedding_norm.places(names.embedding_norm))
        for index, layer in enumerate(self.layers):
            places.update(layer.places(names, f"{names.layer}.{index}"))
        return places


def find_positions(packed: PackedBatch, config: BertConfig) -> Tensor:
    """Rows of the position table. (T)"""
    padding_id = config.padding_id
    if padding_id is None:
        return packed.position_T
    is_padding_T = packed.token_ids_T == padding_id
    if not is_padding_T.any():
        return packed.position_T + (padding_id + 1)
    # A text that names the padding token: it has the padding's position, and is not counted.
    counted_T = (~is_padding_T).cumsum(0)
    begins_T = torch.arange(len(counted_T), device=counted_T.device) - packed.position_T
    before_T = counted_T[begins_T] - (~is_padding_T[begins_T]).long()
    return torch.where(is_padding_T, padding_id, counted_T - before_T + padding_id)
