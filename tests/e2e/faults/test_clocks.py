"""Deadlines, leases and backoffs follow monotonic clocks: the wall clock is read only where a date is wanted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("router", "prefill_service", "decode_service", "kv_store", "common", "deploy", "loadgen", "planning", "cli")
WALL_CLOCKS = {
    "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime", "time.ctime",
    "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
}  # fmt: skip
ALLOWED = {
    "cli/kv.py": "ages of blocks, shown to a person",
    "cli/top/panes.py": "when a pod changed its state, shown to a person",
    "cli/status.py": "since when a pod is ready, shown to a person",
    "common/observability/logging.py": "the time in a log line",
    "common/engine/__init__.py": "age of source files, by the file system's clock; at worst a kernel is built again",
    "common/observability/tracing/span.py": "the times of spans",
    "common/tokenization/chat.py": "the date in a chat template",
    "deploy/certificates.py": "how long a certificate is valid",
    "deploy/cluster_log.py": "the time in a log line",
    "deploy/cluster_record.py": "since when a pod is ready, shown to a person",
    "deploy/doctor_checks.py": "the clock itself is what is checked",
    "kv_store/inspection/redis_server.py": "when a block was last used, shown to a person",
    "kv_store/shared_storage.py": "age of files, by the file system's clock; at worst one is written again",
    "router/wire/access_log.py": "the time in a log line",
    "router/gateway/status.py": "`created` in answers",
    "router/gateway/completions.py": "`created` in answers",
    "router/gateway/pooling/endpoints.py": "`created` in answers",
    "router/serving/adapters.py": "revisions of names, on which several routers agree",
    "common/pod/adapters.py": "age of names that were taken away, by the same clock",
    "router/timelines/timeline.py": "when a request came, shown to a person",
}


def test_the_wall_clock_is_read_only_where_a_date_is_wanted() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(_reads(ast.parse(path.read_text())))
    }
    assert "router/gateway/status.py" in readers
    assert readers <= set(ALLOWED)


def _reads(tree: ast.AST) -> Iterator[bool]:
    """True for each mention of a wall clock, whether it is called or handed on."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                yield f"{module}.{name}" in WALL_CLOCKS
            case ast.Attribute(value=ast.Attribute(attr=kind), attr=name):
                yield f"{kind}.{name}" in WALL_CLOCKS
            case ast.ImportFrom(module="time", names=names):
                yield any(f"time.{alias.name}" in WALL_CLOCKS for alias in names)
