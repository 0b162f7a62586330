"""An executor without a model: deterministic pseudo-tokens, a real (tiny) KV cache, real transfers.

The "KV" of a token is its id and its position, written to the slot that the block table gives. The next token is a hash
of everything read back through the block table, so a block owned twice, a wrong slot, a lost load or a stale prefix
changes the output: `expected_tokens` returns what a correct engine generates, on however many ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from common.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig
from common.engine.contract.adapters import AdapterFacts, ReadAdapter
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout, MappedPart, Part, map_layouts
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.parts import (
    PartDigest,
    decode_addresses,
    digests_of_rank,
    encode_address,
    encode_digests,
)
from common.engine.contract.step import FinishedStep, ModelRunnerOutput, SchedulerOutput
from common.engine.executor.fake_worker import (
    EncodedWorker,
    FakeWorker,
    Worker,
    adapted,
    numbers_of,
    position_numbers,
    sum_of_ranks,
    sum_over,
    token_of,
    weight_of,
)
from common.engine.executor.ranked_connector import join_ranks
from common.engine.executor.staged_connector import StagedStore
from common.engine.kv_cache import KVGroups
from common.engine.kv_connector import (
    NO_FENCES,
    BlockTransfer,
    ConnectorFacts,
    Fences,
    OpenConnector,
    SplitConnector,
    TransferResult,
    WorkerConnector,
)
from common.engine.messages import RankFigures
from common.engine.phases import Phase, PhaseClock
from common.engine.speculation.base import Context, Proposer
from common.engine.speculation.fake import Accuracy, FakeProposer
from common.engine.worker.slots import SlotConnector
from common.errors import InvalidRequestError
from common.types import BlockHash, PoolingFacts, PoolingParams, PromptPositions, SamplingParams
from common.types.pooling import GENERATE, POOLING_TASKS

_NUM_DRAFTS = 3
FAKE_FINGERPRINT = b"fake".ljust(32, b"\0")

_FULL = KVGroupSpec(layers=(0,), num_kv_heads=1, head_dim=1, value_head_dim=1, dtype="float32")
_WINDOW = replace(_FULL, layers=(1,), kind="window", window=21)
_STATE = replace(_FULL, layers=(1,), kind="state", state_bytes=8)
ONE_GROUP = (_FULL,)
TWO_GROUPS = (_FULL, _WINDOW)
WITH_STATES = (_FULL, _STATE, _STATE)


FAKE_POOLING = PoolingFacts(
    tasks=(GENERATE, *POOLING_TASKS), embedding_size=4, labels=("left", "right"), activation="identity"
)


def expected_numbers(prompt_token_ids: Sequence[int], pooling: PoolingParams) -> bytes:
    """The numbers that a correct engine over a FakeExecutor with one KV group computes of the prompt."""
    tokens = np.array(prompt_token_ids, dtype=np.uint64)
    seen = np.stack([tokens, position_numbers(None, 0, len(tokens)).astype(np.uint64)])
    return numbers_of(sum_over([seen]), FAKE_POOLING.num_numbers(pooling, len(tokens)))


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = 512,
    sampling: SamplingParams | None = None,
    groups: Sequence[KVGroupSpec] = ONE_GROUP,
    positions: PromptPositions | None = None,
    adapter: bytes = b"",
) -> list[int]:
    """The `num_tokens` tokens that a correct engine over a FakeExecutor generates after the prompt."""
    sampling = sampling or SamplingParams(temperature=0.0)
    kinds = KVGroups(groups, 1).kinds
    tokens = np.array(prompt_token_ids, dtype=np.uint64)
    generated: list[int] = []
    for _ in range(num_tokens):
        ids = tokens + np.uint64(adapted(adapter))
        seen = np.stack([ids, position_numbers(positions, 0, len(tokens)).astype(np.uint64)])
        weights = np.array([weight_of(place) for place in range(len(tokens))], dtype=np.uint64)
        state = np.array([[(ids * weights).sum()], [len(tokens)]], dtype=np.uint64)
        visible = [state if kind.is_state else seen[:, kind.num_skipped_tokens(len(tokens) - 1) :] for kind in kinds]
        generated.append(token_of(sum_over(visible), sampling, vocab_size))
        tokens = np.append(tokens, np.uint64(generated[-1]))
    return generated


class MemoryConnector:
    """A WorkerConnector over a dict, which several executors may share. Every job settles within its start call.
    `is_tier`: it keeps blocks, and wants all."""

    def __init__(self, store: dict[BlockHash, torch.Tensor] | None = None, *, is_tier: bool = False) -> None:
        self._is_tier = is_tier
        self.store: dict[BlockHash, torch.Tensor] = {} if store is None else store
        self._kv_cache: torch.Tensor = torch.empty(0)
        self._on_settled: Callable[[], None] = lambda: None
        self._settled: list[TransferResult] = []

    def register_kv_cache(
        self,
        kv_cache: torch.Tensor,
        fingerprint: bytes,
        layout: KVLayout,
        on_settled: Callable[[], None],
        fences: Fences = NO_FENCES,
        rank: int = 0,
    ) -> ConnectorFacts:
        """See WorkerConnector. Nothing is compared: a store is shared by equal executors only."""
        self._kv_cache = kv_cache
        self._on_settled = on_settled
        return ConnectorFacts(keeps_blocks=self._is_tier, wants_offloads=self._is_tier)

    def split(self) -> SplitConnector:
        """See WorkerConnector."""
        return SplitConnector(per_rank=None, per_engine=self)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """Count the leading blocks that the store has."""
        present = [key in self.store for key in transfer.block_hashes]
        num_leading = [*present, False].index(False)
        self._settled.append(TransferResult(transfer.job_id, num_leading, found=tuple(present)))
        self._on_settled()

    def start_load(self, transfer: BlockTransfer) -> None:
        """Copy blocks in up to the first that the store lacks."""
        num_ok = 0
        for block_id, key in zip(transfer.block_ids, transfer.block_hashes, strict=True):
            if key not in self.store:
                break
            self._kv_cache[block_id].copy_(self.store[key])
            num_ok += 1
        self._settle(transfer, num_ok)

    def start_save(self, transfer: BlockTransfer) -> None:
        """Copy blocks out."""
        for block_id, key in zip(transfer.block_ids, transfer.block_hashes, strict=True):
            self.store[key] = self._kv_cache[block_id].cpu().clone()
        self._settle(transfer, len(transfer.block_ids))

    def cancel(self, job_id: int) -> None:
        """Nothing to do: every job has settled."""

    def poll(self) -> list[TransferResult]:
        """Jobs settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        """Nothing to release."""

    def _settle(self, transfer: BlockTransfer, num_ok: int) -> None:
        error = "" if num_ok == len(transfer.block_hashes) else "block_missing"
        self._settled.append(TransferResult(transfer.job_id, num_ok, error))
        self._on_settled()


