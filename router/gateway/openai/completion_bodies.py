"""Body of POST /v1/completions, and what becomes of it: Drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.fields import REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS, RefusedFields, with_fields
from router.gateway.bodies.generation_body import GenerationBody
from router.gateway.bodies.prompts import Prompts, num_prompts, read_prompts
from router.replies.reply import ReplyOptions
from router.requests.request import STRUCTURED, Draft, Prompt
from router.requests.terms import Terms

_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy API has it

if TYPE_CHECKING:
    _CompletionFields = GenerationBody
else:
    _CompletionFields = with_fields(GenerationBody, REFUSED_BY_COMPLETIONS)

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_BOTH + REFUSED_BY_COMPLETIONS)


class CompletionBody(_CompletionFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {"messages": "/v1/chat/completions"}  # fields of the other endpoint

    prompt: Annotated[
        Prompts,
        Meta(description="A text, token ids, or a list of either: one answer each, or n."),
    ]
    echo: Annotated[
        bool | None,
        Meta(description="Put the prompt before the answer, and log probabilities of its tokens before the answer's."),
    ] = None
    logprobs: Annotated[int | None, Meta(description="Log probabilities of so many most likely tokens.")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin the prompt as the tokenizer says; default true.")
    ] = None

    def reply_options(self, prompt: Prompt) -> ReplyOptions:
        """An answer is all text."""
        return ReplyOptions(separates_reasoning=False)

    @property
    def num_prompts(self) -> int:
        """How many `prompts` there will be; costs nothing."""
        return num_prompts(self.prompt)

    def prompts(self) -> list[Prompt]:
        """One or many: a text, token ids, a list of texts, a list of lists of token ids."""
        return read_prompts(self.prompt, "prompt", add_special_tokens=self.add_special_tokens is not False)

    def drafts(self, request_id: str, arrived_at: float, terms: Terms) -> list[Draft]:
        """One draft per prompt."""
        self.check(_REFUSED_FIELDS)
        prompts = self.prompts()
        given = self.parameters(self.logprobs)
        names = {"num_logprobs": "logprobs"}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
            names["prompt_logprobs"] = "logprobs"
        max_tokens, seed = given.pop("max_tokens", None), given.pop("seed", None)
        return [
            Draft(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-p{index}",
                model=self.model,
                prompt=prompt,
                prompt_param="prompt" if len(prompts) == 1 else f"prompt[{index}]",
                sampling=given,
                max_tokens=max_tokens,
                default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
                seed=seed,
                stops=self.stops,
                cache_salt=self.cache_salt or "",
                priority=self.priority or 0,
                kv_failure_policy=self.kv_failure_policy,
                terms=self.with_session(terms),
                has_echo=bool(self.echo),
                names=names | {STRUCTURED: self.constraint_name},
                arrived_at=arrived_at,
            )
            for index, prompt in enumerate(prompts)
        ]


_decoder = msgspec.json.Decoder(CompletionBody)


def parse_completion(body: bytes) -> CompletionBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=CompletionBody):
        return _decoder.decode(body)
