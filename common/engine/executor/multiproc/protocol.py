"""The messages between the driver and the processes of its ranks: msgpack, over three ways.

Ring, driver to all ranks:    `IdentifyModel`, `LoadModel`, `InitializeKVCache` and `OpenConnectors`; a `Step` for each
                              step, and `Masks` where they were asked for; `EndStart`, `Check`, `InstallAdapter` and
                              `RemoveAdapter` between steps; `Close`.
Calls, a socket of each rank: `RankLaunch` first. A rank answers each call of the start with `Identified`, `Loaded`,
                              `Done` or `Opened`. The first rank of the last stage answers each step that computes
                              something, and asks for masks before it does.
Events, another socket:       the driver's transfers; the rank's results of them, `Checked`, `OwnFigures`, its log, and
                              `EngineFailed`, after which it ends. End of file tells either side that the other one is
                              gone.

A rank on another machine connects calls and events itself, and gets on calls what is on the ring. That machine has a
connection of its own: `JoinNode`, then `StartRanks`; `RankEnded`; `Alive` from both ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from common.engine.config import EngineConfig
from common.engine.contract.adapters import AdapterFacts
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import BatchMasks
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import ModelRunnerOutput, NoToken, SchedulerOutput
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, TransferResult
from common.engine.launch import EngineFailed
from common.engine.messages import RankFigures
from common.types import RequestId

WORKER = "common.engine.executor.multiproc.worker:create_worker"  # the factory of ranks that have a model


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rank's process. Descriptors are inherited."""

    config: EngineConfig
    rank: int
    factory: str  # "module:name" of a RankWorkerFactory
    log_level: int
    directory: str = ""  # of the ranks' files, which are removed with it when the driver is gone
    store_host: str = ""  # of the first rank, if there are several machines: its machine's address
    digests: int = -1  # see RankDigests
    ring: tuple[int, int, int] | None = None  # RingDescriptors; None: what is for all ranks comes over calls
    events: int = -1
    token: bytes = b""  # of a rank on another machine, which connects calls and events itself


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """The first message of another machine."""

    node_rank: int
    nnodes: int
    num_ranks: int
    version: str


