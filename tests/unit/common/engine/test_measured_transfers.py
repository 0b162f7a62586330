"""What a connector has moved is counted."""

from __future__ import annotations

from common.engine.executor.fake import MemoryConnector
from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.messages import EngineStats, TransferFigures
from common.engine.transfers.measured import MeasuredConnector
from common.types import BlockHash, RequestId


class Answering(MemoryConnector):
    """Moves nothing, and settles each job with the result that was put into `results`."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[TransferResult] = []

    def start_load(self, transfer: BlockTransfer) -> None:
        pass

    start_save = start_lookup = start_load

    def poll(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results


def transfer(job_id: int, num_blocks: int, *, is_for_tier: bool = False) -> BlockTransfer:
    hashes = tuple(BlockHash(bytes([index]) * 16) for index in range(num_blocks))
    return BlockTransfer(job_id, RequestId("r"), tuple(range(num_blocks)), hashes, 16, is_for_tier=is_for_tier)


def test_each_direction_is_counted_apart_when_its_jobs_settle() -> None:
    now = 10.0
    below = Answering()
    measured = MeasuredConnector(below, lambda: now)
    measured.start_save(transfer(1, 4))
    measured.start_load(transfer(2, 4))
    measured.start_save(transfer(3, 2, is_for_tier=True))
    measured.start_load(transfer(4, 2, is_for_tier=True))
    measured.start_lookup(transfer(5, 0, is_for_tier=True))
    assert measured.figures(EngineStats()) == EngineStats(), "nothing has settled"
    now = 12.0
    below.results = [TransferResult(1, 4), TransferResult(2, 1, "block_missing"), TransferResult(5, 9)]
    assert len(measured.poll()) == 3
    now = 13.0
    below.results = [TransferResult(3, 2), TransferResult(4, 99)]
    measured.poll()
    figures = measured.figures(EngineStats())
    assert figures.saves == TransferFigures(1, 0, 4, 2.0)
    assert figures.loads == TransferFigures(1, 1, 1, 2.0)
    assert figures.offloads == figures.restores == TransferFigures(1, 0, 2, 3.0)
