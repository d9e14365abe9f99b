"""Rows to packed texts, against a way that handles one row at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.busy import BusyTimes
from flows.feeder import PromptTooLong
from flows.fleet.messages import Assign
from flows.model import Model
from flows.prompts import PromptRenderer
from flows.spec import JobSpec
from flows.texts import TextMaker, Texts
from storage.rows import Row
from storage.shards import Shard
from tests.e2e.jobs import WordTokenizer
from workers.encoding import PackedTexts

SCHEMA = pa.schema([("text", pa.string())])
BEGIN, END = 1001, 1002


class Framed(WordTokenizer):
    """A token a word, between two special ones."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        plain = super().encode_batch(texts, add_special_tokens=False)
        return [[BEGIN, *ids, END] for ids in plain] if add_special_tokens else plain

    def truncate(self, texts: PackedTexts, max_len: int, *, side: str | None = None) -> Any:
        if max_len <= 2:
            raise ValueError("no room between the special tokens")
        (ids,) = unpack(texts)
        own = ids[1:-1]
        kept = own[-(max_len - 2) :] if side == "left" else own[: max_len - 2]
        return PackedTexts.from_lists([[BEGIN, *kept, END]]), np.array([True])


class Pairs(WordTokenizer):
    """Two characters a token, from the left: what follows a text of odd length joins its last."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [[hash_pair(text[n : n + 2]) for n in range(0, len(text), 2)] for text in texts]


class Chat(Pairs):
    has_chat_template = True

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        return f"<u>{messages[-1]['content']}</u>"


def hash_pair(pair: str) -> int:
    return sum(ord(letter) * 256**place for place, letter in enumerate(pair))


def unpack(texts: PackedTexts) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(texts.token_ids_T, texts.ends_N)[:-1]]


def make(
    values: Sequence[str | None],
    *,
    tokenizer: WordTokenizer | None = None,
    max_len: int = 8,
    rows_a_batch: int = 3,
    prefix: str = "",
    pools_prefix: bool = True,
    **fields: Any,
) -> Texts:
    tokenizer = tokenizer or Framed()
    spec = JobSpec.model_validate(
        {"input": "in.parquet", "task": "embed", "prompt": {"column": "text"}, **fields}
    )
    rows = [Row(n, f"r{n}", {"text": value}) for n, value in enumerate(values)]
    starts = range(0, len(rows), rows_a_batch)
    maker = TextMaker(
        spec=spec,
        read=lambda _: iter([rows[start : start + rows_a_batch] for start in starts]),
        renderer=PromptRenderer(spec, SCHEMA).bind(tokenizer),
        tokenizer=tokenizer,
        model=Model(
            fingerprint="m", generation_config={}, load_tokenizer=lambda: tokenizer,
            load_backend=lambda: pytest.fail("the model was loaded"),
            text_prefix=prefix, pools_prefix=pools_prefix,
        ),
        max_len=max_len,
        meter=BusyTimes(clock=time.monotonic).meter("feeder"),
    )  # fmt: skip
    return maker(Assign(Shard(0, (), 0), np.arange(len(rows))))


def encode(text: str) -> list[int]:
    return Framed().encode_batch([text], add_special_tokens=True)[0]


def fault_of(value: str | None, on_too_long: str, max_len: int) -> tuple[str, str] | None:
    if value is None:
        return "skipped", "null_prompt"
    if not value.strip():
        return "error", "empty_prompt"
    if on_too_long == "error" and len(value.split()) + 2 > max_len:
        return "error", "prompt_too_long"
    return None


def framed_oracle(value: str, on_too_long: str, max_len: int) -> list[int]:
    words = value.split()
    kept = words[-(max_len - 2) :] if on_too_long == "truncate_left" else words[: max_len - 2]
    return encode(" ".join(kept))


TEXT = st.one_of(
    st.none(),
    st.sampled_from(["", " ", "\n\t "]),
    st.lists(st.sampled_from(["red", "stone", "wheel"]), min_size=1, max_size=14).map(" ".join),
)


@given(
    values=st.lists(TEXT, max_size=12),
    on_too_long=st.sampled_from(["error", "truncate_left", "truncate_right"]),
    rows_a_batch=st.integers(1, 5),
    max_len=st.integers(3, 10),
)
def test_rows_become_what_each_would_by_itself(values, on_too_long, rows_a_batch, max_len) -> None:
    texts = make(values, on_too_long=on_too_long, rows_a_batch=rows_a_batch, max_len=max_len)
    faults = [fault_of(value, on_too_long, max_len) for value in values]
    found = {n: (fault.status, fault.error.type) for n, fault in texts.faults.items()}
    assert found == {n: fault for n, fault in enumerate(faults) if fault}
    good = [n for n, fault in enumerate(faults) if fault is None]
    assert texts.where.tolist() == good
    wanted = [framed_oracle(values[n], on_too_long, max_len) for n in good]
    assert unpack(texts.packed) == wanted
    assert texts.row_ids == [f"r{n}" for n in range(len(values))]
    lengths = dict(zip(good, map(len, wanted), strict=True))
    assert texts.num_tokens.tolist() == [lengths.get(n, 0) for n in range(len(values))]
    assert texts.truncated.tolist() == [
        n in lengths and len(value.split()) + 2 > max_len for n, value in enumerate(values)
    ]
    assert texts.packed.first_N is None


def test_a_text_that_is_too_long_fails_the_job_where_it_should() -> None:
    with pytest.raises(PromptTooLong, match=r"row r1: the text has 9 tokens; the model takes 8"):
        make(["one", "a b c d e f g"], on_too_long="fail")
    assert not make(["a b c d e f"], on_too_long="fail").faults


def test_texts_without_tokens_are_error_rows() -> None:
    texts = make(["\u200b"], tokenizer=Silent())
    assert texts.faults[0].error.type == "empty_prompt"
    assert len(texts.packed) == 0


class Silent(WordTokenizer):
    """Knows no word."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [[] for _ in texts]


