"""Credentials for `s3://` that a Prefect block holds. Without one, the AWS chain finds them.

The only module that loads blocks. A job names its block (`aws-credentials/prod`); what is in it is
fetched when the job is about to run, and again when it has expired. It is in no record, no
fingerprint and no message. Prefect is imported only when a block is named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from flows.errors import SpecError

BLOCKS: Mapping[str, str] = {
    "aws-credentials": "AwsCredentials",
    "minio-credentials": "MinIOCredentials",
    "s3-bucket": "S3Bucket",
}
"""Types of blocks by the first part of their slug, and their classes in prefect-aws."""
_S3 = ("s3://", "s3a://")


def check_slug(slug: str) -> None:
    """Refuse what can be no block, without asking Prefect.

    Raises:
        ValueError: says what a slug looks like.
    """
    kind, _, name = slug.partition("/")
    if kind not in BLOCKS or not name or "/" in name:
        raise ValueError(f"name a Prefect block as TYPE/NAME; TYPE is one of {', '.join(BLOCKS)}")


def needs_credentials(url: str) -> bool:
    """Whether a URL is on a store that credentials are for."""
    return url.startswith(_S3)


def storage_options(credentials: str | None, url: str) -> dict[str, Any]:
    """fsspec options that give access to a URL.

    Args:
        credentials: slug of a Prefect block, such as `aws-credentials/prod`; None: the AWS chain.
        url: other URLs than S3's need none.

    Raises:
        SpecError: there is no such block, or it cannot be had.
    """
    if credentials is None or not needs_credentials(url):
        return {}
    return {**block_options(credentials), "renew": partial(block_options, credentials)}


def block_options(slug: str) -> dict[str, Any]:
    """s3fs options from a block, as it is now.

    Raises:
        SpecError: there is no such block, or it cannot be had.
    """
    try:
        check_slug(slug)
    except ValueError as fault:
        raise SpecError(f"credentials {slug!r}: {fault}") from fault
    return options_of(_load(slug))


def options_of(block: Any) -> dict[str, Any]:
    """s3fs options from a loaded block of prefect-aws."""
    block = getattr(block, "credentials", block)  # a bucket has its own
    parameters = block.aws_client_parameters
    given = {
        "endpoint_url": parameters.endpoint_url,
        "region_name": block.region_name,
        "use_ssl": parameters.use_ssl,
        "verify": parameters.verify if parameters.verify_cert_path is None else None,
        "api_version": parameters.api_version,
    }
    client = {name: value for name, value in given.items() if value is not None}
    if parameters.verify_cert_path is not None:
        client["verify"] = str(parameters.verify_cert_path)
    return {
        **_identity(block),
        "client_kwargs": client,
        "config_kwargs": dict(parameters.config or {}),
    }


def _identity(block: Any) -> dict[str, Any]:
    """Who asks: keys, or a profile."""
    if hasattr(block, "minio_root_user"):
        secret = block.minio_root_password
        return {"key": block.minio_root_user, "secret": secret.get_secret_value()}
    if block.assume_role_arn:
        return _assumed(block)
    secret = block.aws_secret_access_key
    given = {
        "key": block.aws_access_key_id,
        "secret": None if secret is None else secret.get_secret_value(),
        "token": block.aws_session_token,
        "profile": block.profile_name,
    }
    return {name: value for name, value in given.items() if value is not None}


def _assumed(block: Any) -> dict[str, Any]:
    """Keys of a role for a while: asked for anew when they have expired.

    Raises:
        SpecError: the role is refused, or nobody can be asked.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = block.get_boto3_session().get_credentials().get_frozen_credentials()
    except (BotoCoreError, ClientError) as fault:
        raise SpecError(
            f"the role {block.assume_role_arn!r} of the Prefect block cannot be assumed: {fault}"
        ) from fault
    return {"key": found.access_key, "secret": found.secret_key, "token": found.token}


def _load(slug: str) -> Any:
    # Before prefect is imported; see `prefect_flow.py`.
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        import prefect_aws
    except ImportError as fault:
        raise SpecError(
            f"credentials {slug!r} are a Prefect block for AWS, and {fault.name} is not installed; "
            "pip install 'headrace[blocks]', or leave --credentials out for the AWS chain"
        ) from fault
    import httpx
    from prefect.exceptions import ObjectNotFound, PrefectException

    kind, _, name = slug.partition("/")
    block_class: Any = getattr(prefect_aws, BLOCKS[kind])
    try:
        return block_class.load(name, _sync=True)
    except (ValueError, PrefectException) as fault:
        if isinstance(fault.__cause__, ObjectNotFound):
            raise SpecError(
                f"there is no Prefect block {slug!r} on {_server()}; make it there, or name another"
            ) from fault
        raise SpecError(f"the Prefect block {slug!r} cannot be read: {fault}") from fault
    except (RuntimeError, OSError, httpx.HTTPError) as fault:
        raise SpecError(
            f"the Prefect block {slug!r} cannot be had: {_server()} does not answer ({fault}); "
            "start it, set PREFECT_API_URL, or leave --credentials out for the AWS chain"
        ) from fault


def _server() -> str:
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() or "this machine's own Prefect database"
