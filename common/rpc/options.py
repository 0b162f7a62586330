"""Channel arguments that both ends of every connection share, so that their keepalives agree."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 2**20  # a prompt of a million tokens takes 5 MB
KEEPALIVE_INTERVAL_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000  # a dead machine is noticed after interval + timeout

Options = list[tuple[str, int]]


def keepalive_options(interval_ms: int, timeout_ms: int) -> Options:
    """Ping a silent peer every `interval_ms`; drop it if an answer takes `timeout_ms`."""
    return [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # the one that counts: all pings share it, and its default is 60 s
    ]


SHARED_OPTIONS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),  # long handoffs and idle sessions are pinged for ever
    *keepalive_options(KEEPALIVE_INTERVAL_MS, KEEPALIVE_TIMEOUT_MS),
]
