"""Credentials from Prefect blocks: what is in a block reaches fsspec, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows.credentials import BLOCKS, check_slug, options_of, storage_options
from flows.errors import SpecError
from flows.spec import build, fingerprint

ROOT = Path(__file__).parents[3]
BASE = {"input": "s3://b/in", "prompt": "{{ text }}", "output": "s3://b/out"}


@pytest.mark.parametrize("slug", [f"{kind}/prod" for kind in BLOCKS])
def test_a_block_is_named_by_type_and_name(slug: str) -> None:
    assert build({**BASE, "credentials": slug}).credentials == slug


@pytest.mark.parametrize("slug", ["prod", "aws-credentials/", "slack-webhook/x", "s3-bucket/a/b"])
def test_another_name_is_refused_with_the_types(slug: str) -> None:
    with pytest.raises(ValueError, match="aws-credentials, minio-credentials, s3-bucket"):
        check_slug(slug)
    with pytest.raises(SpecError, match=rf"credentials \(--credentials\) is '{slug}'.*TYPE/NAME"):
        build({**BASE, "credentials": slug})
    with pytest.raises(SpecError, match="TYPE/NAME"):
        storage_options(slug, "s3://b/out")


def test_c31_credentials_for_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match="neither input nor output"):
        build({**BASE, "input": "in", "output": "out", "credentials": "aws-credentials/prod"})


def test_only_s3_urls_are_given_credentials_and_only_when_asked() -> None:
    assert storage_options(None, "s3://b/out") == {}
    assert storage_options("aws-credentials/prod", "out") == {}
    assert storage_options("aws-credentials/prod", "memory://out") == {}


def test_credentials_are_no_part_of_a_jobs_identity() -> None:
    prints = [
        fingerprint(build({**BASE, **given}), input_fingerprint="i", model_fingerprint="m")
        for given in ({}, {"credentials": "aws-credentials/prod"})
    ]
    assert prints[0] == prints[1]


@pytest.fixture
def aws() -> Any:
    pytest.importorskip("prefect_aws")
    import prefect_aws

    return prefect_aws


def test_keys_token_region_and_endpoint_come_from_aws_credentials(aws: Any) -> None:
    block = aws.AwsCredentials(
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        aws_session_token="token",
        region_name="eu-central-1",
        aws_client_parameters={
            "endpoint_url": "http://s3.example:8333",
            "config": {"s3": {"addressing_style": "path"}},
        },
    )
    assert options_of(block) == {
        "key": "key",
        "secret": "secret",
        "token": "token",
        "client_kwargs": {
            "endpoint_url": "http://s3.example:8333",
            "region_name": "eu-central-1",
            "use_ssl": True,
        },
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }


def test_a_block_may_name_a_profile_or_nothing_at_all(aws: Any) -> None:
    given = options_of(aws.AwsCredentials(profile_name="prod"))
    assert given == {"profile": "prod", "client_kwargs": {"use_ssl": True}, "config_kwargs": {}}
    assert options_of(aws.AwsCredentials()) == {
        "client_kwargs": {"use_ssl": True}, "config_kwargs": {},
    }  # fmt: skip


def test_minio_and_buckets_have_theirs(aws: Any) -> None:
    minio = aws.MinIOCredentials(minio_root_user="root", minio_root_password="word")
    given = options_of(minio)
    assert (given["key"], given["secret"]) == ("root", "word")
    bucket = aws.S3Bucket(bucket_name="b", credentials=minio)
    assert options_of(bucket) == given


def test_an_unreachable_prefect_server_is_one_line_before_anything_is_read(tmp_path: Path) -> None:
    pytest.importorskip("prefect_aws")
    command = [
        sys.executable, "-m", "flows.cli", "run", "s3://b/in", "--prompt", "{{ text }}",
        "--output", "s3://b/out", "--credentials", "aws-credentials/prod", "--local",
    ]  # fmt: skip
    environment = {
        **os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "'aws-credentials/prod'" in line and "http://127.0.0.1:9/api does not answer" in line
    assert "Traceback" not in done.stderr


def test_a_missing_prefect_aws_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect_aws", None)
    with pytest.raises(SpecError, match=r"pip install 'headrace\[blocks\]'"):
        storage_options("aws-credentials/prod", "s3://b/out")


ASSUMED = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult>
<Credentials><AccessKeyId>for-a-while</AccessKeyId><SecretAccessKey>hidden</SecretAccessKey>
<SessionToken>ticket</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleResult></AssumeRoleResponse>"""
REFUSED = """<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error>
<Code>AccessDenied</Code><Message>not you</Message></Error></ErrorResponse>"""


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """A token service that gives the answers in the list, each once; keeps what it is asked."""
    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        """Takes any POST."""

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            assert "Action=AssumeRole" in asked
            assert "arn%3Aaws%3Aiam%3A%3A1%3Arole%2Freader" in asked
            status, body = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Nothing on the console."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}")
        yield answers
        server.shutdown()


def test_a_role_of_the_block_is_assumed(aws: Any, sts: list[tuple[int, str]]) -> None:
    block = aws.AwsCredentials(
        aws_access_key_id="k",
        aws_secret_access_key="s",
        region_name="eu-west-1",
        assume_role_arn="arn:aws:iam::1:role/reader",
    )
    sts.append((200, ASSUMED))
    options = options_of(block)
    assert (options["key"], options["secret"], options["token"]) == (
        "for-a-while", "hidden", "ticket",
    )  # fmt: skip
    sts.append((403, REFUSED))
    with pytest.raises(SpecError, match=r"role 'arn:aws:iam::1:role/reader'.*not you"):
        options_of(block)
