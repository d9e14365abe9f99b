"""Small random models of the real architectures, as complete Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 320
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "The water runs down the channel to the wheel.",
    "A small wheel turns a large stone, and the stone grinds the grain.",
    "What is the capital of France? The capital of France is Paris.",
    "Grain, water, stone: the mill needs all three of them.",
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 144,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-plain": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 12}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (Qwen2ForCausalLM, Qwen2Config, SLIDING),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
}
"""Name -> model class, config class, what differs from `SIZES`."""


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 model of a family in `FAMILIES` with tokenizer and chat template.

    Biases and norm weights are random too, so that a forgotten one shows.
    """
    model_class, config_class, differs = FAMILIES[family]
    config = config_class(**(SIZES | differs | changes))
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer trained on a few sentences; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token=EOS, pad_token=EOS
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
