"""The queue of requests that wait for their turn."""

import pytest

from common.engine.scheduler.request import Request
from common.engine.scheduler.waiting_queue import WaitingQueue
from tests.unit.common.engine.scheduler_factories import create_request


def request_of(order: int) -> Request:
    request = Request(create_request("a"), added_at=0.0, max_model_len=64, eos=frozenset())
    request.order = (0, 0.0, order)
    return request


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
def test_only_what_is_queued_can_be_removed(order):
    queue, requests = WaitingQueue(), [request_of(3), request_of(1)]
    for request in requests:
        queue.push(request)
    with pytest.raises(ValueError, match="is not waiting"):
        queue.remove(request_of(order))
    assert [request.order[-1] for request in queue] == [1, 3]
    assert queue.num_tokens == 12
    queue.remove(requests[0])
    assert [request.order[-1] for request in queue] == [1]
    assert queue.num_tokens == 6
