"""The OpenAI endpoint that `bench` and `run-batch` send requests to: options, environment, client."""

from __future__ import annotations

import os
import resource
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from cli.environment import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, api_key
from deploy.cluster_state import the_cluster
from loadgen.http_client import HttpClient

ENVIRONMENT_HELP = f"""\
environment:
  {URL_VARIABLE}      address of the endpoint, unless --url gives one
  {KEY_VARIABLE}  API key of the endpoint"""


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoint: where requests go."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {"Endpoint": ("url", "tls_ca", "timeout_s")}

    url: Annotated[
        str | None,
        Meta(
            description=f"http://host:port or https://host:port of a router or any server with OpenAI's API; default: "
            f"{URL_VARIABLE}, else the cluster in the background, else {DEFAULT_URL}."
        ),
    ] = None
    tls_ca: Annotated[str, Meta(description="PEM file of the authority of an https:// URL; default: public ones.")] = ""
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds within which an answer must be complete.")] = 600.0


def endpoint_url(options: EndpointOptions) -> str:
    """Returns the URL to use. Raises ConfigError if several clusters run in the background."""
    if options.url is not None:
        return options.url
    given = os.environ.get(URL_VARIABLE, "").strip()
    if given:
        return given
    cluster = the_cluster()
    return cluster.url if cluster is not None and cluster.url else DEFAULT_URL


def open_endpoint(options: EndpointOptions) -> HttpClient:
    """Returns a client of the endpoint, with the API key of the environment. Raises ConfigError."""
    return HttpClient(endpoint_url(options), api_key=api_key(), tls_ca=options.tls_ca)


def allow_connections() -> None:
    """Raises the number of files that the process may open, of which each request under way takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
