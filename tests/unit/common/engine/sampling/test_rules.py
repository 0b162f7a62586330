"""What rules of tokens cost each step that they are part of."""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.sampling.rules import rules_of
from common.types import SamplingParams

VOCAB = 40


class CountedOperations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def work_of(words, output):
    """Operations of torch, and calls of Python, for one mask; and the tokens that it excludes."""
    rules = rules_of(SamplingParams(bad_word_token_ids=words), frozenset(), VOCAB)
    with CountedOperations() as operations:
        rules.mask(torch.zeros(VOCAB), output, 0)
    logits, calls = torch.zeros(VOCAB), []
    sys.setprofile(lambda *_: calls.append(None))
    rules.mask(logits, output, 0)
    sys.setprofile(None)
    return operations.count, len(calls), {token for token in range(VOCAB) if logits[token] == -math.inf}


def test_hundreds_of_bad_words_that_the_output_follows_take_as_many_operations_as_one():
    words = tuple(((3,) * (1 + number % 40) + (4 + number % 20,)) for number in range(256))
    output = np.full(50, 3)
    of_all, of_one = work_of(words, output), work_of(words[:1], output)
    assert (of_all[-1], of_one[-1]) == (set(range(4, 24)), {4})
    assert of_all[:-1] == of_one[:-1]
