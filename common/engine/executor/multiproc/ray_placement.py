"""Ray as what finds machines for the ranks of a pod: an actor of a placement group on each, which joins the driver as a
machine does that an operator has started. Steps and answers do not go through Ray."""

from __future__ import annotations

from typing import Any

import msgspec

from common.engine.config import EngineConfig
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.executor.multiproc.node import run_node
from common.errors import ConfigError, EngineDeadError

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError.of("executor", "ray is not installed: pip install 'baton-llm[ray]'") from error


class _Node:
    """The actor: a machine's share of the ranks."""

    def run(self, config: bytes) -> None:
        """Serves the driver until it is gone."""
        run_node(msgspec.msgpack.decode(config, type=EngineConfig))


class RayPlacement:
    """See Placement."""

    def __init__(self) -> None:
        self._group: Any = None
        self._actors: list[Any] = []

    def host(self) -> str:
        """See Placement. Connects to the cluster that RAY_ADDRESS names or that runs here, or starts one here."""
        if not ray.is_initialized():
            ray.init(log_to_driver=True, include_dashboard=False)
        return str(ray.util.get_node_ip_address())

    def place(self, config: EngineConfig) -> None:
        """See Placement."""
        parallel = config.parallel
        count, device = parallel.ranks_per_node, config.model.device
        on_gpus = "cuda" in device or (device == "auto" and "GPU" in ray.cluster_resources())
        resource = "GPU" if on_gpus else "CPU"
        strategy = "STRICT_SPREAD" if parallel.nnodes > 1 else "PACK"
        self._group = placement_group([{resource: count}] * parallel.nnodes, strategy=strategy)
        if not self._group.wait(parallel.join_timeout_s):
            wanted = f"{parallel.nnodes} machines with {count} {resource} each"
            raise EngineDeadError(f"Ray has not found {wanted} within {parallel.join_timeout_s:g} s (join_timeout_s)")
        actor = ray.remote(num_cpus=0 if on_gpus else count, num_gpus=count if on_gpus else 0)(_Node)
        for number in range(parallel.nnodes):
            own = msgspec.structs.replace(config, parallel=msgspec.structs.replace(parallel, node_rank=number))
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            node = actor.options(scheduling_strategy=bundle).remote()
            node.run.remote(msgspec.msgpack.encode(own))
            self._actors.append(node)

    def close(self) -> None:
        """See Placement. The cluster stays as it is."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def create_ray_executor(config: EngineConfig) -> MultiprocExecutor:
    """ExecutorFactory. Raises ConfigError if machines would not know each other."""
    if config.tls is None:
        raise ConfigError("--cluster-ca: required with --executor ray, as nodes know each other by certificates")
    return MultiprocExecutor(config, placement=RayPlacement())
