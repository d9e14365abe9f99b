"""Each program that infra/ starts takes the words it is given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.infra.files import (
    INFRA,
    ROOT,
    Command,
    command_of,
    commands,
    compose,
    manifest,
    run_recorded,
    unit_options,
)
from tests.unit.infra.programs import accept

COMMANDS = commands()


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_is_accepted(command: Command) -> None:
    accept(command.argv)


def test_programs_that_matter_are_among_them() -> None:
    assert {command.program for command in COMMANDS} >= {"flows", "prefect", "ray", "server"}


@pytest.mark.parametrize(
    "argv",
    [
        ["flows", "run", "in.parquet", "--no-such-option", "x"],
        ["flows", "run", "in.parquet", "--max-tokens", "many"],
        ["prefect", "worker", "start", "--no-such-option"],
        ["prefect", "no-such-command"],
        ["ray", "start", "--no-such-option"],
        ["weed", "server", "-no.such.option=1"],
    ],
    ids=" ".join,
)
def test_wrong_words_are_not_accepted(argv: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no.such|integer"):
        accept(argv)


def scripts() -> Iterator[tuple[str, str, list[str]]]:
    """Shell scripts of infra/, and the programs to be written down."""
    bucket = compose()["services"]["s3-bucket"]
    yield "s3-bucket", bucket["command"][0], ["weed", "grep"]
    nightly = manifest("nightly.yaml", "ConfigMap")["data"]["nightly.sh"]
    yield "nightly.sh", f"JOB_NAME=headrace-nightly-29412345\n{nightly}", ["flows"]
    (start,) = unit_options("headrace-nightly.service")["Service", "ExecStart"]
    yield "headrace-nightly.service", start.replace("%%", "%"), ["systemctl"]


SCRIPTS = list(scripts())


@pytest.mark.parametrize(("name", "script", "programs"), SCRIPTS, ids=[one[0] for one in SCRIPTS])
def test_scripts_run_programs_that_accept_them(
    name: str, script: str, programs: list[str], tmp_path: Path
) -> None:
    ran = run_recorded(script, tmp_path, programs)
    assert {argv[0] for argv in ran} == set(programs)
    for argv in ran:
        if argv[0] in ("weed", "flows"):
            accept(argv)


# -- the page --


def page_lines() -> list[str]:
    """Lines of the page's code blocks, with continued lines joined."""
    blocks = (INFRA / "README.md").read_text().split("```")[1::2]
    joined = "".join(block.partition("\n")[2].replace("\\\n", " ") for block in blocks)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


PAGE = [command_of("README.md", shlex.split(line, comments=True)) for line in page_lines()]


@pytest.mark.parametrize(
    "command", [one for one in PAGE if one.program in ("flows", "prefect", "ray")], ids=str
)
def test_pages_command_is_accepted(command: Command) -> None:
    accept(command.argv)


def test_page_shows_commands_of_each_kind() -> None:
    programs = {one.program for one in PAGE}
    assert programs >= {"docker", "flows", "kubectl", "prefect", "ray", "systemctl"}


def test_files_that_the_page_names_are_there() -> None:
    text = (INFRA / "README.md").read_text()
    named = set(re.findall(r"\binfra/[\w./@-]*\w", text))
    made = {"infra/.env"}
    missing = [path for path in named - made if not (ROOT / path).exists()]
    assert named
    assert missing == []


def test_page_names_every_file() -> None:
    text = (INFRA / "README.md").read_text()
    files = [path for path in INFRA.rglob("*") if path.is_file() and path.name != "README.md"]
    unnamed = [path.name for path in files if path.name not in text]
    assert unnamed == []


def test_page_uses_services_and_targets_that_there_are() -> None:
    services: dict[str, Any] = compose()["services"]
    for command in PAGE:
        words = list(command.argv)
        if "compose" in words and "run" in words:
            names = [word for word in words[words.index("run") + 1 :] if not word.startswith("-")]
            assert names[0] in services, command
        if "--target" in words:
            assert words[words.index("--target") + 1] in ("cpu", "cuda"), command
