import asyncio

from common.pb import common_pb2, pods_pb2
from decode_service.delta_buffer import DeltaBuffer
from tests.pods import wait_for


def delta(start: int, *tokens: int, **fields) -> pods_pb2.TokenDelta:
    return pods_pb2.TokenDelta(request_id="a", start_index=start, token_ids=tokens, **fields)


async def test_slow_router_gets_merged_deltas() -> None:
    deltas = DeltaBuffer(max_keys=10)
    written: list[pods_pb2.DecodeEvents] = []
    may_write = asyncio.Event()

    async def write(events: pods_pb2.DecodeEvents) -> None:
        written.append(events)
        await may_write.wait()

    writer = asyncio.create_task(deltas.write_to(write))
    deltas.put("a", delta(0, 5, report=pods_pb2.DecodeReport(num_cached_tokens=3)))
    await wait_for(lambda: written)
    deltas.put("a", delta(1, 6, num_verified_drafts=4))
    deltas.put("b", delta(0, 9))
    deltas.put("a", delta(2, 7, 8, num_verified_drafts=3, num_accepted_drafts=1))
    deltas.put("a", delta(0, finish_reason=common_pb2.FINISH_REASON_ERROR, error=common_pb2.Error(message="oh")))
    deltas.close()
    may_write.set()
    await writer
    assert [list(events.deltas) for events in written] == [
        [delta(0, 5, report=pods_pb2.DecodeReport(num_cached_tokens=3))],
        [
            delta(
                1,
                *(6, 7, 8),
                finish_reason=common_pb2.FINISH_REASON_ERROR,
                error=common_pb2.Error(message="oh"),
                num_verified_drafts=7,
                num_accepted_drafts=1,
            ),
            delta(0, 9),
        ],
    ]


async def test_whoever_opens_keys_waits_for_room() -> None:
    deltas = DeltaBuffer(max_keys=1)

    async def write(_: pods_pb2.DecodeEvents) -> None: ...

    deltas.put("a", delta(0, 1))
    waiting = asyncio.create_task(deltas.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    deltas.close()
    await deltas.write_to(write)
    await waiting
