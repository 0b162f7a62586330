"""The parts of an answer to a chat: reasoning, text, tool calls."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from common.errors import InvalidRequestError
from common.tokenization import Tokenizer
from common.types import FinishReason
from router.dispatching.text_generation import TextDelta
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.replies.markers import SPACES
from router.replies.reasoning import Place, ReasoningStyle, find_reasoning_style
from router.replies.splits import Split, Splitter
from router.replies.tools.base import ToolCall, ToolParser, Tools
from router.replies.tools.json_array import JsonArrayParser
from router.replies.tools.registry import find_tool_parser
from router.requests.request import STRUCTURED, ChatPrompt, Draft, GenerationRequest

logger = logging.getLogger(__name__)

_AT_ONCE = 4096  # characters, or tokens, of an answer that is resumed; some milliseconds
_NUM_END_TOKENS = 16  # of a prompt, enough for a tag
_BUDGET, _NO_BOUND = "thinking_token_budget", -1
_NO_BUDGET: dict[str, Any] = {_BUDGET: None, "thinking_start_token_ids": (), "thinking_end_token_ids": ()}


class Text(NamedTuple):
    """Text of the answer proper."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning."""

    text: str


class Call(NamedTuple):
    """A complete tool call."""

    number: int  # within the answer, from 0 on
    call_id: str
    name: str
    arguments: str  # a JSON object


Part = Text | Reasoning | Call


class ReplyOptions(NamedTuple):
    """The request's options for parsing its answers."""

    tools: Tools = MappingProxyType({})  # those that may be called
    must_call: bool = False  # the answer is a JSON array of calls
    max_calls: int | None = None
    separates_reasoning: bool = True
    shows_reasoning: bool = True
    budget_needs_reasoning: bool = True  # False: a model without reasoning keeps any budget


