"""The address at which a router serves gRPC: named by a URL, or told by the router over HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from cli.environment import KEY_VARIABLE
from common.client_tls import tls_context, tls_problem
from common.errors import BatonError, ConfigError, PermissionDeniedError, UnauthenticatedError, UnreachableError

URL_FORMS = "http://host:port or grpc://host:port"
_TIMEOUT_S = 5.0
_TLS_SCHEMES = ("https", "grpcs")
_HTTP_SCHEMES = ("http", "https")
_GRPC_SCHEMES = ("grpc", "grpcs")
_REFUSALS = {http.client.UNAUTHORIZED: UnauthenticatedError, http.client.FORBIDDEN: PermissionDeniedError}


class RouterAddress(NamedTuple):
    """How a client reaches a router."""

    address: str  # host:port
    tls: bool


def is_url(text: str) -> bool:
    """Whether it has one of URL_FORMS, or one of them with TLS: https or grpcs."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # not an address, or not a port
        return False
    is_complete = parts.scheme in _HTTP_SCHEMES or (parts.scheme in _GRPC_SCHEMES and port is not None)
    return is_complete and bool(parts.hostname) and port != 0


def find_router(url: str, tls_ca: str) -> RouterAddress:
    """Returns where the router at `url` serves gRPC. It is asked if `url` is its HTTP address.

    `tls_ca` is a PEM file of the authorities to trust. Raises ConfigError if it cannot be used, UnreachableError if
    nothing answers, BatonError if that is no router.
    """
    parts = urlsplit(url)
    context = tls_context(tls_ca) if parts.scheme in _TLS_SCHEMES else None
    port = parts.port if parts.scheme in _GRPC_SCHEMES else _ask_for_port(parts, context)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return RouterAddress(f"{host}:{port}", tls=context is not None)


def _ask_for_port(parts: SplitResult, context: ssl.SSLContext | None) -> int:
    origin = f"{parts.scheme}://{parts.netloc}"
    connection = _connection(parts, context)
    try:
        connection.request("GET", "/version")
        return int(json.loads(connection.getresponse().read())["grpc_port"])
    except ssl.SSLError as error:
        raise UnreachableError(f"TLS with {origin} failed: {tls_problem(error)}") from error
    except TimeoutError as error:
        raise UnreachableError(f"no answer from {origin} within {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise UnreachableError(f"no router at {origin}: start one with `baton up`") from error
    except (http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise BatonError(f"what answers at {origin} is not a Baton router") from error
    finally:
        connection.close()


def fetch_json(url: str, path: str, tls_ca: str, api_key: str) -> Any:
    """Returns the JSON that the router at `url`, http:// or https://, has at `path`.

    Raises ConfigError if the URL or the authority is no good, UnreachableError if nothing answers, UnauthenticatedError
    or PermissionDeniedError if the router refuses the key, BatonError for another answer.
    """
    parts = urlsplit(url)
    if not is_url(url) or parts.scheme not in _HTTP_SCHEMES:
        raise ConfigError(f"--url: must be http://host:port, got {url}", param="url")
    context = tls_context(tls_ca) if parts.scheme in _TLS_SCHEMES else None
    origin = f"{parts.scheme}://{parts.netloc}"
    connection = _connection(parts, context)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except ssl.SSLError as error:
        raise UnreachableError(f"TLS with {origin} failed: {tls_problem(error)}") from error
    except TimeoutError as error:
        raise UnreachableError(f"no answer from {origin} within {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise UnreachableError(f"no router at {origin}: start one with `baton up`") from error
    except (http.client.HTTPException, ValueError) as error:
        raise BatonError(f"what answers at {origin} is not a Baton router") from error
    finally:
        connection.close()
    refusal = _REFUSALS.get(response.status)
    if refusal is not None:
        raise refusal(f"{origin}{path} needs an operator's API key, in {KEY_VARIABLE}")
    if response.status != http.client.OK:
        raise BatonError(f"{origin}{path} answered {response.status}")
    return answer


def _connection(parts: SplitResult, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if context is None:
        return http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)
    return http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_S, context=context)
