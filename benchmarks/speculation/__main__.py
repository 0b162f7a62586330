"""Output tokens per second with and without speculation: engines in one process that take turns.

    python -m benchmarks.speculation [--models 100M 0.6B] [--dtypes float32 bfloat16]
                                     [--sections verify repetitive random draft] [--repeats 3] [--tokens 128]
                                     [--markdown FILE]

    verify      a step that verifies four drafts, all of them right, as a multiple of a decode step, at batch 1
    repetitive  requests of one at a time whose answers repeat parts of their prompts: code that is edited, documents
                that are quoted, records of JSON
    random      answers in which nothing repeats, at batch 1, 8 and 32, as the model itself draws them; `wrong` proposes
                four drafts in each step, of which hardly one is ever right, and `none` is another engine without
                speculation: how much two that do the same differ
    draft       a draft model of a tenth of the size of 0.6B, and answers of which it foresees 70 %, at batch 1

The models have random weights; but for `random`, a logits processor has them give the answers, on all sides, so that
what repeats is what repeats in real texts; on a GPU, no step begins before the one before it is over then. Only
decoding is measured: from the first token to the last. Ratios are of figures of the same turn; medians over
`--repeats`, each with other texts. The tokens of the sides must be the texts'.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import in_turn
from benchmarks.harness.models import make_random_model
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from benchmarks.speculation import forced
from benchmarks.speculation.texts import LOADS, Text, Words
from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from common.engine.messages import AddRequest
from common.types import RequestId, SamplingParams

CONTROL = "none"  # the same as off
OFF, RIGHT, WRONG = "off", f"{forced.__name__}:right", f"{forced.__name__}:wrong"
SECTIONS = ("verify", "repetitive", "random", "draft")
BATCHES = (1, 8, 32)
_DRAFT_MODELS = {"0.6B": "60M"}  # a tenth of the size
_FORESEEN = 0.7
_KV_TOKENS = 32 * 1024
_BLOCK_SIZE = 16


class Run(NamedTuple):
    """The time and the counts of the answers to a batch."""

    tokens: list[list[int]]
    seconds: float  # from when all have their first token to the last
    num_steps: int  # in that time, as are the others
    num_generated: int
    num_verified: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        """The rate of all requests together."""
        return self.num_generated / self.seconds


class Engine:
    """One side."""

    def __init__(
        self, model: Path, dtype: str, speculative: str, max_num_seqs: int, *, has_answers: bool = True
    ) -> None:
        self.has_answers = has_answers
        processors = [forced.NAME] if has_answers else []
        config = EngineConfig(
            model=ModelConfig(model=str(model), dtype=cast("DType", dtype), logits_processors=processors),
            cache=CacheConfig(enable_prefix_caching=False, num_blocks=_KV_TOKENS // _BLOCK_SIZE),
            scheduler=SchedulerConfig(target_itl_ms=None, max_num_seqs=max_num_seqs),
            speculation=SpeculationConfig(speculative=None if speculative == OFF else speculative),
        )
        self._client = InprocClient(config)
        self.vocab_size = self._client.spec.vocab_size
        self._num_requests = 0

    def run(self, texts: Sequence[Text], num_tokens: int) -> Run:
        """Answers a batch, each with so many tokens."""
        client, tokens = self._client, dict[RequestId, list[int]]()
        for text in texts:
            name = str(self._num_requests)
            self._num_requests += 1
            tokens[RequestId(name)] = []
            if self.has_answers:  # as many more as a draft may look ahead
                forced.ANSWERS[name] = [*text.answer[: num_tokens + 1], *[0] * forced.NUM_DRAFTS * 4]
                own: dict[str, Any] = {"temperature": 0.0, "vllm_xargs": {"answer": name}}
            else:
                own = {"seed": self._num_requests}
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **own)
            client.add_request(AddRequest(request_id=RequestId(name), prompt_token_ids=text.prompt, sampling=params))
        num_steps, num_before, began, before = 0, 0, 0.0, client.stats().drafts
        while client.has_work:
            outputs = client.step()
            for output in outputs.outputs:
                tokens[output.request_id].extend(token.token_id for token in output.tokens)
            if began:
                num_steps += 1
            elif all(tokens.values()):
                num_before, before = sum(map(len, tokens.values())), client.stats().drafts
                began = time.perf_counter()
        seconds, after = time.perf_counter() - began, client.stats().drafts
        forced.ANSWERS.clear()
        return Run(
            list(tokens.values()),
            seconds,
            num_steps,
            sum(map(len, tokens.values())) - num_before,
            after.num_verified - before.num_verified,
            after.num_accepted - before.num_accepted,
        )

    def close(self) -> None:
        """Gives the model's memory back."""
        self._client.close()


