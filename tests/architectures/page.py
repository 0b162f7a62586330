"""Writes docs/architectures.md by serving each architecture: `python -m tests.architectures.page`, or `make
architectures`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.architectures.checks import LENGTHS, Verdict, check
from tests.architectures.models import MODEL_TYPES
from tests.compose.images import ROOT

PAGE = ROOT / "docs/architectures.md"
_INTRODUCTION = f"""\
# Architectures

Written by `make architectures`, which serves a tiny model with random weights of each, in float32 on a CPU, and
compares its greedy tokens with those of `transformers`: {len(LENGTHS)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens
at once, in steps of 16. `make test-matrix` does it again. No architecture is here that gives other tokens; what is not
here has not been tried.

## Served

Exact from prompts that are computed in parts, and again from the prefix cache, after a handoff between two pods, and
with drafts of `ngram`. *Two ranks*: also with `--tensor-parallel-size 2`; elsewhere that is refused. *KV*: layers of
kind `window` and `chunked` give blocks back that no token reads any more, those of kind `state` keep a
[state](states.md) in place of KV, and of `latent` ones, KV stays compressed. *Kernels*, on a CPU: a model that is
`fused` has recorded steps, and may be served with `--batch-invariant`; of others, compiled kernels compute the
attention, or torch's operators do.

| `model_type` | class | two ranks | KV | kernels |
|---|---|---|---|---|
"""
_REFUSED = """
## Refused

At start, in one line.

| `model_type` | class | reason |
|---|---|---|
"""


def page(verdicts: Mapping[str, Verdict]) -> str:
    """The page, by `model_type`."""
    text = _INTRODUCTION
    for name, verdict in verdicts.items():
        if not verdict.refused:
            is_cut = "yes" if verdict.is_cut else ""
            text += f"| `{name}` | {verdict.class_name} | {is_cut} | {verdict.groups} | {verdict.kernels} |\n"
    text += _REFUSED
    for name, verdict in verdicts.items():
        if verdict.refused:
            text += f"| `{name}` | {verdict.class_name} | {verdict.refused} |\n"
    return text


def row_of(name: str, written: str) -> str:
    """The row of an architecture on a page."""
    (row,) = [line for line in written.splitlines() if line.startswith(f"| `{name}` |")]
    return row


if __name__ == "__main__":
    PAGE.write_text(page({name: check(name) for name in MODEL_TYPES}))
