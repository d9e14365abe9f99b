"""The Dockerfile: linted, and true of this repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from docker.utils.build import PatternMatcher
from packaging.specifiers import SpecifierSet

from tests.unit.infra.files import BIN, INFRA, PROJECT, ROOT, dockerfile_stages, values_of

FINAL = ("cpu", "cuda")
OUTSIDE = {"dev": "tools", "demo": "the same as gguf", "ray": "a part of cluster"}
CONTEXT = {
    "constraints.txt", "LICENSE", "pyproject.toml", "README.md",
    "flows", "schedulers", "storage", "workers",
}  # fmt: skip


def default(name: str) -> str:
    """The default of a build argument, wherever it is declared."""
    declared = [
        one.value.partition("=")[2]
        for stage in dockerfile_stages().values()
        for one in stage
        if one.name == "ARG" and one.value.partition("=")[0] == name
    ]
    return declared[0]


def copied() -> list[str]:
    """Paths of the context that are copied into a stage."""
    lines = [
        one.value.split()
        for stage in dockerfile_stages().values()
        for one in stage
        if one.name == "COPY" and not one.value.startswith("--from")
    ]
    return [source for words in lines for source in words[:-1]]


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path reach the builder; as the Docker client decides it."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return not PatternMatcher(patterns).matches(path)


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [BIN / "hadolint", "--config", INFRA / "hadolint.yaml", INFRA / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", copied())
def test_what_is_copied_is_there_and_reaches_the_builder(path: str) -> None:
    assert (ROOT / path).exists()
    assert in_context(path)


def test_every_room_and_its_data_reach_the_builder() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [
        path.relative_to(ROOT)
        for package, patterns in listed["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    ]
    assert files
    assert [str(path) for path in files if not in_context(str(path))] == []
    assert {package.split(".")[0] for package in listed["packages"]} <= set(copied())


def test_nothing_else_reaches_the_builder() -> None:
    found = {path.name for path in ROOT.iterdir()} | {".env", ".venv", "out", "infra/.env"}
    tops = found - {".dockerignore"}  # which the client itself always sends
    assert {name for name in tops if in_context(name)} == CONTEXT
    assert not in_context("flows/__pycache__/cli.cpython-311.pyc")


def test_python_is_the_one_that_is_checked_and_allowed() -> None:
    version = default("PYTHON_VERSION")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)
    assert version == tools["basedpyright"]["pythonVersion"]


def test_requirements_are_the_projects_and_the_extras(tmp_path: Path) -> None:
    """The step that makes requirements.txt, run here."""
    (step,) = values_of("requirements", "RUN")
    script = step.partition("&&")[0]
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "EXTRAS": default("EXTRAS")}
    subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=30)
    extras = PROJECT["optional-dependencies"]
    groups = [PROJECT["dependencies"], *(extras[name] for name in chosen())]
    every = [one for group in groups for one in group]
    made = (tmp_path / "requirements.txt").read_text().splitlines()
    assert made == [one for one in every if not one.startswith("headrace[")]


def chosen() -> list[str]:
    return default("EXTRAS").split(",")


def test_image_has_every_extra_but_those_of_development() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    assert set(chosen()) == extras.keys() - OUTSIDE.keys()
    for name in chosen():
        inner = re.findall(r"^headrace\[(.*)\]", "\n".join(extras[name]), re.MULTILINE)
        assert {part for parts in inner for part in parts.split(",")} <= set(chosen())


def test_packages_come_from_the_pins_or_from_the_wheel() -> None:
    installs = [
        words
        for stage in dockerfile_stages().values()
        for one in stage
        if one.name == "RUN"
        for words in re.findall(r"\bpip install ([^&]*)", one.value)
    ]
    assert len(installs) >= 6
    free = [
        words
        for words in installs
        if "--constraint constraints.txt" not in words and "--no-index" not in words
    ]
    assert free == []


@pytest.mark.parametrize("stage", FINAL)
def test_image_runs_flows_as_nobody_special_under_an_init(stage: str) -> None:
    instructions = dockerfile_stages()[stage]
    names = [one.name for one in instructions]
    user = names.index("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instructions[user].value)
    assert not {"RUN", "COPY"} & set(names[user:])
    (entrypoint,) = values_of(stage, "ENTRYPOINT")
    assert json.loads(entrypoint) == ["tini", "--", "flows"]
    assert PROJECT["scripts"]["flows"] == "flows.cli:main"
    assert "tini" in shlex.split(values_of("base", "RUN")[0])


def test_both_images_are_of_one_base_and_cpu_is_the_default() -> None:
    stages = dockerfile_stages()
    assert [values_of(stage, "FROM")[0].split()[0] for stage in FINAL] == ["base", "base"]
    assert list(stages)[-1] == "cpu"


def test_login_shells_find_the_programs_too(tmp_path: Path) -> None:
    """Ray and KubeRay start commands in login shells, whose path is not that of ENV."""
    step = values_of("base", "RUN")[0]
    (written,) = re.findall(r"(echo [^&]*) > /etc/profile\.d/\w+\.sh", step)
    done = subprocess.run(
        ["/bin/sh", "-c", f"{written} > line; . ./line; echo $PATH"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=10,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.strip() == "/opt/headrace/bin:/usr/bin:/bin"
    first = next(pair for pair in shlex.split(values_of("base", "ENV")[0]) if pair[:5] == "PATH=")
    assert first == "PATH=/opt/headrace/bin:$PATH"
