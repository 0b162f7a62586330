from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kv_store.shared_storage
from common.errors import ConfigError, StoreError, StoreUnavailableError
from common.types import BlockHash
from kv_store.guard import Backoff
from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore

FRAME_BYTES = 1000


def key(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def frame(index: int) -> memoryview:
    return memoryview(bytes([index % 256]) * FRAME_BYTES)


def open_store(path: Path, *, max_bytes: int | None = 1 << 20, namespace: str = "model") -> SharedStorageStore:
    store = SharedStorageStore(SharedStorageOptions(path=str(path), max_bytes=max_bytes))
    store.open(namespace, FRAME_BYTES)
    return store


def read(store: SharedStorageStore, index: int) -> bytes:
    buffer = bytearray(FRAME_BYTES)
    assert store.read_into([key(index)], [memoryview(buffer)]) == [FRAME_BYTES]
    return bytes(buffer)


def block_files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def age(store: SharedStorageStore, index: int, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(store._file_of(key(index)), (moment, moment))


def test_a_block_is_one_private_file_in_private_directories(tmp_path):
    store = open_store(tmp_path / "kv")
    store.write([key(0xAB)], [frame(1)])

    (file,) = block_files(tmp_path)
    assert file == tmp_path / "kv" / "model" / "00" / f"{0xAB:032x}.kv"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for directory in list(file.parents)[:3]:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_block_that_the_system_takes_piece_by_piece_is_whole(tmp_path, monkeypatch):
    write, block = os.write, bytes(index % 251 for index in range(FRAME_BYTES))
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:300]))
    store = open_store(tmp_path)
    store.write([key(1)], [memoryview(block)])
    assert read(store, 1) == block


def test_what_does_not_fit_is_left_out_and_the_size_told(tmp_path):
    store = open_store(tmp_path)
    store.write([key(1)], [frame(1)])
    small = bytearray(10)
    assert store.read_into([key(1)], [memoryview(small)]) == [FRAME_BYTES]
    large = bytearray(FRAME_BYTES + 10)
    assert store.read_into([key(1)], [memoryview(large)]) == [FRAME_BYTES]
    assert small == b"\1" * 10
    assert large == b"\1" * FRAME_BYTES + bytes(10)


def test_a_missing_block(tmp_path):
    store = open_store(tmp_path)
    assert store.touch([key(1)]) == [False]
    assert store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))]) == [None]
    store.discard(key(1))


def test_directory_deleted_under_a_running_store(tmp_path):
    store = open_store(tmp_path / "kv")
    store.write([key(1)], [frame(1)])
    for file in block_files(tmp_path):
        file.unlink()
        file.parent.rmdir()
    (tmp_path / "kv" / "model").rmdir()
    (tmp_path / "kv").rmdir()
    assert store.touch([key(1)]) == [False]
    store.write([key(1)], [frame(1)])
    assert read(store, 1) == bytes(frame(1))


def test_least_recently_used_blocks_go_first_of_all_models(tmp_path):
    mine = open_store(tmp_path, max_bytes=10 * FRAME_BYTES)
    theirs = open_store(tmp_path, max_bytes=10 * FRAME_BYTES, namespace="other model")
    for index in range(8):
        store = theirs if index % 2 else mine
        store.write([key(index)], [frame(index)])
        age(store, index, seconds=100 - index)
    read(mine, 0)
    assert theirs.touch([key(1)]) == [True]
    for index in range(8, 12):
        mine.write([key(index)], [frame(index)])

    kept = {int(file.stem, 16) for file in block_files(tmp_path)}
    assert {0, 1, 8, 9, 10, 11} <= kept
    assert 2 not in kept
    assert 3 not in kept
    assert len(kept) <= 10


