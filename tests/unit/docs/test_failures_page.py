"""The commands of docs/failures.md that search the log find what went wrong, in both formats, and nothing else."""

from __future__ import annotations

import io
import logging
import re
import subprocess
from pathlib import Path

import pytest

from common.observability.logging import JsonFormatter, LineFormatter
from deploy.cluster_log import ClusterLog, read_log
from deploy.pod_process import PodSpec
from deploy.terminal import Terminal

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def found_by_page(log: Path) -> list[str]:
    """Lines that the page's commands print; a file stands in for `baton logs`."""
    found = []
    for process, pattern in re.findall(r"^baton logs ?(\w*) \| grep (?:-E )?'([^']+)'", PAGE.read_text(), re.MULTILINE):
        lines = "\n".join(read_log(log, 1000, process or None))
        grep = subprocess.run(["grep", "-E", pattern], input=lines, capture_output=True, text=True, timeout=10)
        found += grep.stdout.splitlines()
    return found


@pytest.mark.parametrize("formatter", [LineFormatter("decode-0"), JsonFormatter("decode-0")])
def test_the_commands_find_what_went_wrong(formatter: logging.Formatter, tmp_path: Path) -> None:
    terminal = Terminal(io.StringIO(), io.StringIO(), ClusterLog(tmp_path / "log"))
    for level in LEVELS:
        terminal.pod_line(
            "decode-0", formatter.format(logging.makeLogRecord({"levelname": level, "msg": f"a {level}"}))
        )
    spec = PodSpec("decode-0", "decode", (), {}, "127.0.0.1:1")
    terminal.pod_ready(spec, 1.0, again=False)
    terminal.pod_died(spec, -9, 1.0)
    found = found_by_page(tmp_path / "log")
    assert len(found) == 4
    for line, words in zip(found, ("a WARNING", "a ERROR", "a CRITICAL", "killed by SIGKILL"), strict=True):
        assert words in line
