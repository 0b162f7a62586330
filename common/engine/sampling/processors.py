"""Logits processors that the operator installs: code that changes logits, found by entry point.

A package offers one in the group `baton.logits_processors`, and the setting `logits_processors` of pods names those
that are loaded, in order; by default none is. The entry point is a factory, called once per engine with the size of
the vocabulary and the device of the logits.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.rules import NO_RULES, TokenRules
from common.errors import ConfigError, quoted
from common.types import SamplingParams

GROUP = "baton.logits_processors"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request that samples a token in this step."""

    params: SamplingParams
    token_ids: npt.NDArray[np.int64]  # prompt and output so far
    num_prompt_tokens: int
    rules: TokenRules = NO_RULES
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def output_position(self) -> int:
        """Index, among the output tokens, of the token to be sampled."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> npt.NDArray[np.int64]:
        """The output so far. A head that proposes drafts may not have all of it, and count less than no prompt."""
        return self.token_ids[max(self.num_prompt_tokens, 0) :]


class LogitsProcessor(Protocol):
    """Called on the thread of the engine's steps, which wait for it.

    What it does must follow from the request alone, its parameters and tokens, without state between calls: the first
    token of a request is sampled on the prefill pod, the others on one or more decode pods, which must agree. All pods
    of a cluster load the same processors.
    """

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether requests with these parameters are processed. Their `vllm_xargs` are for processors."""

    def process(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Changes logits [len(rows), vocabulary], float32, in place; each row says what request it is of, and which
        tokens that has so far. Comes after penalties and before masks; -inf masks a token."""


class ProcessorFactory(Protocol):
    """The object that an entry point names."""

    def __call__(self, *, vocab_size: int, device: torch.device) -> LogitsProcessor:
        """Makes the processor of one engine."""


def load_processors(names: Sequence[str], *, vocab_size: int, device: torch.device) -> tuple[LogitsProcessor, ...]:
    """The processors of these names, in order. Raises ConfigError if one is not installed or cannot be made."""
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    processors = []
    for name in names:
        if name not in installed:
            known = f"; installed: {', '.join(sorted(installed))}" if installed else "; none is installed"
            raise ConfigError.of("logits_processors", f"{quoted(name)} is not installed{known}")
        try:
            factory = cast("ProcessorFactory", installed[name].load())
            processors.append(factory(vocab_size=vocab_size, device=device))
        except Exception as error:  # whatever third-party code raises
            raise ConfigError.of("logits_processors", f"{name} cannot be loaded: {error}") from error
    if names:
        logger.info("logits processors: %s", ", ".join(names))
    return tuple(processors)


def apply_processors(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Applies to each row of `logits` [rows, vocabulary] its processors, in place. Where one raises, its rows become
    NaN, so that their requests end with an error and the others go on."""
    for processor in dict.fromkeys(processor for row in rows for processor in row.processors):
        of_it = [index for index, row in enumerate(rows) if processor in row.processors]
        index = torch.tensor(of_it, device=logits.device)
        chosen = logits[index]
        try:
            processor.process(chosen, [rows[i] for i in of_it])
        except Exception:
            logger.exception("logits processor %s failed; its %d requests end", type(processor).__name__, len(of_it))
            chosen.fill_(torch.nan)
        logits[index] = chosen
