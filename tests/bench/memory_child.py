"""The process that `tests.bench.memory` watches: a job with the fake model, in the real runner.

Prints one line of JSON: when the first result and the end came (wall clock), and how many rows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable

from flows.progress import Progress, RowLike
from flows.runner import run_job
from flows.spec import JobSpec
from tests.e2e.jobs import fake_model


class FirstResult(Progress):
    """Progress that remembers when the first rows came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: float | None = None

    def add_rows(self, rows: Iterable[RowLike]) -> None:
        self.came = self.came or time.time()
        super().add_rows(rows)


def main() -> None:
    source, output = sys.argv[1:]
    spec = JobSpec.model_validate(
        {
            "input": source,
            "output": output,
            "prompt": {"column": "text", "raw": True},
            "sampling": {"max_tokens": 4},
            "engine": {"memory": "2GiB"},
        }
    )
    progress = FirstResult()
    model = fake_model(mean_output_tokens=2, check_slots=False)
    summary = run_job(spec, model=model, progress=progress)
    told = {"first_result": progress.came, "end": time.time(), "num_rows": summary.num_done}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
