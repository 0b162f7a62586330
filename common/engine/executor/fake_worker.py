"""The workers of a FakeExecutor.

The "KV" of a token is its id and its position. Of both, each KV head of each layer holds its share: they add up.
So do the ranks' sums over what a request reads, from which its next token follows: no rank knows it alone.

The state of a text is a weighted sum of its token ids, and its length.

A request with an adapter has other numbers in the place of its token ids (`adapted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.integrity import KnownRequests
from common.engine.contract.layout import KVLayout
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import ModelRunnerOutput, NewRequest, Outcome, SchedulerOutput, accepted
from common.engine.kv_cache import KVGroups
from common.engine.kv_connector import BlockTransfer, Connector, OpenConnector, TransferResult, WorkerConnector
from common.engine.speculation.base import Context, Proposer
from common.engine.speculation.guard import NOTHING, GuardedProposer, Proposed
from common.types import Logprobs, PoolingParams, PromptPositions, RequestId, SampledToken, SamplingParams

# Modulo 2**64, of the requests whose last token was computed: over what is read after it, and after each draft.
Sums = dict[RequestId, list[int]]

_T = TypeVar("_T")
_MASK64 = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005  # odd, of Knuth's MMIX generator: its powers keep token order in the sum


class Worker(Protocol):
    """One rank. Called in this order: `initialize_kv_cache`, `open_connector`, then both others for each step."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates [num_blocks, layers, 2, heads, block_size, 1]."""

    def open_connector(self, fingerprint: bytes, layout: KVLayout, on_settled: Callable[[], None]) -> OpenConnector:
        """See Executor."""

    def compute(self, step: SchedulerOutput) -> Sums:
        """Writes the "KV" of the scheduled tokens; sums what can be read where a request reaches its last token."""

    def sample(self, sums: Sums) -> ModelRunnerOutput:
        """Takes the sums over all ranks, and goes back to what holds of drafts; the same on each of them."""

    def check(self, known: KnownRequests) -> list[str]:
        """See Executor."""


