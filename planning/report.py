"""A plan for a person: text with a plot for the terminal, and a plot as SVG."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from planning.plan import Plan, ScaleStep, in_words
from planning.profile import EngineProfile
from planning.search import Measured, Size
from planning.workload import Workload

_BAR = 44  # characters of the highest rate
_HEAD = ("requests/s", "pods", "TTFT", "ITL", "prefill busy", "decode busy", "holds up to", "headroom")
_WIDTH, _LEFT, _ROW, _TOP = 720, 150, 44, 50  # of the SVG, in pixels


def describe(plan: Plan, profile: EngineProfile, workload: Workload) -> str:
    """Returns the text."""
    threads = f", {profile.num_threads} thread{'s' * (profile.num_threads > 1)}" if profile.num_threads else ""
    share = f"{plan.slo.percentile:g} %"
    ttft, itl = in_words(plan.slo.ttft_s), in_words(plan.slo.itl_s)
    width = max(len(name) for name, _ in plan.reasons)
    return "\n".join(
        [
            f"load    {plan.rate:.4g} requests/s: {workload.name} ({len(workload.requests)} requests simulated)",
            *_drafts(workload),
            f"SLO     {share} of first tokens within {ttft}, {share} of gaps between tokens within {itl}",
            f"engine  {profile.model}, {profile.dtype}, {profile.device}{threads}, {profile.machine}",
            "",
            f"pods    {size_in_words(plan.size)}",
            "",
            *(f"  {name:<{width}}  {reason}" for name, reason in plan.reasons),
            "",
            *table(plan),
            "",
            *_plot(plan),
        ]
    )


def _drafts(workload: Workload) -> list[str]:
    drafts = workload.drafts
    if not drafts.per_step:
        return []
    return [f"drafts  {drafts.tokens_per_step:.3g} tokens per decode step, {drafts.acceptance:.0%} of drafts right"]


def size_in_words(size: Size) -> str:
    """Returns "2 prefill + 3 decode", or "3, colocated"."""
    return f"{size.num_prefill} prefill + {size.num_decode} decode" if size.num_prefill else f"{size}"


def table(plan: Plan) -> list[str]:
    """Returns the steps of scale; the one that was asked for is marked."""
    rows = [_HEAD, *(_row(step) for step in plan.steps)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = [" ", *("*" if step.rate == plan.rate else " " for step in plan.steps)]
    return [
        f"{mark} " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for mark, row in zip(marks, rows, strict=True)
    ]


def _row(step: ScaleStep) -> tuple[str, ...]:
    measured = step.measured
    return (
        f"{step.rate:.4g}",
        str(step.size),
        in_words(measured.ttft_s),
        in_words(measured.itl_s),
        f"{measured.prefill_busy:.0%}" if step.size.num_prefill else "-",
        f"{measured.decode_busy:.0%}",
        f"{step.most_rate:.4g}/s",
        f"{step.headroom:+.0%}",
    )


def _plot(plan: Plan) -> list[str]:
    """A bar for each size: the rate that was asked of it, and what it holds beyond."""
    most = max(step.most_rate for step in plan.steps)
    width = max(len(str(step.size)) for step in plan.steps)
    lines = ["requests/s: # asked for, - headroom"]
    for step in plan.steps:
        asked, held = round(step.rate / most * _BAR), round(step.most_rate / most * _BAR)
        bar = ("#" * asked + "-" * (held - asked)).ljust(_BAR)
        lines.append(f"  {step.size!s:>{width}} |{bar}| {step.most_rate:.4g}")
    return lines


def as_json(plan: Plan, profile: EngineProfile, workload: Workload) -> dict[str, Any]:
    """Returns all of it. Times are seconds, rates requests per second."""
    return {
        "rate": plan.rate,
        "slo": plan.slo._asdict(),
        "workload": {
            "name": workload.name,
            "num_requests": len(workload.requests),
            "mean_prompt_tokens": workload.mean_prompt_tokens,
            "mean_output_tokens": workload.mean_output_tokens,
            "tokens_per_step": workload.drafts.tokens_per_step,
            "draft_acceptance": workload.drafts.acceptance,
        },
        "model": profile.model,
        "prefill": plan.size.num_prefill,
        "decode": plan.size.num_decode,
        "reasons": dict(plan.reasons),
        "steps": [
            {
                "rate": step.rate,
                "prefill": step.size.num_prefill,
                "decode": step.size.num_decode,
                "most_rate": step.most_rate,
                "headroom": step.headroom,
                **_figures(step.measured),
            }
            for step in plan.steps
        ],
    }


def _figures(measured: Measured) -> dict[str, float]:
    return measured._asdict()


def svg(plan: Plan) -> str:
    """Returns the plot as a drawing."""
    most = max(step.most_rate for step in plan.steps)
    scale = (_WIDTH - _LEFT - 90) / most
    height = _TOP + _ROW * len(plan.steps) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        f'<g font-family="sans-serif" font-size="14"><rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-weight="bold">requests/s: asked for, and held by these pods</text>',
    ]
    for number, step in enumerate(plan.steps):
        y = _TOP + number * _ROW
        held, asked = step.most_rate * scale, step.rate * scale
        parts += [
            f'<text x="{_LEFT - 10}" y="{y + 19}" text-anchor="end">{escape(str(step.size))}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{held:.1f}" height="28" fill="#b9d4ee"/>',
            f'<rect x="{_LEFT}" y="{y}" width="{asked:.1f}" height="28" fill="#2a6fb0"/>',
            f'<text x="{_LEFT + held + 8:.1f}" y="{y + 19}">{step.most_rate:.4g} ({step.headroom:+.0%})</text>',
        ]
    return "\n".join([*parts, "</g></svg>"]) + "\n"
