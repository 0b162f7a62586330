"""A worker: loads the model, owns the KV cache and the connector, executes steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from common.engine.config import EngineConfig
from common.engine.contract.adapters import Adapters
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.kv_groups import max_blocks_of, max_spans_in
from common.engine.contract.layout import KVLayout
from common.engine.contract.masks import MaskSource, no_masks
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import (
    NOTHING_ASKED,
    Drafting,
    Fence,
    FinishedStep,
    ModelRunnerOutput,
    RunningStep,
    SchedulerOutput,
)
from common.engine.devices.attention import KVSpec
from common.engine.devices.base import Device, StepFences
from common.engine.devices.ranks import OneRank, Ranks
from common.engine.kv_connector import NO_FENCES, OpenConnector, WorkerConnector
from common.engine.model.draft_loader import load_draft_model
from common.engine.model.eagle3 import load_eagle3
from common.engine.model.expert_parallel import ExpertRanks
from common.engine.model.fingerprint import fingerprint_model
from common.engine.model.heads import LoadedHead
from common.engine.model.kv_groups import GroupLayers, by_window, default_block_size, with_states
from common.engine.model.loader import LoadedModel, load_model
from common.engine.model.mtp import load_mtp
from common.engine.model.stage_links import OneStage, StageLinks
from common.engine.phases import PhaseClock
from common.engine.sampling.processors import load_processors
from common.engine.speculation.base import Proposer
from common.engine.speculation.guard import GuardedProposer
from common.engine.speculation.registry import create_proposer
from common.engine.speculative import MAX_DEPTH, DraftModelOptions, HeadOptions, MtpOptions
from common.engine.worker.connector import create_connector
from common.engine.worker.draft_model import DraftModel
from common.engine.worker.features import Features, Tagger, feature_bytes_per_block
from common.engine.worker.head import Head, HeadRunner
from common.engine.worker.model_runner import ModelRunner
from common.engine.worker.state_cache import num_slots
from common.engine.worker.step_measurement import measure_steps
from common.errors import ConfigError, ModelLoadError
from common.types import RequestId, SamplingParams

logger = logging.getLogger(__name__)

_ONE_RANK = OneRank()
_ONE_STAGE = OneStage()


class _FencedStep(NamedTuple):
    """See RunningStep."""

    running: RunningStep
    fence: Fence

    def result(self) -> ModelRunnerOutput:
        """See RunningStep."""
        output = self.running.result()
        return replace(output, fence=max(output.fence, self.fence))


class _TaggedStep(NamedTuple):
    """See RunningStep. A block whose last token is not known before the step is over gets its tag then."""

    running: RunningStep
    tagger: Tagger
    request_ids: Collection[RequestId]
    fences: StepFences | None

    def result(self) -> ModelRunnerOutput:
        """See RunningStep."""
        output = self.running.result()
        is_late = self.tagger.note_computed(self.request_ids)
        return replace(output, fence=self.fences.record()) if is_late and self.fences is not None else output


class _Drafts(NamedTuple):
    """The draft model, and what keeps its failures from the streams."""

    model: DraftModel
    guard: GuardedProposer


class Worker:
    """Executor's other half: the same calls, in the same order, on one thread. Loads the part of the model that is its
    rank's: of the stage that `links` names, what `ranks` says."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        ranks: Ranks = _ONE_RANK,
        links: StageLinks = _ONE_STAGE,
        *,
        group_layers: GroupLayers = by_window,
        experts: ExpertRanks | None = None,
    ) -> None:
        """`experts`: among which experts are cut whole; None: each is cut as any layer."""
        self.rank = rank
        self._experts = experts
        self._ranks = ranks
        self._links = links
        self._group_layers = group_layers
        self.phases = PhaseClock()  # of the thread that calls it; the driver's, if that is the same
        self._config = config
        self._loaded: LoadedModel | None = None
        self._facts: ModelFacts | None = None
        self._connector: WorkerConnector | None = None
        self._fences: StepFences | None = None
        self._kv_cache: torch.Tensor | None = None
        self._block_size = 0  # tokens; set with the model
        self._runner: ModelRunner | None = None
        self._proposer: Proposer | None = None
        self._draft_loaded: LoadedModel | None = None
        self._head: LoadedHead | None = None
        self._tagger: Tagger | None = None
        self._drafts: _Drafts | None = None

    def load_model(self) -> ModelFacts:
        """See Executor.load_model."""
        # First, as its errors come at once while a model may take minutes to load.
        if self._config.connector is not None:
            self._connector = create_connector(self._config.connector)
        device_number = self._config.parallel.device_of(self.rank, self._config.data_parallel_rank)
        if self.rank == self._config.parallel.answering_rank:  # others may find another time too long
            self._proposer = create_proposer(self._config)
            method = (self._config.for_heads or self._config.speculation).method
            options = None if method is None else method.options
            if isinstance(options, HeadOptions):
                self._head = self._load_head(options, device_number)
                if self._head is not None and self._config.for_heads is None:
                    self._draft_loaded = self._head.loaded
            elif isinstance(options, DraftModelOptions):
                self._draft_loaded = load_draft_model(self._config.model, options, device_number)
        loaded = self._loaded = load_model(
            self._config.model,
            device_number,
            self._group_layers,
            self._ranks,
            self._experts,
            self._links,
            self._config.cache.kv_cache_dtype,
            adapters=self._config.adapters,
        )
        self._ranks = loaded.ranks
        self._block_size = self._config.cache.block_size or default_block_size(
            loaded.kv_groups, loaded.kv_spec, loaded.state_bytes
        )
        if loaded.state_bytes:
            loaded = self._loaded = self._with_states(loaded)
        if self._draft_loaded is not None and self._head and not self._head.module.share_embedding(loaded):
            reason = "the head has no embedding of its own, and the model's is cut into ranks"
            raise ConfigError.of("speculative", reason)
        block_size = self._block_size
        dtype = str(loaded.dtype).removeprefix("torch.")
        try:
            fingerprint = fingerprint_model(
                loaded.weight_files,
                loaded.config,
                dtype=dtype,
                kv_dtype=loaded.kv_groups[0].dtype,
                quantization=self._config.model.quantization,
                rounding=loaded.rounding,
            )
        except OSError as error:
            raise ModelLoadError(f"the weights cannot be read: {error}", param="model") from error
        self._facts = ModelFacts(
            fingerprint=fingerprint,
            layout=KVLayout(
                block_size, loaded.kv_groups, self._ranks.size, loaded.layers_by_stage, self._num_feature_layers
            ),
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            bytes_per_block=self._cache_spec(loaded).bytes_per_block(block_size),
            draft_bytes_per_block=self._draft_bytes_per_block,
            available_kv_bytes=self._kv_bytes(loaded),
            device=loaded.device.name,
            dtype=dtype,
            position_dims=loaded.position_dims,
            tokenizer_directory=loaded.directory,
            kernels=loaded.kernels,
            kernels_failed=loaded.kernels_failed,
            num_threads=loaded.device.num_threads,
            pooling=loaded.pooling,
        )
        return self._facts

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See Executor.initialize_kv_cache."""
        assert self._loaded is not None
        block_size = self._block_size
        spec = self._cache_spec(self._loaded)
        self._kv_cache = kv_cache = allocate_kv_cache(spec, num_blocks, block_size, self._loaded.device)
        features = None if self._head is None else self._open_features(self._head, kv_cache)
        most = -(-self._max_model_len(self._loaded) // block_size)
        fitting = max_spans_in(self._loaded.kv_groups, num_blocks - 1, most) * block_size
        self._runner = ModelRunner(
            self._loaded,
            kv_cache,
            block_size=block_size,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=min(self._max_model_len(self._loaded), fitting),
            processors=load_processors(
                self._config.model.logits_processors,
                vocab_size=self._loaded.vocab_size,
                device=self._loaded.device.torch_device,
            ),
            proposer=self._guarded_proposer(self._loaded.vocab_size),
            links=self._links,
            on_computed=None if features is None else features.write,
        )
        can_record = self._ranks.can_record and self._experts is None
        if not self._config.model.enforce_eager and can_record:
            # With states, those with drafts are not recorded.
            most = self._config.scheduler.max_num_seqs if self._loaded.state_bytes else self._max_num_decodes
            self._runner.record_decodes(most)
        if features is not None:
            self._tagger = Tagger(features, self._runner.table, block_size)
        if self._draft_loaded is not None:
            self._drafts = self._open_draft_model(self._draft_loaded, num_blocks, self._runner, features)

    def measure_steps(self) -> list[tuple[int, float]]:
        """See Executor.measure_steps."""
        assert self._loaded is not None
        assert self._runner is not None
        most = min(self._config.scheduler.max_num_batched_tokens, self._runner.max_model_len)
        if self.runs_ahead:
            # Triton compiles other kernels for such requests, which the first of them must not wait for.
            self._runner.profile(1, SamplingParams(temperature=1.0, presence_penalty=1.0, speculative=False))
        return measure_steps(self._runner.profile, most)

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        """See Executor.open_connector."""
        if self._connector is None:
            return None
        assert self._facts is not None
        assert self._loaded is not None
        assert self._kv_cache is not None
        self._fences = self._loaded.device.memory.fences()  # connectors copy on streams of their own
        facts = self._connector.register_kv_cache(
            self._kv_cache,
            self._facts.fingerprint,
            self._facts.layout,
            on_settled,
            self._fences or NO_FENCES,
            self.rank,
        )
        return OpenConnector(self._connector, facts)

    @property
    def adapters(self) -> Adapters | None:
        """See Executor.adapters."""
        return None if self._loaded is None else self._loaded.adapters

    @property
    def runs_ahead(self) -> bool:
        """See Executor.runs_ahead."""
        return self._loaded is not None and self._loaded.step_sampler is not None

    @property
    def num_failed_recordings(self) -> int:
        """See Executor.num_failed_recordings."""
        of_drafts = 0 if self._drafts is None else self._drafts.model.num_failed_recordings
        return 0 if self._runner is None else self._runner.num_failed_recordings + of_drafts

    def note_sampled(self, sampled: Mapping[RequestId, Sequence[int]]) -> None:
        """See ModelRunner."""
        assert self._runner is not None
        self._runner.note_sampled(sampled)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """See Executor.submit."""
        assert self._runner is not None
        if self._tagger is not None:
            self._tagger.begin_step(step)
        if self._drafts is not None:
            self._drafts.model.begin_step(step)
        self._runner.update_requests(step)
        if self._experts is not None:
            self._experts.begin_step(step.tokens_by_engine)
        if not step.num_scheduled_tokens:
            if step.tokens_by_engine:
                self._attend()
            return FinishedStep(ModelRunnerOutput())
        running = self._runner.submit(step.num_scheduled_tokens, step.drafts, masks, self.phases)
        if self._tagger is not None:
            self._tagger.note_computed(step.num_scheduled_tokens)
            if not isinstance(running, FinishedStep):
                running = _TaggedStep(running, self._tagger, step.num_scheduled_tokens, self._fences)
        if self._drafts is not None and step.asked != NOTHING_ASKED:
            running = FinishedStep(self._propose(self._drafts, step, running.result()))
        return running if self._fences is None else _FencedStep(running, self._fences.record())

    def check(self, known: KnownRequests) -> list[str]:
        """See Executor.check."""
        assert self._runner is not None
        of_drafts = [] if self._drafts is None else self._drafts.guard.check()
        of_drafts += [] if self._tagger is None else self._tagger.check()
        return known.violations(self._runner.block_tables) + self._runner.check_proposer() + of_drafts

    def _propose(self, drafts: _Drafts, step: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Adds the draft model's drafts of what comes next."""
        assert self._runner is not None
        proposed = drafts.guard.propose(self._runner.table.contexts(step.num_scheduled_tokens))
        drafting = drafts.model.take_drafting()
        if drafts.guard.is_off:
            drafting = Drafting(has_failed=True)
            self._drafts = self._draft_loaded = self._head = self._tagger = None
            self._runner.on_computed = None
        return replace(output, drafts=proposed.drafts, proposer_failure=proposed.failure, drafting=drafting)

    @torch.inference_mode()
    def _attend(self) -> None:
        """Takes part in a step of other engines."""
        assert self._experts is not None
        self._experts.attend()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step."""
        return self.submit(step, no_masks).result()

    def close(self) -> None:
        """See Executor.close."""
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()
        self._runner = None
        self._proposer = self._draft_loaded = self._head = self._drafts = self._tagger = None
        self._kv_cache = None
        self._loaded = None
        self._ranks.close()
        if self._experts is not None:
            self._experts.ranks.close()
        self._links.close()

    def _guarded_proposer(self, vocab_size: int) -> GuardedProposer | None:
        proposer, self._proposer = self._proposer, None  # the guard lets go of one that is switched off
        return None if proposer is None else GuardedProposer(proposer, vocab_size, self._config.step_share_s)

    def _load_head(self, options: HeadOptions, device_number: int) -> LoadedHead | None:
        if self._config.for_heads is not None and not self._keeps_features_with_kv:
            logger.warning(
                "speculative: several ranks hand over nothing for the heads of decode pods, which will do without"
            )
            return None
        if self._config.parallel.pipeline_parallel_size > 1:
            raise ConfigError.of("speculative", f"{options.method}: not for a model that is cut into stages")
        if isinstance(options, MtpOptions):
            head = load_mtp(self._config.model, options, device_number)
        else:
            head = load_eagle3(self._config.model, options, device_number)
        return head if self._config.for_heads is None else head.without_layers()

    def _with_states(self, loaded: LoadedModel) -> LoadedModel:
        """Adds the KV groups of its layers' states."""
        groups, spec = with_states(loaded.kv_groups, loaded.kv_spec, loaded.state_bytes, self._block_size)
        return replace(loaded, kv_groups=groups, kv_spec=spec)

    def _slot_bytes(self, loaded: LoadedModel) -> int:
        """Bytes of a slot for the state of a running request, which is laid out as in blocks."""
        num_blocks = sum(group.kind == "state" for group in loaded.kv_groups)
        if not num_blocks:
            return 0
        whole = replace(loaded.kv_spec, num_kv_heads=loaded.kv_groups[0].num_kv_heads)
        return num_blocks * whole.bytes_per_block(self._block_size)

    @property
    def _keeps_features_with_kv(self) -> bool:
        """Whether they are in the KV cache, of which each of several ranks has some KV heads or layers."""
        return self._config.parallel.num_ranks == 1

    @property
    def _max_num_decodes(self) -> int:
        """Tokens of a step without prompts: each request's last one, and its drafts."""
        scheduler = self._config.scheduler
        if self._config.speculation.method is None:
            return scheduler.max_num_seqs
        most = min(scheduler.max_num_seqs * (1 + MAX_DEPTH), scheduler.max_num_batched_tokens)
        return max(scheduler.max_num_seqs, most)

    @property
    def _num_feature_layers(self) -> int:
        """See KVLayout."""
        if self._head is None or not self._keeps_features_with_kv:
            return 0
        assert self._loaded is not None
        block_size = self._block_size
        of_layer = replace(self._loaded.kv_spec, num_layers=1).bytes_per_block(block_size)
        return -(-feature_bytes_per_block(self._head, block_size) // of_layer)

    def _cache_spec(self, loaded: LoadedModel) -> KVSpec:
        """The KV cache, with room for features."""
        return replace(loaded.kv_spec, num_layers=loaded.kv_spec.num_layers + self._num_feature_layers)

    def _open_features(self, head: LoadedHead, kv_cache: torch.Tensor) -> Features:
        assert self._loaded is not None
        scheduler, block_size, num_blocks = self._config.scheduler, self._block_size, len(kv_cache)
        most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        num_bytes = feature_bytes_per_block(head, block_size)
        with _fitting(f"a head's input for {num_blocks} blocks", num_blocks * num_bytes, self._loaded.device):
            if self._keeps_features_with_kv:
                places = kv_cache.flatten(1)[:, self._loaded.kv_spec.num_layers * kv_cache[0, 0].numel() :]
                places = places.view(torch.uint8)
            else:
                places = self._loaded.device.memory.zeros((num_blocks, num_bytes), torch.uint8)
            if self._config.for_heads is None:
                head.keep_outputs(most)
            return Features(head, head.keep_states(self._loaded, most), places, block_size)

    def _open_draft_model(
        self, loaded: LoadedModel, num_blocks: int, target: ModelRunner, features: Features | None
    ) -> _Drafts:
        assert self._loaded is not None
        block_size, scheduler = self._block_size, self._config.scheduler
        create = ModelRunner if features is None else partial(HeadRunner, features)
        runner = create(
            replace(loaded, eos_token_ids=self._loaded.eos_token_ids),  # which `min_tokens` excludes
            allocate_kv_cache(loaded.kv_spec, num_blocks, block_size, loaded.device),
            block_size=block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=target.max_model_len,
        )
        if not self._config.model.enforce_eager:
            runner.record_decodes(self._max_num_decodes)
        limits = (num_blocks, block_size, loaded.max_model_len, scheduler.max_num_batched_tokens)
        if features is None or self._head is None:
            model = DraftModel(runner, *limits)
        else:
            assert self._tagger is not None
            model = Head(self._tagger, self._head.depth, runner, *limits)
        return _Drafts(model, GuardedProposer(model, loaded.vocab_size, math.inf))

    @property
    def _draft_bytes_per_block(self) -> int:
        """Bytes of the draft model's KV, and of the features that a head takes, unless they are with the model's."""
        loaded, block_size = self._draft_loaded, self._block_size
        of_kv = 0 if loaded is None else loaded.kv_spec.bytes_per_block(block_size)
        has_own = self._head is not None and not self._keeps_features_with_kv
        return of_kv + (feature_bytes_per_block(self._head, block_size) if self._head and has_own else 0)

    def _max_model_len(self, loaded: LoadedModel) -> int:
        return min(self._config.model.max_model_len or loaded.max_model_len, loaded.max_model_len)

    def _kv_bytes(self, loaded: LoadedModel) -> int:
        """Returns the bytes for the KV cache, at most as many as the scheduler can use."""
        cache = self._config.cache
        bytes_per_block = self._cache_spec(loaded).bytes_per_block(self._block_size) + self._draft_bytes_per_block
        if cache.num_blocks is not None:
            return cache.num_blocks * bytes_per_block
        blocks_per_seq = max_blocks_of(loaded.kv_groups, -(-self._max_model_len(loaded) // self._block_size))
        usable_blocks = self._config.scheduler.max_num_seqs * blocks_per_seq + 1  # and the null block
        return min(self._available_kv_bytes(loaded), usable_blocks * bytes_per_block)

    def _available_kv_bytes(self, loaded: LoadedModel) -> int:
        """The setting if there is one, else a share of what is free on the device."""
        cache, memory = self._config.cache, loaded.device.memory
        if cache.kv_cache_memory is not None:
            return cache.kv_cache_memory
        if memory.is_own:
            self._profile(loaded)
        for_kv = int(memory.free_bytes() * (cache.memory_fraction or memory.default_fraction))
        max_num_seqs = self._config.scheduler.max_num_seqs
        of_states = num_slots(max_num_seqs) * self._slot_bytes(loaded)
        if of_states >= for_kv:
            reason = f"states of {max_num_seqs} running requests take {of_states / 2**30:.1f} GiB"
            raise ConfigError.of("max_num_seqs", f"{reason}, of {for_kv / 2**30:.1f} GiB for them and the KV cache")
        return for_kv - of_states

    def _profile(self, loaded: LoadedModel) -> None:
        """Runs the largest step once over a temporary KV cache, so that the memory measured afterwards is really
        free."""
        num_tokens = min(self._config.scheduler.max_num_batched_tokens, self._max_model_len(loaded))
        block_size = self._block_size
        num_blocks = -(-num_tokens // block_size) + 1
        kv_cache = allocate_kv_cache(loaded.kv_spec, num_blocks, block_size, loaded.device)
        runner = ModelRunner(
            loaded,
            kv_cache,
            block_size=block_size,
            max_num_seqs=1,
            max_model_len=num_tokens,
            links=self._links,
        )
        runner.profile(num_tokens)
        runner.close()


def allocate_kv_cache(spec: KVSpec, num_blocks: int, block_size: int, device: Device) -> torch.Tensor:
    """Zeros of [num_blocks, num_layers, planes, num_kv_heads, block_size, row_numbers]. Raises ConfigError if they are
    too many."""
    shape = (num_blocks, *spec.block_shape(block_size))
    with _fitting(f"a KV cache of {num_blocks} blocks", num_blocks * spec.bytes_per_block(block_size), device):
        return device.memory.zeros(shape, spec.cache_dtype)


@contextmanager
def _fitting(what: str, num_bytes: int, device: Device) -> Iterator[None]:
    """Raises ConfigError if memory runs out within."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        problem = f"{what} takes {num_bytes / 2**30:.1f} GiB, more than is free on {device.name}"
        raise ConfigError(problem, param="kv_cache_memory") from error
