"""One client and one request, through whichever API it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tests.e2e.clients.answers import Answer
from tests.e2e.clients.progress import Progress
from tests.e2e.clients.specs import Api, RequestSpec


class Front(Protocol):
    """The routers, through one API."""

    async def hear(self, spec: RequestSpec, answer: Answer, progress: Progress) -> None:
        """Sends the request and fills in the answer, from its first piece on. Errors become part of the answer."""


async def answer_of(fronts: Mapping[Api, Front], spec: RequestSpec, progress: Progress) -> Answer:
    """All that the client gets until the answer ends or the client leaves."""
    answer = Answer([])
    ended = await progress.run_for(fronts[spec.api].hear(spec, answer, progress), spec.leaves_after)
    answer.has_left = not ended
    return answer
