"""Files under one root, local or on any fsspec URL, of which a reader never sees a part.

A local file is written beside its place (under `_tmp/`, the same file system), made durable, and
renamed; then the folder is made durable. A remote one is written to a local file and put: an object
store shows an object only when it is whole. What S3 requests go through is in `s3.py`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from storage.errors import OutputError
from storage.remote import ConditionalStore, LookThenAct, open_filesystem

TMP = "_tmp"
DRAFT = "-draft-"
"""In the names of files that are being written; what a killed writer leaves is known by it."""
_log = logging.getLogger(__name__)


class ObjectStore:
    """The files of one output.

    Args:
        url: local path or fsspec URL of the root.
        storage_options: for fsspec.

    Raises:
        OutputError: S3 refuses, or does not answer; by any method.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/") or "/"
        self.storage_options = dict(storage_options or {})
        self.fs, self.root = open_filesystem(url, storage_options, fault=OutputError)
        self.root = self.root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._conditional: ConditionalStore = (
            self.fs if isinstance(self.fs, ConditionalStore) else LookThenAct(self.fs)
        )

    def path(self, name: str) -> str:
        """Full path of a file, as the file system wants it."""
        return f"{self.root}/{name}"

    def local_path(self, name: str) -> Path | None:
        """Where a file lies on this machine; None on a remote store."""
        return Path(self.path(name)) if self.is_local else None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole and durable."""
        with self.writer(name) as file:
            file.write(data)

    @contextmanager
    def writer(
        self, name: str, *, on_written: Callable[[], None] = lambda: None
    ) -> Generator[BinaryIO]:
        """A file to write to; it appears under its name, whole and durable, when the block ends.

        An exception in the block leaves nothing under the name.

        Args:
            name: relative to the root.
            on_written: called when all bytes are written and the name does not show them yet.

        Raises:
            OutputError: it cannot be written.
        """
        opened = self._local_writer if self.is_local else self._remote_writer
        try:
            with opened(name, on_written) as file:
                yield file
        except OSError as fault:
            raise OutputError(
                f"{self.path(name)} cannot be written: {fault}. What was written before stays; "
                "mend it and run the same command again"
            ) from fault

    @contextmanager
    def _local_writer(self, name: str, on_written: Callable[[], None]) -> Generator[BinaryIO]:
        place = Path(self.path(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = self._new_draft(f"{DRAFT}{place.name}")
        try:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            on_written()
            draft.replace(place)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(place.parent)

    @contextmanager
    def _remote_writer(self, name: str, on_written: Callable[[], None]) -> Generator[BinaryIO]:
        """By way of a local file: closing a remote file shows it, even after an exception."""
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            draft = Path(folder) / "draft"
            with draft.open("wb") as file:
                yield file
            on_written()
            self.fs.put_file(str(draft), self.path(name))

    def _new_draft(self, name: str) -> Path:
        draft = Path(self.path(TMP)) / f"{uuid.uuid4().hex}{name}"
        draft.parent.mkdir(parents=True, exist_ok=True)
        return draft

    def delete_drafts(self) -> None:
        """Delete what writers left that were killed. For the holder of the lease."""
        if not self.is_local:
            self._abort_uploads()
        for name in self.list(TMP):
            if DRAFT in name.rpartition("/")[2]:
                self.delete(name)
        for folder in self.list_folders(TMP):
            if DRAFT in folder.rpartition("/")[2]:
                self.delete_folder(folder)

    def _abort_uploads(self) -> None:
        """Nobody sees an upload before its end, but its parts are stored and paid for. The output
        can do without this, so the credentials need not allow it.
        """
        try:
            self._conditional.abort_uploads(self.root)
        except (OutputError, NotImplementedError) as fault:
            _log.warning("uploads that a killed run may have begun are not aborted: %s", fault)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file only if there is none of the name; False when there is.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            if self.is_local:
                return self._create_locally(name, data)
            return self._decide(lambda store: store.create_file(self.path(name), data))
        except OSError as fault:
            raise OutputError(f"{self.path(name)} cannot be written: {fault}") from fault

    def _create_locally(self, name: str, data: bytes) -> bool:
        place = Path(self.path(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = self._new_draft("")
        draft.write_bytes(data)
        try:
            os.link(draft, place)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        _sync_folder(place.parent)
        return True

    def _decide(self, operation: Callable[[ConditionalStore], bool]) -> bool:
        """Do what depends on what is there, as well as the store can."""
        try:
            return operation(self._conditional)
        except NotImplementedError as fault:
            _log.warning(
                "%s has no conditional writes, so never start two runs at once: %s", self.url, fault
            )
            self._conditional = LookThenAct(self.fs)
            return operation(self._conditional)

    def swap(self, name: str, old: bytes, new: bytes) -> bool:
        """Write a small file over one that still holds `old`; False when it does not.

        Of several that try, one succeeds, on a local disk (where for a moment there is no file) and
        on S3. Elsewhere it is a look and then a write.
        """
        if self.is_local:
            return self.take_away(name, old) and self.create(name, new)
        return self._decide(lambda store: _replace_if(store, self.path(name), old, new))

    def take_away(self, name: str, data: bytes) -> bool:
        """Delete a file if it still holds `data`; False when it does not.

        On a local disk, and on S3, nobody can replace it in between. Elsewhere it is a look and
        then a deletion.
        """
        if not self.is_local:
            return self._decide(lambda store: _delete_if(store, self.path(name), data))
        draft, place = self._new_draft(""), Path(self.path(name))
        try:
            place.rename(draft)
        except FileNotFoundError:
            return False
        try:
            if draft.read_bytes() == data:
                return True
            with suppress(FileExistsError):
                os.link(draft, place)  # it is a newer one: back with it
            return False
        finally:
            draft.unlink()

    def read(self, name: str) -> bytes:
        """A file's bytes.

        Raises:
            FileNotFoundError: there is none.
        """
        return self.fs.cat_file(self.path(name))

    def read_or_none(self, name: str) -> bytes | None:
        """A file's bytes; None when there is none."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return self.fs.exists(self.path(name))

    def list(self, folder: str) -> list[str]:
        """Names of the files in a folder, relative to the root, sorted."""
        return sorted(f"{folder}/{name}" for name, kind, _ in self._ls(folder) if kind == "file")

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files in a folder, by names relative to the root."""
        return {f"{folder}/{name}": size for name, kind, size in self._ls(folder) if kind == "file"}

    def sizes_below(self, folder: str) -> dict[str, int]:
        """Bytes of the files in a folder and all folders below, by names relative to the root."""
        if self.is_local:
            return dict(_local_sizes(self.path(folder), folder))
        self.fs.invalidate_cache()
        found = self.fs.find(self.path(folder), detail=True)
        start = len(self.fs._strip_protocol(self.root).rstrip("/")) + 1
        return {
            path[start:]: item["size"] or 0
            for path, item in found.items()
            if item["type"] == "file" and not path.endswith("/")
        }

    def list_folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, relative to the root, sorted."""
        names = (name for name, kind, _ in self._ls(folder) if kind == "directory")
        return sorted(f"{folder}/{name}" for name in names)

    def _ls(self, folder: str) -> Iterator[tuple[str, str, int]]:
        """Own name, kind and size of what is in a folder; nothing when it is not there."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return
        for item in found:
            name = item["name"].rstrip("/").rpartition("/")[2]
            is_own_mark = item["type"] == "file" and item["name"].endswith("/")  # of an S3 folder
            if name and not is_own_mark:
                yield name, item["type"], item["size"] or 0

    def is_empty(self) -> bool:
        """True when there is nothing under the root."""
        return self._conditional.is_empty(self.root)

    def delete(self, name: str) -> None:
        """Delete a file; without effect when there is none."""
        try:
            self.fs.rm_file(self.path(name))
        except FileNotFoundError:
            return

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and all in it; without effect when there is none."""
        try:
            self.fs.rm(self.path(folder), recursive=True)
        except FileNotFoundError:
            return


def _local_sizes(path: str, name: str) -> Iterator[tuple[str, int]]:
    """Files below a folder of this machine; nothing when it is not there."""
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return
    for entry in entries:
        below = f"{name}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _local_sizes(entry.path, below)
        else:
            yield below, entry.stat().st_size


def _replace_if(store: ConditionalStore, path: str, old: bytes, new: bytes) -> bool:
    found = store.read_version(path)
    return found is not None and found.data == old and store.replace_version(path, found.tag, new)


def _delete_if(store: ConditionalStore, path: str, data: bytes) -> bool:
    found = store.read_version(path)
    return found is not None and found.data == data and store.delete_version(path, found.tag)


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
