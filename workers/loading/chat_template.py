"""Renders a model's chat template in a sandbox, with the names and settings that templates are
written for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.errors import ModelError

Message = Mapping[str, object]
"""A chat message: `role`, `content`, and whatever else the template reads."""

DEFAULT_NOW = datetime(2024, 7, 26, tzinfo=UTC)
"""What `strftime_now` shows unless told otherwise: a fixed day, so that a resumed job renders the
same prompts.
"""


class ChatTemplate:
    """A compiled chat template. Immutable."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], now: datetime, where: str
    ) -> None:
        """Compile `source`.

        Raises:
            ModelError: it is no valid template.
        """
        functions = {"raise_exception": _raise_exception, "strftime_now": now.strftime}
        try:
            self._template = _environment().from_string(source, globals=functions)
        except TemplateError as fault:
            raise ModelError(
                f"the chat template of {where} is not valid ({fault}); fetch the model again"
            ) from fault
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The prompt for a conversation.

        Raises:
            ValueError: the template refuses these messages (roles out of order, content missing,
                ...).
        """
        plain = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            return self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError) as fault:
            raise ValueError(f"the model's chat template refuses the messages: {fault}") from fault


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here only
    its content counts.
    """

    tags = {"generation"}  # noqa: RUF012 - an instance variable in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
