"""Rendering: what a prompt needs is known before any row, and no row's values can break a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from flows.errors import SpecError
from flows.prompts import PromptRenderer
from flows.spec import JobSpec
from flows.templates import MAX_PROMPT_CHARS

TEXTS = pa.schema([("id", pa.int64()), ("title", pa.string()), ("text", pa.string())])
TEXT = pa.string()
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


class Chat:
    """A chat template that shows its messages; refuses what starts with the assistant."""

    has_chat_template = True

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("roles out of order")
        turns = [f"<{message['role']}>{message['content']}" for message in messages]
        return "".join(turns) + "<assistant>"


class NoChat(Chat):
    has_chat_template = False


def template(source: str, schema: pa.Schema = TEXTS, **prompt: Any) -> PromptRenderer:
    spec = JobSpec.model_validate({"input": "in", "prompt": {"template": source, **prompt}})
    return PromptRenderer(spec, schema)


def column(kind: pa.DataType = TEXT) -> PromptRenderer:
    spec = JobSpec.model_validate({"input": "in", "prompt": {"column": "text"}})
    return PromptRenderer(spec, pa.schema([("text", kind)]))


def conversation(kind: pa.DataType = MESSAGES, **prompt: Any) -> PromptRenderer:
    spec = JobSpec.model_validate({"input": "in", "prompt": {"messages_column": "chat", **prompt}})
    return PromptRenderer(spec, pa.schema([("chat", kind)]), tokenizer=Chat())


def error_type(renderer: PromptRenderer, **values: Any) -> str | None:
    rendered = renderer.render(values)
    return None if rendered.error is None else rendered.error.type


def test_template_reads_only_the_columns_it_uses() -> None:
    renderer = template("{{ text }} of {{ id }}{% set x = 1 %}{{ x }}{{ range(2)|list }}")
    assert renderer.columns == ("id", "text")
    assert renderer.render({"id": 7, "text": "T"}).text == "T of 71[0, 1]"


def test_unknown_column_lists_the_columns_and_the_closest() -> None:
    with pytest.raises(SpecError, match=r"'txet'.*did you mean 'text'\? Columns: id, title, text"):
        template("{{ txet }}")


def test_unknown_column_in_a_branch_not_taken_is_found_too() -> None:
    with pytest.raises(SpecError, match="'missing'"):
        template("{% if false %}{{ missing }}{% endif %}{{ text }}")


def test_columns_with_odd_names_are_reached_through_row() -> None:
    schema = pa.schema([("review text", pa.string()), ("other", pa.string())])
    renderer = template("{{ row['review text'] }}", schema)
    assert renderer.columns == ("review text",)
    assert renderer.render({"review text": "good"}).text == "good"
    with pytest.raises(SpecError, match="'review'"):
        template("{{ row['review'] }}", schema)
    assert template("{% for k in row %}{{ k }}{% endfor %}", schema).columns == tuple(schema.names)


def test_single_braces_are_noticed() -> None:
    with pytest.raises(SpecError, match=r"\{\{ text \}\}, not \{text\}"):
        template("Summarise: {text}")
    assert template('Answer as {"text": 1}: {{ text }}').columns == ("text",)


@pytest.mark.parametrize("source", ["{{ text", "{% if %}", "{{ text | nosuchfilter }}"])
def test_invalid_template_fails_before_any_row(source: str) -> None:
    with pytest.raises(SpecError, match="template"):
        template(source)


def test_without_chat_template_the_text_is_bare_and_special_tokens_are_added() -> None:
    renderer = template("{{ text }}").bind(NoChat())
    assert renderer.render({"text": "hello"}).text == "hello"
    assert renderer.add_special_tokens


def test_chat_template_is_the_default_where_there_is_one() -> None:
    renderer = template("{{ text }}", system="Be brief.").bind(Chat())
    assert renderer.render({"text": "hello"}).text == "<system>Be brief.<user>hello<assistant>"
    assert not renderer.add_special_tokens


def test_raw_prompt_leaves_the_chat_template_out() -> None:
    assert template("{{ text }}", raw=True).bind(Chat()).render({"text": "x"}).text == "x"


@pytest.mark.parametrize("prompt", [{"template": "x", "system": "s"}, {"messages_column": "chat"}])
def test_job_that_needs_a_chat_template_refuses_a_model_without(prompt: dict[str, str]) -> None:
    spec = JobSpec.model_validate({"input": "in", "prompt": prompt})
    with pytest.raises(SpecError, match="chat template"):
        PromptRenderer(spec, pa.schema([("chat", MESSAGES)])).bind(NoChat())


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.string(), "plain", "plain"),
        (pa.int64(), 7, "7"),
        (pa.float64(), 0.5, "0.5"),
        (pa.bool_(), True, "True"),
        (pa.binary(), b"caf\xc3\xa9", "caf\u00e9"),
    ],
)
def test_c17_values_that_can_be_a_prompt_are(kind: pa.DataType, value: Any, expected: str) -> None:
    assert column(kind).render({"text": value}).text == expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.string(), None, "null_prompt"),
        (pa.float64(), math.nan, "null_prompt"),
        (pa.string(), "", "empty_prompt"),
        (pa.string(), " \n\t", "empty_prompt"),
        (pa.binary(), b"\xff\xfe", "invalid_prompt"),
        (pa.string(), "half \ud800 pair", "invalid_prompt"),
        (pa.string(), "x" * (MAX_PROMPT_CHARS + 1), "prompt_too_long"),
        (pa.string(), ["a"], "invalid_prompt"),
    ],
    ids=["null", "nan", "empty", "space", "bytes", "surrogate", "huge", "list"],
)
def test_c17_values_that_cannot_be_a_prompt_say_why(
    kind: pa.DataType, value: Any, expected: str
) -> None:
    for renderer in (column(kind), column(kind).bind(Chat())):
        assert error_type(renderer, text=value) == expected


def test_c17_missing_value_is_a_null() -> None:
    assert error_type(column()) == "null_prompt"


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("{{ text.nosuch }}", {"text": "a"}),
        ("{{ 1 // id }}", {"id": 0}),
        ("{{ text + id }}", {"text": "a", "id": 1}),
        ("{{ text }}", {"text": b"\xff"}),
        ("{{ text.__class__.__mro__ }}", {"text": "a"}),
    ],
)
def test_c17_template_that_fails_on_a_row_is_that_rows_error(
    source: str, values: dict[str, Any]
) -> None:
    rendered = template(source).render(values)
    assert rendered.error is not None
    assert rendered.error.type == "invalid_prompt"
    assert rendered.error.message


def test_c17_chat_template_that_refuses_a_row_is_that_rows_error() -> None:
    assert (
        error_type(conversation(), chat=[{"role": "assistant", "content": "hi"}])
        == "invalid_prompt"
    )


def test_c18_null_prompt_is_skipped_and_not_rendered_as_none() -> None:
    renderer = template("{{ title }}: {{ text }}")
    assert error_type(renderer, title=None, text=None) == "null_prompt"
    assert renderer.render({"title": None, "text": "body"}).text == ": body"
    assert error_type(conversation(), chat=None) == "null_prompt"


def repeated(step: str) -> str:
    """A template that grows `n.x` fifty times."""
    loop = f"{{% for i in range(50) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return "{% set n = namespace(x=text) %}" + loop + "{{ n.x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}{{ text }}",
        "{{ text * 1000000000 }}",
        "{{ 10 ** (10 ** 10) }}{{ text }}",
        "{% for i in range(10**9) %}{{ text }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ text }}{% endfor %}{% endfor %}",
        repeated("n.x ~ n.x"),
        repeated("n.x + n.x"),
        repeated("n.x|length * n.x"),
        repeated("7 if n.x is string else n.x * n.x"),
    ],
)
def test_template_bomb_is_a_row_error(source: str) -> None:
    assert error_type(template(source), text="abc") == "invalid_prompt"


def test_joining_keeps_its_meaning_under_the_guard() -> None:
    rendered = template("{{ text ~ '-' ~ id ~ (title is none) }}").render({"text": "a", "id": 3})
    assert rendered.text == "a-3True"


def test_tojson_does_not_escape_for_html() -> None:
    assert template("{{ text | tojson }}").render({"text": "<a> & \u00e9"}).text == '"<a> & \u00e9"'


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (MESSAGES, TURNS),
        (pa.string(), json.dumps(TURNS)),
        (pa.binary(), json.dumps(TURNS).encode()),
        (pa.list_(pa.map_(pa.string(), pa.string())), [list(turn.items()) for turn in TURNS]),
        (pa.string(), json.dumps([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])),
    ],
    ids=["structs", "json", "bytes", "maps", "parts"],
)
def test_messages_of_every_layout_are_read(kind: pa.DataType, value: Any) -> None:
    assert conversation(kind).render({"chat": value}).text.startswith("<user>hi<assistant>")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], "empty_prompt"),
        ([{"role": "user", "content": "  "}], "empty_prompt"),
        ("", "empty_prompt"),
        ("{not json", "invalid_prompt"),
        ('{"role": "user", "content": "x"}', "invalid_prompt"),
        ("[" * 100_000, "invalid_prompt"),
        ('[{"role": "user", "content": "\\ud800"}]', "invalid_prompt"),
        ([{"role": "king", "content": "x"}], "invalid_prompt"),
        ([{"role": None, "content": "x"}], "invalid_prompt"),
        ([{"role": ["user"], "content": "x"}], "invalid_prompt"),
        ([{"role": "user", "content": None}], "invalid_prompt"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "invalid_prompt"),
        ([None], "invalid_prompt"),
        (7, "invalid_prompt"),
        (b"\xff", "invalid_prompt"),
    ],
)
def test_c17_bad_messages_are_the_rows_error(value: Any, expected: str) -> None:
    assert error_type(conversation(), chat=value) == expected


def test_system_message_is_put_first_and_merged_with_the_rows_own() -> None:
    renderer = conversation(system="Job.")
    assert renderer.render({"chat": TURNS}).text.startswith("<system>Job.<user>hi")
    own = [{"role": "system", "content": "Row."}, *TURNS]
    assert renderer.render({"chat": own}).text.startswith("<system>Job.\n\nRow.<user>hi")


def test_c22_column_of_a_type_that_is_no_prompt_fails_before_any_row() -> None:
    with pytest.raises(SpecError, match="--messages-column"):
        column(MESSAGES)
    for kind in (pa.int64(), pa.struct([("role", pa.string())])):
        with pytest.raises(SpecError, match="--messages-column 'chat' is"):
            conversation(kind)


@pytest.mark.parametrize(("side", "expected"), [("left", "56789"), ("right", "01234")])
def test_c15_shortening_cuts_the_rows_text_and_not_the_template(side: Any, expected: str) -> None:
    renderer = template("{{ text }}", system="S").bind(Chat())
    whole = renderer.render({"text": "0123456789"})
    shorter = renderer.shorten(whole, keep=0.5, side=side)
    assert shorter is not None
    assert shorter.text == f"<system>S<user>{expected}<assistant>"


def test_c15_shortening_ends() -> None:
    renderer = template("{{ text }}")
    prompt = renderer.render({"text": "a b c d"})
    for _ in range(20):
        shorter = renderer.shorten(prompt, keep=0.99, side="right")
        if shorter is None:
            break
        assert len(shorter.text) < len(prompt.text)
        prompt = shorter
    else:
        pytest.fail("never ends")
