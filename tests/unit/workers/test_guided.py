"""Structured output: bad schemas fail early, whitespace is limited, nothing is repaired."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.workers.loading_models import write_folder
from workers.errors import InternalError, ModelError
from workers.guided import check_json_schema, compile_json_schema, validate_output
from workers.loading.files import resolve_model
from workers.loading.tokenizer import Tokenizer
from workers.request import Matcher

pytest.importorskip("llguidance")

EOS = 2
PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_folder(tmp_path_factory.mktemp("guided") / "model")
    return Tokenizer.load(resolve_model(str(folder)))


VOCAB = 300  # wider than the tokenizer, as padded embeddings are


def allowed(matcher: Matcher, *, rows: int = 1, row: int = 0) -> set[int]:
    mask = torch.zeros((rows, -(-VOCAB // 32)), dtype=torch.int32)
    matcher.fill_mask(mask, row)
    bits = (mask[row][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.flatten().nonzero().flatten().tolist())


def random_answer(matcher: Matcher, rng: random.Random) -> list[int]:
    """Follow the masks at random to the end of the grammar."""
    ids: list[int] = []
    while not matcher.terminated:
        choice = rng.choice(sorted(allowed(matcher)))
        matcher.accept(choice)
        ids.append(choice)
    return ids


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_masks_allow_meets_the_schema(tokenizer: Tokenizer, seed: int) -> None:
    grammar = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB)
    ids = random_answer(grammar.matcher(), random.Random(seed))
    text = tokenizer.decode(ids)
    assert validate_output(text, PERSON) is None
    assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text


def test_no_id_beyond_the_tokenizer_is_allowed(tokenizer: Tokenizer) -> None:
    grammar = compile_json_schema({"type": "string"}, tokenizer, vocab_size=VOCAB)
    matcher = grammar.matcher()
    for _ in range(5):
        ids = allowed(matcher)
        assert max(ids) < tokenizer.vocab_size
        matcher.accept(min(ids - {EOS}))


def test_a_mask_is_written_to_its_row_only(tokenizer: Tokenizer) -> None:
    matcher = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB).matcher()
    mask = torch.full((3, -(-VOCAB // 32)), 7, dtype=torch.int32)
    matcher.fill_mask(mask, 1)
    assert mask[0].tolist() == mask[2].tolist() == [7] * mask.shape[1]
    assert mask[1].tolist() != mask[0].tolist()


def test_samples_of_one_grammar_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    grammar = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB)
    first, second = grammar.matcher(), grammar.matcher()
    before = allowed(second)
    random_answer(first, random.Random(0))
    assert allowed(second) == before


def test_a_value_that_could_go_on_ends_by_end_of_sequence(tokenizer: Tokenizer) -> None:
    matcher = compile_json_schema({"type": "integer"}, tokenizer, vocab_size=VOCAB).matcher()
    (ids,) = tokenizer.encode_batch(["42"], add_special_tokens=False)
    for token in ids:
        assert EOS not in allowed(matcher) or token != ids[0]
        matcher.accept(token)
    assert not matcher.terminated
    assert EOS in allowed(matcher)
    matcher.accept(EOS)
    assert matcher.terminated


def test_a_token_against_the_grammar_is_a_bug_of_ours(tokenizer: Tokenizer) -> None:
    matcher = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB).matcher()
    (ids,) = tokenizer.encode_batch(["x"], add_special_tokens=False)
    with pytest.raises(InternalError, match="grammar"):
        matcher.accept(ids[0])


@pytest.mark.parametrize(
    "mask", [torch.zeros((1, 10)), torch.zeros((10, 2), dtype=torch.int32).T, 3]
)
def test_a_mask_of_another_kind_is_refused(tokenizer: Tokenizer, mask: object) -> None:
    matcher = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB).matcher()
    with pytest.raises(InternalError, match="mask"):
        matcher.fill_mask(mask, 0)


def test_a_schema_is_compiled_once(tokenizer: Tokenizer) -> None:
    first = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB)
    assert compile_json_schema(dict(PERSON), tokenizer, vocab_size=VOCAB) is first
    assert compile_json_schema(json.dumps(PERSON), tokenizer, vocab_size=VOCAB) is first
    assert compile_json_schema({"type": "null"}, tokenizer, vocab_size=VOCAB) is not first


def test_the_order_of_properties_is_the_order_of_the_answer(tokenizer: Tokenizer) -> None:
    def starts_with(names: tuple[str, str]) -> str:
        schema: dict[str, object] = {
            "type": "object",
            "properties": {name: {"const": 1} for name in names},
            "required": list(names),
            "additionalProperties": False,
        }
        matcher = compile_json_schema(schema, tokenizer, vocab_size=VOCAB).matcher()
        return tokenizer.decode(random_answer(matcher, random.Random(0)))

    assert starts_with(("a", "b")) == '{"a": 1, "b": 1}'
    assert starts_with(("b", "a")) == '{"b": 1, "a": 1}'


BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "not valid JSON"),
    "cut text": ('{"type": "obj', "not valid JSON"),
    "empty object": ({}, "empty"),
    "list": ("[]", "is an object"),
    "true": ("true", "is an object"),
    "unknown type": ({"type": "text"}, "not valid at"),
    "properties of a list": ({"properties": []}, "not valid at"),
    "bad pattern": ({"type": "string", "pattern": "("}, "schema"),
    "unsupported keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "unsupported not": ({"not": {"type": "string"}}, "not"),
    "unknown format": ({"type": "string", "format": "shoe-size"}, "shoe-size"),
    "remote reference": ({"$ref": "http://127.0.0.1:9/x.json"}, "cannot be used"),
    "dangling reference": ({"$ref": "#/$defs/gone"}, "gone"),
    "no value fits": ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    "deep nesting": ('{"not":' * 50_000, "not valid JSON"),
}


@pytest.mark.parametrize("kind", BAD_SCHEMAS)
def test_c22_a_bad_schema_fails_before_any_model(kind: str) -> None:
    schema, message = BAD_SCHEMAS[kind]
    with pytest.raises(ValueError, match=message):
        check_json_schema(schema)


@pytest.mark.parametrize("kind", BAD_SCHEMAS)
def test_c22_a_bad_schema_leaves_the_compiler_usable(tokenizer: Tokenizer, kind: str) -> None:
    schema, message = BAD_SCHEMAS[kind]
    with pytest.raises(ValueError, match=message):
        compile_json_schema(schema, tokenizer, vocab_size=VOCAB)
    assert compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB).matcher()


def test_c22_a_good_schema_passes_unchanged() -> None:
    assert check_json_schema(PERSON) == PERSON
    assert check_json_schema(json.dumps(PERSON)) == PERSON


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.split(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModelError, match=r"headrace\[guided\]"):
        check_json_schema(PERSON)


@pytest.mark.parametrize("seed", range(5))
def test_c23_between_values_no_second_whitespace_may_follow(
    tokenizer: Tokenizer, seed: int
) -> None:
    schema: dict[str, object] = {
        "type": "array",
        "items": {"enum": [1, True, None]},
        "minItems": 3,
        "maxItems": 5,
    }
    matcher = compile_json_schema(schema, tokenizer, vocab_size=VOCAB).matcher()
    rng = random.Random(seed)
    text = ""
    while not matcher.terminated:
        options = {token: tokenizer.decode([token]) for token in allowed(matcher)}
        if text.endswith(" "):
            assert not [option for option in options.values() if option[:1].isspace()]
        token = rng.choice(sorted(options))
        matcher.accept(token)
        text += options[token]
    assert text == json.dumps(json.loads(text))


@pytest.mark.parametrize(
    "text", ['{ "name"', '{"name":  "x"', '{"name": "x" ,', "\n{", '{"name":"x"']
)
def test_c23_other_whitespace_is_refused(tokenizer: Tokenizer, text: str) -> None:
    matcher = compile_json_schema(PERSON, tokenizer, vocab_size=VOCAB).matcher()
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert not all(_accepts(matcher, token) for token in ids)


def _accepts(matcher: Matcher, token: int) -> bool:
    if token not in allowed(matcher):
        return False
    matcher.accept(token)
    return True


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36, "tags": ["a"',
        '{"name": "Ada", "age": 36',
        '{"name": "Ada',
        "{",
        "",
    ],
)
def test_c24_truncated_json_is_never_valid(text: str) -> None:
    fault = validate_output(text, PERSON)
    assert fault is not None
    assert "not valid JSON" in fault


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"name": "Ada", "age": 36}', "tags"),
        ('{"name": "Ada", "age": "36", "tags": []}', r"$.age"),
        ('{"name": "Ada", "age": 36, "tags": [], "more": 1}', "more"),
        ('{"name": "Ada", "age": NaN, "tags": []}', "NaN"),
        ('{"name": "Ada", "age": 36, "tags": []} and so on', "Extra data"),
        ('```json\n{"name": "Ada", "age": 36, "tags": []}\n```', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_c24_what_breaks_the_schema_is_named(text: str, where: str) -> None:
    fault = validate_output(text, PERSON)
    assert fault is not None
    assert where in fault


def test_c24_a_valid_answer_passes() -> None:
    assert validate_output('{"name": "Ada", "age": 36, "tags": ["a"]}', PERSON) is None
    assert validate_output(' {"name":"Ada","age":36,\n"tags":[]} ', json.dumps(PERSON)) is None


def test_validation_fetches_nothing(tmp_path: Path) -> None:
    schema: dict[str, object] = {"$ref": f"file://{tmp_path}/x.json"}
    (tmp_path / "x.json").write_text('{"type": "string"}')
    with pytest.raises(ValueError, match="cannot be used"):
        check_json_schema(schema)
