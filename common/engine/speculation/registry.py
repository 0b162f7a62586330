"""The proposers by name: values of the setting `speculative`."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.config import EngineConfig
from common.engine.registry import Registry
from common.engine.speculation.base import Proposer
from common.engine.speculative import ByWorker
from common.errors import BatonError, ConfigError

ProposerFactory = Callable[[EngineConfig], Proposer]

_METHODS = ("propose", "forget", "reset", "check")

PROPOSERS: Registry[ProposerFactory] = Registry(
    "speculative",
    {"ngram": "common.engine.speculation.ngram:create", "suffix": "common.engine.speculation.suffix:create"},
)


def create_proposer(config: EngineConfig) -> Proposer | None:
    """The one that the settings name; what a worker runs is none of them, see `common.engine.worker.draft_model`.
    Raises ConfigError, also for what a factory from outside the package raises."""
    method = config.speculation.method
    if method is None or isinstance(method.options, ByWorker):
        return None
    factory = PROPOSERS.find(method.name)
    try:
        proposer = factory(config)
    except BatonError:
        raise
    except Exception as error:
        raise ConfigError(f"speculative: {method.name} has failed: {error!r}", param="speculative") from error
    if lacking := [name for name in _METHODS if not callable(getattr(proposer, name, None))]:
        kind = type(proposer).__name__
        raise ConfigError.of("speculative", f"{method.name} has made no proposer: {kind} has no {', '.join(lacking)}")
    return proposer
