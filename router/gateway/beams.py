"""Beam search over the cluster: each step is a request for one token of every beam, on any pods.

A step asks for the most likely next tokens of each beam and chooses among them, see `common.beam_search`. A beam goes
on like a migrated stream: its pod finds the beam's full blocks in its prefix cache and computes the rest, at most a
block. So a token costs `width` requests of one token, and the time of a step and of the way to a pod and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.beam_search import Beam, BeamSearch, EarlyStopping, Hypothesis
from common.errors import InvalidRequestError
from common.types import SamplingParams
from common.types.generation import MAX_LOGPROBS
from router.dispatching.generation import Generation
from router.requests.request import GenerationRequest, Resumption
from router.service import InferenceService

_FIRST_STEP_TOKENS = 2  # with one, the prompt's KV would stay on the prefill pod


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping


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
