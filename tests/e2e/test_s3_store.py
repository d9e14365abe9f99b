"""Storage on a real S3 server, with faults in front of it: files, conditions, leases, input."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputError, OutputError, OutputInUse, StorageError
from storage.lease import LEASE, STALE_S, Holder, Lease, living_holder
from storage.ledger import Ledger
from storage.objects import ObjectStore
from storage.record import JobRecord
from storage.remote import LookThenAct
from storage.results import ResultColumns
from storage.rows import read_shard, whole
from storage.s3 import PART_BYTES
from storage.shards import Shard, TokenCost, cut_shards
from storage.source import Dataset, open_dataset
from storage.status import read_status
from tests.services.faults import TRANSIENT, FaultKind, FaultProxy
from tests.services.seaweed import ADMIN, READER, ROTATED, STRANGER, Keys, SeaweedServer, client
from tests.unit.storage.outputs import answer

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


@pytest.fixture
def proxy(s3_environment: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between this process and the server."""
    with FaultProxy(s3_environment.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, s3_bucket: str) -> ObjectStore:
    return ObjectStore(f"s3://{s3_bucket}/out")


# -- files --


def test_files_are_written_read_listed_and_deleted(store: ObjectStore) -> None:
    assert store.is_empty()
    store.write("a/1", b"one")
    store.write("a/1", b"uno")
    store.write("a/deep/3", b"333")
    store.write("top", b"")
    assert store.read("a/1") == b"uno"
    assert store.read_or_none("a/2") is None
    assert store.exists("a/1") and not store.exists("a/2")
    assert store.list("a") == ["a/1"]
    assert store.sizes("a") == {"a/1": 3}
    assert store.list_folders("a") == ["a/deep"]
    assert store.list("nowhere") == store.list_folders("nowhere") == []
    assert not store.is_empty()
    store.delete("nowhere/at-all")
    store.delete_folder("nowhere")
    store.delete_folder("a")
    assert store.list("a") == store.list("a/deep") == []
    store.delete("top")
    assert store.list("") == [] and store.is_empty()


@pytest.mark.parametrize("kind", TRANSIENT)
def test_c48_every_operation_survives_every_transient_fault(
    store: ObjectStore, proxy: FaultProxy, kind: FaultKind
) -> None:
    """The first two requests of each operation fail. Only what has a body can be cut short."""
    method, at_least = ("GET", 6) if kind == "truncate" else (None, 14)

    def twice() -> None:
        proxy.clear()
        proxy.add(kind, times=2, method=method)

    data = os.urandom(100_000)
    twice()
    store.write("a/1", data)
    twice()
    assert store.read("a/1") == data
    twice()
    with store.fs.open(store.path("a/1"), "rb", cache_type="none") as file:
        file.seek(50_000)
        assert file.read(1000) == data[50_000:51_000]
    twice()
    assert store.list("a") == ["a/1"]
    twice()
    assert store.exists("a/1")
    twice()
    assert store.create("only", b"mine")
    twice()
    assert not store.create("only", b"theirs")
    twice()
    assert store.swap("only", b"mine", b"mine too")
    twice()
    assert not store.swap("only", b"mine", b"mine three")
    twice()
    assert store.take_away("only", b"mine too")
    twice()
    store.delete_folder("a")
    proxy.clear()
    assert store.list("a") == [] and not store.exists("only")
    assert proxy.num_faults >= at_least
    assert store.fs.retry_log.num_retries >= at_least // 2, "aiohttp repeats some by itself"


def test_c48_an_answer_that_takes_too_long_is_asked_for_again(
    proxy: FaultProxy, s3_bucket: str
) -> None:
    options = {"config_kwargs": {"read_timeout": 1}}
    store = ObjectStore(f"s3://{s3_bucket}/out", storage_options=options)
    store.write("a", b"1")
    proxy.add("delay", times=1, method="GET", delay_s=30.0)
    assert store.read("a") == b"1"
    (record,) = store.fs.retry_log.take()
    assert (record.operation, record.cause) == ("get_object", "ReadTimeoutError")


def test_a_file_is_not_there_before_its_block_ends(store: ObjectStore, s3_bucket: str) -> None:
    with store.writer("r/x") as file:
        file.write(b"abc")
        file.flush()
        assert not store.exists("r/x")
    assert store.read("r/x") == b"abc"


# -- large files --


def upload_ids(server: SeaweedServer, bucket: str) -> list[str]:
    with client(server.endpoint) as fs:
        return [up["UploadId"] for up in fs.list_multipart_uploads(bucket)]


