"""The attacker, in a process of its own: `python -m benchmarks.neighbours.attacker URL KEY MODEL DIRECTORY`.

Orders, as `Child.ask` gives them:

    begin NAME    the attack of this name, until it is ended
    end           how its requests ended, by status

It is of low priority, so that it takes little of what the cluster on the same cores would have.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness.processes import obey
from benchmarks.neighbours.attacks import ATTACKS, Attack, Request, body_of
from benchmarks.neighbours.target import Target
from loadgen.http_client import CONNECT_TIMEOUT_S, HttpClient, RequestFailed, split_url

_NICENESS = 10
_TIMEOUT_S = 600.0
_PAUSE_S = 0.05  # after a refusal
_SLOW_INTERVAL_S = 0.25  # between parts of a slow body
_LEFT = "left"


class Attacker:
    """Carries out orders."""

    def __init__(self, url: str, api_key: str, target: Target) -> None:
        self._address = split_url(url)
        self._client = HttpClient(url, api_key=api_key)
        self._api_key = api_key
        self._target = target
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: Counter[str] = Counter()

    async def begin(self, name: str) -> dict[str, Any]:
        """Begins an attack."""
        attack = ATTACKS[name]
        self._ends = Counter()
        numbers = itertools.count() if attack.total is None else iter(range(attack.total))
        self._tasks = [asyncio.create_task(self._go_on(attack, numbers)) for _ in range(attack.at_once)]
        return {}

    async def end(self) -> dict[str, Any]:
        """Closes all connections. What is under way is counted, too."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        return {"ends": dict(self._ends)}

    async def _go_on(self, attack: Attack, numbers: Iterator[int]) -> None:
        for number in numbers:
            request = attack.request(self._target, number)
            end = "under way"
            try:
                end = await self._send(request, attack.leave_after_s)
            finally:
                self._ends[end] += 1
            if end not in ("200", _LEFT):
                await asyncio.sleep(_PAUSE_S)

    async def _send(self, request: Request, leave_after_s: float | None) -> str:
        body = body_of(request, self._target)
        if request.bytes_per_s:
            return await self._send_slowly(request, body)
        try:
            response = await self._client.request(
                "POST", request.path, body, timeout_s=leave_after_s or _TIMEOUT_S, on_body=lambda *_: None
            )
        except RequestFailed as error:
            return _LEFT if error.kind == "timeout" and leave_after_s else error.kind
        return str(response.status)

    async def _send_slowly(self, request: Request, body: bytes) -> str:
        head = (
            f"POST {request.path} HTTP/1.1\r\nhost: {self._address.netloc}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        size = int(request.bytes_per_s * _SLOW_INTERVAL_S)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        except OSError:  # a time-out is one
            return "connect"
        status = asyncio.create_task(reader.readline())
        try:
            writer.write(head.encode())
            for start in range(0, len(body), size):
                writer.write(body[start : start + size])
                done, _ = await asyncio.wait({status}, timeout=_SLOW_INTERVAL_S)
                if done:
                    break
            async with asyncio.timeout(_TIMEOUT_S):
                return (await status).decode("latin-1").split(" ")[1]
        except (OSError, IndexError):
            return "disconnected"
        finally:
            status.cancel()
            writer.transport.abort()


async def main() -> None:
    """Takes orders until stdin ends."""
    url, api_key, model, directory = sys.argv[1:]
    os.nice(_NICENESS)
    await obey(Attacker(url, api_key, Target.of(model, Path(directory))))


if __name__ == "__main__":
    uvloop.run(main())
