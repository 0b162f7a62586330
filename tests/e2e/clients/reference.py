"""The measure of every answer: one engine in this process that serves one request after the other.

Its tokens are spelled one at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import torch

from common.engine.llm import LLM, Completion
from common.tokenization import OutputProcessor, Tokenizer
from common.types import FinishReason, SamplingParams
from tests.e2e.clients.answers import Expected, ExpectedChoice, Job
from tests.e2e.clients.specs import RequestSpec
from tests.e2e.reference import greedy_completion

MAX_COMPARED = 20  # with `transformers`, one after the other
_PLAIN = SamplingParams()


def answered(specs: Sequence[RequestSpec], *, serially: bool = True) -> list[Job]:
    """Each request with its answer. Some of the plainest are compared with what `transformers` generates, too.

    Not serially: all requests in one batch, which is many times as fast.
    """
    torch.set_num_threads(1)  # several would wait for each other where the cores are busy
    with LLM(enable_prefix_caching=False) as llm:
        prompts = [_encode(llm.tokenizer, spec) for spec in specs]
        asked = [(prompt, params) for spec, prompt in zip(specs, prompts, strict=True) for params in spec.choice_params]
        completions = iter(_complete(llm, asked, serially=serially))
        jobs = []
        for spec, prompt in zip(specs, prompts, strict=True):
            choices = [_spelled(llm.tokenizer, spec, next(completions)) for _ in range(spec.n)]
            jobs.append(Job(spec, Expected(len(prompt), _echo(llm.tokenizer, spec), choices)))
    for job in itertools.islice(filter(_is_comparable, jobs), MAX_COMPARED):
        _compare(job)
    return jobs


def _encode(tokenizer: Tokenizer, spec: RequestSpec) -> list[int]:
    if isinstance(spec.prompt, str):
        return tokenizer.encode(spec.prompt)
    if spec.is_chat:
        text = tokenizer.render_chat([message._asdict() for message in spec.prompt])
        return tokenizer.encode(text, add_special_tokens=False)
    return list(spec.prompt)


def _echo(tokenizer: Tokenizer, spec: RequestSpec) -> str:
    if not spec.echo:
        return ""
    return spec.prompt if isinstance(spec.prompt, str) else tokenizer.decode(spec.prompt)


def _complete(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], *, serially: bool) -> list[Completion]:
    if serially:
        return [llm.generate([prompt], [params], use_tqdm=False)[0] for prompt, params in asked]
    return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)


def _spelled(tokenizer: Tokenizer, spec: RequestSpec, completion: Completion) -> ExpectedChoice:
    processor = OutputProcessor(
        tokenizer,
        continued=() if spec.is_chat else completion.prompt_token_ids,
        stops=spec.stops,
        min_tokens=spec.params.min_tokens,
        skip_special_tokens=spec.skip_special_tokens,
    )
    text, offsets, reason = "", [], completion.finish_reason
    for number, token_id in enumerate(completion.token_ids, start=1):
        piece = processor.push([token_id], reason if number == len(completion.token_ids) else None)
        text += piece.text
        offsets += piece.offsets
        if piece.is_stopped:
            reason = FinishReason.STOP
            break
    logprobs = completion.logprobs or []
    return ExpectedChoice(completion.token_ids[: len(offsets)], text, reason.label, logprobs[: len(offsets)], offsets)


def _compare(job: Job) -> None:
    spec, expected = job
    assert isinstance(spec.prompt, str)
    wanted = greedy_completion(spec.prompt, spec.params.max_tokens, ignore_eos=spec.params.ignore_eos)
    assert expected.choices[0].text == wanted, f"{spec}: {expected}, but transformers generate {wanted!r}"


def _is_comparable(job: Job) -> bool:
    """True if `transformers` can generate the same: text, greedy, with nothing that changes the logits or ends it
    early."""
    spec = job.spec
    return isinstance(spec.prompt, str) and not spec.stops and spec.skip_special_tokens and _is_plain(spec.params)


def _is_plain(params: SamplingParams) -> bool:
    plain = msgspec.structs.replace(
        _PLAIN,
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        seed=params.seed,
        num_logprobs=params.num_logprobs,
    )
    return params == plain
