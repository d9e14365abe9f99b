"""The CLI's options, made from the spec: one field, one option, so the two cannot drift apart."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined

from flows.specfile import Option, spec_options

Command = Callable[..., None]


def with_spec_options(function: Command) -> Command:
    """A command with one option for each field of the spec, before its own.

    `function` takes what was given, by key, as its first argument `flat`; what was not given is not
    in it, so that a job file's value or the default holds.
    """
    return _with_options(function, spec_options())


def with_some_spec_options(*keys: str) -> Callable[[Command], Command]:
    """As `with_spec_options`, with the options of these keys only."""
    options = tuple(option for option in spec_options() if option.key in keys)
    return lambda function: _with_options(function, options)


def _with_options(function: Command, options: tuple[Option, ...]) -> Command:
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    def command(**values: Any) -> None:
        given = {option.key: values.pop(option.key) for option in options}
        flat = {key: value for key, value in given.items() if value not in (None, [], ())}
        for key in ("keep_columns", "partition_by"):
            if key in flat:
                flat[key] = _split(flat[key])
        function(flat, **values)

    parameters = [*map(_parameter, options), *own]
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    command.__dict__["__signature__"] = inspect.Signature(
        [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    )
    return command


def _split(columns: list[str]) -> list[str]:
    """`a,b` or repeated options; a column whose name has a comma is given in a job file."""
    return [name.strip() for item in columns for name in item.split(",") if name.strip()]


def _parameter(option: Option) -> inspect.Parameter:
    """An option that is None unless given; its help tells the default."""
    kind = _cli_type(option.info.annotation)
    if option.cli == "PATH":
        declared = typer.Argument(help=option.info.description, metavar="PATH")
    elif kind is bool:
        off = f"--no-{option.cli.removeprefix('--')}"
        declared = typer.Option(f"{option.cli}/{off}", help=_help(option))
    else:
        declared = typer.Option(option.cli, help=_help(option))
    return inspect.Parameter(
        option.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, declared],
    )


def _help(option: Option) -> str:
    default = option.info.default
    if default in (None, "", (), PydanticUndefined):
        return str(option.info.description)
    shown = (
        {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    )
    return f"{option.info.description} [default: {shown}]"


def _cli_type(annotation: Any) -> Any:
    """What the command line can hold of a field's type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _cli_type(get_args(annotation)[0])
    if origin is Literal:
        return annotation
    if origin in (Union, types.UnionType):
        kinds = [_cli_type(kind) for kind in get_args(annotation) if kind is not type(None)]
        return kinds[-1]
    if origin is tuple:
        return list[_cli_type(get_args(annotation)[0])]
    return annotation
