"""A router over fake pods as a target, and what must hold after each run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from router.security.config import SecurityConfig
from router.security.keys import digest_of
from router.testing import FakeDecodePod, FakePrefillPod
from tests.fuzz.budget import Budget
from tests.fuzz.host import Footprint, Host, hosted
from tests.fuzz.http_strategies import API_KEY, MAX_BODY_BYTES, Call
from tests.fuzz.raw_http import exchange
from tests.unit.router.router_cluster import RouterCluster, run_cluster

MAX_MODEL_LEN = 128
_NEIGHBOURS_KEY = "key-of-a-neighbour-0123456789"
_SMALL = Call(
    method="POST",
    target="/v1/completions",
    headers=(("authorization", f"Bearer {_NEIGHBOURS_KEY}"),),
    body=b'{"prompt": [5, 6], "max_tokens": 2}',
).encode()


@contextmanager
def router_host(**settings: object) -> Iterator[Host[RouterCluster]]:
    """One prefill and one decode pod. When it is left, the router must be as it was."""
    pods = {"max_model_len": MAX_MODEL_LEN}
    defaults = {"max_body_bytes": MAX_BODY_BYTES, "max_choices": 4, "request_timeout_s": 10.0}

    def make():
        return run_cluster([FakePrefillPod(**pods)], [FakeDecodePod(**pods)], **{**defaults, **settings})

    with hosted(make) as host:
        host.run(host.value.until_ready())
        footprint = Footprint(host)
        yield host
        check_quiet(host)
        footprint.check()


def check_quiet(host: Host[RouterCluster]) -> None:
    """Nothing of any request is left, and the next one is answered."""
    cluster = host.value
    service = cluster.router.service
    host.wait_for(lambda: not service._running and not service._batches)
    host.run(cluster.until_quiet())
    assert cluster.metric("baton_router_num_requests_inflight") == 0
    assert cluster.router.cluster.index.check_integrity() == []
    assert cluster.metric("baton_router_request_errors_total", code="internal") == 0


def budget(host: Host[RouterCluster], sent: bytes = _SMALL) -> Budget:
    """Of one request to the router; a neighbour sends `sent` meanwhile."""

    async def ask() -> None:
        answer = await exchange(host.value.router.port, [sent])
        assert answer is not None
        assert answer.status == 200, answer

    return Budget(host, ask)


def key_file(directory: Path) -> SecurityConfig:
    """Keys of the clients here."""
    keys = {"fuzzed": API_KEY, "neighbour": _NEIGHBOURS_KEY}
    entries = [{"name": name, "hash": f"sha256:{digest_of(key).hex()}"} for name, key in keys.items()]
    path = directory / "keys.yaml"
    path.write_text(yaml.safe_dump(entries))
    return SecurityConfig(api_keys_file=str(path))
