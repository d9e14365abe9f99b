"""The table of encoder families, beside that of the decoders in `registry`.

A new family is one file and one line here. The weight files of a family may hold its model under a
prefix (`bert.encoder...`) or without one, depending on the class that wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from workers.errors import ModelError
from workers.loading.safetensors_file import read_header
from workers.models import bert, heads, modernbert
from workers.models.config import ConfigReader
from workers.models.encoder import LoadedEncoder
from workers.models.heads import MakeHead
from workers.models.registry import FAMILIES, Family, find_family
from workers.models.weights import Places

CLASSIFIER = "ForSequenceClassification"
SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)
"""Of the classes that hold the same model, with different heads."""


class _Build(Protocol):
    """Makes a model with uninitialised weights. On the meta device it only has shapes."""

    def __call__(
        self, config: Any, *, dtype: torch.dtype, device: torch.device
    ) -> LoadedEncoder: ...


class _ReadConfig(Protocol):
    """Reads and checks what config.json says of one family."""

    def __call__(self, reader: ConfigReader) -> Any: ...


class EncoderFamily(NamedTuple):
    """How encoders of one kind are read and built.

    Attributes:
        stem: what the names of its classes begin with.
        prefix: before the model's tensors in files of classes with a head.
        roots: what the names of the model's own tensors begin with.
        unused: what a model may have that is not needed for hidden states.
        read: config.json to a config.
        build: a config to a model.
        make_head: of its sequence classifiers.
    """

    stem: str
    prefix: str
    roots: tuple[str, ...]
    unused: tuple[str, ...]
    read: _ReadConfig
    build: _Build
    make_head: MakeHead

    def make(
        self, raw: Mapping[str, object], *, dtype: torch.dtype, device: torch.device
    ) -> LoadedEncoder:
        """A model with uninitialised weights.

        Raises:
            ModelError: values of config.json that cannot be, or that are not supported.
        """
        return self.build(self.read(ConfigReader(raw)), dtype=dtype, device=device)

    def is_classifier(self, raw: Mapping[str, object]) -> bool:
        """Whether a config.json is of a sequence classifier."""
        return self.stem + CLASSIFIER in architecture_names(raw)


_BERT_ROOTS = ("embeddings.", "encoder.")
_BERT_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids")


def _roberta(stem: str) -> EncoderFamily:
    return EncoderFamily(
        stem=stem,
        prefix="roberta.",
        roots=_BERT_ROOTS,
        unused=_BERT_UNUSED,
        read=bert.read_roberta,
        build=bert.BertModel,
        make_head=heads.roberta_head,
    )


ENCODER_FAMILIES: Mapping[str, EncoderFamily] = MappingProxyType(
    {
        family.stem: family
        for family in (
            EncoderFamily(
                stem="Bert",
                prefix="bert.",
                roots=_BERT_ROOTS,
                unused=_BERT_UNUSED,
                read=bert.read_bert,
                build=bert.BertModel,
                make_head=heads.bert_head,
            ),
            _roberta("Roberta"),
            _roberta("XLMRoberta"),
            _roberta("Camembert"),
            EncoderFamily(
                stem="DistilBert",
                prefix="distilbert.",
                roots=("embeddings.", "transformer."),
                unused=_BERT_UNUSED,
                read=bert.read_distilbert,
                build=bert.BertModel,
                make_head=heads.distilbert_head,
            ),
            EncoderFamily(
                stem="ModernBert",
                prefix="model.",
                roots=("embeddings.", "layers.", "final_norm."),
                unused=(),
                read=modernbert.read_modernbert,
                build=modernbert.ModernBertModel,
                make_head=heads.modernbert_head,
            ),
        )
    }
)
"""By stem."""


def architecture_names(raw: Mapping[str, object]) -> tuple[str, ...]:
    """The classes that a config.json names."""
    named: Any = raw.get("architectures")
    return tuple(map(str, named)) if isinstance(named, list) else ()


def find_encoder_family(raw: Mapping[str, object]) -> EncoderFamily | None:
    """The encoder family of a config.json; None: it is of none.

    Raises:
        ModelError: the weights are quantised.
    """
    if raw.get("quantization_config"):
        raise ModelError(
            "config.json has a quantization_config; only unquantised weights are supported"
        )
    for name in architecture_names(raw):
        for suffix in SUFFIXES:
            family = ENCODER_FAMILIES.get(name.removesuffix(suffix))
            if family is not None and name.endswith(suffix):
                return family
    return None


def find_decoder_family(raw: Mapping[str, object]) -> Family:
    """The decoder family of a config.json that may be of the bare model (`LlamaModel`) or of a
    classifier.

    Raises:
        ModelError: the architecture is of no encoder or decoder that is supported, or the decoder
            has been made to see what comes after a token.
    """
    names = architecture_names(raw)
    stems = [name.removesuffix("Model").removesuffix(CLASSIFIER) for name in names]
    causal = [stem + "ForCausalLM" for stem in stems]
    known = [name for name in (*names, *causal) if name in FAMILIES]
    if not known:
        decoders = (name.removesuffix("ForCausalLM") for name in FAMILIES)
        raise ModelError(
            f"the model's architecture is {raw.get('architectures')!r}; supported are models of "
            f"the families {', '.join((*ENCODER_FAMILIES, *decoders))}"
        )
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True:
        raise ModelError(
            "config.json asks a decoder to see what comes after a token (is_causal is false or "
            "use_bidirectional_attention is true), which is not supported"
        )
    return find_family({**raw, "architectures": known})


def in_files(names: Sequence[str], places: Places, prefix: str) -> Places:
    """The places of a model by the names that its files use: with or without the prefix, and with
    gamma and beta for the weight and bias of a norm in old ones.

    Args:
        names: of all tensors of the files.
        places: by their names without prefix.
        prefix: of the model in files of classes with a head.
    """
    there = set(names)
    before = prefix if any(prefix + name in there for name in places) else ""

    def named(name: str) -> str:
        old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        return before + old if before + old in there else before + name

    return {named(name): place for name, place in places.items()}


def names_in(files: Sequence[Path]) -> list[str]:
    """Names of all tensors of weight files.

    Raises:
        ModelError: a file is damaged.
    """
    return [name for path in files for name in read_header(path)]


def is_foreign(name: str, places: Places, family: EncoderFamily) -> bool:
    """Whether a tensor of the files is none of the wanted model, or nothing that it needs: other
    heads, poolers, tables of positions.
    """
    if name in places:
        return False
    own = name.removeprefix(family.prefix)
    return own.startswith(family.unused) if own.startswith(family.roots) else True