def test_an_upload_in_parts_is_seen_whole_or_not_at_all(
    store: ObjectStore, proxy: FaultProxy, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """Its parts are delayed, so that a reader can look in between; some fail and are repeated."""
    data = os.urandom(4 * PART_BYTES + 12345)
    store.write("big", b"the old one")
    proxy.add("delay", times=None, method="PUT", path="partNumber", delay_s=0.5)
    seen: list[int] = []
    ended = threading.Event()

    def look() -> None:
        with client(s3_server.endpoint) as fs:
            while not ended.is_set():
                seen.append(len(fs.cat_file(f"{s3_bucket}/out/big")))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        store.write("big", data)
    finally:
        ended.set()
        reader.join()
    assert set(seen) <= {len(b"the old one"), len(data)}
    assert len(b"the old one") in seen
    assert store.read("big") == data
    assert upload_ids(s3_server, s3_bucket) == []


def test_parts_and_the_end_of_an_upload_survive_lost_answers(
    store: ObjectStore, proxy: FaultProxy, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    data = os.urandom(3 * PART_BYTES)
    proxy.add("drop_after", times=2, method="PUT", path="partNumber")
    proxy.add("drop_after", times=1, method="POST", path="uploadId")  # done, and nobody knows
    store.write("big", data)
    assert proxy.faults["drop_after"] == 3
    assert store.read("big") == data
    assert upload_ids(s3_server, s3_bucket) == []


def test_an_upload_that_fails_is_aborted(
    s3_environment: SeaweedServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3_environment.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = ObjectStore(f"s3://{s3_bucket}/out", storage_options={"retry_s": 0.5})
        proxy.add("slow_down", times=None, method="PUT", path="partNumber=3")
        with pytest.raises(OutputError, match=r"out/big.*SlowDown"):
            store.write("big", os.urandom(3 * PART_BYTES))
        assert not store.exists("big")
        assert upload_ids(s3_environment, s3_bucket) == []


def test_what_a_killed_upload_left_is_aborted_and_nothing_elses(
    store: ObjectStore, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    with client(s3_server.endpoint) as fs:
        for key in ("out/results/big", "other/big"):
            begun = fs.call_s3("create_multipart_upload", Bucket=s3_bucket, Key=key)
            fs.call_s3(
                "upload_part", Bucket=s3_bucket, Key=key, PartNumber=1, Body=b"x",
                UploadId=begun["UploadId"],
            )  # fmt: skip
    assert len(upload_ids(s3_server, s3_bucket)) == 2
    store.delete_drafts()
    assert len(upload_ids(s3_server, s3_bucket)) == 1


# -- conditions --


def test_of_many_creators_one_wins(store: ObjectStore, s3_bucket: str) -> None:
    stores = [ObjectStore(store.url) for _ in range(8)]
    for number in range(5):
        name = f"only-{number}"
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda i: stores[i].create(name, b"by %d" % i), range(8)))  # noqa: B023
        assert won.count(True) == 1
        assert store.read(name) == b"by %d" % won.index(True)


def test_of_many_swappers_one_wins(store: ObjectStore) -> None:
    stores = [ObjectStore(store.url) for _ in range(8)]
    for number in range(5):
        name = f"swap-{number}"
        store.write(name, b"old")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda i: stores[i].swap(name, b"old", b"by %d" % i), range(8)))  # noqa: B023
        assert won.count(True) == 1
        assert store.read(name) == b"by %d" % won.index(True)


def test_a_file_is_taken_away_only_if_it_is_the_one_that_was_seen(store: ObjectStore) -> None:
    store.write("lease", b"new")
    assert not store.take_away("lease", b"old")
    assert store.take_away("lease", b"new")
    assert not store.exists("lease")
    assert not store.take_away("lease", b"new")


@pytest.mark.parametrize("kind", ["drop_after", "drop_before"])
def test_a_lost_answer_to_a_conditional_write_is_known_as_ones_own(
    store: ObjectStore, proxy: FaultProxy, kind: FaultKind
) -> None:
    proxy.add(kind, times=1, method="PUT")
    assert store.create("only", b"mine")
    proxy.add(kind, times=1, method="PUT")
    assert store.swap("only", b"mine", b"again mine")
    assert store.read("only") == b"again mine"
    proxy.add(kind, times=1, method="DELETE")
    assert store.take_away("only", b"again mine")
    assert proxy.num_faults == 3