class _OpenCache(NamedTuple):
    """A KV cache that can be written to."""

    kv_cache: torch.Tensor
    layout: KVLayout


class DirectMemoryConnector:
    """A direct WorkerConnector between executors of one process, on whatever threads.

    Every job settles within its start call. A save to an executor that has closed fails; so does a load of blocks that
    do not match their digests.
    """

    _open: ClassVar[dict[bytes, _OpenCache]] = {}  # all there are, by address
    _serial: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self) -> None:
        self._address = b"memory-%d" % next(self._serial)
        self._kv_cache: torch.Tensor = torch.empty(0)
        self._layout = KVLayout(1, ())
        self._rank = 0
        self._on_settled: Callable[[], None] = lambda: None
        self._settled: list[TransferResult] = []

    def register_kv_cache(
        self,
        kv_cache: torch.Tensor,
        fingerprint: bytes,
        layout: KVLayout,
        on_settled: Callable[[], None],
        fences: Fences = NO_FENCES,
        rank: int = 0,
    ) -> ConnectorFacts:
        """See WorkerConnector. Pods compare fingerprints and layouts before they exchange addresses."""
        self._kv_cache = kv_cache
        self._layout, self._rank = layout, rank
        self._on_settled = on_settled
        self._open[self._address] = _OpenCache(kv_cache, layout)
        return ConnectorFacts(is_direct=True, address=encode_address(self._address))

    def split(self) -> SplitConnector:
        """See WorkerConnector."""
        return SplitConnector(per_rank=self, per_engine=None)

    def start_load(self, transfer: BlockTransfer) -> None:
        """Compare blocks up to the first that differs."""
        num_ok = 0
        for block_id, digests in zip(transfer.block_ids, transfer.digests, strict=True):
            block = self._kv_cache[block_id]
            parts = digests_of_rank(digests, self._rank, block.shape[0], block.shape[2])
            if not parts or any(_digest(block, each.part) != each.digest for each in parts):
                break
            num_ok += 1
        self._settle(transfer.job_id, num_ok, "" if num_ok == len(transfer.block_ids) else "block_corrupt")

    def start_save(self, transfer: BlockTransfer) -> None:
        """Write blocks into the destination's KV caches."""
        destination = transfer.destination
        assert destination is not None, "a direct save has a destination"
        targets = [self._open.get(address) for address in decode_addresses(destination.address)]
        found = [target for target in targets if target is not None]
        if not found or len(found) < len(targets):
            self._settle(transfer.job_id, 0, "transfer")
            return
        parts = [part for part in map_layouts(self._layout, found[0].layout) if part.producer_rank == self._rank]
        for each in parts:
            target = _narrow(found[each.consumer_rank].kv_cache, each.target)
            target[list(destination.block_ids)] = _narrow(self._kv_cache, each.source)[list(transfer.block_ids)]
        digests = tuple(self._digests(self._kv_cache[block_id], parts) for block_id in transfer.block_ids)
        self._settle(transfer.job_id, len(digests), digests=digests)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """Nothing is kept."""
        self._settle(transfer.job_id, 0)

    def cancel(self, job_id: int) -> None:
        """Nothing to do: every job has settled."""

    def poll(self) -> list[TransferResult]:
        """Jobs settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        """Rejects further writes."""
        self._open.pop(self._address, None)

    def _digests(self, block: torch.Tensor, parts: Sequence[MappedPart]) -> bytes:
        return encode_digests(
            PartDigest(part.consumer_rank, *part.target, _digest(block, part.source)) for part in parts
        )

    def _settle(self, job_id: int, num_ok: int, error: str = "", digests: tuple[bytes, ...] = ()) -> None:
        self._settled.append(TransferResult(job_id, num_ok, error, digests))
        self._on_settled()


def _narrow(blocks: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of blocks [blocks, layers, 2, heads, block_size, 1]."""
    return blocks.narrow(1, part.layer, part.num_layers).narrow(3, part.head, part.num_heads)


