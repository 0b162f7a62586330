"""The services that the runtime provides to the servicers of a pod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.engine.client.base import EngineClient
from common.engine.messages import EngineSpec
from common.observability.tracing.tracer import Tracer
from common.pod.adapters import PodAdapters
from common.pod.admission import Admission
from common.pod.cache_view import CacheView
from common.pod.config import PodConfig
from common.pod.metrics import PodMetrics
from common.pod.outputs import EngineRequests
from common.pod.stats import StatsBoard
from common.rpc.channel import ChannelOpener, open_channel

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class PodContext:
    """One incarnation of a pod whose engine has started."""

    role: Role
    config: PodConfig
    incarnation: int  # random id of this process start
    spec: EngineSpec
    engine: EngineClient
    requests: EngineRequests
    stats: StatsBoard
    caches: tuple[CacheView, ...]  # of each engine
    admission: Admission
    adapters: PodAdapters
    metrics: PodMetrics
    open_channel: ChannelOpener = open_channel  # to other pods
    tracer: Tracer | None = None  # None: tracing is off

    @property
    def pod_id(self) -> str:
        """Stable name of the pod."""
        return self.config.pod_id
