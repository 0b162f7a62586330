"""The base of every parser of tool calls, and the reader that most are written with.

A parser gets the text of one answer piece by piece, and returns as much of it as is certain: text that is no call, and
calls that are complete. Where the text is cut makes no difference to what all pieces together give. A call counts as
soon as it is complete, whatever follows; what begins like a call and turns out to be none, or never ends, is text. So
the arguments of a call come all at once.

A parser takes time linear in the text: what was read as the beginning of a call is not read again when it is none.
It holds at most one unfinished call, of at most `MAX_CALL_CHARS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, field

from router.replies.markers import SPACES, overlap_of
from router.replies.tools.json_scanner import JsonScanner

MAX_CALL_CHARS = 2**20
MAX_NAME_CHARS = 256
_MAX_SPACES = 256  # in a row within a call

_Result = TypeVar("_Result")
_Reading = Generator[None, None, _Result]  # suspended where the text so far ends


class ToolCall(NamedTuple):
    """A complete call."""

    name: str
    arguments: str  # a JSON object


Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by name; an empty one if none was given."""

Part = str | ToolCall
"""Text that is no call, or a call."""


class ToolParser(ABC):
    """Finds the calls in one answer."""

    markers: ClassVar[tuple[str, ...]] = ()  # special tokens that it must see, which are left out of texts otherwise

    def __init__(self, tools: Tools) -> None:
        """`tools`: those that the request has."""
        self.tools = tools

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Takes the next piece. Returns what is certain."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The answer has ended. Returns the rest. Called once, after the last push."""

    @classmethod
    def call_id(cls, digest: str) -> str:
        """Id of a call; `digest`: 64 hexadecimal digits that differ from call to call."""
        return f"call_{digest[:24]}"


class _CallObject(msgspec.Struct):
    """A call as most families write it."""

    name: str
    arguments: Raw = field(default_factory=Raw)
    parameters: Raw = field(default_factory=Raw)


_decoder = msgspec.json.Decoder(_CallObject)


def read_call(text: str) -> ToolCall | None:
    """A JSON object as a call; None: it is none."""
    try:
        call = _decoder.decode(text)
        arguments = bytes(call.arguments) or bytes(call.parameters) or b"null"
        if arguments.startswith(b'"'):  # an object within a text
            arguments = msgspec.json.decode(arguments, type=str).strip().encode()
            msgspec.json.decode(arguments, type=Raw)  # nothing is built of it
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if arguments == b"null":
        arguments = b"{}"
    if not 0 < len(call.name) <= MAX_NAME_CHARS or not arguments.startswith(b"{"):
        return None
    return ToolCall(call.name, arguments.decode())


