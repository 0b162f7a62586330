"""Upgrades, scaling and lost machines, by the chart's own rules and under load: no request fails, streams are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.certificates import make_certificates, paths_of
from router.security.keys import digest_of
from tests.deploy.chart import nested, render
from tests.deploy.load import PROMPTS, Load, complete
from tests.deploy.rehearsal import Rehearsal

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

MAX_TOKENS = 100
ROUTER, PREFILL, DECODE = "demo-baton-router", "demo-baton-prefill", "demo-baton-decode"
VALUES = {"router.settings": {"remote_prefill": "prefer"}, "decode.replicas": 2, "prefill.replicas": 2}
_KEY = "a key of sixteen characters or more"


class Site:
    """A release and what its requests should be answered."""

    def __init__(self, release: Rehearsal, scheme: str = "http", key: str = "") -> None:
        self.release = release
        self._scheme = scheme
        self.key = key
        self.expected = {prompt: complete(self.urls()[0], prompt, MAX_TOKENS, key) for prompt in PROMPTS}

    def urls(self) -> list[str]:
        """Of the routers that a load balancer would use."""
        return [f"{self._scheme}://{address}" for address in self.release.endpoints(ROUTER, "http")]

    def load(self) -> Load:
        return Load(self.urls, self.expected, MAX_TOKENS, num_threads=4, key=self.key)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Rehearsal(tmp_path) as release:
        release.install(render(nested(VALUES)))
        yield Site(release)


def changed(values: Mapping[str, Any]) -> Any:
    return render(nested({**VALUES, **values}))


def test_an_upgrade_of_everything(site: Site) -> None:
    before = {pod.name for pod in site.release.pods}
    settings = {"max_num_seqs": 64}
    with site.load() as load:
        load.wait_answers(4)
        site.release.upgrade(
            changed(
                {
                    "router.settings.request_timeout_s": 300,
                    "prefill.settings": settings,
                    "decode.settings": settings,
                }
            )
        )
        load.wait_answers(8)
    assert not load.failures
    assert not before & {pod.name for pod in site.release.pods}
    assert len(site.release.pods) == len(before)


def test_scale_out_and_in(site: Site) -> None:
    release = site.release
    with site.load() as load:
        for replicas in (3, 1):
            load.wait_answers(4)
            for name in (DECODE, PREFILL, ROUTER):
                release.scale(name, replicas)
        load.wait_answers(8)
    assert not load.failures
    assert [len(release.of(name)) for name in (DECODE, PREFILL, ROUTER)] == [1, 1, 1]


def test_the_loss_of_a_machine(site: Site) -> None:
    release = site.release
    with site.load() as load:
        for name in (PREFILL, DECODE):
            load.wait_answers(8)
            release.lose(release.of(name)[0])
            load.wait_answers(8)
            release.wait_ready(release.of(name))
        load.wait_answers(8)
    assert not load.failures


def test_an_upgrade_without_room_for_more_pods(tmp_path: Path) -> None:
    rules = {"decode.strategy": {"maxSurge": 0, "maxUnavailable": 1}}
    with Rehearsal(tmp_path) as release:
        release.install(changed(rules))
        site = Site(release)
        with site.load() as load:
            load.wait_answers(4)
            release.upgrade(changed({**rules, "decode.settings": {"max_num_seqs": 64}}))
            load.wait_answers(8)
    assert not load.failures


def test_mutual_tls_api_keys_and_redis(tmp_path: Path) -> None:
    """The whole of security.md at once, through an upgrade and a restart of Redis."""
    values = {
        "connector.type": "redis",
        "redis.bundled": True,
        "redis.maxMemory": "64mb",
        "router.apiKeys.existingSecret": "keys",
        "router.tls": {"enabled": True, "secret": "router"},
        "clusterTls": {"mode": "secret", "secrets": {"router": "router", "prefill": "prefill", "decode": "decode"}},
    }
    keys = f"[{{name: team-a, hash: 'sha256:{digest_of(_KEY).hex()}'}}]"
    with Rehearsal(tmp_path / "release", {"keys": {"keys.yaml": keys}, **certificates(tmp_path / "certs")}) as release:
        release.install(changed(values))
        site = Site(release, "https", _KEY)
        with pytest.raises(AssertionError, match="an API key is required"):
            complete(site.urls()[0], PROMPTS[0], MAX_TOKENS)
        with site.load() as load:
            load.wait_answers(4)
            release.roll("demo-baton-redis")
            release.roll(DECODE)
            load.wait_answers(8)
    assert not load.failures


def certificates(directory: Path) -> dict[str, dict[str, str]]:
    """Secrets as cert-manager fills them, by role."""
    make_certificates(directory, ["demo-baton-pods"])
    secrets = {}
    for role in ("router", "prefill", "decode"):
        paths = paths_of(directory, role)
        secrets[role] = {
            "ca.crt": (directory / "ca.pem").read_text(),
            "tls.crt": Path(paths.certificate).read_text(),
            "tls.key": Path(paths.key).read_text(),
        }
    return secrets
