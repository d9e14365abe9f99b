"""The Ray cluster file: as Ray reads it, and true of the image."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import yaml

from tests.unit.infra.files import INFRA, image_entrypoint

CLUSTER: dict[str, Any] = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())


def schema() -> dict[str, Any]:
    return json.loads((resources.files("ray.autoscaler") / "ray-schema.json").read_text())


def test_file_meets_rays_schema() -> None:
    jsonschema.validate(CLUSTER, schema())


def test_ray_prepares_it_as_a_cluster_of_machines_that_are_there() -> None:
    """By the code of `ray up`: defaults filled in, node types made of the addresses."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(json.loads(json.dumps(CLUSTER)))
    validate_config(prepared)
    assert prepared["provider"]["worker_ips"] == CLUSTER["provider"]["worker_ips"]
    (kind,) = prepared["available_node_types"].values()
    num_machines = len(CLUSTER["provider"]["worker_ips"])
    assert (kind["min_workers"], kind["max_workers"]) == (num_machines, num_machines)


def test_container_runs_rays_shell_and_not_flows() -> None:
    (entrypoint,) = (
        option.partition("=")[2]
        for option in CLUSTER["docker"]["run_options"]
        if option.startswith("--entrypoint=")
    )
    assert entrypoint == image_entrypoint()[0] == "tini"


def test_head_gives_its_devices_to_nobody() -> None:
    (start,) = (line for line in CLUSTER["head_start_ray_commands"] if line.startswith("ray start"))
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(start.split())
    assert "--gpus=all" in CLUSTER["docker"]["worker_run_options"]
