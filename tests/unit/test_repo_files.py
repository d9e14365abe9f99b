"""What the repository promises beside its code: pins, the sample, the README's commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer.main

from flows.cli import app

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "flows" / "samples" / "debian_packages.parquet"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = (ROOT / "constraints.txt").read_text().splitlines()


def normal(requirement: str) -> str:
    """The distribution's name as registries write it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def fenced_lines(page: Path) -> Iterator[str]:
    """The lines of a page's code blocks, with continued lines joined."""
    blocks = page.read_text().split("```")[1::2]
    return chain.from_iterable(block.replace("\\\n", " ").splitlines() for block in blocks)


def flows_commands() -> list[list[str]]:
    lines = (line.strip().removeprefix("$ ") for line in fenced_lines(ROOT / "README.md"))
    return [
        shlex.split(line, comments=True)
        for line in lines
        if re.match(r"(\.venv/bin/)?flows ", line)
    ]


def make_targets() -> set[str]:
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    return set(phony[1].split())


def test_every_dependency_is_pinned() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = {normal(requirement) for requirement in chain.from_iterable(groups)} - {"headrace"}
    assert wanted - {normal(pin) for pin in PINS if not pin.startswith("#")} == set()


def test_constraints_are_exact_versions_and_nothing_else() -> None:
    pins = [pin for pin in PINS if not pin.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", pin)] == []


def test_sample_is_small_and_has_text_in_every_row() -> None:
    table = pq.read_table(SAMPLE)
    assert table.column_names == ["package", "section", "description"]
    assert table.num_rows == 300
    assert len(set(table["package"].to_pylist())) == 300
    assert all(text.strip() for text in table["description"].to_pylist())
    assert SAMPLE.stat().st_size < 300 * 1024


def test_readme_shows_flows_commands() -> None:
    assert {command[1] for command in flows_commands()} >= {"run", "plan", "status"}


@pytest.mark.parametrize("command", flows_commands(), ids=" ".join)
def test_readme_commands_exist_with_their_options(command: list[str]) -> None:
    subcommand = typer.main.get_group(app).commands[command[1]]
    known = {name for parameter in subcommand.params for name in parameter.opts}
    used = {word.partition("=")[0] for word in command[2:] if word.startswith("--")}
    assert used - known == set()


def test_readme_make_targets_exist() -> None:
    lines = [line.split() for line in fenced_lines(ROOT / "README.md")]
    used = {words[1] for words in lines if words[:1] == ["make"]}
    assert {"demo", "test"} <= used <= make_targets()


def test_readme_map_names_every_room() -> None:
    page = (ROOT / "README.md").read_text()
    missing = [
        f"{room}/"
        for room in ("flows", "workers", "schedulers", "storage")
        if f"{room}/" not in page
    ]
    assert missing == []
