"""What the benchmark and the process of a side say to each other: lines of JSON over pipes.

    runner   {"event": "ready", "moments": {...}, "peak_bytes": N}
    bench    {"workload": FILE}
    runner   {"event": "done", "elapsed_s": S, "ended_at": T, "token_ids": [[...], ...], ...}
    bench    closes the pipe: the runner ends

This module runs in every peer's environment, so it needs nothing but the standard library. What
libraries print goes to stderr: the runner keeps the pipe for itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

PROC = Path("/proc")


class Item(NamedTuple):
    """One prompt and the number of tokens that its answer is forced to have.

    `group` names the items whose first `num_prefix_tokens` are the same.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    group: int | None = None
    num_prefix_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a runner is told when it starts.

    Attributes:
        model: folder or file.
        dtype: of weights and products: bfloat16, float32 or int8.
        threads: cores that it may use.
        kv_bytes: memory for keys and values.
        prefix_caching: prompts share prefixes that are worth finding.
        quick_start: the job is so short that start-up counts for more than fast steps.
        options: what else the command line says, by name.
    """

    model: str
    dtype: str
    threads: int
    kv_bytes: int
    prefix_caching: bool = False
    quick_start: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    def number(self, name: str, default: int) -> int:
        """An option that is a whole number."""
        return int(self.options.get(name, default))


class Side(Protocol):
    """One engine, loaded."""

    def reset(self) -> None:
        """Before each run, not timed: forget the prompts of earlier runs."""
        ...

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        """Timed: greedy answers of exactly the lengths wanted, in the order of the items."""
        ...


def serve(load: Callable[[Settings], Side]) -> None:
    """Be a runner until the pipe closes."""
    moments = {"imported": time.time()}
    replies = _own_stdout()
    side = load(Settings(**json.loads(sys.argv[1])))
    moments["loaded"] = time.time()
    load_peak_bytes = peak_bytes()
    _say(replies, {"event": "ready", "moments": moments, "peak_bytes": load_peak_bytes})
    for line in sys.stdin:
        items = read_items(Path(json.loads(line)["workload"]))
        side.reset()
        forget_peaks()
        started = time.perf_counter()
        token_ids = side.generate(items)
        elapsed_s = time.perf_counter() - started
        done = {"elapsed_s": elapsed_s, "ended_at": time.time(), "token_ids": token_ids}
        peak = max(peak_bytes(), load_peak_bytes)
        _say(replies, {"event": "done", **done, "peak_bytes": peak})


def _own_stdout() -> TextIO:
    """The pipe to the benchmark, with descriptor 1 turned to stderr for everyone else."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _say(replies: TextIO, message: Mapping[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def write_items(path: Path, items: Sequence[Item]) -> None:
    """A workload as a runner reads it."""
    path.write_text(json.dumps(items))


def read_items(path: Path) -> list[Item]:
    return [
        Item(tuple(prompt), num_output_tokens, group, num_prefix_tokens)
        for prompt, num_output_tokens, group, num_prefix_tokens in json.loads(path.read_text())
    ]


def peak_bytes() -> int:
    """Highest resident memory of this process and of all below it, each by itself, in sum.

    Memory that they share counts once per process.
    """
    return sum(_high_water_bytes(pid) for pid in family(os.getpid()))


def forget_peaks() -> None:
    """Let `peak_bytes` start again from what is resident now."""
    for pid in family(os.getpid()):
        with suppress(OSError):
            (PROC / str(pid) / "clear_refs").write_text("5")


def _high_water_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            # The name, in brackets, may hold anything: what follows the last one is regular.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    waiting = [pid]
    while waiting:
        here = waiting.pop()
        yield here
        waiting += children.get(here, [])
