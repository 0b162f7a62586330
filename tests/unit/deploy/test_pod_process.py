"""One pod as a child process: start, readiness, restart, stop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from deploy import pod_process
from deploy.pod_process import PodProcess, PodSpec, PodStartError, describe_exit

DEADLINE_S = 60.0


class Recorder:
    """Hears everything and lets a test wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ready: list[bool] = []  # `again` of each
        self.deaths: list[tuple[int, float]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def pod_line(self, name: str, line: str) -> None:
        self.lines.append(line)
        self._notify()

    def pod_ready(self, spec: PodSpec, seconds: float, *, again: bool) -> None:
        self.ready.append(again)
        self._notify()

    def pod_died(self, spec: PodSpec, exit_code: int, delay_s: float) -> None:
        self.deaths.append((exit_code, delay_s))
        self._notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(condition)

    def _notify(self) -> None:
        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def spec(script: str) -> PodSpec:
    return PodSpec("decode-0", "decode", (sys.executable, "-u", "-c", script), dict(os.environ), "nowhere")


async def always_ready() -> bool:
    return True


async def never_ready() -> bool:
    return False


def dead(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def until_dead(pid: int) -> None:
    """A signal was sent to `pid`: it takes effect soon, not at once."""
    async with asyncio.timeout(DEADLINE_S):
        while not dead(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


SLEEP = "import time; print('up'); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid); time.sleep(600)"
)


async def test_stop_ends_it_and_supervise_returns() -> None:
    recorder = Recorder()
    pod = PodProcess(spec(SLEEP), always_ready, recorder)
    supervisor = asyncio.create_task(pod.supervise())
    await recorder.until(lambda: recorder.lines == ["up"] and recorder.ready == [False])
    assert pod.pid is not None
    await pod.stop(grace_s=DEADLINE_S)
    await asyncio.wait_for(supervisor, DEADLINE_S)
    assert pod.pid is None
    assert recorder.deaths == []
    await pod.stop(grace_s=0)  # idempotent


async def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    recorder = Recorder()
    pod = PodProcess(spec(STUBBORN), always_ready, recorder)
    supervisor = asyncio.create_task(pod.supervise())
    await recorder.until(lambda: recorder.lines == ["up"])
    await pod.stop(grace_s=0.1)
    await asyncio.wait_for(supervisor, DEADLINE_S)


async def test_a_dead_pod_is_restarted_and_takes_its_children_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_process, "FIRST_RESTART_DELAY_S", 0.01)
    recorder = Recorder()
    pod = PodProcess(spec(WITH_CHILD), always_ready, recorder)
    supervisor = asyncio.create_task(pod.supervise())
    await recorder.until(lambda: len(recorder.lines) == 1 and len(recorder.ready) == 1)
    first_pid, grandchild = pod.pid, int(recorder.lines[0])
    assert first_pid is not None
    os.kill(first_pid, 9)
    await recorder.until(lambda: len(recorder.lines) == 2 and recorder.ready == [False, True])
    assert recorder.deaths == [(-9, 0.01)]
    await until_dead(grandchild)
    second = int(recorder.lines[1])
    await pod.stop(grace_s=DEADLINE_S)
    await asyncio.wait_for(supervisor, DEADLINE_S)
    await until_dead(second)


async def test_restart_delays_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each process ends once it was seen to be ready."""
    was_seen = tmp_path / "seen"

    class Releasing(Recorder):
        def pod_ready(self, spec: PodSpec, seconds: float, *, again: bool) -> None:
            was_seen.touch()

    script = (
        "import pathlib, time\n"
        f"seen = pathlib.Path({str(was_seen)!r})\n"
        "while not seen.exists():\n    time.sleep(0.01)\n"
        "seen.unlink()\nraise SystemExit(3)"
    )
    monkeypatch.setattr(pod_process, "FIRST_RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(pod_process, "MAX_RESTART_DELAY_S", 0.03)
    recorder = Releasing()
    pod = PodProcess(spec(script), always_ready, recorder)
    supervisor = asyncio.create_task(pod.supervise())
    await recorder.until(lambda: len(recorder.deaths) == 4)
    await pod.stop(grace_s=0)
    await asyncio.wait_for(supervisor, DEADLINE_S)
    assert recorder.deaths[:4] == [(3, 0.01), (3, 0.02), (3, 0.03), (3, 0.03)]


async def test_wrong_settings_are_told_once_and_not_retried() -> None:
    recorder = Recorder()
    script = "import sys; sys.stderr.write('baton: error: --block-size: must be >= 1, got 0\\n'); sys.exit(2)"
    pod = PodProcess(spec(script), never_ready, recorder)
    with pytest.raises(ConfigError, match="decode-0: --block-size: must be >= 1, got 0"):
        await asyncio.wait_for(pod.supervise(), DEADLINE_S)
    assert recorder.lines == []


async def test_a_pod_that_never_comes_up_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_process, "FIRST_RESTART_DELAY_S", 0.01)
    recorder = Recorder()
    pod = PodProcess(spec("print('the reason'); raise SystemExit(1)"), never_ready, recorder)
    with pytest.raises(PodStartError, match=r"did not start in 3 attempts \(exit code 1\)(.|\n)*the reason"):
        await asyncio.wait_for(pod.supervise(), DEADLINE_S)


async def test_a_quiet_one_is_heard_only_when_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_process, "FIRST_RESTART_DELAY_S", 0.01)
    recorder = Recorder()
    quiet = spec("print('the reason'); raise SystemExit(1)")._replace(quiet=True)
    with pytest.raises(PodStartError, match="the reason"):
        await asyncio.wait_for(PodProcess(quiet, never_ready, recorder).supervise(), DEADLINE_S)
    assert recorder.lines == []


async def test_endless_lines_are_cut() -> None:
    recorder = Recorder()
    pod = PodProcess(spec("print('x' * 300_000); print('end', end='')"), always_ready, recorder)
    supervisor = asyncio.create_task(pod.supervise())
    await recorder.until(lambda: "end" in recorder.lines)
    await pod.stop(grace_s=0)
    await asyncio.wait_for(supervisor, DEADLINE_S)
    assert max(map(len, recorder.lines)) <= 2 * pod_process.MAX_LINE_BYTES


async def test_a_broken_probe_is_no_silence() -> None:
    async def broken() -> bool:
        raise RuntimeError("bug in the probe")

    pod = PodProcess(spec(SLEEP), broken, Recorder())
    with pytest.raises(RuntimeError, match="bug in the probe"):
        await asyncio.wait_for(pod.supervise(), DEADLINE_S)
    assert pod.pid is None


def test_exits_in_words() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(1) == "exit code 1"
