"""What is asked and answered, the same for all systems."""

from __future__ import annotations

import json

MODEL = "tiny"
_STORY = (
    "Once upon a time there was a little girl named Lily. She liked to play in the park with her dog. One day the dog "
    "ran after a big red ball and did not come back. Lily looked under the trees and behind the old house. "
)
PROMPT = _STORY * 2  # about 100 tokens of the demo model
ANSWER = " The dog was happy to see her, and they went home together. It was a very good day — and it ended well."
PROMPT_TOKEN_IDS = list(range(300, 400))  # for calls that go to the pods directly
MAX_MODEL_LEN = 1 << 17


def completion_body(max_tokens: int, *, stream: bool) -> bytes:
    """Of POST /v1/completions."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    return json.dumps(body).encode()
