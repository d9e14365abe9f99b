"""The manifests and the work pool: valid, confined, and true of this repository."""

from __future__ import annotations

import asyncio
import copy
import re
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import kubernetes_validate
import pytest
from cronsim import CronSim

from flows.cli import USAGE
from flows.specfile import build, read_job
from tests.unit.infra.files import (
    OURS,
    PINS,
    Pod,
    manifest,
    manifests,
    pods,
    run_recorded,
    work_pool,
    work_pool_job,
)

GRACE_S = 60
"""Prefect leaves a flow 30 seconds; the pod must live longer than that."""

SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
DOCUMENTS = [(f"{file} {doc['kind']}", doc) for file, doc in manifests()]
CORE = [one for one in DOCUMENTS if not one[1]["apiVersion"].startswith("ray.io/")]
PODS = pods()


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def walk(value: Any) -> list[Any]:
    """A value and all values inside of it."""
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return [value]
    return [value, *(one for part in inside for one in walk(part))]


@pytest.mark.parametrize("document", [one for _, one in CORE], ids=[name for name, _ in CORE])
def test_manifest_is_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_validation_would_find_a_wrong_name() -> None:
    job = copy.deepcopy(manifest("job.yaml", "Job"))
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


@pytest.mark.parametrize("pod", PODS, ids=str)
def test_pod_is_valid(pod: Pod) -> None:
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec})


@pytest.mark.parametrize("pod", PODS, ids=str)
def test_pod_is_confined_and_has_time_to_commit(pod: Pod) -> None:
    assert pod.spec["terminationGracePeriodSeconds"] >= GRACE_S
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["securityContext"]["runAsUser"] >= 1000
    assert pod.container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in pod.container["resources"]["limits"]
    assert "cpu" in pod.container["resources"]["requests"]


@pytest.mark.parametrize("pod", PODS, ids=str)
def test_mounts_have_volumes_and_the_image_its_places(pod: Pod) -> None:
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.container.get("volumeMounts", [])}
    assert mounts.keys() == volumes
    if pod.container["image"].startswith(OURS):
        assert mounts["shm"] == "/dev/shm"
        assert mounts["cache"] == "/cache"


@pytest.mark.parametrize("pod", PODS, ids=str)
def test_secrets_come_from_the_secret_only(pod: Pod) -> None:
    secret = manifest("secret.example.yaml", "Secret")["metadata"]["name"]
    clear = [one["name"] for one in pod.container.get("env", []) if SECRET.search(one["name"])]
    assert clear == []
    named = {one["secretRef"]["name"] for one in pod.container.get("envFrom", [])}
    assert named == ({secret} if pod.container["image"].startswith(OURS) else set())


def test_example_secret_holds_nothing_secret() -> None:
    values = manifest("secret.example.yaml", "Secret")["stringData"]
    assert {values[name] for name in values if SECRET.search(name)} == {"change-me"}


def test_config_maps_and_namespaces_agree() -> None:
    made = {doc["metadata"]["name"] for _, doc in DOCUMENTS if doc["kind"] == "ConfigMap"}
    used = {
        one["configMap"]["name"]
        for _, doc in DOCUMENTS
        for one in walk(doc)
        if isinstance(one, dict) and "configMap" in one
    }
    assert used == made
    assert {doc["metadata"]["namespace"] for _, doc in DOCUMENTS} == {"headrace"}


@pytest.mark.parametrize("file", ["job.yaml", "nightly.yaml", "rayjob.yaml"])
def test_job_in_the_config_map_is_a_job(file: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(manifest(file, "ConfigMap")["data"]["job.yaml"])
    places = {"input": "s3://bucket/in/", "output": "s3://bucket/out/"}
    data = read_job(job)
    spec = build(data, {} if "input" in data else places)
    assert spec.input.startswith("s3://")
    assert spec.output.startswith("s3://")


def job_specs() -> list[dict[str, Any]]:
    nightly = manifest("nightly.yaml", "CronJob")["spec"]["jobTemplate"]["spec"]
    return [manifest("job.yaml", "Job")["spec"], nightly]


def test_a_usage_error_fails_the_job_and_an_eviction_does_not() -> None:
    for spec in job_specs():
        ignored, failed = spec["podFailurePolicy"]["rules"]
        assert ignored["onPodConditions"] == [{"type": "DisruptionTarget"}]
        assert (ignored["action"], failed["action"]) == ("Ignore", "FailJob")
        assert failed["onExitCodes"]["values"] == [USAGE]
        (container,) = spec["template"]["spec"]["containers"]
        assert failed["onExitCodes"]["containerName"] == container["name"]
        assert spec["backoffLimit"] > 0


# -- the nightly job --


def nightly_day(tmp_path: Path, job_name: str) -> str:
    """The day that the nightly script passes to `flows` for a job of that name."""
    script = manifest("nightly.yaml", "ConfigMap")["data"]["nightly.sh"]
    zone = manifest("nightly.yaml", "CronJob")["spec"]["timeZone"]
    environment = {"JOB_NAME": job_name, "TZ": zone}
    (argv,) = run_recorded(script, tmp_path, ["flows"], environment)
    options = dict(pairwise(argv))
    (day,) = set(re.findall(r"date=([\d-]+)/", " ".join(argv)))
    assert options["run"] == f"s3://bucket/reviews/date={day}/"
    assert options["--output"] == f"s3://bucket/summaries/date={day}/"
    return day


@pytest.mark.parametrize(
    ("scheduled", "day"),
    [
        ("2026-11-30 02:00 Europe/Berlin", "2026-11-30"),
        ("2026-11-30 23:30 Europe/Berlin", "2026-11-30"),
        ("2026-07-01 00:15 Europe/Berlin", "2026-07-01"),
    ],
)
def test_nightly_day_is_the_schedules(scheduled: str, day: str, tmp_path: Path) -> None:
    clock, _, zone = scheduled.rpartition(" ")
    when = datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo(zone))
    assert nightly_day(tmp_path, f"headrace-nightly-{int(when.timestamp()) // 60}") == day


