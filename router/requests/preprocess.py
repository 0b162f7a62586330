"""From a client's Draft to a valid, tokenised, hashed GenerationRequest. Inside the router nothing checks again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from common.errors import (
    BatonError,
    InvalidRequestError,
    PromptTooLongError,
    UnavailableError,
    json_problem,
    quoted,
)
from common.generation_config import SamplingDefaults
from common.tokenization import Tokenizer, TooManyTokensError
from common.types import (
    NO_SAMPLING,
    AdapterName,
    BlockHash,
    ExtraKey,
    SamplingParams,
    hash_prompt,
    root_hash,
)
from common.types.validation import (
    SEED_LIMIT,
    settle_sampling,
    validate_extra_keys,
    validate_prompt,
    validate_token_ids,
)
from router.fairness.queue import Ticket
from router.fairness.tenant import Tenant
from router.fairness.threads import FairThreads
from router.metrics import GenerationMetrics
from router.pods.model_pods import ModelFacts, ModelPods
from router.requests.bounds import MAX_SALT_CHARS, MAX_SESSION_CHARS, MAX_STOP_CHARS, MAX_STOPS
from router.requests.ids import check_request_id
from router.requests.request import (
    ChatPrompt,
    Draft,
    GenerationRequest,
    KVFailurePolicy,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)

_PRIORITIES = range(-(2**31), 2**31)
_THREAD_FROM_CHARS = 4_000  # about 1 ms of tokenising; longer texts leave the event loop alone
_THREAD_FROM_TOKENS = 20_000  # about 1 ms of hashing
_THREAD_FROM_DECODED = 5_000  # tokens, about 1 ms of decoding

_Result = TypeVar("_Result")


class Preprocessor:
    """Validates and tokenises requests for one model. Owns the threads for long prompts; close it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pods: ModelPods,
        metrics: GenerationMetrics,
        *,
        model_id: int,
        timeout_s: float,
        kv_failure_policy: KVFailurePolicy,
        sampling_defaults: SamplingDefaults,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Every request gets `timeout_s` seconds from its arrival. `kv_failure_policy` and `sampling_defaults` hold for
        what it leaves out."""
        self._tokenizer = tokenizer
        self._pods = pods
        self._metrics = metrics
        self._model_id = model_id
        self._timeout_s = timeout_s
        self._kv_failure_policy = kv_failure_policy
        self._sampling_defaults = sampling_defaults
        self._max_prompt_tokens = max_prompt_tokens
        self._threads = FairThreads(2, "tokenize")

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._threads.close()

    async def prepare(self, draft: Draft, adapter: AdapterName | None = None) -> GenerationRequest:
        """Raises InvalidRequestError or a subclass for what the client did wrong, and UnavailableError if no pod could
        serve it."""
        _check_draft(draft)
        priority = draft.terms.tenant.priority_of(draft.priority)
        kv_failure_policy = self._kv_failure_policy_of(draft)
        pooling = draft.pooling
        model, max_model_len = self._model(pools=pooling is not None)
        self._pods.pooling.check(pooling)

        started = time.monotonic()
        longest = self._longest(max_model_len)
        limit = _truncation(draft, longest)
        tenant = draft.terms.tenant
        token_ids = await self._tokenize(
            draft.prompt, draft.prompt_param, longest, tenant, priority, is_cut=limit is not None
        )
        if limit is not None:
            token_ids = token_ids[-limit:]
        if self._max_prompt_tokens is not None:
            _check_length(token_ids, longest, draft.prompt_param)
        has_no_output = _has_no_output(draft)
        if has_no_output:
            draft = replace(draft, max_tokens=1)
        if pooling is None:
            sampling = self._sampling(draft, model.vocab_size, room=max_model_len - len(token_ids))
        else:
            sampling = NO_SAMPLING
            self._pods.pooling.check_length(pooling, len(token_ids), param=draft.prompt_param)
        validate_prompt(
            token_ids,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            max_tokens=sampling.max_tokens if pooling is None else 0,
            param=draft.prompt_param,
        )
        cache_salt, digest = _salt(draft), b"" if adapter is None else adapter.digest
        validate_extra_keys(draft.extra_keys, len(token_ids))
        hashes = await self._hash(
            token_ids, model.block_size, root_hash(cache_salt, digest), draft.extra_keys, tenant, priority
        )
        tokenize_s = time.monotonic() - started
        self._metrics.first_token_phase.labels("tokenize").observe(tokenize_s)
        return GenerationRequest(
            request_id=draft.request_id,
            model_id=self._model_id,
            prompt_token_ids=token_ids,
            block_hashes=hashes,
            sampling=sampling,
            pooling=pooling,
            stops=draft.stops,
            cache_salt=cache_salt,
            adapter=adapter,
            extra_keys=draft.extra_keys,
            priority=priority,
            kv_failure_policy=kv_failure_policy,
            spelled_ids=draft.spelled_ids,
            terms=draft.terms,
            continues_prompt=not isinstance(draft.prompt, ChatPrompt) or draft.prompt.continue_final_message,
            has_no_output=has_no_output,
            arrived_at=draft.arrived_at,
            tokenize_at=started,
            tokenize_s=tokenize_s,
            deadline=draft.arrived_at + min(self._timeout_s, draft.terms.timeout_s or self._timeout_s),
        )

    async def tokenize(self, prompt: Prompt, param: str, tenant: Tenant) -> list[int]:
        """Token ids of a tenant's prompt, which `param` names. Raises as `prepare` does if it is longer than the
        context."""
        longest = self._longest(self._model(pools=None)[1])
        token_ids = await self._tokenize(prompt, param, longest, tenant, tenant.priority_of(0))
        _check_length(token_ids, longest, param)
        return token_ids

    async def detokenize(self, token_ids: list[int], param: str, tenant: Tenant) -> str:
        """Text of token ids, special ones included. Raises InvalidRequestError for one outside the vocabulary, and as
        `tokenize` does."""
        model, max_model_len = self._model(pools=None)
        _check_length(token_ids, self._longest(max_model_len), param)
        validate_token_ids(token_ids, vocab_size=model.vocab_size, param=param)
        return await self._off_loop(self._tokenizer.decode_long, token_ids, tenant)

    async def pieces(self, token_ids: list[int], tenant: Tenant) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return await self._off_loop(self._tokenizer.pieces, token_ids, tenant)

    def _model(self, *, pools: bool | None) -> tuple[ModelFacts, int]:
        """The served model and its context. `pools`: whether a prompt is pooled or generated from; None: neither.
        Raises UnavailableError without a pod for that."""
        pods = self._pods
        max_model_len = pods.max_pooled_len if pools else pods.max_model_len
        if pools is None:
            max_model_len = max_model_len or pods.max_pooled_len
        if pods.facts is None or not max_model_len:
            raise UnavailableError(pods.explain_pooling() if pools else pods.explain())
        return pods.facts, max_model_len

    def _longest(self, max_model_len: int) -> int:
        return min(max_model_len, self._max_prompt_tokens or max_model_len)

    async def _off_loop(self, work: Callable[[list[int]], _Result], token_ids: list[int], tenant: Tenant) -> _Result:
        """Runs the work on a thread if it takes long."""
        if len(token_ids) < _THREAD_FROM_DECODED:
            return work(token_ids)
        ticket = Ticket(tenant, tenant.priority_of(0), len(token_ids))
        return await self._threads.run(ticket, partial(work, token_ids))

    def _sampling(self, draft: Draft, vocab_size: int, *, room: int) -> SamplingParams:
        """Valid, with everything settled. `room` is what the context leaves for the answer."""
        defaults = self._sampling_defaults
        max_tokens = draft.max_tokens
        if max_tokens is None:
            wanted = draft.default_max_tokens if defaults.max_tokens is None else defaults.max_tokens
            max_tokens = max(1, room if wanted is None else min(room, wanted))
        sampling = defaults.params(draft.sampling)
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=defaults.limit_tokens(max_tokens),
            seed=draft.seed,
            stop_token_ids=tuple(dict.fromkeys(sampling.stop_token_ids)),
        )
        return settle_sampling(sampling, self._tokenizer.spellings, vocab_size=vocab_size, names=draft.names)

    def _kv_failure_policy_of(self, draft: Draft) -> KVFailurePolicy:
        match draft.kv_failure_policy:
            case None:
                return self._kv_failure_policy
            case "recompute" | "fail" as policy:
                return policy
            case other:
                raise _invalid(f"kv_failure_policy must be recompute or fail, got {quoted(other)}", "kv_failure_policy")

    async def _tokenize(
        self, prompt: Prompt, param: str, max_model_len: int, tenant: Tenant, priority: int, *, is_cut: bool = False
    ) -> list[int]:
        """`is_cut`: only the end of the prompt matters, at most `max_model_len` tokens."""
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        encode = partial(self._encode, prompt, param, max_model_len, is_cut)
        if prompt.size < _THREAD_FROM_CHARS:
            return encode()
        return await self._threads.run(Ticket(tenant, priority, prompt.size), encode)

    def _encode(
        self, prompt: TextPrompt | ChatPrompt | PairPrompt, param: str, max_model_len: int, is_cut: bool
    ) -> list[int]:
        if isinstance(prompt, PairPrompt):
            return self._encode_pair(prompt, param, None if is_cut else max_model_len)
        if isinstance(prompt, TextPrompt):
            text, add_special_tokens = prompt.text, prompt.add_special_tokens
        else:
            text, add_special_tokens = self._render(prompt), prompt.add_special_tokens
        try:
            if is_cut:
                text = self._tokenizer.end_of(text, max_model_len)
            max_tokens = None if is_cut else max_model_len
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        except TooManyTokensError as error:
            raise PromptTooLongError(f"{param} {error}", param=param) from error
        except UnicodeError as error:
            raise InvalidRequestError(f"{param} is not valid Unicode text: {error}", param=param) from error

    def _encode_pair(self, prompt: PairPrompt, param: str, max_tokens: int | None) -> list[int]:
        try:
            return self._tokenizer.encode_pair(prompt.first, prompt.second, max_tokens=max_tokens)
        except TooManyTokensError as error:
            raise PromptTooLongError(f"{param} {error}", param=param) from error
        except UnicodeError as error:
            raise InvalidRequestError(f"{param} is not valid Unicode text: {error}", param=param) from error

    def _render(self, prompt: ChatPrompt) -> str:
        return self._tokenizer.render_chat(
            [_decoded(message, f"messages[{index}]") for index, message in enumerate(prompt.messages)],
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables={**prompt.template_variables, **({"tools": prompt.tools} if prompt.tools else {})},
        )

    async def _hash(
        self,
        token_ids: Sequence[int],
        block_size: int,
        root: BlockHash,
        extra_keys: Sequence[ExtraKey],
        tenant: Tenant,
        priority: int,
    ) -> bytes:
        def hashes() -> bytes:
            return b"".join(hash_prompt(token_ids, block_size, root, extra_keys))

        if len(token_ids) < _THREAD_FROM_TOKENS:
            return hashes()
        return await self._threads.run(Ticket(tenant, priority, len(token_ids)), hashes)


def choices_of(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """`n` requests for the same prompt that differ in id and seed; the first keeps the seed."""
    if n == 1:
        return [request]
    return [
        replace(
            request,
            request_id=choice_id(request.request_id, index),
            sampling=msgspec.structs.replace(
                request.sampling, seed=(request.sampling.settled_seed + index) % SEED_LIMIT
            ),
        )
        for index in range(n)
    ]


def choice_id(request_id: str, index: int) -> str:
    """The id of one choice of a request that has several."""
    return f"{request_id}-{index}"


def _decoded(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A message with the values of fields that were kept as they were sent, but for empty ones."""
    sent = {name: value for name, value in message.items() if isinstance(value, msgspec.Raw)}
    if not sent:
        return message
    values = {name: _decode(value, f"{where}.{name}") for name, value in sent.items()}
    return {name: values.get(name, value) for name, value in message.items() if name not in values or values[name]}


