"""Questions between parent and workers, by name, and how long the asker waits."""

from __future__ import annotations

import msgspec

from router.config import RouterConfig

START = "start"
METRICS = "metrics"
OTHERS = "others"
TAKE_OVER = "take_over"
ALIVE = "alive"

ASK_TIMEOUT_S = 2.0  # for which the parent waits for a worker
TAKE_OVER_TIMEOUT_S = 5.0  # the same for an answer that waits for a stream to end

EXIT_ORPHANED = 71  # the parent is gone


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Asked once, first. The answer is Started or NotStarted."""

    number: int
    num_workers: int
    config: RouterConfig  # with the ports that the parent reserved, and the worker's share of all limits
    usage_descriptor: int  # of the memory in which quotas are counted
    log_descriptor: int  # of the parent's log; what goes to descriptors 1 and 2 is the parent's to log


class Started(msgspec.Struct, frozen=True, tag=True):
    """It listens."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """A setting is wrong."""

    message: str
    param: str | None


StartAnswer = Started | NotStarted


class Relayed(msgspec.Struct, frozen=True, array_like=True):
    """OTHERS: a question that the parent passes on to all workers but the asker. It answers with a list of answers."""

    name: str
    about: msgspec.Raw