class JoinRank(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank on another machine, on each of its two connections."""

    token: bytes
    rank: int
    is_events: bool


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """To a machine: all have joined."""

    launches: list[RankLaunch]


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """From a machine: the process of a rank has ended."""

    rank: int
    code: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """To and from a machine, so that neither is silent."""


class IdentifyModel(msgspec.Struct, frozen=True, tag=True):
    """Before weights are loaded."""


class Identified(msgspec.Struct, frozen=True, tag=True):
    """The facts that must be the same on all ranks."""

    digest: bytes  # of the model's files
    rendezvous: str  # of the first rank, if there are several machines; see LoadModel


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """See Executor.load_model."""

    rendezvous: str  # where the ranks find each other, see open_store


class InitializeKVCache(msgspec.Struct, frozen=True, tag=True):
    """See Executor.initialize_kv_cache."""

    num_blocks: int


class OpenConnectors(msgspec.Struct, frozen=True, tag=True):
    """See Executor.open_connector."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """See Executor.submit."""

    step: SchedulerOutput
    sampled: dict[RequestId, list[int]] = {}  # by the last stage since the step before, see RequestTable.note_sampled


class EndStart(msgspec.Struct, frozen=True, tag=True):
    """Requests follow; the steps so far were for measuring."""


class StepDigest(msgspec.Struct, frozen=True, tag=True):
    """The digest of a rank whose memory the first one does not see; see RankDigests."""

    number: int
    digest: int


class Masks(msgspec.Struct, frozen=True, tag=True):
    """BatchMasks of the step that runs."""

    positions: list[int]
    num_words: int  # of each mask
    words: bytes
    no_tokens: dict[int, NoToken]

    @classmethod
    def of(cls, masks: BatchMasks | None) -> Masks:
        """The message for `masks`."""
        if masks is None:
            return cls([], 0, b"", {})
        return cls(masks.positions, masks.words.shape[1], masks.words.tobytes(), masks.no_tokens)

    def to_batch(self) -> BatchMasks | None:
        """The masks, which must not be written to."""
        if not self.positions and not self.no_tokens:
            return None
        words = np.frombuffer(self.words, dtype=np.int32).reshape(len(self.positions), self.num_words)
        return BatchMasks(self.positions, words, self.no_tokens)


class Check(msgspec.Struct, frozen=True, tag=True):
    """See Executor.check. All ranks answer."""

    known: KnownRequests


class InstallAdapter(msgspec.Struct, frozen=True, tag=True):
    """See Adapters.install. All ranks have read it."""

    digest: bytes


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    """See Adapters.remove."""

    digest: bytes


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """See Adapters.read. Answered beside steps, by AdapterRead."""

    number: int
    directory: str


class AdapterRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The adapter fits the rank's part of the model, or why it cannot be used."""

    number: int  # of the ReadAdapter
    facts: AdapterFacts | None = None
    absent: list[str] = []  # see contract.adapters.ReadAdapter
    error: str = ""


class Close(msgspec.Struct, frozen=True, tag=True):
    """The end."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    facts: ModelFacts


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answers calls that return nothing."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The connector is open, if there is one."""

    facts: ConnectorFacts | None


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The results of a step."""

    output: ModelRunnerOutput


class WantMasks(msgspec.Struct, frozen=True, tag=True):
    """The arguments of a MaskSource."""

    request_ids: list[RequestId]
    lengths: list[int]


class StartLoad(msgspec.Struct, frozen=True, tag=True):
    """See Connector.start_load."""

    transfer: BlockTransfer
    num_steps: int  # that have computed something so far: a rank may still be at work on the last


class StartSave(msgspec.Struct, frozen=True, tag=True):
    """See Connector.start_save."""

    transfer: BlockTransfer
    num_steps: int  # see StartLoad


class StartLookup(msgspec.Struct, frozen=True, tag=True):
    """See Connector.start_lookup."""

    transfer: BlockTransfer


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """See Connector.cancel."""

    job_id: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    """Jobs that have settled on this rank."""

    results: list[TransferResult]


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The problems on this rank, one line each."""

    violations: list[str]


class OwnFigures(msgspec.Struct, frozen=True, tag=True):
    """The rank's work so far."""

    figures: RankFigures


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line of a rank's log."""

    level: int
    logger: str
    text: str


FromJoining = JoinNode | JoinRank
ToNode = StartRanks | Alive | EngineFailed
FromNode = RankEnded | Alive
ToRanks = (
    IdentifyModel
    | LoadModel
    | InitializeKVCache
    | OpenConnectors
    | Step
    | Masks
    | EndStart
    | Check
    | InstallAdapter
    | RemoveAdapter
    | Close
)
StartAnswer = Identified | Loaded | Done | Opened
StepAnswer = StepDone | WantMasks
Transfer = StartLoad | StartSave | StartLookup | Cancel | ReadAdapter
FromRank = Settled | Checked | AdapterRead | OwnFigures | LogLine | StepDigest | EngineFailed

_Message = TypeVar("_Message")


def _from_path(value: object) -> str:
    if not isinstance(value, Path):
        raise NotImplementedError
    return str(value)


def _to_path(kind: type, value: str) -> Path:
    if kind is not Path:
        raise NotImplementedError
    return Path(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_path)


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message, at least one."""
    return _encoder.encode(message)


class Decoder(Generic[_Message]):
    """Decodes the messages of one way."""

    def __init__(self, kind: object) -> None:
        """`kind`: the type of the messages."""
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kind, dec_hook=_to_path)

    def __call__(self, message: bytes | bytearray) -> _Message:
        """Returns the message."""
        return self._decoder.decode(message)
