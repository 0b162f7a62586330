"""One request under way."""

from router.generation.generation import Generation
from router.generation.token_log import OutputDelta

__all__ = ["Generation", "OutputDelta"]