def test_one_writer_keeps_the_bound(tmp_path):
    store = open_store(tmp_path, max_bytes=20 * FRAME_BYTES)
    for index in range(100):
        store.write([key(index)], [frame(index)])
        assert len(block_files(tmp_path)) <= 20
    assert read(store, 99) == bytes(frame(99))
    assert len(block_files(tmp_path)) >= 15


def test_a_large_bound_is_kept_part_by_part(tmp_path):
    """And so that no part is looked through for what was written to another."""
    store = open_store(tmp_path, max_bytes=8 * 64 * FRAME_BYTES)
    hashes = [BlockHash(hashlib.sha256(bytes([index % 256, index // 256])).digest()[:16]) for index in range(3000)]
    for index, block_hash in enumerate(hashes):
        store.write([block_hash], [frame(index)])
        os.utime(store._file_of(block_hash), (index, index))
    kept = {BlockHash(bytes.fromhex(file.stem)) for file in block_files(tmp_path)}
    assert 8 * 64 * 0.8 <= len(kept) <= 8 * 64
    for part in range(8):
        written = [block_hash for block_hash in hashes if block_hash[0] % 8 == part]
        num_kept = sum(block_hash in kept for block_hash in written)
        assert kept.issuperset(written[-num_kept:])
        assert num_kept <= 64


def test_the_smallest_bound_holds_one_block(tmp_path):
    store = open_store(tmp_path, max_bytes=FRAME_BYTES)
    for index in range(3):
        store.write([key(index)], [frame(index)])
        assert [int(file.stem, 16) for file in block_files(tmp_path)] == [index]
    with pytest.raises(ConfigError) as caught:
        open_store(tmp_path, max_bytes=FRAME_BYTES - 1)
    assert caught.value.param == "max_bytes"


def test_opening_shrinks_to_a_smaller_bound(tmp_path):
    store = open_store(tmp_path)
    for index in range(10):
        store.write([key(index)], [frame(index)])
    open_store(tmp_path, max_bytes=4 * FRAME_BYTES)
    assert len(block_files(tmp_path)) <= 4


def test_default_bound_is_half_of_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * FRAME_BYTES))
    store = open_store(tmp_path, max_bytes=None)
    for index in range(20):
        store.write([key(index)], [frame(index)])
    assert len(block_files(tmp_path)) <= 4


def test_several_writers_evict_and_delete_beside_each_other(tmp_path):
    stores = [open_store(tmp_path, max_bytes=10 * FRAME_BYTES) for _ in range(4)]
    failures = []

    def write_many(store: SharedStorageStore, start: int) -> None:
        try:
            for index in range(start, start + 100):
                store.write([key(index % 150)], [frame(index % 150)])
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=write_many, args=(store, 50 * n)) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert all(file.suffix == ".kv" for file in block_files(tmp_path))
    assert len(block_files(tmp_path)) <= 14
    for file in block_files(tmp_path):
        assert file.read_bytes() == bytes(frame(int(file.stem, 16)))


def test_files_of_dead_writers_are_cleaned_and_of_living_ones_kept(tmp_path):
    store = open_store(tmp_path)
    store.write([key(1)], [frame(1)])
    directory = Path(store._file_of(key(1))).parent
    dead, living, foreign = directory / "x.kv.dead-0.tmp", directory / "x.kv.living-0.tmp", directory / "notes.txt"
    for file in (dead, living, foreign):
        file.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(dead, (two_hours_ago, two_hours_ago))
    os.utime(foreign, (two_hours_ago, two_hours_ago))

    open_store(tmp_path, max_bytes=FRAME_BYTES)

    assert not dead.exists()
    assert living.exists()
    assert foreign.exists()


DIES_IN_MID_WRITE = """
import os, sys
from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore

path, moment = sys.argv[1:]
write = os.write

def stop_half_way(file, data):
    write(file, data[: len(data) // 2])
    stop()

def stop(*_):
    print("stopped", flush=True)
    sys.stdin.read()

store = SharedStorageStore(SharedStorageOptions(path=path, max_bytes=1 << 20))
store.open("model", 1000)
store.write([bytes(15) + bytes([1])], [memoryview(bytes([1]) * 1000)])
if moment == "write":
    os.write = stop_half_way
else:
    os.replace = stop
store.write([bytes(15) + bytes([2])], [memoryview(bytes([2]) * 1000)])
"""


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_a_writer_killed_in_mid_write_leaves_no_half_block(tmp_path, moment):
    command = [sys.executable, "-c", DIES_IN_MID_WRITE, str(tmp_path), moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"stopped\n"
        writer.kill()

    store = open_store(tmp_path)
    assert store.touch([key(1), key(2)]) == [True, False]
    assert read(store, 1) == bytes(frame(1))
    (left_behind,) = tmp_path.rglob("*.tmp")
    store.write([key(2)], [frame(2)])
    assert read(store, 2) == bytes(frame(2))
    two_hours_ago = time.time() - 7200
    os.utime(left_behind, (two_hours_ago, two_hours_ago))
    open_store(tmp_path)
    assert not left_behind.exists()


@pytest.mark.parametrize("call", ["open", "utime", "readv"])
def test_a_file_that_a_network_file_system_has_lost_is_not_there(tmp_path, monkeypatch, call):
    store = open_store(tmp_path)
    store.write([key(1)], [frame(1)])

    def is_stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(kv_store.shared_storage.os, call, is_stale)
    assert store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))]) == [None]
    assert store.touch([key(1)]) == [call != "utime"]


