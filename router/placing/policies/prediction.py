"""Predicts a request's service on each pod, in seconds.

A step takes `base_s + tokens * token_s + context * context_s`, times the pod's slowness; all four are learned
(`step_times`). From that:

- queue: the prompt tokens before this request's, computed at the pod's pace;
- prefill: the prompt's own tokens that are not cached, in steps as large as the pod makes them: `common.step_budget`;
- wait: for a slot or for KV blocks on a pod that decodes, if it is full;
- transfer: the KV that the decode pod lacks;
- ITL: a step with all that decodes there plus this request, and what of prompts shares it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.step_budget import prefill_work
from router.placing.policies.table import Column, PodColumns

_QUEUE_WEIGHT = 1.1  # waiting is a little dearer than computing: a queue may hold surprises, a second copy is of use
_ANSWER_WEIGHT = 0.25  # a second until the first token is felt more than one that is spread over the answer
_CROWDING = 4.0  # answers' times that a request waits for KV on a pod that lacks all of its blocks


class Prediction(NamedTuple):
    """Seconds, one per pod."""

    queue_s: Column  # until the prompt's turn
    prefill_s: Column  # for the prompt; 0 if another pod computes it
    wait_s: Column  # for room to decode in
    transfer_s: Column  # to move the prompt's KV here
    ttft_s: Column  # until the first token, of what happens on this pod
    itl_s: Column  # between tokens, at the worst: while prompts are computed
    cost_s: Column  # what the request takes here; of the answer only what it takes longer than on the best pod


def predict(
    *,
    num_prompt_tokens: int,
    cached_tokens: Column,
    expected_output_tokens: float,
    context_tokens: float,
    handoff_token_s: float,
    block_size: int,
    target_itl_s: float,
    computes: bool,
    decodes: bool,
    pods: PodColumns,
) -> Prediction:
    """Predicts a request's service on each pod. `computes`: the pod computes the prompt; `decodes`: it produces the
    answer."""
    nothing = np.zeros(len(pods))
    uncached = np.maximum(num_prompt_tokens - cached_tokens, 1)  # one is computed in any case, to have a first token
    if decodes:
        token_s, context_s, step_s, room, crowding = pods.decode_steps
    else:
        line = pods.step_times.line
        token_s, room = line.token_s * pods.slowness, pods.room_alone
        step_s = (line.base_s + line.context_s * pods.context_tokens) * pods.slowness

    queue_s = prefill_s = transfer_s = wait_s = nothing
    chunk: Column = pods.queued_tokens
    if computes:
        work = prefill_work(uncached, cached_tokens)
        queue_s = pods.queued_tokens * (token_s + step_s / room)
        prefill_s = np.ceil(work / room) * step_s + work * token_s
        chunk = chunk + uncached
    itl_s = cost_s = nothing
    if decodes:
        pure_itl_s = step_s + token_s + context_s * context_tokens
        target_s = np.minimum(pods.target_itl_s, target_itl_s)
        itl_s = pure_itl_s + token_s * np.minimum(chunk, pods.room_beside(pure_itl_s, token_s, target_s))
        answer_s = expected_output_tokens * pure_itl_s
        lacking = (uncached + expected_output_tokens) / block_size - pods.free_blocks
        wait_s = (np.maximum(lacking, 0) / pods.num_blocks * _CROWDING + crowding) * answer_s
        cost_s = _ANSWER_WEIGHT * (answer_s - answer_s.min(initial=np.inf)) + wait_s
        if not computes:
            transfer_s = uncached * handoff_token_s
            cost_s = cost_s + transfer_s + pods.queued_tokens * token_s  # what is queued delays the answer's steps
    ttft_s = queue_s + prefill_s
    if computes:
        cost_s = cost_s + _QUEUE_WEIGHT * queue_s + prefill_s
        ttft_s = ttft_s + wait_s
    return Prediction(queue_s, prefill_s, wait_s, transfer_s, ttft_s, itl_s, cost_s)
