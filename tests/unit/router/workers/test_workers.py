"""Several router processes behind one port, with real processes over a fake pod."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton import AsyncClient
from common.config import CONFIG_ERROR_EXIT_CODE
from router.security.keys import digest_of
from router.testing import FakeDecodePod

WORKERS = 2
BODY = {"prompt": [600], "max_tokens": 6, "seed": 1, "temperature": 1}
KEY = {"x-api-key": "an operator's key"}


class Process:
    """A router of several workers, as its clients and its operator see it."""

    def __init__(self, process, url, grpc_address, decode, log):
        self.process, self.url, self.grpc_address, self.decode, self._log = process, url, grpc_address, decode, log

    @property
    def log(self):
        return self._log.read_text()

    @property
    def pids(self):
        """Of the workers."""
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    @asynccontextmanager
    async def client(self):
        """On a connection of its own, which any of the workers may have."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60, headers=KEY) as client:
            yield client

    async def get(self, path):
        async with self.client() as client:
            return await client.get(path)

    async def complete(self, **body):
        async with self.client() as client:
            return await client.post("/v1/completions", json={**BODY, **body})

    async def metric(self, name, **labels):
        """As whichever worker says; None: there is no such series."""
        text = (await self.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        return sum(found) if found else None

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not await condition():  # noqa: ASYNC110  (another process has no event to wait for)
                await asyncio.sleep(0.05)


def is_alive(pid):
    """A zombie is not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@asynccontextmanager
async def running(tmp_path, *arguments, env=None, program=("-m", "router")):
    log = tmp_path / "router.log"
    async with FakeDecodePod() as decode:
        ports = ["--port", "0", "--grpc-port", "0", "--shutdown-grace-s", "20"]
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *program, "--decode", decode.address, *ports),
                *("--workers", str(WORKERS), *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(env or {})},
            )
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            found = re.fullmatch(r"ready role=router http=(\S+) grpc=(\S+)\n", line)
            assert found, log.read_text()
            router = Process(process, found[1], found[2], decode, log)
            yield router
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def router(tmp_path):
    async with running(tmp_path) as router:
        yield router


class Stream:
    """A streamed completion on a connection of its own, that has got its first event."""

    def __init__(self, response):
        self.response = response
        self.lines = response.aiter_lines()

    async def events(self):
        """The rest. Ends early if the connection breaks."""
        events = []
        with suppress(httpx.HTTPError):
            async for line in self.lines:
                events.append(line)  # noqa: PERF401  (what came before the connection broke counts)
        return [line.removeprefix("data: ") for line in events if line.startswith("data: ")]


async def open_stream(stack, router, name, **headers):
    client = await stack.enter_async_context(router.client())
    body = {**BODY, "stream": True}
    headers = {"x-request-id": name, **headers}
    response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=body, headers=headers))
    return Stream(response)


def served_by(router):
    """By request id: what tells the routers apart that have sent it to the pod. Canaries have other ids."""
    transfers = [re.match(r"(.+)\.([0-9a-f]{8})-\d+", submit.request.request_id) for submit in router.decode.submits]
    return dict(each.groups() for each in transfers if each is not None)


async def streams_of_all_workers(stack, router):
    """Streams that pause after their first token, at least one on each worker. By name."""
    router.decode.allowed = 1
    streams = {}
    while len({worker for name, worker in served_by(router).items() if name in streams}) < WORKERS or len(streams) < 6:
        stream = await open_stream(stack, router, f"s{len(streams)}")
        assert stream.response.status_code == 200
        await anext(stream.lines)
        streams[f"s{len(streams)}"] = stream
    return streams


def is_whole(events):
    return events[-1:] == ["[DONE]"] and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


async def test_whichever_worker_is_asked_answers_for_all(router):
    answers = [await router.complete() for _ in range(24)]
    assert {answer.status_code for answer in answers} == {200}
    assert len(set(served_by(router).values())) == WORKERS
    ids = {answer.json()["id"] for answer in answers}
    for _ in range(8):
        assert await router.metric("baton_router_request_success_total") == 24
        assert await router.metric("baton_router_e2e_request_latency_seconds_count") == 24
        assert await router.metric("baton_router_pod_ready") == 1
        assert await router.metric("baton_router_workers") == WORKERS
        listed = (await router.get("/v1/requests")).json()["data"]
        assert {each["id"] for each in listed} == ids
        assert [each["started_at"] for each in listed] == sorted((each["started_at"] for each in listed), reverse=True)
        assert len((await router.get("/v1/requests?limit=5")).json()["data"]) == 5
    for request_id in ids:
        assert (await router.get(f"/v1/requests/{request_id}")).json()["request"]["id"] == request_id


async def test_what_runs_is_counted_over_all_workers_and_ends_when_told_to_any(router):
    async with AsyncExitStack() as stack:
        streams = await streams_of_all_workers(stack, router)
        for _ in range(4):
            assert (await router.get("/load")).json() == {"server_load": len(streams)}
            view = (await router.get("/v1/cluster")).json()
            assert view["num_under_way"] == view["pods"][0]["num_requests"] == len(streams)
        for name in streams:
            async with AsyncClient(router.grpc_address) as client:
                assert await client.abort(name)
                assert not await client.abort("unknown")
        await router.until(lambda: _is_idle(router))


async def test_a_worker_that_dies_is_replaced_and_the_others_go_on(router):
    before = [await router.complete() for _ in range(8)]
    assert {answer.status_code for answer in before} == {200}
    assert await router.metric("baton_router_request_success_total") == 8
    async with AsyncExitStack() as stack:
        streams = await streams_of_all_workers(stack, router)
        owner = served_by(router)
        victim = router.pids[0]
        os.kill(victim, signal.SIGKILL)

        async def is_replaced():
            return len(router.pids) == WORKERS and victim not in router.pids

        await router.decode.allow(None)
        ends = {name: is_whole(await stream.events()) for name, stream in streams.items()}
        hit = {owner[name] for name, whole in ends.items() if not whole}
        assert len(hit) == 1
        assert all(whole == (owner[name] not in hit) for name, whole in ends.items())
        await router.until(is_replaced)

    async def all_serve():
        return await router.metric("baton_router_workers") == WORKERS

    await router.until(all_serve)
    assert await router.metric("baton_router_worker_restarts_total") == 1
    assert await router.metric("baton_router_request_success_total") == 8 + sum(ends.values())
    assert re.search(r"worker \d ended \(killed by signal 9\); it is started again in 0.5 s", router.log)
    known = len(router.decode.submits)
    while len(set(served_by(router).values()) - hit) < WORKERS:  # each has served
        assert (await router.complete()).status_code == 200
    assert len(router.decode.submits) > known


async def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path):
    """Stopped, it answers nothing, though its sockets still take connections."""
    short = "import sys\nfrom router.workers import supervisor\nsupervisor._ALIVE_INTERVAL_S = 0.1\n"
    program = short + "supervisor._ALIVE_TIMEOUT_S = 2\nfrom router.__main__ import main\nsys.exit(main())\n"
    async with running(tmp_path, program=("-c", program)) as router:
        victim = router.pids[0]
        os.kill(victim, signal.SIGSTOP)

        async def is_gone():
            return not is_alive(victim)

        await router.until(is_gone)

        async def is_replaced():
            return victim not in router.pids and await router.metric("baton_router_workers") == WORKERS

        await router.until(is_replaced)
        assert await router.metric("baton_router_worker_hangs_total") == 1
        assert re.search(r"worker \d did not answer 3 times in a row; it is killed", router.log)


async def test_sigterm_finishes_what_runs_on_every_worker(router):
    async with AsyncExitStack() as stack:
        streams = await streams_of_all_workers(stack, router)
        router.process.terminate()

        async def is_refused():
            try:
                await router.get("/health")
            except httpx.TransportError as error:
                return isinstance(error, httpx.ConnectError)
            return False

        await router.until(is_refused)
        await router.decode.allow(None)
        assert all([is_whole(await stream.events()) for stream in streams.values()])
    assert await asyncio.wait_for(router.process.wait(), 60) == 0


async def test_workers_end_with_a_parent_that_is_killed(router):
    pids = router.pids
    assert len(pids) == WORKERS
    router.process.kill()

    async def are_gone():
        return not any(map(is_alive, pids))

    await router.until(are_gone)


async def test_a_broken_stream_goes_on_at_whichever_worker_the_client_reaches(router):
    router.decode.allowed = 2
    for number in range(6):
        name = f"s{number}"
        async with AsyncExitStack() as stack:
            stream = await open_stream(stack, router, name, **{"x-baton-resumable": "1"})
            event_id = (await anext(stream.lines)).removeprefix("id: ")

        async def is_kept():
            return await router.metric("baton_router_num_streams_kept") == 1

        await router.until(is_kept)
        async with router.client() as client:
            resumed = {"last-event-id": event_id, "x-request-id": name}
            await router.decode.allow(None)
            answer = await client.post("/v1/completions", json={**BODY, "stream": True}, headers=resumed)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert await router.metric("baton_router_stream_resume_total", source="kept") == number + 1
        router.decode.allowed = 2


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.yaml"

    def write(**settings):
        digest = f"sha256:{digest_of(KEY['x-api-key']).hex()}"
        file.write_text(yaml.safe_dump([{"name": "a", "hash": digest, "operator": True, **settings}]))

    write(max_concurrent=3)
    return file, write


async def test_workers_share_the_quota_of_a_key_and_reload_it(keys, tmp_path):
    file, write = keys

    async def statuses(router):
        async with AsyncExitStack() as stack:
            router.decode.allowed = 1
            streams = [await open_stream(stack, router, f"{number}") for number in range(12)]
            assert len(set(served_by(router).values())) == WORKERS
            return [stream.response.status_code for stream in streams]

    async with running(tmp_path, "--api-keys-file", str(file)) as router:
        await router.decode.allow(None)
        while len(set(served_by(router).values())) < WORKERS:
            assert (await router.complete()).status_code == 200
        found = await statuses(router)
        assert (found.count(200), found.count(429)) == (3, 9)
        await router.until(lambda: _is_idle(router))
        write(max_concurrent=5)
        router.process.send_signal(signal.SIGHUP)

        async def is_reloaded():
            return router.log.count("reloaded: ") >= WORKERS

        await router.until(is_reloaded)
        assert (await statuses(router)).count(200) == 5


async def _is_idle(router):
    return (await router.get("/load")).json() == {"server_load": 0}


async def run_to_its_end(*arguments, env=None):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--decode", "127.0.0.1:1", "--grpc-port", "0", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no"], "--model"),
        (["--max-inflight", "1"], "--max-inflight: --workers 2 divides it, so it must be at least 2"),
        (["--max-unfinished-body-bytes", "8MiB"], "--max-unfinished-body-bytes: --workers 2 divides it"),
    ],
)
async def test_a_wrong_setting_is_one_line_however_many_workers_refuse_it(arguments, said):
    exit_code, stdout, stderr = await run_to_its_end("--port", "0", "--workers", "2", *arguments)
    assert (exit_code, stdout) == (CONFIG_ERROR_EXIT_CODE, "")
    (line,) = stderr.strip().splitlines()
    assert line.startswith(f"baton: error: {said}")


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_no_other_router_gets_in_on_the_port(router, workers):
    port = router.url.rpartition(":")[2]
    exit_code, _, stderr = await run_to_its_end("--port", port, "--workers", workers)
    assert exit_code == CONFIG_ERROR_EXIT_CODE
    assert f"--port: cannot listen on 127.0.0.1:{port}" in stderr


async def test_workers_that_keep_dying_as_they_start_end_the_router(tmp_path):
    code = "import os, sys\nif 'router.workers.worker' in sys.orig_argv: os._exit(9)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    exit_code, stdout, stderr = await run_to_its_end("--port", "0", "--workers", "2", env={"PYTHONPATH": str(tmp_path)})
    assert (exit_code, stdout) == (1, "")
    assert "did not start in 3 attempts (exit code 9)" in stderr
