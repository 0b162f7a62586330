"""What workers have of the limits of their router."""

from __future__ import annotations

import msgspec
import pytest

from common.config import _flat_values
from router.admission.config import AdmissionConfig
from router.config import RouterConfig
from router.dispatching.config import SurvivalConfig
from router.security.config import LimitsConfig
from router.serving.config import ModelsConfig, ServingConfig
from router.workers.shares import share_of

LIMITS = (
    "serving.admission.max_inflight",
    "serving.admission.max_queued",
    "limits.max_connections",
    "limits.max_unfinished_body_bytes",
    "limits.max_unfinished_body_bytes_per_client",
    "serving.survival.max_kept_bytes",
    "serving.max_timelines",
)


def limit_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_all_shares_together_are_the_limits(workers):
    config = RouterConfig(
        workers=workers,
        limits=LimitsConfig(max_connections=1000, max_unfinished_body_bytes_per_client=70 * 2**20),
        serving=ServingConfig(
            admission=AdmissionConfig(max_inflight=100, max_queued=3),
            survival=SurvivalConfig(max_kept_bytes=1001),
            max_timelines=10,
        ),
    )
    shares = [share_of(config, number) for number in range(workers)]
    for name in LIMITS:
        assert sum(limit_of(share, name) for share in shares) == limit_of(config, name), name


def test_what_is_no_limit_of_the_router_as_a_whole_is_the_same():
    config = RouterConfig(workers=2, decode=["a:1"], serving=ServingConfig(max_body_bytes=4096))
    share = share_of(config, 1)
    assert share.limits.max_connections is None
    before, after = (dict(_flat_values(each)) for each in (config, share))
    different = {name for name in before if before[name] != after[name]}
    assert different == {
        "workers", "max_timelines", "max_inflight", "max_queued", "max_unfinished_body_bytes", "max_kept_bytes",
    }  # fmt: skip


def test_settings_survive_the_way_to_a_worker():
    models = ModelsConfig(models={"a": "/m"}, override_generation_config={"top_k": 3})
    config = RouterConfig(workers=2, decode=["a:1"], serving=ServingConfig(served_models=models))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=RouterConfig) == config
