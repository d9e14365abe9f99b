"""The processes that `tests.bench.surge` watches: one way of encoding a partitioned dataset.

    python -m tests.bench.surge_child WAY SOURCE OUTPUT MODEL DTYPE

The model is loaded and a small job is done first, so that all libraries have what they keep; then
`ready` is printed. From there on the time counts, until the last partition's file is there. The
last line is JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from workers.encoding import EncodeBackend

KEY, TEXT = "key", "text"
ALL = 1 << 40
WARM_TEXTS = 2000

OURS: dict[str, dict[str, object]] = {
    "ours": {},
    "per partition": {"min_texts": 1},
    "fixed batch": {"min_texts": ALL, "max_texts": ALL},
    "without asynchronous writing": {},
    "without zero-copy": {},
}


def ready() -> float:
    gc.collect()
    if sys.platform == "linux":  # what loading and warming up have left is no part of the model
        ctypes.CDLL(None).malloc_trim(0)
    print("ready", flush=True)
    return time.monotonic()


class Kept:
    """A loaded encoder that serves several jobs."""

    def __init__(self, backend: EncodeBackend) -> None:
        self.info = backend.info
        self.execute = backend.execute

    def close(self) -> None:
        """The next job needs it."""


def run_ours(way: str, source: Path, output: Path, model: str, dtype: str) -> dict[str, object]:
    """The job in this process, its model loaded beforehand."""
    from flows.model import open_model
    from flows.runner import run_job
    from flows.spec import JobSpec

    spec = JobSpec.model_validate(
        {
            "input": str(source),
            "output": str(output),
            "task": "embed",
            "model": model,
            "prompt": {"column": TEXT},
            "partition_by": [KEY],
            "engine": {"dtype": dtype},
            "encode": OURS[way],
        }
    )
    found = open_model(spec)
    assert found.load_encoder is not None
    backend, tokenizer = Kept(found.load_encoder()), found.load_tokenizer()
    loaded = replace(found, load_encoder=lambda: backend, load_tokenizer=lambda: tokenizer)
    with ablated(way, output.parent / "warm"):
        warm_up = spec.model_copy(
            update={"output": str(output.parent / "warm"), "limit": WARM_TEXTS, "overwrite": True}
        )
        run_job(warm_up, model=loaded)
    with ablated(way, output):
        started_s = ready()
        summary = run_job(spec, model=loaded)
        total_s = time.monotonic() - started_s
    return {"total_s": total_s, "num_rows": summary.by_status.get("ok", 0)}


@contextmanager
def ablated(way: str, output: Path) -> Iterator[None]:
    """One part of the design taken out."""
    from flows.fleet.encode_worker import EncodeWorker

    told = EncodeWorker._tell_block

    def tell_and_wait(self: Any, texts: Any, encoded: Any) -> None:
        told(self, texts, encoded)
        shard = texts.part.shard
        if texts.part.ordinals[-1] + 1 < shard.num_rows:
            return  # a slice of an oversize partition: it is committed with the last one
        marker = output / "_markers" / f"{shard.name}.json"
        while not marker.exists():
            time.sleep(0.0005)

    def listed(kind: Any, vectors: np.ndarray, missing: Any = None) -> pa.Array:
        from storage.vectors import vector_type

        del missing
        return pa.array(vectors.tolist(), vector_type(kind))

    patches = {
        "without asynchronous writing": mock.patch.object(
            EncodeWorker, "_tell_block", tell_and_wait
        ),
        "without zero-copy": mock.patch("storage.vectors.vector_array", listed),
    }
    if way not in patches:
        yield
        return
    with patches[way]:
        yield


def grouped(source: Path) -> Iterator[tuple[str, list[str]]]:
    """Key and texts of each partition, in order."""
    table = pq.read_table(source, columns=[KEY, TEXT])
    keys = table[KEY].to_pylist()
    texts = table[TEXT].to_pylist()
    start = 0
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[start]:
            yield keys[start], texts[start:index]
            start = index


def write(output: Path, key: str, vectors: np.ndarray) -> None:
    """A partition's file, zero-copy, as a careful user would."""
    folder = output / f"{KEY}={key}"
    folder.mkdir(parents=True)
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    pq.write_table(pa.table({"embedding": column}), folder / "part-00000.parquet")


def run_theirs(way: str, source: Path, output: Path, model: str) -> dict[str, object]:
    """sentence-transformers, with its pool of processes or in one."""
    import torch
    from sentence_transformers import SentenceTransformer

    model_ = SentenceTransformer(model, device="cpu")
    pool = None
    if "pool" in way:
        pool = model_.start_multi_process_pool(["cpu"] * torch.get_num_threads())

    def encode(texts: Sequence[str]) -> np.ndarray:
        return model_.encode(list(texts), batch_size=32, pool=pool, show_progress_bar=False)

    encode(pq.read_table(source, columns=[TEXT])[TEXT][:WARM_TEXTS].to_pylist())
    output.mkdir()
    started_s = ready()
    num_rows = 0
    if way.startswith("per partition"):
        for key, texts in grouped(source):
            write(output, key, encode(texts))
            num_rows += len(texts)
    else:
        parts = list(grouped(source))
        vectors = encode([text for _, texts in parts for text in texts])
        for key, texts in parts:
            write(output, key, vectors[num_rows : num_rows + len(texts)])
            num_rows += len(texts)
    total_s = time.monotonic() - started_s
    if pool is not None:
        model_.stop_multi_process_pool(pool)
    return {"total_s": total_s, "num_rows": num_rows}


def main() -> None:
    way, source, output, model, dtype = sys.argv[1:]
    if way in OURS:
        told = run_ours(way, Path(source), Path(output), model, dtype)
    else:
        told = run_theirs(way, Path(source), Path(output), model)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
