"""One request as the scheduler sees it.

0. WAITING_FOR_GRAMMAR, those with a constraint that was not compiled lately: it is in no queue until its grammar is.
   WAITING_FOR_ADAPTER, while requests of other adapters have all places: likewise.
1. LOOKING_UP, with tiers below the device only: its blocks are looked up there before it waits.
2. WAITING: for blocks and a slot in the batch.
3. WAITING_FOR_REMOTE_KV, consumers and those that tiers keep: it holds blocks and its KV is in flight. When that has
   ended, successfully or not, it is WAITING for a slot only and keeps its blocks; unless a handoff failed and the
   producer may still write to them: then it waits for others, back in 1 as an ordinary request.
4. RUNNING: it gets tokens at each step.
5. PREEMPTED: it lost its blocks and waits for its turn again, as in 2; with tiers it goes back to 1.
6. FINISHED: from any state. One that pools has finished when its prompt is computed.
"""

from __future__ import annotations

import enum
import math

from common.engine.contract.masks import RequestGrammar
from common.engine.messages import AddRequest
from common.engine.scheduler.draft_depth import Acceptance
from common.types import BlockHash, FinishReason, SampledToken, hash_partial_block, hash_prompt, root_hash


class RequestStatus(enum.Enum):
    """The state of a request."""

    WAITING_FOR_GRAMMAR = enum.auto()  # no blocks; its grammar is being compiled
    WAITING_FOR_ADAPTER = enum.auto()  # no blocks; as many adapters as may be are in use
    LOOKING_UP = enum.auto()  # no blocks; waits for the lookup of its blocks
    WAITING = enum.auto()  # for its turn
    WAITING_FOR_REMOTE_KV = enum.auto()  # blocks reserved, KV in flight
    RUNNING = enum.auto()  # in the batch
    PREEMPTED = enum.auto()  # lost its blocks; waits for its next turn
    FINISHED = enum.auto()  # see `finish_reason`


class Request:
    """A live generation. Tokens are appended here; block tables belong to the KVCacheManager."""

    __slots__ = (
        "acceptance",
        "adapter",
        "added_at",
        "awaits_handoff",
        "awaits_mask",
        "block_hashes",
        "extra_keys",
        "finish_reason",
        "grammar",
        "is_in_batch",
        "is_producer",
        "is_simple",
        "is_started",
        "max_num_tokens",
        "num_computed_tokens",
        "num_kept_blocks",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_restored_tokens",
        "num_scheduled_tokens",
        "order",
        "pooling",
        "pools_every_token",
        "positions",
        "request_id",
        "root",
        "sampling",
        "status",
        "stop_token_ids",
        "target_itl_s",
        "tenant",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        message: AddRequest,
        *,
        added_at: float,
        max_model_len: int,
        eos: frozenset[int],
        pools_every_token: bool = False,
    ) -> None:
        """`message` was validated. `pools_every_token`: see PoolingFacts. Its owner sets the order."""
        sampling = message.sampling
        self.request_id = message.request_id
        self.sampling = sampling
        self.pooling = message.pooling  # None: it generates
        self.pools_every_token = pools_every_token
        self.token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        stops = frozenset() if sampling.ignore_eos else eos
        self.stop_token_ids = stops.union(sampling.stop_token_ids)

        self.added_at = added_at
        self.order: tuple[int, float, int] = (0, added_at, 0)  # the lowest is scheduled first and preempted last
        self.target_itl_s = message.target_itl_s or math.inf  # its target for the seconds between tokens
        self.tenant = message.tenant
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.grammar: RequestGrammar | None = None  # for its constraint, if it has one
        # See SamplingParams.is_simple. What is pooled samples no token after which another could follow.
        self.is_simple = sampling.is_simple and sampling.structured_outputs is None and message.pooling is None
        self.is_started = False  # RequestStarted was sent
        self.is_in_batch = False  # the model runner knows it
        self.awaits_mask = False  # its grammar's mask is late: no step computes anything for it
        self.acceptance: Acceptance | None = None  # of its drafts, once some were proposed
        self.num_computed_tokens = 0  # whose KV is in its blocks
        self.num_scheduled_tokens = 0  # those, and the tokens that steps in flight compute

        self.adapter = message.adapter  # digest; empty: none
        self.root = root_hash(message.cache_salt, message.adapter)
        self.extra_keys = message.extra_keys
        self.positions = message.positions
        self.block_hashes: list[BlockHash] = []  # of full blocks, as far as known

        role = message.transfer.role if message.transfer is not None else None
        self.is_producer = role == "producer"  # ends after its first token
        self.awaits_handoff = role == "consumer"  # its KV comes from a producer; until that is over
        self.num_kept_blocks = 0  # leading blocks that are kept below or were found here when it asked; 0: none below
        self.num_restored_tokens = 0  # by the last restore
        # Until they are all reported, here or by the producer of its KV.
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and self.num_prompt_tokens > 1
        self.num_prompt_logprobs = 0  # reported

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, here or before."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not here; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Known tokens that no step has computed or is computing; 1 when it is to decode. Less than none while a step
        in flight verifies drafts."""
        return len(self.token_ids) - self.num_scheduled_tokens

    def has_computed(self, num_tokens: int) -> None:
        """The KV of so many leading tokens is in its blocks; nothing is in flight."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens

    @property
    def num_arriving_tokens(self) -> int:
        """Leading tokens whose KV comes from a producer; until the handoff is over."""
        return self.num_prompt_tokens if self.awaits_handoff else 0

    @property
    def num_leaving_tokens(self) -> int | None:
        """Leading tokens whose KV goes to a consumer, if it is a producer."""
        return self.num_prompt_tokens if self.is_producer else None

    @property
    def reads_cache(self) -> bool:
        """False if it must compute its whole prompt, for what it reports of the prompt's tokens."""
        return not (self.wants_prompt_logprobs or self.pools_every_token) or self.awaits_handoff

    @property
    def is_finished(self) -> bool:
        """True once a finish reason was given."""
        return self.status is RequestStatus.FINISHED

    def append(self, token: SampledToken) -> FinishReason | None:
        """Add an output token. The reason if the generation ends with it."""
        token_id, token_ids = token.token_id, self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if len(token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def complete_block_hashes(self, block_size: int, num_blocks: int) -> None:
        """Computes the missing hashes of the first `num_blocks` blocks, all of which must be full."""
        known = len(self.block_hashes)
        if known < num_blocks:
            parent = self.block_hashes[-1] if known else self.root
            tokens = self.token_ids[known * block_size : num_blocks * block_size]
            self.block_hashes += hash_prompt(
                tokens, block_size, parent, self.extra_keys, known * block_size, self.positions
            )

    def full_block_hashes(self, block_size: int, start: int, stop: int) -> tuple[BlockHash, ...]:
        """Hashes of blocks [start, stop) of prompt and output, all of which must be full."""
        self.complete_block_hashes(block_size, stop)
        return tuple(self.block_hashes[start:stop])

    def prompt_block_hashes(self, block_size: int, start: int, stop: int) -> tuple[BlockHash, ...]:
        """Hashes of prompt blocks [start, stop); the last block of the prompt may be partial."""
        num_full = self.num_prompt_tokens // block_size
        self.complete_block_hashes(block_size, min(stop, num_full))
        hashes = self.block_hashes[start : min(stop, num_full)]
        if stop > num_full:
            prompt = self.token_ids[: self.num_prompt_tokens]
            full = self.block_hashes[:num_full]
            keys = self.extra_keys, self.positions
            hashes.append(hash_partial_block(prompt, block_size, full, self.root, *keys))
        return tuple(hashes)
