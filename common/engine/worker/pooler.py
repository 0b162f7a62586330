"""Turns hidden states of a prompt into its numbers: an embedding, the outputs of a classification head.

All arithmetic is in float32, whatever the type of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from common.engine.contract.step import SchedulerOutput
from common.engine.worker.batch import PromptRun
from common.types import PoolingFacts, PoolingParams, RequestId
from common.types.pooling import PER_TOKEN


@dataclass(slots=True)
class _Pooled:
    params: PoolingParams
    num_tokens: int  # of the prompt
    total: torch.Tensor | None = None  # [size]: of a mean, the sum so far; of cls, the first token
    rows: list[torch.Tensor] | None = None  # [tokens, size]: of chunks so far, where every token has a vector


class Pooler:
    """Owns what was computed of requests whose prompts take several steps. Called on the runner's thread."""

    def __init__(self, facts: PoolingFacts, head: ClassificationHead | None) -> None:
        self._facts = facts
        self._head = head
        self._requests: dict[RequestId, _Pooled] = {}

    def update(self, step: SchedulerOutput) -> None:
        """Forgets dropped requests and takes note of new ones."""
        for request_id in step.dropped_request_ids:
            self._requests.pop(request_id, None)
        for new in step.new_requests:
            if new.pooling is not None:
                self._requests[new.request_id] = _Pooled(new.pooling, new.num_prompt_tokens)

    def pool(self, runs: Sequence[PromptRun], hidden: torch.Tensor) -> dict[RequestId, bytes]:
        """Takes the hidden states [rows, size] of `runs`, one after the other. Returns the numbers of requests whose
        prompts end with them: rows of float32, or nothing if one is not finite."""
        done: list[tuple[RequestId, PoolingParams, torch.Tensor]] = []
        for run, rows in zip(runs, torch.split(hidden, [run.num_tokens for run in runs]), strict=True):
            request = self._requests[run.request_id]
            vectors = self._add(request, rows, is_last=run.is_last)
            if run.is_last:
                done.append((run.request_id, request.params, vectors))
                del self._requests[run.request_id]
        return dict(self._finish(done))

    def _add(self, request: _Pooled, rows: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        """Returns the vectors of the prompt so far, [1, size], or [tokens, size]."""
        match self._facts.method_of(request.params):
            case "last":
                return rows
            case "cls":
                if request.total is None:
                    request.total = rows[0]
                return request.total[None]
            case "mean":
                own = rows.sum(dim=0)
                request.total = own if request.total is None else request.total + own
                return request.total[None] / request.num_tokens
            case "all":
                request.rows = [*(request.rows or ()), self._wanted(rows, request.params)]
                return torch.cat(request.rows) if is_last else rows

    def _wanted(self, rows: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """The numbers of tokens that are kept until the prompt is whole, of which there are few beside the hidden
        states: labels', or those of embeddings that are asked for."""
        if _is_classified(params):
            assert self._head is not None
            return self._head(rows)
        return rows[:, : params.dimensions or None]

    def _finish(
        self, done: Sequence[tuple[RequestId, PoolingParams, torch.Tensor]]
    ) -> Iterable[tuple[RequestId, bytes]]:
        """Computes what is left to be done of vectors."""
        for request_id, params, own in done:
            found = own if params.task in PER_TOKEN else self._wanted(own, params)
            if _is_classified(params):
                found = _activate(found, self._facts) if params.use_activation else found
            elif params.use_activation and self._facts.normalizes:
                found = functional.normalize(found, dim=1)
            yield request_id, found.cpu().numpy().tobytes() if bool(torch.isfinite(found).all()) else b""


class ClassificationHead:
    """A linear layer that gives the outputs of each label."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [labels, size] and `bias` [labels]."""
        self._weight = weight.float()
        self._bias = None if bias is None else bias.float()

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Outputs [rows, labels] of `vectors` [rows, size]."""
        return functional.linear(vectors, self._weight, self._bias)


def _is_classified(params: PoolingParams) -> bool:
    return params.task in ("classify", "token_classify")


def _activate(outputs: torch.Tensor, facts: PoolingFacts) -> torch.Tensor:
    match facts.activation:
        case "softmax":
            return outputs.softmax(dim=1)
        case "sigmoid":
            return outputs.sigmoid()
        case "identity":
            return outputs
