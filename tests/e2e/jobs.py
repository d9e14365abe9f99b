"""Small real jobs for end-to-end tests: a dataset, a fake or a tiny model, and a process that can
be killed.

As a program (`python -m tests.e2e.jobs JOB.json`) it runs one job the way `flows run` does, with a
chosen model, and appends the tokens of every computed batch (of encoding jobs: its texts) to a log,
so that a test can add up what all the killed runs together have computed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flows.model import Model, Vectors
from workers.backends.base import Backend, Batch
from workers.backends.fake import FakeBackend, FakeFaults, hashed_script
from workers.backends.fake_encoder import FakeEncodeFaults, FakeEncoder
from workers.encoding import PackedTexts
from workers.sequence import FindStop

VOCAB_SIZE = 1000


def write_dataset(path: Path, num_rows: int, *, seed: int = 0, row_group_size: int = 500) -> Path:
    """Rows of `id`, `text` (1 to 30 words, some repeated between rows) and `n`."""
    rng = random.Random(seed)
    words = ["red", "green", "blue", "stone", "river", "wheel", "mill", "water", "grain", "gate"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 30))) for _ in range(num_rows)]
    table = pa.table(
        {
            "id": pa.array([f"row-{i:07d}" for i in range(num_rows)]),
            "text": pa.array(texts),
            "n": pa.array(range(num_rows), pa.int64()),
        }
    )
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


class WordTokenizer:
    """One token a word; decodes to `<id>` words."""

    has_chat_template = False
    vocab_size = VOCAB_SIZE

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        del add_special_tokens
        return [
            [1 + zlib.crc32(word.encode()) % (VOCAB_SIZE - 1) for word in text.split()]
            for text in texts
        ]

    def truncate(self, texts: PackedTexts, max_len: int, *, side: str | None = None) -> Any:
        lists = [
            texts.token_ids_T[end - count : end].tolist()
            for end, count in zip(texts.ends_N, texts.lengths_N, strict=True)
        ]
        cut = [ids[-max_len:] if side == "left" else ids[:max_len] for ids in lists]
        return PackedTexts.from_lists(cut), texts.lengths_N > max_len

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(f"<{token}>" for token in ids if token) for ids in batch]

    def text(self, ids: Sequence[int], *, stop_string: str | None = None) -> str:
        (whole,) = self.decode_batch([ids])
        return whole if stop_string is None else whole[: whole.rfind(stop_string)]

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        raise ValueError("no chat template")

    def find_stop(self, stops: tuple[str, ...]) -> FindStop:
        def find(token_ids: list[int]) -> str | None:
            (text,) = self.decode_batch([token_ids])
            return next((stop for stop in stops if stop in text), None)

        return find


def fake_model(
    *,
    faults: FakeFaults | None = None,
    on_execute: Callable[[Batch], None] | None = None,
    mean_output_tokens: int = 12,
    check_slots: bool = True,
) -> Model:
    """A model whose answers are a function of the row id."""

    def load_backend() -> Backend:
        return FakeBackend(
            script=hashed_script(VOCAB_SIZE, 0, mean_output_tokens),
            faults=faults,
            vocab_size=VOCAB_SIZE,
            on_execute=on_execute,
            check_slots=check_slots,
        )

    return Model(
        fingerprint="fake-1",
        generation_config={},
        load_tokenizer=WordTokenizer,
        load_backend=load_backend,
    )


FAKE_WIDTH = 8


def fake_encoder_model(
    *,
    task: Any = "embed",
    on_execute: Callable[[PackedTexts], None] | None = None,
    token_s: float = 0.0,
    faults: FakeEncodeFaults | None = None,
    max_len: int = 512,
) -> Model:
    """A model whose vectors are a function of a text's words."""
    width = 1 if task == "score" else FAKE_WIDTH

    def load_encoder() -> FakeEncoder:
        return FakeEncoder(
            width, task=task, on_execute=on_execute, token_s=token_s, faults=faults, max_len=max_len
        )

    labels = tuple(f"LABEL_{index}" for index in range(width)) if task == "classify" else ()
    return Model(
        fingerprint="fake-encoder-1",
        generation_config={},
        load_tokenizer=WordTokenizer,
        load_backend=lambda: FakeBackend(script=hashed_script(VOCAB_SIZE, 0, 1)),
        load_encoder=load_encoder,
        vectors=Vectors(width, labels),
    )


BEHAVIOUR = "HEADRACE_TEST_WORKERS"
"""Environment variable with a `Behaviour` as JSON, for the worker processes of a test."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the fake models of worker processes do.

    Attributes:
        delay_s: seconds of every step.
        token_s: seconds of every token of a step.
        killers: ids of rows whose computation ends the process with SIGKILL; of encoding jobs,
            words in their text.
        log: file that every batch is counted in: its tokens; of encoding jobs, its texts.
        mean_output_tokens: of the answers.
    """

    delay_s: float = 0.0
    token_s: float = 0.0
    killers: tuple[str, ...] = ()
    log: str | None = None
    mean_output_tokens: int = 12

    def environ(self) -> dict[str, str]:
        return {BEHAVIOUR: json.dumps(asdict(self))}


