"""What `complete` and `chat` share: options, the router they talk to, how an answer is printed, and how both end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from cli.router_client import DEFAULT_URL, Piece, RouterClient, RouterError
from common.config import ArgumentParser, add_arguments, build
from common.errors import ConfigError
from deploy.cluster_state import the_cluster

KEY_VARIABLE = "BATON_API_KEY"
URL_VARIABLE = "BATON_URL"
ENVIRONMENT_HELP = f"""\
environment:
  {URL_VARIABLE}      address of the router, unless --url gives one
  {KEY_VARIABLE}  API key of the router"""
_STOP = frozenset({"stop"})


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Answer: how the router samples. What is not given is its choice."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {"Router": ("url", "tls_ca", "model", "timeout_s")}

    url: Annotated[
        str | None,
        Meta(
            description=f"HTTP address of the router; default: {URL_VARIABLE}, else that of the cluster in the "
            f"background, else {DEFAULT_URL}."
        ),
    ] = None
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
    verbose: Annotated[bool, Meta(description="Say how many tokens an answer has, and how fast they came.")] = False
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds to wait for each piece of the answer.")] = 300.0

    def __post_init__(self) -> None:
        if self.url is not None and not _is_url(self.url):
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
        body: dict[str, Any] = {"model": model} | {name: value for name, value in given.items() if value is not None}
        if self.stream and self.verbose:
            body["stream_options"] = {"include_usage": True}
        return body


def open_router(options: GenerationOptions) -> RouterClient:
    """A client of the router that the options name. Raises ConfigError."""
    url = options.url or _default_url()
    return RouterClient(url, timeout_s=options.timeout_s, api_key=_api_key(), tls_ca=options.tls_ca)


def _default_url() -> str:
    """Raises ConfigError if the environment has one that cannot be used, or if several clusters run."""
    given = os.environ.get(URL_VARIABLE, "").strip()
    if given:
        if not _is_url(given):
            raise ConfigError(f"{URL_VARIABLE}: expected http://host:port, got {given!r}")
        return given
    cluster = the_cluster()
    return cluster.url if cluster is not None and cluster.url else DEFAULT_URL


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # what an address or a port cannot be
        return False


def _api_key() -> str:
    """Empty: there is none. Raises ConfigError, which does not repeat it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{KEY_VARIABLE}: a key has no spaces, control characters or letters beyond ASCII")
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


class Answer:
    """An answer as it is printed."""

    def __init__(self, *, verbose: bool) -> None:
        self.text = ""
        self._verbose = verbose

    def write(self, pieces: Iterable[Piece]) -> None:
        """Prints each piece at once, ends with a line break. Then, if asked to, says how fast it was."""
        started = time.monotonic()
        first: float | None = None
        num_tokens: int | None = None
        try:
            for piece in pieces:
                if piece.text and first is None:
                    first = time.monotonic()
                num_tokens = piece.num_tokens if piece.num_tokens is not None else num_tokens
                self.text += piece.text
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        finally:
            if self.text and not self.text.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
        if self._verbose and num_tokens is not None:
            now = time.monotonic()
            sys.stderr.write(describe_speed(num_tokens, now - started, (first or now) - started) + "\n")


def describe_speed(num_tokens: int, seconds: float, first_s: float) -> str:
    """ "12 tokens in 0.52 s, the first after 0.08 s, then 25.0 tokens/s"."""
    text = f"{num_tokens} token{'s' if num_tokens != 1 else ''} in {seconds:.2f} s"
    if num_tokens > 1 and seconds > first_s:
        rest = (num_tokens - 1) / (seconds - first_s)
        return f"{text}, the first after {first_s:.2f} s, then {rest:.1f} tokens/s"
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
