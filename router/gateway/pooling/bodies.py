"""Bodies of POST /v1/embeddings, /v1/classify, /v1/score, /v1/rerank and /pooling."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.types import PoolingFacts, PoolingParams
from common.types.pooling import PoolingTask
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.generation_body import ModelName
from router.gateway.bodies.prompts import Prompts, num_prompts, read_prompts
from router.gateway.pooling.asked import Asked, Options, Scored, check_num_inputs, named, score
from router.requests.bounds import MAX_SALT_CHARS

_Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
EncodingFormat = Literal["float", "base64"]

_BY_PREFERENCE: tuple[PoolingTask, ...] = ("token_embed", "token_classify", "classify")
_INPUT = "A text, token ids, or a list of either."
_ENCODING = "`float`: numbers; `base64`: those of float32, little-endian. Default `float`."


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all these bodies."""

    model: Annotated[ModelName | None, Meta(description="A served model's name; default: the only one's.")] = None
    request_id: Annotated[str | None, Meta(description="The request's id; default: random.")] = None
    cache_salt: Annotated[_Salt | None, Meta(description="Requests with different salts never share cached KV.")] = None
    priority: Annotated[int | None, Meta(description="Lower runs first under the priority policy; default 0.")] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(
            description="Only the last so many tokens of an input are taken; -1: as many as the context has room for."
        ),
    ] = None
    user: Annotated[str | None, Meta(description="Accepted without effect.")] = None

    @property
    def options(self) -> Options:
        """The options of all inputs."""
        return Options(
            model=self.model,
            request_id=self.request_id or "",
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class _InputBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """The fields of bodies whose inputs stand for themselves."""

    input: Annotated[Prompts, Meta(description=_INPUT)]
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin and end texts as the tokenizer says; default true.")
    ] = None

    def _asked(self, pooling: PoolingParams) -> Asked:
        check_num_inputs(num_prompts(self.input), "input")
        prompts = read_prompts(self.input, "input", add_special_tokens=self.add_special_tokens is not False)
        return Asked(named(prompts, "input"), pooling)


class EmbeddingBody(_InputBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    encoding_format: Annotated[EncodingFormat | None, Meta(description=_ENCODING)] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="So many leading numbers of each embedding; default: all.")
    ] = None
    normalize: Annotated[
        bool | None, Meta(description="False: not normalised even if the model's files say so; default true.")
    ] = None

    def asked(self, facts: PoolingFacts) -> Asked:
        """The request for a model with these facts. Raises InvalidRequestError."""
        use_activation = self.normalize is not False
        return self._asked(PoolingParams(task="embed", dimensions=self.dimensions or 0, use_activation=use_activation))


class ClassifyBody(_InputBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/classify."""

    use_activation: Annotated[
        bool | None, Meta(description="False: the outputs themselves instead of probabilities; default true.")
    ] = None

    def asked(self, facts: PoolingFacts) -> Asked:
        """The request for a model with these facts. Raises InvalidRequestError."""
        return self._asked(PoolingParams(task="classify", use_activation=self.use_activation is not False))


class PoolingBody(_InputBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /pooling."""

    task: Annotated[
        PoolingTask | None,
        Meta(
            description="`embed`, `classify`, `token_embed` or `token_classify`; default: the one of a vector for each "
            "token, or `classify` where the model classifies whole prompts."
        ),
    ] = None
    encoding_format: Annotated[EncodingFormat | None, Meta(description=_ENCODING)] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="So many leading numbers of each embedding; default: all.")
    ] = None
    use_activation: Annotated[
        bool | None, Meta(description="False: neither normalised nor turned into probabilities; default true.")
    ] = None

    def asked(self, facts: PoolingFacts) -> Asked:
        """The request for a model with these facts. Raises InvalidRequestError."""
        preferred = [task for task in _BY_PREFERENCE if task in facts.tasks]
        task: PoolingTask = self.task or (preferred[0] if preferred else "token_embed")
        use_activation = self.use_activation is not False
        return self._asked(PoolingParams(task=task, dimensions=self.dimensions or 0, use_activation=use_activation))


class _ScoringBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """The fields of bodies whose texts are compared."""

    use_activation: Annotated[
        bool | None, Meta(description="False: the outputs of a classifier themselves; default true.")
    ] = None


class ScoreBody(_ScoringBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/score."""

    text_1: Annotated[str | list[str], Meta(description="A text for all of `text_2`, or one for each.")]
    text_2: Annotated[str | list[str], Meta(description="A text, or a list.")]

    def asked(self, facts: PoolingFacts) -> Scored:
        """The request for a model with these facts. Raises InvalidRequestError."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        return score(facts, first, second, ("text_1", "text_2"), use_activation=self.use_activation is not False)


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document of a ranking."""

    text: str


class RerankBody(_ScoringBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rerank."""

    query: Annotated[str, Meta(description="The text that documents are ranked by.")]
    documents: Annotated[list[str | Document], Meta(description='Texts, or objects {"text": ...}.')]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="So many of the best documents; 0, and by default: all.")
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="Answer with the documents' texts, too; default true.")
    ] = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def asked(self, facts: PoolingFacts) -> Scored:
        """The request for a model with these facts. Raises InvalidRequestError."""
        names = ("query", "documents")
        return score(facts, [self.query], self.texts, names, use_activation=self.use_activation is not False)


AnyBody = EmbeddingBody | ClassifyBody | PoolingBody | ScoreBody | RerankBody

_KINDS: tuple[type[AnyBody], ...] = (EmbeddingBody, ClassifyBody, PoolingBody, ScoreBody, RerankBody)
_decoders: dict[type[AnyBody], msgspec.json.Decoder[AnyBody]] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=kind):
        return _decoders[kind].decode(body)
