"""Bodies of POST /tokenize and POST /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Raw, field

from router.gateway.bodies.chat_prompts import (
    Documents,
    chat_prompt,
    check_continuation,
    decode_documents,
    decode_variables,
)
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.fields import REFUSED_BY_TOKENIZED_CHATS, RefusedFields, with_fields
from router.gateway.bodies.generation_body import ModelName
from router.gateway.bodies.messages import Message
from router.gateway.bodies.tools import read_tools
from router.gateway.openai.chat_bodies import has_messages
from router.requests.bounds import MAX_MESSAGES
from router.requests.request import ChatPrompt, TextPrompt


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all these bodies."""

    model: Annotated[ModelName | None, Meta(description="A served model's name; default: the only one's.")] = None


class _TokenizeBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """The fields of texts and chats."""

    return_token_strs: Annotated[
        bool | None, Meta(description="Answer with the tokens as the vocabulary spells them, too.")
    ] = None


class TokenizeTextBody(_TokenizeBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize for a text."""

    prompt: Annotated[str, Meta(description="The text.")]
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin the prompt as the tokenizer says; default true.")
    ] = None

    def as_prompt(self) -> TextPrompt:
        """Returns the prompt to tokenise."""
        return TextPrompt(self.prompt, add_special_tokens=self.add_special_tokens is not False)


if TYPE_CHECKING:
    _ChatFields = _TokenizeBody
else:
    _ChatFields = with_fields(_TokenizeBody, REFUSED_BY_TOKENIZED_CHATS)

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_TOKENIZED_CHATS)


class TokenizeChatBody(_ChatFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize for a chat."""

    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_MESSAGES)], Meta(description="The conversation, as of a chat.")
    ]
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Have the template open the assistant's turn; default true.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="The prompt ends where the last message ends, as of a chat.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin the prompt as the tokenizer says, before what the template writes.")
    ] = None
    chat_template_kwargs: Annotated[Raw, Meta(description="Variables of the template.")] = field(default_factory=Raw)
    tools: Annotated[Raw, Meta(description="Functions that the model may call.")] = field(default_factory=Raw)
    documents: Documents = field(default_factory=Raw)

    def as_prompt(self) -> ChatPrompt:
        """Returns the prompt to tokenise. Raises InvalidRequestError."""
        _REFUSED_FIELDS.check(self)
        check_continuation(self)
        documents = decode_documents(self.documents)
        variables = {} if documents is None else {"documents": documents}
        return chat_prompt(
            self.messages,
            tools=read_tools(self.tools),
            num_more_chars=sum(len(bytes(each)) for each in (self.tools, self.documents, self.chat_template_kwargs)),
            add_generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=self.add_special_tokens is True,
            template_variables=variables | decode_variables(self.chat_template_kwargs),
        )


class DetokenizeBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int], Meta(description="Token ids.")]


_text_decoder = msgspec.json.Decoder(TokenizeTextBody)
_chat_decoder = msgspec.json.Decoder(TokenizeChatBody)
_ids_decoder = msgspec.json.Decoder(DetokenizeBody)


def parse_tokenize(body: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """A chat if it has messages, else a text. Raises InvalidRequestError."""
    if has_messages(body):
        with request_errors(struct=TokenizeChatBody):
            return _chat_decoder.decode(body)
    with request_errors(struct=TokenizeTextBody):
        return _text_decoder.decode(body)


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=DetokenizeBody):
        return _ids_decoder.decode(body)
