"""S3 by way of s3fs, with one rule for all its requests: repeat what may succeed, explain the rest.

The rule sits where s3fs makes its requests, below everything that uses it: reads of Arrow and
DuckDB, listings page by page, parts of uploads. A body is read whole inside it, so that one that
breaks off is fetched again before anybody has seen a byte of it. The retries of botocore and of
s3fs are off: theirs know no total time, no torn body and no newer credentials.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from botocore.exceptions import ClientError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_any,
    stop_before_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from storage.errors import InputError, OutputError
from storage.remote import RetryLog, Version
from storage.s3_faults import Asked, answered, code_of, explain, kind_of

RETRY_S = 90.0
"""Seconds after which a request is given up. Less than a lease needs to go stale: while a run waits
for its server, no other takes its output.
"""
GIVEN_UP_S = 5.0
"""The same after a request that was given up, until one succeeds: a run that ends because its
server is gone does not wait for it once more with each thing that it tries on its way out.
"""
HURRY_S = 12.0
"""The same after the run has been told to stop: it has half a minute to end."""
FIRST_WAIT_S = 0.2
MAX_WAIT_S = 8.0
"""Before each repetition a random wait below a bound, which doubles from the first to the second of
these: many processes that were sent away together do not come back together.
"""
EXPIRED_TRIES = 4
"""So often credentials may be called expired, each time after a new session; then they are."""
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
"""Files above two parts are uploaded in parts: 64 MiB in memory, not s3fs's 500."""

BLOCK_BYTES = 8 << 20
"""Read ahead by readers that do not say how much they want.
"""
GLOB = re.compile(r"[*?\[]")
_log = logging.getLogger(__name__)


def open_s3(
    url: str,
    storage_options: Mapping[str, Any],
    *,
    fault: type[InputError | OutputError],
    cached_listings: bool,
) -> tuple[S3, str]:
    """The file system of an S3 URL, and bucket and key; see `remote.open_filesystem`."""
    # A new session each time: the environment may have changed since the last one.
    fs = S3(
        fault=fault,
        use_listings_cache=cached_listings,
        skip_instance_cache=True,
        **storage_options,
    )
    root = url.partition("://")[2].rstrip("/")
    bucket, _, key = root.partition("/")
    if not bucket:
        raise fault(f"{url} names no bucket; give s3://BUCKET/PATH")
    fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=GLOB.split(key)[0], MaxKeys=1)
    return fs, root


