"""Small models on disk for the tests: a byte-level tokenizer, a folder, a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (
    ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "w"), ("o", "r"),
    ("\u0120w", "or"), ("\u0120wor", "l"), ("\u0120worl", "d"), ("e", "n"), ("en", "d"),
)  # fmt: skip
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with three special tokens and a few merges: any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)


def write_folder(folder: Path, *, config: dict[str, object] | None = None) -> Path:
    """A Hugging Face folder with a weight file of two small tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|im_end|>",
        "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True},
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, dtype=np.float32),
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def gguf_weights(seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """Weights of a tiny Llama under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {"model.embed_tokens.weight": _draw(rng, 272, 32)}
    for i in range(layers):
        at = f"model.layers.{i}."
        found |= {
            at + "input_layernorm.weight": _draw(rng, 32),
            at + "self_attn.q_proj.weight": _draw(rng, 32, 32),
            at + "self_attn.k_proj.weight": _draw(rng, 16, 32),
            at + "self_attn.v_proj.weight": _draw(rng, 16, 32),
            at + "self_attn.o_proj.weight": _draw(rng, 32, 32),
            at + "post_attention_layernorm.weight": _draw(rng, 32),
            at + "mlp.gate_proj.weight": _draw(rng, 64, 32),
            at + "mlp.up_proj.weight": _draw(rng, 64, 32),
            at + "mlp.down_proj.weight": _draw(rng, 32, 64),
        }
    return found | {"model.norm.weight": _draw(rng, 32)}


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF files hold query and key rows: rotary partners side by side."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.weight"
    return f"{_NAMES[stem]}.weight"


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], *, pre: str = "smollm", **extra: object
) -> Path:
    """A GGUF file of a tiny Llama with the byte-level tokenizer, matrices as float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), str(value))
    _add_tokenizer(writer, pre)
    for name, weight in weights.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        writer.add_tensor(gguf_name(name), interleave(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: object, pre: str) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    tokenizer = byte_tokenizer()
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    tokens += [f"<pad{i}>" for i in range(272 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
