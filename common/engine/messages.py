"""The messages between a client and an EngineCore; msgspec structs, msgpack on the wire.

Client -> core: `EngineCommand`, one of AddRequest, AbortRequests, TransferUpdate, TransferTarget, TransferQuiesced,
Call, LoadAdapter, UnloadAdapter, StartProfile, EndProfile. Core -> client: `EngineCoreOutputs`, one per step with
outputs and further ones with outputs of transfers, which do not wait for a step; and `CallResult`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Literal, TypeVar

import msgspec

from common.engine.config import Kernels
from common.engine.contract.adapters import AdapterFacts
from common.engine.contract.layout import KVLayout
from common.types import (
    ExtraKey,
    FinishReason,
    Logprobs,
    PoolingFacts,
    PoolingParams,
    PromptPositions,
    RequestId,
    SampledToken,
    SamplingParams,
    TransferId,
)


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The request's part in a handoff."""

    transfer_id: TransferId
    epoch: int  # attempt number, from 1; updates of another epoch are ignored
    role: Literal["producer", "consumer"]


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Starts one generation, or with `pooling` one that ends with its prompt's numbers instead of tokens.

    A producer stops after its first token and saves its prompt's KV through the connector. A consumer reserves
    blocks for the prompt, waits in WAITING_FOR_REMOTE_KV and is fed by TransferUpdate. The id of a request with a
    transfer is never used again.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []  # generated before, elsewhere: generation continues after them
    cache_salt: str = ""
    adapter: bytes = b""  # digest of the adapter that it is computed with, see LoadAdapter; empty: none
    extra_keys: list[ExtraKey] = []  # in order
    positions: PromptPositions | None = None  # None: the tokens' places; others only if EngineSpec.position_dims > 1
    priority: int = 0  # lower runs first under the priority policy
    target_itl_s: float = 0.0  # seconds between tokens that prompts beside it should not exceed; 0: the engine's
    tenant: str = ""  # whose it is; tenants share in turn what compiles grammars
    transfer: KVTransferParams | None = None
    pooling: PoolingParams | None = None
    data_parallel_rank: int | None = 0  # number of the pod's engine that has it; None: not chosen yet


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Ends requests. Unknown and ended ones are ignored; the others answer with FinishReason.ABORT."""

    request_ids: list[RequestId]


class TransferUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An update of a consumer's handoff.

    `num_ready_tokens` leading prompt tokens can be loaded through the connector now; it never decreases.
    `final` means that no more KV will arrive: with `first_token` the handoff succeeded, without it failed with
    `failure` and the consumer computes the rest.
    """

    request_id: RequestId
    epoch: int
    num_ready_tokens: int
    final: bool = False
    first_token: SampledToken | None = None
    failure: str = ""  # reason label of the recompute, set if and only if final without full success
    digests: list[bytes] = []  # direct connectors: of the blocks that became ready since the last update, in order


class TransferQuiesced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The producer of a direct connector no longer writes to the consumer's blocks. Comes before the final update if
    that is known by then; also taken after the request has ended."""

    request_id: RequestId
    epoch: int


class TransferTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gives a producer the blocks to which a direct connector writes, which its consumer has reserved.

    The first `num_held_tokens` prompt tokens, whole blocks, are there already and are not sent; `block_ids` are the
    consumer's blocks for the rest of the prompt.
    """

    request_id: RequestId
    epoch: int
    address: bytes  # ConnectorFacts.address of the consumer
    num_held_tokens: int
    block_ids: list[int]