@contextlib.contextmanager
def engines(
    model: Path, dtype: str, methods: Sequence[str], max_num_seqs: int, *, has_answers: bool = True
) -> Iterator[dict[str, Engine]]:
    """One per method, and one without any. `has_answers`: the answers are those of texts."""
    with contextlib.ExitStack() as stack:
        found = {}
        for method in (OFF, *methods):
            found[method] = Engine(model, dtype, method, max_num_seqs, has_answers=has_answers)
            stack.callback(found[method].close)
        yield found
    gc.collect()


def measure_load(
    sides: dict[str, Engine], load: str, batch: int, num_tokens: int, repeats: int
) -> list[dict[str, Run]]:
    """`turns_of` requests of one of the LOADS."""
    batches = []
    for repeat in range(repeats + 1):
        words = Words(sides[OFF].vocab_size)
        batches.append([_long_enough(load, words, 1000 * repeat + number, num_tokens) for number in range(batch)])
    return turns_of(sides, batches, num_tokens)


def turns_of(sides: dict[str, Engine], batches: Sequence[Sequence[Text]], num_tokens: int) -> list[dict[str, Run]]:
    """Runs of each side, turn by turn, after the first batch, which is no part of it. Raises RuntimeError if tokens
    differ."""
    turns = []
    for repeat, texts in enumerate(batches):
        runs = {name: side.run(texts, num_tokens) for name, side in in_turn(sides.items(), repeat)}
        expected = [text.answer[:num_tokens] for text in texts]
        if any(sides[name].has_answers and run.tokens != expected for name, run in runs.items()):
            raise RuntimeError("tokens differ from the answers")
        turns.append(runs)
    return turns[1:]


def _foreseen(model: Path, dtype: str, num_texts: int, num_tokens: int) -> list[Text]:
    """Texts with answers of which the model would say 70 % of the tokens itself, after what comes before them."""
    texts = []
    with contextlib.closing(Engine(model, dtype, OFF, 1)) as engine:
        for seed in range(num_texts):
            numbers = random.Random(seed)
            prompt, answer = LOADS["random"](Words(engine.vocab_size), seed)
            asked = [each if numbers.random() > _FORESEEN else forced.FREE for each in answer]
            (said,) = engine.run([Text(prompt, asked)], num_tokens).tokens
            texts.append(Text(prompt, said))
    return texts


def _long_enough(load: str, words: Words, seed: int, num_tokens: int) -> Text:
    """A text whose answer has as many tokens as are generated."""
    for attempt in range(100):
        text = LOADS[load](words, seed + 100_000 * attempt)
        if len(text.answer) > num_tokens:
            return text
    raise RuntimeError(f"{load}: no answer has {num_tokens} tokens; use fewer")


