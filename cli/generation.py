"""Shared parts of `complete` and `chat`: options, the router they talk to, and how an answer is printed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, cast

import msgspec
from msgspec import Meta

from baton import Client
from baton.answers import Answer, Piece
from baton.requests import Request
from cli.environment import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, api_key
from cli.router_address import URL_FORMS, find_router, is_url
from common.config import ArgumentParser, add_arguments, build
from common.errors import BatonError, ConfigError
from deploy.cluster_state import the_cluster

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
            description=f"Address of the router, {URL_FORMS}; default: {URL_VARIABLE}, else that of the cluster in "
            f"the background, else {DEFAULT_URL}."
        ),
    ] = None
    tls_ca: Annotated[
        str, Meta(description="PEM file of the authority of an https:// or grpcs:// router; default: public ones.")
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
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds within which the answer must be complete.")] = 600.0

    def __post_init__(self) -> None:
        if self.url is not None and not is_url(self.url):
            raise ValueError(f"--url: expected {URL_FORMS}, got {self.url!r}")

    def request(self, model: str) -> Request:
        """A request without its prompt."""
        given = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop or None,
        }
        return cast("Request", {name: value for name, value in given.items() if value is not None})


def open_router(options: GenerationOptions) -> Client:
    """A client of the router that the options name. Raises as find_router does."""
    key = api_key()
    address, tls = find_router(options.url or _default_url(), options.tls_ca)
    return Client(address, api_key=key, tls=tls, tls_ca=options.tls_ca if tls else "", timeout_s=options.timeout_s)


def default_model(router: Client) -> str:
    """The first model that the router serves. Raises BatonError."""
    models = router.models()
    if not models:
        raise BatonError("the router serves no model yet")
    return models[0].name


def _default_url() -> str:
    """Raises ConfigError if the environment has one that cannot be used, or if several clusters run."""
    given = os.environ.get(URL_VARIABLE, "").strip()
    if given:
        if not is_url(given):
            raise ConfigError(f"{URL_VARIABLE}: expected {URL_FORMS}, got {given!r}")
        return given
    cluster = the_cluster()
    return f"grpc://{cluster.grpc_address}" if cluster is not None and cluster.grpc_address else DEFAULT_URL


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


class PrintedAnswer:
    """An answer as it is printed."""

    def __init__(self, *, verbose: bool) -> None:
        self.text = ""
        self._verbose = verbose

    def write(self, pieces: Iterable[Piece | Answer]) -> None:
        """Prints each piece at once, ends with a line break. Then, if asked to, says how fast it was."""
        started = time.monotonic()
        first: float | None = None
        num_tokens: int | None = None
        try:
            for piece in pieces:
                if piece.text and first is None:
                    first = time.monotonic()
                num_tokens = piece.usage.completion_tokens if piece.usage is not None else num_tokens
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


def read_stdin(what: str) -> str:
    """All of stdin if something is piped in; empty at a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BatonError(f"{what} on stdin is not UTF-8: {error.reason}") from error