def worker_model(spec: Any) -> Model:
    """The fake model of a worker process, as `Behaviour` says."""
    behaviour = Behaviour(**json.loads(os.environ.get(BEHAVIOUR, "{}")))
    log = None if behaviour.log is None else TokenLog(Path(behaviour.log))
    killers = frozenset(behaviour.killers)
    if spec.task != "generate":
        return worker_encoder_model(spec.task, behaviour, log)

    def on_execute(batch: Batch) -> None:
        if killers and any(item.seq.request.request_id in killers for item in batch.segments):
            os.kill(os.getpid(), signal.SIGKILL)
        if log is not None:
            log(batch)
        time.sleep(behaviour.delay_s + behaviour.token_s * batch.num_tokens)

    return fake_model(on_execute=on_execute, mean_output_tokens=behaviour.mean_output_tokens)


def worker_encoder_model(task: str, behaviour: Behaviour, log: TokenLog | None) -> Model:
    """The same for encoding jobs."""
    words = WordTokenizer().encode_batch(behaviour.killers, add_special_tokens=False)
    killers = [token for ids in words for token in ids]

    def on_execute(texts: PackedTexts) -> None:
        if killers and np.isin(texts.token_ids_T, killers).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if log is not None:
            log.add(len(texts))
        time.sleep(behaviour.delay_s)

    return fake_encoder_model(task=task, token_s=behaviour.token_s, on_execute=on_execute)


@dataclass
class TokenLog:
    """Appends the size of every batch to a file, in a way that survives SIGKILL."""

    path: Path
    delay_s: float = 0.0

    def __call__(self, batch: Batch) -> None:
        self.add(batch.num_tokens)

    def add(self, count: int) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{count}\n".encode())
        if self.delay_s:
            time.sleep(self.delay_s)

    def total(self) -> int:
        return sum(int(line) for line in self.path.read_text().split()) if self.path.exists() else 0


def read_results(output: Path) -> list[dict[str, Any]]:
    """All committed rows, in the order of the files' names: the order of the input."""
    files = sorted((output / "results").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what may differ from run to run: timings, attempts, cache hits."""
    volatile = {"queue_s", "run_s", "attempts", "cached_tokens"}
    return [{k: v for k, v in row.items() if k not in volatile} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--real", action="store_true", help="the job's own model, not the fake one")
    parser.add_argument("--flow", action="store_true", help="as a Prefect flow")
    parser.add_argument("--calls", type=Path, help="where to list the HTTP requests that were made")
    arguments = parser.parse_args(argv)

    from flows.model import open_model
    from flows.runner import run_job
    from flows.spec import JobSpec
    from tests.e2e.jobs import worker_model  # as a module's that worker processes find

    spec = JobSpec.model_validate(json.loads(arguments.spec.read_text()))
    if spec.engine.workers is not None:
        find_model = open_model if arguments.real else worker_model
        if arguments.flow:
            return run_worker_flow(spec)
        return run_job(spec, find_model=find_model).exit_code(spec.max_error_rate)
    log = TokenLog(arguments.log, arguments.delay_s)
    model = counted_real_model(spec, log) if arguments.real else counted_fake_model(spec, log)
    if arguments.calls is not None:
        list_calls(arguments.calls)
    if arguments.flow:
        return run_flow(spec, model)
    summary = run_job(spec, model=model)
    return summary.exit_code(spec.max_error_rate)


def run_worker_flow(spec: Any) -> int:
    """As a Prefect flow, with the fake model."""
    from flows.prefect_flow import make_flow, run_as_flow
    from flows.runner import JobRunner
    from tests.e2e.jobs import worker_model

    def make_runner(spec: Any, progress: Any) -> JobRunner:
        return JobRunner(spec, find_model=worker_model, progress=progress)

    return run_as_flow(spec, make_flow(make_runner))


def flow_command(folder: Path, spec: Any, log: TokenLog, *options: str) -> list[str]:
    """Runs a fake job as a flow, in a process of its own."""
    path = folder / "job.json"
    path.write_text(json.dumps(spec.model_dump(mode="json")))
    command = [sys.executable, "-m", "tests.e2e.jobs", str(path), "--log", str(log.path)]
    return [*command, "--flow", *options]


def run_flow(spec: Any, model: Model) -> int:
    """Run a job as a Prefect flow; returns the exit status."""
    from flows.prefect_flow import make_flow, run_as_flow
    from flows.runner import JobRunner

    run = make_flow(lambda spec, progress: JobRunner(spec, model=model, progress=progress))
    return run_as_flow(spec, run)


def list_calls(place: Path) -> None:
    """List every HTTP request that this process makes, in a file, when it ends."""
    import atexit

    import httpx

    calls: list[str] = []

    def listed(send: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, request: httpx.Request, **options: Any) -> Any:
            calls.append(f"{request.method} {request.url.path}")
            return send(self, request, **options)

        return wrapper

    for kind in (httpx.Client, httpx.AsyncClient):
        setattr(kind, "send", listed(kind.send))  # noqa: B010 - the type checker knows better
    atexit.register(lambda: place.write_text("\n".join(calls)))


def counted_fake_model(spec: Any, log: TokenLog) -> Model:
    """The fake model of the job's task, with every batch logged; of encoding jobs, its texts."""
    if spec.task == "generate":
        return fake_model(on_execute=log)
    return fake_encoder_model(task=spec.task, on_execute=lambda texts: log.add(len(texts)))


def counted_real_model(spec: Any, log: TokenLog) -> Model:
    """The job's own model, with every batch logged."""
    from dataclasses import replace

    from flows.model import open_model

    model = open_model(spec)

    def load_backend() -> Backend:
        backend = model.load_backend()
        execute = backend.execute

        class Counted:
            """The backend, counting."""

            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

            def execute(self, batch: Batch) -> Any:
                log(batch)
                return execute(batch)

        return Counted()  # type: ignore[return-value]

    return replace(model, load_backend=load_backend)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
