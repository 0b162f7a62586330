"""Has a model of random weights give certain answers, at the cost of its own; and proposers that know these.

The processor is installed for this process alone, as a package would be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from common.engine.config import EngineConfig
from common.engine.sampling.processors import GROUP, SamplingRow
from common.engine.speculation.base import Context, Proposer
from common.engine.speculation.fake import FakeProposer
from common.types import SamplingParams

NAME = "forced_answers"
NUM_DRAFTS = 4
ANSWERS: dict[str, list[int]] = {}
FREE = -1  # in an answer: what the model says itself
_VOCAB_SIZE = 32_000  # of the smallest model
_CERTAIN = 1e9  # more than any logit


class ForcedAnswers:
    """See LogitsProcessor. `vllm_xargs` of requests name their answer."""

    def applies_to(self, params: SamplingParams) -> bool:
        """See LogitsProcessor."""
        return "answer" in (params.vllm_xargs or {})

    def process(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """See LogitsProcessor."""
        token_ids = [_answer_of(row.params)[row.output_position] for row in rows]
        for number, token_id in enumerate(token_ids):
            if token_id != FREE:
                logits[number, token_id] = _CERTAIN


def create(*, vocab_size: int, device: torch.device) -> ForcedAnswers:
    """See ProcessorFactory."""
    del vocab_size, device
    return ForcedAnswers()


def install(directory: Path) -> None:
    """Puts the entry point into a directory for packages of this process."""
    about = directory / f"{NAME}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{NAME} = {__name__}:create\n")
    sys.path.append(str(directory))


def right(config: EngineConfig) -> Proposer:
    """All drafts are right."""
    del config
    return FakeProposer(_next_token, "right", NUM_DRAFTS, vocab_size=_VOCAB_SIZE)


def wrong(config: EngineConfig) -> Proposer:
    """Hardly one is."""
    del config
    return FakeProposer(lambda token_ids, _: len(token_ids), "right", NUM_DRAFTS, vocab_size=_VOCAB_SIZE)


def _next_token(token_ids: Sequence[int], request: Context) -> int:
    return _answer_of(request.sampling)[len(token_ids) - request.num_prompt_tokens]


def _answer_of(params: SamplingParams) -> list[int]:
    assert params.vllm_xargs is not None
    return ANSWERS[str(params.vllm_xargs["answer"])]
