"""Beam search over the cluster: each step is a request for one token of every beam, on any pods.

A step asks for the most likely next tokens of each beam and chooses among them, see `common.beam_search`. A beam goes
on like a migrated stream: its pod finds the beam's full blocks in its prefix cache and computes the rest, at most a
block. So a token costs `width` requests of one token, and the time of a step and of the way to a pod and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from common.beam_search import Beam, BeamSearch, Hypothesis
from common.errors import InvalidRequestError
from common.tokenization import OutputProcessor, Tokenizer
from common.types import FinishReason, SamplingParams
from common.types.generation import MAX_LOGPROBS
from router.dispatching.generation import Generation
from router.gateway.bodies.beam_options import BeamOptions
from router.requests.request import GenerationRequest, Resumption
from router.serving.service import InferenceService

_FIRST_STEP_TOKENS = 2  # with one, the prompt's KV would stay on the prefill pod


class Found(NamedTuple):
    """An answer that was searched for."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None  # the one of stop_token_ids that ended it


def spelled(request: GenerationRequest, result: Hypothesis, tokenizer: Tokenizer) -> Found:
    """A result as an answer to the request."""
    sampling, token_ids = request.sampling, list(result.token_ids)
    reason = FinishReason.STOP if result.is_ended else FinishReason.LENGTH
    is_stopped = result.is_ended and token_ids[-1] in sampling.stop_token_ids
    processor = OutputProcessor(
        tokenizer,
        continued=request.prompt_token_ids if request.continues_prompt else (),
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        include_stop=sampling.include_stop_str_in_output,
    )
    text = processor.push(token_ids, reason).text
    return Found(text, token_ids, reason, token_ids[-1] if is_stopped else None)


async def search_beams(
    service: InferenceService,
    request: GenerationRequest,
    options: BeamOptions,
    on_tokens: Callable[[int], None],
) -> list[Hypothesis]:
    """The `width` best continuations of the request's prompt, best first. `on_tokens` gets the number of tokens that
    each step computes. Raises what InferenceService.run raises, and InvalidRequestError if the beams are too many."""
    sampling = request.sampling
    eos_token_ids = () if sampling.ignore_eos else service.model_of(request).pods.eos_token_ids
    search = BeamSearch(
        options.width,
        sampling.max_tokens,
        {*sampling.stop_token_ids, *eos_token_ids},
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
    )
    if search.num_candidates > MAX_LOGPROBS:
        most = MAX_LOGPROBS - (search.num_candidates - options.width)
        raise InvalidRequestError(f"n must be at most {most} with use_beam_search, got {options.width}", param="n")
    step = 0
    while not search.is_done:
        requests = [_step_of(request, beam, step, index, search) for index, beam in enumerate(search.beams)]
        search.advance(await _candidates(service, requests))
        on_tokens(len(requests))
        step += 1
    return search.results


def _step_of(request: GenerationRequest, beam: Beam, step: int, index: int, search: BeamSearch) -> GenerationRequest:
    """A request for the next token of one beam."""
    num_tokens = step + 1 if step else min(_FIRST_STEP_TOKENS, request.sampling.max_tokens)
    return replace(
        request,
        request_id=f"{request.request_id}-beam{index}.{step}",
        sampling=SamplingParams(
            temperature=0.0, seed=0, max_tokens=num_tokens, num_logprobs=search.num_candidates, ignore_eos=True
        ),
        stops=(),
        resumption=Resumption(step, 0, beam.token_ids) if step else None,
        is_part=True,
    )


async def _candidates(
    service: InferenceService, requests: Sequence[GenerationRequest]
) -> list[list[tuple[int, float]]]:
    async with service.run(requests) as run:
        reads = [asyncio.ensure_future(_most_likely(each.generation)) for each in run.generations]
        try:
            return list(await asyncio.gather(*reads))
        finally:
            for read in reads:
                read.cancel()


async def _most_likely(generation: Generation) -> list[tuple[int, float]]:
    """The candidates for the first token that is not known."""
    found: list[tuple[int, float]] = []
    async for delta in generation:
        if delta.logprobs and not found:
            found = [(each.token_id, each.logprob) for each in delta.logprobs[0].top]
    return found
