"""`baton complete` and `baton chat` against routers over fake pods."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading

from cli.main import main
from deploy.certificates import make_certificates
from deploy.ports import pick_ports
from router.security.config import SecurityConfig
from router.security.keys import digest_of
from router.testing import FakeDecodePod
from tests.unit.router.conftest import says, start_cluster, tokenizer  # noqa: F401

KEY = "k" * 32


async def baton(*argv):
    return await asyncio.to_thread(main, argv)


async def test_answers_come_over_grpc_whichever_url_names_the_router(start_cluster, says, capsys):  # noqa: F811
    pod = FakeDecodePod(says("Paris."))
    cluster = await start_cluster(decode=[pod])
    for url in (cluster.router.http_url, f"grpc://{cluster.router.grpc_address}"):
        assert await baton("complete", "Where?", "--url", url) == 0
        assert await baton("chat", "Where?", "--url", url, "--no-stream") == 0
    assert capsys.readouterr().out == "Paris.\n" * 4
    assert await baton("complete", "Where?", "--url", url, "--model", "other") == 1
    assert "the model 'other' is not served here" in capsys.readouterr().err


async def test_keys_and_tls(start_cluster, tmp_path, monkeypatch, capsys):  # noqa: F811
    make_certificates(tmp_path)
    monkeypatch.setenv("BATON_API_KEYS", f"alice:sha256:{digest_of(KEY).hex()}")
    security = SecurityConfig(tls_cert=str(tmp_path / "router.pem"), tls_key=str(tmp_path / "router.key"))
    cluster = await start_cluster(security=security)
    ask = ("complete", "Hello", "--max-tokens", "1", "--url")
    trusting = ("--tls-ca", str(tmp_path / "ca.pem"))
    for url in (cluster.router.http_url, f"grpcs://{cluster.router.grpc_address}"):
        assert await baton(*ask, url, *trusting) == 1
        assert "an API key is required" in capsys.readouterr().err
        monkeypatch.setenv("BATON_API_KEY", f" {KEY}\n")
        assert await baton(*ask, url, *trusting) == 0
        monkeypatch.delenv("BATON_API_KEY")
        assert await baton(*ask, url) == 3  # signed by an authority that is not trusted
        assert "--tls-ca names the authority to trust" in capsys.readouterr().err or url.startswith("grpcs")
    (tmp_path / "nonsense.pem").write_text("nonsense")
    for file in ("nonsense.pem", "absent.pem"):
        assert await baton(*ask, url, "--tls-ca", str(tmp_path / file)) == 2
        assert f"--tls-ca: {tmp_path / file} cannot be used" in capsys.readouterr().err


async def test_a_refused_key_has_the_same_exit_code_for_all_commands(start_cluster, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("BATON_API_KEYS", f"alice:sha256:{digest_of(KEY).hex()}")
    monkeypatch.chdir(tmp_path)
    cluster = await start_cluster(security=SecurityConfig())
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hello"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(batch))
    for_operators = [
        ("profile", "--pod", "decode-0"),
        ("plan", "--slo-ttft", "1s", "--slo-itl", "50ms", "--rate", "1", "--isl", "9", "--osl", "9"),
        ("top", "--once"),
    ]
    others = [
        ("bench", "serve"),
        ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl"),
        ("chat", "Hello"),
        ("complete", "Hello"),
    ]
    for key, commands in (("unknown", [*for_operators, *others]), (KEY, for_operators)):
        monkeypatch.setenv("BATON_API_KEY", key)
        for argv in commands:
            assert (argv[0], await baton(*argv, "--url", cluster.router.http_url)) == (argv[0], 1)
            assert "key" in capsys.readouterr().err


def test_where_no_router_is(capsys):
    (port,) = pick_ports("127.0.0.1", 1)
    assert main(["complete", "Hello", "--url", f"http://127.0.0.1:{port}"]) == 3
    assert capsys.readouterr().err == (
        f"baton: error: no router at http://127.0.0.1:{port}: start one with `baton up`\n"
    )
    assert main(["complete", "Hello", "--url", f"grpc://127.0.0.1:{port}"]) == 3
    assert capsys.readouterr().err.startswith(f"baton: error: no answer from 127.0.0.1:{port}: ")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["complete", "Hello", "--url", url]) == 1
        assert f"what answers at {url} is not a Baton router" in capsys.readouterr().err
        threading.Thread(target=server.handle_request).start()
        url = f"https://127.0.0.1:{server.server_port}"
        assert main(["complete", "Hello", "--url", url]) == 3
        assert f"TLS with {url} failed: " in (error := capsys.readouterr().err)
        assert "does it speak plain http?" in error
