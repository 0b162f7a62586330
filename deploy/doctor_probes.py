"""Parts of `baton doctor` that may hang or crash the process, run as `python -m deploy.doctor_probes NAME`.

Each prints one JSON object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

BLOCK_BYTES = 64 << 10
_ATTEMPTS = 5000


def probe_torch() -> dict[str, Any]:
    """Returns torch's version, its kernels for this CPU, its threads, and the CUDA devices that it can use."""
    import torch

    devices: list[dict[str, Any]] = []
    problem = ""
    if torch.version.cuda is not None:
        try:
            devices = [_cuda_device(index) for index in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as error:
            problem = " ".join(str(error).split())
    return {
        "version": str(torch.__version__),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda or "",
        "devices": devices,
        "problem": problem,
    }


def _cuda_device(index: int) -> dict[str, Any]:
    """Describes a device on which a kernel has run. Raises RuntimeError."""
    import torch

    assert int(torch.ones(8, device=f"cuda:{index}").sum()) == 8
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def probe_nixl() -> dict[str, Any]:
    """Moves a block between two agents of this process. UCX says on stderr which transports it takes."""
    import importlib.metadata
    import time

    import numpy as np

    from kv_store.nixl.address import Region
    from kv_store.nixl.agent import Agent, load_nixl
    from kv_store.nixl.heads import Cut

    bindings = load_nixl()
    memories = [np.full(BLOCK_BYTES, value, dtype=np.uint8) for value in (7, 0)]
    regions = [
        Region(memory="DRAM", device_id=0, base=memory.ctypes.data, num_blocks=1, block_bytes=BLOCK_BYTES)
        for memory in memories
    ]
    producer, consumer = (Agent(bindings, region) for region in regions)
    producer.add_peer(consumer.name, consumer.metadata)
    whole = Cut(0, BLOCK_BYTES, BLOCK_BYTES, runs_per_block=1, first_run=0, num_runs=1)
    own, others = producer.prepare_blocks(regions[0], whole), producer.prepare_blocks(regions[1], whole, consumer.name)
    transfer = producer.write(own, [0], whole, others, [0], whole)
    for _ in range(_ATTEMPTS):
        if producer.is_done(transfer):
            break
        time.sleep(0.001)
    return {"version": importlib.metadata.version("nixl"), "moved": bool((memories[1] == 7).all())}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {"torch": probe_torch, "nixl": probe_nixl}


if __name__ == "__main__":
    answer = PROBES[sys.argv[1]]()
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # what was probed may hang or crash at the interpreter's end
