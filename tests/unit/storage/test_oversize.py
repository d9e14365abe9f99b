"""A partition larger than memory: its parts are streamed into its one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.parts import COMPACT_PARTS
from tests.unit.storage.outputs import write_input
from tests.unit.storage.partitioned import VectorJob

WIDTH = 256
NUM_ROWS = 560_000
BLOCK_ROWS = 4_000

CHILD = """
import sys, threading, time
from pathlib import Path
import numpy as np
import psutil
from storage.allocator import use_system_allocator
from storage.vectors import VectorSpec, vectors_table
from tests.unit.storage.partitioned import VectorJob

use_system_allocator()
folder, width, num_rows, block_rows = Path(sys.argv[1]), *map(int, sys.argv[2:5])
spec = VectorSpec(task="embed", width=width)
job = VectorJob(folder / "in.parquet", folder / "out", spec=spec, kept=("number",))
ledger = job.open()
(shard,) = ledger.shards
writer = ledger.writer(shard)
me = psutil.Process()
before, peak, ended = me.memory_info().rss, 0, False

def watch():
    global peak
    while not ended:
        peak = max(peak, me.memory_info().rss)
        time.sleep(0.005)

thread = threading.Thread(target=watch)
thread.start()
starts = list(range(0, num_rows, block_rows))
half = len(starts) // 2
for start in [start for pair in zip(starts[:half], starts[half:]) for start in pair]:
    ordinals = np.arange(start, start + block_rows, dtype=np.int64)
    vectors = np.repeat(ordinals[:, None].astype(np.float32), width, axis=1)
    table = vectors_table(
        spec, vectors, row_ids=[f"in.parquet:{n}" for n in ordinals], prompt_tokens=ordinals
    )
    writer.add_block(ordinals, table)
    del table, vectors
    writer.checkpoint()
assert writer.close().num_rows == num_rows
ended = True
thread.join()
ledger.release()
print(peak - before)
"""


@pytest.mark.slow
def test_a_partition_larger_than_memory_comes_out_in_order_within_it(tmp_path: Path) -> None:
    table = pa.table(
        {
            "key": pa.array(["k"] * NUM_ROWS),
            "text": pa.array(["t"] * NUM_ROWS),
            "number": np.arange(NUM_ROWS),
        }
    )
    write_input(tmp_path / "in.parquet", table, row_group_size=50_000)
    arguments = [str(tmp_path), str(WIDTH), str(NUM_ROWS), str(BLOCK_ROWS)]
    found = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], check=True, capture_output=True, text=True
    )
    num_bytes = NUM_ROWS * WIDTH * 4
    assert int(found.stdout) < num_bytes / 2
    (file,) = VectorJob(tmp_path / "in.parquet", tmp_path / "out").files()
    parquet, row = pq.ParquetFile(file), 0
    for batch in parquet.iter_batches(batch_size=10_000):
        numbers = np.arange(row, row + batch.num_rows)
        assert np.array_equal(batch.column("number").to_numpy(), numbers)
        vectors = batch.column("embedding").flatten().to_numpy().reshape(-1, WIDTH)
        assert np.array_equal(vectors[:, 0], numbers.astype(np.float32))
        row += batch.num_rows
    assert row == NUM_ROWS
    groups = [parquet.metadata.row_group(n) for n in range(parquet.num_row_groups)]
    assert max(group.num_rows for group in groups) <= 16384


def test_small_parts_of_vectors_are_merged_and_large_ones_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"key": ["k"] * 200, "text": [f"t{n}" for n in range(200)]}
    input_ = write_input(tmp_path / "in.parquet", rows)
    for large_bytes in (1 << 20, 5_000, 1):
        monkeypatch.setattr("storage.parts.LARGE_BYTES", large_bytes)
        job = VectorJob(input_, tmp_path / f"out-{large_bytes}", slice_rows=2, checkpoint_blocks=1)
        seen: list[int] = []
        job.run(
            on_step=lambda _, job=job, seen=seen: seen.append(
                len(list((Path(job.output) / "_checkpoints").rglob("*.parquet")))
            )
        )
        (held,) = job.results().values()
        assert [row["row_id"] for row in held] == [f"in.parquet:{n}" for n in range(200)]
        assert (max(seen) <= COMPACT_PARTS + 1) == (large_bytes > 5_000)
