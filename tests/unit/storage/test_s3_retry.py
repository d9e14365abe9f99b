"""The one rule for S3 requests, without a server: what is repeated, how long, and what is said."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from s3fs.errors import translate_boto_error

from storage.errors import InputError, OutputError
from storage.remote import RetryLog, hurry, open_filesystem
from storage.s3 import EXPIRED_TRIES, S3, Arrived
from storage.s3_faults import Asked, Kind, explain, kind_of

URL = "http://127.0.0.1:1"


def refusal(code: str, status: int = 400) -> Exception:
    """What s3fs raises for an answer of the server."""
    answer = {
        "Error": {"Code": code, "Message": f"says {code}"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return translate_boto_error(ClientError(answer, "PutObject"))


class TornBody:
    """A body whose connection breaks."""

    async def read(self) -> bytes:
        raise aiohttp.ClientPayloadError("not enough data")

    def close(self) -> None:
        """Nothing is open."""


class Scripted(S3):
    """Answers as it is told, the last answer for ever; counts requests and sessions."""

    def __init__(self, *outcomes: Any, **options: Any) -> None:
        options = {"fault": OutputError, "retry_s": 5.0, "skip_instance_cache": True, **options}
        super().__init__(endpoint_url=URL, **options)
        self._outcomes = list(outcomes)
        self.asked: list[str] = []
        self.num_sessions = 0

    async def _ask(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        self.asked.append(method)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def set_session(self, refresh: bool = False, kwargs: Any = None) -> Any:
        self.num_sessions += refresh


def scripted(*outcomes: Any, **options: Any) -> Scripted:
    return Scripted(*outcomes, **options)


def put(fs: S3) -> Any:
    return fs.call_s3("put_object", Bucket="b", Key="k", Body=b"x")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("SlowDown", 503, "transient"),
        ("InternalError", 500, "transient"),
        ("SomethingNew", 502, "transient"),
        ("429", 429, "transient"),
        ("RequestTimeout", 400, "transient"),
        ("ConditionalRequestConflict", 409, "transient"),
        ("ExpiredToken", 400, "expired"),
        ("InvalidToken", 400, "expired"),
        ("NoSuchKey", 404, "missing"),
        ("404", 404, "missing"),
        ("PreconditionFailed", 412, "conflict"),
        ("NotImplemented", 501, "unable"),
        ("AccessDenied", 403, "permanent"),
        ("403", 403, "permanent"),
        ("NoSuchBucket", 404, "permanent"),
        ("InvalidAccessKeyId", 403, "permanent"),
        ("SignatureDoesNotMatch", 403, "permanent"),
    ],
)
def test_answers_have_their_kind(code: str, status: int, kind: Kind) -> None:
    assert kind_of(refusal(code, status)) == kind


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (EndpointConnectionError(endpoint_url=URL), "transient"),
        (ReadTimeoutError(endpoint_url=URL), "transient"),
        (ConnectTimeoutError(endpoint_url=URL), "transient"),
        (ConnectionResetError(), "transient"),
        (TimeoutError(), "transient"),
        (aiohttp.ClientPayloadError(), "transient"),
        (SSLError(endpoint_url=URL, error="certificate"), "permanent"),
        (NoCredentialsError(), "permanent"),
        (ValueError("ours"), "permanent"),
    ],
)
def test_faults_without_an_answer_have_their_kind(fault: Exception, kind: Kind) -> None:
    assert kind_of(fault) == kind


def test_c48_three_times_503_then_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    fs = scripted(*[refusal("SlowDown", 503)] * 3, {"ETag": "e"})
    with caplog.at_level(logging.WARNING, "storage.s3"):
        assert put(fs) == {"ETag": "e"}
    assert fs.asked == ["put_object"] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "s3://b/k: put_object failed (SlowDown), trying again for up to 5 s"
    ]
    (record,) = fs.retry_log.take()
    assert (record.path, record.operation, record.cause) == ("b/k", "put_object", "SlowDown")
    assert record.num_retries == fs.retry_log.num_retries == 3
    assert 0 < record.waited_s < 0.2 + 0.4 + 0.8
    assert fs.retry_log.take() == []


@pytest.mark.parametrize(
    "fault", [refusal("AccessDenied", 403), refusal("NoSuchBucket", 404), NoCredentialsError()]
)
def test_what_never_succeeds_fails_at_once(fault: Exception) -> None:
    fs = scripted(fault)
    with pytest.raises(OutputError, match=r"^s3://b/k: [^\n]*; [^\n]*$"):
        put(fs)
    assert len(fs.asked) == 1
    assert fs.retry_log.num_retries == 0


def test_the_input_is_told_as_the_input() -> None:
    with pytest.raises(InputError, match="no permission"):
        put(scripted(refusal("AccessDenied", 403), fault=InputError))


def test_a_request_is_given_up_in_time_and_the_next_one_sooner() -> None:
    fs = scripted(EndpointConnectionError(endpoint_url=URL), retry_s=1.5)
    started_s = time.monotonic()
    with pytest.raises(OutputError, match=rf"{URL} did not do it in \d s and \d+ tries.*again"):
        put(fs)
    assert time.monotonic() - started_s < 2.5
    assert len(fs.asked) >= 3


def test_after_one_was_given_up_the_rest_is_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.s3.GIVEN_UP_S", 0.0)
    fs = scripted(EndpointConnectionError(endpoint_url=URL), retry_s=1.0)
    with pytest.raises(OutputError):
        put(fs)
    tried = len(fs.asked)
    with pytest.raises(OutputError):
        put(fs)
    assert len(fs.asked) == tried + 1
    fs._outcomes = [{"ETag": "e"}, refusal("SlowDown", 503), {"ETag": "f"}]
    assert put(fs) == {"ETag": "e"}
    assert put(fs) == {"ETag": "f"}, "it answers again, so it is waited for again"


def test_a_run_that_is_to_end_does_not_wait_for_a_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.s3.HURRY_S", 0.3)
    monkeypatch.setattr("storage.s3.GIVEN_UP_S", 0.3)
    fs = scripted(EndpointConnectionError(endpoint_url=URL), retry_s=60.0)
    threading.Timer(0.3, hurry, [fs]).start()
    started_s = time.monotonic()
    with pytest.raises(OutputError, match="did not do it"):
        put(fs)
    assert time.monotonic() - started_s < 5
    hurry(object())


def test_c46_expired_credentials_are_renewed_and_the_request_is_repeated() -> None:
    fs = scripted(refusal("ExpiredToken"), {"ETag": "e"})
    assert put(fs) == {"ETag": "e"}
    assert fs.num_sessions == 1


def test_c46_newer_credentials_come_from_where_the_first_came_from() -> None:
    newer = {"key": "new", "secret": "s", "token": "t", "client_kwargs": {}}
    fs = scripted(refusal("ExpiredToken"), {}, key="old", secret="x", renew=lambda: newer)
    put(fs)
    assert (fs.key, fs.secret, fs.token) == ("new", "s", "t")


def test_credentials_that_stay_expired_are_told() -> None:
    fs = scripted(refusal("ExpiredToken"), retry_s=60.0)
    with pytest.raises(OutputError, match=r"expired \(ExpiredToken\).*renew them"):
        put(fs)
    assert len(fs.asked) == EXPIRED_TRIES


def test_requests_that_expire_together_begin_one_session() -> None:
    class Slow(Scripted):
        """Refuses all that were asked before the first answer."""

        async def _ask(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
            before = self.num_sessions
            await asyncio.sleep(0.05)
            if not before:
                raise refusal("ExpiredToken")
            return {}

    fs = Slow({})

    async def all_at_once() -> None:
        await asyncio.gather(*(fs._call_s3("put_object", Bucket="b", Key="k") for _ in range(5)))

    from fsspec.asyn import sync

    sync(fs.loop, all_at_once)
    assert fs.num_sessions == 1


def test_a_torn_body_is_fetched_again_whole() -> None:
    fs = scripted({"Body": TornBody()}, {"Body": Arrived(b"all of it")})
    assert fs.call_s3("get_object", Bucket="b", Key="k")["Body"].data == b"all of it"
    assert fs.retry_log.num_retries == 1


def test_an_arrived_body_is_read_as_a_stream_is() -> None:
    async def pieces() -> list[bytes]:
        body = Arrived(b"abcdefg")
        return [await body.read(3), await body.read(3), await body.read(3), await body.read()]

    assert asyncio.run(pieces()) == [b"abc", b"def", b"g", b""]
    assert asyncio.run(Arrived(b"abc").read()) == b"abc"


def test_a_bulk_deletion_that_failed_in_part_is_repeated() -> None:
    failed = {"Errors": [{"Key": "k", "Code": "InternalError", "Message": "try again"}]}
    fs = scripted(failed, {"Deleted": []})
    fs.call_s3("delete_objects", Bucket="b", Delete={"Objects": [{"Key": "k"}]})
    assert fs.asked == ["delete_objects"] * 2


def test_a_refused_head_is_explained_by_a_list() -> None:
    """The answer to HEAD has no body, so its code is the status only."""
    fs = scripted(refusal("400"), refusal("ExpiredToken"), {"ContentLength": 1})
    assert fs.call_s3("head_object", Bucket="b", Key="k") == {"ContentLength": 1}
    assert fs.asked == ["head_object", "list_objects_v2", "head_object"]
    assert fs.num_sessions == 1


@pytest.mark.parametrize(
    ("outcomes", "call", "error"),
    [
        ([refusal("NoSuchKey", 404)], put, FileNotFoundError),
        ([refusal("PreconditionFailed", 412)], put, FileExistsError),
        ([refusal("NotImplemented", 501)], put, NotImplementedError),
    ],
)
def test_what_the_caller_can_act_on_is_not_a_message(
    outcomes: list[Any], call: Callable[[S3], Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(scripted(*outcomes))


def test_a_lost_answer_is_not_taken_for_somebody_elses_success() -> None:
    def after_a_lost_answer(*held: bytes) -> S3:
        """The condition fails at the second try; the file holds that, or is not there."""
        lost = [ConnectionResetError(), refusal("PreconditionFailed", 412)]
        found = [{"Body": Arrived(data), "ETag": "1"} for data in held]
        return scripted(*lost, *(found or [refusal("NoSuchKey", 404)]))

    assert after_a_lost_answer(b"mine").create_file("b/k", b"mine")
    assert not after_a_lost_answer(b"theirs").create_file("b/k", b"mine")
    assert after_a_lost_answer(b"mine").replace_version("b/k", "0", b"mine")
    assert not after_a_lost_answer(b"theirs").replace_version("b/k", "0", b"mine")
    assert after_a_lost_answer().delete_version("b/k", "0")
    assert not after_a_lost_answer(b"theirs").delete_version("b/k", "0")


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        (refusal("AccessDenied", 403), ["no permission", "s3:PutObject", "'bucket'"]),
        (refusal("NoSuchBucket", 404), ["no bucket 'bucket'", URL, "create it"]),
        (refusal("InvalidAccessKeyId", 403), ["access key", "AWS_ACCESS_KEY_ID"]),
        (refusal("SignatureDoesNotMatch", 403), ["secret key", "AWS_SECRET_ACCESS_KEY"]),
        (NoCredentialsError(), ["no AWS credentials", "AWS_PROFILE", "--credentials"]),
        (refusal("InvalidBucketName"), ["no bucket name", "mend the URL"]),
        (refusal("EntityTooLarge"), ["EntityTooLarge", "says EntityTooLarge"]),
    ],
)
def test_messages_say_what_where_and_what_to_do(fault: Exception, parts: list[str]) -> None:
    said = explain(fault, Asked("put_object", "bucket", "a/b"), endpoint=URL)
    assert said.startswith("s3://bucket/a/b: ")
    assert "\n" not in said
    assert [part for part in parts if part not in said] == []


def test_the_log_counts_by_object_and_is_bounded() -> None:
    log = RetryLog()
    assert log.note("b/1", "put_object", "SlowDown", 0.5)
    assert not log.note("b/1", "get_object", "500", 0.25)
    assert log.note("b/2", "get_object", "500", 0.1)
    first, second = log.take()
    assert (first.num_retries, first.waited_s, first.operation) == (2, 0.75, "get_object")
    assert second.path == "b/2"
    assert not log.note("b/1", "put_object", "SlowDown", 0.5), "its line is written already"
    for number in range(3000):
        log.note(f"many/{number}", "put_object", "SlowDown", 0.1)
    assert log.num_retries == 3004
    assert len(log.take()) == 1000


def test_a_session_is_closed_on_its_own_loop_wherever_it_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A garbage collection may come in the thread of another loop, such as Prefect's."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = S3(fault=OutputError, endpoint_url=URL, skip_instance_cache=True)
    fs.connect()
    opened = fs._s3._endpoint.http_session
    assert opened._sessions is not None

    async def let_go() -> None:
        fs.close_session(fs.loop, fs._s3creator)

    asyncio.run(let_go())
    deadline_s = time.monotonic() + 5
    while opened._sessions is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert opened._sessions is None


def test_without_s3fs_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules, "storage.s3")
    with pytest.raises(InputError, match=r"s3://b/in needs s3fs.*pip install 'headrace\[s3\]'"):
        open_filesystem("s3://b/in", fault=InputError)
