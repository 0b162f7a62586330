"""What workers have of the limits of their router."""

from __future__ import annotations

import msgspec
import pytest

from router.admission.config import AdmissionConfig
from router.config import RouterConfig
from router.dispatching.config import SurvivalConfig
from router.security.config import LimitsConfig
from router.workers.shares import share_of

LIMITS = (
    "admission.max_inflight",
    "admission.max_queued",
    "limits.max_connections",
    "limits.max_unfinished_body_bytes",
    "limits.max_unfinished_body_bytes_per_client",
    "survival.max_kept_bytes",
    "max_timelines",
)


def limit_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_all_shares_together_are_the_limits(workers):
    config = RouterConfig(
        workers=workers,
        admission=AdmissionConfig(max_inflight=100, max_queued=3),
        limits=LimitsConfig(max_connections=1000, max_unfinished_body_bytes_per_client=70 * 2**20),
        survival=SurvivalConfig(max_kept_bytes=1001),
        max_timelines=10,
    )
    shares = [share_of(config, number) for number in range(workers)]
    for name in LIMITS:
        assert sum(limit_of(share, name) for share in shares) == limit_of(config, name), name


def test_what_is_no_limit_of_the_router_as_a_whole_is_the_same():
    config = RouterConfig(workers=2, decode=["a:1"], max_body_bytes=4096)
    share = share_of(config, 1)
    assert share.limits.max_connections is None
    different = {name for name in config.__struct_fields__ if getattr(config, name) != getattr(share, name)}
    assert different == {"workers", "max_timelines", "admission", "limits", "survival"}


def test_settings_survive_the_way_to_a_worker():
    config = RouterConfig(workers=2, decode=["a:1"], models={"a": "/m"}, override_generation_config={"top_k": 3})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=RouterConfig) == config