def test_without_conditional_writes_it_is_a_look_and_then_a_write(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Unable(LookThenAct):
        """As a server that knows no conditions."""

        def create_file(self, path: str, data: bytes) -> bool:
            raise NotImplementedError("no If-None-Match")

    store._conditional = Unable(store.fs)
    assert store.create("only", b"mine")
    assert not store.create("only", b"theirs")
    assert store.swap("only", b"mine", b"newer") and store.read("only") == b"newer"
    assert [r.getMessage() for r in caplog.records if "no conditional writes" in r.getMessage()]


# -- the lease --


class Clock:
    """A wall clock that is set by hand."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def acquire(store: ObjectStore, owner: str, clock: Clock) -> str | None:
    """The owner, if it got the lease."""
    try:
        Lease(store, owner, clock).acquire()
    except OutputInUse:
        return None
    return owner


@pytest.mark.parametrize("stale", [False, True])
def test_of_runs_that_start_together_one_is_accepted(store: ObjectStore, stale: bool) -> None:
    clock, stores = Clock(), [ObjectStore(store.url) for _ in range(6)]
    for _ in range(5):
        if stale:
            gone = Holder("gone", 1, "elsewhere", clock.now_s - STALE_S - 1)
            store.write(LEASE, orjson.dumps(asdict(gone)))
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda i: acquire(stores[i], f"run-{i}", clock), range(6)))
        (winner,) = [owner for owner in got if owner is not None]
        living = living_holder(store, clock)
        assert living is not None and living.owner == winner
        store.delete(LEASE)


def test_a_run_that_slept_does_not_write_over_the_lease_of_its_successor(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    """It looked, slept, and only then wrote: the moment between look and write is the test's."""
    clock, elsewhere = Clock(), ObjectStore(store.url)
    first = Lease(store, "first", clock)
    first.acquire()
    clock.now_s += STALE_S + 1
    proxy.add("delay", times=1, method="PUT", delay_s=0.0, on_fault=lambda: steal(elsewhere, clock))
    with pytest.raises(OutputInUse, match="taken over"):
        first.beat()
    first.release()
    living = living_holder(store, clock)
    assert living is not None and living.owner == "second"


def steal(store: ObjectStore, clock: Clock) -> None:
    holder = orjson.loads(store.read(LEASE))
    store.write(LEASE, orjson.dumps({**holder, "owner": "second", "heartbeat_s": clock.now_s}))


def test_a_lease_whose_answer_got_lost_is_held_and_beats(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    clock = Clock()
    lease = Lease(store, "mine", clock)
    proxy.add("drop_after", times=1, method="PUT")
    lease.acquire()
    proxy.add("drop_after", times=1, method="PUT")
    clock.now_s += 20
    lease.beat()
    holder = living_holder(store, clock)
    assert holder is not None and (holder.owner, holder.heartbeat_s) == ("mine", clock.now_s)
    lease.release()
    assert not store.exists(LEASE)


ACQUIRE = """
import sys, time
from storage.errors import OutputInUse
from storage.lease import Lease
from storage.objects import ObjectStore
store = ObjectStore(sys.argv[1])
sys.stdin.read(1)
try:
    Lease(store, sys.argv[2], time.time).acquire()
except OutputInUse as refused:
    print(refused)
    sys.exit(2)
sys.stdin.read()
"""


def test_of_processes_that_start_together_one_is_accepted_and_the_rest_are_told(
    store: ObjectStore, s3_bucket: str
) -> None:
    command = [sys.executable, "-c", ACQUIRE, store.url]
    children = [
        subprocess.Popen(
            [*command, f"run-{number}"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("x")
            child.stdin.flush()
        refused = [child for child in children if wait_for_end(child)]
        assert len(refused) == 2
        for child in refused:
            assert child.stdout is not None
            said = child.stdout.read()
            assert f"s3://{s3_bucket}/out is being written by process" in said
            assert "wait for it, or stop it" in said
    finally:
        for child in children:
            child.communicate()


def wait_for_end(child: subprocess.Popen[str]) -> bool:
    """True when it was refused; one that holds the lease waits."""
    try:
        return child.wait(5) == 2
    except subprocess.TimeoutExpired:
        return False


# -- the input --


@pytest.fixture
def table() -> pa.Table:
    return pa.table(
        {
            "id": list(range(6000)),
            "text": [f"{number:06} " * 60 for number in range(6000)],
        }
    )


def upload(server: SeaweedServer, table: pa.Table, path: str, **options: Any) -> None:
    with client(server.endpoint) as fs, fs.open(path, "wb") as file:
        pq.write_table(table, file, compression="none", use_dictionary=False, **options)


def ids(dataset: Dataset) -> list[int]:
    spans = list(whole(dataset))
    return [
        row.values["id"]
        for rows in read_shard(dataset, Shard(0, tuple(spans), 0), ("id", "text"))
        for row in rows
    ]


@pytest.mark.parametrize("kind", TRANSIENT)
def test_c48_row_groups_are_read_through_faults_and_no_row_is_lost_or_repeated(
    proxy: FaultProxy, s3_server: SeaweedServer, s3_bucket: str, table: pa.Table, kind: FaultKind
) -> None:
    upload(s3_server, table, f"{s3_bucket}/in/a.parquet", row_group_size=2500)
    proxy.add(kind, times=None, method="GET", chance=0.4)
    dataset = open_dataset(f"s3://{s3_bucket}/in/")
    assert ids(dataset) == list(range(6000))
    assert proxy.faults[kind] >= 2


def test_folders_globs_and_files_are_found(
    s3_environment: SeaweedServer, s3_bucket: str, table: pa.Table
) -> None:
    for name in ("day=1/a.parquet", "day=2/b.parquet", "_hidden/c.parquet"):
        upload(s3_environment, table.slice(0, 10), f"{s3_bucket}/in/{name}")
    by_folder = open_dataset(f"s3://{s3_bucket}/in")
    assert [file.name for file in by_folder.files] == ["day=1/a.parquet", "day=2/b.parquet"]
    assert by_folder.schema.names == ["id", "text", "day"]
    assert open_dataset(f"s3://{s3_bucket}/in/*/a.parquet").num_rows == 10
    single = open_dataset(f"s3://{s3_bucket}/in/day=1/a.parquet")
    assert single.files[0].fingerprint == by_folder.files[0].fingerprint
    with pytest.raises(InputError, match="nothing at"):
        open_dataset(f"s3://{s3_bucket}/nowhere")


def test_c46_a_session_that_expires_while_rows_are_read_is_renewed(
    s3_server: SeaweedServer,
    s3_bucket: str,
    table: pa.Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a credentials file that another program keeps fresh: each time the server calls the
    keys expired, the file has newer ones.
    """
    upload(s3_server, table, f"{s3_bucket}/in/a.parquet", row_group_size=1000)
    file = tmp_path / "credentials"

    def write_keys(keys: Keys) -> None:
        file.write_text(
            f"[default]\naws_access_key_id = {keys.access}\naws_secret_access_key = {keys.secret}\n"
        )

    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write_keys(ADMIN)
    with FaultProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        dataset = open_dataset(f"s3://{s3_bucket}/in/")
        rows = read_shard(dataset, Shard(0, tuple(whole(dataset)), 0), ("id",))
        seen = [row.values["id"] for row in next(rows)]
        proxy.add("expired", times=None, key=ADMIN.access, on_fault=lambda: write_keys(ROTATED))
        seen += [row.values["id"] for batch in rows for row in batch]
        assert proxy.faults["expired"] >= 1
        proxy.clear()
        proxy.add("expired", times=None, key=ROTATED.access)
        with pytest.raises(InputError, match="expired"):
            open_dataset(f"s3://{s3_bucket}/in/")
    assert seen == list(range(6000))


# -- one clear line --


@pytest.mark.parametrize(
    ("keys", "path", "parts"),
    [
        (STRANGER, "{bucket}/in/", ["does not know the access key", "AWS_ACCESS_KEY_ID"]),
        (Keys(ADMIN.access, "wrong"), "{bucket}/in/", ["secret key", "AWS_SECRET_ACCESS_KEY"]),
        (ADMIN, "no-such-bucket-here/in/", ["there is no bucket 'no-such-bucket-here'"]),
        (ADMIN, "{bucket}/nowhere", ["nothing at"]),
        (ADMIN, "", ["names no bucket"]),
    ],
)
def test_what_is_wrong_with_an_input_is_said_in_a_line(
    s3_server: SeaweedServer,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    keys: Keys,
    path: str,
    parts: list[str],
) -> None:
    for name, value in s3_server.environment(keys).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refused:
        open_dataset(f"s3://{path.format(bucket=s3_bucket)}")
    check_line(refused.value, parts)


def test_no_credentials_at_all_are_said_in_a_line(
    s3_server: SeaweedServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(OutputError) as refused:
        read_status(f"s3://{s3_bucket}/out")
    check_line(refused.value, ["no AWS credentials", "AWS_PROFILE"])


def test_an_output_that_may_not_be_written_is_said_in_a_line(
    s3_server: SeaweedServer,
    s3_bucket: str,
    table: pa.Table,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3_server.environment(READER).items():
        monkeypatch.setenv(name, value)
    upload(s3_server, table.slice(0, 3), f"{s3_bucket}/in.parquet")
    dataset = open_dataset(f"s3://{s3_bucket}/in.parquet")
    with pytest.raises(OutputError) as refused:
        open_ledger(f"s3://{s3_bucket}/out", dataset)
    check_line(refused.value, ["no permission (AccessDenied)", "s3:PutObject", f"'{s3_bucket}'"])


def test_a_server_that_does_not_answer_is_said_in_a_line(
    s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment(endpoint="http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refused:
        open_dataset("s3://bucket/in", storage_options={"retry_s": 1.0})
    check_line(refused.value, ["http://127.0.0.1:9", "tries", "run the same command again"])


def check_line(fault: StorageError, parts: list[str]) -> None:
    said = str(fault)
    assert [part for part in parts if part not in said] == [], said
    assert "\n" not in said
    assert "secret-of-the-tests" not in said


# -- a shard's life --


def open_ledger(url: str, dataset: Dataset) -> Ledger:
    cost = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
    return Ledger.open(
        url,
        dataset=dataset,
        generation={"model": "m"},
        output={"keep_columns": ["id"]},
        make_record=lambda _: JobRecord(
            job_id="job",
            created="2026-11-30T00:00:00+00:00",
            spec={},
            generation={"model": "m"},
            output={"keep_columns": ["id"]},
            columns=ResultColumns(kept=("id",)),
            shards=cut_shards(dataset, cost=cost, target_tokens=40),
        ),
    ).ledger


def commit_all(ledger: Ledger, dataset: Dataset) -> None:
    for shard in ledger.pending():
        writer = ledger.writer(shard)
        for rows in read_shard(dataset, shard, ("text",), skip=writer.done):
            for row in rows:
                writer.add(answer(row))
            writer.checkpoint()
        ledger.note_committed(writer.close())


def test_shards_are_committed_through_faults_once_and_in_order(
    proxy: FaultProxy, s3_server: SeaweedServer, s3_bucket: str, table: pa.Table
) -> None:
    upload(s3_server, table.slice(0, 100), f"{s3_bucket}/in.parquet")
    proxy.add("drop_after", times=None, chance=0.1)
    proxy.add("slow_down", times=None, chance=0.1)
    proxy.add("truncate", times=None, method="GET", chance=0.1)
    dataset = open_dataset(f"s3://{s3_bucket}/in.parquet")
    ledger = open_ledger(f"s3://{s3_bucket}/out", dataset)
    commit_all(ledger, dataset)
    ledger.release()
    proxy.clear()
    assert proxy.num_faults > 10
    status = read_status(f"s3://{s3_bucket}/out")
    assert status.complete and status.lease is None and status.by_status == {"ok": 100}
    with client(s3_server.endpoint) as fs:
        files = sorted(fs.glob(f"{s3_bucket}/out/results/*.parquet"))
        found = [pq.ParquetFile(fs.open(file)).read()["id"].to_pylist() for file in files]
    assert len(files) == 3
    assert [number for part in found for number in part] == list(range(100))


def test_a_run_that_was_taken_over_commits_nothing_more(
    s3_environment: SeaweedServer, s3_bucket: str, table: pa.Table
) -> None:
    """A run is cut off until its lease is stale; another takes the output and commits; then the
    first one comes back and goes on writing.
    """
    upload(s3_environment, table.slice(0, 30), f"{s3_bucket}/in.parquet")
    dataset, url = open_dataset(f"s3://{s3_bucket}/in.parquet"), f"s3://{s3_bucket}/out"
    first = open_ledger(url, dataset)
    (shard,) = first.pending()
    writer = first.writer(shard)
    for rows in read_shard(dataset, shard, ("text",)):
        for row in rows:
            late = answer(row)
            late.queue_s = 0.37 * row.ordinal
            writer.add(late)
    ObjectStore(url).delete(LEASE)  # as stale as it gets
    second = open_ledger(url, dataset)
    commit_all(second, dataset)
    marker = second.store.read("_markers/shard-00000.json")
    with pytest.raises(OutputInUse, match="taken the output over and committed shard-00000"):
        writer.close()
    with pytest.raises(OutputInUse, match="taken over"):
        first._lease.beat(every_s=0.0)
    assert second.store.read("_markers/shard-00000.json") == marker
    second.release()
    third = open_ledger(url, dataset)  # sees that the file is not the marker's, and counts it
    assert third.pending() == []
    third.release()
    assert read_status(url).by_status == {"ok": 30}
