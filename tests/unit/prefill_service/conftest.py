from collections.abc import AsyncIterator

import pytest

from tests.pods import wait_no_tasks


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    await wait_no_tasks()
