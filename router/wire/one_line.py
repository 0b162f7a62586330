"""JSON that no parser takes for several lines.

JSON escapes line feeds and carriage returns, but not the other characters at which text functions of Python and other
languages end a line. Clients that read server-sent events as lines of text, httpx's among them, would cut an event
there.
"""

from __future__ import annotations

import msgspec

_LINE_BREAKS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


def encode_line(value: object) -> bytes:
    """`value` as JSON in one line."""
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for character, escaped in _LINE_BREAKS.items():
            encoded = encoded.replace(character, escaped)
    return encoded
