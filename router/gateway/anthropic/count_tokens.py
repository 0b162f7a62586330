"""POST /v1/messages/count_tokens: the model's tokenizer, under the limits of generations."""

from __future__ import annotations

import msgspec

from router.gateway.anthropic.bodies import parse_count
from router.gateway.bodies.field_names import MESSAGES_NAMES
from router.gateway.endpoint import JsonEndpoint
from router.gateway.openai.chat_bodies import ChatBody
from router.requests.terms import read_terms
from router.security.access import AccessControl
from router.serving.service import InferenceService
from router.wire.answer_struct import AnswerStruct
from router.wire.exchange import Exchange


class CountedTokens(AnswerStruct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class CountTokensEndpoint(JsonEndpoint[ChatBody]):
    """An ASGI application."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        super().__init__("count-", service, access)

    def _parse(self, body: bytes) -> ChatBody:
        return parse_count(body)

    async def _serve(self, parsed: ChatBody, exchange: Exchange, arrived_at: float) -> None:
        account = self._access.account(exchange.tenant)
        with MESSAGES_NAMES.in_errors():
            terms = read_terms(exchange.given_header, exchange.tenant)
            (draft,) = parsed.drafts(exchange.request_id, arrived_at, terms)
            preprocessor = self._service.asked(parsed.model, exchange.tenant).model.preprocessor
            token_ids = await preprocessor.tokenize(draft.prompt, draft.prompt_param, exchange.tenant)
            account.spend(len(token_ids))
            await exchange.send_json(msgspec.json.encode(CountedTokens(len(token_ids))))
