"""Settings of one engine. Frozen; "auto" values are resolved by `EngineCore` once the model is known.

The `Meta` descriptions feed `--help` and the bounds feed validation, both in YAML and on the command line.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.engine.speculative import SpeculativeMethod, parse_speculative
from common.errors import ConfigError
from common.step_budget import MIN_AUTO_TARGET_S

DType = Literal["auto", "float32", "bfloat16", "float16"]
GrammarBackendName = Literal["auto", "xgrammar", "llguidance"]
SchedulingPolicy = Literal["fcfs", "priority"]
KernelChoice = Literal["auto", "reference"]
KVCacheDType = Literal["auto", "int8", "fp8"]
Kernels = Literal["fused", "attention", "torch"]  # compiled ones for whole decoders, for attention only, or none
MAX_SOCKET_PATH = 107  # bytes of the name of a socket, that the kernel allows
PositiveInt = Annotated[int, Meta(ge=1)]  # bounds belong on the number, inside a union with None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model: which one, and how it is computed."""

    model: Annotated[
        str, Meta(description="Local directory or hub id of a safetensors model; empty: the demo model.")
    ] = ""
    revision: Annotated[str | None, Meta(description="Revision on the hub.")] = None
    dtype: Annotated[
        DType,
        Meta(
            description="Compute and KV dtype. auto: the model's own; on CPUs bfloat16 for models in it where the "
            "processor has AVX512-BF16 (not with batch_invariant), else float32. Set it where pods' processors differ."
        ),
    ] = "auto"
    quantization: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="int8: weights of linear layers are rounded to 8 bits as the model is loaded, with a scale for "
            "each output; decode steps read half of what they do in bfloat16. int8-dynamic: the same, and activations "
            "are rounded to 8 bits for each token, which makes prompts faster and costs quality. On CPUs. module:class "
            "of a QuantizedLinear: in its format. none: weights are as in the checkpoint."
        ),
    ] = None
    device: Annotated[
        str,
        Meta(
            min_length=1,
            description="Device of the model and the KV cache: cpu; cuda; auto, which is CUDA if there is one; or "
            "module:factory of a Device.",
        ),
    ] = "auto"
    max_model_len: Annotated[
        PositiveInt | None,
        Meta(description="Most tokens of prompt and answer; default: the model's limit that fits the KV cache."),
    ] = None
    cpu_kernels: Annotated[
        KernelChoice,
        Meta(description="Compiled kernels on CPU where they support the model; reference: torch's operators only."),
    ] = "auto"
    gpu_kernels: Annotated[
        KernelChoice,
        Meta(description="Triton kernels on GPU where they support the model; reference: torch's operators only."),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(
            description="Decode steps are not recorded (on a GPU as CUDA graphs, which takes time at start): each step "
            "takes longer."
        ),
    ] = False
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Logits of a request are the same to the last bit whatever else is in the batch, however its "
            "prompt was cut, with and without a handoff, before and after a migration. For models of the Llama kind; "
            "slower."
        ),
    ] = False
    logits_processors: Annotated[
        list[str],
        Meta(description="Installed logits processors to load, by entry point of baton.logits_processors, in order."),
    ] = []
    num_threads: Annotated[
        PositiveInt | None, Meta(description="CPU threads of the forward pass, of each rank; default: torch's.")
    ] = None