class S3(S3FileSystem):
    """Objects of S3 as files.

    Args:
        fault: what is raised when a request cannot succeed; its message is for the user.
        renew: gives s3fs options with newer credentials, after these have expired. Without it, a
            new session finds them as the first one did: environment, profile, role.
        retry_s: seconds after which a request is given up.
        options: of s3fs.

    Attributes:
        retry_log: repeated requests.
        hurried_s: when it was told to hurry; None if it was not.
    """

    retries = 1  # of s3fs: each of its tries is one of ours
    default_block_size = BLOCK_BYTES

    def __init__(
        self,
        *,
        fault: type[InputError | OutputError],
        renew: Callable[[], Mapping[str, Any]] | None = None,
        retry_s: float | None = None,
        **options: Any,
    ) -> None:
        once = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
        # One request a read: several at once would ask for the size first.
        options = {"max_concurrency": 1, **options}
        super().__init__(config_kwargs={**options.pop("config_kwargs", {}), **once}, **options)
        self.retry_log = RetryLog()
        self._fault = fault
        self._newer = renew
        self._retry_s = RETRY_S if retry_s is None else retry_s
        self._renewing = asyncio.Lock()
        self._num_renewals = 0
        self._answers = True
        self.hurried_s: float | None = None

    def hurry(self) -> None:
        """From now on requests are given up soon, also those that are being repeated already."""
        self.hurried_s = time.monotonic()

    @staticmethod
    def close_session(loop: asyncio.AbstractEventLoop | None, s3: Any) -> None:
        """Close a session on the loop that made it. The last reference may go in any thread, also
        in one that runs a loop of its own.
        """
        if loop is None or not loop.is_running():
            return
        closing = asyncio.run_coroutine_threadsafe(s3.__aexit__(None, None, None), loop)
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # this thread may wait a moment, so that nothing is open at its end
            with suppress(TimeoutError):
                closing.result(0.1)

    # -- all requests --

    async def _call_s3(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        asked = Asked(method, str(kwargs.get("Bucket", "")), _key(kwargs))
        retry_s = self._retry_s if self._answers else min(self._retry_s, GIVEN_UP_S)
        repeat = AsyncRetrying(
            retry=retry_if_exception(lambda fault: kind_of(fault) in ("transient", "expired")),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=MAX_WAIT_S),
            stop=stop_any(stop_before_delay(retry_s), StaysExpired(), InAHurry(self)),
            before_sleep=partial(self._note, asked),
            reraise=True,
        )
        try:
            answer = await repeat(self._try, method, *akwarglist, **kwargs)
        except Exception as fault:
            self._answers = kind_of(fault) != "transient"
            told = self._told(fault, asked, repeat.statistics)
            if told is fault:
                raise
            raise told from fault
        self._answers = True
        return answer

    call_s3: Callable[..., Any] = sync_wrapper(_call_s3)

    async def _try(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        """One request, its body included; renews the credentials when they have expired."""
        num_renewals = self._num_renewals
        try:
            answer = await self._ask(method, *akwarglist, **kwargs)
            if method == "get_object":
                answer = {**answer, "Body": Arrived(await _read(answer["Body"]))}
            elif method == "delete_objects":
                _raise_first(answer)
        except Exception as fault:
            reason = await self._reason(fault, method, kwargs)
            if kind_of(reason) == "expired":
                await self._renew(num_renewals)
            if reason is fault:
                raise
            raise reason from answered(reason)
        return answer

    async def _ask(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        """One request of s3fs."""
        return await super()._call_s3(method, *akwarglist, **kwargs)

    async def _reason(self, fault: Exception, method: str, kwargs: Mapping[str, Any]) -> Exception:
        """Why a request was refused. The answer to a HEAD has no body to say it, so a list of the
        same place is asked for.
        """
        if method not in ("head_object", "head_bucket") or code_of(fault) not in ("400", "403"):
            return fault
        try:
            await self._ask(
                "list_objects_v2", Bucket=kwargs["Bucket"], Prefix=_key(kwargs), MaxKeys=1
            )
        except Exception as reason:  # noqa: BLE001 - it is raised in place of the other
            return reason
        return fault

    async def _renew(self, num_renewals: int) -> None:
        """A new session, once for all requests that were refused with the old one."""
        async with self._renewing:
            if num_renewals != self._num_renewals:
                return
            if self._newer is not None:
                newer = await asyncio.to_thread(self._newer)
                self.key, self.secret, self.token = map(newer.get, ("key", "secret", "token"))
            await self.set_session(refresh=True)
            self._num_renewals += 1
            _log.warning("the S3 credentials had expired; a new session was begun")

    def _note(self, asked: Asked, state: RetryCallState) -> None:
        """Count a request that is about to be repeated; log the first of each object."""
        assert state.outcome is not None
        assert state.next_action is not None
        fault = state.outcome.exception()
        assert fault is not None
        cause = code_of(fault) or type(fault).__name__
        path, wait_s = f"{asked.bucket}/{asked.key}", state.next_action.sleep
        if self.retry_log.note(path, asked.method, cause, wait_s):
            _log.warning(
                "%s: %s failed (%s), trying again for up to %.0f s",
                asked.url, asked.method, cause, self._retry_s,
            )  # fmt: skip

    def _told(self, fault: Exception, asked: Asked, statistics: Mapping[str, Any]) -> Exception:
        """What the caller gets: what it can act on as it is, all else as a message for the user."""
        kind = kind_of(fault)
        if kind == "missing" or isinstance(fault, self._fault):
            return fault
        if kind == "conflict" and asked.method != "get_object":
            return FileExistsError(asked.url)
        tried = (
            f"{statistics.get('delay_since_first_attempt', 0.0):.0f} s and "
            f"{statistics.get('attempt_number', 1)} tries"
        )
        message = explain(fault, asked, endpoint=self._endpoint(), tried=tried)
        return NotImplementedError(message) if kind == "unable" else self._fault(message)

    def _endpoint(self) -> str:
        meta = getattr(self._s3, "meta", None)
        return str(getattr(meta, "endpoint_url", None) or self.endpoint_url or "S3")

    # -- writing --

    async def _put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        """An object appears when its last part is acknowledged; a failed upload is aborted."""
        options = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE, **options}
        try:
            await super()._put_file(lpath, rpath, *args, **options)
        except FileNotFoundError:
            # The upload is gone: it was completed and the answer got lost, or it was aborted. Once
            # more is right in both cases, as the same bytes are written.
            await super()._put_file(lpath, rpath, *args, **options)

    def is_empty(self, folder: str) -> bool:
        bucket, _, prefix = f"{folder}/".partition("/")
        page = self.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
        return not page.get("Contents")

    def abort_uploads(self, folder: str) -> int:
        bucket, _, prefix = f"{folder}/".partition("/")
        aborted = 0
        while True:
            page = self.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            found = [up for up in page.get("Uploads", []) if up["Key"].startswith(prefix)]
            for upload in found:
                self._abort_if_there(bucket, upload["Key"], upload["UploadId"])
            aborted += len(found)
            if not page.get("IsTruncated") or not found:
                return aborted

    def _abort_if_there(self, bucket: str, key: str, upload: str) -> None:
        try:
            self.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    # -- what depends on what is there; see `remote.ConditionalStore` --

    def create_file(self, path: str, data: bytes) -> bool:
        bucket, _, key = path.partition("/")
        try:
            self.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return self._holds(path, data)
        return True

    def read_version(self, path: str) -> Version | None:
        bucket, _, key = path.partition("/")
        try:
            answer = self.call_s3("get_object", Bucket=bucket, Key=key)
        except FileNotFoundError:
            return None
        return Version(answer["Body"].data, str(answer["ETag"]))

    def replace_version(self, path: str, tag: str, data: bytes) -> bool:
        bucket, _, key = path.partition("/")
        try:
            self.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfMatch=tag)
        except (FileExistsError, FileNotFoundError):
            return self._holds(path, data)
        return True

    def delete_version(self, path: str, tag: str) -> bool:
        bucket, _, key = path.partition("/")
        try:
            self.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=tag)
        except FileExistsError:
            return self.read_version(path) is None
        except FileNotFoundError:
            return True
        return True

    def _holds(self, path: str, data: bytes) -> bool:
        """Whether a file holds what was to be written: then it was written, and only the answer to
        an earlier try got lost.
        """
        found = self.read_version(path)
        return found is not None and found.data == data


