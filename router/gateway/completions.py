"""POST /v1/completions, /v1/chat/completions, /v1/messages, /v1/responses and /v1/route/explain.

The status is known before the first byte is sent: a stream begins with the first delta of any choice, and a failure
before that is an ordinary error response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from common.errors import InvalidRequestError
from common.tokenization import Tokenizer
from common.types.validation import SEED_LIMIT
from router.dispatching.kept import Running, StreamKey
from router.dispatching.text_generation import TextGeneration
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.gateway.answering.answer_format import Answer, AnswerFormat, usage_of
from router.gateway.answering.beams import search_beams, spelled
from router.gateway.answering.choices import (
    best_of,
    candidates_of,
    check_num_logprobs,
    check_num_prompt_logprobs,
    check_num_ruled_tokens,
    log_probability,
    num_choices,
    together,
)
from router.gateway.answering.encoded import EncodedList
from router.gateway.answering.explain import explain
from router.gateway.answering.prompt_logprobs import by_token_id, echoed
from router.gateway.answering.resume import (
    RESUMABLE_HEADER,
    ResumeOptions,
    Stream,
    begin,
    digest_of,
    read_resume_options,
)
from router.gateway.anthropic.answers import MessagesFormat
from router.gateway.anthropic.bodies import parse_messages
from router.gateway.bodies.beam_options import BeamOptions
from router.gateway.bodies.field_names import CHAT_NAMES, MESSAGES_NAMES, RESPONSES_NAMES, FieldNames
from router.gateway.bodies.stream_options import UsageReports
from router.gateway.bodies.structured import errors_of_constraint
from router.gateway.endpoint import JsonEndpoint
from router.gateway.openai.chat_bodies import ChatBody, parse_any, parse_chat
from router.gateway.openai.chunks import ChatFormat, CompletionFormat
from router.gateway.openai.completion_bodies import CompletionBody, parse_completion
from router.gateway.responses.answers import ResponsesFormat
from router.gateway.responses.bodies import parse_responses
from router.replies.reply import ReplyParser
from router.requests.ids import RunningIds, check_request_id
from router.requests.request import STRUCTURED, Draft, GenerationRequest, TextPrompt
from router.requests.terms import QUEUED_HEADER, Terms, read_terms
from router.security.access import AccessControl
from router.security.quotas import Account
from router.serving.served_model import ServedModel
from router.serving.service import InferenceService
from router.wire.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Api:
    """The differences between the endpoints."""

    id_prefix: str
    parse: Callable[[bytes], CompletionBody | ChatBody]
    format: type[AnswerFormat]
    names: FieldNames = CHAT_NAMES
    explains: bool = False  # answers with the route that the request would take
    resumes: bool = True  # streams may have event ids


COMPLETIONS = Api("cmpl-", parse_completion, CompletionFormat)
CHAT = Api("chatcmpl-", parse_chat, ChatFormat)
MESSAGES = Api("msg_", parse_messages, MessagesFormat, MESSAGES_NAMES, resumes=False)
RESPONSES = Api("resp_", parse_responses, ResponsesFormat, RESPONSES_NAMES, resumes=False)
EXPLAIN = Api("route-", parse_any, CompletionFormat, explains=True)


class _Prompt(NamedTuple):
    """One prompt of a request, as it was asked for and valid."""

    draft: Draft
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Job:
    """One HTTP request, valid."""

    choices: list[GenerationRequest]
    best_of: tuple[int, int]  # of so many choices of a prompt, so many are returned
    echoes: list[str]  # what precedes the text of each choice
    parsers: list[ReplyParser | None]  # of each choice; None: it is all text
    num_prompt_tokens: int  # of all prompts, each counted once
    format: AnswerFormat
    is_stream: bool  # answered by events; else by one body
    event_ids: Stream | None  # of a stream that may be resumed
    usage_reports: UsageReports
    constraint_name: str  # what the client calls the field that constrains the answer
    echoes_logprobs: bool  # those of the prompt's tokens precede those of each choice
    prompt_fields: frozenset[str]  # what else is said of prompts: their token ids, log probabilities
    prompt_ids: dict[int, EncodedList] = field(default_factory=dict)  # by the identity of a prompt's list of token ids


class CompletionsEndpoint(JsonEndpoint[CompletionBody | ChatBody]):
    """An ASGI application for one of the APIs."""

    def __init__(
        self,
        api: Api,
        service: InferenceService,
        access: AccessControl,
        ids: RunningIds,
    ) -> None:
        """`ids` are those of all endpoints that generate."""
        super().__init__(api.id_prefix, service, access)
        self._api = api
        self._ids = ids

    def _parse(self, body: bytes) -> CompletionBody | ChatBody:
        return self._api.parse(body)

    async def _serve(self, parsed: CompletionBody | ChatBody, exchange: Exchange, arrived_at: float) -> None:
        work = self._generate(parsed, exchange, arrived_at)
        del parsed  # so that the body is freed before the answer, as in JsonEndpoint
        with self._api.names.in_errors():
            await work

    async def _generate(self, parsed: CompletionBody | ChatBody, exchange: Exchange, arrived_at: float) -> None:
        header = exchange.given_header
        terms = read_terms(header, exchange.tenant, self._service.tracing.begin(header))
        account = self._access.account(terms.tenant)
        if self._api.explains or parsed.dry_run:
            self._access.check_operator(terms.tenant)
        resume = read_resume_options(exchange.header, parsed)
        if resume.has_ids and not self._api.resumes:
            problem = "only streams of completions and chats have event ids"
            raise InvalidRequestError(f"{RESUMABLE_HEADER}: {problem}", param=RESUMABLE_HEADER)
        seed = None if resume.last_id is None else resume.last_id.seed
        with (
            self._named(parsed, resume, exchange) as request_id,
            account.admit_choices(self._num_choices(parsed)),
        ):
            prompts = await self._prepare(parsed, parsed.drafts(request_id, arrived_at, terms), seed)
            exchange.release_body()
            account.spend(sum(len(prompt.request.prompt_token_ids) for prompt in prompts))
            if self._api.explains or parsed.dry_run:
                await exchange.send_json(await explain(self._service, [prompt.request for prompt in prompts]))
                return
            self._service.count_prompts([prompt.request for prompt in prompts])
            if (beams := parsed.beams()) is not None:
                await self._answer_beams(parsed, request_id, prompts, beams, account, exchange)
                return
            job = await self._job(parsed, request_id, resume, prompts, terms)
            del parsed, prompts
            with self._resumable(job, terms.tenant) as resumable, errors_of_constraint(job.constraint_name):
                async with self._service.run(job.choices) as run:
                    exchange.add_header(QUEUED_HEADER, f"{run.queued_s * 1000:.0f}")
                    exchange.note_generation(run.generations[0].generation.timeline)
                    resumable.generations = [each.generation for each in run.generations]
                    with account.spending(run.generations):
                        if job.is_stream:
                            await self._stream(job, run.generations, exchange)
                        else:
                            await self._answer(job, run.generations, exchange)

    @contextmanager
    def _named(self, body: CompletionBody | ChatBody, resume: ResumeOptions, exchange: Exchange) -> Iterator[str]:
        """Settles the request's id: that of the stream that is resumed, else the body's, else the header's, else a
        random one. Raises InvalidRequestError."""
        named = body.request_id if resume.last_id is None else resume.last_id.request_id
        if named:
            check_request_id(named, "request_id")
            exchange.request_id = named
            yield named
        else:
            with self._ids.distinct(exchange.tenant, exchange.request_id) as exchange.request_id:
                yield exchange.request_id

    def _resumable(self, job: _Job, tenant: Tenant) -> AbstractContextManager[Running]:
        """Keeps the stream if it breaks within, where the client can resume it."""
        ids = job.event_ids
        if ids is None:
            return nullcontext(Running(b""))
        return self._service.streams.running(StreamKey(tenant.name, ids.request_id), ids.identity)

    def _num_choices(self, body: CompletionBody | ChatBody) -> int:
        """Returns the number of choices of all prompts, or beams, before anything is made for each. Raises
        InvalidRequestError."""
        body.beams()  # raises for a search that is refused
        param = "n" if body.best_of is None or _n(body) < 1 else "best_of"
        return num_choices(body.num_candidates, body.num_prompts, self._service.config.max_choices, param)

    async def _prepare(
        self, body: CompletionBody | ChatBody, drafts: Sequence[Draft], seed: int | None
    ) -> list[_Prompt]:
        """Each prompt validated and tokenised. `seed` of the first one counts if the body has none, and one is drawn if
        there is none either. Raises InvalidRequestError if they are too long together."""
        n, limit = body.num_candidates, self._service.max_request_tokens
        asked = self._service.asked(body.model, drafts[0].terms.tenant)
        prompts: list[_Prompt] = []
        num_tokens = 0
        for number, draft in enumerate(drafts):
            if number:
                await others_turn(draft.terms.tenant)  # one prompt may take a few milliseconds, and there may be many
            if draft.seed is None and seed is not None:
                draft = replace(draft, seed=(seed + number * n) % SEED_LIMIT)
            options = body.reply_options(draft.prompt)
            request = await asked.model.parsing.prepare(draft, options, asked.prepare)
            if number == 0:
                seed = request.sampling.settled_seed  # those of the other prompts follow from it
            num_tokens += n * len(request.prompt_token_ids)
            if num_tokens > limit:
                problem = f"the prompts times n have more than the limit of {limit} tokens (max_request_tokens)"
                raise InvalidRequestError(problem, param=draft.prompt_param)
            prompts.append(_Prompt(draft, request))
        names = prompts[0].draft.names
        requests = [prompt.request for prompt in prompts]
        check_num_logprobs(requests, n, names["num_logprobs"])
        check_num_prompt_logprobs(requests, n, names.get("prompt_logprobs", "prompt_logprobs"))
        check_num_ruled_tokens(requests, n)
        return prompts

    async def _job(
        self,
        body: CompletionBody | ChatBody,
        request_id: str,
        resume: ResumeOptions,
        prompts: list[_Prompt],
        terms: Terms,
    ) -> _Job:
        n, model = _n(body), self._service.model_of(prompts[0].request)
        num = body.num_candidates
        choices = [choice for prompt in prompts for choice in candidates_of(prompt.request, num, n)]
        echoes = [echo for prompt in prompts for echo in [await self._echo(body, prompt)] * num]
        event_ids = None
        if body.stream and resume.has_ids:
            identity = model.fingerprint + prompts[0].request.adapter_digest
            digest = digest_of(body, terms.tenant, identity)
            event_ids, choices = await begin(self._service.streams, resume.last_id, digest, request_id, choices)
        wants_logprobs = prompts[0].request.sampling.num_logprobs is not None
        answer_format = self._format(
            body,
            request_id,
            model,
            model.name_of(prompts[0].request),
            wants_logprobs=wants_logprobs,
            has_event_ids=event_ids is not None,
        )
        options = body.reply_options(prompts[0].draft.prompt)
        is_always_parsed = self._api.format.is_always_parsed
        parsers = [model.parsing.parser_for(choice, options, always=is_always_parsed) for choice in choices]
        num_prompt_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in prompts)
        asked = {"prompt_token_ids": bool(body.return_token_ids), "prompt_logprobs": body.prompt_logprobs is not None}
        return _Job(
            choices,
            (num, n),
            echoes,
            parsers,
            num_prompt_tokens,
            answer_format,
            bool(body.stream),
            event_ids,
            body.usage_reports,
            constraint_name=prompts[0].draft.names[STRUCTURED],
            echoes_logprobs=isinstance(body, CompletionBody) and bool(body.echo) and body.logprobs is not None,
            prompt_fields=frozenset(name for name, is_asked in asked.items() if is_asked),
        )

    async def _echo(self, body: CompletionBody | ChatBody, prompt: _Prompt) -> str:
        if not (isinstance(body, CompletionBody) and body.echo):
            return ""
        given = prompt.draft.prompt
        if isinstance(given, TextPrompt):
            return given.text
        await others_turn(prompt.request.terms.tenant)  # it may be long, and there may be many
        return self._tokenizer_of(prompt.request).decode(prompt.request.prompt_token_ids)

    async def _answer(self, job: _Job, generations: list[TextGeneration], exchange: Exchange) -> None:
        async def collect(generation: TextGeneration, echo: str, parser: ReplyParser | None) -> Answer:
            answer = Answer()
            async for delta in generation:
                if delta.start_index == 0:
                    await self._describe_prompt(job, generation, answer)
                answer.log_probability += log_probability(delta)
                if parser is None:
                    job.format.add(answer, delta, echo)
                else:
                    parts = parser.take(delta)
                    job.format.add_parts(answer, delta, parts, parser.finish_label(delta.finish_reason))
            return answer

        choices = zip(generations, job.echoes, job.parsers, strict=True)
        answers = await together([collect(*choice) for choice in choices])
        best = best_of([answer.log_probability for answer in answers], *job.best_of)
        chosen, echoes = [answers[at] for at in best], [job.echoes[at] for at in best]
        await exchange.send_json(job.format.whole(chosen, echoes, _usage(job, generations)))

    async def _answer_beams(
        self,
        body: CompletionBody | ChatBody,
        request_id: str,
        prompts: Sequence[_Prompt],
        options: BeamOptions,
        account: Account,
        exchange: Exchange,
    ) -> None:
        """The n best answers to each prompt, one prompt after the other."""
        model = self._service.model_of(prompts[0].request)
        name = model.name_of(prompts[0].request)
        answer_format = self._format(body, request_id, model, name, wants_logprobs=False)
        answers: list[Answer] = []
        num_tokens = 0
        for prompt in prompts:
            results = await search_beams(self._service, prompt.request, options, account.spend)
            for result in results[: _n(body)]:
                found = spelled(prompt.request, result, self._tokenizer_of(prompt.request))
                num_tokens += len(found.token_ids)
                answers.append(Answer())
                answers[-1].text.append(found.text)
                answers[-1].token_ids.extend(found.token_ids)
                answers[-1].finish_label, answers[-1].stop_reason = found.finish_reason.label, found.stop_token_id
                if body.return_token_ids:
                    answers[-1].prompt_fields["prompt_token_ids"] = EncodedList(prompt.request.prompt_token_ids)
        num_prompt_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in prompts)
        usage = usage_of(num_prompt_tokens, num_tokens, cached_tokens=0)
        await exchange.send_json(answer_format.whole(answers, [""] * len(answers), usage))

    def _format(
        self,
        body: CompletionBody | ChatBody,
        request_id: str,
        model: ServedModel,
        name: str,
        *,
        wants_logprobs: bool,
        has_event_ids: bool = False,
    ) -> AnswerFormat:
        return self._api.format(
            request_id,
            int(time.time()),
            name,
            model.tokenizer,
            wants_logprobs=wants_logprobs,
            has_usage_chunk=body.usage_reports is not UsageReports.NONE,
            wants_token_ids=bool(body.return_token_ids),
            echoed=body.echoed,
            has_event_ids=has_event_ids,
        )

    def _tokenizer_of(self, request: GenerationRequest) -> Tokenizer:
        return self._service.model_of(request).tokenizer

    async def _describe_prompt(self, job: _Job, generation: TextGeneration, answer: Answer) -> None:
        """Adds the answer's words on its prompt. Called with the first delta, which comes after log probabilities."""
        request, logprobs = generation.generation.request, generation.generation.prompt_logprobs
        token_ids, tokenizer = request.prompt_token_ids, self._tokenizer_of(request)
        if job.echoes_logprobs and not answer.logprobs:
            answer.logprobs = await echoed(tokenizer, token_ids, logprobs, request.terms.tenant)
        if "prompt_logprobs" in job.prompt_fields and "prompt_logprobs" not in answer.prompt_fields:
            answer.prompt_fields["prompt_logprobs"] = await by_token_id(
                tokenizer, token_ids, logprobs, request.terms.tenant
            )
        if "prompt_token_ids" in job.prompt_fields:
            if id(token_ids) not in job.prompt_ids:
                job.prompt_ids[id(token_ids)] = EncodedList(token_ids)
            answer.prompt_fields["prompt_token_ids"] = job.prompt_ids[id(token_ids)]

    async def _stream(self, job: _Job, generations: list[TextGeneration], exchange: Exchange) -> None:
        ids = job.event_ids
        has_counts = job.usage_reports is UsageReports.EVERY_CHUNK
        exchange.error_events = job.format.error_events
        is_only = len(generations) == 1

        async def pump(index: int, generation: TextGeneration) -> bytes:
            """Returns what is still to be sent: the last event of the only choice, with which the stream ends."""
            opening, echo, offset, parser = b"", "", len(job.echoes[index]), job.parsers[index]
            echoes_logprobs = False
            prompt = generation.generation.request.prompt_token_ids if "prompt_token_ids" in job.prompt_fields else None
            has_begun = ids is not None and ids.has_begun(index)
            if not has_begun:
                opening = job.format.opening(index, _usage_of(generation, parser) if has_counts else None, prompt)
                echo, echoes_logprobs = job.echoes[index], job.echoes_logprobs
            async for delta in generation:
                ended = delta.finish_reason is not None
                event_id = b"" if ids is None else ids.advance(index, delta.token_ids, ended=ended)
                if parser is not None and has_begun:
                    await parser.replay(generation.replayed_text, generation.replayed_offsets, exchange.tenant)
                    has_begun = False
                parts = None if parser is None else parser.take(delta)
                usage = _usage_of(generation, parser) if has_counts else None
                if echoes_logprobs:
                    logprobs = await echoed(
                        self._tokenizer_of(generation.generation.request),
                        generation.generation.request.prompt_token_ids,
                        generation.generation.prompt_logprobs,
                        exchange.tenant,
                    )
                    opening, echo = opening + job.format.echo_chunk(index, echo, logprobs), ""
                # Tokens without text yet have a chunk, too: load generators take the time between chunks.
                if parser is None or parts is None:
                    chunk = job.format.chunk(index, delta, echo, usage, offset=offset)
                else:
                    label = parser.finish_label(delta.finish_reason)
                    chunk = job.format.parts_chunk(index, delta, parts, label, usage)
                if ended and is_only:
                    return opening + event_id + chunk
                await exchange.send_events(opening + event_id + chunk)
                opening, echo, echoes_logprobs = b"", "", False
            return b""

        rest = await together([pump(index, generation) for index, generation in enumerate(generations)])
        await exchange.end_events(b"".join(rest) + job.format.end(_usage(job, generations)))


def _n(body: CompletionBody | ChatBody) -> int:
    """Choices per prompt."""
    return 1 if body.n is None else body.n


def _usage_of(generation: TextGeneration, parser: ReplyParser | None) -> dict[str, Any]:
    """Token counts of one choice so far."""
    return usage_of(
        prompt_tokens=len(generation.generation.request.prompt_token_ids),
        completion_tokens=generation.num_tokens,
        cached_tokens=generation.generation.num_cached_tokens,
        reasoning_tokens=None if parser is None else parser.num_reasoning_tokens,
        speculation=[generation.generation.speculation],
    )


def _usage(job: _Job, generations: list[TextGeneration]) -> dict[str, Any]:
    """Token counts of the whole answer."""
    reasoning = [num for parser in job.parsers if parser and (num := parser.num_reasoning_tokens) is not None]
    return usage_of(
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=sum(generation.num_tokens for generation in generations),
        cached_tokens=min(job.num_prompt_tokens, sum(each.generation.num_cached_tokens for each in generations)),
        reasoning_tokens=sum(reasoning) if reasoning else None,
        speculation=(each.generation.speculation for each in generations),
    )
