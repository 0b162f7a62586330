"""The OpenAI-style HTTP API of a running router, as the commands use it."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from cli.exit_codes import EXIT_FAILED, EXIT_UNREACHABLE
from common.errors import BatonError, ConfigError

CONNECT_TIMEOUT_S = 5.0
DEFAULT_URL = "http://127.0.0.1:8000"


class RouterError(BatonError):
    """The router refused or failed; the message is its own."""

    exit_code = EXIT_FAILED


class RouterUnreachableError(RouterError):
    """Nothing answers at the URL."""

    exit_code = EXIT_UNREACHABLE


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    num_tokens: int | None = None  # of the whole answer, in its last piece if usage was asked for


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

    def complete(self, body: Mapping[str, object]) -> Piece:
        """A completion."""
        answer = self._json(self._request("POST", "/v1/completions", body))
        return Piece(str(answer["choices"][0]["text"]), _num_tokens(answer))

    def chat(self, body: Mapping[str, object]) -> Piece:
        """The assistant's message."""
        answer = self._json(self._request("POST", "/v1/chat/completions", body))
        return Piece(str(answer["choices"][0]["message"]["content"] or ""), _num_tokens(answer))

    def stream_complete(self, body: Mapping[str, object]) -> Iterator[Piece]:
        """A completion, piece by piece."""
        for event in self._stream("/v1/completions", body):
            yield Piece("".join(str(choice.get("text") or "") for choice in event["choices"]), _num_tokens(event))

    def stream_chat(self, body: Mapping[str, object]) -> Iterator[Piece]:
        """The assistant's message, piece by piece."""
        for event in self._stream("/v1/chat/completions", body):
            texts = (str(choice.get("delta", {}).get("content") or "") for choice in event["choices"])
            yield Piece("".join(texts), _num_tokens(event))

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


def _num_tokens(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    return int(usage["completion_tokens"]) if usage else None


def _message_of(body: Any) -> str:
    """The message of an OpenAI-style error object."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else f"unexpected answer: {body!r}"
