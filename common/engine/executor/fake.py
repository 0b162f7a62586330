"""An executor without a model: deterministic pseudo-tokens, a real (tiny) KV cache, real transfers.

The "KV" of a token is its id and its position, written to the slot that the block table gives. The next token is a hash
of everything read back through the block table, so a block owned twice, a wrong slot, a lost load or a stale prefix
changes the output: `expected_tokens` returns what a correct engine generates.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from common.engine.config import EngineConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import FinishedStep, ModelRunnerOutput, NewRequest, Outcome, SchedulerOutput
from common.engine.kv_cache import KVGroups
from common.engine.kv_connector import (
    NO_FENCES,
    BlockTransfer,
    ConnectorFacts,
    Fences,
    OpenConnector,
    TransferResult,
    WorkerConnector,
)
from common.engine.phases import Phase, PhaseClock
from common.types import BlockHash, Logprobs, PromptPositions, RequestId, SampledToken, SamplingParams

FAKE_FINGERPRINT = b"fake".ljust(32, b"\0")

_FULL = KVGroupSpec(layers=(0,), num_kv_heads=1, head_dim=1, value_head_dim=1, dtype="float32")
_WINDOW = replace(_FULL, layers=(1,), kind="window", window=21)
ONE_GROUP = (_FULL,)
TWO_GROUPS = (_FULL, _WINDOW)

_MASK64 = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005  # odd, of Knuth's MMIX generator: its powers keep token order in the hash


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = 512,
    sampling: SamplingParams | None = None,
    groups: Sequence[KVGroupSpec] = ONE_GROUP,
    positions: PromptPositions | None = None,
) -> list[int]:
    """The `num_tokens` tokens that a correct engine over a FakeExecutor generates after the prompt."""
    sampling = sampling or SamplingParams(temperature=0.0)
    kinds = KVGroups(groups, 1).kinds
    tokens = np.array(prompt_token_ids, dtype=np.uint64)
    generated: list[int] = []
    for _ in range(num_tokens):
        seen = np.stack([tokens, _positions(positions, 0, len(tokens)).astype(np.uint64)])
        visible = [seen[:, kind.num_skipped_tokens(len(tokens) - 1) :] for kind in kinds]
        generated.append(_next_token(visible, sampling, vocab_size))
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
    ) -> ConnectorFacts:
        """See WorkerConnector. Nothing is compared: a store is shared by equal executors only."""
        self._kv_cache = kv_cache
        self._on_settled = on_settled
        return ConnectorFacts(keeps_blocks=self._is_tier, wants_offloads=self._is_tier)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """Count the leading blocks that the store has."""
        present = [block_hash in self.store for block_hash in transfer.block_hashes]
        num_leading = [*present, False].index(False)
        self._settled.append(TransferResult(transfer.job_id, num_leading, found=tuple(present)))
        self._on_settled()

    def start_load(self, transfer: BlockTransfer) -> None:
        """Copy blocks in up to the first that the store lacks."""
        num_ok = 0
        for index, block_hash in enumerate(transfer.block_hashes):
            if block_hash not in self.store:
                break
            self._kv_cache[transfer.block_ids[index]].copy_(self.store[block_hash])
            num_ok += 1
        self._settle(transfer, num_ok)

    def start_save(self, transfer: BlockTransfer) -> None:
        """Copy blocks out."""
        for block_id, block_hash in zip(transfer.block_ids, transfer.block_hashes, strict=True):
            self.store[block_hash] = self._kv_cache[block_id].cpu().clone()
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


class DirectMemoryConnector:
    """A direct WorkerConnector between executors of one process, on whatever threads.

    Every job settles within its start call. A save to an executor that has closed fails; so does a load of blocks that
    do not match their digests.
    """

    _kv_caches: ClassVar[dict[bytes, torch.Tensor]] = {}  # all that are open, by address
    _serial: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self) -> None:
        self._address = b"memory-%d" % next(self._serial)
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
    ) -> ConnectorFacts:
        """See WorkerConnector. Pods compare fingerprints and layouts before they exchange addresses."""
        self._kv_cache = kv_cache
        self._on_settled = on_settled
        self._kv_caches[self._address] = kv_cache
        return ConnectorFacts(is_direct=True, address=self._address)

    def start_load(self, transfer: BlockTransfer) -> None:
        """Compare blocks up to the first that differs."""
        num_ok = 0
        for block_id, digest in zip(transfer.block_ids, transfer.digests, strict=True):
            if _digest(self._kv_cache[block_id]) != digest:
                break
            num_ok += 1
        self._settle(transfer.job_id, num_ok, "" if num_ok == len(transfer.block_ids) else "block_corrupt")

    def start_save(self, transfer: BlockTransfer) -> None:
        """Write blocks into the destination's KV cache."""
        destination = transfer.destination
        assert destination is not None, "a direct save has a destination"
        target = self._kv_caches.get(destination.address)
        if target is None:
            self._settle(transfer.job_id, 0, "transfer")
            return
        for block_id, target_id in zip(transfer.block_ids, destination.block_ids, strict=True):
            target[target_id].copy_(self._kv_cache[block_id])
        digests = tuple(_digest(self._kv_cache[block_id]) for block_id in transfer.block_ids)
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
        self._kv_caches.pop(self._address, None)

    def _settle(self, job_id: int, num_ok: int, error: str = "", digests: tuple[bytes, ...] = ()) -> None:
        self._settled.append(TransferResult(job_id, num_ok, error, digests))
        self._on_settled()


