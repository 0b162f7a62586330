"""Data sets: which prompts are sent, how long the answers are, and which of them form a conversation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from common.errors import ConfigError
from common.recorded_trace import RECORDED_BLOCK, problem_of, read_recorded
from loadgen.arrivals import arrival_times, parse_rate
from loadgen.prompts import WordSource

DatasetName = Literal["random", "shared-prefix", "multi-turn", "file", "trace"]
_NEED_A_FILE = ("file", "trace")


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Data set: what is sent. Names and defaults are those of `vllm bench serve` where it has the option."""

    TOPICS = {
        "Arrivals": ("num_prompts", "request_rate", "burstiness", "max_concurrency", "num_warmups", "seed"),
        "Requests": ("ignore_eos", "extra_body"),
    }

    dataset_name: Annotated[
        DatasetName,
        Meta(
            description="random: prompts with nothing in common. shared-prefix: each begins with one of some prefixes. "
            "multi-turn: conversations, each turn with all before it. file: prompts of a file. trace: recorded "
            "requests in Mooncake's format."
        ),
    ] = "random"
    dataset_path: Annotated[str, Meta(description="JSON lines of the data sets file and trace.")] = ""
    input_len: Annotated[int, Meta(ge=1, le=2**24, description="Tokens of a prompt, or of what a turn adds.")] = 1024
    output_len: Annotated[int, Meta(ge=1, le=2**24, description="Most tokens of an answer.")] = 128
    range_ratio: Annotated[
        float, Meta(ge=0, lt=1, description="Lengths are uniform in length * (1 - ratio) to length * (1 + ratio).")
    ] = 0.0
    prefix_len: Annotated[int, Meta(ge=1, le=2**24, description="shared-prefix: tokens before those of input_len.")] = (
        256
    )
    num_prefixes: Annotated[int, Meta(ge=1, description="shared-prefix: how many there are.")] = 10
    turns: Annotated[int, Meta(ge=1, description="multi-turn: requests of a conversation.")] = 4
    think_time_s: Annotated[float, Meta(ge=0, description="multi-turn: seconds from an answer to the next turn.")] = 0.0
    num_prompts: Annotated[int, Meta(ge=1, le=10**7, description="Requests, at most so many as a file has.")] = 100
    request_rate: Annotated[
        str | None,
        Meta(
            description="Requests (conversations) begun per second, whatever became of those before, or inf: all at "
            "once; default: inf, and for a trace its own times, which a rate stretches."
        ),
    ] = None
    burstiness: Annotated[
        float, Meta(ge=0.05, le=1e6, description="Shape of the gamma distributed gaps; 1: Poisson, below: bursts.")
    ] = 1.0
    max_concurrency: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Requests (conversations) under way at most.")
    ] = None
    num_warmups: Annotated[
        int, Meta(ge=0, description="Requests before the measured ones; of a file or a trace its first, again.")
    ] = 0
    seed: Annotated[int, Meta(description="Of prompts, lengths and arrivals.")] = 0
    ignore_eos: Annotated[
        bool, Meta(description="Answers have all their tokens; a field of vLLM and Baton, not of OpenAI.")
    ] = False
    extra_body: Annotated[str, Meta(description="JSON object of further fields: '{\"temperature\": 0}'.")] = ""

    def __post_init__(self) -> None:
        if (self.dataset_name in _NEED_A_FILE) != bool(self.dataset_path):
            problem = "required" if not self.dataset_path else "only"
            raise ValueError(f"--dataset-path: {problem} with --dataset-name file or trace")
        if self.request_rate is not None:
            parse_rate(self.request_rate)
        self.request_fields()

    @property
    def rate(self) -> float | None:
        """Requests per second; None: all at once, or as a trace has it."""
        return None if self.request_rate is None else parse_rate(self.request_rate)

    def request_fields(self) -> dict[str, Any]:
        """Returns what each request's body has besides prompt and length. Raises ValueError."""
        fields: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        if self.extra_body:
            try:
                fields |= msgspec.json.decode(self.extra_body, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"--extra-body: expected a JSON object: {problem_of(error)}") from error
        return fields


class Turn(NamedTuple):
    """One request. What it says follows the turns before it."""

    text: str
    num_output_tokens: int | None  # None: the endpoint's default
    messages: Sequence[Mapping[str, Any]] = ()  # a chat, instead of `text`
    wait_s: float = 0.0  # after the answer before


