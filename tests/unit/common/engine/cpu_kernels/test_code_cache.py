"""Machine code that is kept for the next process."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
from pathlib import Path

import pytest

from common.engine.cpu_kernels import code_cache, compiled
from common.engine.cpu_kernels.code_cache import cached_code
from common.engine.cpu_kernels.compiled import Call, Kernel
from common.engine.cpu_kernels.language import ElementType


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
    assert [cached_code(["LLVM 1", "module"], compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.count == 1
    cached_code(["LLVM 2", "module"], compiler)
    assert compiler.count == 2
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("size", [0, 10, 18])
def test_a_file_that_is_cut_off_is_written_again(directory: Path, size: int) -> None:
    compiler = Compiler()
    cached_code(["module"], compiler)
    (file,) = directory.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert cached_code(["module"], compiler) == b"code"
    assert (compiler.count, file.read_bytes()) == (2, whole)


def test_a_directory_that_others_can_write_to_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        cached_code(["module"], compiler)
        cached_code(["module"], compiler)
    assert (compiler.count, list(directory.iterdir())) == (2, [])
    assert caplog.text.count("mode 0700") == 1


def test_without_a_place_each_process_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler = Compiler()
    assert [cached_code(["module"], compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.count == 2


def test_a_file_system_that_is_read_only_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    compiler = Compiler()
    cached_code(["module"], compiler)
    monkeypatch.setattr(os, "utime", refuse)
    assert cached_code(["module"], compiler) == b"code"
    assert compiler.count == 1


def test_what_was_not_used_for_the_longest_time_is_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_MAX_FILES", 2)
    compiler = Compiler()
    for name in ("first", "second"):
        cached_code([name], compiler)
        for file in directory.iterdir():
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    cached_code(["first"], compiler)  # is used again
    cached_code(["third"], compiler)
    assert (compiler.count, len(list(directory.iterdir()))) == (3, 2)
    cached_code(["first"], compiler)
    assert compiler.count == 3
    cached_code(["second"], compiler)
    assert compiler.count == 4


def test_files_are_those_of_the_directory_that_was_checked(directory: Path) -> None:
    compiler = Compiler()
    cached_code(["module"], compiler)
    directory.rename(directory.with_name("moved"))
    directory.mkdir(mode=0o777)
    cached_code(["other module"], compiler)
    assert (len(list(directory.iterdir())), len(list(directory.with_name("moved").iterdir()))) == (0, 2)


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
    assert len(list(directory.iterdir())) == 1
    monkeypatch.setattr(compiled, "_machine_code", lambda text: pytest.fail("compiled again"))
    assert added() == first == [21, 22, 23, 24]