class ReadingParser(ToolParser):
    """A parser that reads the answer from its beginning to its end in `_read`, which is suspended wherever the text so
    far ends."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._piece = ""
        self._at = 0  # what of the piece is read
        self._has_ended = False
        self._parts: list[Part] = []
        self._candidate: list[str] | None = None  # text read since `_begin`, but for that of the current piece
        self._candidate_from = 0  # where that of the current piece begins
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        """See ToolParser."""
        if self._candidate is not None:
            self._candidate.append(self._piece[self._candidate_from :])
        self._piece, self._at, self._candidate_from = text, 0, 0
        return self._resume()

    def finish(self) -> list[Part]:
        """See ToolParser."""
        self._has_ended = True
        return self._resume()

    @abstractmethod
    def _read(self) -> _Reading[None]:
        """Reads the answer to its end."""

    def _read_calls(self, opening: str, take_call: Callable[[], _Reading[ToolCall | None]]) -> _Reading[None]:
        """Reads the answer to its end, where each call begins with `opening` and `take_call` reads the rest of it, or
        returns None. What is no call stays text."""
        while (yield from self._take_text_until(opening)):
            call = yield from take_call()
            if call is None:
                self._give_back()
            else:
                self._add(call)
                self._drop()

    def _resume(self) -> list[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def _has_more(self) -> _Reading[bool]:
        """Waits for a character. False: the answer has ended."""
        while self._at == len(self._piece):
            if self._has_ended:
                return False
            yield
        return True

    def _sees(self, characters: str) -> _Reading[bool]:
        """Whether the next character is one of these."""
        return (yield from self._has_more()) and self._piece[self._at] in characters

    def _takes(self, expected: str) -> _Reading[bool]:
        """Reads this, as far as it is there; False: it is not there whole."""
        for character in expected:
            if not (yield from self._sees(character)):
                return False
            self._at += 1
        return True

    def _skip_spaces(self) -> _Reading[None]:
        for _ in range(_MAX_SPACES):
            if not (yield from self._sees(SPACES)):
                return
            self._at += 1

    def _take_name(self) -> _Reading[str]:
        """Reads the name of a function; may be empty."""
        name: list[str] = []
        while len(name) < MAX_NAME_CHARS and (yield from self._has_more()):
            character = self._piece[self._at]
            if not (character.isalnum() or character in "_-."):
                break
            name.append(character)
            self._at += 1
        return "".join(name)

    def _take_up_to(self, marker: str, limit: int) -> _Reading[str | None]:
        """Reads text of at most `limit` characters and the marker after it. Returns the text; None: the marker does not
        come."""
        texts: list[str] = []
        held = ""  # what may be the beginning of the marker
        limit += len(marker)
        while limit > 0 and (yield from self._has_more()):
            end = min(len(self._piece), self._at + limit)
            limit -= end - self._at
            text = held + self._piece[self._at : end]
            found = text.find(marker)
            if found >= 0:
                self._at += found + len(marker) - len(held)
                return "".join([*texts, text[:found]])
            self._at = end
            num_certain = len(text) - overlap_of(text, marker)
            held = text[num_certain:]
            texts.append(text[:num_certain])
        return None

    def _take_object(self) -> _Reading[str | None]:
        """Reads a JSON object. None: there is none; what may be the beginning of one is read."""
        scanner, texts, num_chars = JsonScanner(), [], 0
        while not scanner.is_over and num_chars < MAX_CALL_CHARS and (yield from self._has_more()):
            start = self._at
            end = min(len(self._piece), start + MAX_CALL_CHARS - num_chars)
            self._at = scanner.scan(self._piece, start, end)
            texts.append(self._piece[start : self._at])
            num_chars += self._at - start
        return "".join(texts) if scanner.is_complete else None

    def _take_array(self) -> _Reading[None]:
        """Reads a JSON array of calls; each counts as it ends."""
        if not (yield from self._takes("[")):
            return self._give_back()
        while True:
            yield from self._skip_spaces()
            text = yield from self._take_object()
            call = None if text is None else read_call(text)
            if call is None:
                return self._give_back()
            self._add(call)
            yield from self._skip_spaces()
            if (yield from self._sees("]")):
                self._at += 1
                return self._drop()
            if not (yield from self._takes(",")):
                return self._give_back()

    def _take_text_until(self, *markers: str) -> _Reading[str]:
        """Reads text, then one of the markers, with which a candidate begins. Returns it; empty: the answer ended
        first. No marker is part of another."""
        held = ""  # what may be the beginning of a marker
        while (yield from self._has_more()):
            text = held + self._piece[self._at :]
            found, marker = min(((text.find(each), each) for each in markers if each in text), default=(-1, ""))
            if marker:
                self._at += found + len(marker) - len(held)
                self._add(text[:found])
                self._begin(marker)
                return marker
            self._at = len(self._piece)
            num_certain = len(text) - max(overlap_of(text, each) for each in markers)
            held = text[num_certain:]
            self._add(text[:num_certain])
        self._add(held)
        return ""

    def _take_rest(self) -> _Reading[None]:
        """Reads text to the end of the answer."""
        while (yield from self._has_more()):
            self._add(self._piece[self._at :])
            self._at = len(self._piece)

    def _begin(self, already: str = "") -> None:
        """Begins to read a candidate for a call; `already`: the part that was just read."""
        self._candidate, self._candidate_from = [already], self._at

    def _drop(self) -> None:
        """Drops the text read since `_begin`."""
        self._candidate = None

    def _give_back(self) -> None:
        """Returns what was read since `_begin` to the text."""
        if self._candidate is not None:
            self._add("".join([*self._candidate, self._piece[self._candidate_from : self._at]]))
            self._drop()

    def _add(self, part: Part) -> None:
        """A part of the answer. After a call, what is read next may be what stands between calls."""
        if part:
            self._parts.append(part)
        if isinstance(part, ToolCall):
            self._begin()
