"""Each environment variable that infra/ sets is one that some program reads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.unit.infra.files import (
    INFRA,
    ROOT,
    compose,
    dockerfile_stages,
    manifest,
    pods,
    unit_options,
    values_of,
)

BY_IMAGES = {
    "POSTGRES_USER": "the postgres image, at its first start",
    "POSTGRES_DB": "the postgres image, at its first start",
    "POSTGRES_PASSWORD": "the postgres image, at its first start",
    "NVIDIA_VISIBLE_DEVICES": "NVIDIA's container toolkit",
    "NVIDIA_DRIVER_CAPABILITIES": "NVIDIA's container toolkit",
    "PATH": "every shell",
    "HOME": "every program",
    "TZ": "the C library",
    "PYTHONUNBUFFERED": "Python",
    "JOB_NAME": "nightly.sh",
    "DO_NOT_TRACK": "Prefect",
}


def set_by_images() -> Iterator[tuple[str, str]]:
    """Where the Dockerfile and the compose file set a variable, and its name."""
    for stage in dockerfile_stages():
        for line in values_of(stage, "ENV"):
            for pair in shlex.split(line):
                yield f"Dockerfile {stage}", pair.partition("=")[0]
    for name, service in compose()["services"].items():
        for variable in service.get("environment", {}):
            yield f"compose.yaml {name}", variable


def set_variables() -> Iterator[tuple[str, str]]:
    """Where a variable is set, and its name."""
    yield from set_by_images()
    for pod in pods():
        for one in pod.container.get("env", []):
            yield pod.source, one["name"]
    for variable in manifest("secret.example.yaml", "Secret")["stringData"]:
        yield "secret.example.yaml", variable
    for line in unit_options("headrace@.service")["Service", "Environment"]:
        for pair in shlex.split(line):
            yield "headrace@.service", pair.partition("=")[0]


VARIABLES = sorted({name for _, name in set_variables()})


def prefect_settings() -> set[str]:
    from prefect.settings.legacy import _get_valid_setting_names
    from prefect.settings.models.root import Settings
    from prefect_kubernetes.settings import KubernetesSettings

    return {*_get_valid_setting_names(Settings), *_get_valid_setting_names(KubernetesSettings)}


def named_in(package: str, pattern: str) -> set[str]:
    """Names of that form in the sources of an installed package."""
    found: set[str] = set()
    for path in Path(str(resources.files(package))).rglob("*.py"):
        found.update(re.findall(pattern, path.read_text(errors="ignore")))
    return found


def reads_pip(name: str) -> bool:
    """pip reads PIP_NAME for each of its options --name."""
    from pip._internal.commands import create_command

    option = f"--{name.removeprefix('PIP_').lower().replace('_', '-')}"
    return create_command("install").parser.has_option(option)


def is_read(name: str) -> bool:
    if name in BY_IMAGES:
        return True
    kind = name.partition("_")[0]
    match kind:
        case "PREFECT":
            return name in prefect_settings()
        case "AWS":
            return name in named_in("botocore", r"['\"](AWS_[A-Z_]+)['\"]")
        case "HF":
            return name in named_in("huggingface_hub", r"['\"](HF_[A-Z_]+)['\"]")
        case "RAY":
            return name in named_in("ray._common.usage", r"['\"](RAY_[A-Z_]+)['\"]")
        case "PIP":
            return reads_pip(name)
        case "HEADRACE":
            sources = (path for room in ("flows", "storage", "workers", "schedulers")
                       for path in (ROOT / room).rglob("*.py"))  # fmt: skip
            return any(f'"{name}"' in path.read_text() for path in sources)
        case _:
            return False


@pytest.mark.parametrize("name", VARIABLES)
def test_variable_is_read(name: str) -> None:
    where = sorted({place for place, one in set_variables() if one == name})
    assert is_read(name), f"nothing reads {name}, which {', '.join(where)} sets"


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_NO_SUCH",
        "AWS_NO_SUCH",
        "HF_NO_SUCH",
        "PIP_NO_SUCH",
        "RAY_NO_SUCH",
        "HEADRACE_NO_SUCH",
        "X",
    ],
)
def test_variable_that_nobody_reads_is_found(name: str) -> None:
    assert not is_read(name)


def test_example_environment_is_not_the_real_one() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/infra/.env" in ignored
    assert (INFRA / ".env.example").exists()
