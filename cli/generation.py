"""Options that `complete` and `chat` share, and how both end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from cli.router_client import DEFAULT_URL, RouterClient, RouterError
from common.config import ArgumentParser, add_arguments, build
from common.errors import ConfigError

_KEY_VARIABLE = "BATON_API_KEY"
_STOP = frozenset({"stop"})


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router is and how it samples. What is not given is the router's choice."""

    url: Annotated[
        str, Meta(description="HTTP address of the router. An API key is taken from the environment: BATON_API_KEY.")
    ] = DEFAULT_URL
    tls_ca: Annotated[
        str, Meta(description="PEM file of the authority of an https:// router; default: the system's.")
    ] = ""
    model: Annotated[str | None, Meta(description="Model name; default: the first the router serves.")] = None
    max_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Most tokens of the answer.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="0: always the most likely token.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="Sample from this share of the probability.")
    ] = None
    seed: Annotated[int | None, Meta(description="The same seed gives the same answer.")] = None
    stop: list[str] = []
    stream: Annotated[bool, Meta(description="Show the answer as it comes.")] = True
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds to wait for each piece of the answer.")] = 300.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # what an address or a port cannot be
            is_url = False
        if not is_url:
            raise ValueError(f"--url: expected http://host:port, got {self.url!r}")

    def body(self, model: str) -> dict[str, Any]:
        """The sampling part of a request body."""
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop or None,
        }
        return {"model": model} | {name: value for name, value in given.items() if value is not None}


def open_router(options: GenerationOptions) -> RouterClient:
    """A client of the router that the options name. Raises ConfigError."""
    return RouterClient(options.url, timeout_s=options.timeout_s, api_key=_api_key(), tls_ca=options.tls_ca)


def _api_key() -> str:
    """Empty: there is none. Raises ConfigError, which does not repeat it."""
    key = os.environ.get(_KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{_KEY_VARIABLE}: a key has no spaces, control characters or letters beyond ASCII")
    return key


def parse_generation(parser: ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, GenerationOptions]:
    """Adds the shared options to `parser` and reads `argv`. Raises ConfigError."""
    add_arguments(parser, GenerationOptions, exclude=_STOP)
    # Not as other lists: a comma may be part of a stop text.
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="Text that ends the answer; repeatable."
    )
    args = parser.parse_args(argv)
    options = build(GenerationOptions, args, exclude=_STOP)
    return args, msgspec.structs.replace(options, stop=args.stop)


def write_pieces(pieces: Iterable[str]) -> str:
    """Prints each piece at once, ends with a line break. Returns the whole text."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        if text and not text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
    return text


def report_router_error(error: RouterError) -> int:
    """Prints the error on one line of stderr and returns the exit code."""
    sys.stderr.write(f"baton: error: {' '.join(error.message.split())}\n")
    return error.exit_code


def read_stdin(what: str) -> str:
    """All of stdin if something is piped in; empty at a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RouterError(f"{what} on stdin is not UTF-8: {error.reason}") from error
