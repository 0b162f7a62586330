"""The proposers by name: values of the setting `proposer`."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.config import EngineConfig
from common.engine.registry import Registry
from common.engine.speculation.base import Proposer

ProposerFactory = Callable[[EngineConfig], Proposer]

PROPOSERS: Registry[ProposerFactory] = Registry("proposer", {})
