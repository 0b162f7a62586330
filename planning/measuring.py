"""Runs the steps of a real engine in this process, and makes its profile.

1. Prompts of rising length, alone: a step each, up to the token budget; one of two steps, whose second reads the KV of
   the first.
2. Batches that decode, of rising size, after short and after long contexts. The prompts of a batch share all blocks but
   their last, so that computing them takes no time; their steps read the KV of each request all the same.
3. A batch that decodes beside a prompt.
4. Handoffs: KV into the connector and out of it.

Of the repeats of a step the lower quartile counts: what else runs on the machine makes steps longer, never shorter.
When the time is over, what was not measured is left out, but for the least that a fit needs.
"""

from __future__ import annotations

import itertools
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, KVConnectorConfig, ModelConfig, SchedulerConfig
from common.engine.messages import (
    AddRequest,
    EngineSpec,
    KVReceived,
    KVSaved,
    KVTransferParams,
    RequestOutput,
    TransferUpdate,
)
from common.errors import ConfigError
from common.types import RequestId, SamplingParams, TransferId
from kv_store.registry import create_connector
from planning.profile import VERSION, EngineProfile, Handoff, Point
from planning.simulator.hardware import Step
from planning.steps import MeasuredStep, StepFit, errors, fit_steps

_CONNECTOR = "shared-storage"
_PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens; those within the budget
_BATCHES = (1, 4, 16, 2, 8, 32, 64, 128, 256)  # the most telling first
_CONTEXTS = (32, 512, 2048)  # tokens
_BESIDE = ((4, 128), (8, 512))  # requests that decode, tokens of a prompt beside them
_HANDOFFS = (64, 1024)  # tokens
_REPEATS = 3
_DECODE_STEPS = 9  # of a batch
_SHARE_OF_PROMPTS = 0.4  # of the time
_LEAST = 2  # prompts, and batches, that are measured however long they take

Say = Callable[[str], None]
Clock = Callable[[], float]


def measure_profile(
    model: ModelConfig, scheduler: SchedulerConfig, cache: CacheConfig, *, seconds: float, say: Say
) -> EngineProfile:
    """Starts an engine, measures for about so many seconds and returns its profile. Raises ConfigError."""
    say(f"loading {model.model}")
    with InprocClient(EngineConfig(model=model, cache=cache, scheduler=scheduler)) as client:
        engine = EngineSteps(client, scheduler.max_num_batched_tokens)
        measured = _measure(engine, seconds, say)
        spec = client.spec
    say(f"loading it once more, with the connector {_CONNECTOR}")
    with tempfile.TemporaryDirectory() as scratch:
        factory = f"{create_connector.__module__}:{create_connector.__name__}"
        connector = KVConnectorConfig(factory=factory, name=_CONNECTOR, options={"path": scratch})
        with InprocClient(EngineConfig(model=model, cache=cache, scheduler=scheduler, connector=connector)) as client:
            handoff = EngineSteps(client, scheduler.max_num_batched_tokens).handoff()
    return _profile(model, scheduler, spec, measured, handoff)


def _measure(engine: EngineSteps, seconds: float, say: Say) -> list[MeasuredStep]:
    started = time.perf_counter()
    measured = [*_prompts(engine, started + _SHARE_OF_PROMPTS * seconds, say)]
    measured += _batches(engine, started + seconds, say)
    if not any(each.step.num_decoding for each in measured):
        raise ConfigError("--num-blocks, --max-model-len: too few for a request that decodes", param="num_blocks")
    return measured


def _profile(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    spec: EngineSpec,
    measured: Sequence[MeasuredStep],
    handoff: Handoff,
) -> EngineProfile:
    fit = fit_steps(measured)
    return EngineProfile(
        version=VERSION,
        source="measured",
        model=model.model,
        machine=describe_machine(),
        device=spec.device,
        dtype=" ".join(filter(None, (spec.dtype, model.quantization))),
        num_threads=spec.num_threads,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        kv_bytes_per_token=len(spec.layout.groups) * spec.bytes_per_whole_block // spec.block_size,
        max_model_len=spec.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        steps=fit,
        handoff=handoff,
        fit_error=statistics.median(map(abs, errors(fit, measured))),
        points=[_point(each, fit) for each in measured],
    )


