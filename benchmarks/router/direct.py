"""The call that a router makes for a one-token answer, made by the client itself: what latency is added to."""

from __future__ import annotations

import asyncio
import itertools

from benchmarks.router.workload import PROMPT_TOKEN_IDS
from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.rpc.channel import open_channel

_TIMEOUT_S = 60.0


class PodClient:
    """Both legs to one pair of fake pods, over connections that stay."""

    def __init__(self, prefill_address: str, decode_address: str) -> None:
        self._prefill_address = prefill_address
        self._prefill = pods_pb2_grpc.PrefillStub(open_channel(prefill_address))
        self._session = pods_pb2_grpc.DecodeStub(open_channel(decode_address)).Session(None)
        self._writing = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._reader = asyncio.create_task(self._read())

    async def first_token(self) -> None:
        """Return when either leg has brought the token."""
        request_id = f"direct-{next(self._numbers)}"
        sampling = common_pb2.SamplingParams(top_p=1.0, max_tokens=1, seed=1)
        request = common_pb2.EngineRequest(request_id=request_id, prompt_token_ids=PROMPT_TOKEN_IDS, sampling=sampling)
        remote = pods_pb2.RemotePrefill(transfer_id=request_id, epoch=1, prefill_address=self._prefill_address)
        self._waiting[request_id] = decoded = asyncio.get_running_loop().create_future()
        submit = pods_pb2.Submit(request=request, remote_prefill=remote, timeout_s=_TIMEOUT_S)
        prefill = pods_pb2.PrefillRequest(request=request, transfer_id=request_id, epoch=1)
        prefilled = asyncio.ensure_future(self._prefill.Prefill(prefill, timeout=_TIMEOUT_S))
        async with self._writing:  # one write at a time is allowed
            await self._session.write(pods_pb2.DecodeCommand(submit=submit))
        await asyncio.wait((prefilled, decoded), return_when=asyncio.FIRST_COMPLETED)
        prefilled.add_done_callback(lambda call: call.cancelled() or call.exception())  # looked at

    async def _read(self) -> None:
        async for events in self._session:
            for delta in events.deltas:
                waiting = self._waiting.pop(delta.request_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
