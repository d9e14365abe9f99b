"""The files of infra/, read, and what they start: programs, pods, images, environment variables."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)
OURS = "headrace"
"""The image that infra/Dockerfile makes, under any tag."""

WRAPPERS = {"exec": 0, "tini": 0, "flock": 1}
"""Programs that start another one, and how many words of theirs come before it, options aside."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program that a file of infra/ starts, without what is wrapped around it."""

    source: str
    argv: tuple[str, ...]

    @property
    def program(self) -> str:
        return Path(self.argv[0]).name

    def __str__(self) -> str:
        return f"{self.source}: {' '.join(self.argv)}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that a manifest makes."""

    source: str
    spec: dict[str, Any]

    def __str__(self) -> str:
        return self.source

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return container


def command_of(source: str, argv: Sequence[str]) -> Command:
    """What `argv` comes down to: `tini -- flows run` is `flows run`."""
    words = list(argv)
    while words and Path(words[0]).name in WRAPPERS:
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            rest = rest[1:]
        words = rest[WRAPPERS[Path(words[0]).name] :]
    return Command(source, tuple(words))


# -- the Dockerfile --


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of the Dockerfile, its lines joined."""

    name: str
    value: str


def dockerfile_stages() -> dict[str, list[Instruction]]:
    """Instructions by stage, in the file's order; those before the first `FROM` under ''."""
    parser = DockerfileParser(fileobj=io.BytesIO((INFRA / "Dockerfile").read_bytes()))
    stages: dict[str, list[Instruction]] = {"": []}
    stage = ""
    for one in parser.structure:
        name, value = one["instruction"].upper(), one["value"]
        if name == "FROM":
            stage = value.split()[-1]
            stages[stage] = []
        if name != "COMMENT":
            stages[stage].append(Instruction(name, value))
    return stages


def values_of(stage: str, name: str) -> list[str]:
    return [one.value for one in dockerfile_stages()[stage] if one.name == name]


def image_entrypoint() -> list[str]:
    """The words that the image puts before a container's own."""
    return json.loads(values_of("cpu", "ENTRYPOINT")[-1])


# -- compose --


