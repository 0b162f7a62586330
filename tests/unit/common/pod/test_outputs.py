"""What one request's sink does wrong stays with that request."""

import pytest

from common.engine.executor.fake import expected_tokens
from common.engine.messages import AddRequest, RequestOutput
from common.errors import BatonError
from common.pod.tasks import TaskSet
from common.types import RequestId, SamplingParams
from tests.pods import decode_pod, prompt_of, wait_for


class RecordingSink:
    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.tokens: list[int] = []
        self.error: BatonError | None = None

    def take_output(self, output: RequestOutput) -> None:
        if self.fault is not None:
            raise self.fault
        self.tokens += [token.token_id for token in output.tokens]

    def fail(self, error: BatonError) -> None:
        self.error = error


def request() -> AddRequest:
    return AddRequest(
        request_id=RequestId("same"),
        prompt_token_ids=prompt_of(5),
        sampling=SamplingParams(temperature=0.0, max_tokens=4),
    )


async def test_faulty_sink_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    faulty, sound = RecordingSink(ValueError("cannot")), RecordingSink()
    async with decode_pod({}) as pod:
        pod.context.requests.add(request(), faulty)
        engine_id = pod.context.requests.add(request(), sound)
        await wait_for(lambda: faulty.error is not None and len(sound.tokens) == 4)
        pod.context.requests.forget(engine_id)
        pod.context.requests.abort(engine_id)  # forgotten: nothing happens
    assert sound.tokens == expected_tokens(prompt_of(5), 4)
    assert "ValueError: cannot" in caplog.text


async def test_failed_task_is_logged_and_the_others_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("cannot")

    async def wait_for_ever() -> None:
        await wait_for(lambda: False)

    tasks = TaskSet()
    tasks.spawn(fail(), "the failing one")
    tasks.spawn(wait_for_ever(), "the waiting one")
    await wait_for(lambda: len(tasks) == 1)
    await tasks.close()
    assert len(tasks) == 0
    assert "the failing one failed" in caplog.text
