"""What S3's refusals mean: try again, renew the credentials, or tell the user.

    transient  the same request may succeed later: 500, 503 SlowDown, timeouts, resets, torn bodies
    expired    it may succeed with newer credentials
    missing    there is no such object; the caller knows what that means
    conflict   the condition of a conditional request does not hold
    unable     the server has no such operation
    permanent  it will never succeed: the user has to mend something

Pure: from an exception to a kind, and to a line for the user.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import aiohttp
from botocore.exceptions import (
    ChecksumError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's own, of which timeouts and refusals are
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)
from botocore.parsers import ResponseParserError

Kind = Literal["transient", "expired", "missing", "conflict", "unable", "permanent"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "BadDigest", "BandwidthLimitExceeded", "ConditionalRequestConflict", "IncompleteBody",
            "InternalError", "OperationAborted", "RequestLimitExceeded", "RequestTimeout",
            "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
            "TooManyRequests", "XAmzContentSHA256Mismatch",
        ),
        "transient",
    ),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"),
        "expired",
    ),
    **dict.fromkeys(("404", "NoSuchKey", "NoSuchUpload", "NoSuchVersion"), "missing"),
    **dict.fromkeys(("412", "PreconditionFailed"), "conflict"),
    **dict.fromkeys(("501", "NotImplemented"), "unable"),
}  # fmt: skip
_BY_STATUS: dict[int, Kind] = {408: "transient", 429: "transient"}

_TRANSIENT = (
    aiohttp.ClientError,
    ChecksumError,
    ConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    OSError,
    ResponseParserError,
)
"""Without an answer of the server: resets, timeouts, bodies that end early. `OSError` is what the
machine's own network says.
"""
_REFUSED = ("403", "AccessDenied", "AccountProblem", "AllAccessDisabled", "Forbidden")
_ACTIONS = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_objects_v2": "s3:ListBucket",
}
OTHER_CREDENTIALS = "check AWS_ACCESS_KEY_ID, AWS_PROFILE or the credentials block"


class Asked(NamedTuple):
    """A request, as far as messages need it.

    Attributes:
        method: botocore's name of the operation.
        bucket: its bucket.
        key: its object or prefix; may be empty.
    """

    method: str
    bucket: str
    key: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def answered(fault: BaseException) -> ClientError | None:
    """The server's answer in an error of botocore, or in what s3fs made of it; None without one."""
    if isinstance(fault, ClientError):
        return fault
    return fault.__cause__ if isinstance(fault.__cause__, ClientError) else None


def code_of(fault: BaseException) -> str:
    """The server's code, such as `AccessDenied` or, without a body to read it from, `403`."""
    error = answered(fault)
    return "" if error is None else str(error.response.get("Error", {}).get("Code", ""))


def kind_of(fault: BaseException) -> Kind:
    """What to do about a failed request; see the module."""
    error = answered(fault)
    if error is None:
        if isinstance(fault, CredentialRetrievalError):
            return "expired"  # their provider may be back in a moment
        lasting = isinstance(fault, SSLError | FileNotFoundError | PermissionError)
        return "transient" if isinstance(fault, _TRANSIENT) and not lasting else "permanent"
    known = _KINDS.get(code_of(fault))
    if known is not None:
        return known
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return _BY_STATUS.get(status, "transient" if status >= 500 else "permanent")


def explain(fault: BaseException, asked: Asked, *, endpoint: str, tried: str = "") -> str:
    """What is wrong and what to do, in a line.

    Args:
        fault: why the request cannot succeed.
        asked: the request.
        endpoint: the server.
        tried: how often and how long, of a fault that was transient.
    """
    return f"{asked.url}: {_reason(fault, asked, endpoint, tried)}"


def _reason(fault: BaseException, asked: Asked, endpoint: str, tried: str) -> str:
    code, kind = code_of(fault), kind_of(fault)
    if kind == "transient":
        return (
            f"{endpoint} did not do it in {tried} (last: {f'{code} {_shown(fault)}'.strip()}); run "
            "the same command again when the server is well"
        )
    if kind == "expired":
        return (
            f"the credentials have expired ({code or _shown(fault)}) and a new session has no "
            "newer ones; renew them and run the same command again"
        )
    if code in _REFUSED:
        action = _ACTIONS.get(asked.method, "s3:PutObject")
        return (
            f"no permission ({code}); allow {action} on the bucket {asked.bucket!r} to these "
            "credentials, or use others"
        )
    return _permanent(fault, code, asked, endpoint)


def _permanent(fault: BaseException, code: str, asked: Asked, endpoint: str) -> str:
    if code == "NoSuchBucket":
        return f"there is no bucket {asked.bucket!r} on {endpoint}; create it, or mend the URL"
    if code == "InvalidAccessKeyId":
        return f"{endpoint} does not know the access key ({code}); {OTHER_CREDENTIALS}"
    if code in ("SignatureDoesNotMatch", "AuthorizationHeaderMalformed"):
        return (
            f"the secret key does not go with the access key ({code}); check "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the credentials block"
        )
    if isinstance(fault, NoCredentialsError | PartialCredentialsError):
        return (
            f"no AWS credentials ({_shown(fault)}); set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or name a Prefect block (--credentials)"
        )
    if code == "InvalidBucketName" or isinstance(fault, ParamValidationError):
        return f"{asked.bucket!r} is no bucket name ({_shown(fault)}); mend the URL"
    if kind_of(fault) == "conflict":
        return "somebody has changed it in the meantime; run the same command again"
    return f"{endpoint} refuses {asked.method} ({code or type(fault).__name__}): {_shown(fault)}"


def _shown(fault: BaseException) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__
