"""The pods that are simulated here."""

from __future__ import annotations

from planning.simulator.hardware import Hardware, Roofline

# Llama 3.1 8B in bfloat16: 16 GB of weights and 128 KiB of KV per token at 80 % of 3.35 TB/s; 16 GFLOP per token at
# 46 % of 989 TFLOP/s, attention 0.5 MFLOP per pair at a third of it; 56 GB of KV; handoffs at 20 GB/s.
H100_8B = Hardware(
    name="H100, 8B model",
    steps=Roofline(
        overhead_s=1.5e-3,
        weights_s=6.0e-3,
        context_token_s=4.9e-8,
        token_s=3.5e-5,
        sequence_s=5e-6,
        attention_s=1.6e-9,
    ),
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
    steps=Roofline(
        overhead_s=2.2e-3,
        weights_s=0.0,
        context_token_s=0.0,
        token_s=7.8e-5,
        sequence_s=1.1e-4,
        attention_s=0.0,
    ),
    handoff_s=5e-3,
    handoff_token_s=2e-6,
    num_blocks=2048,
    block_size=64,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
)
