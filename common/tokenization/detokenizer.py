"""Token ids in, text out, piece by piece.

The text of a token depends on its neighbours: a character may be split over tokens. That is all with byte-level
tokenizers, and ByteLevelDetokenizer decodes their bytes as they come. Others do more, as sentencepiece, which drops the
space before the first word: WindowDetokenizer decodes a short window of recent tokens again for each token, and what is
new in it is the next piece. U+FFFD at the end of the window may be a character that is not complete yet; it is held
back.

Invariant: the pieces of all pushes and of `finish()`, joined, equal the decoding of all output ids. (The only
exception: where a decoder with byte fallback drops a whole run of bytes because a later one is invalid, pieces that
were already returned stay.)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from common.tokenization.tokenizer import Tokenizer

_MAX_WINDOW = 8  # tokens decoded again per token before the window is cut
_TAILS = range(4, 8)  # how many tokens remain of it; one of four consecutive bytes starts a character
_MAX_HELD = 3  # an incomplete character has at most three bytes, each of which may show as one U+FFFD
_REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Detokenises one request's output; O(1) amortised per token."""

    def push(self, token_id: int) -> str:
        """Takes the next output id. Returns the text that it completes, possibly none."""

    def finish(self) -> str:
        """Returns the text held back. Called once, after the last push."""


def create_detokenizer(
    tokenizer: Tokenizer,
    *,
    context: Sequence[int] = (),
    skip_special_tokens: bool = True,
    spelled_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """With the end of the prompt as `context`, the text continues the prompt's (a leading space is kept); without, it
    stands alone. `spelled_ids`: special tokens that are not skipped; not with a context."""
    kind = ByteLevelDetokenizer if tokenizer.decodes_bytes else WindowDetokenizer
    return kind(tokenizer, context, skip_special_tokens=skip_special_tokens, spelled_ids=spelled_ids)


class ByteLevelDetokenizer:
    """See Detokenizer. Of tokenizers whose text is that of their tokens' bytes."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool, spelled_ids: frozenset[int]
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - spelled_ids if skip_special_tokens else frozenset()
        self._decode = _Utf8Decoder(errors="replace").decode
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        return "" if token_id in self._skipped else self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """See Detokenizer."""
        return self._decode(b"", final=True)


class WindowDetokenizer:
    """See Detokenizer. Of any tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool, spelled_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._spelled_ids = spelled_ids
        self._window: list[int] = []  # the last tokens
        self._sent = ""  # text of the window that was already returned
        self._num_clean = 0  # leading tokens of the window whose text was returned
        if context:
            self._open_with(context)

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        if self._skip_special and not (self._tokenizer.is_visible(token_id) or token_id in self._spelled_ids):
            return ""
        if not self._tokenizer.token_bytes(token_id):  # outside the vocabulary
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._sent):  # byte fallback dropped a run: keep what was returned, go on after it
            del self._window[: self._num_clean]
            self._sent = ""
            self._num_clean = 0
            text = self._decode(self._window)
        held = _held_back(text)
        piece = text[len(self._sent) : len(text) - held]
        self._sent += piece
        if not held:
            self._num_clean = len(self._window)
        if len(self._window) > _MAX_WINDOW:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """See Detokenizer."""
        piece = self._decode(self._window)[len(self._sent) :]
        self._sent += piece
        return piece

    def _cut(self, text: str) -> None:
        """Drops leading tokens of the window that do not affect later text."""
        pending = len(text) - len(self._sent)
        for length in _TAILS:
            tail = self._decode(self._window[-length:])
            # The end of the text, but for a character that is cut or a prefix of first tokens. More than what is
            # pending: a visible token stays in front of it, so that nothing passes for the start.
            if _common_end(text, tail) > pending:
                self._num_clean = max(0, self._num_clean - (len(self._window) - length))
                del self._window[:-length]
                self._sent = tail[: len(tail) - pending]
                return

    def _open_with(self, context: Sequence[int]) -> None:
        """Fills the window with the end of the context: whole characters, then perhaps part of one."""
        # A byte-level token may hold the end of one character and the start of the next; others hold one byte or text.
        max_partial = 0 if self._tokenizer.byte_level else _MAX_HELD
        for num_partial in range(max_partial + 1):
            for length in _TAILS:
                window = list(context[-(length + num_partial) :])
                text = self._decode(window[: len(window) - num_partial])
                if self._tokenizer.byte_level:
                    text = text.rstrip(_REPLACEMENT)
                if _REPLACEMENT not in text:
                    self._window, self._sent, self._num_clean = window, text, len(window) - num_partial
                    return
        self._window = list(context[-_TAILS.start :])  # no text at all
        self._sent = self._decode(self._window)
        self._num_clean = len(self._window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        skips = self._skip_special and not self._spelled_ids  # with these, what is skipped does not come here
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips)


def _common_end(text: str, tail: str) -> int:
    """Returns how many characters both end with."""
    if text.endswith(tail):
        return len(tail)
    pairs = zip(reversed(text), reversed(tail), strict=False)
    return next((length for length, (one, other) in enumerate(pairs) if one != other), len(text))


def _held_back(text: str) -> int:
    """Returns how many characters at the end of `text` may still change."""
    if not text.endswith(_REPLACEMENT):
        return 0
    tail = text[-_MAX_HELD:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))
