"""Which file system a URL is on, and what object stores can do that other file systems cannot."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import fsspec

from storage.errors import InputError, OutputError

S3_URLS = ("s3://", "s3a://")
MAX_RECORDS = 1000
"""Objects of which a `RetryLog` keeps a record until it is taken."""


def is_s3(url: str) -> bool:
    return url.startswith(S3_URLS)


def open_filesystem(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    fault: type[InputError | OutputError],
    cached_listings: bool = False,
) -> tuple[Any, str]:
    """The file system of a path or URL, and the path on it.

    On S3, where this looks whether the bucket is there and may be listed, every request is repeated
    while that may help (`s3.py`).

    Args:
        url: local path or fsspec URL.
        storage_options: for fsspec.
        fault: what is raised, now and by any later request, when S3 refuses or does not answer.
        cached_listings: on S3, what was listed is believed for as long as the file system is used.

    Raises:
        InputError, OutputError: as `fault` says.
        ImportError, ValueError: no such kind of file system.
    """
    if not is_s3(url):
        return fsspec.core.url_to_fs(url, **dict(storage_options or {}))
    try:
        from storage.s3 import open_s3
    except ImportError as missing:
        raise fault(
            f"{url} needs {missing.name}, which is not installed; pip install 'headrace[s3]'"
        ) from missing
    return open_s3(url, storage_options or {}, fault=fault, cached_listings=cached_listings)


class Version(NamedTuple):
    """A file's bytes, and the mark by which the store knows them from any others."""

    data: bytes
    tag: str


@runtime_checkable
class ConditionalStore(Protocol):
    """A file system whose writes may depend on what is there: of many that try, one succeeds.

    A file that holds what was to be written counts as written: the answer to an earlier try may
    have been lost, and one's own success is not to be taken for somebody else's. All raise
    NotImplementedError where the server has no such operation.
    """

    def create_file(self, path: str, data: bytes) -> bool:
        """Write a file if there is none; False when there is another one."""
        ...

    def read_version(self, path: str) -> Version | None:
        """A file; None when there is none."""
        ...

    def replace_version(self, path: str, tag: str, data: bytes) -> bool:
        """Write over a file if it is still the one of this tag; False when it is not."""
        ...

    def delete_version(self, path: str, tag: str) -> bool:
        """Delete a file if it is still the one of this tag; False when it is not."""
        ...

    def is_empty(self, folder: str) -> bool:
        """Whether there is no file below a folder. Some stores remember folders without any."""
        ...

    def abort_uploads(self, folder: str) -> int:
        """Drop the parts of uploads that were begun and not ended; returns of how many."""
        ...


class LookThenAct:
    """A `ConditionalStore` on any file system. Two that look at the same moment both succeed.

    Args:
        fs: of fsspec.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def create_file(self, path: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(path, data, mode="create")
        except NotImplementedError:
            found = self.read_version(path)
            if found is not None:
                return found.data == data
            self._fs.pipe_file(path, data)
        except OSError:  # some stores have their own word for it
            found = self.read_version(path)
            if found is not None:
                return found.data == data
            raise
        return True

    def read_version(self, path: str) -> Version | None:
        try:
            data = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        return Version(data, hashlib.sha256(data).hexdigest())

    def replace_version(self, path: str, tag: str, data: bytes) -> bool:
        found = self.read_version(path)
        if found is None or found.tag != tag:
            return False
        self._fs.pipe_file(path, data)
        return True

    def delete_version(self, path: str, tag: str) -> bool:
        found = self.read_version(path)
        if found is None or found.tag != tag:
            return False
        self._fs.rm_file(path)
        return True

    def is_empty(self, folder: str) -> bool:
        self._fs.invalidate_cache()
        try:
            return not self._fs.ls(folder, detail=False)
        except FileNotFoundError:
            return True

    def abort_uploads(self, folder: str) -> int:
        del folder
        return 0


@dataclass(slots=True)
class Retried:
    """Repeated requests for one object.

    Attributes:
        path: bucket and key.
        operation: botocore's name, of the latest.
        cause: why, of the latest.
        num_retries: repetitions.
        waited_s: seconds waited before them.
    """

    path: str
    operation: str
    cause: str
    num_retries: int = 0
    waited_s: float = 0.0


class RetryLog:
    """Counts repeated requests, by object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, Retried] = {}
        self._known: set[str] = set()
        self.num_retries = 0

    def note(self, path: str, operation: str, cause: str, wait_s: float) -> bool:
        """A request is about to be repeated. True when it is the first one for its object, as far
        as is remembered: worth a line in a log.
        """
        with self._lock:
            self.num_retries += 1
            first = path not in self._known and len(self._known) < MAX_RECORDS
            if first:
                self._known.add(path)
            if path in self._records or len(self._records) < MAX_RECORDS:
                record = self._records.setdefault(path, Retried(path, operation, cause))
                record.operation, record.cause = operation, cause
                record.num_retries += 1
                record.waited_s += wait_s
            return first

    def take(self) -> list[Retried]:
        """The records since the last call."""
        with self._lock:
            records, self._records = self._records, {}
        return list(records.values())


def hurry(fs: Any) -> None:
    """Tell a file system that repeats requests to give them up soon; no other is in the way."""
    told = getattr(fs, "hurry", None)
    if callable(told):
        told()


def retry_log(fs: Any) -> RetryLog | None:
    """The log of a file system that repeats requests; None of any other."""
    found = getattr(fs, "retry_log", None)
    return found if isinstance(found, RetryLog) else None
