"""The figures as a page of markdown."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from benchmarks.harness.report import Page, Verdict, describe_machine, table, verdict_table
from benchmarks.kv.measure import MIB, Cell, Results, Staging, Way
from benchmarks.kv.pods import BLOCK_BYTES, NUM_CHUNKS, PodHandoffs, hidden_share
from deploy.redis_server import find_redis_server

MIN_SHARE_OF_BARE = 0.85  # of the bandwidth, from LARGE_BYTES up
LARGE_BYTES = 16 * MIB
MAX_OWN_S = 1e-3  # of our code, for OWN_BLOCKS over NIXL
OWN_BLOCKS = 16
MAX_DIGEST_SHARE = 0.10
MAX_STAGING_GROWTH = 8 * MIB  # from 16 blocks to the most: room for what the allocators keep
MIN_HIDDEN = 0.80


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
    shares = [c.ways["ours"].bytes_per_s / c.ways["threaded"].bytes_per_s for c in large if "threaded" in c.ways]
    if shares:
        measured += f"; of the bare medium on as many threads as ours {min(shares):.0%} at worst"
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


def make_page(machine: dict[str, str], results: Results) -> Page:
    """Prints the tables, and returns the page with them."""
    words = """\
`python -m benchmarks.kv`, whose help says what is measured. Medians; p99 of fewer than 100 samples is their
maximum. Beside each run through a connector is one over its bare medium and one by memcpy, in turn."""
    page = Page("KV handoffs next to their bare media", words, machine)
    page.add("", *verdict_table(verdicts(results)))
    for connector in dict.fromkeys(cell.connector for cell in results.cells):
        page.section(connector)
        page.add(*_cell_table(_single(connector, results.cells)))
        page.add(*_concurrency_table([cell for cell in results.cells if cell.connector == connector]))
    if results.pods:
        page.section("Between pods")
        page.add(*_pod_table(results.pods))
    page.section("Memory beside the KV caches")
    page.add(*_staging_table(results.staging))
    return page


def _cell_table(cells: Sequence[Cell]) -> list[str]:
    columns = "block | blocks | p50 ms | p99 ms | samples | GB/s | bare GB/s | of bare | memcpy GB/s | CPU s/GiB"
    columns += " | bare CPU | ours - bare ms | digest | threaded GB/s | threaded CPU"
    rows = []
    for cell in cells:
        ours, bare, memcpy, threaded = (cell.ways.get(mode) for mode in ("ours", "bare", "memcpy", "threaded"))
        rows.append(
            (
                f"{cell.block_bytes >> 10} KiB",
                cell.num_blocks,
                *_latencies(cell),
                *(_rate(ours), _rate(bare), f"{cell.share_of_bare:.0%}", _rate(memcpy)),
                *(_cpu(ours), _cpu(bare), f"{cell.own_s * 1e3:.3g}"),
                "" if cell.digest_share is None else f"{cell.digest_share:.0%}",
                *(_rate(threaded), _cpu(threaded)),
            )
        )
    return table(columns, rows)


def _latencies(cell: Cell) -> tuple[object, ...]:
    return f"{cell.p50_s * 1e3:.3g}", f"{cell.p99_s * 1e3:.3g}", cell.num_samples


def _rate(way: Way | None) -> str:
    return "" if way is None else f"{way.bytes_per_s / 1e9:.2f}"


def _cpu(way: Way | None) -> str:
    return "" if way is None else f"{way.cpu_s_per_gib:.2f}"


def _concurrency_table(cells: Sequence[Cell]) -> list[str]:
    several = [cell for cell in cells if cell.num_handoffs > 1]
    if not several:
        return []
    same = [cell for cell in cells if cell.num_handoffs == 1 and cell.num_blocks == several[0].num_blocks]
    rows = []
    for cell in sorted(same + several, key=lambda cell: (cell.block_bytes, cell.num_handoffs)):
        ways = (cell.ways["ours"], cell.bare)
        rows.append((cell.num_handoffs, _shape(cell), *_latencies(cell), *map(_rate, ways), *map(_cpu, ways)))
    columns = "handoffs at once | blocks each | p50 ms | p99 ms | samples | GB/s | bare GB/s | CPU s/GiB | bare CPU"
    return ["", *table(columns, rows)]


def _pod_table(pods: Sequence[PodHandoffs]) -> list[str]:
    rows = []
    for handoffs in pods:
        times = (handoffs.p50_s, min(handoffs.latencies), max(handoffs.latencies))
        milliseconds = (f"{each * 1e3:.3g}" for each in times)
        shape = (handoffs.connector, handoffs.num_blocks, handoffs.num_chunks)
        rows.append((*shape, *milliseconds, len(handoffs.latencies)))
    return [
        "From the end of the last step in the prefill pod's engine to the first in the decode pod's, over gRPC;",
        f"the model has much KV and little to compute; blocks of {BLOCK_BYTES >> 10} KiB.",
        "",
        *table("connector | blocks | chunks | p50 ms | from | to | samples", rows),
    ]


def _staging_table(stagings: Sequence[Staging]) -> list[str]:
    rows = []
    for each in stagings:
        sizes = (f"{size / MIB:.1f}" for size in (each.producer_bytes, each.consumer_bytes))
        rows.append((each.connector, f"{each.block_bytes >> 10} KiB", each.num_blocks, *sizes))
    return table("connector | block | blocks | producer MiB | consumer MiB", rows)


def facts() -> dict[str, str]:
    """Returns the facts on which the figures depend."""
    return describe_machine("torch", "nixl", "redis", "xxhash") | {"redis-server": _redis_version()}


def _redis_version() -> str:
    said = subprocess.run([str(find_redis_server()), "--version"], capture_output=True, text=True, check=True).stdout
    return next((word.removeprefix("v=") for word in said.split() if word.startswith("v=")), "unknown")