@pytest.mark.parametrize("call", ["unlink", "scandir"])
def test_evicting_what_a_network_file_system_has_lost(tmp_path, monkeypatch, call):
    store = open_store(tmp_path, max_bytes=4 * FRAME_BYTES)

    def is_stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(kv_store.shared_storage.os, call, is_stale)
    for index in range(8):
        store.write([key(index)], [frame(index)])
        assert read(store, index) == bytes(frame(index))
    store.discard(key(7))


@pytest.fixture
def full_medium(monkeypatch):
    """Makes the next writes fail as on a full disk; the list holds how many."""
    failures_left = [0]
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if failures_left[0]:
            failures_left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(kv_store.shared_storage.os, "replace", fail)
    return failures_left


def test_on_a_full_medium_old_blocks_make_room(tmp_path, full_medium):
    store = open_store(tmp_path)
    for index in range(8):
        store.write([key(index)], [frame(index)])
        age(store, index, seconds=100 - index)
    full_medium[0] = 1
    store.write([key(8)], [frame(8)])
    assert sorted(int(file.stem, 16) for file in block_files(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_medium_that_stays_full_is_an_error_and_leaves_nothing_behind(tmp_path, full_medium):
    store = open_store(tmp_path)
    full_medium[0] = 2
    with pytest.raises(StoreError, match="No space left"):
        store.write([key(1)], [frame(1)])
    assert block_files(tmp_path) == []
    store.close()


class FailingMedium:
    """Makes calls of the operating system fail with one error, and counts the attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0  # of the error; 0: none
        self.attempts: Counter[str] = Counter()
        for owner, name in ((os, "utime"), (os, "replace"), (os, "scandir"), (tempfile, "TemporaryFile")):
            monkeypatch.setattr(owner, name, partial(self._call, name, getattr(owner, name)))

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.number:
            self.attempts[name] += 1
            raise OSError(self.number, os.strerror(self.number), "a file")
        return function(*args, **named)


@pytest.fixture
def failing(monkeypatch) -> FailingMedium:
    return FailingMedium(monkeypatch)


def open_with(tmp_path: Path, backoff: Backoff) -> SharedStorageStore:
    store = SharedStorageStore(SharedStorageOptions(path=str(tmp_path), max_bytes=1 << 30), backoff=backoff)
    store.open("model", FRAME_BYTES)
    return store


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kv_store.guard"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_medium_that_cannot_be_written_is_read_and_left_alone(tmp_path, failing, caplog, number):
    store = open_with(tmp_path, Backoff(base_s=3600.0, max_s=3600.0))
    store.write([key(1)], [frame(1)])
    failing.number = number
    with pytest.raises(StoreUnavailableError, match=os.strerror(number)):
        store.write([key(2)], [frame(2)])
    before = failing.attempts.total()
    for _ in range(5):
        with pytest.raises(StoreUnavailableError, match=f"rejects writes: {os.strerror(number)}"):
            store.write([key(2)], [frame(2)])
    assert failing.attempts.total() == before
    failing.number = 0
    assert store.touch([key(1), key(2)]) == [True, False]
    (line,) = logged(caplog)
    assert f"shared storage in {tmp_path} rejects writes, its blocks can still be read" in line
    store.close()


@pytest.mark.parametrize("read", ["touch", "read_into"])
def test_a_medium_that_cannot_be_read_is_left_alone(tmp_path, failing, read):
    store = open_with(tmp_path, Backoff(base_s=3600.0, max_s=3600.0))
    store.write([key(1)], [frame(1)])
    attempt = {
        "touch": lambda: store.touch([key(1)]),
        "read_into": lambda: store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))]),
    }[read]
    failing.number = errno.EIO
    for _ in range(5):
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            attempt()
    assert failing.attempts == {"utime": 1}
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_medium_is_used_again_when_a_probe_succeeds(tmp_path, failing, caplog, number):
    store = open_with(tmp_path, Backoff(base_s=0.01, max_s=0.01))
    failing.number = errno.EIO
    with pytest.raises(StoreUnavailableError):
        store.touch([key(1)])
    with pytest.raises(StoreUnavailableError):
        store.write([key(1)], [frame(1)])
    failing.number = number
    deadline = time.monotonic() + 60.0
    while not all(failing.attempts[probe] >= 3 for probe in ("scandir", "TemporaryFile")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    failing.number = 0
    while not (store._reads.is_closed and store._writes.is_closed):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store.write([key(1)], [frame(1)])
    assert store.touch([key(1)]) == [True]
    assert not any(record.exc_info for record in caplog.records)
    assert len(block_files(tmp_path)) == 1
    store.close()


@pytest.mark.parametrize("path", ["{tmp}/file", "{tmp}/file/below", "/proc/baton"])
def test_an_unusable_path_is_named(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        open_store(Path(path.format(tmp=tmp_path)))
    assert caught.value.param == "path"
    assert "path" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unreadable_block_is_a_store_error(tmp_path):
    store = open_store(tmp_path)
    Path(store._file_of(key(1))).mkdir(parents=True)
    with pytest.raises(StoreError):
        store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))])
    with pytest.raises(StoreError):
        store.write([key(1)], [frame(1)])
    store.discard(key(1))  # cannot, and says so in the log only
    store.write([key(2)], [frame(2)])  # the others are not concerned
    assert store.touch([key(2)]) == [True]


@pytest.fixture
def memory_directory(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(kv_store.shared_storage, "_MEMORY", str(tmp_path))
    return tmp_path


def test_the_default_directory_is_this_users_alone(memory_directory):
    store = SharedStorageStore(SharedStorageOptions())
    store.open("model", FRAME_BYTES)
    home = memory_directory / f"baton-{os.getuid()}"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert (home / "kv" / "model").is_dir()


def open_to_others(home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)


def link_elsewhere(home: Path) -> None:
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    home.symlink_to(elsewhere)


@pytest.mark.parametrize("prepare", [open_to_others, link_elsewhere, Path.touch])
def test_a_default_directory_that_others_may_have_prepared_is_refused(memory_directory, prepare):
    prepare(memory_directory / f"baton-{os.getuid()}")
    with pytest.raises(ConfigError, match="not owned by this user alone"):
        SharedStorageStore(SharedStorageOptions()).open("model", FRAME_BYTES)