# -- prompts of the model's own --


@pytest.mark.parametrize("pools_prefix", [True, False])
def test_the_models_own_prompt_is_before_each_text(pools_prefix) -> None:
    texts = make(["a b", None, "c"], prefix="search query: ", pools_prefix=pools_prefix)
    assert unpack(texts.packed) == [encode("search query: a b"), encode("search query: c")]
    first = texts.packed.first_N
    if pools_prefix:
        assert first is None
    else:  # special one, search, query:
        assert first is not None
        assert first.tolist() == [3, 3]
    assert texts.num_tokens.tolist() == [6, 0, 5]


@pytest.mark.parametrize("pools_prefix", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cutting_keeps_the_models_own_prompt(side, pools_prefix) -> None:
    texts = make(
        ["a b c d e f"], prefix="search query: ", pools_prefix=pools_prefix, max_len=7,
        on_too_long=f"truncate_{side}",
    )  # fmt: skip
    kept = "d e f" if side == "left" else "a b c"
    assert unpack(texts.packed) == [encode(f"search query: {kept}")]
    assert texts.truncated.tolist() == [True]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_len", [2, 3, 4])
def test_a_prompt_that_leaves_no_room_is_an_error_row(side, max_len) -> None:
    texts = make(
        ["a b c"], prefix="search query: ", pools_prefix=False, max_len=max_len,
        on_too_long=f"truncate_{side}",
    )  # fmt: skip
    assert texts.faults[0].error.type == "prompt_too_long"


def test_a_text_that_adds_nothing_to_the_prompt_has_no_tokens() -> None:
    class Bare(WordTokenizer):
        def encode_batch(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
            kept = [text.replace("\u200b", "") for text in texts]
            return super().encode_batch(kept, **options)

    texts = make(["\u200b"], prefix="query: ", pools_prefix=False, tokenizer=Bare())
    assert texts.faults[0].error.type == "empty_prompt"


# -- choices --

CHOICES = ["good", "bad", "it is neither"]


def chosen(values: Sequence[str | None], tokenizer: WordTokenizer, **fields: Any) -> Texts:
    return make(
        values, tokenizer=tokenizer, task="classify", encode={"choices": CHOICES},
        model="some-model", **{"max_len": 100, **fields},
    )  # fmt: skip


def behind(tokenizer: WordTokenizer, text: str, choice: str) -> list[int]:
    """As the tokenizer joins them; by themselves where that changes the text's own tokens."""
    own, whole, alone = tokenizer.encode_batch(
        [text, text + choice, choice], add_special_tokens=False
    )
    return whole if whole[: len(own)] == own else own + alone


@pytest.mark.parametrize("tokenizer", [Pairs(), Chat(), WordTokenizer()])
def test_choices_are_joined_as_the_tokenizer_would_unless_they_merge(tokenizer) -> None:
    values = ["even", "odd", None, "abc d"]
    texts = chosen(values, tokenizer)
    given_ = [value for value in values if value is not None]
    glue = "" if tokenizer.has_chat_template else " "
    shown = [f"<u>{v}</u>" if tokenizer.has_chat_template else v for v in given_]
    wanted = [behind(tokenizer, text, glue + choice) for text in shown for choice in CHOICES]
    assert unpack(texts.packed) == wanted
    own = [len(tokenizer.encode_batch([t], add_special_tokens=False)[0]) for t in shown]
    assert texts.packed.first_N is not None
    assert texts.packed.first_N.tolist() == [n for n in own for _ in CHOICES]
    assert texts.where.tolist() == [0, 1, 3]
    assert texts.texts_a_row == 3
    assert [texts.num_tokens[n] for n in (0, 1, 3)] == own


def test_some_texts_do_merge_with_choices_and_some_do_not() -> None:
    """Or the test above would say less than it seems to."""
    for text, merges in (("even", False), ("odd", True)):
        own, whole = Pairs().encode_batch([text, text + " good"], add_special_tokens=False)
        assert (whole[: len(own)] != own) == merges


@pytest.mark.parametrize("tokenizer", [Pairs(), Chat()])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_are_cut_until_the_longest_choice_fits(tokenizer, side) -> None:
    text = "".join(chr(97 + n % 26) for n in range(301))
    texts = chosen([text, "ok"], tokenizer, max_len=40, on_too_long=f"truncate_{side}")
    assert not texts.faults
    assert texts.truncated.tolist() == [True, False]
    lengths = texts.packed.lengths_N.reshape(2, 3)
    assert 30 < lengths[0].max() <= 40
    assert texts.packed.first_N is not None
    answers = lengths[0] - texts.packed.first_N[:3]
    assert answers.min() > 0  # no choice was cut


@pytest.mark.parametrize("tokenizer", [Pairs(), Chat(), Framed()])
@pytest.mark.parametrize("policy", ["error", "truncate_left", "truncate_right"])
@pytest.mark.parametrize("max_len", [1, 2, 3, 4])
def test_choices_longer_than_the_model_make_error_rows(tokenizer, policy, max_len) -> None:
    texts = chosen(["some text", None], tokenizer, max_len=max_len, on_too_long=policy)
    assert texts.faults[0].error.type == "prompt_too_long"
    assert texts.faults[1].error.type == "null_prompt"
    assert len(texts.packed) == 0


# -- what is finished --


def test_a_row_is_finished_when_all_its_texts_are() -> None:
    texts = chosen(["one", None, "two", ""], WordTokenizer())
    nothing = np.zeros(6, dtype=np.bool_)
    assert texts.rows_done(nothing).tolist() == [False, True, False, True]
    for text in range(6):
        most = ~nothing
        most[text] = False
        wanted = [text >= 3, True, text < 3, True]
        assert texts.rows_done(most).tolist() == wanted
    assert texts.rows_done(~nothing).all()
    assert make([None]).rows_done(np.zeros(0, dtype=np.bool_)).tolist() == [True]