class Call(msgspec.Struct, frozen=True, tag=True):
    """A call off the hot path; answered by a CallResult with the same id."""

    call_id: int
    method: Literal["engine_spec", "stats", "check_integrity", "reset_prefix_cache"]


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Takes a trace of the step loop, which is written to `directory`; see `common.engine.profiling`. Answered by a
    CallResult with a ProfileReport or an error. One at a time."""

    call_id: int
    directory: str  # of the client, which removes it
    seconds: float
    max_steps: int = 0  # 0: no limit


class EndProfile(msgspec.Struct, frozen=True, tag=True):
    """Ends a profile before its time. It is still answered, with an error. Ignored if it is over."""

    call_id: int


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reads a LoRA adapter in PEFT's format, beside the step loop, and makes it known. Answered by a CallResult with
    AdapterFacts or an error; one that is there already is answered as well."""

    call_id: int
    directory: str  # local, with adapter_config.json and adapter_model.safetensors


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forgets an adapter: new requests for it are refused, and its memory is freed once those that it has are over.
    Answered by a CallResult, with an error if there is no such adapter."""

    call_id: int
    digest: bytes


EngineCommand = (
    AddRequest
    | AbortRequests
    | TransferUpdate
    | TransferTarget
    | TransferQuiesced
    | Call
    | LoadAdapter
    | UnloadAdapter
    | StartProfile
    | EndProfile
)


class RequestStarted(msgspec.Struct, frozen=True, tag=True):
    """The request was scheduled, or its blocks were reserved, for the first time."""

    queue_s: float  # seconds since the core received it
    num_cached_tokens: int  # prompt tokens found in the local prefix cache or restored from a tier below
    reserved_block_ids: list[int] = []  # consumer of a direct connector: its blocks for the rest of the prompt


class KVSaved(msgspec.Struct, frozen=True, tag=True):
    """Producer: the KV of the first `num_tokens` prompt tokens is in the connector. `failure`: no more will be
    saved."""

    num_tokens: int
    failure: str = ""
    digests: list[bytes] = []  # direct connectors: of the blocks saved since the last KVSaved, in order


class KVReceived(msgspec.Struct, frozen=True, tag=True):
    """Consumer: the handoff is over. `num_tokens` prompt tokens came through the connector."""

    num_tokens: int
    handoff_s: float  # seconds from the final TransferUpdate to runnable
    recompute_reason: str = ""  # why the rest is computed here; empty: there is none


RequestEvent = RequestStarted | KVSaved | KVReceived


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The output of one request in one step. After `finish_reason` only KVSaved events may follow, and a
    producer's last KVSaved has either all prompt tokens or a failure."""

    request_id: RequestId
    start_index: int = 0  # output index of tokens[0]
    tokens: list[SampledToken] = []
    finish_reason: FinishReason | None = None
    error: str = ""  # set with FinishReason.ERROR
    error_param: str = ""  # field at fault, if one is
    error_code: int = 0  # number of the common.errors.ErrorCode, set with FinishReason.ERROR
    events: list[RequestEvent] = []
    prompt_start: int = 0  # index in the prompt of the first token in prompt_logprobs
    prompt_logprobs: list[Logprobs] = []  # if asked for, of prompt tokens but the first; before the first token
    pooled: bytes = b""  # of a request that pools, with its finish reason: rows of float32, little-endian
    num_verified_drafts: int = 0  # on the way to these tokens
    num_accepted_drafts: int = 0


class StepFigures(msgspec.Struct, frozen=True, array_like=True):
    """Steps of one kind since the start."""

    num_steps: int = 0
    num_tokens: int = 0  # scheduled
    seconds: float = 0.0


NUM_DRAFT_POSITIONS = 16  # told apart; later ones count as the last


class DraftFigures(msgspec.Struct, frozen=True, array_like=True):
    """Speculative decoding since the start. Counts drafts, each a token, unless it says otherwise."""

    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0  # that became tokens of the output
    num_verifications: int = 0  # of one request in one step each
    num_steps: int = 0  # in which some were verified
    accepted_by_position: tuple[int, ...] = ()  # sums to those accepted; empty before the first
    failures: dict[str, int] = {}  # of the proposer, by reason
    num_caught_up: int = 0  # tokens that a draft model had to compute before it could propose, such as prompts
    num_unseen: int = 0  # tokens that a head does without, see Features

    def __add__(self, other: DraftFigures) -> DraftFigures:
        """Adds the figures of two engines."""
        return DraftFigures(
            self.num_proposed + other.num_proposed,
            self.num_verified + other.num_verified,
            self.num_accepted + other.num_accepted,
            self.num_verifications + other.num_verifications,
            self.num_steps + other.num_steps,
            tuple(map(sum, zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0))),
            dict(Counter(self.failures) + Counter(other.failures)),
            self.num_caught_up + other.num_caught_up,
            self.num_unseen + other.num_unseen,
        )


class PhaseSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of the step loop since the start, by what it did. They add up to the time for which it has run."""

    schedule: float = 0.0  # taking commands and deciding what the next step computes
    prepare: float = 0.0  # building the step's batch
    forward: float = 0.0  # running the model; on a GPU launching it, which returns before the GPU is done
    sample: float = 0.0  # choosing tokens; the wait for the GPU included, unless it chooses them itself
    device: float = 0.0  # waiting for a GPU that runs the model and chooses tokens
    update: float = 0.0  # taking results and handing out outputs
    transfer: float = 0.0  # taking events of KV transfers, or waiting for them with nothing to compute
    wait: float = 0.0  # no request to compute


class TransferFigures(msgspec.Struct, frozen=True, array_like=True):
    """Transfers in one direction since the start, as the connector settled them."""

    num_transfers: int = 0
    num_failed: int = 0  # those that did not move all their blocks
    num_blocks: int = 0  # moved
    seconds: float = 0.0  # from start to settled


class RankFigures(msgspec.Struct, frozen=True, array_like=True):
    """The work of a rank's process since its start, as of some second in which it ran a step. Seconds are those of the
    thread that runs steps, on a CPU."""

    rank: int
    pid: int
    device: str
    resident_bytes: int  # of host memory, pages that it shares with others included
    num_steps: int
    step_s: float  # within steps
    computing_s: float  # of these, on a core
    delayed_s: float  # ready to go on without a core to do so, as other processes had them

    @property
    def waiting_s(self) -> float:
        """Seconds of steps that it slept: mostly until other ranks had come as far."""
        return max(0.0, self.step_s - self.computing_s - self.delayed_s)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A snapshot after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_remote_kv: int = 0
    num_free_blocks: int = 0  # cached unreferenced blocks included
    num_blocks: int = 0  # the null block excluded
    num_queued_tokens: int = 0  # tokens not yet computed, waiting and running
    last_step_s: float = 0.0
    last_step_tokens: int = 0
    num_preemptions: int = 0  # since start, as all below
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_prompt_tokens: int = 0  # computed here
    num_generation_tokens: int = 0
    tier_queries: int = 0  # tokens looked up in the tiers below the device
    tier_hits: int = 0  # tokens restored from them
    num_offloaded_blocks: int = 0
    num_offload_failures: int = 0  # blocks that were offered and not saved
    num_offloads_skipped: int = 0  # blocks not offered because too many offloads were in flight
    num_failed_recordings: int = 0  # see Executor
    ranks: tuple[RankFigures, ...] = ()  # in order, those of several that have run a step
    running_adapters: tuple[bytes, ...] = ()  # digests of those that live requests are computed with
    num_late_masks: int = 0  # samples that waited for a step because the grammar's mask was not there
    num_slow_grammars: int = 0  # requests that ended because of that
    prefill_steps: StepFigures = StepFigures()  # that computed prompts only
    decode_steps: StepFigures = StepFigures()  # that computed no prompt
    mixed_steps: StepFigures = StepFigures()
    drafts: DraftFigures = DraftFigures()
    saves: TransferFigures = TransferFigures()  # of prefilled prompts, for decode pods
    loads: TransferFigures = TransferFigures()  # of prompts that a prefill pod has computed
    offloads: TransferFigures = TransferFigures()  # to the tiers below the device
    restores: TransferFigures = TransferFigures()  # from them


def join_stats(by_engine: Sequence[EngineStats]) -> EngineStats:
    """Returns the stats of several engines together: sums, and the longest of their last steps."""
    first, *others = by_engine
    if not others:
        return first
    slowest = max(by_engine, key=lambda stats: stats.last_step_s)
    return msgspec.structs.replace(
        reduce(_sum, others, first), last_step_s=slowest.last_step_s, last_step_tokens=slowest.last_step_tokens
    )


_Figures = TypeVar("_Figures", EngineStats, StepFigures, TransferFigures, PhaseSeconds)


def _sum(one: _Figures, other: _Figures) -> _Figures:
    values = [(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__]
    sums = [own + others if hasattr(own, "__add__") else _sum(own, others) for own, others in values]
    return type(one)(**dict(zip(one.__struct_fields__, sums, strict=True)))


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts of a started engine, "auto" resolved."""

    fingerprint: bytes  # 32 bytes: identity of the model; the layout is no part of it
    layout: KVLayout
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_s: float = math.inf  # see Scheduler.target_itl_s
    device: str
    dtype: str
    bytes_per_block: int  # on each rank; of the stage that has most layers
    draft_bytes_per_block: int = 0  # beside them, on the rank that has the draft model
    is_direct: bool = False  # the connector writes into reserved blocks, see common.engine.kv_connector
    connector_addresses: tuple[bytes, ...] = (b"",)  # of each engine's direct connector
    max_write_s: float = 0.0  # of a direct connector, see ConnectorFacts
    kernels: Kernels = "torch"
    kernels_failed: bool = False  # compiled ones computed something else
    num_threads: int = 0  # CPU threads of a step; 0: it runs elsewhere
    position_dims: int = 1  # dimensions of a token's position
    eos_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[str, ...] = ()  # that are loaded
    pooling: PoolingFacts = PoolingFacts()

    @property
    def data_parallel_size(self) -> int:
        """Engines behind one client; what else is said of blocks and limits holds of each."""
        return len(self.connector_addresses)

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.layout.block_size

    @property
    def bytes_per_whole_block(self) -> int:
        """Bytes of a block with the layers and KV heads of all ranks, each once."""
        layout = self.layout
        if layout.num_ranks == 1:
            return self.bytes_per_block
        num_layers = layout.num_layers
        of_rank = max(layout.layers_by_stage, default=num_layers) * len(layout.heads_by_rank[0])
        return self.bytes_per_block // of_rank * num_layers * layout.num_kv_heads


class IntegrityReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whether every block is free, cached or owned by a live request, and what is live."""

    violations: list[str]  # empty: none
    num_requests: int
    num_blocks_in_use: int
    num_transfers: int  # block transfers not settled


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The content of a profile. Times are without the pauses."""

    seconds: float  # recorded
    paused_s: float  # in which the step loop stood still, while the profiler was stopped and started again
    num_steps: int
    num_tokens: int  # that they computed
    num_events: int
    ended_by: Literal["seconds", "steps", "events"]  # what was reached; events: the most that a trace has
    phases: PhaseSeconds


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The outputs of one step, or of transfers in between. Applied in order, they give the contents of the prefix
    cache: it starts empty, and the removals of a step come before its additions."""

    outputs: list[RequestOutput]
    stats: EngineStats | None = None  # None: not of a step
    kv_stored: bytes = b""  # block hashes, 16 bytes each, added to the prefix cache
    kv_removed: bytes = b""  # and those removed from it
    phases: PhaseSeconds | None = None  # with each step, and every few seconds while there is none
    data_parallel_rank: int = 0  # whose they are; set by a client of several engines


class CallResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to a Call, or to another command with a `call_id`."""

    call_id: int
    result: EngineSpec | EngineStats | IntegrityReport | ProfileReport | AdapterFacts | None = None
    error: str = ""
    error_param: str = ""  # field or setting at fault, if one is
    error_code: int = 0  # number of the common.errors.ErrorCode, of errors that have one


EngineReply = EngineCoreOutputs | CallResult
