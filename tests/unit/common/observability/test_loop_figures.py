"""How late an event loop runs."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from common.observability.loop_figures import LoopFigures


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward, which makes its timers late."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def test_the_lag_is_measured() -> None:
    registry, loop = CollectorRegistry(), SkippingLoop()
    figures = LoopFigures("baton_pod", loop)
    registry.register(figures)

    async def main() -> None:
        figures.start()
        loop.skipped_s = 2.0
        async with asyncio.timeout(30):
            while not registry.get_sample_value("baton_pod_event_loop_lag_seconds_count"):  # noqa: ASYNC110
                await asyncio.sleep(0)
        figures.stop()

    loop.run_until_complete(main())
    assert registry.get_sample_value("baton_pod_event_loop_lag_seconds_bucket", {"le": "1.0"}) == 0
    assert registry.get_sample_value("baton_pod_event_loop_lag_seconds_bucket", {"le": "2.5"}) == 1
    assert registry.get_sample_value("baton_pod_num_asyncio_tasks") == 0
    loop.close()
