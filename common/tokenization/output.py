"""Turns the tokens of an answer into its text, online and offline alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.tokenization.detokenizer import create_detokenizer
from common.tokenization.stop import StopChecker, StopResult
from common.tokenization.tokenizer import Tokenizer
from common.types import FinishReason

_CONTEXT_TOKENS = 16  # of the prompt's end: enough for the spelling of the answer's first token


class OutputPiece(NamedTuple):
    """The text that some tokens add."""

    text: str  # may lag behind the tokens
    offsets: list[int]  # characters of the whole answer before each token; those after a stop string have none
    stop: str = ""  # the stop string that is complete: the answer ends with the last token that has an offset
    hidden_text: str = ""  # what precedes `text` of these tokens

    @property
    def is_stopped(self) -> bool:
        """True if a stop string is complete."""
        return bool(self.stop)


class OutputProcessor:
    """Detokenises one answer and ends it before the first stop string.

    - A token that ends the generation (end of sequence, stop token) is counted, but is not text, unless stops are.
    - Stop strings begin to count with the token after the first `min_tokens`.
    - An answer that continues its prompt's text is spelled as it would be there; one of a chat stands alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        continued: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop: bool = False,
        spelled_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`continued`: token ids of the prompt whose text the answer continues. `include_stop`: the stop string or the
        token that ends the generation is part of the text. `spelled_ids`: special tokens that are never skipped."""
        self._detokenizer = create_detokenizer(
            tokenizer,
            context=continued[-_CONTEXT_TOKENS:],
            skip_special_tokens=skip_special_tokens,
            spelled_ids=spelled_ids,
        )
        self._tokenizer = tokenizer
        joins_special = not (skip_special_tokens or spaces_between_special_tokens)
        self._spell = self._spell_joined if joins_special else self._detokenizer.push
        self._was_special = False  # the token before was
        self._include_stop = include_stop
        self._stop = StopChecker(stops, is_included=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0  # so far
        self._num_chars = 0  # detokenised so far

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None, *, num_hidden: int = 0
    ) -> OutputPiece:
        """Takes the next tokens, the last ones if there is a `finish_reason`. Omits the text of the first `num_hidden`.
        Must not be called again after the end."""
        text, hidden_text, offsets = "", "", []
        num_spelled = len(token_ids) - (finish_reason is FinishReason.STOP and not self._include_stop)
        for position, token_id in enumerate(token_ids):
            offsets.append(self._num_chars)
            self._num_tokens += 1
            if position == num_spelled:
                break
            result = self._check(self._spell(token_id))
            if position >= num_hidden:
                text += result.text
            else:
                hidden_text += result.text
            if result.stop:
                return OutputPiece(text, offsets, result.stop, hidden_text)
        if finish_reason is None:
            return OutputPiece(text, offsets, hidden_text=hidden_text)
        result = self._check(self._detokenizer.finish())
        text += result.text
        if not result.stop:
            text += self._stop.finish()
        return OutputPiece(text, offsets, result.stop, hidden_text)

    def _spell_joined(self, token_id: int) -> str:
        """Text that the token completes, of special tokens without spaces between them."""
        piece = self._detokenizer.push(token_id)
        special = self._tokenizer.added_text(token_id)
        joins, self._was_special = self._was_special and special is not None, special is not None
        return special if joins and special is not None else piece

    def _check(self, piece: str) -> StopResult:
        """Looks for stop strings in the text of the last token."""
        self._num_chars += len(piece)
        if self._num_tokens <= self._min_tokens:
            return StopResult(piece)
        return self._stop.push(piece)
