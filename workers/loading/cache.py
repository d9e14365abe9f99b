"""Converted GGUF models, kept under the user's cache folder.

A converted model is a Hugging Face folder named after the GGUF file's fingerprint. It is made under
a temporary name and renamed when it is whole, under a lock that dies with its process: several
processes that start together convert once, and one that is killed leaves only a temporary folder,
which the next holder of the lock removes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from filelock import FileLock

from workers.errors import ModelError
from workers.loading.fingerprint import fingerprint
from workers.loading.folder import ModelFiles, open_folder

CONVERTER_VERSION = 1
"""Part of the folder's name: raise it when the converter writes something else."""


def cache_root() -> Path:
    """$HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def converted_gguf(name: str, path: Path, cache_dir: Path) -> ModelFiles:
    """The folder that a GGUF file converts to, made now if it is not there.

    Raises:
        ModelError: the file is damaged or not supported, or the cache cannot be written.
    """
    try:
        identity = fingerprint((), (path,))
    except OSError as fault:
        raise ModelError(f"{path} cannot be read ({fault})") from fault
    target = cache_dir / "gguf" / f"{identity}-v{CONVERTER_VERSION}"
    if not target.is_dir():
        _convert_once(path, target)
    try:
        return open_folder(name, target, identity=identity)
    except ModelError as fault:
        raise ModelError(
            f"the converted model {target} is damaged ({fault}); "
            "delete that folder, and it is made again"
        ) from fault


def _convert_once(path: Path, target: Path) -> None:
    from workers.loading.gguf_convert import convert  # slow import, needed once per model

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if target.is_dir():
                return
            unfinished = target.with_name(f"{target.name}.tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                convert(path, unfinished)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as fault:
        raise ModelError(
            f"{path} could not be converted into {target.parent} ({fault}); "
            "make room there, or set HEADRACE_CACHE to another folder"
        ) from fault
