"""Job specs from the outside: YAML files, flat options, and errors in the user's own words."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flows.errors import SpecError
from flows.spec_model import JobSpec


class Option(NamedTuple):
    """A field of the spec as a flat option.

    Attributes:
        group: the nested model's field, or None at the top.
        name: the field's name in its model.
        cli: the option: `--max-tokens`; "PATH" for the argument.
        key: the flat name: `max_tokens`.
    """

    group: str | None
    name: str
    cli: str
    key: str
    info: FieldInfo


@cache
def spec_options() -> tuple[Option, ...]:
    """Every field of the spec, flat, in the order of the model."""
    return tuple(_options())


def _options() -> Iterator[Option]:
    for name, info in JobSpec.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for inner, inner_info in kind.model_fields.items():
                yield _option(name, inner, inner_info)
        else:
            yield _option(None, name, info)


def _option(group: str | None, name: str, info: FieldInfo) -> Option:
    extra = cast("dict[str, Any]", info.json_schema_extra or {})
    cli = str(extra.get("cli", f"--{name.replace('_', '-')}"))
    key = "input" if cli == "PATH" else cli.removeprefix("--").replace("-", "_")
    return Option(group, name, cli, key, info)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Flat options in the spec's shape: `{"top_k": 5}` as `{"sampling": {"top_k": 5}}`."""
    by_key = {option.key: option for option in spec_options()}
    data: dict[str, Any] = {}
    for key, value in flat.items():
        option = by_key[key]
        target = data if option.group is None else data.setdefault(option.group, {})
        target[option.name] = value
    return data


def read_job(path: Path) -> dict[str, Any]:
    """The mapping in a job file, YAML or JSON, not yet validated.

    Raises:
        SpecError: the file is missing or holds no mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise SpecError(f"the job file {path} cannot be read: {fault.strerror}") from fault
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        raise SpecError(f"the job file {path} is no valid YAML: {_one_line(str(fault))}") from fault
    if not isinstance(data, dict):
        raise SpecError(f"the job file {path} must hold a mapping of fields, such as 'input: ...'")
    return cast("dict[str, Any]", data)


def load(path: Path) -> JobSpec:
    """A job spec from a YAML or JSON file, with the fields of `JobSpec`.

    Raises:
        SpecError: the file cannot be read, or says something a job cannot be.
    """
    return build(read_job(path))


def build(data: Mapping[str, Any], flat: Mapping[str, Any] | None = None) -> JobSpec:
    """A spec from a job file's fields, with flat options on top; a schema's file is read into it.

    A prompt source among the options replaces the file's.

    Raises:
        SpecError: what is wrong, in the user's words.
    """
    try:
        spec = JobSpec.model_validate(_merged(data, nested(flat or {})))
    except ValidationError as fault:
        raise SpecError(describe(fault)) from fault
    if isinstance(spec.output_schema, str):
        return spec.model_copy(update={"output_schema": read_schema(spec.output_schema)})
    return spec


def read_schema(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """A JSON schema from an object, a file's path or inline JSON. Not checked to be a schema.

    Raises:
        SpecError: no such file, or no JSON object.
    """
    if not isinstance(given, str):
        return dict(given)
    text = given if given.lstrip().startswith("{") else _schema_text(Path(given))
    try:
        value = json.loads(text)
    except ValueError as fault:
        raise SpecError(f"output_schema {given[:60]!r} is no valid JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise SpecError(f"output_schema {given[:60]!r} must be a JSON object")
    return cast("dict[str, Any]", value)


def _schema_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise SpecError(
            f"output_schema {str(path)!r} cannot be read ({fault}); "
            "give a JSON file or inline JSON that starts with {"
        ) from fault


_SOURCES = frozenset({"template", "column", "messages_column"})


def _merged(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `data`, group by group."""
    merged = dict(data)
    for name, value in over.items():
        below = merged.get(name)
        if name == "prompt" and isinstance(below, str):
            below = {"template": below}
        if isinstance(value, dict) and isinstance(below, dict):
            group = cast("dict[str, Any]", below)
            if name == "prompt" and _SOURCES & value.keys():
                group = {key: item for key, item in group.items() if key not in _SOURCES}
            merged[name] = {**group, **value}
        else:
            merged[name] = value
    return merged


def describe(fault: ValidationError) -> str:
    """A validation error as one line, first fault first."""
    return "; ".join(_describe(item) for item in fault.errors(include_url=False))


def _describe(item: ErrorDetails) -> str:
    path = [str(part) for part in item["loc"]]
    message = item["msg"].removeprefix("Value error, ")
    if not path:
        return message
    if item["type"] == "extra_forbidden":
        return _unknown(path)
    where = _where(path)
    if item["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {_short(item['input'])}: {message[:1].lower()}{message[1:]}"


def _unknown(path: list[str]) -> str:
    known = _known_fields(path[:-1])
    close = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
    return f"{'.'.join(path)} is no field of a job; {hint}"


def _known_fields(path: list[str]) -> list[str]:
    kind: Any = JobSpec
    for part in path:
        kind = kind.model_fields[part].annotation
    return list(kind.model_fields)


def _where(path: list[str]) -> str:
    """`sampling.top_p (--top-p)`."""
    for option in spec_options():
        own = [option.name] if option.group is None else [option.group, option.name]
        if path[: len(own)] == own:
            return f"{'.'.join(own)} ({option.cli})"
    return ".".join(path)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
