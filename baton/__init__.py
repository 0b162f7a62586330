"""The Python API of Baton.

LLM              generates in this process, without a server; needs the extra `engine`
LoRARequest      names a LoRA adapter for it
SamplingParams   how tokens are chosen and when an answer ends
Client           asks a router over gRPC
AsyncClient      the same with asyncio

What they return is in `baton.answers`, what they raise in `baton.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.async_client import AsyncClient
from baton.client import Client
from common import __version__ as __version__
from common.types import SamplingParams

if TYPE_CHECKING:
    from common.engine.llm import LLM, LoRARequest

__all__ = ["LLM", "AsyncClient", "Client", "LoRARequest", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports the engine when it is asked for: with torch, it takes seconds."""
    if name in ("LLM", "LoRARequest"):
        from common.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
