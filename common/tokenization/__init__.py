"""Text to token ids and back. No torch: the router imports this and must stay small."""

from common.tokenization.chat import ChatTemplate
from common.tokenization.output import OutputPiece, OutputProcessor
from common.tokenization.tokenizer import Tokenizer, TooManyTokensError

__all__ = ["ChatTemplate", "OutputPiece", "OutputProcessor", "Tokenizer", "TooManyTokensError"]