class Arrived:
    """A body that is here already; what s3fs asks of one."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._position = 0

    async def read(self, amount: int | None = None) -> bytes:
        start = self._position
        stop = len(self.data) if amount is None or amount < 0 else start + amount
        self._position = min(stop, len(self.data))
        return self.data[start:stop]

    def close(self) -> None:
        """Nothing is open."""


async def _read(body: Any) -> bytes:
    try:
        return await body.read()
    finally:
        body.close()


def _raise_first(answer: Mapping[str, Any]) -> None:
    """A bulk deletion reports its failures inside an answer that says all is well."""
    for error in answer.get("Errors", ()):
        if error.get("Code") != "NoSuchKey":
            raise ClientError({"Error": error}, "DeleteObjects")


def _key(kwargs: Mapping[str, Any]) -> str:
    return str(kwargs.get("Key") or kwargs.get("Prefix") or "")


class StaysExpired(stop_base):
    """Credentials that are called expired again and again have no newer ones behind them."""

    def __call__(self, retry_state: RetryCallState) -> bool:
        fault = None if retry_state.outcome is None else retry_state.outcome.exception()
        expired = fault is not None and kind_of(fault) == "expired"
        return expired and retry_state.attempt_number >= EXPIRED_TRIES


class InAHurry(stop_base):
    """The run is to end, and this request has had its share of what time is left."""

    def __init__(self, fs: S3) -> None:
        self._fs = fs

    def __call__(self, retry_state: RetryCallState) -> bool:
        hurried_s, spent_s = self._fs.hurried_s, retry_state.seconds_since_start
        if hurried_s is None or spent_s is None:
            return False
        wait_s = retry_state.upcoming_sleep
        left_s = hurried_s + HURRY_S - time.monotonic()
        return wait_s > left_s and spent_s + wait_s > GIVEN_UP_S
