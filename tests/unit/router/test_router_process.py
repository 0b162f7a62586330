"""The router as a process: start, signals, exit codes, what it imports."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
import yaml

from common.config import CONFIG_ERROR_EXIT_CODE
from router.__main__ import main
from router.security.keys import digest_of
from router.testing import FakeDecodePod


def test_torch_is_not_imported():
    code = "import router.__main__, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "nowhere"], "--decode"),
        (["--decode", "a:1", "--prefill", "a:1"], "--prefill and --decode"),
        (["--decode", "a:1", "--port", "70000"], "--port"),
        (["--decode", "a:1", "--prefill-policy", "best"], "--prefill-policy"),
        (["--decode", "a:1", "--decode-policy", "kv_aware:x"], "--decode-policy: the weight of kv_aware"),
        (["--decode", "a:1", "--tls-cert", "x"], "--tls-key: required with --tls-cert"),
        (["--decode", "a:1", "--cluster-ca", "x"], "--cluster-cert: required with --cluster-ca"),
        (["--decode", "a:1", "--max-header-bytes", "10"], "--max-header-bytes: must be >= 1024"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == CONFIG_ERROR_EXIT_CODE
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("baton: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prefill_policy: best", "{file}: router.prefill_policy: unknown policy 'best'"),
        ("decode_policy: 'kv_aware:x'", "{file}: router.decode_policy: the weight of kv_aware"),
        ("decode: [nowhere]", "{file}: router.decode: expected host:port"),
        ("port: 70000", "{file}: router.port: must be <= 65535"),
        ("polcy: best", "{file}: router.polcy: unknown setting"),
        ("tls_cert: x", "--tls-key: required with {file}: router.tls_cert"),
        ("remote_prefill: always", "{file}: router.remote_prefill always needs prefill pods"),
    ],
)
def test_a_wrong_setting_of_a_file_is_named_by_its_path(setting, said, tmp_path, capsys):
    file = tmp_path / "baton.yaml"
    file.write_text(f"router:\n  {setting}\n")
    assert main(["--config", str(file)]) == CONFIG_ERROR_EXIT_CODE
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"baton: error: {said.format(file=file)}")


@pytest.mark.parametrize(("arguments", "said"), [([], "--decode"), (["--decode", "a:1", "--model", "/no"], "--model")])
def test_a_setting_that_cannot_be_met_is_too(arguments, said):
    command = [sys.executable, "-m", "router", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == CONFIG_ERROR_EXIT_CODE
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"baton: error: {said}")


@pytest.fixture
async def process():
    """A router process over one fake pod, and its URL."""
    async with FakeDecodePod() as decode:
        arguments = ["--decode", decode.address, "--port", "0", "--grpc-port", "0", "--shutdown-grace-s", "20"]
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            line = (await asyncio.wait_for(router.stdout.readline(), 60)).decode()
            url = re.fullmatch(r"ready role=router http=(\S+) grpc=\S+\n", line)[1]
            yield router, url, decode
        finally:
            if router.returncode is None:
                router.kill()
            await router.wait()


async def until_refused(url):
    async with asyncio.timeout(60):
        while True:
            try:
                async with httpx.AsyncClient(base_url=url) as client:
                    await client.get("/health")
            except (httpx.RemoteProtocolError, httpx.ReadError):
                continue  # accepted an instant before the server stopped listening, and closed unanswered
            except httpx.ConnectError:
                return


async def test_sigterm_finishes_what_runs_and_refuses_the_rest(process):
    router, url, decode = process
    decode.allowed = 2
    body = {"prompt": [600], "max_tokens": 6, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        async with asyncio.timeout(60):
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            router.send_signal(signal.SIGTERM)
            await until_refused(url)
            await decode.allow(None)
            events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert await asyncio.wait_for(router.wait(), 60) == 0


async def test_sighup_reloads_the_keys_and_ends_nothing(tmp_path):
    keys = tmp_path / "keys.yaml"

    def write(key):
        keys.write_text(yaml.safe_dump([{"name": "a", "hash": f"sha256:{digest_of(key).hex()}"}]))

    async def status(client, key):
        return (await client.get("/v1/models", headers={"x-api-key": key})).status_code

    write("old")
    async with FakeDecodePod() as decode:
        arguments = ["--decode", decode.address, "--port", "0", "--grpc-port", "0", "--api-keys-file", str(keys)]
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            line = (await asyncio.wait_for(router.stdout.readline(), 60)).decode()
            async with httpx.AsyncClient(base_url=line.split("http=")[1].split()[0], timeout=60) as client:
                assert (await status(client, "old"), await status(client, "new")) == (200, 401)
                write("new")
                router.send_signal(signal.SIGHUP)
                async with asyncio.timeout(60):
                    while await status(client, "new") != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert await status(client, "old") == 401
            router.terminate()
            assert await asyncio.wait_for(router.wait(), 60) == 0
        finally:
            if router.returncode is None:
                router.kill()
                await router.wait()


async def test_a_busy_port_is_one_line_and_exit_code_2(process):
    _, url, decode = process
    port = url.rpartition(":")[2]
    arguments = ["--decode", decode.address, "--port", port, "--grpc-port", "0"]
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode == CONFIG_ERROR_EXIT_CODE
    assert f"--port: cannot listen on 127.0.0.1:{port}" in stderr.decode()
