"""Files under one root, local or on any fsspec URL, of which a reader never sees a part.

A local file is written beside its place (under `_tmp/`, the same file system), made durable, and
renamed; then the folder is made durable. An object store shows an object only when it is whole, so
there a plain put is enough.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

TMP = "_tmp"


class ObjectStore:
    """The files of one output.

    Args:
        url: local path or fsspec URL of the root.
        storage_options: for fsspec.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/") or "/"
        self.fs, self.root = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
        self.root = self.root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

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
        self, name: str, *, on_written: Callable[[], None] | None = None
    ) -> Generator[BinaryIO]:
        """A file to write to; it appears under its name, whole and durable, when the block ends.

        An exception in the block leaves nothing under the name.

        Args:
            name: relative to the root.
            on_written: called when all bytes are durable and the name does not show them yet.
        """
        if not self.is_local:
            with self.fs.open(self.path(name), "wb") as file:
                yield file
            return
        place = Path(self.path(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(self.path(TMP)) / f"{uuid.uuid4().hex}-{place.name}"
        draft.parent.mkdir(exist_ok=True)
        try:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if on_written is not None:
                on_written()
            draft.replace(place)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(place.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file only if there is none of the name; False when there is."""
        if not self.is_local:
            try:
                self.fs.pipe_file(self.path(name), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if self.exists(name):
                    return False
                raise error
            return True
        place = Path(self.path(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(self.path(TMP)) / uuid.uuid4().hex
        draft.parent.mkdir(exist_ok=True)
        draft.write_bytes(data)
        try:
            os.link(draft, place)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        _sync_folder(place.parent)
        return True

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
        """Names of the files in a folder, relative to the root, sorted; empty when there is none."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return []
        names = (item["name"].rsplit("/", 1)[-1] for item in found if item["type"] == "file")
        return sorted(f"{folder}/{name}" for name in names if name)

    def list_folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, relative to the root, sorted."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return []
        names = (
            i["name"].rstrip("/").rsplit("/", 1)[-1] for i in found if i["type"] == "directory"
        )
        return sorted(f"{folder}/{name}" for name in names)

    def is_empty(self) -> bool:
        """True when there is nothing under the root."""
        self.fs.invalidate_cache()
        try:
            return not self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return True

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


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
