"""The OpenAI-style HTTP API of a running router, as the commands use it."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import httpx

from common.errors import BatonError, ConfigError

CONNECT_TIMEOUT_S = 5.0
DEFAULT_URL = "http://127.0.0.1:8000"

EXIT_FAILED = 1  # the router refused the request or failed
EXIT_UNREACHABLE = 3


class RouterError(BatonError):
    """The router refused or failed; the message is its own."""

    exit_code = EXIT_FAILED


class RouterUnreachableError(RouterError):
    """Nothing answers at the URL."""

    exit_code = EXIT_UNREACHABLE


class RouterClient:
    """A connection to one router. A context manager. Methods raise RouterError."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        api_key: str = "",
        tls_ca: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`timeout_s` bounds the wait for each piece of an answer; `tls_ca` is a PEM file of the authorities to trust
        instead of the system's. Raises ConfigError if that cannot be used."""
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            verify=_trusting(tls_ca) if tls_ca else True,
            transport=transport,
            trust_env=False,  # a proxy of the environment is not for a router on this machine
        )

    def models(self) -> list[str]:
        """Names of the models it serves."""
        return [str(model["id"]) for model in self._json(self._request("GET", "/v1/models"))["data"]]

    def default_model(self) -> str:
        """The first of `models`."""
        models = self.models()
        if not models:
            raise RouterError(f"the router at {self.url} serves no model yet")
        return models[0]

    def complete(self, body: Mapping[str, object]) -> str:
        """The text of a completion."""
        return str(self._json(self._request("POST", "/v1/completions", body))["choices"][0]["text"])

    def chat(self, body: Mapping[str, object]) -> str:
        """The content of the assistant's message."""
        answer = self._json(self._request("POST", "/v1/chat/completions", body))
        return str(answer["choices"][0]["message"]["content"] or "")

    def stream_complete(self, body: Mapping[str, object]) -> Iterator[str]:
        """The text of a completion, piece by piece."""
        for event in self._stream("/v1/completions", body):
            yield from (str(choice["text"]) for choice in event["choices"] if choice.get("text"))

    def stream_chat(self, body: Mapping[str, object]) -> Iterator[str]:
        """The content of the assistant's message, piece by piece."""
        for event in self._stream("/v1/chat/completions", body):
            yield from (str(c["delta"]["content"]) for c in event["choices"] if c.get("delta", {}).get("content"))

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def _request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> httpx.Response:
        with self._clear_errors():
            response = self._http.request(method, path, json=body)
        self._check(response)
        return response

    def _stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The events of a server-sent stream up to [DONE]. A stream that ends without it was cut off."""
        with self._clear_errors(), self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
            self._check(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RouterError(_message_of(event))
                yield event
        raise RouterError("the router ended the answer too early")

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if (problem := _tls_problem(error)) is not None:
                raise RouterUnreachableError(f"TLS with {self.url} failed: {problem}") from error
            raise RouterUnreachableError(f"no router at {self.url}: start one with `baton up`") from error
        except httpx.TimeoutException as error:
            raise RouterError(f"the router at {self.url} did not answer in time") from error
        except httpx.HTTPError as error:
            raise RouterError(f"the connection to {self.url} broke: {error}") from error
        except json.JSONDecodeError as error:
            raise RouterError(f"what answers at {self.url} is not a Baton router: {error}") from error

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.OK:
            return
        try:
            message = _message_of(response.json())
        except json.JSONDecodeError:
            message = f"HTTP status {response.status_code}; is {self.url} a Baton router?"
        raise RouterError(message)

    def _json(self, response: httpx.Response) -> Any:
        with self._clear_errors():
            return response.json()


def _trusting(tls_ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=tls_ca)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"--tls-ca: {tls_ca} cannot be used: {error.strerror}", param="tls_ca") from error


def _tls_problem(error: BaseException) -> str | None:
    """What went wrong with TLS, and what to do; None: it was something else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{cause.verify_message}; --tls-ca names the authority to trust"
    return f"{cause.reason or cause}; does it speak plain http?"


def _message_of(body: Any) -> str:
    """The message of an OpenAI-style error object."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else f"unexpected answer: {body!r}"
