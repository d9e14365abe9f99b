"""Chat messages from a column: list<struct<role, content>>, list<map>, or the same as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from workers.request import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str

    def to_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


class BadMessages(ValueError):
    """A conversation cannot be used; the message says which part and why."""


def parse_messages(value: Any) -> tuple[Message, ...] | RowError:
    """The conversation in a cell. Never raises: what cannot be read becomes the row's error."""
    if value is None:
        return RowError("null_prompt", "the messages are null")
    try:
        messages = tuple(
            _message(index, item) for index, item in enumerate(_items(_decoded(value)))
        )
    except BadMessages as fault:
        return RowError("invalid_prompt", str(fault))
    if not any(message.content.strip() for message in messages if message.role != "system"):
        return RowError("empty_prompt", "the messages have no text")
    return messages


def with_system(system: str | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The job's system message put before the conversation; merged with one it starts with."""
    if system is None:
        return tuple(messages)
    if messages and messages[0].role == "system":
        merged = Message("system", f"{system}\n\n{messages[0].content}")
        return (merged, *messages[1:])
    return (Message("system", system), *messages)


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as fault:
            raise BadMessages(f"the messages are bytes and not UTF-8: {fault}") from fault
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as fault:
        raise BadMessages(f"the messages are no valid JSON: {fault}") from fault


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadMessages(f"the messages are {_kind(value)}; a list of {{role, content}} is wanted")
    items = cast("list[Any]", value)
    if len(items) > MAX_MESSAGES:
        raise BadMessages(f"there are {len(items)} messages; {MAX_MESSAGES} are the most")
    return items


def _message(index: int, item: Any) -> Message:
    fields = _fields(index, item)
    role = fields.get("role")
    if role not in ROLES:
        raise BadMessages(f"message {index} has role {role!r}; roles are {', '.join(ROLES)}")
    return Message(role, _content(index, fields.get("content")))


def _fields(index: int, item: Any) -> Mapping[str, Any]:
    """The fields of a struct (a dict) or of a map (pairs)."""
    if isinstance(item, dict):
        return cast("dict[str, Any]", item)
    if isinstance(item, list):
        pairs = cast("list[Any]", item)
        if all(
            isinstance(pair, tuple) and len(cast("tuple[Any, ...]", pair)) == 2 for pair in pairs
        ):
            return dict(cast("list[tuple[str, Any]]", pairs))
    raise BadMessages(f"message {index} is {_kind(item)}; {{role, content}} is wanted")


def _content(index: int, content: Any) -> str:
    """Plain text, or the texts of typed parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(index, part) for part in cast("list[Any]", content))
    raise BadMessages(f"message {index} has {_kind(content)} as content; text is wanted")


def _part(index: int, part: Any) -> str:
    if isinstance(part, dict):
        text = cast("dict[str, Any]", part).get("text")
        if isinstance(text, str):
            return text
    raise BadMessages(f"message {index} has a content part without text; only text is understood")


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
