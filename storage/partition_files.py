"""The files of a shard's partitions: written together, each seen only when it is whole.

On a local disk all of them are drafted in one folder under `_tmp/`, made durable by one call
for the whole file system (an fsync a file would take most of the time of small files), renamed,
and the renames made durable by another. To a remote store they are put by a few threads; each shows
when it is whole, and the shard's marker is written behind all.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from storage.durable import FolderSync, sync_file, sync_folders
from storage.errors import OutputError
from storage.files import GROUP_BYTES, GROUP_ROWS, PLAIN, SMALL_BYTES, SMALL_ROWS
from storage.objects import DRAFT, TMP, ObjectStore

LOCAL_THREADS = 4
REMOTE_THREADS = 8
FEW_FILES = 8
"""Up to so many files are synced one by one, so that nobody waits for what others write."""
BUFFER_BYTES = 64 << 10
"""Parquet is written in many small pieces, which are put together here."""
_WAITING = 4
"""Files that wait for a thread, for each one that is written."""


class Written(NamedTuple):
    """What was written.

    Attributes:
        num_files: files.
        num_bytes: of all.
    """

    num_files: int
    num_bytes: int


class _Batch(Protocol):
    """Files that are written together."""

    def put(self, name: str, table: pa.Table) -> None:
        """Write a file, now or in a moment."""
        ...

    def stream(self, name: str, groups: Iterator[pa.Table]) -> None:
        """Write a file row group by row group."""
        ...

    def commit(self) -> Written:
        """Wait for all files; then they are durable and seen."""
        ...

    def close(self) -> None:
        """End; what was not committed goes."""
        ...


def write_partitions(
    store: ObjectStore,
    tables: Iterable[pa.Table],
    files: Sequence[str],
    num_rows: Sequence[int],
    *,
    schema: pa.Schema,
    options: dict[str, Any],
    on_step: Callable[[str], None],
) -> Written:
    """Write the rows of partitions to a file each.

    Args:
        store: the output.
        tables: the rows of all partitions, in order.
        files: of each partition, relative to the output.
        num_rows: of each.
        schema: of the files.
        options: of `pq.ParquetWriter`.
        on_step: told the name of every step.

    Raises:
        OutputError: a file cannot be written.
    """
    form = _Form(schema, options)
    kind = _LocalBatch if store.is_local else _RemoteBatch
    rows = _Rows(tables)
    try:
        batch = kind(store, form, len(files), on_step)
        try:
            for name, count in zip(files, num_rows, strict=True):
                on_step("before_partition")
                _write_one(batch, name, rows, count, on_step)
            rows.end()
            return batch.commit()
        finally:
            batch.close()
    except OSError as fault:
        raise OutputError(
            f"the partitions under {store.url} cannot be written: {fault}. What was written before "
            "stays; mend it and run the same command again"
        ) from fault


def _write_one(
    batch: _Batch, name: str, rows: _Rows, count: int, on_step: Callable[[str], None]
) -> None:
    """One partition. Whatever is larger than a row group is not held as a whole."""
    groups = rows.groups(count)
    first = next(groups)
    if first.num_rows == count:
        batch.put(name, first)
    else:
        batch.stream(name, _chained(first, groups, on_step))
    for _ in groups:
        raise AssertionError(name)


def _chained(
    first: pa.Table, rest: Iterator[pa.Table], on_step: Callable[[str], None]
) -> Iterator[pa.Table]:
    yield first
    for group in rest:
        on_step("before_row_group")
        yield group


class _Rows:
    """Rows in order, taken by partition."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._tables = iter(tables)
        self._held: pa.Table | None = None

    def groups(self, count: int) -> Iterator[pa.Table]:
        """The next `count` rows, in tables that make a row group each, or one small file. What is
        in memory already is sliced, and not copied.
        """
        pieces: list[pa.Table] = []
        rows = num_bytes = 0
        while count:
            held = next(self._tables) if self._held is None else self._held
            taken = min(count, held.num_rows)
            self._held = held.slice(taken) if taken < held.num_rows else None
            if taken:
                pieces.append(held.slice(0, taken))
            count -= taken
            rows += taken
            num_bytes += pieces[-1].nbytes if len(pieces) > 1 else 0
            if count and len(pieces) > 1 and (rows >= GROUP_ROWS or num_bytes >= GROUP_BYTES):
                yield pa.concat_tables(pieces)
                pieces, rows, num_bytes = [], 0, 0
        if pieces:
            yield pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)

    def end(self) -> None:
        """Let the tables find that they are at their end: a check may wait there."""
        for table in self._tables:
            assert not table.num_rows


