"""Sends the requests of an input file that its output file does not answer yet.

1. The output is read: which requests are done. One that answers requests of another input is refused.
2. So many workers as may run at once take the next line that is not done, send its request, again if the failure may
   pass, and append the answer. A line that is no request is answered with an error.
3. A failure that concerns all requests ends the run: the endpoint cannot be reached, refuses the key, or the output
   cannot be written. No line is written for what was under way, so that the same command continues.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import BatonError, ConfigError, UnreachableError
from loadgen.batch.lines import (
    BatchAnswer,
    BatchError,
    BatchRequest,
    InvalidLineError,
    answer_of,
    line_id,
    parse_line,
)
from loadgen.batch.output import OutputFile
from loadgen.events import error_in
from loadgen.http_client import HttpClient, RequestFailed, Response

_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_FATAL_KINDS = frozenset({"connect", "tls"})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_SYNC_INTERVAL_S = 1.0

OnAnswer = Callable[[BatchAnswer], None]


class Line(NamedTuple):
    """A line of the input that is not empty."""

    id: str
    number: int  # from 1 on
    text: bytes


class InputFile:
    """An input file, which must not change while the batch runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> Iterator[Line]:
        """Yields its lines. Raises ConfigError if it cannot be read."""
        try:
            with self.path.open("rb") as lines:
                for number, text in enumerate(lines, start=1):
                    if text.strip():
                        yield Line(line_id(number, text), number, text)
        except OSError as error:
            raise ConfigError(f"--input-file: cannot read {self.path}: {error.strerror}", param="input_file") from error

    def check_answered_by(self, output: OutputFile) -> int:
        """Returns the number of requests. Raises ConfigError if the output answers requests that are not here."""
        left, count = set(output.done), 0
        for line in self.lines():
            left.discard(line.id)
            count += 1
        if left:
            raise ConfigError(
                f"--output-file: {output.path} has {len(left)} answers to requests that are not in {self.path}: "
                "it belongs to another input, or that has changed; name another file",
                param="output_file",
            )
        return count


class Batch:
    """A batch under way."""

    def __init__(
        self,
        source: InputFile,
        output: OutputFile,
        client: HttpClient,
        *,
        retries: int,
        timeout_s: float,
        on_answer: OnAnswer = lambda _: None,
    ) -> None:
        """`retries`: how often a request is sent again after a failure that may pass."""
        self._lines = source.lines()
        self._output = output
        self._client = client
        self._retries = retries
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._custom_ids: set[bytes] = set()  # digests of those seen
        self._jitter = random.Random()

    async def run(self, concurrency: int) -> None:
        """Returns when all requests are answered. Raises BatonError for what ends the run."""
        syncing = asyncio.create_task(self._sync())
        try:
            async with asyncio.TaskGroup() as workers:
                tasks = [workers.create_task(self._work()) for _ in range(concurrency)]
                syncing.add_done_callback(lambda _: [task.cancel() for task in tasks])
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # what ended the run; the others were cancelled
        finally:
            is_failed = syncing.done() and not syncing.cancelled()
            syncing.cancel()
            if is_failed:
                syncing.result()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_INTERVAL_S)
            await asyncio.to_thread(self._output.sync)

    async def _work(self) -> None:
        for line in self._lines:
            request = self._parsed(line)
            if line.id in self._output.done:
                continue
            answer = request if isinstance(request, BatchAnswer) else await self._answered(request)
            self._output.append(answer)
            self._on_answer(answer)

    def _parsed(self, line: Line) -> BatchRequest | BatchAnswer:
        """The request of a line, or the answer if it has none."""
        try:
            request = parse_line(line.number, line.text)
            digest = hashlib.sha256(request.custom_id.encode()).digest()[:16]
            if digest in self._custom_ids:
                raise InvalidLineError(f"line {line.number}: custom_id: used by an earlier line", request.custom_id)
        except InvalidLineError as error:
            return BatchAnswer(line.id, error.custom_id, error=BatchError("invalid_request", error.message))
        self._custom_ids.add(digest)
        return request

    async def _answered(self, request: BatchRequest) -> BatchAnswer:
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                response = await self._client.request("POST", request.path, request.body, timeout_s=self._timeout_s)
            except RequestFailed as error:
                if is_last and error.kind in _FATAL_KINDS:
                    raise UnreachableError(f"{error.message}; the same command continues") from error
                if is_last:
                    failure = BatchError(error.kind.replace(" ", "_"), error.message)
                    return BatchAnswer(request.id, request.custom_id, error=failure)
                await asyncio.sleep(self._wait_s(attempt, None))
                continue
            if response.status == 401:
                raise BatonError(f"the endpoint refuses the API key in BATON_API_KEY: {error_in(response.body)}")
            if response.status not in _PASSING_STATUSES or is_last:
                return answer_of(request, response)
            await asyncio.sleep(self._wait_s(attempt, response))
        raise AssertionError("the last attempt returns or raises")

    def _wait_s(self, attempt: int, response: Response | None) -> float:
        """Seconds before the next attempt: doubled each time, at least what the endpoint says."""
        asked = response.headers.get("retry-after", "") if response is not None else ""
        least_s = float(asked) if asked.isascii() and asked.isdigit() else 0.0
        own_s = _FIRST_WAIT_S * float(2**attempt) * self._jitter.uniform(0.5, 1.0)
        return min(max(own_s, least_s), _LONGEST_WAIT_S)