def test_nightly_job_made_by_hand_is_todays(tmp_path: Path) -> None:
    zone = ZoneInfo(manifest("nightly.yaml", "CronJob")["spec"]["timeZone"])
    before = datetime.now(zone).date()
    day = nightly_day(tmp_path, "headrace-nightly-by-hand")
    assert day in {str(before), str(datetime.now(zone).date())}


def test_nightly_schedule_is_one_and_never_overlaps() -> None:
    spec = manifest("nightly.yaml", "CronJob")["spec"]
    start = datetime(2026, 11, 30, tzinfo=ZoneInfo(spec["timeZone"]))
    first, second = (next(CronSim(spec["schedule"], start + timedelta(days=n))) for n in (0, 1))
    assert second - first == timedelta(days=1)
    assert spec["concurrencyPolicy"] == "Forbid"
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one for one in container["env"]}
    assert environment["TZ"]["value"] == spec["timeZone"]


# -- the work pool --


def test_work_pool_placeholders_are_its_variables() -> None:
    template = work_pool()
    texts = [one for one in walk(template["job_configuration"]) if isinstance(one, str)]
    used = {name for text in texts for name in re.findall(r"\{\{ (\w+) \}\}", text)}
    assert used == template["variables"]["properties"].keys()


def test_work_pool_variables_are_described() -> None:
    for name, one in work_pool()["variables"]["properties"].items():
        assert one["title"] and one["description"], name


@pytest.mark.parametrize("gpus", [None, 2])
def test_work_pool_job_has_the_gpus_it_is_given(gpus: int | None) -> None:
    values = {} if gpus is None else {"gpu_limit": gpus}
    (container,) = work_pool_job(**values)["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
    assert container["command"] == ["tini", "--"], "the image's entrypoint is `flows`"


def test_work_pool_job_is_what_prefect_makes_of_it() -> None:
    """Rendered and prepared by Prefect's own Kubernetes worker code, for a flow run."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    values = {"gpu_limit": 1, "env": {"HF_HUB_OFFLINE": "1"}, "image": "registry/headrace:cuda"}
    client = PrefectClient("http://127.0.0.1:9/api")  # never asked: the template names no block
    configuration = asyncio.run(
        KubernetesWorkerJobConfiguration.from_template_and_values(
            work_pool(), values, client=client
        )
    )
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="nightly"))
    job = copy.deepcopy(configuration.job_manifest)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["image"] == "registry/headrace:cuda"
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    assert pod["terminationGracePeriodSeconds"] >= GRACE_S
    for misplaced in ("parallelism", "completions"):
        pod.pop(misplaced)
    validate(job)


def test_prefect_worker_watches_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect_kubernetes.settings import KubernetesObserverSettings

    deployment = manifest("prefect-worker.yaml", "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    role = manifest("prefect-worker.yaml", "Role")
    assert KubernetesObserverSettings().namespaces == {role["metadata"]["namespace"]}
    pool = work_pool()["variables"]["properties"]
    assert pool["namespace"]["default"] == role["metadata"]["namespace"]
    image, _, tag = container["image"].partition(":")
    assert image == "prefecthq/prefect"
    assert tag.split("-")[0] == PINS["prefect"]
    assert tag.endswith("-kubernetes")
    allowed = {(one, verb) for rule in role["rules"] for one in rule["resources"]
               for verb in rule["verbs"]}  # fmt: skip
    assert {("jobs", "create"), ("jobs", "delete"), ("pods/log", "get")} <= allowed


# -- Ray --


def without_job(cluster: dict[str, Any]) -> dict[str, Any]:
    """A Ray cluster without the volume that the job's file comes in."""
    bare = copy.deepcopy(cluster)
    for part in walk(bare):
        for key in ("volumes", "volumeMounts"):
            if isinstance(part, dict) and key in part:
                part[key] = [one for one in part[key] if one["name"] != "job"]
    return bare


def test_ray_job_makes_the_cluster_of_the_other_file() -> None:
    cluster = manifest("raycluster.yaml", "RayCluster")["spec"]
    job = manifest("rayjob.yaml", "RayJob")["spec"]
    assert without_job(job["rayClusterSpec"]) == cluster
    assert job["rayClusterSpec"] != cluster
    assert cluster["rayVersion"] == PINS["ray"]


def test_ray_job_goes_on_after_a_failure_and_cleans_up() -> None:
    job = manifest("rayjob.yaml", "RayJob")["spec"]
    assert job["backoffLimit"] > 0
    assert job["shutdownAfterJobFinishes"] is True


def test_ray_workers_have_a_gpu_each_and_the_head_none() -> None:
    by_name = {pod.source: pod.container["resources"]["limits"] for pod in PODS}
    for file in ("raycluster.yaml", "rayjob.yaml"):
        assert by_name[f"{file} gpu"]["nvidia.com/gpu"] == 1
        assert "nvidia.com/gpu" not in by_name[f"{file} head"]
