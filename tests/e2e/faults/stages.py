"""How far requests have come on a pod, observed and not guessed by the clock."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from common.pb import pods_pb2, pods_pb2_grpc
from tests.e2e.faults.fleet import CALL_DEADLINE_S
from tests.e2e.faults.traffic import Wave

MID_STREAM_TOKENS = 8


class Stage(enum.Enum):
    """Of the first requests of a wave that come so far."""

    QUEUED = "queued"  # one waits for its turn on the pod
    PREFILLING = "prefilling"  # its prompt is being computed
    HANDING_OFF = "handing off"  # some of its KV is on the way, or there already
    FIRST_TOKEN = "decoding the first token"  # the client has the one from the prefill pod
    MID_STREAM = "mid-stream"  # the client has several


class PodWatch:
    """What one pod says of itself."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pods_pb2_grpc.PodStub(channel)
        self._reports = self._stub.WatchStats(pods_pb2.WatchStatsRequest(min_interval_ms=1))

    async def until(self, condition: Callable[[pods_pb2.PodStats], bool]) -> None:
        """Returns at the first report that is so."""
        async for report in self._reports:
            if condition(report):
                return
        raise AssertionError("the pod ended its reports")

    async def until_transferring(self) -> None:
        """Returns when the pod has transfers under way."""
        while not (await self._check()).num_transfers:
            pass

    async def until_busy(self) -> None:
        """Returns when the pod has requests."""
        while not (await self._check()).num_requests:
            pass

    async def _check(self) -> pods_pb2.CheckIntegrityResponse:
        return await self._stub.CheckIntegrity(pods_pb2.CheckIntegrityRequest(), timeout=CALL_DEADLINE_S)


@contextlib.asynccontextmanager
async def watched(targets: Sequence[str]) -> AsyncIterator[list[PodWatch]]:
    """Reports of the pods at `targets`, from ones that were made before the context is entered."""
    async with contextlib.AsyncExitStack() as stack:
        watches = []
        for target in targets:
            channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
            watches.append(PodWatch(await stack.enter_async_context(channel)))
        for watch in watches:
            await watch.until(lambda _: True)
        yield watches


async def reached(stage: Stage, wave: Wave, pod: PodWatch, *, decodes: bool) -> None:
    """Returns when the wave has come so far. `pod` is where requests are looked for.

    If it is a decode pod it has some; a prefill pod may have done its part when its clients have tokens.
    """
    match stage:
        case Stage.QUEUED:
            await pod.until(lambda stats: stats.num_waiting > 0)
        case Stage.PREFILLING:
            await pod.until(_is_prefilling)
        case Stage.HANDING_OFF:
            await pod.until(_is_prefilling)
            await pod.until_transferring()
        case Stage.FIRST_TOKEN:
            await wave.until(lambda streams: any(stream.token_ids for stream in streams))
        case Stage.MID_STREAM:
            await wave.until(lambda streams: any(len(stream.token_ids) >= MID_STREAM_TOKENS for stream in streams))
    if decodes:
        await pod.until_busy()


def _is_prefilling(stats: pods_pb2.PodStats) -> bool:
    """Of a prefill pod: it computes prompts. Of a decode pod: it waits for one that is being computed for it."""
    return stats.num_waiting_for_remote_kv > 0 or (stats.num_running > 0 and stats.num_queued_tokens > 0)
