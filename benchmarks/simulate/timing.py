"""How long a step takes on a kind of hardware, and how large the caches are."""

from __future__ import annotations

from typing import NamedTuple

TARGET_ITL_S = 0.05  # the pods' default


class Hardware(NamedTuple):
    """One kind of pod. A step takes its overheads, and the longer of moving its data and computing its tokens."""

    name: str
    overhead_s: float  # of any step
    weights_s: float  # to read the weights once
    context_token_s: float  # to read the KV of one token of one sequence that decodes
    token_s: float  # to compute one token
    sequence_s: float  # per sequence of the step, whatever its tokens
    attention_s: float  # per token computed and token of its context
    handoff_s: float  # of a handoff, whatever its size
    handoff_token_s: float  # to move one token's KV
    num_blocks: int
    block_size: int  # tokens; larger than usual, so that a simulation has fewer of them
    max_num_batched_tokens: int
    max_num_seqs: int

    def step_s(self, tokens: int, sequences: int, decode_context: int, attended: float) -> float:
        """Seconds of a step that computes `tokens`. `decode_context`: tokens of KV that its decoding sequences read;
        `attended`: pairs of a prompt token and a token before it."""
        moving_s = self.weights_s + decode_context * self.context_token_s
        computing_s = tokens * self.token_s + attended * self.attention_s
        return self.overhead_s + sequences * self.sequence_s + max(moving_s, computing_s)


# Llama 3.1 8B in bfloat16: 16 GB of weights and 128 KiB of KV per token at 80 % of 3.35 TB/s; 16 GFLOP per token at
# 46 % of 989 TFLOP/s, attention 0.5 MFLOP per pair at a third of it; 56 GB of KV; handoffs at 20 GB/s.
H100_8B = Hardware(
    name="H100, 8B model",
    overhead_s=1.5e-3,
    weights_s=6.0e-3,
    context_token_s=4.9e-8,
    token_s=3.5e-5,
    sequence_s=5e-6,
    attention_s=1.6e-9,
    handoff_s=3e-3,
    handoff_token_s=6.5e-6,
    num_blocks=6_700,
    block_size=64,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
)

# Fitted to benchmarks/results/engine.md, demo model: decode 2.42 ms at batch 1, 3.73 ms at batch 8; prefill 12,540
# tokens/s.
CPU_DEMO = Hardware(
    name="two CPU cores, demo model",
    overhead_s=2.2e-3,
    weights_s=0.0,
    context_token_s=0.0,
    token_s=7.8e-5,
    sequence_s=1.1e-4,
    attention_s=0.0,
    handoff_s=5e-3,
    handoff_token_s=2e-6,
    num_blocks=2048,
    block_size=64,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
)

HARDWARE = {"h100": H100_8B, "cpu": CPU_DEMO}
