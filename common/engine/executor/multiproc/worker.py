"""The worker of a rank that has a part of a model."""

from __future__ import annotations

from torch.distributed.distributed_c10d import PrefixStore

from common.engine.config import EngineConfig
from common.engine.devices.ranks import OneRank, Ranks
from common.engine.executor.multiproc.rendezvous import GRACE_S, open_rendezvous
from common.engine.model.expert_parallel import ExpertRanks
from common.engine.model.kv_groups import GroupLayers, by_window
from common.engine.model.ranks import GlooRanks
from common.engine.model.stage_links import GlooStageLinks, OneStage, StageLinks
from common.engine.worker.worker import Worker


def create_worker(config: EngineConfig, rank: int, rendezvous: str, group_layers: GroupLayers = by_window) -> Worker:
    """See RankWorkerFactory."""
    parallel = config.parallel
    num_stages, size = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    timeout_s = parallel.step_timeout_s + GRACE_S
    ranks: Ranks = OneRank()
    links: StageLinks = OneStage()
    if parallel.num_ranks > 1:
        stage, number = divmod(rank, size)
        store, address = open_rendezvous(rendezvous, parallel.num_ranks)
        if size > 1:
            of_stage = PrefixStore(f"stage {stage}", store)
            ranks = GlooRanks(of_stage, number, size, address=address, timeout_s=timeout_s)
        if num_stages > 1:
            between_stages = PrefixStore(f"rank {number} of each stage", store)
            links = GlooStageLinks(between_stages, stage, num_stages, address=address, timeout_s=timeout_s)
    experts = _join_experts(config, rank, ranks)
    return Worker(config, rank, ranks, links, group_layers=group_layers, experts=experts)


def _join_experts(config: EngineConfig, rank: int, ranks: Ranks) -> ExpertRanks | None:
    """The ranks among which experts are cut whole, if they are."""
    parallel = config.parallel
    if not parallel.enable_expert_parallel:
        return None
    member = config.data_parallel
    if member is None:
        return ExpertRanks(ranks)
    number, size = member.rank * parallel.num_ranks + rank, parallel.world_size
    store, address = open_rendezvous(member.rendezvous, size)
    timeout_s, join_timeout_s = parallel.step_timeout_s + GRACE_S, parallel.join_timeout_s
    all_ranks = GlooRanks(store, number, size, address=address, timeout_s=timeout_s, join_timeout_s=join_timeout_s)
    return ExpertRanks(all_ranks, member.rank, parallel.data_parallel_size)
