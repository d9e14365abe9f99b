"""The four import names are generic, so they are guarded: ours, all of ours, only ours."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("flows", "schedulers", "storage", "workers")


@pytest.mark.parametrize("name", ROOMS)
def test_name_resolves_into_our_tree(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin) == ROOT / name / "__init__.py"


@pytest.mark.parametrize("name", ROOMS)
def test_no_other_distribution_ships_the_name(name: str) -> None:
    assert set(metadata.packages_distributions().get(name, [])) == {"headrace"}


def test_package_list_is_complete() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inits = (path for room in ROOMS for path in (ROOT / room).rglob("__init__.py"))
    assert listed == sorted(str(path.parent.relative_to(ROOT)).replace("/", ".") for path in inits)


def test_every_python_file_is_in_a_listed_package() -> None:
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    assert [path for path in files if not (path.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", ROOMS)
def test_room_says_that_it_is_typed(name: str) -> None:
    assert (ROOT / name / "py.typed").exists()


def test_every_data_file_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    found = {path for room in ROOMS for path in (ROOT / room).rglob("*") if is_data(path)}
    assert found == packaged


def is_data(path: Path) -> bool:
    """A file that the code reads: neither code, nor compiled code, nor a design page."""
    return path.is_file() and path.suffix not in {".py", ".pyc"} and path.name != "README.md"


def test_no_module_of_flows_is_named_like_a_room_or_a_standard_module() -> None:
    names = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    names |= {path.parent.name for path in (ROOT / "flows").glob("*/__init__.py")}
    assert names.isdisjoint({*ROOMS, *sys.stdlib_module_names})
