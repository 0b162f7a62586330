"""How far the logits of text that a model was not trained on move with other weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tokenizers import Tokenizer

from common.engine.config import DType, KVCacheDType, ModelConfig
from common.engine.devices.attention import AttentionMetadata, ProjectionAttention
from common.engine.llm import LLM
from common.engine.model.loader import LoadedModel, load_model
from common.types import SamplingParams
from tools.demo_training.train import mixed_documents

_BLOCK_SIZE = 16
_SEED_OF_HELD_OUT = 1_000_000  # of the generated text, unlike those of training
_NUM_PREFIXES, _PREFIX, _CONTINUATION = 64, 32, 32  # texts that are continued greedily, tokens of both parts


class Weights(NamedTuple):
    """How a model is computed."""

    dtype: DType
    quantization: str | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    checkpoint: Path | None = None  # a quantised copy of the model, in a directory with the name of its format

    @property
    def name(self) -> str:
        """In words."""
        kv = None if self.kv_cache_dtype == "auto" else f"{self.kv_cache_dtype} KV"
        quantized = self.quantization if self.checkpoint is None else self.checkpoint.name
        return ", ".join(filter(None, (self.dtype, quantized, kv)))

    def config(self, model: Path) -> ModelConfig:
        """The settings with which the model is loaded."""
        directory = str(self.checkpoint or model)
        return ModelConfig(model=directory, device="cpu", dtype=self.dtype, quantization=self.quantization)


class Quality(NamedTuple):
    """The quality of one kind of weights, next to float32."""

    weights: Weights
    perplexity: float
    perplexity_ratio: float
    same_best_token: float  # share of positions
    same_continuation: float  # share of texts
    mean_difference: float  # of logits
    max_difference: float


def held_out_texts(num_documents: int) -> list[str]:
    """Text as the demo model learned, from another seed."""
    documents = islice(mixed_documents(_SEED_OF_HELD_OUT, tools_share=0.4), num_documents)
    return ["".join(part.text for part in document) for document in documents]


def tokenize(model: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The texts' first tokens; those that are too short for a prediction are left out."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = [tokenizer.encode(text).ids[:max_tokens] for text in texts]
    return [tokens for tokens in found if len(tokens) > 1]


def measure_quality(model: Path, texts: Sequence[Sequence[int]], kinds: Sequence[Weights]) -> Iterator[Quality]:
    """Quality of each kind of weights of a fused model over tokenized texts; the first kind is what others are next
    to."""
    reference, *_ = kinds
    expected = list(map(_predictor(model, reference), texts))
    loss = _loss(expected, texts)
    continued = _continuations(model, reference, texts)
    for weights in kinds:
        found = expected if weights == reference else list(map(_predictor(model, weights), texts))
        differences = [(ours - theirs).abs() for ours, theirs in zip(found, expected, strict=True)]
        same = [ours.argmax(1) == theirs.argmax(1) for ours, theirs in zip(found, expected, strict=True)]
        again = continued if weights == reference else _continuations(model, weights, texts)
        yield Quality(
            weights,
            perplexity=math.exp(_loss(found, texts)),
            perplexity_ratio=math.exp(_loss(found, texts) - loss),
            same_best_token=float(torch.cat(same).float().mean()),
            same_continuation=sum(a == b for a, b in zip(again, continued, strict=True)) / len(continued),
            mean_difference=float(torch.cat([each.mean(1) for each in differences]).mean()),
            max_difference=max(float(each.max()) for each in differences),
        )


def _predictor(model: Path, weights: Weights) -> Callable[[Sequence[int]], torch.Tensor]:
    loaded = load_model(weights.config(model), kv_cache_dtype=weights.kv_cache_dtype)

    def predict(tokens: Sequence[int]) -> torch.Tensor:
        return _logits(loaded, tokens)

    return predict


def _logits(loaded: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] in float32, of one prompt."""
    assert loaded.decoder is not None
    num_tokens = len(tokens)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    spec = loaded.kv_spec
    kv_cache = torch.zeros((1 + num_blocks, *spec.block_shape(_BLOCK_SIZE)), dtype=spec.cache_dtype)
    found = loaded.device.attention(kv_cache, loaded.kernels, loaded.dtype)
    attention = cast("ProjectionAttention", found)  # as it is fused
    positions = torch.arange(num_tokens)
    batch = AttentionMetadata(
        num_decodes=0,
        query_start=[0, num_tokens],
        seq_lens=[num_tokens],
        seq_lens_tensor=torch.tensor([num_tokens]),
        block_tables=torch.arange(1, 1 + num_blocks)[None],
        slot_mapping=_BLOCK_SIZE + positions,
    )
    attention.begin_step(batch)
    return loaded.decoder(torch.tensor(tokens), positions, batch, attention, None).float()


def _loss(logits: Sequence[torch.Tensor], texts: Sequence[Sequence[int]]) -> float:
    """Mean over all tokens but the first ones, in nats."""
    losses = [
        torch.nn.functional.cross_entropy(each[:-1].double(), torch.tensor(tokens[1:]), reduction="none")
        for each, tokens in zip(logits, texts, strict=True)
    ]
    return float(torch.cat(losses).mean())


def _continuations(model: Path, weights: Weights, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    prompts = [list(tokens[:_PREFIX]) for tokens in texts[:_NUM_PREFIXES]]
    params = SamplingParams(temperature=0.0, max_tokens=_CONTINUATION, ignore_eos=True)
    settings: dict[str, Any] = weights._asdict()
    del settings["checkpoint"]
    with LLM(weights.checkpoint or model, device="cpu", num_blocks=1000, **settings) as llm:
        return [each.token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
