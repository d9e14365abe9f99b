"""From a row's values to the text that is tokenised, or to the reason why there is none.

A `PromptRenderer` is made from the spec and the input's schema alone, so unknown columns and bad
templates fail before a model is looked at; `bind` then gives it the model's chat template.
Rendering never raises for a row's values (C17): nulls are skipped rows (C18), everything else that
cannot be a prompt is an error row.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flows.errors import SpecError
from flows.messages import Message, parse_messages, with_system
from flows.spec_model import JobSpec
from flows.templates import MAX_PROMPT_CHARS, RENDER_FAULTS, PromptTemplate
from workers.request import RowError

if TYPE_CHECKING:
    import pyarrow as pa

Side = Literal["left", "right"]


class ChatTokenizer(Protocol):
    """The part of a tokenizer that rendering needs."""

    @property
    def has_chat_template(self) -> bool: ...
    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for a conversation.

        Raises:
            ValueError: the template refuses these messages.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A row's prompt, or why it has none.

    Attributes:
        text: what is tokenised, the chat template applied.
        messages: what the text was made from; a plain prompt is one user message.
        error: set when there is no prompt; `null_prompt` means that the row is skipped.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    error: RowError | None = None


class _Source(Protocol):
    """Where a row's conversation comes from."""

    columns: tuple[str, ...]

    def read(self, values: Mapping[str, Any]) -> tuple[Message, ...] | RowError: ...


class PromptRenderer:
    """Renders rows of one job.

    Args:
        spec: the job.
        schema: of the input, partition columns included.
        tokenizer: the model's; without it, prompts are shown as they are before the chat template.

    Attributes:
        columns: the columns that prompts need, in the order of the input.

    Raises:
        SpecError: a column that the input lacks or that cannot be a prompt, a template that is
            none, or a job that needs a chat template that the model lacks.
    """

    def __init__(
        self, spec: JobSpec, schema: pa.Schema, *, tokenizer: ChatTokenizer | None = None
    ) -> None:
        self._spec = spec
        self._schema = schema
        self._source = _source(spec, schema)
        self._chat = _chat(spec, tokenizer)
        self.columns = self._source.columns

    def bind(self, tokenizer: ChatTokenizer) -> PromptRenderer:
        """The same with a model's chat template.

        Raises:
            SpecError: the job needs a chat template and the model has none.
        """
        return PromptRenderer(self._spec, self._schema, tokenizer=tokenizer)

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its own special tokens: a rendered chat has them already."""
        return self._chat is None

    def render(self, values: Mapping[str, Any]) -> Rendered:
        """A row's prompt. Never raises for what the values are."""
        messages = self._source.read(values)
        if isinstance(messages, RowError):
            return Rendered(error=messages)
        return self._finish(with_system(self._spec.prompt.system, messages))

    def own_text(self, prompt: Rendered) -> str:
        """The text that `shorten` cuts: the last user message; empty when there is none."""
        index = _last_user(prompt.messages)
        return "" if index is None else prompt.messages[index].content

    def shorten(self, prompt: Rendered, *, keep: float, side: Side) -> Rendered | None:
        """The prompt with about `keep` (0 to 1) of the characters of its last user message.

        Args:
            prompt: rendered before.
            keep: share of the characters.
            side: which side is cut off.

        Returns:
            None when there is nothing more to cut, or what is left is no prompt.
        """
        index = _last_user(prompt.messages)
        if index is None:
            return None
        own = prompt.messages[index].content
        count = min(int(len(own) * keep), len(own) - 1)
        if count < 1:
            return None
        cut = own[-count:] if side == "left" else own[:count]
        messages = (
            *prompt.messages[:index],
            Message(prompt.messages[index].role, cut),
            *prompt.messages[index + 1 :],
        )
        shorter = self._finish(messages)
        return None if shorter.error is not None else shorter

    def _finish(self, messages: tuple[Message, ...]) -> Rendered:
        fault = _text_fault(messages)
        if fault is not None:
            return Rendered(error=fault)
        if self._chat is None:
            return Rendered(text=_plain(messages), messages=messages)
        try:
            text = self._chat.render_chat([message.to_dict() for message in messages])
        except ValueError as refused:
            return Rendered(error=RowError("invalid_prompt", str(refused)))
        return Rendered(text=text, messages=messages)


class _TemplateSource:
    """A template over the row's columns. A row whose columns are all null is skipped."""

    def __init__(self, source: str, schema: pa.Schema) -> None:
        self._template = PromptTemplate(source, schema.names)
        for name in self._template.columns:
            check_column(name, schema, "the prompt template")
        _check_braces(source, self._template.columns, schema)
        self.columns = self._template.columns

    def read(self, values: Mapping[str, Any]) -> tuple[Message, ...] | RowError:
        try:
            plain = {name: _plain_value(values.get(name)) for name in self.columns}
            if self.columns and all(value is None for value in plain.values()):
                return _null(self.columns)
            text = self._template.render(plain)
        except RENDER_FAULTS as fault:
            what = str(fault) or type(fault).__name__
            return RowError("invalid_prompt", f"the template fails on this row: {what}")
        return _user(text)


