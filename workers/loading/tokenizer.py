"""Text to token ids and back, chat templates and stop strings, over the library `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from workers.encoding import PackedTexts
from workers.errors import ModelError
from workers.loading.chat_template import DEFAULT_NOW, ChatTemplate, Message
from workers.loading.folder import ModelFiles, token_ids
from workers.loading.jsonfile import read_optional_json
from workers.loading.stops import cut_at_stop, make_find_stop

_SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
TruncationSide = Literal["left", "right"]
TEXTS_AT_ONCE = 8192
"""Texts whose encodings, which are large, are alive together in `encode_packed`."""

_CLEAN_UPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Affixes(NamedTuple):
    """Special tokens that the tokenizer puts around a text."""

    num_before: int
    num_behind: int


class Truncated(NamedTuple):
    """Texts of a bounded length, and which of them were longer."""

    texts: PackedTexts
    cut_N: NDArray[np.bool_]


class Tokenizer:
    """The tokenizer of one model. Immutable; its methods may be called from several threads.

    Attributes:
        vocab_size: number of tokens, added ones included. A model's embedding may have more rows.
        eos_token_ids: ids that end a completion, from generation_config, else config, else
            tokenizer_config.
        affixes: special tokens that are put around a text.
        truncation_side: which end of a text that is too long is cut off.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
        clean_up: bool,
        truncation_side: TruncationSide = "right",
    ) -> None:
        self._backend = backend
        self.affixes = _affixes(backend)
        self.truncation_side: TruncationSide = truncation_side
        self._chat_template = chat_template
        self._clean_up = clean_up
        added = backend.get_added_tokens_decoder()
        self._hidden_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(
        cls, files: ModelFiles, *, now: datetime = DEFAULT_NOW, lower_case: bool = False
    ) -> Tokenizer:
        """Read the tokenizer of a model.

        Args:
            files: the model.
            now: the time that chat templates see; fixed by default, so that prompts do not change
                from day to day.
            lower_case: texts are put in lower case before all else (`SentenceConfig.lower_case`).

        Raises:
            ModelError: tokenizer.json or the chat template is damaged.
        """
        backend = _load_backend(files.folder / "tokenizer.json")
        if lower_case:
            old = backend.normalizer
            backend.normalizer = NormalizerSequence([Lowercase(), *([] if old is None else [old])])
        wanted_for = "the tokenizer's settings"
        config = read_optional_json(files.folder / "tokenizer_config.json", wanted_for=wanted_for)
        mapped = read_optional_json(files.folder / "special_tokens_map.json", wanted_for=wanted_for)
        special_tokens = _special_tokens({**mapped, **config})
        source = _template_source(files.folder, config)
        return cls(
            backend,
            eos_token_ids=files.eos_token_ids or _eos_of(backend, special_tokens),
            special_tokens=special_tokens,
            chat_template=None
            if source is None
            else ChatTemplate(
                source, special_tokens=special_tokens, now=now, where=str(files.folder)
            ),
            clean_up=_cleans_up(backend, config),
            truncation_side="left" if config.get("truncation_side") == "left" else "right",
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, in order. Uses several threads.

        Args:
            texts: any number of texts.
            add_special_tokens: add what the tokenizer puts around a text (a bos id, say). Rendered
                chats have it already.

        Raises:
            ValueError: a text holds a lone surrogate, so it is no Unicode text; see `check_text` to
                find which.
        """
        check_texts(texts)
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def encode_packed(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> PackedTexts:
        """As `encode_batch`, packed: a few bytes a token instead of a list of numbers.

        Raises:
            ValueError: as `encode_batch`.
        """
        parts = [
            PackedTexts.from_lists(
                self.encode_batch(
                    texts[first : first + TEXTS_AT_ONCE], add_special_tokens=add_special_tokens
                )
            )
            for first in range(0, len(texts), TEXTS_AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else PackedTexts.concatenate(parts)

    def truncate(self, texts: PackedTexts, max_len: int, *, side: str | None = None) -> Truncated:
        """Cut texts that were encoded with special tokens to a number of tokens. The special ones
        are kept, and what lies between them is cut, as transformers does.

        Args:
            texts: as `encode_packed` gives them.
            max_len: most tokens of a text, special ones included.
            side: "left" or "right", which is cut off; None: `truncation_side`.

        Raises:
            ValueError: there is no room for a token between the special ones.
        """
        before, behind = self.affixes
        if max_len <= before + behind:
            raise ValueError(
                f"texts of {max_len} tokens have no room for more than the tokenizer's "
                f"{before + behind} special ones; allow longer texts"
            )
        lengths_N = texts.lengths_N
        cut_N = lengths_N > max_len
        if not cut_N.any():
            return Truncated(texts, cut_N)
        head = before if (side or self.truncation_side) == "left" else max_len - behind
        tail = max_len - head
        position_T = np.arange(texts.num_tokens) - np.repeat(texts.begins_N, lengths_N)
        from_end_T = np.repeat(lengths_N, lengths_N) - position_T
        kept_T = (position_T < head) | (from_end_T <= tail)
        ends_N = np.minimum(lengths_N, max_len).cumsum()
        return Truncated(PackedTexts(texts.token_ids_T[kept_T], ends_N, texts.first_N), cut_N)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out. Bytes that are no UTF-8 become U+FFFD."""
        return self._cleaned(self._backend.decode(list(ids), skip_special_tokens=True))

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """As `decode`, for many. Uses several threads."""
        texts = self._backend.decode_batch([list(ids) for ids in batch], skip_special_tokens=True)
        return [self._cleaned(text) for text in texts]

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for a conversation, by the model's chat template. Encode it without special
        tokens.

        Raises:
            ValueError: the model has no chat template, or it refuses these messages.
        """
        if self._chat_template is None:
            raise ValueError(
                "the model has no chat template; give plain prompts, or an instruction-tuned model"
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def find_stop(self, stops: tuple[str, ...]) -> Callable[[list[int]], str | None]:
        """A function to be called with the generated ids after each new token: the stop string that
        it completed, if any.

        The function has no state, so sequences may share it. Its cost depends on the longest stop
        string, not on the text.
        """
        return make_find_stop(stops, decode=self.decode, is_hidden=self._is_hidden)

    def text(self, ids: Sequence[int], *, stop_string: str | None = None) -> str:
        """The text of a completion, cut before the stop string that its last token completed."""
        whole = self.decode(ids)
        if stop_string is None:
            return whole
        return cut_at_stop(whole, stop_string, before=self.decode(ids[:-1]))

    def to_json(self) -> str:
        """The tokenizer in the tokenizer.json format, for libraries that bring their own."""
        return self._backend.to_str()

    def _is_hidden(self, token_id: int) -> bool:
        """True of ids that have no text."""
        return token_id in self._hidden_ids or not 0 <= token_id < self.vocab_size

    def _cleaned(self, text: str) -> str:
        if self._clean_up:
            for old, new in _CLEAN_UPS:
                text = text.replace(old, new)
        return text


def check_text(text: str) -> None:
    """Refuse what no tokenizer can take.

    Raises:
        ValueError: lone surrogates (half a UTF-16 pair, from a broken conversion).
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        found = ord(text[fault.start])
        raise ValueError(
            f"the text holds a lone surrogate (U+{found:04X} at character {fault.start}), so it is "
            "no valid Unicode; "
            "repair the text"
        ) from None


def check_texts(texts: Sequence[str]) -> None:
    """As `check_text`, for many at little cost.

    Raises:
        ValueError: one of them holds a lone surrogate.
    """
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        for text in texts:
            check_text(text)


def _affixes(backend: tokenizers.Tokenizer) -> Affixes:
    """How many special tokens stand before and behind a text: seen around a letter."""
    count = backend.num_special_tokens_to_add(is_pair=False)
    mask = backend.encode("a", add_special_tokens=True).special_tokens_mask
    before = mask.index(0) if 0 in mask else 0
    return Affixes(min(before, count), count - min(before, count))


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        data = path.read_bytes()
        backend = tokenizers.Tokenizer.from_buffer(data)
    except OSError as fault:
        raise ModelError(f"{path} cannot be read ({fault}); copy the model again") from fault
    except Exception as fault:
        raise ModelError(f"{path} is no valid tokenizer ({fault}); copy the model again") from fault
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_of(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> frozenset[int]:
    eos = special_tokens.get("eos_token")
    return token_ids(backend.token_to_id(eos) if eos is not None else None)


def _template_source(folder: Path, config: Mapping[str, object]) -> str | None:
    """The chat template: chat_template.jinja, else chat_template.json, else the one in
    tokenizer_config.json.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise ModelError(f"{path} cannot be read ({fault}); copy the model again") from fault
    own = read_optional_json(folder / "chat_template.json", wanted_for="the chat template")
    return _named_template(own.get("chat_template") or config.get("chat_template"))


def _named_template(value: object) -> str | None:
    """A template, or the one named "default" of a list of {name, template}."""
    if isinstance(value, str):
        return value
    for item in cast("list[object]", value) if isinstance(value, list) else []:
        entry = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        template = entry.get("template")
        if entry.get("name") == "default" and isinstance(template, str):
            return template
    return None


def _cleans_up(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> bool:
    """Whether decoded text loses spaces before punctuation: as in transformers, where asked for and
    the model is not BPE.
    """
    if config.get("clean_up_tokenization_spaces") is not True:
        return False
    model = cast("dict[str, dict[str, object]]", json.loads(backend.to_str()))["model"]
    return model.get("type") != "BPE"
