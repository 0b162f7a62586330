"""The gRPC client for asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc

from baton.answers import Answer, Model, Piece
from baton.attempts import Attempts, StreamProgress
from baton.connection import Connection, Metadata
from baton.requests import (
    ChatRequest,
    Conversation,
    Prompt,
    Request,
    answer_of,
    chat_prompt,
    chat_request,
    models_of,
    piece_of,
    pooling_input,
    text_request,
    timeout_of,
)
from common.pb import admin_pb2, inference_pb2
from common.pb.admin_pb2_grpc import AdminStub
from common.pb.inference_pb2_grpc import InferenceStub
from common.rpc.errors import from_rpc_error
from common.types import SamplingParams

if TYPE_CHECKING:
    from baton.connection import AsyncAdminMethod, AsyncCallAt, AsyncMethod, AsyncStub

_Reply = TypeVar("_Reply")


class AsyncClient:
    """Asks routers of one cluster. An async context manager; belongs to one event loop.

    async with AsyncClient("127.0.0.1:9000") as client:
        answer = await client.generate("The capital of France is", max_tokens=16, temperature=0)
        print(answer.text)
        async for piece in client.stream_chat([{"role": "user", "content": "Hello!"}]):
            print(piece.text, end="")

    Calls that a router cannot serve at the moment are retried, at the next address if there are several; a broken
    stream resumes where it broke. Methods raise a BatonError; see `baton.errors`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:9000",
        *,
        api_key: str = "",
        tls: bool = False,
        tls_ca: str = "",
        timeout_s: float = 600.0,
        max_attempts: int = 5,
    ) -> None:
        """`address`: host:port of a router's gRPC port, or those of several routers. `tls_ca`: PEM file of the
        authorities to trust, instead of gRPC's; it implies `tls`. `timeout_s` bounds a call, retries included;
        `max_attempts` limits consecutive attempts without progress. Raises ConfigError."""
        self._connection = Connection(address, api_key, tls, tls_ca, timeout_s, max_attempts)
        self._channels = {each: self._connection.open_async(each) for each in self._connection.addresses}
        self._stubs: dict[str, AsyncStub] = {each: InferenceStub(channel) for each, channel in self._channels.items()}

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Unpack[Request]
    ) -> Answer:
        """Completes a text or token ids. `params` holds all sampling parameters; without it, those in `request` and
        the model's defaults apply."""
        return await self._generate(text_request(prompt, params, **request), request)

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **request: Unpack[ChatRequest],
    ) -> Answer:
        """Answers a conversation of messages such as {"role": "user", "content": "Hello!"}; otherwise like `generate`.
        See `baton.requests.ChatTerms` for tools and variables of the chat template."""
        return await self._generate(chat_request(messages, params, **request), request)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Unpack[Request]
    ) -> AsyncIterator[Piece]:
        """Yields the answer of `generate` piece by piece. Leaving the iteration aborts the request."""
        return self._stream(text_request(prompt, params, **request), request)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **request: Unpack[ChatRequest],
    ) -> AsyncIterator[Piece]:
        """Yields the answer of `chat` piece by piece. Leaving the iteration aborts the request."""
        return self._stream(chat_request(messages, params, **request), request)

    async def embed(
        self, inputs: Sequence[Prompt], *, model: str = "", dimensions: int = 0, normalize: bool = True
    ) -> list[list[float]]:
        """Returns an embedding of each text, or of token ids. `dimensions`: so many leading numbers; 0: all."""
        message = inference_pb2.EmbedRequest(
            model=model, inputs=map(pooling_input, inputs), dimensions=dimensions, normalize=normalize
        )
        reply = await self._call(lambda stub: stub.Embed, message)
        return [list(each.values) for each in reply.embeddings]

    async def classify(self, inputs: Sequence[Prompt], *, model: str = "") -> list[dict[str, float]]:
        """Returns the probability of each label for each text, or for token ids."""
        message = inference_pb2.ClassifyRequest(model=model, inputs=map(pooling_input, inputs))
        reply = await self._call(lambda stub: stub.Classify, message)
        return [dict(zip(reply.labels, each.probabilities, strict=True)) for each in reply.results]

    async def score(self, query: str, documents: Sequence[str], *, model: str = "") -> list[float]:
        """Returns how well each document fits the query; more is better."""
        message = inference_pb2.ScoreRequest(model=model, queries=[query], documents=documents)
        reply = await self._call(lambda stub: stub.Score, message)
        return list(reply.scores)

    async def abort(self, request_id: str) -> bool:
        """Aborts a running request, whose caller gets the answer so far. Returns False if no router runs it."""
        message = inference_pb2.AbortRequest(request_id=request_id)
        for address in self._connection.addresses:
            reply = await self._call(lambda stub: stub.Abort, message, address)
            if reply.found:
                return True
        return False

    async def models(self) -> list[Model]:
        """Lists the served models."""
        return models_of(await self._call(lambda stub: stub.ListModels, inference_pb2.ListModelsRequest()))

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False, model: str = "") -> None:
        """Has all pods load a LoRA adapter, which requests then name as their model. Needs an operator's key. `path`:
        directory as the pods see it, or hub id; `in_place`: the name may be taken; `model`: whose adapter it is, where
        a router serves several. Raises InvalidRequestError if it cannot be used, ConflictError if the name is taken."""
        message = admin_pb2.LoadLoraAdapterRequest(
            lora_name=name, lora_path=path, load_inplace=in_place, base_model_name=model
        )
        await self._administer(lambda stub: stub.LoadLoraAdapter, message)

    async def unload_adapter(self, name: str, *, model: str = "") -> None:
        """Refuses new requests for an adapter; running ones finish. Needs an operator's key. Raises UnknownModelError
        if there is none."""
        message = admin_pb2.UnloadLoraAdapterRequest(lora_name=name, base_model_name=model)
        await self._administer(lambda stub: stub.UnloadLoraAdapter, message)

    async def tokenize(self, prompt: str | Conversation, *, model: str = "") -> list[int]:
        """Returns the token ids of a text or a conversation."""
        message = inference_pb2.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.chat.CopyFrom(chat_prompt(prompt))
        reply = await self._call(lambda stub: stub.Tokenize, message)
        return list(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Returns the text of token ids."""
        message = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        reply = await self._call(lambda stub: stub.Detokenize, message)
        return reply.text

    async def explain(self, prompt: Prompt, **request: Unpack[Request]) -> dict[str, Any]:
        """Explains where the router would send such a request, without sending it."""
        message = text_request(prompt, None, **request)
        reply = await self._call(lambda stub: stub.Explain, message)
        return dict(json.loads(reply.json))

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        for channel in self._channels.values():
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _generate(self, message: inference_pb2.GenerateRequest, request: Request) -> Answer:
        timeout_s = timeout_of(request, self._connection.timeout_s)
        metadata = self._connection.metadata_of(request)
        return answer_of(await self._call(lambda stub: stub.Generate, message, None, timeout_s, metadata))

    async def _call(
        self,
        method: AsyncMethod[_Reply],
        message: Any,
        address: str | None = None,
        timeout_s: float | None = None,
        metadata: Metadata | None = None,
    ) -> _Reply:
        """Makes a call with one reply, at `address` or any of the client's routers."""
        attempts = self._connection.attempts(timeout_s, address)
        return await self._attempt(lambda each: method(self._stubs[each]), message, attempts, metadata)

    async def _administer(self, method: AsyncAdminMethod[_Reply], message: Any) -> _Reply:
        """Makes an operator's call."""
        attempts = self._connection.attempts()
        return await self._attempt(lambda each: method(AdminStub(self._channels[each])), message, attempts)

    async def _attempt(
        self, call_at: AsyncCallAt[_Reply], message: Any, attempts: Attempts, metadata: Metadata | None = None
    ) -> _Reply:
        sent = self._connection.metadata if metadata is None else metadata
        while True:
            try:
                return await call_at(attempts.address)(message, timeout=attempts.timeout_s, metadata=sent)
            except grpc.RpcError as error:
                await asyncio.sleep(attempts.delay_after(from_rpc_error(error)))

    async def _stream(self, message: inference_pb2.GenerateRequest, request: Request) -> AsyncIterator[Piece]:
        attempts = self._connection.attempts(timeout_of(request, self._connection.timeout_s))
        metadata = self._connection.metadata_of(request)
        progress = StreamProgress(message)
        while not progress.is_complete:
            stub = self._stubs[attempts.address]
            call = stub.GenerateStream(progress.request, timeout=attempts.timeout_s, metadata=metadata)
            try:
                async for chunk in call:
                    progress.take(chunk)
                    attempts.progress()
                    yield piece_of(chunk)
            except grpc.RpcError as error:
                if not progress.is_complete:
                    await asyncio.sleep(attempts.delay_after(from_rpc_error(error)))
            finally:
                call.cancel()  # type: ignore[no-untyped-call,unused-ignore]  # when the iteration is left
