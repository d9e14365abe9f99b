"""Native CPU kernels: compiled once on this machine with the system compiler, or not used.

The source is plain C++ with OpenMP, called through ctypes with pointers, so nothing of torch is
compiled against and building takes a second or two. The library is kept in the user's cache under a
name that says what it was built from (source, compiler, flags, processor), so it is rebuilt when
any of them changes. Without a compiler, or where HEADRACE_KERNELS=off, `load` returns None and the
torch code is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(_FOLDER.glob("*.cpp")))
HEADERS = tuple(sorted(_FOLDER.glob("*.h")))
ABI_VERSION = 2
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
BUILD_TIMEOUT_S = 120


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had.

    torch must be imported first: it brings the OpenMP library whose threads the kernels share.
    """
    if os.environ.get("HEADRACE_KERNELS", "on") == "off":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None or platform.machine() != "x86_64":
        _log.info("no native kernels: no C++ compiler for %s", platform.machine())
        return None
    path = _library_path(compiler)
    try:
        if not path.exists():
            _build(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("no native kernels, torch code is used instead: %s", error)
        return None
    assert library.headrace_abi_version() == ABI_VERSION
    return library


def _library_path(compiler: str) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=BUILD_TIMEOUT_S
    ).stdout
    digest = hashlib.sha256(version + " ".join(FLAGS).encode() + _processor())
    for source in (*SOURCES, *HEADERS):
        digest.update(source.read_bytes())
    return _cache_folder() / f"headrace-{digest.hexdigest()[:24]}.so"


def _processor() -> bytes:
    """What -march=native stands for: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = ("model name", "flags")
    found = {line.split(":")[0].strip(): line for line in lines if line.startswith(wanted)}
    return "\n".join(found.values()).encode()


def _cache_folder() -> Path:
    cache = os.environ.get("HEADRACE_CACHE")
    if cache:
        return Path(cache) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / "kernels"


def _build(compiler: str, path: Path) -> None:
    """Compile to a temporary file and move it in place; of processes that start together one
    compiles and the others wait for it (C58).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _compile(compiler, path)


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(built)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
        )
        if done.returncode:
            raise OSError(f"{compiler} failed ({done.returncode}): {done.stderr[-800:]}")
        built.replace(path)
