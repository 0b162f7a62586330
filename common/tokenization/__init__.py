"""Text to token ids and back. No torch: the router imports this and must stay small."""

from common.tokenization.chat import ChatTemplate
from common.tokenization.detokenizer import IncrementalDetokenizer
from common.tokenization.stop import StopChecker, StopResult
from common.tokenization.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopChecker", "StopResult", "Tokenizer"]