def rows(model: str, dtype: str, load: str, batch: int, turns: Sequence[dict[str, Run]]) -> Iterator[str]:
    """Yields rows of a table: one per method."""
    for name in [each for each in sorted(turns[0]) if each != OFF]:
        off, on = (statistics.median(turn[each].tokens_per_s for turn in turns) for each in (OFF, name))
        ratios = [turn[name].tokens_per_s / turn[OFF].tokens_per_s for turn in turns]
        verified, accepted, steps, generated = (
            sum(getattr(turn[name], field) for turn in turns)
            for field in ("num_verified", "num_accepted", "num_steps", "num_generated")
        )
        share = f"{accepted / verified:.0%}" if verified else "none verified"
        figures = (f"{off:.1f}", f"{on:.1f}", spread(ratios, ".2f"), share, f"{generated / steps / batch:.2f}")
        yield row(model, dtype, load, batch, _short(name), *figures)


def _short(method: str) -> str:
    """Without paths."""
    name, _, option = method.partition(":")
    return option if name == forced.__name__ else name


def verify_row(model: str, dtype: str, turns: Sequence[dict[str, Run]]) -> str:
    """Returns a row of the first table."""
    off, on = ([turn[name].seconds / turn[name].num_steps * 1e3 for turn in turns] for name in (OFF, RIGHT))
    ratios = [late / early for early, late in zip(off, on, strict=True)]
    drafts = statistics.median(turn[RIGHT].num_verified / turn[RIGHT].num_steps for turn in turns)
    medians = (f"{statistics.median(each):.2f}" for each in (off, on))
    return row(model, dtype, *medians, spread(ratios, ".2f"), f"{drafts:.2f}")


def measure(directory: Path, args: argparse.Namespace) -> Iterator[str]:
    """The lines of the report, as they come."""
    models = {name: make_random_model(directory, name) for name in args.models}
    cases = [(name, dtype) for name in models for dtype in args.dtypes]
    if "verify" in args.sections:
        yield from ("", "## Steps that verify", "")
        yield from table("model | dtype | decode, ms | with drafts, ms | ratio | drafts")
        for name, dtype in cases:
            with engines(models[name], dtype, [RIGHT], 1) as sides:
                yield verify_row(name, dtype, measure_load(sides, "random", 1, args.tokens, args.repeats))
    columns = "model | dtype | load | batch | method | off, tokens/s | on, tokens/s | ratio | right | tokens per step"
    if "repetitive" in args.sections:
        yield from ("", "## Texts that repeat", "", *table(columns))
        for name, dtype in cases:
            with engines(models[name], dtype, ["ngram", "suffix"], 1) as sides:
                for load in ("code edit", "retrieval", "JSON"):
                    yield from rows(name, dtype, load, 1, measure_load(sides, load, 1, args.tokens, args.repeats))
    if "random" in args.sections:
        yield from ("", "## Texts that do not", "", *table(columns))
        for name, dtype in cases:
            with engines(
                models[name], dtype, ["ngram", "suffix", WRONG, CONTROL], max(args.batches), has_answers=False
            ) as sides:
                for batch in args.batches:
                    turns = measure_load(sides, "random", batch, args.tokens, args.repeats)
                    yield from rows(name, dtype, "random", batch, turns)
    if "draft" in args.sections:
        yield from ("", "## A draft model", "", *table(columns))
        for name, dtype in cases:
            if name not in _DRAFT_MODELS:
                continue
            draft = make_random_model(directory, _DRAFT_MODELS[name])
            batches = [[text] for text in _foreseen(draft, dtype, args.repeats + 1, args.tokens)]
            with engines(models[name], dtype, [f"draft:model={draft},depth=4"], 1) as sides:
                yield from rows(name, dtype, "70 % foreseen", 1, turns_of(sides, batches, args.tokens))


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.speculation", __doc__, repeats=3)
    parser.add_argument("--models", nargs="+", choices=["100M", "0.6B"], default=["100M"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="of random texts")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    args = parser.parse_args()
    page = Page("Speculation", "`python -m benchmarks.speculation`; see its `--help`.", describe_torch_machine())
    with tempfile.TemporaryDirectory() as scratch:
        packages = Path(scratch) / "packages"
        packages.mkdir()
        forced.install(packages)
        for line in measure(Path(scratch), args):
            page.add(line)
    page.write(args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
