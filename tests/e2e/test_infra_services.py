"""The S3 server and the Prefect server start as infra/compose.yaml starts them, and keep to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.composed import ComposedS3, composed_prefect, composed_s3

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


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


def test_prefect_server_starts_and_is_asked(tmp_path: Path) -> None:
    import httpx

    with composed_prefect(tmp_path) as server:
        assert httpx.get(f"{server.api_url}/admin/version").is_success
        assert server.calls() == {"GET /admin/version": 1}
        page = httpx.get(f"{server.api_url.removesuffix('/api')}/ui-settings").json()
        assert page["api_url"] == server.api_url
