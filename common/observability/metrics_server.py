"""Prometheus exposition over HTTP for processes that have no HTTP server of their own."""

from __future__ import annotations

import logging
import threading
from http.server import ThreadingHTTPServer
from types import TracebackType

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import MetricsHandler

from common.errors import ConfigError

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 10.0  # after which a scraper that stalls is disconnected


class _Scrape(MetricsHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name in the base class)
        logger.debug(format, *args)


class MetricsServer:
    """Serves `registry` at http://host:port/metrics from construction's `start` to `close`.

    A context manager. `close` is idempotent, ends the accept thread and waits for it.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry = REGISTRY) -> None:
        """Binds; port 0 picks a free one. Raises ConfigError if the address cannot be bound."""
        scrape = type("_RegistryScrape", (_Scrape,), {"registry": registry})
        try:
            self._server = ThreadingHTTPServer((host, port), scrape)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--metrics-port: cannot listen on {host}:{port}: {error}", param="metrics_port"
            ) from error
        self._server.daemon_threads = True  # one per scrape, bounded by SCRAPE_TIMEOUT_S
        self.port = int(self._server.server_address[1])
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to serve."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._server.serve_forever, name="metrics", kwargs={"poll_interval": 0.2}
            )
            self._thread.start()

    def close(self) -> None:
        """Stops serving and frees the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
