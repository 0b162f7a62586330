"""The Prometheus endpoint of a pod."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from common.errors import ConfigError
from common.observability.metrics_server import MetricsServer


def test_serves_its_registry_and_frees_the_port() -> None:
    registry = CollectorRegistry()
    Counter("baton_things", "Things.", registry=registry).inc(3)
    with MetricsServer("127.0.0.1", 0, registry) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            assert b"baton_things_total 3.0" in response.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)
    assert all(thread.name != "metrics" for thread in threading.enumerate())
    server.close()  # idempotent
    with MetricsServer("127.0.0.1", server.port, registry):
        pass


def test_a_port_in_use_is_a_config_error() -> None:
    with (
        MetricsServer("127.0.0.1", 0, CollectorRegistry()) as server,
        pytest.raises(ConfigError, match="--metrics-port: cannot listen on"),
    ):
        MetricsServer("127.0.0.1", server.port, CollectorRegistry())


def test_closing_before_starting_frees_the_port() -> None:
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    server.close()
    MetricsServer("127.0.0.1", server.port, CollectorRegistry()).close()
