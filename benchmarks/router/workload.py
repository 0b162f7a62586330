"""Requests and answers, the same for all systems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

MODEL = "tiny"
_STORY = (
    "Once upon a time there was a little girl named Lily. She liked to play in the park with her dog. One day the dog "
    "ran after a big red ball and did not come back. Lily looked under the trees and behind the old house. "
)
PROMPT = _STORY * 2  # about 100 tokens of the demo model
ANSWER = " The dog was happy to see her, and they went home together. It was a very good day — and it ended well."
PROMPT_TOKEN_IDS = list(range(300, 400))  # for calls that go to the pods directly
MAX_MODEL_LEN = 1 << 17


class Call(NamedTuple):
    """A request over HTTP, and the end of its answer if that is a stream."""

    path: str
    fields: Mapping[str, object]  # of the body
    limit_field: str  # the one that says how many tokens
    stream_end: str  # what the last event has

    def body(self, max_tokens: int, *, stream: bool) -> bytes:
        """Returns the body of a request."""
        limits = {"model": MODEL, self.limit_field: max_tokens, "stream": stream}
        return json.dumps({**limits, **self.fields}).encode()


COMPLETION = Call("/v1/completions", {"prompt": PROMPT, "temperature": 0}, "max_tokens", "data: [DONE]")