class FakeWorker:
    """See Worker."""

    def __init__(
        self, facts: ModelFacts, rank: int, connector: WorkerConnector, proposer: Proposer | None = None
    ) -> None:
        self._facts = facts
        self._rank = rank
        self._block_size = facts.layout.block_size
        self._groups = KVGroups(facts.layout.groups, self._block_size)
        self._connector = connector
        self._proposer = None if proposer is None else GuardedProposer(proposer, facts.vocab_size, math.inf)
        self._drafts: dict[RequestId, list[int]] = {}  # of the step
        self._requests: dict[RequestId, _FakeRequest] = {}
        layout = facts.layout
        shards = layout.shards
        layers, heads = np.array(shards[rank].layers), np.array(shards[rank].heads)
        self._places = layers[:, None] * layout.num_kv_heads + heads  # [layers, heads], of all
        self._num_places = layout.num_layers * layout.num_kv_heads
        self._adds = shards.index(shards[rank]) == rank  # of ranks with the same head, the first counts
        self._slots: npt.NDArray[np.float32] = np.empty((0, 0, 2, 0, self._block_size), dtype=np.float32)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See Worker."""
        num_layers, num_heads = self._places.shape
        self._kv_cache = torch.zeros(num_blocks, num_layers, 2, num_heads, self._block_size, 1)
        self._slots = self._kv_cache.squeeze(-1).numpy()

    def open_connector(self, fingerprint: bytes, layout: KVLayout, on_settled: Callable[[], None]) -> OpenConnector:
        """See Worker."""
        facts = self._connector.register_kv_cache(self._kv_cache, fingerprint, layout, on_settled, rank=self._rank)
        return OpenConnector(self._connector, facts)

    def compute(self, step: SchedulerOutput) -> Sums:
        """See Worker."""
        self._update_requests(step)
        self._drafts = step.drafts
        for request_id, drafts in step.drafts.items():
            self._requests[request_id].token_ids += drafts
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._write(self._requests[request_id], num_tokens)
        computed = [(each, self._requests[each]) for each in step.num_scheduled_tokens]
        return {each: self._sums(each, request) for each, request in computed if request.is_computed}

    def sample(self, sums: Sums) -> ModelRunnerOutput:
        """See Worker."""
        outcomes: dict[RequestId, Outcome] = {}
        pooled: dict[RequestId, bytes] = {}
        for request_id, totals in sums.items():
            if (params := self._requests[request_id].pooling) is not None:
                num_tokens = len(self._requests[request_id].token_ids)
                pooled[request_id] = numbers_of(totals[-1], self._facts.pooling.num_numbers(params, num_tokens))
                continue
            request, drafts = self._requests[request_id], self._drafts.get(request_id, [])
            tokens = accepted(drafts, [self._token_of(total, request.sampling) for total in totals])
            assert isinstance(tokens, list)
            outcomes[request_id] = tokens
            request.token_ids[len(request.token_ids) - len(drafts) :] = [token.token_id for token in tokens]
            request.num_computed_tokens = len(request.token_ids) - 1
        proposed = self._propose(list(outcomes))
        return ModelRunnerOutput(outcomes, pooled=pooled, drafts=proposed.drafts, proposer_failure=proposed.failure)

    def check(self, known: KnownRequests) -> list[str]:
        """See Worker."""
        return known.violations({each: request.block_tables for each, request in self._requests.items()})

    def _token_of(self, total: int, sampling: SamplingParams) -> SampledToken:
        token_id = token_of(total, sampling, self._facts.vocab_size)
        num_logprobs = sampling.num_logprobs
        return SampledToken(token_id, None if num_logprobs is None else Logprobs(0.0, [(token_id, 0.0)][:num_logprobs]))

    def _propose(self, request_ids: list[RequestId]) -> Proposed:
        if self._proposer is None:
            return NOTHING
        requests = [(each, self._requests[each]) for each in request_ids]
        contexts = [Context(each, np.array(request.token_ids), request.sampling) for each, request in requests]
        return self._proposer.propose(contexts)

    def _update_requests(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self._requests.pop(request_id, None)
        for new in step.new_requests:
            self._requests[new.request_id] = _FakeRequest.from_new(new)
        for request_id, block_ids in step.new_block_ids.items():
            for table, added in zip(self._requests[request_id].block_tables, block_ids, strict=True):
                table += added

    def _write(self, request: _FakeRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        end = start + num_tokens
        if end > len(request.token_ids):
            raise ValueError(f"{num_tokens} tokens scheduled at {start} of {len(request.token_ids)}")
        places = np.arange(start, end)
        token_ids = self._shares(np.array(request.token_ids[start:end]) + adapted(request.adapter))
        positions = self._shares(position_numbers(request.positions, start, end, self._facts.position_dims))
        for group, table in enumerate(map(np.array, request.block_tables)):
            if end > len(table) * self._block_size:
                raise ValueError(f"{end} tokens do not fit {len(table)} blocks")
            if self._groups.kinds[group].is_state:
                self._write_states(request, group, start, end)
                continue
            blocks, offsets = table[places // self._block_size], places % self._block_size
            self._slots[blocks, :, 0, :, offsets] = token_ids
            self._slots[blocks, :, 1, :, offsets] = positions
        request.num_computed_tokens = end

    def _write_states(self, request: _FakeRequest, group: int, start: int, end: int) -> None:
        """Computes the states after each of tokens [start, end); those at the end of a block or of the prompt go to
        the block, if there is one."""
        before, table = request.states.get(group, {}), request.block_tables[group]
        state = before.get(start)
        if state is None and start:
            block = table[(start - 1) // self._block_size]
            if not block:
                raise ValueError(f"no state after {start} tokens")
            state = self._slots[block, :, :, :, 0].swapaxes(0, 1).astype(np.int64)  # [2, layers, heads]
        elif state is None:
            state = np.zeros((2, *self._places.shape), dtype=np.int64)
        states = {start: state}
        for place in range(start, end):
            token_id = request.token_ids[place] + adapted(request.adapter)
            added = np.array([token_id * weight_of(place), place + 1])
            sums, lengths = self._shares(added)
            state = np.stack([state[0] + sums, lengths])
            states[place + 1] = state
            span, length, leaving = place // self._block_size, place + 1, request.num_leaving_tokens
            block, is_handed_over = table[span], leaving > 0 and (leaving - 1) // self._block_size == span
            if block and (length == leaving if is_handed_over else length % self._block_size == 0):
                self._slots[block, :, :, :, 0] = state.swapaxes(0, 1)
        request.states[group] = states

    def _shares(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[tokens, layers, heads]"""
        shares: npt.NDArray[np.int64] = (values[:, None, None] + self._places) // self._num_places
        return shares

    def _sums(self, request_id: RequestId, request: _FakeRequest) -> list[int]:
        end = request.num_computed_tokens
        num_drafts = len(self._drafts.get(request_id, ()))
        return [self._sum(request, each) for each in range(end - num_drafts, end + 1)]

    def _sum(self, request: _FakeRequest, end: int) -> int:
        return sum_over(
            [
                self._state(request.states[group][end])
                if kind.is_state
                else self._read(np.array(table), kind.num_skipped_tokens(end - 1), end)
                for group, (table, kind) in enumerate(zip(request.block_tables, self._groups.kinds, strict=True))
            ]
        )

    def _state(self, shares: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The rank's share of a state [2, 1]."""
        found: npt.NDArray[np.uint64] = (shares.sum(axis=(1, 2)) * self._adds).astype(np.uint64)[:, None]
        return found

    def _read(self, table: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.uint64]:
        """Reads the slots of tokens [start, end): the rank's share of their ids, and of their positions."""
        first = start // self._block_size
        blocks = table[first : -(-end // self._block_size)]
        shares = self._slots[blocks].sum(axis=(1, 3)) * self._adds  # [blocks, 2, block_size]
        seen = shares.transpose(1, 0, 2).reshape(2, -1)
        read: npt.NDArray[np.uint64] = seen.astype(np.uint64)
        return read[:, start - first * self._block_size : end - first * self._block_size]


@dataclass(slots=True)
class _FakeRequest:
    token_ids: list[int]
    sampling: SamplingParams
    block_tables: list[list[int]]
    num_computed_tokens: int
    positions: PromptPositions | None
    num_leaving_tokens: int  # 0: it is not a producer
    adapter: bytes
    pooling: PoolingParams | None
    # Of each group of states, by the number of tokens before: the rank's shares [2, layers, heads].
    states: dict[int, dict[int, npt.NDArray[np.int64]]] = field(default_factory=dict)

    @classmethod
    def from_new(cls, new: NewRequest) -> _FakeRequest:
        block_tables, num_leaving_tokens = [list(ids) for ids in new.block_ids], new.num_prompt_tokens * new.is_producer
        token_ids, num_computed_tokens = list(new.token_ids), new.num_computed_tokens
        return cls(
            token_ids,
            new.sampling,
            block_tables,
            num_computed_tokens,
            new.positions,
            num_leaving_tokens,
            new.adapter,
            new.pooling,
        )

    @property
    def is_computed(self) -> bool:
        return self.num_computed_tokens == len(self.token_ids)


class EncodedWorker:
    """See Worker. One as in another process: whatever goes there and comes back is encoded on the way."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See Worker."""
        self._worker.initialize_kv_cache(num_blocks)

    def open_connector(self, fingerprint: bytes, layout: KVLayout, on_settled: Callable[[], None]) -> OpenConnector:
        """See Worker."""
        connector, facts = self._worker.open_connector(fingerprint, _sent(layout), on_settled)
        return OpenConnector(EncodedConnector(connector), _sent(facts))

    def compute(self, step: SchedulerOutput) -> Sums:
        """See Worker."""
        return _sent(self._worker.compute(_sent(step)), Sums)

    def sample(self, sums: Sums) -> ModelRunnerOutput:
        """See Worker."""
        return _sent(self._worker.sample(_sent(sums, Sums)))

    def check(self, known: KnownRequests) -> list[str]:
        """See Worker."""
        return self._worker.check(_sent(known))


class EncodedConnector:
    """See Connector. That of an EncodedWorker."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def start_load(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        self._connector.start_load(_sent(transfer))

    def start_save(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        self._connector.start_save(_sent(transfer))

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        self._connector.start_lookup(_sent(transfer))

    def cancel(self, job_id: int) -> None:
        """See Connector."""
        self._connector.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        """See Connector."""
        return [_sent(result) for result in self._connector.poll()]


def _sent(message: _T, message_type: type[_T] | None = None) -> _T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=message_type or type(message))


def adapted(adapter: bytes) -> int:
    """Returns the number that is added to each token id of requests with this adapter, by its digest."""
    return 1 + int.from_bytes(adapter[:4]) % 9973 if adapter else 0


def weight_of(place: int) -> int:
    """The weight of a token in a state."""
    return place % 7 + 1


def position_numbers(
    positions: PromptPositions | None, start: int, end: int, num_dimensions: int = 1
) -> npt.NDArray[np.int64]:
    """Positions of tokens [start, end), each as one number: in one dimension the position itself."""
    if positions is None:
        numbers: npt.NDArray[np.int64] = np.arange(start, end) * sum(31**each for each in range(num_dimensions))
    else:
        values = np.array(positions.of_tokens(start, end))
        numbers = 31 ** np.arange(len(values)) @ values
    return numbers


def sum_over(groups: Sequence[npt.NDArray[np.uint64]]) -> int:
    """A sum, modulo 2**64, over what a request reads in each KV group: [2, tokens], ids and positions."""
    total = 0
    for token_ids, positions in groups:
        powers = np.cumprod(np.full(len(token_ids), _MULTIPLIER, dtype=np.uint64))
        own = int((token_ids * powers + positions * powers[::-1]).sum(dtype=np.uint64))
        total = (total * _MULTIPLIER + own) & _MASK64
    return total


def sum_of_ranks(sums: Sequence[Mapping[RequestId, list[int]]]) -> Sums:
    """The sums over all ranks."""
    return {
        request_id: [sum(parts) & _MASK64 for parts in zip(*(each[request_id] for each in sums), strict=True)]
        for request_id in sums[0]
    }


def numbers_of(total: int, num_numbers: int) -> bytes:
    """The numbers of a prompt that follow from a sum over all ranks."""
    parts = [total >> (8 * (number % 8)) & 255 for number in range(num_numbers)]
    return np.array(parts, dtype="<f4").tobytes()


def token_of(total: int, sampling: SamplingParams, vocab_size: int) -> int:
    """The token that follows from a sum over all ranks, mixed with the seed unless greedy."""
    if not sampling.greedy:
        total ^= (sampling.settled_seed * _MULTIPLIER + 1) & _MASK64
    total ^= total >> 33
    total = (total * 0xFF51AFD7ED558CCD) & _MASK64  # finaliser of MurmurHash3, A. Appleby
    total ^= total >> 33
    return total % vocab_size
