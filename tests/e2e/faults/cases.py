"""Which cells of the matrix fault x stage x connector are run, and how often.

The covering ones run in every `make test`; all of them in `make test-slow` and `python -m tests.e2e.faults --all`.
"""

from __future__ import annotations

import itertools

from tests.e2e.faults.matrix import CUT, Case
from tests.e2e.faults.stages import Stage

CONNECTORS = ("shared-storage", "redis", "nixl")
PREFILL, DECODE, PEER, ROUTER = "prefill-0", "decode-0", "peer", "router"
_VICTIMS = {
    "SIGKILL": (PREFILL, DECODE, PEER),
    "SIGSTOP": (PREFILL, DECODE, PEER),
    "SIGKILL and restart": (PREFILL, DECODE),
    "slow": (PREFILL, DECODE),
    "clock jump": (PREFILL, DECODE, ROUTER),
    CUT: (DECODE,),
}
Cell = tuple[str, Case]  # connector and case
ALL: list[Cell] = [
    (connector, Case(fault, victim, stage))
    for connector in CONNECTORS
    for fault, victims in _VICTIMS.items()
    for victim, stage in itertools.product(victims, Stage)
]
# Each fault but a cut network, and each stage, at least once. A hung server is given up after 15 s at most, so that
# hanging ones are the dearest.
_ONCE = {
    "shared-storage": [
        Case("SIGKILL", PREFILL, Stage.PREFILLING),
        Case("SIGKILL", DECODE, Stage.FIRST_TOKEN),
    ],
    "redis": [
        Case("SIGKILL and restart", DECODE, Stage.MID_STREAM),
        Case("clock jump", ROUTER, Stage.QUEUED),
    ],
    "nixl": [
        Case("SIGSTOP", PREFILL, Stage.HANDING_OFF),
        Case("slow", PREFILL, Stage.HANDING_OFF),
    ],
}
COVERING = [(connector, case) for connector, cases in _ONCE.items() for case in cases]
FURTHER = [cell for cell in ALL if cell not in COVERING]
