"""The S3 server and the Prefect server start as infra/compose.yaml starts them, and keep to it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.services.composed import (
    ComposedPrefect,
    ComposedS3,
    composed_prefect,
    composed_s3,
    health_url,
    running,
)
from tests.services.processes import free_ports
from tests.unit.infra.files import (
    BIN,
    INFRA,
    ROOT,
    command_of,
    compose,
    service_argv,
    work_pool,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PAGE = (INFRA / "README.md").read_text()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedS3]:
    with composed_s3(tmp_path_factory.mktemp("s3")) as server:
        assert server.make_bucket() == 0
        yield server


def files_of(server: ComposedS3, secret: str | None = None):
    import s3fs

    return s3fs.S3FileSystem(
        key=server.key,
        secret=server.secret if secret is None else secret,
        client_kwargs={"endpoint_url": server.endpoint, "region_name": "us-east-1"},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def test_keys_write_read_and_list_the_bucket(s3: ComposedS3) -> None:
    files = files_of(s3)
    large = b"x" * (11 << 20)  # in parts
    with files.open(f"{s3.bucket}/folder/large", "wb", block_size=5 << 20) as file:
        file.write(large)
    files.pipe_file(f"{s3.bucket}/folder/small", b"small")
    assert files.cat_file(f"{s3.bucket}/folder/large") == large
    assert sorted(files.ls(f"{s3.bucket}/folder")) == [
        f"{s3.bucket}/folder/large",
        f"{s3.bucket}/folder/small",
    ]
    files.rm(f"{s3.bucket}/folder", recursive=True)
    assert not files.exists(f"{s3.bucket}/folder/large")


def test_keys_reach_no_other_bucket_and_wrong_ones_none(s3: ComposedS3) -> None:
    with pytest.raises(PermissionError):
        files_of(s3).pipe_file("elsewhere/file", b"x")
    with pytest.raises(PermissionError):
        files_of(s3, secret="wrong").pipe_file(f"{s3.bucket}/file", b"x")


def test_bucket_step_may_run_again(s3: ComposedS3) -> None:
    files_of(s3).pipe_file(f"{s3.bucket}/kept", b"kept")
    assert s3.make_bucket() == 0
    assert files_of(s3).cat_file(f"{s3.bucket}/kept") == b"kept"


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedPrefect]:
    with composed_prefect(tmp_path_factory.mktemp("prefect")) as server:
        yield server


def client_environment(server: ComposedPrefect, folder: Path) -> dict[str, str]:
    own = {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(folder / "home")}
    return {**os.environ, **own}


def test_prefect_server_counts_what_it_is_asked_and_tells_browsers_where(
    prefect: ComposedPrefect,
) -> None:
    before = prefect.calls().get("GET /admin/version", 0)
    assert httpx.get(f"{prefect.api_url}/admin/version").is_success
    assert prefect.calls()["GET /admin/version"] == before + 1
    page = httpx.get(f"{prefect.api_url.removesuffix('/api')}/ui-settings").json()
    assert page["api_url"] == prefect.api_url


def test_server_takes_the_kubernetes_work_pool(prefect: ComposedPrefect, tmp_path: Path) -> None:
    """With the words of infra/README.md."""
    (line,) = re.findall(r"^prefect work-pool create .*$", PAGE, re.MULTILINE)
    done = subprocess.run(
        [BIN / "prefect", *shlex.split(line)[1:]],
        cwd=ROOT, env=client_environment(prefect, tmp_path),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pool = httpx.get(f"{prefect.api_url}/work_pools/headrace").json()
    assert pool["type"] == "kubernetes"
    assert pool["base_job_template"] == work_pool()


def pool_type(server: ComposedPrefect, name: str) -> str:
    """A work pool's type, once there is one: a Prefect worker is healthy before it has made it."""
    deadline_s = time.monotonic() + 90.0
    while (answer := httpx.get(f"{server.api_url}/work_pools/{name}")).is_error:
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.2)
    return answer.json()["type"]


def wait_until_polling(server: ComposedPrefect, pool: str) -> None:
    """Until the pool's Prefect worker has reported three times, so that its loops run: a signal
    that comes while it is still setting itself up is lost now and then.
    """
    deadline_s = time.monotonic() + 90.0
    url = f"{server.api_url}/work_pools/{pool}/workers/filter"
    reports: set[str] = set()
    while len(reports) < 3:
        assert time.monotonic() < deadline_s, reports
        found = httpx.post(url, json={}).raise_for_status().json()
        reports.update(worker["last_heartbeat_time"] for worker in found)
        time.sleep(0.2)


def test_prefect_worker_answers_its_health_check_and_ends_in_time(
    prefect: ComposedPrefect, tmp_path: Path
) -> None:
    service = compose()["services"]["prefect-worker"]
    words = command_of("", service_argv(service)).argv
    (port,) = free_ports(1)
    environment = {
        **client_environment(prefect, tmp_path),
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "1",
    }
    # Another name: `headrace` is the Kubernetes one here.
    argv = [str(BIN / words[0]), *(word.replace("headrace", "processes") for word in words[1:])]
    url = health_url(service, port)
    with running(argv, log=tmp_path / "worker.log", url=url, env=environment) as worker:
        assert pool_type(prefect, "processes") == "process"
        wait_until_polling(prefect, "processes")
        worker.terminate()
        worker.wait(float(service["stop_grace_period"].removesuffix("s")))
