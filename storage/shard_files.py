"""The result files of a shard: one, or one for each of its partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from storage.files import result_options
from storage.joined import joined, write_results
from storage.marker import ShardSummary
from storage.objects import ObjectStore
from storage.partition_files import Written, write_partitions
from storage.partitions import ShardPartitions
from storage.results import ResultColumns, result_schema
from storage.shards import Shard
from storage.source import Dataset

RESULTS = "results"


def result_name(shard: Shard, partitions: ShardPartitions | None) -> str:
    """The result file of a shard, or of one of several partitions the folder of theirs."""
    if partitions is None:
        return f"{RESULTS}/{shard.name}.parquet"
    files = partitions.files(RESULTS)
    return files[0] if len(files) == 1 else RESULTS


def result_files(committed: ShardSummary, partitions: ShardPartitions | None) -> list[str]:
    """The result files of a committed shard, in the order of its rows."""
    return [committed.file] if partitions is None else partitions.files(RESULTS)


def write_shard(
    store: ObjectStore,
    shard: Shard,
    rows: Iterable[pa.Table],
    dataset: Dataset,
    columns: ResultColumns,
    partitions: ShardPartitions | None,
    *,
    on_step: Callable[[str], None] = lambda _: None,
) -> Written:
    """Write the result file of a shard, or of each of its partitions.

    Args:
        store: the output.
        shard: which rows.
        rows: the computed columns of all of them, in order.
        dataset: the input, for the kept columns.
        columns: optional columns of the results.
        partitions: those of the shard; None: it has one file.
        on_step: told the name of every step.
    """
    if partitions is None:
        name = result_name(shard, None)
        num_bytes = write_results(
            store, name, rows, shard, dataset, columns,
            on_written=lambda: on_step("result_durable"),
        )  # fmt: skip
        return Written(1, num_bytes)
    schema = result_schema(dataset.schema, columns)
    return write_partitions(
        store,
        joined(rows, shard, dataset, columns),
        partitions.files(RESULTS),
        partitions.num_rows.tolist(),
        schema=schema,
        options=result_options(schema, columns),
        on_step=on_step,
    )