def example_environment() -> dict[str, str]:
    """infra/.env.example, as compose reads it."""
    lines = (INFRA / ".env.example").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def expanded(text: str, values: Mapping[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}` and `${NAME:?message}` replaced as compose does."""

    def value(match: re.Match[str]) -> str:
        found = values.get(match["name"], "")
        if not found and match["kind"] == ":?":
            raise KeyError(match["rest"])
        return found or (match["rest"] or "")

    return re.sub(r"\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)


def compose(name: str = "compose.yaml", values: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A compose file with the values of .env.example."""
    values = example_environment() if values is None else values
    return yaml.safe_load(expanded((INFRA / name).read_text(), values))


def service_argv(service: Mapping[str, Any]) -> list[str]:
    """What a service's container runs."""
    ours = service["image"].startswith(OURS)
    entrypoint = service.get("entrypoint", image_entrypoint() if ours else [])
    return [*entrypoint, *service.get("command", [])]


# -- Kubernetes --


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document of infra/kubernetes, with the file it is in."""
    for path in sorted((INFRA / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def manifest(file: str, kind: str) -> dict[str, Any]:
    (found,) = (doc for name, doc in manifests() if name == file and doc["kind"] == kind)
    return found


def work_pool() -> dict[str, Any]:
    return json.loads((INFRA / "kubernetes" / "work-pool.json").read_text())


def work_pool_job(**values: Any) -> dict[str, Any]:
    """The Kubernetes job that Prefect makes of the work pool's template."""
    from prefect.utilities.templating import apply_values

    template = work_pool()
    properties = template["variables"]["properties"]
    known = {name: one["default"] for name, one in properties.items() if "default" in one}
    given = {"name": "flow-run", "labels": {}, "env": {}, "command": "prefect flow-run execute"}
    filled = apply_values(template["job_configuration"], {**given, **known, **values})
    job = filled["job_manifest"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    # As prefect-kubernetes does it when a flow run is prepared.
    container["args"] = shlex.split(container["args"])
    container["env"] = [{"name": name, "value": text} for name, text in container["env"].items()]
    return job


def _templates(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    spec = document.get("spec", {})
    match document["kind"]:
        case "Job" | "Deployment":
            yield "", spec["template"]
        case "CronJob":
            yield "", spec["jobTemplate"]["spec"]["template"]
        case "RayCluster":
            yield from _ray_templates(spec)
        case "RayJob":
            yield from _ray_templates(spec["rayClusterSpec"])
        case _:
            return


def _ray_templates(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield " head", spec["headGroupSpec"]["template"]
    for group in spec["workerGroupSpecs"]:
        yield f" {group['groupName']}", group["template"]


def pods() -> list[Pod]:
    """Every pod of every manifest, and that of the work pool with and without a GPU."""
    found = [
        Pod(f"{file}{part}", template["spec"])
        for file, document in manifests()
        for part, template in _templates(document)
    ]
    for label, values in (("cpu", {}), ("gpu", {"gpu_limit": 1})):
        spec = work_pool_job(**values)["spec"]["template"]["spec"]
        # Prefect's own template has these two in the wrong place, and its worker insists on them.
        spec = {key: spec[key] for key in spec if key not in ("parallelism", "completions")}
        found.append(Pod(f"work-pool.json {label}", spec))
    return found


def pod_argv(pod: Pod) -> list[str]:
    """What a pod's container runs; none for Ray's, whose command is KubeRay's to say."""
    container = pod.container
    if "command" not in container and "args" not in container:
        return []
    ours = container["image"].startswith(OURS)
    command = container.get("command", image_entrypoint() if ours else [])
    return [*command, *container.get("args", [])]


# -- scripts --

RECORDER = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n'; } >> "$RECORD"
case ${0##*/} in
  tini) while [ "${1#-}" != "$1" ]; do shift; done; exec "$@" ;;
esac
"""


def run_recorded(
    script: str, folder: Path, programs: Sequence[str], env: Mapping[str, str] | None = None
) -> list[list[str]]:
    """Run a shell script with programs that only write down how they were called."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in programs:
        stub = stubs / name
        stub.write_text(RECORDER)
        stub.chmod(0o755)
    record = folder / "record"
    record.touch()
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["/bin/sh", "-c", script],
        check=True,
        timeout=30,
        env={**os.environ, "PATH": path, "RECORD": str(record), **(env or {})},
    )
    lines = record.read_text().splitlines()
    return [line.removesuffix("\0").split("\0") for line in lines]


# -- what is started --


def commands() -> list[Command]:
    """Every program that a file of infra/ starts, but those that scripts start."""
    found = [command_of("Dockerfile", [*image_entrypoint(), *_cmd()])]
    for name, service in compose()["services"].items():
        if argv := service_argv(service):
            found.append(command_of(f"compose.yaml {name}", argv))
        if check := service.get("healthcheck"):
            found.append(command_of(f"compose.yaml {name} health", check["test"][1:]))
    found += [command_of(pod.source, argv) for pod in pods() if (argv := pod_argv(pod))]
    entrypoint = manifest("rayjob.yaml", "RayJob")["spec"]["entrypoint"]
    found.append(command_of("rayjob.yaml entrypoint", shlex.split(entrypoint)))
    ray = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    lines = (*ray["head_start_ray_commands"], *ray["worker_start_ray_commands"])
    found += [command_of("ray/cluster.yaml", shlex.split(line)) for line in lines]
    unit = unit_options("headrace@.service")
    found.append(command_of("headrace@.service", shlex.split(unit["Service", "ExecStart"][0])))
    return found


def _cmd() -> list[str]:
    return json.loads(values_of("cpu", "CMD")[-1])


def unit_options(name: str) -> dict[tuple[str, str], list[str]]:
    """A systemd unit's options by (section, name); an option may be there several times."""
    section, options = "", dict[tuple[str, str], list[str]]()
    for line in (INFRA / "systemd" / name).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            options.setdefault((section, key), []).append(value)
    return options
