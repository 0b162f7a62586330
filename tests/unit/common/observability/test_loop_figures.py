"""How late an event loop runs."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from common.observability.loop_figures import LoopFigures


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still until it is put forward, which makes its timers late."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def test_the_lag_is_measured() -> None:
    registry, loop = CollectorRegistry(), SkippingLoop()
    figures = LoopFigures("baton_pod", loop)
    registry.register(figures)

    async def main() -> None:
        figures.start()
        loop.now_s = 2.5  # half a second after the start it was to measure
        while not registry.get_sample_value("baton_pod_event_loop_lag_seconds_count"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        figures.stop()

    loop.run_until_complete(main())
    assert registry.get_sample_value("baton_pod_event_loop_lag_seconds_bucket", {"le": "1.0"}) == 0
    assert registry.get_sample_value("baton_pod_event_loop_lag_seconds_bucket", {"le": "2.5"}) == 1
    assert registry.get_sample_value("baton_pod_num_asyncio_tasks") == 0
    loop.close()
