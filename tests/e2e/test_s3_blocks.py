"""A job whose S3 credentials are in a Prefect block, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.credentials import storage_options
from flows.errors import SpecError
from flows.runner import run_job
from tests.e2e.cases import make_spec
from tests.e2e.jobs import fake_model, write_dataset
from tests.e2e.test_cli_job import Shell
from tests.services.faults import FaultProxy
from tests.services.seaweed import ADMIN, ROTATED, Keys, SeaweedServer, client

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def block_server() -> Iterator[None]:
    """A Prefect server in a temporary place."""
    pytest.importorskip("prefect_aws")
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The AWS chain of this process finds nothing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")


def save(name: str, keys: Keys, endpoint: str) -> None:
    import prefect_aws

    block: Any = prefect_aws.MinIOCredentials(
        minio_root_user=keys.access,
        minio_root_password=keys.secret,
        region_name="us-east-1",
        aws_client_parameters={"endpoint_url": endpoint},
    )
    block.save(name, overwrite=True, _sync=True)


def test_a_job_runs_with_a_blocks_credentials_and_keeps_them_to_itself(
    block_server: None,
    no_chain: None,
    s3_server: SeaweedServer,
    s3_bucket: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save("dev", ADMIN, s3_server.endpoint)
    source = write_dataset(tmp_path / "in.parquet", 60)
    with client(s3_server.endpoint) as fs:
        fs.put_file(str(source), f"{s3_bucket}/in.parquet")
    output = f"s3://{s3_bucket}/out"
    spec = make_spec(
        tmp_path, input=f"s3://{s3_bucket}/in.parquet", output=output,
        credentials="minio-credentials/dev",
    )  # fmt: skip
    assert run_job(spec, model=fake_model()).complete
    flows = Shell(capsys)
    for command in ("status", "profile", "simulate", "report"):
        assert flows(command, output, "--credentials", "minio-credentials/dev") == 0, flows.err
    assert flows("status", output, "--credentials", "minio-credentials/nobody") == 2
    assert "there is no Prefect block 'minio-credentials/nobody'" in flows.err
    with client(s3_server.endpoint) as fs:
        files = fs.find(f"{s3_bucket}/out")
        holding = [file for file in files if is_told(fs.cat_file(file), ADMIN)]
        assert len(files) > 4 and holding == []


def is_told(data: bytes, keys: Keys) -> bool:
    secrets = (keys.access, keys.secret, "minio-credentials")
    return any(secret.encode() in data for secret in secrets)


def test_c46_a_block_that_was_renewed_is_read_again(
    block_server: None, no_chain: None, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    from storage.objects import ObjectStore

    with FaultProxy(s3_server.endpoint) as proxy:
        save("short", ADMIN, proxy.endpoint)
        url = f"s3://{s3_bucket}/out"
        store = ObjectStore(url, storage_options=storage_options("minio-credentials/short", url))
        store.write("a", b"1")
        save("short", ROTATED, proxy.endpoint)
        proxy.add("expired", times=None, key=ADMIN.access)
        store.write("a", b"2")
        assert store.read("a") == b"2"
        assert proxy.faults["expired"] == 1


def test_a_block_that_is_not_there_is_one_line(block_server: None) -> None:
    with pytest.raises(SpecError, match=r"^there is no Prefect block 'aws-credentials/nobody' on "):
        storage_options("aws-credentials/nobody", "s3://bucket/out")
