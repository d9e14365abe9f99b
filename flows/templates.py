"""Prompt templates: Jinja2 in its sandbox, strict about names, and checked before any row is read.

The sandbox keeps a template from code and files, and the guarded operators and the length limit
keep an accident (`{{ 'a' * 10**9 }}`) from taking the process down: it becomes an error of the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from flows.errors import SpecError

MAX_PROMPT_CHARS = 4_000_000
"""Longest rendered prompt, in characters: more than any model takes."""

MAX_INT_BITS = 4096
ROW = "row"
"""All columns by name, for names that are no identifiers: `{{ row['review text'] }}`."""

RENDER_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What a template may raise for the values of a row."""


class PromptTemplate:
    """A compiled template and the columns that it reads.

    Args:
        source: the template.
        columns: the columns there are.

    Raises:
        SpecError: not a template, or it uses a name that is no column.
    """

    def __init__(self, source: str, columns: Iterable[str]) -> None:
        available = list(columns)
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as fault:
            raise SpecError(
                f"the prompt template is not valid: {fault.message} (line {fault.lineno}); "
                "columns are written {{ column }}"
            ) from fault
        except RENDER_FAULTS as fault:
            raise SpecError(f"the prompt template cannot be compiled: {fault}") from fault
        self.names = meta.find_undeclared_variables(tree)
        self.columns = _columns_read(tree, self.names, available)

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for a row.

        Raises:
            RENDER_FAULTS: the template fails on these values, or its text is too long.
        """
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate({**values, ROW: values.get(ROW, values)}):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_PROMPT_CHARS:
                raise SecurityError(f"the prompt has more than {MAX_PROMPT_CHARS} characters")
        return "".join(pieces)


def _columns_read(tree: nodes.Template, names: set[str], columns: list[str]) -> tuple[str, ...]:
    """The columns a template reads, in the order of the input; unknown names come last."""
    wanted = set(names)
    if ROW in names and ROW not in columns:
        wanted.discard(ROW)
        by_name = _constant_keys(tree)
        wanted |= set(columns) if by_name is None else by_name
    known = [name for name in columns if name in wanted]
    return (*known, *sorted(wanted - set(known)))


def _constant_keys(tree: nodes.Template) -> set[str] | None:
    """The columns taken from `row` by constant names; None when `row` is used in another way."""
    keys: set[str] = set()
    for node in tree.find_all((nodes.Getitem, nodes.Getattr)):
        if not (isinstance(node.node, nodes.Name) and node.node.name == ROW):
            continue
        if isinstance(node, nodes.Getattr):
            keys.add(node.attr)
        elif isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            keys.add(node.arg.value)
        else:
            return None
    uses = sum(node.name == ROW for node in tree.find_all(nodes.Name))
    taken = sum(
        isinstance(node.node, nodes.Name) and node.node.name == ROW
        for node in tree.find_all((nodes.Getitem, nodes.Getattr))
    )
    return keys if uses == taken else None


class _Joins(NodeTransformer):
    """`a ~ b` as `a|string + b|string`, so that the guard on `+` holds for it too."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 - jinja's naming
        parts = [
            nodes.Filter(self.visit(part), "string", [], [], None, None, lineno=node.lineno)
            for part in node.nodes
        ]
        joined: nodes.Expr = parts[0]
        for part in parts[1:]:
            joined = nodes.Add(joined, part, lineno=node.lineno)
        return joined


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses products, powers and sums that are out of all proportion."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        joined = _Joins().visit(tree)
        assert isinstance(joined, nodes.Template)
        return joined

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_PROMPT_CHARS:
            raise SecurityError(f"the result of {operator!r} would be too large")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters, items, or (scaled to the same limit) bits of the result of an operation."""
    if operator == "+":
        return _length(left) + _length(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = abs(right) * left.bit_length() if operator == "**" else (
            left.bit_length() + right.bit_length()
        )  # fmt: skip
        return bits * MAX_PROMPT_CHARS // MAX_INT_BITS
    if operator == "*":
        return max(_length(left) * _count(right), _length(right) * _count(left))
    return 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _finalize(value: Any) -> Any:
    """A null in a template is nothing, never the word None."""
    return "" if value is None else value


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _environment() -> _Environment:
    environment = _Environment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    environment.filters["tojson"] = _tojson
    return environment


_ENVIRONMENT = _environment()
