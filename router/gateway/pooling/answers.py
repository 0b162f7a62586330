"""The forms of answers, for the API's description. Those with many numbers are written in endpoints.py, for speed by
hand; tests hold them against these."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.gateway.openai.answers import PromptTokensDetails
from router.wire.answer_struct import AnswerStruct


class PooledUsage(AnswerStruct):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(AnswerStruct):
    """The embedding of an input; a text if it is in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(AnswerStruct):
    """Answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PooledUsage


class PooledData(AnswerStruct):
    """The numbers of an input: one vector, or one for each token; a text if they are in base64, with all vectors one
    after the other."""

    object: Literal["pooling"]
    index: int
    data: list[float | list[float]] | str


class PooledList(AnswerStruct):
    """Answer of POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledData]
    usage: PooledUsage


class ClassifiedData(AnswerStruct):
    """The labels' probabilities for an input, in the order of the model's labels; `label` is the likeliest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(AnswerStruct):
    """Answer of POST /v1/classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedData]
    usage: PooledUsage


class ScoreData(AnswerStruct):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(AnswerStruct):
    """Answer of POST /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: PooledUsage


class RankedDocument(AnswerStruct):
    """A document as it was sent."""

    text: str


class Ranked(AnswerStruct, omit_defaults=True):
    """A document by its index among those sent."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class Ranking(AnswerStruct):
    """Answer of POST /v1/rerank, the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
