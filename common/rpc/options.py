"""Channel arguments that both ends of every connection share, so that their keepalives agree."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 2**20  # a prompt of a million tokens takes 5 MB
KEEPALIVE_INTERVAL_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000  # a peer whose machine is gone is noticed after interval + timeout

Options = list[tuple[str, int]]

SHARED_OPTIONS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # long handoffs and idle sessions are pinged for ever
]
