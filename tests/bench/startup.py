"""From the start of a fresh process, `python -m tests.bench.startup`, to its first token."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from tests.bench.common import ROOT, Item, Workload

SIDES = ("headrace", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Seconds from the start of the process to its first token."""

    side: str
    first_token_s: float


def measure_startup(model: str, *, dtype: str, rounds: int) -> tuple[Startup, ...]:
    """Both sides, in turns, each in a process of its own."""
    return tuple(_start(side, model, dtype) for _ in range(rounds) for side in SIDES)


def _start(side: str, model: str, dtype: str) -> Startup:
    started = time.time()
    command = [sys.executable, "-m", "tests.bench.startup", side, model, dtype]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Startup(side=side, first_token_s=float(done.stdout.split()[-1]) - started)


def main() -> None:
    """In the child: load, answer a prompt with one token, print the moment (wall clock)."""
    side, model, dtype = sys.argv[1:]
    from tests.bench.sides import OurSide, TransformersSide
    from workers.loading.files import resolve_model

    workload = Workload(name="first token", items=(Item(tuple(range(100, 164)), 1),))
    files = resolve_model(model)
    if side == "headrace":
        OurSide(files, dtype=dtype).run(workload)
    else:
        TransformersSide(files.folder, dtype=dtype).run(workload, "arrival")
    print(time.time())


if __name__ == "__main__":
    main()
