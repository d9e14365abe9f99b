"""Files appear whole or not at all, on a local disk and on a remote store."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from storage.errors import OutputError
from storage.objects import TMP, ObjectStore


@pytest.fixture(params=["local", "file-url", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    urls = {
        "local": str(tmp_path / "out"),
        "file-url": f"file://{tmp_path / 'out'}",
        "memory": f"memory:/{tmp_path}/out",
    }
    return ObjectStore(urls[request.param])


def test_what_was_written_is_read(store: ObjectStore) -> None:
    store.write("a/b.bin", b"one")
    store.write("a/b.bin", b"two")
    assert store.read("a/b.bin") == store.read_or_none("a/b.bin") == b"two"
    assert store.exists("a/b.bin") and not store.exists("a/c.bin")
    assert store.read_or_none("a/c.bin") is None
    with pytest.raises(FileNotFoundError):
        store.read("a/c.bin")


def test_a_file_is_not_there_before_its_block_ends(store: ObjectStore) -> None:
    seen: list[bool] = []
    with store.writer("r/x", on_written=lambda: seen.append(store.exists("r/x"))) as file:
        file.write(b"abc")
        file.flush()
        seen.append(store.exists("r/x"))
    assert seen == [False, False]
    assert store.read("r/x") == b"abc"


def test_a_block_that_fails_leaves_the_old_file_and_no_draft(store: ObjectStore) -> None:
    store.write("r/x", b"old")
    for name in ("r/x", "r/y"):
        with suppress(ZeroDivisionError), store.writer(name) as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert store.read("r/x") == b"old"
    assert store.list("r") == ["r/x"]
    assert store.list(TMP) == []


def test_c05_a_file_is_replaced_and_never_overwritten(tmp_path: Path) -> None:
    """Who has the old one open reads it to its end; a rewrite in place would change it."""
    store = ObjectStore(str(tmp_path))
    store.write("r/x", b"the old one")
    with (tmp_path / "r" / "x").open("rb", buffering=0) as reader:
        first = reader.read(4)
        store.write("r/x", b"A NEW AND LONGER ONE")
        assert first + reader.read() == b"the old one"
    assert store.read("r/x") == b"A NEW AND LONGER ONE"


def test_a_failing_disk_is_an_output_error(store: ObjectStore) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    writing = store.writer("r/x", on_written=full)
    with (
        pytest.raises(OutputError, match=r"r/x cannot be written: .*No space left"),
        writing as file,
    ):
        file.write(b"abc")
    assert not store.exists("r/x")


def test_creating_succeeds_once(store: ObjectStore) -> None:
    assert store.create("only", b"first")
    assert not store.create("only", b"second")
    assert store.read("only") == b"first"
    assert store.list(TMP) == []


def test_of_many_creators_one_wins(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    won: list[int] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        if store.create("only", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [store.read("only")]


def test_a_file_is_taken_away_only_if_it_is_the_one_that_was_seen(store: ObjectStore) -> None:
    store.write("lease", b"new")
    assert not store.take_away("lease", b"old")
    assert store.read("lease") == b"new"
    assert store.take_away("lease", b"new")
    assert not store.exists("lease")
    assert not store.take_away("lease", b"new")
    assert store.list(TMP) == []


def test_listing_tells_files_from_folders(store: ObjectStore) -> None:
    store.write("a/2", b"22")
    store.write("a/1", b"1")
    store.write("a/deep/3", b"3")
    store.write("top", b"")
    assert store.list("a") == ["a/1", "a/2"]
    assert store.sizes("a") == {"a/1": 1, "a/2": 2}
    assert store.list_folders("a") == ["a/deep"]
    assert store.list("nowhere") == store.list_folders("nowhere") == []


def test_the_root_is_listed_as_any_folder(store: ObjectStore) -> None:
    assert store.is_empty()
    store.write("top", b"1")
    assert not store.is_empty()
    assert [name.strip("/") for name in store.list("")] == ["top"]


def test_deleting_what_is_not_there_is_no_error(store: ObjectStore) -> None:
    store.delete("x")
    store.delete_folder("y")
    store.write("y/a/b", b"1")
    store.write("y2", b"1")
    store.delete_folder("y")
    assert store.list_folders("y") == [] and not store.exists("y/a/b")
    assert store.exists("y2")


def test_drafts_of_dead_writers_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    writer = store.writer("results/a.parquet")
    writer.__enter__().write(b"half")  # and the process is gone
    creating = tmp_path / TMP / "0123"  # another run is about to take the lease
    creating.write_bytes(b"")
    assert len(store.list(TMP)) == 2
    store.delete_drafts()
    assert store.list(TMP) == [f"{TMP}/0123"]


def test_only_a_local_file_has_a_local_path(tmp_path: Path) -> None:
    assert ObjectStore(str(tmp_path)).local_path("a/b") == tmp_path / "a" / "b"
    assert ObjectStore(f"file://{tmp_path}").local_path("a") == tmp_path / "a"
    assert ObjectStore("memory://x").local_path("a") is None