class _Form(NamedTuple):
    """How files are written."""

    schema: pa.Schema
    options: dict[str, Any]

    def write(self, file: Any, tables: Iterable[pa.Table]) -> None:
        with pq.ParquetWriter(file, self.schema, **self.options) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=GROUP_ROWS)

    def write_one(self, file: Any, table: pa.Table) -> None:
        """A file of one table."""
        is_small = table.num_rows <= SMALL_ROWS and table.nbytes <= SMALL_BYTES
        form = self._replace(options=dict(PLAIN)) if is_small else self
        form.write(file, [table])

    def bytes_of(self, table: pa.Table) -> bytes:
        """A file of one table, as a store takes it."""
        sink = pa.BufferOutputStream()
        self.write_one(sink, table)
        return sink.getvalue().to_pybytes()


class _Pool:
    """Threads that write, with a bounded queue. A failure is raised by the next call."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="partitions")
        self._most = threads * (1 + _WAITING)
        self._pending: deque[Future[int]] = deque()
        self.results: list[int] = []

    def submit(self, work: Callable[[], int]) -> None:
        while len(self._pending) >= self._most:
            self._take()
        self._pending.append(self._pool.submit(work))

    def wait(self) -> None:
        """Until all is done."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        self.results.append(self._pending.popleft().result())

    def close(self) -> None:
        """Nothing more is begun; what has begun ends."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _LocalBatch:
    """Files of a local output."""

    def __init__(
        self, store: ObjectStore, form: _Form, num_files: int, on_step: Callable[[str], None]
    ) -> None:
        self._store = store
        self._form = form
        self._on_step = on_step
        self._folder = Path(store.path(TMP)) / f"{uuid.uuid4().hex}{DRAFT}partitions"
        self._folder.mkdir(parents=True)
        self._sync = FolderSync(self._folder)
        self._each = num_files <= FEW_FILES or not self._sync.is_possible
        self._pool = _Pool(LOCAL_THREADS)
        self._places: list[Path] = []

    def put(self, name: str, table: pa.Table) -> None:
        draft = self._draft(name)
        self._pool.submit(
            lambda: self._write(draft, lambda file: self._form.write_one(file, table))
        )

    def stream(self, name: str, groups: Iterator[pa.Table]) -> None:
        num_bytes = self._write(self._draft(name), lambda file: self._form.write(file, groups))
        self._pool.submit(lambda: num_bytes)

    def _draft(self, name: str) -> str:
        self._places.append(Path(self._store.path(name)))
        return f"{self._folder}/{len(self._places) - 1:08d}"

    def _write(self, draft: str, write: Callable[[Any], None]) -> int:
        with pa.OSFile(draft, "wb") as file, pa.BufferedOutputStream(file, BUFFER_BYTES) as buffer:
            write(buffer)
            num_bytes = buffer.tell()
        if self._each:
            sync_file(Path(draft))
        return num_bytes

    def commit(self) -> Written:
        self._pool.wait()
        if not self._each:
            self._sync.sync()
        self._on_step("result_durable")
        touched = self._show()
        if self._each:
            sync_folders(touched)
        else:
            self._sync.sync()
        return Written(len(self._places), sum(self._pool.results))

    def _show(self) -> set[Path]:
        """Rename all drafts; the folders whose entries have changed."""
        top = Path(self._store.root)
        touched: set[Path] = set()
        for number, place in enumerate(self._places):
            if place.parent not in touched:
                place.parent.mkdir(parents=True, exist_ok=True)
                touched.add(place.parent)
                if self._each:
                    touched.update(p for p in place.parents if p.is_relative_to(top))
            os.replace(f"{self._folder}/{number:08d}", place)
            self._on_step("partition_written")
        return touched

    def close(self) -> None:
        self._pool.close()
        self._sync.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _RemoteBatch:
    """Files of a remote output."""

    def __init__(
        self, store: ObjectStore, form: _Form, num_files: int, on_step: Callable[[str], None]
    ) -> None:
        self._store = store
        self._form = form
        self._num_files = num_files
        self._on_step = on_step
        self._pool = _Pool(REMOTE_THREADS)

    def put(self, name: str, table: pa.Table) -> None:
        self._pool.submit(lambda: self._put(name, table))

    def _put(self, name: str, table: pa.Table) -> int:
        data = self._form.bytes_of(table)
        self._store.fs.pipe_file(self._store.path(name), data)
        return len(data)

    def stream(self, name: str, groups: Iterator[pa.Table]) -> None:
        with self._store.writer(name) as file:
            self._form.write(file, groups)
            num_bytes = file.tell()
        self._pool.submit(lambda: num_bytes)

    def commit(self) -> Written:
        self._pool.wait()
        self._on_step("partition_written")
        return Written(self._num_files, sum(self._pool.results))

    def close(self) -> None:
        self._pool.close()