class Conversation(NamedTuple):
    """Turns that follow each other."""

    start_s: float | None  # after the beginning of the run; None: as soon as possible
    turns: Sequence[Turn]


def build_conversations(options: LoadOptions, source: WordSource) -> list[Conversation]:
    """Returns what is sent, in the order of its times. Raises ConfigError for a file that is no good."""
    if options.dataset_name == "trace":
        return _recorded(options, source)
    turns = _read_prompts(options) if options.dataset_name == "file" else _made_up(options, source)
    if options.rate is None:
        return [Conversation(None, each) for each in turns]
    starts = arrival_times(len(turns), options.rate, options.burstiness, options.seed)
    return [Conversation(start_s, each) for start_s, each in zip(starts, turns, strict=True)]


def _made_up(options: LoadOptions, source: WordSource) -> list[list[Turn]]:
    lengths = random.Random(f"{options.seed} lengths")
    made = [_made_up_turn(options, source, lengths, number) for number in range(options.num_prompts)]
    size = options.turns if options.dataset_name == "multi-turn" else 1
    return [made[start : start + size] for start in range(0, len(made), size)]


def _made_up_turn(options: LoadOptions, source: WordSource, lengths: random.Random, number: int) -> Turn:
    spread = options.range_ratio
    num_tokens, num_output = (_between(lengths, mean, spread) for mean in (options.input_len, options.output_len))
    words = source.words_for(num_tokens, f"{options.seed} prompt {number}")
    if options.dataset_name == "shared-prefix":
        prefix = lengths.randrange(options.num_prefixes)
        words = source.prompt(source.words_for(options.prefix_len, f"{options.seed} prefix {prefix}"), words)
    else:
        words = source.prompt(words)
    is_first = options.dataset_name != "multi-turn" or number % options.turns == 0
    return Turn(words, num_output, wait_s=0.0 if is_first else options.think_time_s)


def _between(lengths: random.Random, mean: int, spread: float) -> int:
    if not spread:
        return mean
    return lengths.randint(max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread))))


class _Line(msgspec.Struct):
    """A line of a file of prompts; other fields are ignored."""

    prompt: str = ""
    messages: list[dict[str, Any]] = []
    output_len: Annotated[int, Meta(ge=1, le=2**24)] | None = None

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("needs either prompt or messages")


def _read_prompts(options: LoadOptions) -> list[list[Turn]]:
    path = Path(options.dataset_path)
    try:
        with path.open("rb") as lines:
            read = list(itertools.islice(_parsed(lines, path), options.num_prompts))
    except OSError as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error.strerror}", param="dataset_path") from error
    if not read:
        raise ConfigError(f"--dataset-path: {path} has no prompt", param="dataset_path")
    return [[Turn(line.prompt, line.output_len or options.output_len, line.messages)] for line in read]


def _parsed(lines: Iterable[bytes], path: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = problem_of(error)
            raise ConfigError(f"--dataset-path: {path}, line {number}: {problem}", param="dataset_path") from error


def _recorded(options: LoadOptions, source: WordSource) -> list[Conversation]:
    read = read_recorded(Path(options.dataset_path), options.num_prompts, option="dataset-path")
    if not read:
        raise ConfigError(f"--dataset-path: {options.dataset_path} has no request", param="dataset_path")
    span_s = (read[-1].timestamp - read[0].timestamp) / 1e3
    stretch = (len(read) - 1) / span_s / options.rate if options.rate and span_s else 1.0
    is_timed = options.request_rate is None or options.rate is not None
    conversations = []
    for number, request in enumerate(read):
        parts, left = [], request.input_length
        for hash_id in request.hash_ids:  # equal ids, equal text; the last may stand for less than a block
            parts.append(source.words_for(min(left, RECORDED_BLOCK), f"{options.seed} block {hash_id}"))
            left -= RECORDED_BLOCK
            if left <= 0:
                break
        if left > 0:
            parts.append(source.words_for(left, f"{options.seed} rest {number}"))
        start_s = (request.timestamp - read[0].timestamp) / 1e3 * stretch if is_timed else None
        conversations.append(Conversation(start_s, [Turn(source.prompt(*parts), request.output_length)]))
    return conversations