class ReplyParsing:
    """How the served model's answers are parsed."""

    def __init__(self, tokenizer: Tokenizer, *, tool_parser: str, reasoning_parser: str) -> None:
        """The settings of these names. Raises ConfigError."""
        template = tokenizer.chat_template_source
        tool_name, self._tool_parser = find_tool_parser(tool_parser, template)
        reasoning_name, self._reasoning = find_reasoning_style(reasoning_parser, template)
        self._tokenizer = tokenizer
        chosen = tool_name, tool_parser, reasoning_name, reasoning_parser
        logger.info(
            "parsers of answers: tool calls %s (--tool-parser %s), reasoning %s (--reasoning-parser %s)", *chosen
        )

    def check(self, options: ReplyOptions) -> None:
        """Raises InvalidRequestError for tools where calls are not parsed."""
        if options.tools and not options.must_call and self._tool_parser is None:
            problem = "the model's chat template has no calls that the router can parse, or --tool-parser is none"
            raise InvalidRequestError(f"tools is not supported: {problem}", param="tools")

    async def prepare(
        self, draft: Draft, options: ReplyOptions, prepare: Callable[[Draft], Awaitable[GenerationRequest]]
    ) -> GenerationRequest:
        """Has `prepare` make a request of a draft whose answers are parsed in this way. Raises InvalidRequestError."""
        self.check(options)
        style = self._budgeted_style(draft, options)
        spelled_ids = self.spelled_ids(options)
        request = await prepare(replace(draft, spelled_ids=spelled_ids) if spelled_ids else draft)
        if request.sampling.thinking_token_budget is None:
            return request
        budget = {} if style is None else self._budget(request, style, is_chat=isinstance(draft.prompt, ChatPrompt))
        return replace(request, sampling=msgspec.structs.replace(request.sampling, **(_NO_BUDGET | budget)))

    def _budgeted_style(self, draft: Draft, options: ReplyOptions) -> ReasoningStyle | None:
        """How the reasoning is marked that has a budget; None: it has none. Raises InvalidRequestError for one that
        cannot be kept to."""
        budget = draft.sampling.get(_BUDGET)
        if budget in (None, _NO_BOUND) or draft.sampling.get(STRUCTURED) is not None:
            return None  # constrained answers have no reasoning
        if self._reasoning is None:
            if not options.budget_needs_reasoning:
                return None
            problem = "the model's chat template has no reasoning that the router knows, or --reasoning-parser is none"
            raise InvalidRequestError(f"{_BUDGET} is not supported: {problem}", param=_BUDGET)
        for tag in (self._reasoning.opening, self._reasoning.closing):
            if not self._tokenizer.tag_ids(tag):
                problem = f"the model's vocabulary has no token {tag}"
                raise InvalidRequestError(f"{_BUDGET} is not supported: {problem}", param=_BUDGET)
        return self._reasoning

    def _budget(self, request: GenerationRequest, style: ReasoningStyle, *, is_chat: bool) -> dict[str, Any]:
        """The parameters that keep the request's answer to its budget; empty if it has no reasoning."""
        place = style.place_after(self._end_of(request))
        if place is Place.AFTER:
            return {}
        is_within = place is Place.WITHIN or (style.is_assumed and is_chat)
        return {
            _BUDGET: request.sampling.thinking_token_budget,
            "thinking_start_token_ids": () if is_within else self._tokenizer.tag_ids(style.opening),
            "thinking_end_token_ids": self._tokenizer.tag_ids(style.closing),
        }

    def _end_of(self, request: GenerationRequest) -> str:
        """Text with which its prompt ends."""
        return self._tokenizer.decode(request.prompt_token_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)

    def spelled_ids(self, options: ReplyOptions) -> frozenset[int]:
        """Special tokens that the parsers must see."""
        markers: list[str] = []
        if options.tools and not options.must_call and self._tool_parser is not None:
            markers += self._tool_parser.markers
        if options.separates_reasoning and self._reasoning is not None:
            markers += self._reasoning.markers
        return self._tokenizer.special_ids_of(markers) if markers else frozenset()

    def parser_for(
        self, request: GenerationRequest, options: ReplyOptions, *, always: bool = False
    ) -> ReplyParser | None:
        """Returns the parser of one answer to this request; None, unless there must `always` be one: its text is all
        content."""
        family = self._tool_parser or ToolParser
        finder = JsonArrayParser if options.must_call else self._tool_parser
        tools = finder(options.tools) if options.tools and finder is not None else None
        splitter = None
        if options.separates_reasoning and self._reasoning is not None:
            splitter = self._reasoning.splitter(self._end_of(request))
        if tools is None and splitter is None and not always:
            return None
        return ReplyParser(tools, splitter, options, family.call_id, _id_seed(request))


