"""From the start of a fresh process, `python -m tests.bench.startup`, to its first token."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.bench.common import ROOT, Item, Workload

SIDES = ("headrace", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Seconds since the process was started: when the model was there, and the first token."""

    side: str
    loaded_s: float
    first_token_s: float


def measure_startup(model: str, *, dtype: str, rounds: int) -> tuple[Startup, ...]:
    """Both sides, in turns, each in a process of its own."""
    return tuple(_start(side, model, dtype) for _ in range(rounds) for side in SIDES)


def _start(side: str, model: str, dtype: str) -> Startup:
    started = time.time()
    command = [sys.executable, "-m", "tests.bench.startup", side, model, dtype]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    loaded, first_token = json.loads(done.stdout.splitlines()[-1])
    return Startup(side=side, loaded_s=loaded - started, first_token_s=first_token - started)


def main() -> None:
    """In the child: load, answer a prompt with one token, print both moments (wall clock)."""
    side, model, dtype = sys.argv[1:]
    from tests.bench.sides import OurSide, TransformersSide
    from workers.loading.files import resolve_model

    workload = Workload(name="first token", items=(Item(tuple(range(100, 164)), 1),))
    if side == "headrace":
        ours = OurSide(model, dtype=dtype)
        loaded = time.time()
        ours.run(workload)
    else:
        peer = TransformersSide(resolve_model(model).folder, dtype=dtype)
        loaded = time.time()
        peer.run(workload, "arrival")
    print(json.dumps([loaded, time.time()]))


if __name__ == "__main__":
    main()