def _point(measured: MeasuredStep, fit: StepFit) -> Point:
    step = measured.step
    num_before = step.attended / step.prompt_tokens - step.prompt_tokens / 2 if step.prompt_tokens else 0.0
    return Point(
        prompt_tokens=step.prompt_tokens,
        context_tokens=round(num_before),
        num_decoding=step.num_decoding,
        decode_context=step.decode_context,
        measured_s=measured.seconds,
        fitted_s=fit.seconds(step),
    )


def _prompts(engine: EngineSteps, until: float, say: Say) -> Iterator[MeasuredStep]:
    for number, num_tokens in enumerate(engine.lengths(_PROMPTS)):
        if number >= _LEAST and time.perf_counter() > until:
            return
        taken = _repeat(partial(engine.prompt, num_tokens), until)
        say(f"a prompt of {num_tokens:,} tokens: {1e3 * taken[0].seconds:.1f} ms")
        yield from taken


def _batches(engine: EngineSteps, until: float, say: Say) -> Iterator[MeasuredStep]:
    engine.fill(max(_CONTEXTS), until)
    num_measured = 0
    for context, num_decoding in itertools.product(_CONTEXTS, _BATCHES):
        is_late = num_measured >= _LEAST and time.perf_counter() > until
        if is_late or not engine.fits(num_decoding, context):
            continue
        num_measured += 1
        taken = engine.batch(num_decoding, context)
        say(f"{num_decoding} requests decode after {context:,} tokens: {1e3 * taken.seconds:.1f} ms")
        yield taken
    for num_decoding, num_tokens in _BESIDE:
        if engine.fits(num_decoding + 1, _CONTEXTS[0]) and num_tokens + num_decoding <= engine.budget:
            taken = engine.batch(num_decoding, _CONTEXTS[0], beside=num_tokens)
            say(f"{num_decoding} decode beside {num_tokens} tokens of a prompt: {1e3 * taken.seconds:.1f} ms")
            yield taken
        if time.perf_counter() > until:
            return


def _repeat(run: Callable[[], Sequence[MeasuredStep]], until: float) -> list[MeasuredStep]:
    """The steps of some runs, of one if it is late."""
    runs = [run()]
    while len(runs) < _REPEATS and time.perf_counter() < until:
        runs.append(run())
    return [
        MeasuredStep(steps[0].step, _lower_quartile([each.seconds for each in steps]))
        for steps in zip(*runs, strict=True)
    ]


def _lower_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


