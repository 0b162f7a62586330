"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import msgspec
from msgspec import Meta

from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.generation_body import ModelName
from router.gateway.endpoint import Body, JsonEndpoint
from router.requests.bounds import MAX_MODEL_CHARS
from router.security.access import AccessControl
from router.serving.adapters import MAX_PATH_CHARS
from router.serving.service import InferenceService
from router.wire.exchange import Exchange

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS, description="Name that requests give as model.")]
_BaseModel = Annotated[ModelName | None, Meta(description="The adapter's model; default: the only one.")]


class LoadAdapterBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: _Name
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=MAX_PATH_CHARS, description="Directory as the pods see it, or hub id.")
    ]
    load_inplace: Annotated[
        bool, Meta(description="The name may be taken; it stands for this adapter from now on.")
    ] = False
    base_model_name: _BaseModel = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: _Name
    lora_int_id: Annotated[int | None, Meta(description="Ignored; vLLM has it.")] = None
    base_model_name: _BaseModel = None


class _AdapterEndpoint(JsonEndpoint[Body]):
    """An endpoint for operators; the guard above has checked the key."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        super().__init__("adapter-", service, access)

    async def _serve(self, parsed: Body, exchange: Exchange, arrived_at: float) -> None:
        self._access.check_no_page(exchange.given_header("origin"))
        await exchange.send_text(await self._act(parsed, exchange))

    @abstractmethod
    async def _act(self, parsed: Body, exchange: Exchange) -> str:
        """Returns the text of the answer. Raises BatonError."""


class LoadAdapterEndpoint(_AdapterEndpoint[LoadAdapterBody]):
    """An ASGI application."""

    def _parse(self, body: bytes) -> LoadAdapterBody:
        with request_errors(struct=LoadAdapterBody):
            return msgspec.json.decode(body, type=LoadAdapterBody)

    async def _act(self, parsed: LoadAdapterBody, exchange: Exchange) -> str:
        await self._service.adapters.load(
            parsed.lora_name,
            parsed.lora_path,
            exchange.tenant,
            base_model=parsed.base_model_name,
            in_place=parsed.load_inplace,
        )
        return f"Success: LoRA adapter '{parsed.lora_name}' added successfully."


class UnloadAdapterEndpoint(_AdapterEndpoint[UnloadAdapterBody]):
    """An ASGI application."""

    def _parse(self, body: bytes) -> UnloadAdapterBody:
        with request_errors(struct=UnloadAdapterBody):
            return msgspec.json.decode(body, type=UnloadAdapterBody)

    async def _act(self, parsed: UnloadAdapterBody, exchange: Exchange) -> str:
        await self._service.adapters.unload(parsed.lora_name, exchange.tenant, base_model=parsed.base_model_name)
        return f"Success: LoRA adapter '{parsed.lora_name}' removed successfully."