class _ColumnSource:
    """A column that is the prompt."""

    def __init__(self, column: str, schema: pa.Schema) -> None:
        check_column(column, schema, "--prompt-column")
        _check_scalar(column, schema)
        self.columns = (column,)

    def read(self, values: Mapping[str, Any]) -> tuple[Message, ...] | RowError:
        try:
            value = _plain_value(values.get(self.columns[0]))
        except ValueError as fault:
            return RowError("invalid_prompt", str(fault))
        if value is None:
            return _null(self.columns)
        if isinstance(value, dict | list | tuple):
            return RowError("invalid_prompt", f"a {type(value).__name__} is no prompt; text is")
        return _user(str(value))


class _MessagesSource:
    """A column of conversations."""

    def __init__(self, column: str, schema: pa.Schema) -> None:
        check_column(column, schema, "--messages-column")
        _check_messages(column, schema)
        self.columns = (column,)

    def read(self, values: Mapping[str, Any]) -> tuple[Message, ...] | RowError:
        return parse_messages(values.get(self.columns[0]))


def _source(spec: JobSpec, schema: pa.Schema) -> _Source:
    prompt = spec.prompt
    if prompt.template is not None:
        return _TemplateSource(prompt.template, schema)
    if prompt.column is not None:
        return _ColumnSource(prompt.column, schema)
    assert prompt.messages_column is not None  # JobSpec has seen to it that there is one
    return _MessagesSource(prompt.messages_column, schema)


def _chat(spec: JobSpec, tokenizer: ChatTokenizer | None) -> ChatTokenizer | None:
    answers = spec.task == "generate" or bool(spec.encode.choices)
    if tokenizer is None or spec.prompt.raw or not answers:
        return None
    if tokenizer.has_chat_template:
        return tokenizer
    for option, value in (
        ("--messages-column", spec.prompt.messages_column),
        ("--system", spec.prompt.system),
    ):
        if value is not None:
            raise SpecError(
                f"{option} needs a chat template, which the model {spec.model!r} does not have; "
                "use an instruction-tuned model or plain prompts"
            )
    return None


def check_column(name: str, schema: pa.Schema, who: str) -> None:
    """Refuse a column that the input does not have.

    Raises:
        SpecError: with the columns that there are, and the closest one.
    """
    if name in schema.names:
        return
    close = difflib.get_close_matches(name, schema.names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise SpecError(
        f"{who} uses column {name!r}, which the input does not have; "
        f"{hint}Columns: {', '.join(schema.names)}"
    )


def check_columns(spec: JobSpec, schema: pa.Schema) -> None:
    """Refuse id and kept columns that the input does not have.

    Raises:
        SpecError: as `check_column`.
    """
    if spec.id_column is not None:
        check_column(spec.id_column, schema, "--id-column")
    for name in spec.keep_columns:
        check_column(name, schema, "--keep-columns")


def _check_braces(source: str, used: Sequence[str], schema: pa.Schema) -> None:
    """`{text}` where `{{ text }}` was meant would give every row the same prompt."""
    for name in re.findall(r"(?<!\{)\{\s*(\w+)\s*\}(?!\})", source):
        if not used and name in schema.names:
            raise SpecError(
                f"the prompt template uses no column; columns are written {{{{ {name} }}}}, "
                f"not {{{name}}}"
            )


def _check_scalar(column: str, schema: pa.Schema) -> None:
    from pyarrow import types

    kind = schema.field(column).type
    if types.is_nested(kind):
        raise SpecError(
            f"--prompt-column {column!r} is {kind}, which is no text; use --messages-column for "
            "chat messages, or a template"
        )


def _check_messages(column: str, schema: pa.Schema) -> None:
    from pyarrow import types

    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_nested(kind) and not types.is_struct(kind) and not types.is_map(kind):
        return
    if types.is_null(kind) or any(
        check(kind)
        for check in (
            types.is_string, types.is_large_string, types.is_string_view,
            types.is_binary, types.is_large_binary, types.is_binary_view,
        )
    ):  # fmt: skip
        return
    raise SpecError(
        f"--messages-column {column!r} is {kind}; a list of {{role, content}}, or the same as JSON "
        "text, is wanted"
    )


def _plain_value(value: Any) -> Any:
    """Bytes as text and NaN as null.

    Raises:
        ValueError: bytes that are no UTF-8.
    """
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as fault:
            raise ValueError(f"the value is bytes and not UTF-8: {fault}") from fault
    return value


def _null(columns: Sequence[str]) -> RowError:
    return RowError("null_prompt", f"null in {', '.join(columns)}")


def _user(text: str) -> tuple[Message, ...] | RowError:
    if not text.strip():
        return RowError("empty_prompt", "the prompt has no text")
    return (Message("user", text),)


def _plain(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages)


def _last_user(messages: Sequence[Message]) -> int | None:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "user":
            return index
    return None


def _text_fault(messages: Sequence[Message]) -> RowError | None:
    """What is wrong with texts whatever the model: half characters and sheer size."""
    length = sum(len(message.content) for message in messages)
    if length > MAX_PROMPT_CHARS:
        return RowError(
            "prompt_too_long",
            f"the prompt has {length} characters; {MAX_PROMPT_CHARS} are the most",
        )
    for message in messages:
        try:
            message.content.encode("utf-8")
        except UnicodeEncodeError as fault:
            return RowError(
                "invalid_prompt", f"a lone surrogate at character {fault.start} is no text"
            )
    return None
