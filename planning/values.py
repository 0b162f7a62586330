"""Values for the Helm chart that a plan leads to."""

from __future__ import annotations

from typing import Any

import yaml

from planning.plan import Plan
from planning.profile import EngineProfile
from planning.report import size_in_words


def chart_values(plan: Plan, profile: EngineProfile) -> dict[str, Any]:
    """Returns what differs from the chart's own values."""
    shared = {
        "block_size": profile.block_size,
        "max_num_batched_tokens": profile.max_num_batched_tokens,
        "max_num_seqs": profile.max_num_seqs,
    }
    decode = {**shared, "target_itl_ms": round(1e3 * plan.slo.target_itl_s, 3)}
    values: dict[str, Any] = {
        "prefill": {"replicas": plan.size.num_prefill},
        "decode": {"replicas": plan.size.num_decode, "settings": decode},
    }
    if plan.size.num_prefill:
        values["prefill"]["settings"] = shared
    return values


def write_values(plan: Plan, profile: EngineProfile) -> str:
    """Returns the file's text, with the reasons as comments."""
    asked = plan.asked
    lines = [
        f"{size_in_words(plan.size)} for {plan.rate:.4g} requests/s of {profile.model}, {profile.dtype}.",
        f"Engine: {profile.machine}.",
        f"They hold up to {asked.most_rate:.4g} requests/s ({asked.headroom:+.0%}).",
        *(f"{name}: {reason}" for name, reason in plan.reasons),
    ]
    comment = "".join(f"# {line}\n" for line in lines)
    return comment + yaml.safe_dump(chart_values(plan, profile), sort_keys=False)