def _digest(block: torch.Tensor) -> bytes:
    return hashlib.blake2b(block.numpy().tobytes(), digest_size=16).digest()


class FakeExecutor:
    """Executor of a model that does not exist. `vocab_size` is below 2**24. Sampling parameters other than
    `temperature`, `seed` and `num_logprobs` are ignored. `step_s` is slept at each step that computes."""

    def __init__(
        self,
        *,
        block_size: int = 16,
        available_blocks: int = 256,
        vocab_size: int = 512,
        max_model_len: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        connector: WorkerConnector | None = None,
        step_s: float = 0.0,
        runs_ahead: bool = False,
        groups: Sequence[KVGroupSpec] = ONE_GROUP,
        position_dims: int = 1,
    ) -> None:
        self._block_size = block_size
        self._groups = KVGroups(groups, block_size)
        bytes_per_block = 2 * block_size * 4
        self._facts = ModelFacts(
            fingerprint=FAKE_FINGERPRINT,
            layout=KVLayout(block_size, tuple(groups)),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            bytes_per_block=bytes_per_block,
            available_kv_bytes=available_blocks * bytes_per_block,
            device="cpu",
            dtype="float32",
            position_dims=position_dims,
        )
        self._connector: WorkerConnector = connector or MemoryConnector()
        self._step_s = step_s
        self._phases = PhaseClock()
        self.runs_ahead = runs_ahead
        self.num_failed_recordings = 0  # for tests to set
        self._requests: dict[RequestId, _FakeRequest] = {}
        self._slots: npt.NDArray[np.float32] = np.empty((0, 2, block_size), dtype=np.float32)
        self.steps: list[SchedulerOutput] = []  # for tests: the last steps, oldest first
        self.closed = False

    def share_phases(self, phases: PhaseClock) -> None:
        """See Executor."""
        self._phases = phases

    def load_model(self) -> ModelFacts:
        """The facts given to the constructor."""
        return self._facts

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates [num_blocks, 1, 2, 1, block_size, 1]."""
        self._kv_cache = torch.zeros(num_blocks, 1, 2, 1, self._block_size, 1)
        self._slots = self._kv_cache.view(num_blocks, 2, self._block_size).numpy()

    def measure_steps(self) -> list[tuple[int, float]]:
        """Its steps take as long as the test says."""
        return []

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector:
        """Always there."""
        return OpenConnector(
            self._connector,
            self._connector.register_kv_cache(self._kv_cache, FAKE_FINGERPRINT, self._facts.layout, on_settled),
        )

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        """See Executor."""
        self._phases.enter(Phase.FORWARD)
        return FinishedStep(self.execute(step))

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Write the scheduled tokens' "KV"; hash what can be read where a request reaches its last token."""
        self.steps = [*self.steps[-31:], step]
        self._update_requests(step)
        if step.num_scheduled_tokens and self._step_s:
            time.sleep(self._step_s)
        outcomes: dict[RequestId, Outcome] = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            token = self._compute(self._requests[request_id], num_tokens)
            if token is not None:
                outcomes[request_id] = [token]
        return ModelRunnerOutput(outcomes)

    def close(self) -> None:
        """Release the connector."""
        self._connector.close()
        self.closed = True

    def _update_requests(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self._requests.pop(request_id, None)
        for new in step.new_requests:
            self._requests[new.request_id] = _FakeRequest.from_new(new)
        for request_id, block_ids in step.new_block_ids.items():
            for table, added in zip(self._requests[request_id].block_tables, block_ids, strict=True):
                table += added

    def _compute(self, request: _FakeRequest, num_tokens: int) -> SampledToken | None:
        start = request.num_computed_tokens
        end = start + num_tokens
        if end > len(request.token_ids):
            raise ValueError(f"{num_tokens} tokens scheduled at {start} of {len(request.token_ids)}")
        for table in map(np.array, request.block_tables):
            if end > len(table) * self._block_size:
                raise ValueError(f"{end} tokens do not fit {len(table)} blocks")
            places = np.arange(start, end)
            blocks, offsets = table[places // self._block_size], places % self._block_size
            self._slots[blocks, 0, offsets] = request.token_ids[start:end]
            self._slots[blocks, 1, offsets] = _positions(request.positions, start, end, self._facts.position_dims)
        request.num_computed_tokens = end
        if end < len(request.token_ids):
            return None
        visible = [
            self._read(np.array(table), kind.num_skipped_tokens(end - 1), end)
            for table, kind in zip(request.block_tables, self._groups.kinds, strict=True)
        ]
        token_id = _next_token(visible, request.sampling, self._facts.vocab_size)
        request.token_ids.append(token_id)
        num_logprobs = request.sampling.num_logprobs
        logprobs = None if num_logprobs is None else Logprobs(0.0, [(token_id, 0.0)][:num_logprobs])
        return SampledToken(token_id, logprobs)

    def _read(self, table: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.uint64]:
        """What is in the slots of tokens [start, end): their ids, and their positions."""
        first = start // self._block_size
        blocks = table[first : -(-end // self._block_size)]
        seen = self._slots[blocks].transpose(1, 0, 2).reshape(2, -1)
        return seen[:, start - first * self._block_size : end - first * self._block_size].astype(np.uint64)


def create_fake_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor that fits `config`."""
    return FakeExecutor(block_size=config.cache.block_size)


def create_fake_direct_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor with a direct connector to all others of this kind in this process."""
    return FakeExecutor(block_size=config.cache.block_size, connector=DirectMemoryConnector())


def create_fake_groups_executor(config: EngineConfig) -> FakeExecutor:
    """ExecutorFactory of a FakeExecutor whose model has two KV groups, a full one and a window."""
    return FakeExecutor(block_size=config.cache.block_size, groups=TWO_GROUPS)


@dataclass(slots=True)
class _FakeRequest:
    token_ids: list[int]
    sampling: SamplingParams
    block_tables: list[list[int]]
    num_computed_tokens: int
    positions: PromptPositions | None

    @classmethod
    def from_new(cls, new: NewRequest) -> _FakeRequest:
        block_tables = [list(ids) for ids in new.block_ids]
        return cls(list(new.token_ids), new.sampling, block_tables, new.num_computed_tokens, new.positions)


def _positions(
    positions: PromptPositions | None, start: int, end: int, num_dimensions: int = 1
) -> npt.NDArray[np.int64]:
    """Positions of tokens [start, end), each as one number: in one dimension the position itself."""
    if positions is None:
        numbers: npt.NDArray[np.int64] = np.arange(start, end) * sum(31**each for each in range(num_dimensions))
    else:
        values = np.array(positions.of_tokens(start, end))
        numbers = 31 ** np.arange(len(values)) @ values
    return numbers


def _next_token(visible: Sequence[npt.NDArray[np.uint64]], sampling: SamplingParams, vocab_size: int) -> int:
    """Polynomial hash of the tokens and positions of each group modulo 2**64, mixed with the seed unless greedy."""
    digest = 0
    for token_ids, positions in visible:
        powers = np.cumprod(np.full(len(token_ids), _MULTIPLIER, dtype=np.uint64))
        own = int(((token_ids + np.uint64(1)) * powers + positions * positions).sum(dtype=np.uint64))
        digest = (digest * _MULTIPLIER + own) & _MASK64
    if not sampling.greedy:
        digest ^= (sampling.settled_seed * _MULTIPLIER + 1) & _MASK64
    digest ^= digest >> 33
    digest = (digest * 0xFF51AFD7ED558CCD) & _MASK64  # finaliser of MurmurHash3, A. Appleby
    digest ^= digest >> 33
    return digest % vocab_size
