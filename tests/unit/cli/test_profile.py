"""`baton profile` against pods and routers that are fakes, and the summary of a trace."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli import profile
from cli.main import main
from cli.trace_summary import summarize
from common.errors import BatonError
from common.pb import pods_pb2
from deploy.cluster_state import ClusterState, PodState, claim, start_time_of
from router.testing import FakeDecodePod


def event(name: str, start: float, seconds: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"name": name, "ph": "X", "cat": cat, "ts": start, "dur": seconds, "pid": 1, "tid": tid}


EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {}},
    event("wait", 0, 50, "user_annotation"),
    event("step 1: 1 decode", 50, 100, "user_annotation"),
    event("forward", 52, 98, "user_annotation"),
    event("aten::linear", 55, 40),
    event("aten::mm", 60, 30),
    event("aten::mm", 100, 20),
    event("aten::mm", 60, 1, tid=2),
    event("gemm", 60, 7, "kernel", tid=7),
]
TRACE = gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())


def test_the_summary_is_of_the_time_that_operators_took_themselves(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(TRACE)
    host, device = summarize(tmp_path / "t.json.gz")
    assert [(operator.name, operator.num_calls, operator.self_us) for operator in host] == [
        ("aten::mm", 3, 51),
        ("(forward, outside operators)", 1, 98 - 40 - 20),
        ("aten::linear", 1, 10),
        ("(steps, outside phases)", 1, 2),
    ]
    assert [(operator.name, operator.self_us) for operator in device] == [("gemm", 7)]


@pytest.mark.parametrize("content", [b"", b"text", gzip.compress(b"{}", mtime=0), TRACE[:-20]])
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json.gz").write_bytes(content)
    with pytest.raises(BatonError, match="not a trace"):
        summarize(tmp_path / "t.json.gz")


def files_of(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, ["profile", *argv])


def answer_of(pod: FakeDecodePod, trace: bytes, **report: Any) -> None:
    report = {"seconds": 2.0, "num_steps": 1, "num_bytes": len(trace)} | report
    pod.profile_events = [
        pods_pb2.ProfileEvent(report=pods_pb2.ProfileReport(**report)),
        pods_pb2.ProfileEvent(part=trace[:50]),
        pods_pb2.ProfileEvent(part=trace[50:]),
    ]


async def test_the_trace_is_written_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with FakeDecodePod() as pod:
        phases = pods_pb2.PhaseSeconds(forward=1.5, wait=0.5)
        answer_of(pod, TRACE, ended_by=pods_pb2.PROFILE_END_EVENTS, phases=phases)
        assert await run("--pod", pod.address, "--seconds", "2", "--steps", "9") == 0
        assert (pod.profiles[0].seconds, pod.profiles[0].max_steps) == (2, 9)
        (written,) = files_of(tmp_path)
        assert written.name == f"trace-{pod.address.replace(':', '-')}.json.gz"
    assert written.read_bytes() == TRACE
    printed = capsys.readouterr().out
    for words in (written.name, "ended early", "forward      1.500 s   75.0%", "aten::mm", "gemm", "ui.perfetto.dev"):
        assert words in printed


async def test_an_idle_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeDecodePod() as pod:
        answer_of(pod, TRACE, num_steps=0)
        assert await run("--pod", pod.address, "--out", str(tmp_path / "t")) == 0
    assert "No step ran: the engine was idle." in capsys.readouterr().out


async def test_half_a_trace_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json.gz"
    out.write_text("from before")
    async with FakeDecodePod() as pod:
        answer_of(pod, TRACE, num_bytes=len(TRACE) + 1)
        assert await run("--pod", pod.address, "--out", str(out)) == 1
    assert "which is not all of it" in capsys.readouterr().err
    assert out.read_text() == "from before"
    assert files_of(tmp_path) == [out]


async def test_pods_have_names_in_the_router_and_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeDecodePod() as pod:
        answer_of(pod, TRACE)
        connected = {"pod_id": "decode-0", "address": pod.address, "version": "0.1"}
        moved = {"pod_id": "decode-0", "address": "10.0.0.1:1", "version": None}
        view = {"pods": [connected, moved, {"pod_id": None, "address": "10.0.0.2:1", "version": None}]}
        monkeypatch.setattr(profile, "fetch_json", lambda *_: view)
        out = ("--out", str(tmp_path / "t"))
        assert await run("--pod", "decode-0", "--url", "http://127.0.0.1:8000", *out) == 0
        assert await run("--pod", "decode-9", "--url", "http://127.0.0.1:8000", *out) == 2
        assert "--pod: no pod is named decode-9 (pods: decode-0)" in capsys.readouterr().err
        assert await run(*out) == 2
        assert "--pod: which one? (pods: decode-0)" in capsys.readouterr().err
        claimed = claim("default")
        pods = [PodState("decode-1", "decode", pod.address), PodState("router", "router", "http://127.0.0.1:2")]
        claimed.save(ClusterState("default", os.getpid(), start_time_of(os.getpid()), pods=pods))
        try:
            assert await run("--pod", "decode-1", *out) == 0
            assert await run("--pod", "router", *out) == 2
        finally:
            os.close(claimed.lock)
        assert "--pod: no pod is named router (pods: decode-1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "pod", ["127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:", ":7000", "[::1", "[::1]", "::1:7000", "a b:1"]
)
def test_what_is_no_address_is_refused(pod: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--pod", pod]) == 2
    assert f"--pod: expected a name or HOST:PORT, as in [::1]:7000, got '{pod}'" in capsys.readouterr().err


@pytest.mark.parametrize("pod", ["[::1]:1", "localhost:1"])
def test_addresses(pod: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--pod", pod, "--out", str(tmp_path / "t")]) == 3
    assert f"{pod} cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--seconds", "0"), 2, "--seconds: must be > 0"),
        (("--seconds", "61"), 2, "--seconds: must be <= 60"),
        (("--seconds", "nan"), 2, "--seconds"),
        (("--steps", "0"), 2, "--steps: must be >= 1"),
        (("--out", "/nowhere/t.json.gz"), 2, "--out: cannot write /nowhere/t.json.gz: No such file or directory"),
        ((), 3, "127.0.0.1:1 cannot be reached"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--pod", "127.0.0.1:1", *argv]) == code
    assert words in capsys.readouterr().err
    assert files_of(tmp_path) == []
