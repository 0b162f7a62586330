"""The engine core: one scheduler, one executor, and the step that joins them.

1. `EngineCore(...)` loads the model, sizes the KV cache, resolves what was "auto" and builds the scheduler.
2. Commands (`add_request`, `abort_requests`, `update_transfer`, `set_transfer_target`) change what the next step will
   do.
3. `step()` schedules, executes and updates, while `has_work`.
4. `close()` releases the executor.

All of it runs on one thread, that of the client or loop that owns the core. An exception out of `step` is fatal: the
scheduler and the workers no longer agree, so the owner must not step again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from common.engine.config import CacheConfig, EngineConfig
from common.engine.executor.base import Executor, ModelFacts
from common.engine.messages import (
    AddRequest,
    Call,
    CallResult,
    EngineCoreOutputs,
    EngineSpec,
    EngineStats,
    IntegrityReport,
    RequestOutput,
    TransferTarget,
    TransferUpdate,
)
from common.engine.scheduler.scheduler import Scheduler
from common.errors import BatonError, ConfigError
from common.types import FinishReason, RequestId

logger = logging.getLogger(__name__)


def _ignore() -> None:
    """Nobody needs to be woken."""


class EngineCore:
    """Owns one executor and one scheduler. Not thread-safe but for the connector's wake-up.

    Raises ConfigError, ModelLoadError included, from its constructor if the settings do not fit the model; the
    executor is closed then. `on_wakeup` is called from any thread when an idle core has work again. `on_urgent_news`
    gets, within a step, what should not wait for its end; without it everything does.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        on_wakeup: Callable[[], None] = _ignore,
        on_urgent_news: Callable[[EngineCoreOutputs], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._on_wakeup = on_wakeup
        self._on_urgent_news = on_urgent_news
        self._transfers_settled = False  # the connector has results that no step has collected
        self._unsent: list[RequestOutput] = []  # said between steps; go out with the next one
        self._last_step_s = 0.0
        try:
            facts = executor.load_model()
            self.spec = _resolve_spec(config, facts)
            connector = executor.initialize_kv_cache(self.spec.num_blocks, self._note_settled_transfers)
            self.spec = msgspec.structs.replace(
                self.spec, is_direct=connector.is_direct, connector_address=connector.address
            )
            self._scheduler = Scheduler(
                config.scheduler,
                num_blocks=self.spec.num_blocks,
                block_size=self.spec.block_size,
                max_model_len=self.spec.max_model_len,
                vocab_size=self.spec.vocab_size,
                eos_token_ids=facts.eos_token_ids,
                enable_prefix_caching=config.cache.enable_prefix_caching,
                connector=connector,
            )
        except BaseException:
            executor.close()
            raise

    # -- what the next step will do ---------------------------------------------------------------------------------

    def add_request(self, request: AddRequest) -> None:
        """Start a generation. One that cannot be admitted ends with FinishReason.ERROR in the next step's outputs."""
        try:
            self._scheduler.add_request(request, self._clock())
        except BatonError as error:
            self._unsent.append(
                RequestOutput(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                    error_code=error.code.value.number,
                )
            )

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        """End generations; live ones answer with FinishReason.ABORT in the next step's outputs."""
        self._unsent += self._scheduler.abort_requests(list(request_ids))

    def update_transfer(self, update: TransferUpdate) -> None:
        """Take news of a consumer's handoff."""
        self._scheduler.update_transfer(update, self._clock())

    def set_transfer_target(self, target: TransferTarget) -> None:
        """Take where a producer is to write."""
        self._scheduler.set_transfer_target(target)

    # -- the step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if a step would do something now."""
        return (
            self._transfers_settled
            or bool(self._unsent)
            or self._scheduler.has_work
            or self._scheduler.has_cache_change  # was reset while idle: routers are to know
        )

    @property
    def has_unfinished(self) -> bool:
        """True while any request lives, any transfer is not settled, or an output is unsent."""
        return self.has_work or self._scheduler.has_unfinished

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. Any exception is fatal for this core."""
        started = self._clock()
        self._transfers_settled = False  # before executing: what settles from here on wakes us again
        step = self._scheduler.schedule(started)
        self._tell_urgent_news()
        result = self._executor.execute(step)
        finished = self._clock()
        outputs = self._take_unsent() + self._scheduler.update(step, result, finished)
        if step.total_num_scheduled_tokens:  # one that only moves blocks says nothing of the model's speed
            self._last_step_s = finished - started
        cache = self._scheduler.take_cache_change()
        return EngineCoreOutputs(outputs=outputs, stats=self.stats(), kv_stored=cache.stored, kv_removed=cache.removed)

    def _tell_urgent_news(self) -> None:
        if self._on_urgent_news is not None and (news := self._scheduler.take_urgent_news()):
            self._on_urgent_news(EngineCoreOutputs(outputs=self._take_unsent() + news, stats=self.stats()))

    def _take_unsent(self) -> list[RequestOutput]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _note_settled_transfers(self) -> None:
        """Called by the connector, from any thread."""
        if not self._transfers_settled:
            self._transfers_settled = True
            self._on_wakeup()

    # -- questions --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Current figures."""
        return msgspec.structs.replace(self._scheduler.stats(), last_step_s=self._last_step_s)

    def check_integrity(self) -> IntegrityReport:
        """State the engine's invariants."""
        return self._scheduler.check_integrity()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no request owns."""
        self._scheduler.reset_prefix_cache()

    def call(self, call: Call) -> CallResult:
        """Answer a client's question."""
        result: EngineSpec | EngineStats | IntegrityReport | None = None
        match call.method:
            case "engine_spec":
                result = self.spec
            case "stats":
                result = self.stats()
            case "check_integrity":
                result = self.check_integrity()
            case "reset_prefix_cache":
                self.reset_prefix_cache()
        return CallResult(call_id=call.call_id, result=result)

    def close(self) -> None:
        """Release the executor. Idempotent."""
        self._executor.close()


def _resolve_spec(config: EngineConfig, facts: ModelFacts) -> EngineSpec:
    """Settle everything that was left open. Raises ConfigError naming the settings that do not fit."""
    num_blocks = _resolve_num_blocks(config.cache, facts)
    return EngineSpec(
        fingerprint=facts.fingerprint,
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        max_model_len=_resolve_max_model_len(config, facts, num_blocks),
        vocab_size=facts.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        device=facts.device,
        dtype=facts.dtype,
        bytes_per_block=facts.bytes_per_block,
    )


def _resolve_num_blocks(cache: CacheConfig, facts: ModelFacts) -> int:
    """Blocks of the KV tensor, the null block included."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    memory = facts.available_kv_bytes if cache.kv_cache_memory is None else cache.kv_cache_memory
    num_blocks = memory // facts.bytes_per_block
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory: {memory} bytes hold {num_blocks} KV blocks of {facts.bytes_per_block} bytes, "
            f"but at least 2 are needed; raise kv_cache_memory (or memory_fraction) or lower block_size",
            param="kv_cache_memory",
        )
    return num_blocks


def _resolve_max_model_len(config: EngineConfig, facts: ModelFacts, num_blocks: int) -> int:
    """Tokens of the longest request, which alone must fit the KV cache."""
    wanted = config.model.max_model_len
    fitting = (num_blocks - 1) * config.cache.block_size  # the null block holds no tokens
    if wanted is None:
        if fitting < facts.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, so no request may be longer, although the model's limit is %d; raise "
                "kv_cache_memory for more, or set max_model_len",
                fitting,
                facts.max_model_len,
            )
        return min(facts.max_model_len, fitting)
    if wanted > facts.max_model_len:
        raise ConfigError(
            f"max_model_len: {wanted} exceeds the model's own limit of {facts.max_model_len}", param="max_model_len"
        )
    if wanted > fitting:
        blocks = -(-wanted // config.cache.block_size) + 1
        raise ConfigError(
            f"max_model_len: {wanted} tokens do not fit a KV cache of {fitting} tokens; lower max_model_len, or raise "
            f"kv_cache_memory to at least {blocks * facts.bytes_per_block} bytes (num_blocks {blocks})",
            param="max_model_len",
        )
    return wanted
