"""Whether a program would take its words: asked of its own parser, without running it."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable, Sequence

import click

from tests.unit.infra.files import BIN


def accept(argv: Sequence[str]) -> None:
    """Returns when the program takes these words.

    Raises:
        Exception: the parser's own complaint.
        KeyError: a program that nothing is known of.
    """
    PARSERS[argv[0].rpartition("/")[2]](list(argv[1:]))


def accept_flows(words: list[str]) -> None:
    import typer.main

    from flows.cli import app

    group = typer.main.get_group(app)
    if words == ["--help"]:
        return
    command = group.commands.get(words[0])
    assert command is not None, f"flows has no command {words[0]}"
    command.make_context(words[0], words[1:])


def accept_prefect(words: list[str]) -> None:
    from prefect.cli._app import _app

    _app.parse_args(words, exit_on_error=False, print_error=False)


def accept_ray(words: list[str]) -> None:
    from ray.scripts.scripts import cli

    command: click.Command = cli
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(str(command.name), list(words))


@functools.cache
def weed_options(command: str) -> frozenset[str]:
    """The options that `weed COMMAND` says it has."""
    done = subprocess.run(
        [BIN / "weed", "help", command], capture_output=True, text=True, timeout=60, check=False
    )
    return frozenset(re.findall(r"^\s+-([\w.]+)", done.stdout + done.stderr, re.MULTILINE))


def accept_weed(words: list[str]) -> None:
    known = weed_options(words[0])
    assert known, f"weed has no command {words[0]}"
    used = {word.lstrip("-").partition("=")[0] for word in words[1:] if word.startswith("-")}
    assert used <= known, used - known


def accept_python(words: list[str]) -> None:
    assert words[0] == "-c"
    compile(words[1], "<health>", "exec")


def accept_anything(words: list[str]) -> None:
    """System programs with a word or two, looked at by other tests or by eye."""
    del words


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "flows": accept_flows,
    "prefect": accept_prefect,
    "ray": accept_ray,
    "weed": accept_weed,
    "server": lambda words: accept_weed(["server", *words]),  # by the image's entrypoint
    "python": accept_python,
    "pg_isready": accept_anything,
    "wget": accept_anything,
    "sh": accept_anything,
}
