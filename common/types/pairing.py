"""Whether a producer's KV blocks can be of use to a consumer, as far as their sizes go."""

from __future__ import annotations


def block_size_misfit(ours: int, theirs: int, *, is_direct: bool) -> str:
    """Why KV in blocks of `theirs` tokens cannot become KV in blocks of `ours`, or the other way round; empty: it can.
    `is_direct`: of the connector; a direct one writes blocks as they are."""
    if ours == theirs:
        return ""
    if is_direct:
        return "a direct connector needs equal ones"
    if min(ours, theirs) < 1 or max(ours, theirs) % min(ours, theirs):
        return "neither divides the other"
    return ""
