"""`baton top`: a cluster and its requests, live in a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from cli.environment import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, api_key
from cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from cli.extras import import_with_extra
from cli.http_endpoint import EndpointOptions, endpoint_url
from cli.top.router_api import RouterApi
from cli.top.snapshot import take_snapshot
from common.config import ArgumentParser, add_arguments, build, epilog_of
from loadgen.http_client import HttpClient

if TYPE_CHECKING:
    from cli.top.app import TopApp

_DESCRIPTION = (
    "Shows the pods of a cluster, their load and states, the last requests, and for each of these where its time went. "
    "Where stdin or stdout is no terminal, it prints the cluster once, as with --once. With API keys, it needs an "
    "operator's."
)
_EXAMPLES = (
    "baton top",
    "baton top --url https://baton.example.org --interval 5",
    "baton top --once | grep -v ' ready '",
)
_ENVIRONMENT_HELP = f"""\
environment:
  {URL_VARIABLE}      address of the router, unless --url gives one
  {KEY_VARIABLE}  operator's API key of the router
  NO_COLOR       if set, no colours"""
_EXIT_CODES = {
    0: "you quit, or the cluster was printed",
    EXIT_FAILED: "the router refuses the API key, or fails; or what answers is no router",
    2: "a wrong option or setting",
    EXIT_UNREACHABLE: "nothing answers at first; a router that goes away later is waited for",
    EXIT_INTERRUPTED: "interrupted",
}


class TopOptions(EndpointOptions, frozen=True, kw_only=True):
    """Router: which one is asked, and how often."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {"Router": ("url", "tls_ca", "timeout_s", "interval", "once")}

    url: Annotated[
        str | None,
        Meta(
            description=f"http://host:port or https://host:port of the router; default: {URL_VARIABLE}, else the "
            f"cluster in the background, else {DEFAULT_URL}."
        ),
    ] = None
    timeout_s: Annotated[float, Meta(gt=0, le=600, description="Seconds within which the router must answer.")] = 10.0
    interval: Annotated[
        float, Meta(ge=0.1, le=3600, description="Seconds between an answer of the router and the next question.")
    ] = 1.0
    once: Annotated[
        bool, Meta(description="Print the cluster once, as text. It takes an interval, over which rates are measured.")
    ] = False


def main(argv: Sequence[str]) -> int:
    """Shows the cluster until the user quits. Returns the exit code; raises BatonError."""
    parser = ArgumentParser(
        prog="baton top",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=epilog_of(examples=_EXAMPLES, exit_codes=_EXIT_CODES, more=_ENVIRONMENT_HELP),
    )
    add_arguments(parser, TopOptions)
    options = build(TopOptions, parser.parse_args(argv))
    asyncio.run(_run(options))
    return 0


async def _run(options: TopOptions) -> None:
    url, key = endpoint_url(options), api_key()
    client = HttpClient(url, api_key=key, tls_ca=options.tls_ca)
    api = RouterApi(client, url, has_key=bool(key), timeout_s=options.timeout_s)
    try:
        if options.once or not _is_terminal():
            _print(await take_snapshot(api, options.interval))
        else:
            await _show(api, options.interval)
    finally:
        client.close()


async def _show(api: RouterApi, interval_s: float) -> None:
    application = import_with_extra("cli.top.app", "top", "top")  # here, as --once does without it
    first = await api.cluster()  # before the screen is taken, so that an error is an ordinary one
    app: TopApp = application.TopApp(api, first, interval_s)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.exit)  # gives the terminal back
    error = await app.run_async()
    if error is not None:
        raise error


def _is_terminal() -> bool:
    """Whether keys can be read and the screen be drawn."""
    streams = (sys.__stdin__, sys.__stdout__)
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
