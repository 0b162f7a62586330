"""A router over fake pods as a target, and what must hold after each run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.testing import FakeDecodePod, FakePrefillPod
from tests.fuzz.host import Footprint, Host, hosted
from tests.fuzz.http_strategies import MAX_BODY_BYTES
from tests.unit.router.router_cluster import RouterCluster, run_cluster

MAX_MODEL_LEN = 128


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
    assert cluster.metric("baton_requests_inflight") == 0
    assert cluster.router.cluster.index.check_integrity() == []
    assert cluster.metric("baton_request_errors_total", code="internal") == 0
