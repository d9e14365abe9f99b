"""The processes that `tests.bench.overhead` watches. Each prints one line of JSON.

`job SPEC`: the job as a Prefect flow with the fake model. `engine SOURCE`: the same rows
through the engine alone, its time without reading, tokenising and handing out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.e2e.jobs import WordTokenizer, fake_model

MEAN_OUTPUT_TOKENS = 2
MAX_TOKENS = 4
MEMORY_BYTES = 2 << 30


def fake() -> Any:
    """The model of both sides."""
    return fake_model(mean_output_tokens=MEAN_OUTPUT_TOKENS, check_slots=False)


def run_flow(spec_file: Path) -> dict[str, object]:
    """Run the job; seconds from the flow's start to its end."""
    from flows.prefect_flow import make_flow, run_as_flow
    from flows.runner import JobRunner
    from flows.spec import JobSpec
    from storage.status import read_status

    spec = JobSpec.model_validate_json(spec_file.read_text())

    def make_runner(spec: JobSpec, progress: Any) -> AbstractContextManager[Any]:
        return JobRunner(spec, model=fake(), progress=progress)

    started_s = time.monotonic()
    code = run_as_flow(spec, make_flow(make_runner))
    total_s = time.monotonic() - started_s
    status = read_status(spec.output)
    return {"code": code, "total_s": total_s, "num_rows": status.committed_rows}


def run_engine(source: Path) -> dict[str, object]:
    """Run the engine over a file's rows; its own seconds alone."""
    from workers.request import Request, RequestId, SamplingParams
    from workers.setup import EngineOptions, make_engine

    model = fake()
    tokenizer, sampling = WordTokenizer(), SamplingParams(max_tokens=MAX_TOKENS)
    engine = make_engine(
        model.load_backend(), EngineOptions(memory_bytes=MEMORY_BYTES), clock=time.monotonic
    ).engine
    outside_s = 0.0

    def requests() -> Iterator[Request]:
        nonlocal outside_s
        left_s = time.perf_counter()
        number = 0
        for batch in pq.ParquetFile(source).iter_batches(4096, columns=["text"]):
            texts = batch.column(0).to_pylist()
            ready = [
                Request(request_id=RequestId(f"{number + index}"), prompt_token_ids=ids,
                        sampling=sampling)
                for index, ids in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False))
            ]  # fmt: skip
            number += len(ready)
            outside_s += time.perf_counter() - left_s
            yield from ready
            left_s = time.perf_counter()

    started_s = time.perf_counter()
    num_rows = sum(1 for _ in engine.run(requests()))
    engine_s = time.perf_counter() - started_s - outside_s
    return {"code": 0, "total_s": engine_s, "num_rows": num_rows}


def main() -> None:
    kind, path = sys.argv[1], Path(sys.argv[2])
    told = {"job": run_flow, "engine": run_engine}[kind](path)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
