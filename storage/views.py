"""An output in SQL without `job.duckdb`: the same views in memory, of a local or remote output.

For readers that may neither wait for the file's lock nor rely on its being there. Files are read
through Arrow by the declared schemas: a column that an older file lacks is null.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads

from storage.catalogue import STEP_COSTS, empty_view, hive_source, no_glob
from storage.ledger import JOB, RESULTS, TELEMETRY
from storage.marker import MARKERS
from storage.objects import ObjectStore
from storage.partitions import FILE, PartitionPlan
from storage.record import JobRecord
from storage.results import ResultColumns, computed_fields
from storage.telemetry import TABLES


def open_views(store: ObjectStore) -> duckdb.DuckDBPyConnection:
    """A connection with `results` (the computed columns, and the keys of partitions), the telemetry
    tables and `step_costs`.

    Writes nothing, and may be called while a run goes on. The caller closes it.
    """
    con = duckdb.connect()
    # Arrow relations do not say how many rows they have. The planner would take steps for few, and
    # join them with their costs in a loop: minutes for a million steps, not a fraction of a second.
    con.execute("SET asof_loop_join_threshold = 0")
    _add_results(con, store)
    for table, schema in TABLES.items():
        con.register(table, files_of(store, f"{TELEMETRY}/{table}", schema))
    con.execute(STEP_COSTS)
    return con


def _add_results(con: duckdb.DuckDBPyConnection, store: ObjectStore) -> None:
    data = store.read_or_none(JOB)
    stored = (
        ResultColumns() if data is None else JobRecord.from_bytes(data, store.path(JOB)).columns
    )
    schema = pa.schema(computed_fields(ResultColumns(vector=stored.vector)))
    if not stored.partition_by:
        con.register("results", files_of(store, RESULTS, schema))
        return
    keys = PartitionPlan.read(store).keys.schema
    folder = store.local_path(RESULTS)
    if folder is None:
        con.register("results", partitioned_files(store, RESULTS, schema, keys))
    elif not store.list(MARKERS):
        empty_view(con, "results", pa.unify_schemas([schema, keys]))
    else:  # Arrow would have 100,000 small files in memory at a time
        files = f"{no_glob(str(folder.resolve()))}/**/*.parquet"
        con.execute(f"CREATE TEMP VIEW results AS {hive_source(con, files, schema, keys)}")


def partitioned_files(
    store: ObjectStore, folder: str, schema: pa.Schema, keys: pa.Schema
) -> pads.Dataset | pa.Table:
    """All Parquet files below a folder as one relation, with the keys that their folders name
    behind the files' own columns.
    """
    everything = pa.unify_schemas([schema, keys])
    if not store.list(MARKERS):
        return everything.empty_table()
    return pads.dataset(
        store.path(folder),
        schema=everything,
        format="parquet",
        filesystem=store.fs,
        partitioning=pads.partitioning(keys, flavor="hive"),
    )


def files_of(store: ObjectStore, folder: str, schema: pa.Schema) -> pads.Dataset | pa.Table:
    """A folder's Parquet files as one relation, read when asked."""
    names = [store.path(name) for name in store.list(folder) if name.endswith(".parquet")]
    if not names:
        return schema.empty_table()
    return pads.dataset(names, schema=schema, format="parquet", filesystem=store.fs)


def each_file(store: ObjectStore, folder: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """The same file by file, in the order of their names: a scan would read many ahead."""
    for name in store.list(folder):
        if name.endswith(".parquet"):
            path = [store.path(name)]
            found = pads.dataset(path, schema=schema, format="parquet", filesystem=store.fs)
            yield found.to_table()


def each_partition(
    store: ObjectStore, partitions: PartitionPlan, committed: Container[int], schema: pa.Schema
) -> Iterator[pa.Table]:
    """The files of committed partitions one by one, with the keys that the plan has for them: a
    folder's name cannot tell every key to pyarrow.
    """
    folders, shards = partitions.folders.to_pylist(), partitions.shards.tolist()
    for index, (folder, shard) in enumerate(zip(folders, shards, strict=True)):
        if shard in committed:
            path = [store.path(f"{RESULTS}/{folder}/{FILE}")]
            found = pads.dataset(path, schema=schema, format="parquet", filesystem=store.fs)
            yield _with_keys(found.to_table(), partitions.keys.slice(index, 1))


def _with_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """One key beside all rows of its partition."""
    repeated = keys.take(pa.array(np.zeros(rows.num_rows, np.int64)))
    for name in keys.column_names:
        rows = rows.append_column(keys.field(name), repeated.column(name))
    return rows
