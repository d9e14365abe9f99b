"""Small random encoders of the real architectures, as complete Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils import logging as transformers_logging

from tests.unit.workers.tiny_models import SENTENCES

VOCAB_SIZE = 160
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
DISTIL_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODERN = {"local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
MODERN_BIASED = MODERN | {
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "classifier_pooling": "mean",
}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "bert-tanh-gelu": ("Bert", SIZES | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": ("Camembert", SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTIL_SIZES),
    "modernbert": ("ModernBert", SIZES | MODERN),
    "modernbert-biased": ("ModernBert", SIZES | MODERN_BIASED),
}
"""Name -> stem of the classes, settings."""


def make_tiny_encoder(
    name: str, folder: Path, *, kind: str = "Model", seed: int = 0, **changes: Any
) -> Path:
    """Write a random float32 model of `ENCODERS` with a tokenizer.

    Biases and norms are random too, so that a forgotten one shows.
    """
    stem, settings = ENCODERS[name]
    config = getattr(transformers, f"{stem}Config")(**(settings | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, stem + kind)(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name.lower() and parameter_name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.5)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    write_word_tokenizer(folder)
    return folder


def write_word_tokenizer(folder: Path, **settings: Any) -> None:
    """A WordPiece tokenizer that puts [CLS] and [SEP] around a text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, show_progress=False, special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=100,
        **settings,
    )
    fast.save_pretrained(folder)
