"""The sides of the throughput benchmark: ours and its peers, by name, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flows.calibration import num_cores
from tests.bench.common import ROOT
from tests.bench.peers.environments import bench_folder, environment_folder, python_of
from tests.bench.peers.models import model_for
from tests.bench.peers.process import RunnerProcess
from tests.bench.peers.protocol import Settings
from workers.loading.files import ModelFiles

OURS = "headrace"
DTYPES = ("bfloat16", "float32", "int8")
KV_BYTES = 2 << 30
"""Memory for keys and values, the same for every side."""

TCMALLOC_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An engine that a side can be.

    Attributes:
        runner: module of `tests.bench.peers`.
        environment: whose Python runs it; None for ours.
        dtypes: number formats that it can be asked for.
        is_slow: it runs in the first round only.
        options: of the runner.
    """

    runner: str
    environment: str | None
    dtypes: tuple[str, ...] = DTYPES
    is_slow: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


_TRANSFORMERS = Kind(
    runner="transformers_runner",
    environment="transformers",
    dtypes=("bfloat16", "float32"),
    is_slow=True,
)
KINDS = {
    OURS: Kind(runner="headrace_runner", environment=None),
    "vllm": Kind(runner="vllm_runner", environment="vllm"),
    "llamacpp": Kind(runner="llamacpp_runner", environment="llamacpp", is_slow=True),
    "openvino": Kind(runner="openvino_runner", environment="openvino"),
    "transformers": _TRANSFORMERS,
    "transformers-cb": Kind(
        runner=_TRANSFORMERS.runner,
        environment=_TRANSFORMERS.environment,
        dtypes=_TRANSFORMERS.dtypes,
        is_slow=True,
        options={"mode": "continuous"},
    ),
}
STANDS_FOR = {"transformers": ("transformers", "transformers-cb")}
"""Sides for which one name on the command line stands."""


class Variant(NamedTuple):
    """How a side is set for a workload; another variant is another process."""

    prefix_caching: bool
    quick_start: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An engine in a number format. `label` names it in figures and tables."""

    kind_name: str
    dtype: str
    label: str
    options: Mapping[str, str]

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]

    def prepare(self, files: ModelFiles) -> None:
        """Make its environment and its form of the model if they are missing: minutes of work."""
        if self.kind.environment:
            python_of(self.kind.environment)
        model_for(self.kind_name, self.dtype, files)

    def start(self, variant: Variant, files: ModelFiles) -> RunnerProcess:
        """Start its process."""
        environment = self.kind.environment
        python = str(python_of(environment)) if environment else sys.executable
        settings = Settings(
            model=model_for(self.kind_name, self.dtype, files),
            dtype=self.dtype,
            threads=num_cores(),
            kv_bytes=KV_BYTES,
            prefix_caching=variant.prefix_caching,
            quick_start=variant.quick_start,
            options={**self.kind.options, **self.options},
        )
        command = [python, "-m", f"tests.bench.peers.{self.kind.runner}", settings.as_argument()]
        name = self.label + ("+prefixes" if variant.prefix_caching else "")
        return RunnerProcess(
            name,
            command,
            log=bench_folder() / "logs" / f"{name.replace(':', '-')}.log",
            cwd=ROOT,
            environ=environ_of(self.kind_name),
        )


def parse_sides(names: str, default_dtype: str) -> tuple[Side, ...]:
    """Ours first, then the peers of `NAME[:DTYPE][@OPTION=VALUE]...`, separated by commas.

    Peers without a number format take the default; those that lack the default are left out, those
    that lack one that was asked for are an error.

    Raises:
        ValueError: unknown engine or format.
    """
    sides = {OURS: Side(kind_name=OURS, dtype=default_dtype, label=OURS, options={})}
    for text in filter(None, names.split(",")):
        for side in _parse(text, default_dtype):
            sides[side.label] = side
    return tuple(sides.values())


def _parse(text: str, default_dtype: str) -> Iterator[Side]:
    head, *options = text.strip().split("@")
    name, _, asked_dtype = head.partition(":")
    dtype = asked_dtype or default_dtype
    if name not in KINDS:
        raise ValueError(f"{name!r} is no peer; there are {', '.join(KINDS)}")
    pairs = (option.partition("=") for option in options)
    for kind_name in STANDS_FOR.get(name, (name,)):
        if dtype in KINDS[kind_name].dtypes:
            label = "@".join([kind_name + (f":{dtype}" if asked_dtype else ""), *options])
            yield Side(
                kind_name=kind_name,
                dtype=dtype,
                label=label,
                options={key: value for key, _, value in pairs},
            )
        elif asked_dtype:
            raise ValueError(f"{kind_name} has no {dtype}; it has {KINDS[kind_name].dtypes}")


def environ_of(kind_name: str) -> dict[str, str]:
    """The whole environment of a side's process. Nothing asks a model hub or reports its usage."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    environ["TOKENIZERS_PARALLELISM"] = "false"
    if kind_name == "vllm":
        environ |= _vllm_environ()
    return environ


def _vllm_environ() -> dict[str, str]:
    """Its `auto` binds one thread fewer than there are cores: they are named. What it compiles is
    kept between runs, so only the first start ever pays for it in full.
    """
    cores = sorted(os.sched_getaffinity(0))
    preloaded = [environment_folder("vllm") / "lib" / "libiomp5.so", *_tcmalloc()]
    cache = bench_folder() / "cache"
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "LD_PRELOAD": ":".join(str(library) for library in preloaded if library.exists()),
    }


def _tcmalloc() -> Sequence[Path]:
    found = [path for folder in TCMALLOC_FOLDERS for path in folder.glob("libtcmalloc_minimal.so*")]
    if not found:
        print(
            "vLLM runs without tcmalloc, which costs it speed: install libtcmalloc-minimal4",
            file=sys.stderr,
        )
    return found[:1]


def agreement(
    left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], *, num_tokens: int
) -> float:
    """Share of rows whose first tokens are equal: evidence that both sides did the same."""
    same = [a[:num_tokens] == b[:num_tokens] for a, b in zip(left, right, strict=True)]
    return sum(same) / len(same)
