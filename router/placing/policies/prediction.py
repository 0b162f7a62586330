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

from common.step_budget import knee_tokens, prefill_work
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
    line = pods.step_times.line
    token_s = line.token_s * pods.slowness
    budget = pods.max_num_batched_tokens
    uncached = np.maximum(num_prompt_tokens - cached_tokens, 1)  # one is computed in any case, to have a first token
    num_requests = pods.num_requests if decodes else nothing

    queue_s = prefill_s = transfer_s = wait_s = nothing
    chunk: Column = pods.queued_tokens
    # What a step costs before any of its prompt tokens.
    step_s = line.base_s * pods.slowness + token_s * num_requests + line.context_s * pods.slowness * pods.context_tokens
    room = np.clip(knee_tokens(line), 1, budget)
    if decodes:
        room = np.where(num_requests > 0, _room_beside(pods, step_s, token_s, pods.target_itl_s), room)
    if computes:
        work = prefill_work(uncached, cached_tokens)
        queue_s = pods.queued_tokens * (token_s + step_s / room)
        prefill_s = np.ceil(work / room) * step_s + work * token_s
        chunk = chunk + uncached
    itl_s = cost_s = nothing
    if decodes:
        pure_itl_s = step_s + token_s + line.context_s * pods.slowness * context_tokens
        target_s = np.minimum(pods.target_itl_s, target_itl_s)
        chunk = np.minimum(chunk, _room_beside(pods, pure_itl_s, token_s, target_s))
        itl_s = pure_itl_s + token_s * chunk
        answer_s = expected_output_tokens * pure_itl_s
        lacking = (uncached + expected_output_tokens) / block_size - pods.free_blocks
        crowd = np.maximum(lacking, 0) / pods.num_blocks * _CROWDING
        crowd += np.maximum(num_requests + 1 - pods.max_num_seqs, 0) / pods.max_num_seqs
        wait_s = crowd * answer_s
        cost_s = _ANSWER_WEIGHT * (answer_s - answer_s.min(initial=np.inf)) + wait_s
        if not computes:
            transfer_s = uncached * handoff_token_s
            cost_s = cost_s + transfer_s + pods.queued_tokens * token_s  # what is queued delays the answer's steps
    ttft_s = queue_s + prefill_s + (wait_s if computes else nothing)
    if computes:
        cost_s = cost_s + _QUEUE_WEIGHT * queue_s + prefill_s
    return Prediction(queue_s, prefill_s, wait_s, transfer_s, ttft_s, itl_s, cost_s)


def _room_beside(pods: PodColumns, step_s: Column, token_s: Column, target_s: Column) -> Column:
    """Prompt tokens of a step beside streams, which without them takes `step_s`. See `common.step_budget`."""
    most = np.maximum(pods.max_num_batched_tokens - pods.num_requests, 1)
    with np.errstate(over="ignore"):  # clients may name any target: then all that fits is allowed
        allowed = (target_s - step_s) / token_s
    return np.minimum(np.maximum(allowed, pods.min_prefill_tokens), most)