DEFAULT_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 1024


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache: its blocks and their memory."""

    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] | None,
        Meta(description="Tokens per KV block; default: 16, or more for layers that keep a large state."),
    ] = None
    kv_cache_memory: Annotated[
        PositiveInt | None, Meta(description="Bytes of KV cache, of each rank; default: from measured free memory.")
    ] = None
    memory_fraction: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Share of free memory for the KV cache; default: 0.9 on CUDA, 0.1 on CPU."),
    ] = None
    num_blocks: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Exact number of KV blocks; overrides both memory settings."),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Meta(
            description="Type of the KV cache. auto: dtype. int8 or fp8: keys and values are rounded to 8 bits as they "
            "are written, with a scale for each token and head, so that about twice as many blocks fit as in bfloat16; "
            "the same on all pods of a model. See docs/kv_quantization.md."
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV of equal prompt prefixes.")] = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduler: what fits in a step."""

    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="Token budget of a step.")] = 2048
    target_itl_ms: Annotated[
        Literal["auto"] | Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Target for the milliseconds between tokens of running streams: a step beside them takes only "
            "as many prompt tokens as keep it that short. auto: 50 if there is a connector; else what a step takes in "
            "which prompts are computed at 90 % of their highest rate, as measured at start, but 50 to 200. none: up "
            "to max_num_batched_tokens."
        ),
    ] = "auto"
    max_num_seqs: Annotated[int, Meta(ge=1, description="Most requests running at once.")] = 256
    max_num_waiting: Annotated[int, Meta(ge=1, description="Most requests queued; more are refused.")] = 4096
    policy: Annotated[SchedulingPolicy, Meta(description="Order of waiting requests.")] = "fcfs"


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices and ranks of the model."""

    executor: Annotated[
        str,
        Meta(
            min_length=1,
            description="What runs the model: inproc, in the engine's process, which is multiproc if there are several "
            "ranks; multiproc, in a process for each rank; ray, the same on machines that Ray finds; or "
            "module:factory of an Executor.",
        ),
    ] = "inproc"
    tensor_parallel_size: Annotated[int, Meta(ge=1, description="Ranks that share the model's heads.")] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="Engines of a pod: each with its own ranks, requests and KV cache.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Each rank of all engines has some of the experts of each mixture, whole; else each has a part "
            "of the width of all."
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, description="Stages that share the model's layers, each with tensor_parallel_size ranks."),
    ] = 1
    rank_devices: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(description="Number of the GPU of each rank on its machine, engine by engine; default: 0, 1 and so on."),
    ] = []
    step_timeout_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=86_400,
            description="Most seconds that ranks wait for each other, and for a step; then the engine ends.",
        ),
    ] = 30.0
    nnodes: Annotated[
        int,
        Meta(
            ge=1, description="Machines that share the ranks evenly; the same command is run on each, with its number."
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(ge=0, description="Number of this machine; 0 is the pod, the others run their ranks and nothing else."),
    ] = 0
    master_addr: Annotated[
        str, Meta(description="Host name or address of machine 0, at which it listens and the others reach it.")
    ] = ""
    master_port: Annotated[int, Meta(ge=0, le=65535, description="Port on which machine 0 listens for the others.")] = (
        29500
    )
    join_timeout_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=86_400,
            description="Most seconds that machines wait for each other at the start, or after an end.",
        ),
    ] = 300.0
    node_timeout_s: Annotated[
        float,
        Meta(
            ge=0.01, le=86_400, description="A machine that is silent for as many seconds is gone, and the engine ends."
        ),
    ] = 3.0

    def __post_init__(self) -> None:
        if self.num_ranks % self.nnodes:
            raise ValueError(f"--nnodes: {self.num_ranks} ranks cannot be shared evenly by {self.nnodes} nodes")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank: {self.node_rank}, but --nnodes is {self.nnodes}, counted from 0")
        if self.nnodes > 1 and not self.master_addr and self.executor != "ray":
            raise ValueError("--master-addr: required with --nnodes")
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ValueError(
                f"--data-parallel-size: {self.data_parallel_size}, but engines of a pod are on one machine"
            )
        if self.rank_devices and len(self.rank_devices) != self.world_size:
            sizes = [f"--{name.replace('_', '-')} is {size}" for name, size in self.sizes.items()]
            sizes = sizes or ["--tensor-parallel-size is 1"]
            raise ValueError(f"--rank-devices: {len(self.rank_devices)} devices, but {' and '.join(sizes)}")
        if self.enable_expert_parallel and self.world_size == 1:
            raise ValueError(
                "--enable-expert-parallel: there is one rank, which has all experts; "
                "set --data-parallel-size or --tensor-parallel-size"
            )
        if self.enable_expert_parallel and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"--enable-expert-parallel: not with --pipeline-parallel-size, which is {self.pipeline_parallel_size}"
            )

    @property
    def executor_name(self) -> str:
        """The executor of the model: of several ranks where there are some, of one engine or of all together."""
        has_several = self.num_ranks > 1 or self.is_lockstep
        return "multiproc" if self.executor == "inproc" and has_several else self.executor

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine, on all its machines: those of the first stage, then those of the next."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine: the first has the first ones."""
        return self.num_ranks // self.nnodes

    @property
    def answering_rank(self) -> int:
        """The rank that answers for all: the first of the last stage, which samples."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def sizes(self) -> dict[str, int]:
        """How the model is cut, by setting; those above 1."""
        names = [name for name in self.__struct_fields__ if name.endswith("_parallel_size")]
        return {name: getattr(self, name) for name in names if getattr(self, name) > 1}

    @property
    def world_size(self) -> int:
        """Ranks of all engines."""
        return self.num_ranks * self.data_parallel_size

    @property
    def is_lockstep(self) -> bool:
        """Whether the engines of the pod step together, as each has some of the experts that all need."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def device_of(self, rank: int, data_parallel_rank: int = 0) -> int:
        """Number of the GPU of this rank of an engine on its machine."""
        first = data_parallel_rank * self.num_ranks
        return self.rank_devices[first + rank] if self.rank_devices else first + rank % self.ranks_per_node


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding."""

    speculative: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="What proposes next tokens of running requests, which are then verified in one step: ngram, "
            "suffix, draft (a smaller model of the same vocabulary), eagle3 (a head trained for the model), "
            "mtp (the model's own multi-token head), or module:factory of a Proposer, with options as in "
            "ngram:depth=5,min=2,max=4, suffix:depth=8,memory=64MiB, "
            "draft:model=PATH_OR_ID,depth=4 or eagle3:model=PATH_OR_ID,depth=4. The tokens are the same. "
            "none: nothing. Prefill pods compute what heads take. See docs/speculation.md."
        ),
    ] = None

    def __post_init__(self) -> None:
        try:
            _ = self.method
        except ConfigError as error:
            raise ValueError(error.message) from error

    @property
    def method(self) -> SpeculativeMethod | None:
        """The proposer, and its options."""
        return None if self.speculative in (None, "none") else parse_speculative(self.speculative)


class ForHeadsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head that the pods have to which an engine hands over: it computes what that takes. Set by the pod."""

    speculative: str

    @property
    def method(self) -> SpeculativeMethod:
        """The head."""
        return parse_speculative(self.speculative)


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters: how many, and how large."""

    max_loras: Annotated[
        int,
        Meta(
            ge=1,
            description="Adapters that requests are computed with at once; others wait until one of them has no "
            "requests any more.",
        ),
    ] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Largest rank of an adapter.")] = 128
    max_cpu_loras: Annotated[
        int, Meta(ge=1, description="Adapters that are loaded at once, in host memory; more are refused.")
    ] = 64


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output: how grammars are compiled, and how many are kept."""

    grammar_backend: Annotated[
        GrammarBackendName,
        Meta(description="Library that constrains output; auto: xgrammar, and llguidance for what it does not honour."),
    ] = "auto"
    disable_any_whitespace: Annotated[
        bool, Meta(description="JSON without whitespace between its tokens, whatever requests say.")
    ] = False
    max_whitespace_cnt: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Most characters of whitespace in a row between the tokens of JSON; without a bound, a small "
            "model may write nothing else.",
        ),
    ] = 20
    grammar_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="CPU seconds that compiling one grammar may take, else it is refused; and following it beyond "
            "grammar_step_ms, else its request ends.",
        ),
    ] = 1.0
    grammar_step_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Milliseconds that a step waits for grammars at most, and CPU time for it of all requests "
            "together; a request whose grammar is late waits for another step. Default: a tenth of target_itl_ms, or 5 "
            "if that is no number."
        ),
    ] = None
    grammar_memory: Annotated[
        int, Meta(ge=2**20, description="Bytes that compiling one grammar may take; else it is refused.")
    ] = 2**30
    grammar_threads: Annotated[
        int, Meta(ge=1, le=64, description="Grammars of one tenant compiled at once; one more for all others.")
    ] = 2
    grammar_cache_entries: Annotated[
        int, Meta(ge=1, description="Most compiled grammars that are kept, each in a process of its own.")
    ] = 32
    grammar_cache_bytes: Annotated[int, Meta(ge=0, description="Most memory of the processes that are kept.")] = (
        256 * 2**20
    )
    grammar_used_bytes: Annotated[
        int,
        Meta(
            ge=2**20,
            description="Most memory of the processes in use. Further grammars of a tenant wait while its own take as "
            "much as is left for others.",
        ),
    ] = 4 * 2**30

    @property
    def max_whitespace(self) -> int:
        """Most characters of whitespace in a row between the tokens of JSON, 0 for none."""
        return 0 if self.disable_any_whitespace else self.max_whitespace_cnt


class KVConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which connector the worker builds. `factory` ("module:function") is set by the pod, never by a user:
    the engine owns the connector Protocols, and the implementations live above it."""

    factory: str
    name: str
    options: dict[str, str | int | float | bool] = {}
    slots_path: str = ""  # of a rank: set by its executor if the connector moves whole blocks, see SlotConnector


class NodeTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates by which the machines of an engine know each other: the cluster's, set by the pod."""

    authority: str
    certificate: str
    key: str
    server_name: str = ""  # that machine 0's certificate must have; empty: master_addr


class DataParallelMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of a pod's engines this is. Set by the client that starts them."""

    rank: int
    rendezvous: str = ""  # a path, at which there is nothing yet, where the ranks of engines that step together meet
    sockets: dict[int, int] = {}  # to each engine that steps with this one: an inherited descriptor


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one engine needs."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    grammar: GrammarConfig = GrammarConfig()
    adapters: AdapterConfig = AdapterConfig()
    connector: KVConnectorConfig | None = None
    for_heads: ForHeadsConfig | None = None  # of an engine that proposes nothing itself
    tls: NodeTlsConfig | None = None
    data_parallel: DataParallelMember | None = None  # None: there is one engine

    @property
    def data_parallel_rank(self) -> int:
        """Number of this engine among those of the pod."""
        return 0 if self.data_parallel is None else self.data_parallel.rank

    @property
    def step_share_s(self) -> float:
        """Seconds of a step that what runs beside the model may take: a tenth of the target for the time between
        tokens, or of the shortest that is chosen for it."""
        target_ms = self.scheduler.target_itl_ms
        return (MIN_AUTO_TARGET_S if target_ms is None or target_ms == "auto" else target_ms / 1000) / 10

    @property
    def grammar_step_s(self) -> float:
        """Seconds of a step that grammars may take; see GrammarConfig.grammar_step_ms."""
        own = self.grammar.grammar_step_ms
        return self.step_share_s if own is None else own / 1000
