"""Answers in OpenAI's Harmony format, which gpt-oss models write: messages, each with a header and a channel.

    <|channel|>analysis<|message|>Hm.<|end|>                                            reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>   a call
    <|start|>assistant<|channel|>final<|message|>Yes.<|return|>                         text

The prompt ends with `<|start|>assistant`, or within a message. A recipient (`to=`) may stand on either side of the
channel. Text messages are joined by empty lines; calls are left for the parser of tools, in one form of header.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Sequence

from router.replies.markers import SPACES
from router.replies.splits import Split, UnsettledTokens

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

_MAX_HEADER = 512  # characters
_FINAL = (END, CALL, RETURN)
_HEADS = (START, CHANNEL, MESSAGE, "to=", *_FINAL)  # one of these stands between messages
_OF_BODY = (*_FINAL, START, CHANNEL)  # one of these ends a message
_ENDS = re.compile("|".join(map(re.escape, _OF_BODY)))
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BETWEEN = "\n\n"  # joins messages of one kind


class _Kind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class HarmonySplitter:
    """See Splitter."""

    def __init__(self, prompt_end: str) -> None:
        """`prompt_end`: text with which the prompt ends."""
        self._held = ""  # text that is not certain
        self._kind: _Kind | None = None  # of the message; None: its header may come
        self._has: set[_Kind] = set()  # kinds of messages so far
        self._num_taken = 0  # characters of the answer that are certain
        self._num_chars = 0  # of the answer so far
        self._spans: deque[tuple[int, int]] = deque()  # of the reasoning, in characters, from the last known token on
        self._reasoning_from = 0
        self._unsettled = UnsettledTokens()
        header = prompt_end.rpartition(START)[2]
        if MESSAGE in header:
            self._kind = _kind_of(header)

    def push(self, text: str) -> list[Split]:
        """See Splitter."""
        self._num_chars += len(text)
        text, self._held = self._held + text, ""
        splits: list[Split] = []
        while text:
            text = self._read_header(text, splits) if self._kind is None else self._read_body(text, splits)
        return splits

    def finish(self) -> list[Split]:
        """See Splitter. A header that is cut off is dropped."""
        splits: list[Split] = []
        held, self._held = self._held, ""
        if self._kind is not None or not any(marker in held for marker in MARKERS):
            self._give(held, splits)
        self._close(self._num_chars)
        return splits

    def count(self, offsets: Sequence[int]) -> int:
        """See Splitter."""
        self._unsettled.add(offsets)
        is_open = self._kind is _Kind.REASONING
        settled = self._num_taken if self._kind is None else self._num_chars
        spans = self._spans
        if is_open:
            spans.append((self._reasoning_from, settled))
        num_tokens = 0
        for offset, num in self._unsettled.settle(settled):
            while spans and spans[0][1] <= offset:
                spans.popleft()
            num_tokens += num if spans and spans[0][0] <= offset else 0
        if is_open:
            spans.pop()
        return num_tokens

    def _read_header(self, text: str, splits: list[Split]) -> str:
        """Returns what follows the header; holds the text while the rest of the header may come."""
        start = text.lstrip(SPACES)
        if end := next((end for end in _FINAL if start.startswith(end)), ""):
            self._num_taken += len(text) - len(start) + len(end)
            return start[len(end) :]
        found = text.find(MESSAGE, 0, _MAX_HEADER + 1)
        header = text[:found]
        may_be = any(start.startswith(head) or head.startswith(start) for head in _HEADS)
        if found < 0 and may_be and len(text) <= _MAX_HEADER:
            self._held = text
            return ""
        if found < 0 or not may_be or any(end in header for end in _FINAL):
            num_plain = len(text) - len(start) + 1  # characters that cannot be the beginning of another marker
            self._open(_Kind.TEXT, "", splits)
            self._give(text[:num_plain], splits)
            return text[num_plain:]
        self._open(_kind_of(header), header, splits)
        self._num_taken += found + len(MESSAGE)
        return text[found + len(MESSAGE) :]

    def _read_body(self, text: str, splits: list[Split]) -> str:
        """Returns what follows the message; nothing while it goes on. Holds what may begin its end."""
        found = _ENDS.search(text)
        if found is None:
            num_certain = len(text) - _overlap(text)
            self._give(text[:num_certain], splits)
            self._held = text[num_certain:]
            return ""
        self._give(text[: found.start()], splits)
        begins_next = found[0] in (START, CHANNEL)
        if not begins_next:
            self._num_taken += len(found[0])
        if self._kind is _Kind.CALL:
            splits.append(Split("", CALL))
        self._close(self._num_taken)
        return text[found.start() if begins_next else found.end() :]

    def _open(self, kind: _Kind, header: str, splits: list[Split]) -> None:
        """A message begins."""
        self._kind = kind
        self._reasoning_from = self._num_taken
        if kind is _Kind.CALL:
            splits.append(Split("", f"{CHANNEL}commentary to={recipient_of(header)}{MESSAGE}"))
        elif kind in self._has:
            splits.append(Split(_BETWEEN, "") if kind is _Kind.REASONING else Split("", _BETWEEN))
        self._has.add(kind)

    def _close(self, at: int) -> None:
        """The message ends here."""
        if self._kind is _Kind.REASONING:
            self._spans.append((self._reasoning_from, at))
        self._kind = None

    def _give(self, text: str, splits: list[Split]) -> None:
        self._num_taken += len(text)
        if text:
            splits.append(Split(text, "") if self._kind is _Kind.REASONING else Split("", text))


def _kind_of(header: str) -> _Kind:
    if recipient_of(header):
        return _Kind.CALL
    channel = _CHANNEL_NAME.search(header)
    return _Kind.REASONING if channel is not None and channel[1] == "analysis" else _Kind.TEXT


def recipient_of(header: str) -> str:
    """Whom a message with this header is to; empty: the user."""
    found = _RECIPIENT.search(header)
    return "" if found is None else found[1]


def _overlap(text: str) -> int:
    """Length of the end of `text` that a marker may begin with."""
    start = text.rfind("<", -max(map(len, _OF_BODY)) + 1)
    if start < 0:
        return 0
    end = text[start:]
    return len(end) if any(marker.startswith(end) for marker in _OF_BODY) else 0
