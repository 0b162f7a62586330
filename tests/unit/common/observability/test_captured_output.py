"""What libraries write, in processes of their own: descriptors are a process's."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.observability.captured_output import INTERVAL_S, MAX_LINE_BYTES, MAX_LINES, LineLog

ROOT = Path(__file__).parents[4]
PRELUDE = """\
import ctypes, logging, os, subprocess, sys
from common.observability.captured_output import captured_output
from common.observability.logging import log_descriptor_in_use, setup_logging
libc = ctypes.CDLL(None)
def serve(work, log_format="console"):
    with captured_output() as log:
        setup_logging("info", "decode-0", log_format, stream=log)
        work()
    logging.getLogger("x").info("after")
"""
DEADLINE_S = 60
RECORD = r"\[decode-0\] \S+Z WARNING common\.observability\.captured_output: "


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_what_is_written_below_python_is_logged() -> None:
    ended = run(r"""
def work():
    os.write(2, b"[router] forged \x1b[31m\r[router] forged\nsecond line\n")
    libc.dprintf(1, b"by printf\n")
    os.write(2, b"no line end")
    print("ready role=decode")
    logging.getLogger("x").info("own line")
serve(work)
os.write(2, b"raw again\n")
""")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "ready role=decode\n"
    texts = [re.sub(RECORD, "", line) for line in ended.stderr.splitlines()]
    own = [line for line in texts if " INFO x: " in line]
    assert sorted(line for line in texts if line not in own) == [
        r"[router] forged \x1b[31m\r[router] forged",
        "by printf",
        "no line end",
        "raw again",
        "second line",
    ]
    assert [line.rpartition(" ")[2] for line in own] == ["line", "after"]


def test_what_python_writes_to_standard_error_is_logged() -> None:
    ended = run(r"""
import threading
def fail():
    raise ValueError("a\n[router] forged")
def work():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
serve(work, "json")
""")
    records = [json.loads(line) for line in ended.stderr.splitlines()]
    assert "[router] forged" in [record["message"] for record in records]
    assert {record["process"] for record in records} == {"decode-0"}


def test_processes_that_are_started_log_themselves_and_their_libraries_are_logged() -> None:
    ended = run(r"""
child = '''
import os, sys
from common.observability.captured_output import log_stream
from common.observability.logging import setup_logging
setup_logging("info", "core", stream=log_stream(int(sys.argv[1])))
import logging
logging.getLogger("y").info("of the child")
os.write(2, b"last words\\x1b\\n")
os.abort()
'''
def work():
    descriptor = log_descriptor_in_use()
    assert descriptor > 2
    done = subprocess.run([sys.executable, "-c", child, str(descriptor)], pass_fds=(descriptor,))
    assert done.returncode < 0
serve(work)
""")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\[core\] .* INFO y: of the child$", ended.stderr, re.MULTILINE)
    # faulthandler, which is for people, writes to the log piece by piece: the parent's line may be between two
    assert re.search(rf"{RECORD}last words\\x1b$", ended.stderr, re.MULTILINE)
    assert "Fatal Python error: " in ended.stderr
    assert "Aborted" in ended.stderr


def test_the_end_of_the_process_is_seen() -> None:
    ended = run(r"""
def work():
    os.write(2, b"x" * 100 + b"\n")
    raise RuntimeError("at the end")
serve(work)
""")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("RuntimeError: at the end")
    assert "x" * 100 in ended.stderr
    crashed = run("serve(lambda: os.kill(os.getpid(), 11))")
    assert crashed.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in crashed.stderr


def test_a_flood_is_cut_and_counted() -> None:
    ended = run(r"""
def work():
    for number in range(1000):
        os.write(2, b"line %d " % number + b"y" * 10_000 + b"\n")
serve(work)
""")
    lines = ended.stderr.splitlines()
    assert len(lines) == MAX_LINES + 2
    assert len(ended.stderr) < 2 * MAX_LINES * MAX_LINE_BYTES
    assert re.fullmatch(rf"{RECORD}{1000 - MAX_LINES} more lines in \d+ s", lines[-2])


def test_lines_are_counted_again_after_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = LineLog(clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        lines.feed(b"a\n" * MAX_LINES)
        assert lines.due_in_s is None
        lines.feed(b"b\n\n  \nb\n")
        now = 20.0
        assert lines.due_in_s == INTERVAL_S - now
        assert caplog.messages == ["a"] * MAX_LINES
        now = INTERVAL_S
        assert lines.due_in_s == 0
        lines.settle()
        assert caplog.messages[MAX_LINES:] == [f"2 more lines in {INTERVAL_S:.0f} s"]
        assert lines.due_in_s is None
        lines.feed(b"half of a ")
        lines.feed(b"line\nend")
        lines.end()
    assert caplog.messages[MAX_LINES + 1 :] == ["half of a line", "end"]


def test_a_line_that_never_ends_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    lines = LineLog()
    for _ in range(1000):
        lines.feed(b"z" * 1000)
    lines.feed(b"\nnext\n")
    assert caplog.messages == ["z" * MAX_LINE_BYTES + "...", "next"]
