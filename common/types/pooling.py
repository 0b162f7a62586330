"""Pooling: what is computed of a prompt instead of an answer, such as an embedding."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from common.errors import InvalidRequestError
from common.types.generation import SamplingParams

GENERATE = "generate"
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
PoolingMethod = Literal["last", "cls", "mean", "all"]
Activation = Literal["softmax", "sigmoid", "identity"]

POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
PER_TOKEN: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify"})
MAX_POOLED_BYTES = 16 * 2**20  # of one prompt's numbers, which travel in one message
MAX_POOLED_REQUEST_BYTES = 64 * 2**20  # of the numbers of all prompts of a request, which a router holds at once
NUMBER_BYTES = 4  # float32

# In the place of what decides an answer, of which there is none.
NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, speculative=False)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers that are wanted of a prompt."""

    task: PoolingTask
    dimensions: int = 0  # of an embedding: so many of its leading numbers; 0: all
    use_activation: bool = True  # False: neither normalised nor turned into probabilities


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of a model, and how it pools."""

    tasks: tuple[str, ...] = (GENERATE,)  # of GENERATE and POOLING_TASKS
    method: PoolingMethod = "last"
    normalizes: bool = True  # embeddings have length 1
    embedding_size: int = 0  # numbers of an embedding
    labels: tuple[str, ...] = ()  # of a classification head, in the order of its outputs
    activation: Activation = "softmax"  # of its outputs

    def check(self, pooling: PoolingParams | None) -> None:
        """Raises InvalidRequestError that names the field. None: a generation."""
        task = GENERATE if pooling is None else pooling.task
        if task not in self.tasks:
            raise InvalidRequestError(f"{missing_task(task)}; it can {', '.join(self.tasks)}", param="model")
        if pooling is None or not pooling.dimensions:
            return
        if pooling.task not in ("embed", "token_embed"):
            raise InvalidRequestError("dimensions is for embeddings only", param="dimensions")
        if not 1 <= pooling.dimensions <= self.embedding_size:
            limit = f"an integer from 1 to {self.embedding_size}, the size of the model's embeddings"
            raise InvalidRequestError(f"dimensions must be {limit}, got {pooling.dimensions}", param="dimensions")

    @property
    def own_work(self) -> PoolingParams | None:
        """Something that the model can do, such as for a measurement. None: it generates."""
        if GENERATE in self.tasks:
            return None
        return PoolingParams(task=next(task for task in POOLING_TASKS if task in self.tasks))

    def method_of(self, pooling: PoolingParams) -> PoolingMethod:
        """The tokens of which it is computed."""
        if pooling.task in PER_TOKEN:
            return "all"
        return self.method if pooling.task == "embed" else "last"

    def needs_every_token(self, pooling: PoolingParams | None) -> bool:
        """Whether what is computed of earlier tokens is needed as well, so that none may come from a cache."""
        return pooling is not None and self.method_of(pooling) != "last"

    def num_numbers(self, pooling: PoolingParams, num_tokens: int) -> int:
        """Numbers that are computed of a prompt."""
        rows = num_tokens if pooling.task in PER_TOKEN else 1
        return rows * self.row_size(pooling)

    def row_size(self, pooling: PoolingParams) -> int:
        """Numbers of one vector."""
        if pooling.task in ("embed", "token_embed"):
            return pooling.dimensions or self.embedding_size
        return len(self.labels)

    def check_length(self, pooling: PoolingParams, num_tokens: int, *, param: str = "prompt_token_ids") -> None:
        """Raises InvalidRequestError if a prompt of so many tokens, which `param` names, gives more numbers than are
        sent."""
        num_bytes = NUMBER_BYTES * self.num_numbers(pooling, num_tokens)
        if num_bytes > MAX_POOLED_BYTES:
            raise InvalidRequestError(
                f"{pooling.task} of {num_tokens} tokens takes {num_bytes} bytes, more than the limit of "
                f"{MAX_POOLED_BYTES}; send shorter prompts",
                param=param,
            )


def missing_task(task: str) -> str:
    """Why a model cannot do `task`, in one line."""
    if task == GENERATE:
        return "the model generates no text"
    if task in ("classify", "token_classify"):
        return f"the model cannot {task}: it has no classification head"
    return f"the model cannot {task}"