class EngineSteps:
    """An engine whose steps are timed one by one."""

    def __init__(self, client: InprocClient, budget: int, clock: Clock = time.perf_counter) -> None:
        """`budget`: most tokens of a step."""
        self.spec: EngineSpec = client.spec
        self.budget = budget
        self._client = client
        self._clock = clock
        self._choices = random.Random(0)
        self._numbers = itertools.count()
        self._shared: list[int] = []  # of the prompts of all batches
        self.prompt(min(16, self.spec.max_model_len - 1))  # what is set up at first use is not part of a step

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        """Returns prompts of one step, and one of two if the model can take it."""
        longest = self.spec.max_model_len - 1
        lengths = [length for length in wanted if length <= min(self.budget, longest)]
        longer = min(2 * self.budget, longest)
        return [*lengths, *([longer] if longer > self.budget else [])]

    def fits(self, num_decoding: int, context: int) -> bool:
        """Whether so many requests can decode after contexts of that length, once `fill` has computed them."""
        spec = self.spec
        blocks = -(-context // spec.block_size) + num_decoding * (2 + _DECODE_STEPS // spec.block_size)
        return (
            context <= len(self._shared) + 1
            and context + _DECODE_STEPS + 2 * spec.block_size <= spec.max_model_len
            and num_decoding <= min(spec.max_num_seqs, self.budget)
            and blocks < spec.num_blocks // 2
        )

    def prompt(self, num_tokens: int) -> list[MeasuredStep]:
        """Computes a prompt that no cache holds. Returns its steps."""
        self._add(self._random(num_tokens), 1)
        steps, computed = [], 0
        while self._client.has_unfinished:
            chunk = min(num_tokens - computed, self.budget)
            seconds, _ = self._step()
            if chunk:
                steps.append(MeasuredStep(Step(chunk, 0, 1, 0, chunk * (computed + chunk / 2)), seconds))
            computed += chunk
        return steps

    def fill(self, num_tokens: int, until: float) -> None:
        """Computes the prompt that those of all batches begin with, as far as there is time; see `fits`."""
        spec = self.spec
        most = min(num_tokens, spec.max_model_len - 2 * spec.block_size, spec.num_blocks // 4 * spec.block_size)
        whole = self._random(max(1, most))
        length = min(most, _CONTEXTS[0])
        while True:
            began = self._clock()
            self._run(whole[:length], 1)
            self._shared = whole[:length]
            if length == most or self._clock() + 2 * (self._clock() - began) > until:
                return
            length = min(2 * length, most)

    def batch(self, num_decoding: int, context: int, beside: int = 0) -> MeasuredStep:
        """Decodes for some steps. Returns one of those, or the one with a prompt of `beside` tokens."""
        start = self._shared[: max(0, context - 1)]
        for _ in range(num_decoding):
            self._add([*start, *self._random(1)], _DECODE_STEPS + 2 * (beside > 0) + 1)
        num_tokens = [0]
        while num_tokens[0] < num_decoding:  # until all have their first token
            num_tokens[0] += sum(len(output.tokens) > 0 for output in self._step()[1] if output.start_index == 0)
        taken = [self._step()[0] for _ in range(_DECODE_STEPS if not beside else 2)]
        step = Step(0, num_decoding, num_decoding, num_decoding * (context + _DECODE_STEPS // 2), 0.0)
        seconds = _lower_quartile(taken)
        if beside:
            self._add(self._random(beside), 1)
            seconds = self._step()[0]
            step = step._replace(prompt_tokens=beside, num_sequences=num_decoding + 1, attended=beside**2 / 2)
        self._finish()
        return MeasuredStep(step, seconds)

    def handoff(self) -> Handoff:
        """Measures from the end of prefills to the last save, and from there until the KV is loaded."""
        lengths = [length for length in _HANDOFFS if length < min(self.spec.max_model_len, self.budget)]
        times = [(length, _lower_quartile([self._hand_over(length) for _ in range(_REPEATS)])) for length in lengths]
        if len(times) < 2:
            return Handoff(connector=_CONNECTOR, latency_s=times[0][1] if times else 0.002, token_s=0.0)
        (few, short_s), (many, long_s) = times
        token_s = max(0.0, (long_s - short_s) / (many - few))
        return Handoff(connector=_CONNECTOR, latency_s=max(0.0, short_s - few * token_s), token_s=token_s)

    def _hand_over(self, num_tokens: int) -> float:
        """Returns the seconds of one handoff, from this engine to itself."""
        prompt = self._random(num_tokens)
        transfer_id = TransferId(f"t{next(self._numbers)}")
        producer = self._add(prompt, 4, KVTransferParams(transfer_id=transfer_id, epoch=1, role="producer"))
        first_token, saved, began = None, 0, 0.0
        while first_token is None or saved < num_tokens:
            for output in self._step()[1]:
                if output.request_id == producer and output.tokens:
                    first_token, began = output.tokens[0], self._clock()
                for event in output.events:
                    if isinstance(event, KVSaved):
                        if event.failure:
                            raise ConfigError(f"a handoff over {_CONNECTOR} failed: {event.failure}")
                        saved = event.num_tokens
        save_s = self._clock() - began
        self._finish()
        self._client.reset_prefix_cache()
        consumer = self._add(prompt, 4, KVTransferParams(transfer_id=transfer_id, epoch=1, role="consumer"))
        update = TransferUpdate(
            request_id=consumer, epoch=1, num_ready_tokens=num_tokens, final=True, first_token=first_token
        )
        self._client.update_transfer(update)
        load_s = None
        while self._client.has_unfinished:
            for output in self._step()[1]:
                load_s = next((e.handoff_s for e in output.events if isinstance(e, KVReceived)), load_s)
        if load_s is None:
            raise ConfigError(f"a handoff over {_CONNECTOR} did not arrive")
        return save_s + load_s

    def _run(self, prompt: list[int], num_tokens: int) -> None:
        self._add(prompt, num_tokens)
        self._finish()

    def _finish(self) -> None:
        while self._client.has_unfinished:
            self._client.step()

    def _step(self) -> tuple[float, list[RequestOutput]]:
        began = self._clock()
        outputs = self._client.step().outputs
        return self._clock() - began, outputs

    def _add(self, prompt: list[int], num_tokens: int, transfer: KVTransferParams | None = None) -> RequestId:
        request_id = RequestId(f"r{next(self._numbers)}")
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._client.add_request(
            AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, transfer=transfer)
        )
        return request_id

    def _random(self, num_tokens: int) -> list[int]:
        return [self._choices.randrange(3, self.spec.vocab_size) for _ in range(num_tokens)]


def describe_machine() -> str:
    """Returns the processor in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
