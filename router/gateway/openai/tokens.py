"""POST /tokenize and /detokenize: the model's tokenizer, under the limits of generations."""

from __future__ import annotations

import msgspec

from router.gateway.endpoint import JsonEndpoint
from router.gateway.openai.answers import Detokenized, Tokenized
from router.gateway.openai.token_bodies import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
    parse_detokenize,
    parse_tokenize,
)
from router.requests.request import ChatPrompt
from router.security.access import AccessControl
from router.serving.service import InferenceService
from router.wire.exchange import Exchange


class TokenizeEndpoint(JsonEndpoint[TokenizeTextBody | TokenizeChatBody]):
    """An ASGI application."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        super().__init__("tokenize-", service, access)

    def _parse(self, body: bytes) -> TokenizeTextBody | TokenizeChatBody:
        return parse_tokenize(body)

    async def _serve(self, parsed: TokenizeTextBody | TokenizeChatBody, exchange: Exchange, arrived_at: float) -> None:
        account = self._access.account(exchange.tenant)
        model = self._service.asked(parsed.model, exchange.tenant).model
        prompt = parsed.as_prompt()
        max_model_len = model.max_model_len  # now: its pods may be gone when the tokens are there
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        token_ids = await model.preprocessor.tokenize(prompt, param, exchange.tenant)
        account.spend(len(token_ids))
        pieces = await model.preprocessor.pieces(token_ids, exchange.tenant) if parsed.return_token_strs else None
        answer = Tokenized(len(token_ids), max_model_len, token_ids, pieces)
        await exchange.send_json(msgspec.json.encode(answer))


class DetokenizeEndpoint(JsonEndpoint[DetokenizeBody]):
    """An ASGI application."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        super().__init__("detokenize-", service, access)

    def _parse(self, body: bytes) -> DetokenizeBody:
        return parse_detokenize(body)

    async def _serve(self, parsed: DetokenizeBody, exchange: Exchange, arrived_at: float) -> None:
        account = self._access.account(exchange.tenant)
        model = self._service.asked(parsed.model, exchange.tenant).model
        text = await model.preprocessor.detokenize(parsed.tokens, "tokens", exchange.tenant)
        account.spend(len(parsed.tokens))
        await exchange.send_json(msgspec.json.encode(Detokenized(text)))
