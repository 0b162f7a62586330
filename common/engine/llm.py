"""Offline generation: prompts in, completions out, no server.

from baton import LLM

with LLM() as llm:  # the demo model
    print(llm.generate("The capital of France is")[0].text)
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast

import msgspec
from tqdm import tqdm

from common.beam_search import BeamSearch, EarlyStopping, Hypothesis
from common.demo_model import demo_model_path
from common.engine.client.inproc import InprocClient
from common.engine.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from common.engine.executor.base import Executor
from common.engine.messages import AddRequest, EngineSpec, IntegrityReport, RequestOutput, RequestStarted
from common.engine.model.checkpoint import model_directory
from common.errors import BatonError, ConfigError, EngineDeadError, ErrorCode, InvalidRequestError
from common.generation_config import AUTO, read_sampling_defaults
from common.tokenization import OutputProcessor, Tokenizer
from common.types import FinishReason, Logprobs, RequestId, SamplingParams
from common.types.generation import MAX_LOGPROBS
from common.types.validation import settle_sampling, validate_prompt

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Conversation = Sequence[Mapping[str, Any]]

_Given = TypeVar("_Given")

DEFAULT_MAX_TOKENS = 128  # where neither parameters nor the model say


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    prompt: str  # empty if token ids were given
    prompt_token_ids: list[int]
    text: str  # without the stop string; empty if the model has no tokenizer
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[Logprobs] | None  # one per token, if asked for
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[Logprobs | None] | None = None  # one per prompt token, if asked for; None: of the first
    stop_reason: str | int | None = None  # the stop text, or the one of stop_token_ids, that ended the answer
    num_verified_drafts: int = 0  # with `speculative`
    num_accepted_drafts: int = 0  # of these, those that were right


class LoRARequest(NamedTuple):
    """A LoRA adapter in PEFT's format, as vLLM names one."""

    lora_name: str  # for people
    lora_int_id: int  # not used: adapters are told apart by their weights
    lora_path: str  # local directory


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model, ready to generate. A context manager; not thread-safe.

    `options` are the fields of ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, SpeculationConfig,
    GrammarConfig and AdapterConfig: dtype, max_model_len, kv_cache_memory, num_blocks, block_size, max_num_seqs,
    speculative and so on.
    Raises ConfigError naming the option, or ModelLoadError, if the engine cannot be started with them.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        executor: Executor | str | None = None,
        generation_config: str | Path = AUTO,
        override_generation_config: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        """`model`: local directory or hub id; empty: the demo model. `executor`: one, or its name.

        `generation_config` and `override_generation_config` are those of the router, see common.generation_config.
        """
        if isinstance(executor, str):
            options["executor"], executor = executor, None
        config = engine_config(str(model or demo_model_path()), **options)
        self._client = InprocClient(config, executor)
        try:
            self.tokenizer = _load_tokenizer(config.model)
            self._defaults = read_sampling_defaults(
                str(generation_config), override_generation_config or {}, model_directory(config.model)
            )
        except BaseException:
            self._client.close()
            raise
        self._max_in_flight = min(config.scheduler.max_num_waiting, 2 * config.scheduler.max_num_seqs)
        self._request_ids = itertools.count()
        self._adapters: dict[str, bytes] = {}  # digests by path

    @property
    def spec(self) -> EngineSpec:
        """Facts of the engine: number of blocks, greatest length, device and so on."""
        return self._client.spec

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[Completion]:
        """Completes one prompt or many, given as text or as token ids; the answers are in the order of the prompts.

        `params`: for all prompts, or one for each; by default `get_default_sampling_params()`, as far as the context
        has room. Equal seeds give equal answers; without a seed one is drawn for each prompt. Text ends before the
        first `stop` string. `lora_request`: adapter for all prompts, or one for each, or None; read when first met.

        Raises InvalidRequestError naming the parameter, before anything is computed, and EngineDeadError. After
        Ctrl-C, which takes effect between two steps, the LLM remains usable.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._generate(encoded, params, stop, use_tqdm, lora_request)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[Completion]:
        """Answers one conversation or many, each a list of {"role": ..., "content": ...}; otherwise like `generate`."""
        if not messages:
            raise InvalidRequestError("messages is empty", param="messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [self._encode_chat(conversation) for conversation in cast("Sequence[Conversation]", conversations)]
        return self._generate(prompts, params, stop, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompts,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[list[Completion]]:
        """The `width` most likely answers to each prompt, best first, as `transformers`' beam search finds them; see
        common.beam_search. Each token is a step of one request per beam. Raises InvalidRequestError."""
        ending = () if ignore_eos else self.spec.eos_token_ids
        most = MAX_LOGPROBS - len(ending)
        if not 1 <= width <= most:
            raise InvalidRequestError(f"width must be an integer in [1, {most}], got {width}", param="width")
        answers = []
        for prompt in [self._encode(each) for each in _as_list(prompts)]:
            search = BeamSearch(width, max_tokens, ending, length_penalty=length_penalty, early_stopping=early_stopping)
            params = SamplingParams(temperature=0.0, max_tokens=1, num_logprobs=search.num_candidates)
            validate_prompt(
                prompt.token_ids,
                vocab_size=self.spec.vocab_size,
                max_model_len=self.spec.max_model_len,
                max_tokens=max_tokens,
            )
            while not search.is_done:
                beams = [[*prompt.token_ids, *beam.token_ids] for beam in search.beams]
                steps = self.generate(beams, params, use_tqdm=False, lora_request=lora_request)
                search.advance([step.logprobs[0].top if step.logprobs else [] for step in steps])
            answers.append([self._spelled(prompt, result) for result in search.results])
        return answers

    def _spelled(self, prompt: _Prompt, result: Hypothesis) -> Completion:
        token_ids = list(result.token_ids)
        reason = FinishReason.STOP if result.is_ended else FinishReason.LENGTH
        text = ""
        if self.tokenizer is not None:
            text = OutputProcessor(self.tokenizer, continued=prompt.token_ids).push(token_ids, reason).text
        return Completion(prompt.text, prompt.token_ids, text, token_ids, reason, logprobs=None, num_cached_tokens=0)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of generation_config.json and `override_generation_config`, else OpenAI's;
        `DEFAULT_MAX_TOKENS` unless they say how many."""
        return self._defaults.params({"max_tokens": self._defaults.max_tokens or DEFAULT_MAX_TOKENS})

    def check_integrity(self) -> IntegrityReport:
        """Checks the engine's invariants."""
        return self._client.check_integrity()

    def reset_prefix_cache(self) -> None:
        """Removes the KV of earlier prompts from the prefix cache; a proposer forgets earlier answers."""
        self._client.reset_prefix_cache()

    def close(self) -> None:
        """Releases the engine. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- prompts to requests ----------------------------------------------------------------------------------------

    def _encode(self, prompt: str | Sequence[int]) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(prompt, self._require_tokenizer("prompt").encode(prompt), is_continued=True)
        return _Prompt("", list(prompt), is_continued=True)

    def _encode_chat(self, messages: Conversation) -> _Prompt:
        tokenizer = self._require_tokenizer("messages")
        text = tokenizer.render_chat(messages, add_generation_prompt=True)
        return _Prompt(text, tokenizer.encode(text, add_special_tokens=False), is_continued=False)

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer.json; give token ids", param=param)
        return self.tokenizer

    def _generate(
        self,
        prompts: Sequence[_Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        use_tqdm: bool,
        lora_request: LoRARequests,
    ) -> list[Completion]:
        stops = _check_stops(stop)
        if stops:
            self._require_tokenizer("stop")
        all_params = _one_for_each("params", params, len(prompts), SamplingParams)
        adapters = _one_for_each("lora_request", lora_request, len(prompts), LoRARequest)
        generations = [self._prepare(*each, stops) for each in zip(prompts, all_params, adapters, strict=True)]
        with tqdm(total=len(generations), unit="req", disable=not use_tqdm, dynamic_ncols=True) as progress:
            self._run(generations, progress)
        return [generation.completion() for generation in generations]

    def _adapter(self, lora_request: LoRARequest | None) -> bytes:
        """The digest of an adapter, which is loaded if it is new."""
        if lora_request is None:
            return b""
        if lora_request.lora_path not in self._adapters:
            self._adapters[lora_request.lora_path] = self._client.load_adapter(lora_request.lora_path).digest
        return self._adapters[lora_request.lora_path]

    def _prepare(
        self, prompt: _Prompt, params: SamplingParams | None, lora_request: LoRARequest | None, stops: Sequence[str]
    ) -> _Generation:
        """Checks one prompt and its parameters against the model."""
        sampling = params
        if sampling is None:
            sampling = self.get_default_sampling_params()
            room = self.spec.max_model_len - len(prompt.token_ids)
            sampling = msgspec.structs.replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))
        has_no_output = sampling.max_tokens == 0 and sampling.prompt_logprobs is not None
        if has_no_output:
            sampling = msgspec.structs.replace(sampling, max_tokens=1)
        sampling = settle_sampling(sampling, self._spellings, vocab_size=self.spec.vocab_size)
        _check_thinking(sampling)
        if sampling.vllm_xargs and not self.spec.logits_processors:
            raise InvalidRequestError("vllm_xargs: there are no logits processors", param="vllm_xargs")
        prompt = self._cut(prompt, sampling)
        validate_prompt(
            prompt.token_ids,
            vocab_size=self.spec.vocab_size,
            max_model_len=self.spec.max_model_len,
            max_tokens=sampling.max_tokens,
        )
        processor = None
        if self.tokenizer is not None:
            processor = OutputProcessor(
                self.tokenizer,
                continued=prompt.token_ids if prompt.is_continued else (),
                stops=stops,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                include_stop=sampling.include_stop_str_in_output,
            )
        return _Generation(
            request_id=RequestId(f"llm-{next(self._request_ids)}"),
            prompt=prompt,
            sampling=sampling,
            adapter=self._adapter(lora_request),
            processor=processor,
            has_no_output=has_no_output,
        )

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        return self._require_tokenizer("bad_words").spellings(word)

    def _cut(self, prompt: _Prompt, sampling: SamplingParams) -> _Prompt:
        """The end of the prompt that `truncate_prompt_tokens` leaves."""
        limit = sampling.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit < 0:
            limit = max(1, self.spec.max_model_len - sampling.max_tokens)
        return _Prompt(prompt.text, prompt.token_ids[-limit:], prompt.is_continued)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _run(self, generations: Sequence[_Generation], progress: tqdm[Any]) -> None:
        """Adds requests as the engine has room, steps, and collects outputs until all are done."""
        pending = deque(generations)
        live: dict[RequestId, _Generation] = {}
        rate = _TokenRate()
        with self._ending(live), _interrupt_deferred() as interrupted:
            while pending or live:
                self._feed(pending, live)
                for output in self._step():
                    generation = live.get(output.request_id)
                    if generation is not None and self._collect(generation, output):
                        del live[generation.request_id]
                        progress.update()
                    rate.count(len(output.tokens))
                progress.set_postfix_str(str(rate), refresh=False)
                if interrupted.is_set():
                    raise KeyboardInterrupt

    def _feed(self, pending: deque[_Generation], live: dict[RequestId, _Generation]) -> None:
        while pending and len(live) < self._max_in_flight:
            generation = pending.popleft()
            live[generation.request_id] = generation
            self._client.add_request(generation.request())

    def _step(self) -> list[RequestOutput]:
        if not self._client.has_unfinished:
            raise EngineDeadError("the engine has lost requests")
        return self._client.step().outputs

    def _collect(self, generation: _Generation, output: RequestOutput) -> bool:
        """Collects an output. Returns True if the generation has ended."""
        generation.take(output)
        if generation.finish_reason is not None and output.finish_reason is None:  # a stop string
            self._client.abort_requests([generation.request_id])
        return generation.finish_reason is not None

    @contextlib.contextmanager
    def _ending(self, live: dict[RequestId, _Generation]) -> Iterator[None]:
        """Aborts the requests that are still in the engine when the body ends."""
        try:
            yield
        finally:
            with contextlib.suppress(EngineDeadError):
                self._client.abort_requests(list(live))
                while self._client.has_work:
                    self._client.step()


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    token_ids: list[int]
    is_continued: bool  # the answer goes on where its text ends, as opposed to a chat's


@dataclass(slots=True)
class _Generation:
    """The state of one prompt until its Completion."""

    request_id: RequestId
    prompt: _Prompt
    sampling: SamplingParams
    adapter: bytes
    processor: OutputProcessor | None  # None: the model has no tokenizer
    has_no_output: bool = False  # the one token that the engine computes is dropped
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_verified_drafts: int = 0
    num_accepted_drafts: int = 0
    finish_reason: FinishReason | None = None

    def request(self) -> AddRequest:
        return AddRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.token_ids,
            sampling=self.sampling,
            adapter=self.adapter,
        )

    def take(self, output: RequestOutput) -> None:
        """Adds the output of one step. Raises BatonError if the engine rejected the request."""
        if output.finish_reason is FinishReason.ERROR:
            error = BatonError(output.error, param=output.error_param or None)
            error.code = ErrorCode.from_number(output.error_code)
            raise error
        for event in output.events:
            if isinstance(event, RequestStarted):
                self.num_cached_tokens = event.num_cached_tokens
        self.prompt_logprobs += output.prompt_logprobs
        self.num_verified_drafts += output.num_verified_drafts
        self.num_accepted_drafts += output.num_accepted_drafts
        self.finish_reason = output.finish_reason
        if self.has_no_output:
            return
        token_ids = [token.token_id for token in output.tokens]
        if output.finish_reason is FinishReason.STOP and token_ids[-1] in self.sampling.stop_token_ids:
            self.stop_reason = token_ids[-1]
        if self.processor is not None:
            piece = self.processor.push(token_ids, output.finish_reason)
            self.pieces.append(piece.text)
            if piece.is_stopped:
                self.finish_reason, self.stop_reason = FinishReason.STOP, piece.stop
                del token_ids[len(piece.offsets) :]
        self.token_ids += token_ids
        self.logprobs += [token.logprobs for token in output.tokens[: len(token_ids)] if token.logprobs is not None]

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason.for_clients,
            logprobs=None if self.sampling.num_logprobs is None else self.logprobs,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=None if self.sampling.prompt_logprobs is None else self.prompt_logprobs,
            stop_reason=self.stop_reason,
            num_verified_drafts=self.num_verified_drafts,
            num_accepted_drafts=self.num_accepted_drafts,
        )


class _TokenRate:
    """Output tokens per second since the beginning."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def __str__(self) -> str:
        return f"{self._num_tokens / (time.monotonic() - self._started + 1e-9):.0f} tokens/s"


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event: an interrupt in the middle of a step would leave the engine unusable.

    A second one interrupts at once. Signals reach the main thread only; elsewhere this does nothing.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    if not callable(previous):  # ignored, or not Python's to handle
        yield interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def engine_config(model: str, **options: Any) -> EngineConfig:
    """An EngineConfig from flat options. Raises ConfigError naming the option that is unknown or out of range."""
    sections: dict[str, type[msgspec.Struct]] = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "parallel": ParallelConfig,
        "speculation": SpeculationConfig,
        "grammar": GrammarConfig,
        "adapters": AdapterConfig,
    }
    owners = {name: section for section, struct in sections.items() for name in struct.__struct_fields__}
    # No stream waits for tokens: steps are as large as their budget.
    values: dict[str, dict[str, Any]] = {
        "model": {"model": model},
        "cache": {},
        "scheduler": {"target_itl_ms": None},
        "parallel": {},
        "speculation": {},
        "grammar": {},
        "adapters": {},
    }
    for name, value in options.items():
        if name not in owners:
            close = difflib.get_close_matches(name, owners, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{name} is not an engine option{hint}", param=name)
        values[owners[name]][name] = value
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:  # "... - at `$.cache.block_size`"
        reason, _, path = str(error).partition(" - at `$.")
        option = path.rstrip("`").rpartition(".")[2]
        if reason.startswith("--"):  # of a __post_init__, which knows settings by their options
            name, _, reason = reason.removeprefix("--").partition(": ")
            option = name.replace("-", "_")
        raise ConfigError(f"{option}: {reason}", param=option) from error


def _load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """Loads the tokenizer. None: the model has none; it still takes token ids."""
    directory = model_directory(config)
    return Tokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None


def _as_list(prompts: Prompts) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[str] | Sequence[Sequence[int]]", prompts))


def _one_for_each(
    name: str, given: _Given | Sequence[_Given | None] | None, num_prompts: int, kind: type[_Given]
) -> Sequence[_Given | None]:
    if given is None or isinstance(given, kind):
        return [given] * num_prompts
    several = cast("Sequence[_Given | None]", given)
    if len(several) != num_prompts:
        raise InvalidRequestError(f"{name} has {len(several)} entries for {num_prompts} prompts", param=name)
    return several


def _check_thinking(sampling: SamplingParams) -> None:
    """Raises InvalidRequestError for a budget of reasoning without the tokens that close it."""
    budget = sampling.thinking_token_budget
    if budget is not None and budget >= 0 and not sampling.thinking_end_token_ids:
        problem = "thinking_token_budget needs thinking_end_token_ids"
        raise InvalidRequestError(problem, param="thinking_token_budget")


def _check_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise InvalidRequestError("stop must not hold an empty string", param="stop")
    return stops
