"""Tells a model's reasoning from its answer proper: the text between two tags at the beginning.

Families differ in who writes the opening tag. Many templates put it at the end of the prompt, so that the answer begins
within the reasoning; some also close it there, where the client has turned reasoning off. Where the prompt ends with
neither tag, the answer itself, or the family, decides.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from common.errors import ConfigError
from router.replies import harmony
from router.replies.markers import SPACES, overlap_of
from router.replies.splits import Split, Splitter, UnsettledTokens

AUTO, NONE = "auto", "none"
_MAX_SPACES = 64  # before the opening tag


class Place(enum.Enum):
    """The place at which the text so far ends."""

    START = enum.auto()  # the opening tag may come
    WITHIN = enum.auto()
    AFTER = enum.auto()


class ReasoningStyle(NamedTuple):
    """How a family marks its reasoning."""

    opening: str
    closing: str
    is_assumed: bool = False  # an answer begins with reasoning even if no tag opens it
    is_harmony: bool = False  # an answer is messages, of which some are reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen, which are special tokens in some vocabularies."""
        return harmony.MARKERS if self.is_harmony else (self.opening, self.closing)

    def splitter(self, prompt_end: str) -> Splitter:
        """Returns the splitter of one answer; `prompt_end`: text with which its prompt ends."""
        return harmony.HarmonySplitter(prompt_end) if self.is_harmony else ReasoningSplitter(self, prompt_end)

    def place_after(self, prompt_end: str) -> Place:
        """Returns the place at which an answer begins; `prompt_end`: text with which its prompt ends."""
        end = prompt_end.rstrip(SPACES)
        if end.endswith(self.opening):
            return Place.WITHIN
        return Place.AFTER if end.endswith(self.closing) else Place.START


_STYLES = {
    "deepseek_r1": ReasoningStyle("<think>", "</think>", is_assumed=True),
    "qwen3": ReasoningStyle("<think>", "</think>"),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "harmony": ReasoningStyle(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END, is_harmony=True),
}


def find_reasoning_style(setting: str, chat_template: str) -> tuple[str, ReasoningStyle | None]:
    """Name and style that --reasoning-parser says; none: reasoning is not told apart. Raises ConfigError."""
    name = _detect(chat_template) if setting == AUTO else setting
    if name == NONE:
        return NONE, None
    if name not in _STYLES:
        known = ", ".join((AUTO, NONE, *_STYLES))
        raise ConfigError(f"--reasoning-parser: there is no {name!r}; there are {known}", param="reasoning_parser")
    return name, _STYLES[name]


def _detect(chat_template: str) -> str:
    if "[/THINK]" in chat_template:
        return "mistral"
    if f"{harmony.CHANNEL}analysis" in chat_template:
        return "harmony"
    if "</think>" not in chat_template:
        return NONE
    return "deepseek_r1" if "<\uff5cAssistant\uff5c>" in chat_template else "qwen3"


class ReasoningSplitter:
    """See Splitter."""

    def __init__(self, style: ReasoningStyle, prompt_end: str) -> None:
        """`prompt_end`: text with which the prompt ends."""
        self._style = style
        self._place = style.place_after(prompt_end)
        self._held = ""  # text that is not certain
        self._num_chars = 0  # of the answer so far
        self._unsettled = UnsettledTokens()
        self._end: int | None = None  # characters of the answer up to the end of its reasoning; None: not known yet
        if self._place is Place.AFTER:
            self._leave(0)

    def push(self, text: str) -> list[Split]:
        """See Splitter."""
        was_open = self._end is None
        split = self._split(text)
        return [split._replace(is_cut=was_open and bool(self._end))]

    def finish(self) -> list[Split]:
        """See Splitter."""
        held, self._held = self._held, ""
        if self._place is Place.START:
            self._begin()
        if self._place is Place.WITHIN:
            self._leave(self._num_chars)
            return [Split(held, "")]
        return [Split("", held)]

    def count(self, offsets: Sequence[int]) -> int:
        """See Splitter."""
        if self._end is not None and not self._unsettled:
            return sum(offset < self._end for offset in offsets)
        self._unsettled.add(offsets)
        if self._end is None:  # what has come is reasoning, unless its opening tag may still come
            settled = self._num_chars if self._place is Place.WITHIN else 0
            return sum(num for _, num in self._unsettled.settle(settled))
        num_tokens = sum(num for _, num in self._unsettled.settle(self._end))
        self._unsettled.clear()
        return num_tokens

    def _split(self, text: str) -> Split:
        self._num_chars += len(text)
        text, self._held = self._held + text, ""
        if self._place is Place.START:
            text = self._look_for_opening(text)
        if self._place is Place.WITHIN:
            return self._look_for_closing(text)
        return Split("", text)

    def _look_for_opening(self, text: str) -> str:
        """Returns what follows the tag, or all if it does not come, or nothing while it may come."""
        start, opening = text.lstrip(SPACES), self._style.opening
        if start.startswith(opening):
            self._place = Place.WITHIN
            return start[len(opening) :]
        if opening.startswith(start) and len(text) - len(start) <= _MAX_SPACES:
            self._held = text
            return ""
        self._begin()
        return text

    def _look_for_closing(self, text: str) -> Split:
        closing = self._style.closing
        found = text.find(closing)
        if found < 0:
            num_certain = len(text) - overlap_of(text, closing)
            self._held = text[num_certain:]
            return Split(text[:num_certain], "")
        rest = text[found + len(closing) :]
        self._leave(self._num_chars - len(rest))
        return Split(text[:found], rest)

    def _begin(self) -> None:
        """Without an opening tag."""
        if self._style.is_assumed:
            self._place = Place.WITHIN
        else:
            self._leave(0)

    def _leave(self, end: int) -> None:
        self._place, self._end = Place.AFTER, end