def _digest(block: torch.Tensor, part: Part) -> bytes:
    return hashlib.blake2b(_narrow(block[None], part).numpy().tobytes(), digest_size=16).digest()


class FakeAdapter(NamedTuple):
    """See ReadAdapter."""

    facts: AdapterFacts
    absent: frozenset[str] = frozenset()


class FakeAdapters:
    """See Adapters. An adapter is a directory with adapter_model.safetensors, of any content, whose digest decides what
    it computes."""

    def __init__(self) -> None:
        self.installed: set[bytes] = set()

    def read(self, directory: str) -> FakeAdapter:
        """See Adapters."""
        try:
            content = Path(directory, "adapter_model.safetensors").read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{directory} has no adapter: {error.strerror}", param="lora_path") from error
        return FakeAdapter(AdapterFacts(digest=hashlib.sha256(content).digest(), rank=8, num_bytes=len(content)))

    def install(self, adapter: ReadAdapter) -> None:
        """See Adapters."""
        self.installed.add(adapter.facts.digest)

    def remove(self, digest: bytes) -> None:
        """See Adapters."""
        self.installed.remove(digest)


class FakeExecutor:
    """Executor of a model that does not exist. `vocab_size` is below 2**24. Sampling parameters other than
    `temperature`, `seed` and `num_logprobs` are ignored. `step_s` is slept at each step that computes. Several ranks
    get steps and transfers encoded; `connectors_of_others`: of all ranks but the first, unless `connector` is a store
    or a DirectMemoryConnector. Executors of one `num_kv_heads` (default: one for each rank) hand over to each other,
    whatever their ranks. `layers_by_stage`: of `num_layers`; each stage has `num_ranks`. `drafts`: steps verify what a
    FakeProposer proposes; not for executors that run ahead."""

    def __init__(
        self,
        *,
        block_size: int | None = None,
        available_blocks: int = 256,
        vocab_size: int = 512,
        max_model_len: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        connector: WorkerConnector | None = None,
        connectors_of_others: Sequence[WorkerConnector] = (),
        step_s: float = 0.0,
        runs_ahead: bool = False,
        groups: Sequence[KVGroupSpec] = ONE_GROUP,
        position_dims: int = 1,
        num_ranks: int = 1,
        num_kv_heads: int | None = None,
        num_layers: int = 1,
        layers_by_stage: tuple[int, ...] = (),
        drafts: Accuracy | None = None,
        pooling: PoolingFacts = FAKE_POOLING,
    ) -> None:
        num_kv_heads, block_size = num_kv_heads or num_ranks, block_size or DEFAULT_BLOCK_SIZE
        groups = tuple(
            replace(each, num_kv_heads=num_kv_heads, layers=tuple(range(first, first + num_layers)))
            for first, each in zip(itertools.count(0, num_layers), groups, strict=False)
        )
        layout = KVLayout(block_size, groups, num_ranks, layers_by_stage)
        of_rank = max(layers_by_stage, default=num_layers) * max(1, num_kv_heads // num_ranks)
        bytes_per_block = 2 * of_rank * block_size * 4
        self._facts = ModelFacts(
            fingerprint=FAKE_FINGERPRINT,
            layout=layout,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            bytes_per_block=bytes_per_block,
            available_kv_bytes=available_blocks * bytes_per_block,
            device="cpu",
            dtype="float32",
            position_dims=position_dims,
            pooling=pooling,
        )
        self._staged: StagedStore | None = None
        self._connectors: list[WorkerConnector] = [connector or MemoryConnector()]
        if layout.num_ranks > 1:
            self._split(self._connectors[0], connectors_of_others)
        self._workers: list[Worker] = [
            FakeWorker(self._facts, rank, each, self._proposer(drafts)) for rank, each in enumerate(self._connectors)
        ]
        if layout.num_ranks > 1:
            self._workers = [EncodedWorker(worker) for worker in self._workers]
        self.adapters = FakeAdapters()
        self._step_s = step_s
        self._phases = PhaseClock()
        self.runs_ahead = runs_ahead
        self.max_concurrent_batches = 1
        self.num_failed_recordings = 0  # for tests to set
        self.rank_figures: tuple[RankFigures, ...] = ()  # for tests to set
        self.steps: list[SchedulerOutput] = []  # for tests: the last steps, oldest first
        self.closed = False

    def _split(self, connector: WorkerConnector, of_others: Sequence[WorkerConnector]) -> None:
        """Gives each rank its part of the connector."""
        num_others = self._facts.layout.num_ranks - 1
        direct, whole = connector.split()
        of_ranks: list[WorkerConnector | None] = [direct, *(each.split().per_rank for each in of_others)]
        if not of_others:
            of_ranks += [None if direct is None else DirectMemoryConnector() for _ in range(num_others)]
        if whole is not None:
            self._staged = StagedStore(whole)
            self._connectors = [SlotConnector(self._staged.path, each) for each in of_ranks]
        else:
            self._connectors = [each for each in of_ranks if each is not None]

    def _proposer(self, drafts: Accuracy | None) -> Proposer | None:
        if drafts is None:
            return None
        vocab_size, groups = self._facts.vocab_size, self._facts.layout.groups

        def oracle(token_ids: Sequence[int], context: Context) -> int:
            return expected_tokens(token_ids, 1, vocab_size=vocab_size, sampling=context.sampling, groups=groups)[0]

        return FakeProposer(oracle, drafts, _NUM_DRAFTS, vocab_size)

    def share_phases(self, phases: PhaseClock) -> None:
        """See Executor."""
        self._phases = phases

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """See Executor. The workers fail in their calls only."""

    def load_model(self) -> ModelFacts:
        """The facts given to the constructor."""
        return self._facts

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates [num_blocks, layers, 2, heads, block_size, 1] on each rank."""
        for worker in self._workers:
            worker.initialize_kv_cache(num_blocks)

    def measure_steps(self) -> list[tuple[int, float]]:
        """Its steps take as long as the test says."""
        return []

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector:
        """Always there."""
        layout, staged = self._facts.layout, self._staged
        if staged is not None:
            staged.allocate(layout)
        ranks = join_ranks([worker.open_connector(FAKE_FINGERPRINT, layout, on_settled) for worker in self._workers])
        return ranks if staged is None else staged.open(ranks, FAKE_FINGERPRINT, layout, on_settled)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        """See Executor."""
        self._phases.enter(Phase.FORWARD)
        return FinishedStep(self.execute(step))

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. Raises RuntimeError if the ranks' answers differ."""
        self.steps = [*self.steps[-31:], step]
        if unknown := {new.adapter for new in step.new_requests} - self.adapters.installed - {b""}:
            raise RuntimeError(f"adapters {unknown} are not installed")
        if step.num_scheduled_tokens and self._step_s:
            time.sleep(self._step_s)
        sums = sum_of_ranks([worker.compute(step) for worker in self._workers])
        answer, *others = (worker.sample(sums) for worker in self._workers)
        if any(other != answer for other in others):
            raise RuntimeError(f"the ranks' answers differ: {answer} and {others}")
        return answer

    def check(self, known: KnownRequests) -> list[str]:
        """See Executor."""
        by_rank = enumerate(worker.check(known) for worker in self._workers)
        of_ranks = [f"rank {rank} of {len(self._workers)}: {line}" for rank, lines in by_rank for line in lines]
        return of_ranks if self._staged is None else of_ranks + self._staged.violations()

    def close(self) -> None:
        """Release the connectors."""
        for connector in self._connectors:
            connector.close()
        if self._staged is not None:
            self._staged.close()
        self.closed = True


def create_fake_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor that fits `config`."""
    return FakeExecutor(block_size=config.cache.block_size)


def create_fake_direct_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor with a direct connector to all others of this kind in this process."""
    return FakeExecutor(block_size=config.cache.block_size, connector=DirectMemoryConnector())


def create_fake_ranks_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor of two ranks, or as many as are set."""
    return FakeExecutor(block_size=config.cache.block_size, num_ranks=max(2, config.parallel.tensor_parallel_size))


def create_fake_groups_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor whose model has two KV groups, a full one and a window."""
    return FakeExecutor(block_size=config.cache.block_size, groups=TWO_GROUPS)
