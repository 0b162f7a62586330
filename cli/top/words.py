"""Figures and foreign texts as a terminal shows them."""

from __future__ import annotations

from common.errors import shortened

UNKNOWN = "-"
_MAX_CHARS = 200


def plain(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Returns the text on one line and not too long, with what a terminal could take for a command, or what turns the
    direction of text, as escape sequences of Python."""
    short = shortened(text, max_chars)
    if short.isprintable():
        return short
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in short)


def words(name: str) -> str:
    """Returns a label for people: "prefill queue"."""
    return plain(name.replace("_", " "))


def count(value: int) -> str:
    """ "12,345"."""
    return f"{value:,}"


def rate(value: float | None) -> str:
    """ "0", "8.3", "12,345"."""
    if value is None:
        return UNKNOWN
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value else "0"


def percent(value: float | None) -> str:
    """ "73%"."""
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


def duration(milliseconds: float | None) -> str:
    """ "8.3 ms", "612 ms", "4.21 s"."""
    if milliseconds is None:
        return UNKNOWN
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:,.2f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def byte_rate(value: float | None) -> str:
    """ "96.0 MB/s"."""
    if value is None:
        return UNKNOWN
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.1f} {unit}/s"
    return f"{value:.0f} B/s"
