"""The outputs since the last answer to the client, merged to one RequestOutput per request."""

from __future__ import annotations

import msgspec

from common.engine.messages import RequestEvent, RequestOutput
from common.engine.scheduler.request import Request
from common.errors import BatonError
from common.types import Logprobs, SampledToken


class Outbox:
    """Keyed by request, not by id: an id may be reused while outputs of the earlier request wait here."""

    def __init__(self) -> None:
        self._outputs: dict[Request, RequestOutput] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    def add_token(self, request: Request, token: SampledToken) -> None:
        """`token` was just appended to `request`."""
        output = self._outputs.get(request)
        start = len(request.token_ids) - request.num_prompt_tokens - 1
        if output is None:
            self._outputs[request] = RequestOutput(request_id=request.request_id, start_index=start, tokens=[token])
        elif output.tokens:
            output.tokens.append(token)
        else:
            self._outputs[request] = msgspec.structs.replace(output, start_index=start, tokens=[token])

    def add_drafts(self, request: Request, num_verified: int, num_accepted: int) -> None:
        """So many drafts of `request` were verified, and so many of these were right."""
        output = self._open(request)
        self._outputs[request] = msgspec.structs.replace(
            output,
            num_verified_drafts=output.num_verified_drafts + num_verified,
            num_accepted_drafts=output.num_accepted_drafts + num_accepted,
        )

    def add_prompt_logprobs(self, request: Request, start: int, entries: list[Logprobs]) -> None:
        """Adds those of a run of prompt tokens, of which the first has index `start`."""
        output = self._open(request)
        if not output.prompt_logprobs:
            self._outputs[request] = msgspec.structs.replace(output, prompt_start=start, prompt_logprobs=entries)
        else:
            output.prompt_logprobs.extend(entries)

    def set_pooled(self, request: Request, pooled: bytes) -> None:
        """Adds the numbers of the prompt."""
        self._outputs[request] = msgspec.structs.replace(self._open(request), pooled=pooled)

    def add_event(self, request: Request, event: RequestEvent) -> None:
        """Adds an event of `request`."""
        self._open(request).events.append(event)

    def finish(self, request: Request) -> None:
        """`request` has got its finish reason."""
        output = self._open(request)
        if output.finish_reason is not request.finish_reason:
            self._outputs[request] = msgspec.structs.replace(output, finish_reason=request.finish_reason)

    def fail(self, request: Request, error: BatonError) -> None:
        """`request` has ended with FinishReason.ERROR, for this reason."""
        self.finish(request)
        output = self._outputs[request]
        self._outputs[request] = msgspec.structs.replace(
            output, error=error.message, error_code=error.code.value.number, error_param=error.param or ""
        )

    def take(self, request: Request) -> RequestOutput:
        """The output of one request, at once."""
        output = self._open(request)
        del self._outputs[request]
        return output

    def drain(self) -> list[RequestOutput]:
        """Returns all outputs, in the order of each request's first one."""
        outputs = list(self._outputs.values())
        self._outputs.clear()
        return outputs

    def _open(self, request: Request) -> RequestOutput:
        output = self._outputs.get(request)
        if output is None:
            output = self._outputs[request] = RequestOutput(request_id=request.request_id)
        return output
