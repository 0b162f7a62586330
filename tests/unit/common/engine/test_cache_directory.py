"""What is kept for the next process, such as machine code."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from common.engine import cache_directory
from common.engine.cache_directory import cached
from common.engine.devices.cpu.kernels import compiling
from common.engine.devices.cpu.kernels.compiled import Call, Kernel
from common.engine.devices.cpu.kernels.language import ElementType


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return b"code"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton" / "kernels"


def test_code_is_compiled_once_for_what_it_depends_on(directory: Path) -> None:
    compiler = Compiler()
    assert [cached("kernels", ["LLVM 1", "module"], compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.count == 1
    cached("kernels", ["LLVM 2", "module"], compiler)
    assert compiler.count == 2
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def kept(directory: Path) -> list[Path]:
    """The files of code, without the key."""
    return [file for file in directory.iterdir() if file.name != "key"]


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:10])


def change_code(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4] + b"evil")


def change_to_foreign_code(file: Path) -> None:
    """As another user's key would have it."""
    file.write_bytes(hmac.digest(bytes(32), b"evil", "sha256") + b"evil")


def change_to_that_of_another_kernel(file: Path) -> None:
    cached("kernels", ["another module"], lambda: b"other code")
    (other,) = set(kept(file.parent)) - {file}
    os.replace(other, file)


def change_to_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def change_to_dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent.parent / "victim")


def change_to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def change_to_socket(file: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(file.parent):
        bound.bind(file.name)


def change_to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def change_to_directory_with_files(file: Path) -> None:
    file.unlink()
    (file / "below").mkdir(parents=True)


def add_link(file: Path) -> None:
    link = file.parent.parent / "elsewhere"
    link.unlink(missing_ok=True)
    link.hardlink_to(file)


def let_others_write(file: Path) -> None:
    file.chmod(0o602)


def let_the_group_write(file: Path) -> None:
    file.chmod(0o620)


def give_away(file: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(file, 12345, -1)


PLANTED = [
    cut_off,
    change_to_link,
    change_to_dangling_link,
    change_to_pipe,
    change_to_socket,
    change_to_directory,
    change_to_directory_with_files,
    add_link,
    let_others_write,
    let_the_group_write,
    give_away,
]


@pytest.mark.parametrize(
    "plant",
    [*PLANTED, change_code, change_to_foreign_code, change_to_that_of_another_kernel],
    ids=lambda plant: plant.__name__,
)
def test_a_file_that_may_be_another_users_is_ignored_named_once_and_replaced(
    directory: Path, caplog: pytest.LogCaptureFixture, plant: Callable[[Path], None]
) -> None:
    compiler = Compiler()
    cached("kernels", ["module"], compiler)
    (file,) = kept(directory)
    for _ in range(2):
        plant(file)
        assert cached("kernels", ["module"], compiler) == b"code"
    assert compiler.count == 3
    assert caplog.text.count(f"{file} is ignored and replaced") == 1
    assert [cached("kernels", ["module"], compiler) for _ in range(2)] == [b"code"] * 2
    check_private(file)
    assert compiler.count == 3
    assert not (directory.parent / "victim").exists()


def check_private(file: Path) -> None:
    status = file.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_nlink) == (0o600, os.getuid(), 1)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_key_that_others_may_know_is_replaced_and_what_it_vouched_for_is_not_used(
    directory: Path, caplog: pytest.LogCaptureFixture, plant: Callable[[Path], None]
) -> None:
    compiler = Compiler()
    cached("kernels", ["module"], compiler)
    key = directory / "key"
    known = key.read_bytes()
    plant(key)
    assert [cached("kernels", ["module"], compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.count == 2
    assert caplog.text.count(f"{key} is ignored and replaced") == 1
    check_private(key)
    assert key.read_bytes() != known


def test_what_is_written_follows_no_link_that_was_there_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached("kernels", ["module"], Compiler())
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (directory / "draft-guessed").symlink_to(directory.parent / "victim")
    assert cached("kernels", ["other module"], Compiler()) == b"code"
    assert not (directory.parent / "victim").exists()


def test_processes_that_start_together_come_to_one_key(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes a key while another has found none and makes its own: the one that stays is used by both."""
    make = secrets.token_bytes

    def make_after_another(size: int) -> bytes:
        monkeypatch.setattr(secrets, "token_bytes", make)
        cached("kernels", ["module of another"], Compiler())
        return make(size)

    monkeypatch.setattr(secrets, "token_bytes", make_after_another)
    compiler = Compiler()
    for _ in range(2):
        cached("kernels", ["module"], compiler)
        cached("kernels", ["module of another"], compiler)
    assert compiler.count == 2


def test_a_directory_that_others_can_write_to_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        cached("kernels", ["module"], compiler)
        cached("kernels", ["module"], compiler)
    assert (compiler.count, list(directory.iterdir())) == (2, [])
    assert caplog.text.count("mode 0700") == 1


def test_without_a_place_each_process_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler = Compiler()
    assert [cached("kernels", ["module"], compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.count == 2


def test_a_file_system_that_is_read_only_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    compiler = Compiler()
    cached("kernels", ["module"], compiler)
    monkeypatch.setattr(os, "utime", refuse)
    assert cached("kernels", ["module"], compiler) == b"code"
    assert compiler.count == 1


def test_what_was_not_used_for_the_longest_time_is_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_directory, "_MAX_FILES", 2)
    compiler = Compiler()
    for name in ("first", "second"):
        cached("kernels", [name], compiler)
        for file in kept(directory):
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    cached("kernels", ["first"], compiler)  # is used again
    cached("kernels", ["third"], compiler)
    assert (compiler.count, len(kept(directory))) == (3, 2)
    cached("kernels", ["first"], compiler)
    assert compiler.count == 3
    cached("kernels", ["second"], compiler)
    assert compiler.count == 4


def test_files_are_those_of_the_directory_that_was_checked(directory: Path) -> None:
    compiler = Compiler()
    cached("kernels", ["module"], compiler)
    directory.rename(directory.with_name("moved"))
    directory.mkdir(mode=0o777)
    cached("kernels", ["other module"], compiler)
    assert (len(list(directory.iterdir())), len(kept(directory.with_name("moved")))) == (0, 2)


def test_a_kernel_from_the_cache_computes_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def added() -> list[int]:
        kernel = Kernel(
            "added", {"numbers": ElementType.INT64}, lambda _, task, a: a.numbers.at(task).add_shared(21) and None
        )
        numbers = (ctypes.c_int64 * 4)(0, 1, 2, 3)
        call = Call(kernel, numbers=ctypes.addressof(numbers))
        call.run(4, 1)
        return list(numbers)

    first = added()
    assert kept(directory)
    monkeypatch.setattr(compiling, "_machine_code", lambda text: pytest.fail("compiled again"))
    assert added() == first == [21, 22, 23, 24]
