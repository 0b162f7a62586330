"""The figures as lines for a terminal and as a page of markdown."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from benchmarks.kv.measure import MIB, Cell, Results, Staging
from benchmarks.kv.pods import BLOCK_BYTES, NUM_CHUNKS, PodHandoffs, hidden_share
from benchmarks.kv.wire import Mode
from benchmarks.page import Verdict, describe_machine
from deploy.redis_server import find_redis_server

MIN_SHARE_OF_BARE = 0.85  # of the bandwidth, from LARGE_BYTES up
LARGE_BYTES = 16 * MIB
MAX_OWN_S = 1e-3  # of our code, for OWN_BLOCKS over NIXL
OWN_BLOCKS = 16
MAX_DIGEST_SHARE = 0.10
MAX_STAGING_GROWTH = 8 * MIB  # from 16 blocks to the most: room for what the allocators keep
MIN_HIDDEN = 0.80

# What ours is compared with besides the bare medium.
_OTHER_MEDIA: dict[Mode, str] = {
    "threaded": "of the bare medium on as many threads as ours",
    "stock": "of NIXL with the settings that it comes with",
}


def verdicts(results: Results) -> list[Verdict]:
    """All targets that something was measured of."""
    connectors = list(dict.fromkeys(cell.connector for cell in results.cells))
    found = [verdict for name in connectors for verdict in _bandwidth(name, results.cells)]
    found += _own_code(results.cells)
    found += [verdict for name in connectors for verdict in _digest(name, results.cells)]
    found += [verdict for name in connectors for verdict in _hidden(name, results.pods)]
    found += [verdict for name in connectors for verdict in _memory(name, results.staging)]
    return found


def _bandwidth(connector: str, cells: Sequence[Cell]) -> list[Verdict]:
    large = [c for c in _single(connector, cells) if c.total_bytes >= LARGE_BYTES]
    if not large:
        return []
    worst = min(large, key=lambda cell: cell.share_of_bare)
    target = f"{connector}: bandwidth at least {MIN_SHARE_OF_BARE:.0%} of the bare medium from 16 MiB up"
    measured = f"{worst.share_of_bare:.0%} at worst ({_shape(worst)})"
    for mode, words in _OTHER_MEDIA.items():
        shares = [c.ways["ours"].bytes_per_s / c.ways[mode].bytes_per_s for c in large if mode in c.ways]
        if shares:
            measured += f"; {words} {min(shares):.0%} at worst"
    return [Verdict(target, measured, worst.share_of_bare >= MIN_SHARE_OF_BARE)]


def _own_code(cells: Sequence[Cell]) -> list[Verdict]:
    sixteen = [cell for cell in _single("nixl", cells) if cell.num_blocks == OWN_BLOCKS]
    if not sixteen:
        return []
    worst = max(sixteen, key=lambda cell: cell.own_s)
    measured = f"{worst.own_s * 1e3:.2f} ms at worst ({_shape(worst)})"
    return [Verdict("nixl: our own code at most 1 ms for 16 blocks", measured, worst.own_s <= MAX_OWN_S)]


def _digest(connector: str, cells: Sequence[Cell]) -> list[Verdict]:
    large = [cell for cell in _single(connector, cells) if cell.num_blocks > 1]  # one block is too little to tell
    shares = {_shape(cell): cell.digest_share for cell in large}
    measured = {shape: share for shape, share in shares.items() if share is not None}
    if not measured:
        return []
    worst = max(measured, key=lambda shape: measured[shape])
    target = f"{connector}: the digest at most {MAX_DIGEST_SHARE:.0%} of the handoff"
    return [Verdict(target, f"{measured[worst]:.0%} at worst ({worst})", measured[worst] <= MAX_DIGEST_SHARE)]


def _memory(connector: str, stagings: Sequence[Staging]) -> list[Verdict]:
    found = []
    for block_bytes in dict.fromkeys(staging.block_bytes for staging in stagings):
        of_size = [s for s in stagings if (s.connector, s.block_bytes) == (connector, block_bytes)]
        if len(of_size) < 2:
            continue
        few, many = of_size[0], of_size[-1]
        growth = max(many.producer_bytes - few.producer_bytes, many.consumer_bytes - few.consumer_bytes)
        target = f"{connector}: staging does not grow with the prompt ({block_bytes >> 10} KiB blocks)"
        measured = f"{growth / MIB:+.1f} MiB from {few.num_blocks} to {many.num_blocks} blocks"
        found.append(Verdict(target, measured, growth <= MAX_STAGING_GROWTH))
    return found


def _hidden(connector: str, pods: Sequence[PodHandoffs]) -> list[Verdict]:
    own = [handoffs for handoffs in pods if handoffs.connector == connector]
    if not own:
        return []
    chunked = next(handoffs for handoffs in own if handoffs.num_chunks == NUM_CHUNKS)
    whole = next(h for h in own if h.num_chunks == 1 and h.num_blocks == chunked.num_blocks)
    share = hidden_share(whole, chunked)
    target = f"{connector}: with {NUM_CHUNKS} chunks at least {MIN_HIDDEN:.0%} of the transfer hidden behind compute"
    return [Verdict(target, f"{share:.0%} (at most {1 - 1 / NUM_CHUNKS:.1%} can be)", share >= MIN_HIDDEN)]


def _single(connector: str, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.connector == connector and cell.num_handoffs == 1]


def _shape(cell: Cell) -> str:
    return f"{cell.num_blocks} x {cell.block_bytes >> 10} KiB"


def format_row(figures: Cell | PodHandoffs) -> str:
    """One line for the terminal."""
    if isinstance(figures, Cell):
        return _format_cell(figures)
    latencies = sorted(figures.latencies)
    return (
        f"{figures.connector:<15}between pods, {figures.num_blocks:>4} x {BLOCK_BYTES >> 10:>4} KiB"
        f" in {figures.num_chunks} chunks  p50 {figures.p50_s * 1e3:9.3f} ms"
        f"  from {latencies[0] * 1e3:.3f} to {latencies[-1] * 1e3:.3f}  n {len(latencies)}"
    )


def _format_cell(cell: Cell) -> str:
    ours, bare = cell.ways["ours"], cell.bare
    digest = "" if cell.digest_share is None else f"  digest {cell.digest_share:4.0%}"
    stock = f"  stock {cell.ways['stock'].bytes_per_s / 1e9:.2f} GB/s" if "stock" in cell.ways else ""
    return (
        f"{cell.connector:<15}{cell.num_handoffs:>3} x {cell.num_blocks:>4} x {cell.block_bytes >> 10:>4} KiB"
        f"  p50 {cell.p50_s * 1e3:9.3f} ms  p99 {cell.p99_s * 1e3:9.3f} ms"
        f"  {ours.bytes_per_s / 1e9:6.2f} GB/s  bare {bare.bytes_per_s / 1e9:6.2f}  {cell.share_of_bare:4.0%}"
        f"  cpu {ours.cpu_s_per_gib:5.2f} s/GiB  bare {bare.cpu_s_per_gib:5.2f}  n {cell.num_samples}{digest}{stock}"
    )


def format_markdown(machine: dict[str, str], results: Results, found: Sequence[Verdict], note: str) -> str:
    """The page."""
    connectors = list(dict.fromkeys(cell.connector for cell in results.cells))
    lines = [
        "# KV handoffs next to their bare media",
        "",
        "`python -m benchmarks.kv`, whose help says what is measured. Medians; p99 of fewer than 100 samples is their",
        "maximum. Beside each run through a connector is one over its bare medium and one by memcpy, in turn.",
        *(["", note] if note else []),
        "",
        *(f"- {key}: {value}" for key, value in machine.items()),
        "",
        "## Targets",
        "",
        "| target | measured | |",
        "|---|---|---|",
        *(f"| {v.target} | {v.measured} | {'pass' if v.is_met else '**FAIL**'} |" for v in found),
    ]
    for connector in connectors:
        lines += ["", f"## {connector}", "", *_cell_table(_single(connector, results.cells))]
        lines += _concurrency_table([cell for cell in results.cells if cell.connector == connector])
    if results.pods:
        lines += ["", "## Between pods", "", *_pod_table(results.pods)]
    lines += ["", "## Memory beside the KV caches", "", *_staging_table(results.staging)]
    if results.skipped:
        lines += ["", "Left out for the memory bound:", "", *(f"- {what}" for what in results.skipped)]
    return "\n".join(lines) + "\n"


def _cell_table(cells: Sequence[Cell]) -> list[str]:
    columns = ["block", "blocks", "p50 ms", "p99 ms", "samples", "GB/s", "bare GB/s", "of bare", "memcpy GB/s"]
    columns += ["CPU s/GiB", "bare CPU", "ours - bare ms", "digest"]
    others = [mode for mode in _OTHER_MEDIA if any(mode in cell.ways for cell in cells)]
    columns += [f"{mode} {figure}" for mode in others for figure in ("GB/s", "CPU")]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        ours, bare, memcpy = cell.ways["ours"], cell.bare, cell.ways["memcpy"]
        digest = "" if cell.digest_share is None else f"{cell.digest_share:.0%}"
        lines.append(
            f"| {cell.block_bytes >> 10} KiB | {cell.num_blocks} | {cell.p50_s * 1e3:.3g} | {cell.p99_s * 1e3:.3g} "
            f"| {cell.num_samples} | {ours.bytes_per_s / 1e9:.2f} | {bare.bytes_per_s / 1e9:.2f} "
            f"| {cell.share_of_bare:.0%} | {memcpy.bytes_per_s / 1e9:.2f} | {ours.cpu_s_per_gib:.2f} "
            f"| {bare.cpu_s_per_gib:.2f} | {cell.own_s * 1e3:.3g} | {digest} |"
        )
        for way in (cell.ways[mode] for mode in others):
            lines[-1] += f" {way.bytes_per_s / 1e9:.2f} | {way.cpu_s_per_gib:.2f} |"
    return lines


def _concurrency_table(cells: Sequence[Cell]) -> list[str]:
    several = [cell for cell in cells if cell.num_handoffs > 1]
    alone = [cell for cell in cells if cell.num_handoffs == 1]
    if not several:
        return []
    same = [cell for cell in alone if cell.num_blocks == several[0].num_blocks]
    lines = [
        "",
        "| handoffs at once | blocks each | p50 ms | p99 ms | samples | GB/s | bare GB/s | CPU s/GiB | bare CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(same + several, key=lambda cell: (cell.block_bytes, cell.num_handoffs)):
        ours, bare = cell.ways["ours"], cell.bare
        lines.append(
            f"| {cell.num_handoffs} | {_shape(cell)} | {cell.p50_s * 1e3:.3g} | {cell.p99_s * 1e3:.3g} "
            f"| {cell.num_samples} | {ours.bytes_per_s / 1e9:.2f} | {bare.bytes_per_s / 1e9:.2f} "
            f"| {ours.cpu_s_per_gib:.2f} | {bare.cpu_s_per_gib:.2f} |"
        )
    return lines


def _pod_table(pods: Sequence[PodHandoffs]) -> list[str]:
    lines = [
        "From the end of the last forward in the prefill pod's engine to the first in the decode pod's, over gRPC;",
        f"the model has much KV and little to compute; blocks of {BLOCK_BYTES >> 10} KiB.",
        "",
        "| connector | blocks | chunks | p50 ms | from | to | samples |",
        "|---|---|---|---|---|---|---|",
    ]
    for handoffs in pods:
        least, most = min(handoffs.latencies) * 1e3, max(handoffs.latencies) * 1e3
        lines.append(
            f"| {handoffs.connector} | {handoffs.num_blocks} | {handoffs.num_chunks} | {handoffs.p50_s * 1e3:.3g} "
            f"| {least:.3g} | {most:.3g} | {len(handoffs.latencies)} |"
        )
    return lines


def _staging_table(stagings: Sequence[Staging]) -> list[str]:
    lines = ["| connector | block | blocks | producer MiB | consumer MiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {s.connector} | {s.block_bytes >> 10} KiB | {s.num_blocks} | {s.producer_bytes / MIB:.1f} "
        f"| {s.consumer_bytes / MIB:.1f} |"
        for s in stagings
    ]
    return lines


def facts() -> dict[str, str]:
    """Returns the facts on which the figures depend."""
    return describe_machine("torch", "nixl", "redis", "xxhash") | {"redis-server": _redis_version()}


def _redis_version() -> str:
    said = subprocess.run([str(find_redis_server()), "--version"], capture_output=True, text=True, check=True).stdout
    return next((word.removeprefix("v=") for word in said.split() if word.startswith("v=")), "unknown")
