"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json.

GGUF stores the vocabulary, merges or scores, and the name of the rule that cuts text into words
before merging; the rule itself lives in the program that reads the file. The table below has the
rules of the families that we run; another name is refused, as a wrong rule gives plausible text
from badly cut prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from workers.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, str] = {
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "llama3": _WORDS % r"\p{N}{1,3}",
    "llama-v3": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
}
_SINGLE_DIGITS = frozenset({"smollm"})
_GPT2 = frozenset({"gpt-2", "gpt2"})
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_SPM_SPACE = "\u2581"


def write_tokenizer(metadata: Mapping[str, object], folder: Path, *, where: str) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) from GGUF metadata.

    Raises:
        ModelError: the tokenizer is incomplete or of a kind that is not supported.
    """
    tokens = _strings(metadata, "tokens", where)
    if len(set(tokens)) != len(tokens) or not tokens:
        raise ModelError(
            f"{where}: its {len(tokens)} tokens are not all different; fetch the file again"
        )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, where)
    else:
        raise _unsupported(where, f"a tokenizer of kind {kind!r}")
    _add_special(tokenizer, metadata, tokens)
    _add_bos(tokenizer, metadata, tokens, default=kind == "llama")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(metadata, tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _unsupported(where: str, what: str) -> ModelError:
    return ModelError(
        f"{where} has {what}, which cannot be converted; give the model's Hugging Face folder "
        "instead"
    )


def _strings(metadata: Mapping[str, object], key: str, where: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(
        isinstance(item, str) for item in cast("list[object]", value)
    ):
        raise ModelError(f"{where} has no list tokenizer.ggml.{key}; fetch the file again")
    return cast("list[str]", value)


def _byte_level(metadata: Mapping[str, object], tokens: Sequence[str], where: str) -> Tokenizer:
    rule = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "merges", where)]
    vocab = {token: index for index, token in enumerate(tokens)}
    _check_merges(merges, vocab, where)
    pairs = cast("list[tuple[str, str]]", merges)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule in _IGNORE_MERGES)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in _SPLITS)
    if rule in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif rule in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif rule in _GPT2:
        tokenizer.pre_tokenizer = byte_level
    else:
        raise _unsupported(where, f"the pre-tokenizer {rule!r}")
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _check_merges(merges: Sequence[tuple[str, ...]], vocab: Mapping[str, int], where: str) -> None:
    for merge in merges:
        if len(merge) != 2 or any(part not in vocab for part in (*merge, "".join(merge))):
            raise ModelError(
                f"{where}: the merge {' '.join(merge)!r} is not made of tokens; fetch the file "
                "again"
            )


def _sentencepiece(metadata: Mapping[str, object], tokens: Sequence[str], where: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(cast("list[object]", scores)) != len(tokens):
        raise ModelError(
            f"{where} has no tokenizer.ggml.scores for its tokens; fetch the file again"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    index = unknown if type(unknown) is int and 0 <= unknown < len(tokens) else 0
    merges = _merges_of_scores(vocab, cast("list[float]", scores))
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token=tokens[index], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    replace = normalizers.Replace(" ", _SPM_SPACE)
    prepend = [normalizers.Prepend(_SPM_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    back = decoders.Replace(_SPM_SPACE, " ")
    tokenizer.decoder = decoders.Sequence([back, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges_of_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best: every split of a token into two
    tokens, best result first.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(ranked)]


def _add_special(
    tokenizer: Tokenizer, metadata: Mapping[str, object], tokens: Sequence[str]
) -> None:
    value = metadata.get("tokenizer.ggml.token_type")
    types = cast("list[object]", value) if isinstance(value, list) else []
    typed = list(zip(tokens, types, strict=False))
    unknown = {_UNKNOWN} if metadata.get("tokenizer.ggml.model") == "llama" else set[int]()
    special = [token for token, kind in typed if kind == _CONTROL or kind in unknown]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    added = [token for token, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])


def _add_bos(
    tokenizer: Tokenizer, metadata: Mapping[str, object], tokens: Sequence[str], *, default: bool
) -> None:
    index = metadata.get("tokenizer.ggml.bos_token_id")
    wanted = metadata.get("tokenizer.ggml.add_bos_token", default)
    if wanted is not True or type(index) is not int or not 0 <= index < len(tokens):
        return
    bos = tokens[index]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, index)]
    )


def _tokenizer_config(metadata: Mapping[str, object], tokens: Sequence[str]) -> dict[str, object]:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in names.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int and 0 <= index < len(tokens):
            config[name] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config
