"""How much one request may hold, over HTTP and gRPC alike. A test holds docs/security.md against these."""

from __future__ import annotations

MAX_MODEL_CHARS = 256
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 8192  # of all messages together
MAX_NAME_CHARS = 256  # role and name of a message
MAX_STOPS = 16
MAX_BEAMS = 16  # of a beam search
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 1024
MAX_TEMPLATE_BYTES = 64 * 2**10  # chat_template_kwargs, as JSON
MAX_TOOLS = 512
MAX_TOOLS_BYTES = 512 * 2**10  # of all tools of a request, as JSON
MAX_FIELD_VALUES = 2**16  # JSON values of all tools, of `documents`, of a message's tool calls: some 20 ms to read
MAX_METADATA = 16  # entries of `metadata`
MAX_METADATA_CHARS = 512  # of each key and value
MAX_POOLED_INPUTS = 2048  # inputs of an embedding and the like, documents of a ranking
MAX_RULED_TOKENS = 2**18  # that biases, masks and bad words name, of all choices of a request that has several
MAX_LOGPROB_VALUES = (
    2**19
)  # of prompts, or of all choices of a request that has several; JSON has up to 80 bytes for each