class ReplyParser:
    """Parses one answer. What it returns for the text up to some token does not depend on how that text was cut, so a
    stream that is resumed goes on exactly."""

    def __init__(
        self,
        tools: ToolParser | None,
        splitter: Splitter | None,
        options: ReplyOptions,
        call_id: Callable[[str], str],
        id_seed: bytes,
    ) -> None:
        """`call_id`: see ToolParser; `id_seed`: makes the calls' ids differ."""
        self._tools = tools
        self._splitter = splitter
        self._options = options
        self._call_id = call_id
        self._id_seed = id_seed
        self._reasoning = _Trimmed(drops_start=True)
        self._text = _Trimmed()
        self.num_calls = 0
        self._num_reasoning_tokens = 0

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None: it is not told apart."""
        return None if self._splitter is None else self._num_reasoning_tokens

    async def replay(self, text: str, offsets: Sequence[int], tenant: Tenant) -> None:
        """Takes what the client has already. If that is much, others have their turn in between."""
        for start in range(0, len(text), _AT_ONCE):
            if start:
                await others_turn(tenant)
            self._parse(text[start : start + _AT_ONCE])
        for start in range(0, len(offsets), _AT_ONCE):
            if start:
                await others_turn(tenant)
            self._count(offsets[start : start + _AT_ONCE])

    def take(self, delta: TextDelta) -> list[Part]:
        """Takes the next delta. Returns what the answer gains."""
        parts = self._parse(delta.text)
        if delta.finish_reason is not None:
            parts += self._finish(delta.finish_reason)
        self._count(delta.text_offsets)
        return parts

    def finish_reason(self, reason: FinishReason | None) -> FinishReason | None:
        """Why the answer ended whose generation ended for this `reason`."""
        return FinishReason.TOOL_CALLS if reason is FinishReason.STOP and self.num_calls else reason

    def finish_label(self, reason: FinishReason | None) -> str | None:
        """`finish_reason` of the answer, as HTTP has it."""
        ending = self.finish_reason(reason)
        return None if ending is None else ending.label

    def _parse(self, text: str) -> list[Part]:
        if self._splitter is None:
            return self._parse_rest(text)
        return self._parse_splits(self._splitter.push(text))

    def _parse_splits(self, splits: Sequence[Split]) -> list[Part]:
        parts: list[Part] = []
        for split in splits:
            parts += self._reasoned(split)
            if split.is_cut:
                self._text.cut()
            parts += self._parse_rest(split.rest)
        return parts

    def _parse_rest(self, text: str) -> list[Part]:
        """Text of the answer proper, and calls in it."""
        if not text:
            return []
        return self._named([text] if self._tools is None else self._tools.push(text))

    def _finish(self, reason: FinishReason) -> list[Part]:
        parts: list[Part] = []
        if self._splitter is not None:
            parts += self._parse_splits(self._splitter.finish())
        if self._tools is not None:
            rest = self._tools.finish()
            if self._options.must_call and reason is not FinishReason.STOP:  # the answer was cut off within a call
                rest = [part for part in rest if not isinstance(part, str)]
            parts += self._named(rest)
        return parts + _text_of(self._text.finish())

    def _reasoned(self, split: Split) -> list[Part]:
        text = self._reasoning.push(split.reasoning) if split.reasoning else ""
        return [Reasoning(text)] if text and self._options.shows_reasoning else []

    def _named(self, found: Sequence[str | ToolCall]) -> list[Part]:
        parts: list[Part] = []
        for part in found:
            if self.num_calls == self._options.max_calls:
                break  # what follows is dropped
            if isinstance(part, str):
                parts += _text_of(self._text.push(part))
                continue
            self._text.cut()
            parts.append(Call(self.num_calls, self._new_id(), part.name, part.arguments))
            self.num_calls += 1
        return parts

    def _new_id(self) -> str:
        return self._call_id(hashlib.sha256(self._id_seed + b"%d" % self.num_calls).hexdigest())

    def _count(self, offsets: Sequence[int]) -> None:
        """Counts tokens of the reasoning as soon as it is certain of them."""
        if self._splitter is not None:
            self._num_reasoning_tokens += self._splitter.count(offsets)


class _Trimmed:
    """Text without white space beside tags and calls."""

    def __init__(self, *, drops_start: bool = False) -> None:
        self._drops_start = drops_start
        self._held: list[str] = []  # white space that may stand before a tag

    def push(self, text: str) -> str:
        """Takes text. Returns what is certain."""
        if self._drops_start:
            text = text.lstrip(SPACES)
            self._drops_start = not text
        certain = text.rstrip(SPACES)
        if not certain:
            if text:
                self._held.append(text)
            return ""
        certain_with_spaces = "".join([*self._held, certain])
        self._held = [text[len(certain) :]]
        return certain_with_spaces

    def cut(self) -> None:
        """A tag or a call stands here."""
        self._held.clear()
        self._drops_start = True

    def finish(self) -> str:
        """The text has ended. Returns the rest."""
        return "".join(self._held)


def _text_of(text: str) -> list[Part]:
    return [Text(text)] if text else []


def _id_seed(request: GenerationRequest) -> bytes:
    """The same if the request is resumed; differs from turn to turn, whatever ids and seeds the client gives."""
    return b"%b %d %b " % (request.identity(), request.sampling.settled_seed, request.request_id.encode())