def _decode(value: msgspec.Raw, param: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(f"{param} is not valid JSON: {json_problem(error)}", param) from error


def _truncation(draft: Draft, longest: int) -> int | None:
    """Prompt tokens that are taken at most; None: it is not cut."""
    limit = draft.sampling.get("truncate_prompt_tokens")
    if limit is None or limit == 0:  # 0 is refused below
        return None
    if draft.pooling is not None:
        return longest if limit < 0 else int(limit)
    room = longest - max(1, draft.max_tokens or draft.default_max_tokens or 1)
    return max(1, room) if limit < 0 else int(limit)


def _has_no_output(draft: Draft) -> bool:
    """Whether nothing but the prompt is wanted. Raises InvalidRequestError if that leaves nothing to answer."""
    if draft.max_tokens != 0:
        return False
    if not draft.has_echo and draft.sampling.get("prompt_logprobs") is None:
        name = draft.names.get("max_tokens", "max_tokens")
        raise _invalid(f"{name} must be an integer of at least 1; 0 needs echo or prompt_logprobs", name)
    return True


def _salt(draft: Draft) -> str:
    """The client's salt within its tenant's: no salt of one tenant is ever that of another."""
    tenant_salt = draft.terms.tenant.salt
    return f"{tenant_salt}:{draft.cache_salt}" if tenant_salt else draft.cache_salt


def _check_draft(draft: Draft) -> None:
    """Checks the fields that neither depend on the model nor are part of SamplingParams."""
    check_request_id(draft.request_id, "request_id")
    if len(draft.stops) > MAX_STOPS:
        raise _invalid(f"stop must have at most {MAX_STOPS} texts, got {len(draft.stops)}", "stop")
    if not all(draft.stops):
        raise _invalid("stop must not contain an empty text", "stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in draft.stops):
        raise _invalid(f"stop must not contain a text of more than {MAX_STOP_CHARS} characters", "stop")
    if len(draft.cache_salt) > MAX_SALT_CHARS:
        raise _invalid(f"cache_salt must have at most {MAX_SALT_CHARS} characters", "cache_salt")
    if len(draft.terms.session) > MAX_SESSION_CHARS:
        raise _invalid(f"the session's name must have at most {MAX_SESSION_CHARS} characters", "session_id")
    if draft.priority not in _PRIORITIES:
        raise _invalid("priority must be a 32-bit integer", "priority")


def _check_length(token_ids: Sequence[int], longest: int, param: str) -> None:
    if len(token_ids) > longest:
        raise PromptTooLongError(f"{param} has {len(token_ids)} tokens, more than the limit of {longest}", param=param)


def _invalid(message: str, param: str) -> BatonError:
    return InvalidRequestError(message, param=param)
