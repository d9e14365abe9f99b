"""Text to ids and back as in transformers, chat templates, and stop strings against an oracle."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.workers.loading_models import CHAT_TEMPLATE, byte_tokenizer, write_folder
from tests.unit.workers.tiny_encoders import make_tiny_encoder, write_word_tokenizer
from workers.errors import ModelError
from workers.loading.files import resolve_model
from workers.loading.stops import cut_at_stop, make_find_stop
from workers.loading.tokenizer import Tokenizer, check_text

TEXTS = [
    "hello world",
    "  two  spaces , and . punctuation ! don't",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f600\U0001f468\u200d\U0001f469",
    "line\nline\r\n\ttab 1234567890",
    "<|im_start|>user\nhello<|im_end|>",
    "",
    "\u00a0\u2003\ufeff",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(resolve_model(str(folder)))


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    """The embedded model's tokenizer, ours and as transformers reads it."""
    try:
        files = resolve_model("smollm2")
    except ModelError as fault:
        pytest.skip(f"no embedded model: {fault}")
    transformers = pytest.importorskip("transformers")
    return Tokenizer.load(files), transformers.AutoTokenizer.from_pretrained(files.folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def agree(ours: Tokenizer, theirs: Any) -> None:
    encoded = ours.encode_batch(TEXTS, add_special_tokens=True)
    assert encoded == [theirs(text)["input_ids"] for text in TEXTS]
    decoded = [theirs.decode(ids, skip_special_tokens=True) for ids in encoded]
    assert ours.decode_batch(encoded) == decoded
    assert [ours.decode(ids) for ids in encoded] == decoded
    assert ours.vocab_size == len(theirs)


def test_a_small_model_tokenises_as_in_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    agree(tokenizer, reference)


def test_smollm2_tokenises_as_in_transformers(smollm2: tuple[Tokenizer, Any]) -> None:
    agree(*smollm2)


CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add", [True, False])
def test_smollm2_chats_render_as_in_transformers(
    smollm2: tuple[Tokenizer, Any], messages: list[dict[str, str]], add: bool
) -> None:
    ours, theirs = smollm2
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
    assert ours.render_chat(messages, add_generation_prompt=add) == want


TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n"
    "  {% endif %}\n{% endfor %}",
    "tojson": "{{ messages | tojson(indent=2) }}{{ {'b': '<&>', 'a': '\u00e9'} | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ missing }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "tools": "{% if tools is none %}none{% endif %}{{ documents }}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_render_as_in_transformers(
    kind: str, folder: Path, reference: Any, tmp_path: Path
) -> None:
    ours = with_template(folder, tmp_path, TEMPLATES[kind])
    for messages in CHATS:
        want = reference.apply_chat_template(
            messages, chat_template=TEMPLATES[kind], tokenize=False, add_generation_prompt=True
        )
        assert ours.render_chat(messages) == want


def with_template(
    folder: Path, tmp_path: Path, template: str, *, now: datetime | None = None
) -> Tokenizer:
    copy = write_folder(tmp_path / "copy")
    (copy / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    (copy / "chat_template.jinja").write_text(template)
    files = resolve_model(str(copy))
    return Tokenizer.load(files, now=now) if now else Tokenizer.load(files)


def test_the_date_in_a_prompt_is_the_one_given(folder: Path, tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    fixed = with_template(folder, tmp_path, template)
    assert fixed.render_chat([]) == "26 Jul 2024"
    given_now = with_template(folder, tmp_path, template, now=datetime(2030, 1, 2, tzinfo=UTC))
    assert given_now.render_chat([]) == "02 Jan 2030"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_refuses_is_a_value_error(
    folder: Path, tmp_path: Path, template: str
) -> None:
    tokenizer = with_template(folder, tmp_path, template)
    with pytest.raises(ValueError, match="chat template refuses"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_broken_template_is_a_model_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template"):
        with_template(folder, tmp_path, "{% for %}")


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.load(resolve_model(str(folder))).render_chat([]) == "yes"


def test_chat_template_json_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "own file"}))
    assert Tokenizer.load(resolve_model(str(folder))).render_chat([]) == "own file"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(resolve_model(str(folder)))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_the_end_of_sequence_may_come_from_the_tokenizer(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    folder = write_folder(tmp_path / "model", config=dict(config))
    assert Tokenizer.load(resolve_model(str(folder))).eos_token_ids == {2}


@pytest.mark.parametrize("damage", [b"", b"{}", b"nonsense", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_a_model_error(tmp_path: Path, damage: bytes) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(resolve_model(str(folder)))


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    backend = byte_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(resolve_model(str(folder)))
    (ids,) = tokenizer.encode_batch(["abcdefgh"], add_special_tokens=True)
    assert tokenizer.decode(ids) == "abcdefgh"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc", "\udc80\ud800"])
def test_c17_lone_surrogates_are_value_errors(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", text], add_special_tokens=False)
    with pytest.raises(ValueError, match="lone surrogate"):
        check_text(text)


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_batch(["hello"], add_special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "hello"


# Stop strings. The alphabet holds multi-byte characters, so that tokens end inside of characters.

PIECES = st.sampled_from(["a", "b", "\n", " ", "\u00e9", "\u4f60", "\U0001f600", "hello", " world"])
TEXT = st.lists(PIECES, max_size=12).map("".join)
STOPS = st.lists(
    st.lists(PIECES, min_size=1, max_size=4).map("".join), min_size=1, max_size=3, unique=True
)
BACKEND = byte_tokenizer()


def decode(ids: Any) -> str:
    return BACKEND.decode(list(ids), skip_special_tokens=True)


def finder(stops: tuple[str, ...]) -> Any:
    return make_find_stop(stops, decode=decode, is_hidden=lambda token: token < 3 or token >= 270)


def first_stop(text: str, stops: list[str]) -> str | None:
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(found)[2] if found else None


@settings(max_examples=150, deadline=None)
@given(TEXT, STOPS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=3))
@example("a" * 50 + "\U0001f600", ["\U0001f600"], [(0, 0)])
def test_stops_are_found_as_soon_as_decoding_everything_would(
    text: str, stops: list[str], specials: list[tuple[int, int]]
) -> None:
    ids = BACKEND.encode(text).ids
    for position, special in specials:
        ids.insert(position, special)
    find_stop = finder(tuple(stops))
    for length in range(1, len(ids) + 1):
        want = first_stop(decode(ids[:length]), stops)
        assert find_stop(ids[:length]) == want
        if want is not None:
            return


def test_a_stop_may_be_spread_over_many_byte_tokens() -> None:
    stop = "\U0001f600\u4f60" * 5
    ids = BACKEND.encode("x" * 30 + stop).ids
    assert finder((stop,))(ids) == stop
    assert finder((stop,))(ids[:-1]) is None


def test_many_special_tokens_do_not_hide_a_stop() -> None:
    ids = BACKEND.encode("ab").ids
    assert finder(("ab",))([ids[0], *[1] * 500, ids[1]]) == "ab"


def test_a_stop_that_was_not_honoured_when_new_stays_so() -> None:
    ids = BACKEND.encode("a.b").ids
    find_stop = finder((".",))
    assert [find_stop(ids[:n]) for n in (1, 2, 3)] == [None, ".", None]


def test_the_stop_that_starts_first_wins() -> None:
    ids = BACKEND.encode("hello").ids  # one token holds both
    assert len(ids) == 1
    assert finder(("lo", "el"))(ids) == "el"


def test_a_completion_is_cut_before_its_stop(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_batch(["a.b.hello"], add_special_tokens=False)
    assert tokenizer.text(ids) == "a.b.hello"
    assert tokenizer.text(ids, stop_string="ll") == "a.b.he"
    assert tokenizer.text(ids[:-1], stop_string=".") == "a.b"  # the first one was not honoured


@given(TEXT, STOPS)
def test_cutting_leaves_no_stop(text: str, stops: list[str]) -> None:
    cut = cut_at_stop(text, stops[0])
    assert stops[0] not in cut
    assert cut == text.split(stops[0], maxsplit=1)[0]


def test_the_template_of_the_small_model_is_the_one_rendered(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat([{"role": "user", "content": "hi", "name": None}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert "add_generation_prompt" in CHAT_TEMPLATE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "template", ["[CLS] $A [SEP]", "$A [SEP]", "[CLS] $A", "$A", "[CLS] [CLS] $A [SEP]"]
)
def test_truncation_keeps_special_tokens_as_in_transformers(
    template: str, side: str, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = make_tiny_encoder("bert", tmp_path)
    write_word_tokenizer(folder, truncation_side=side)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    backend = theirs.backend_tokenizer
    ids = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    theirs.save_pretrained(folder)
    ours = Tokenizer.load(resolve_model(str(folder)))
    assert ours.truncation_side == side
    texts = ["", "water", "the water runs down the channel [SEP] to the wheel", "stone " * 40]
    for max_len in range(sum(ours.affixes) + 1, 14):
        got, cut_N = ours.truncate(ours.encode_packed(texts), max_len)
        lists = [run.tolist() for run in np.split(got.token_ids_T, got.ends_N[:-1])]
        assert lists == theirs(texts, truncation=True, max_length=max_len)["input_ids"]
        assert cut_N.tolist() == [len(ids) > max_len for ids in theirs(texts)["input_ids"]]
    with pytest.raises(ValueError, match="no room"):
        ours.truncate(ours.encode_packed(texts), sum(ours.affixes))


def test_packed_ids_are_those_of_the_lists(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.loading.tokenizer.TEXTS_AT_ONCE", 3)
    for texts in (TEXTS, TEXTS[:2], []):
        packed = tokenizer.encode_packed(texts, add_special_tokens=False)
        want = tokenizer.encode_batch(texts, add_special_tokens=False)
        ends = packed.ends_N[:-1] if texts else []
        runs = np.split(packed.token_ids_T, ends) if texts else []
        assert [run.tolist() for run in runs] == want
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_packed(["a", "b\ud83d", "\ude00c"])


def test_texts_may_be_put_in_lower_case_first(folder: Path) -> None:
    lower = Tokenizer.load(resolve_model(str(folder)), lower_case=True)
    plain = Tokenizer.load(resolve_model(str(folder)))
    texts = ["Hello WORLD", "caf\u00c9"]
    want = plain.encode_batch([text.lower() for text in texts], add_special_tokens=False)
    assert lower.encode_batch(texts, add_special_tokens=False) == want
