"""Which cells of the matrix fault x stage x connector are run, and how often.

The covering ones have every fault once per connector, and both roles killed at every stage over one connector.
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
# A SIGKILL with a restart is one as well. A hung server is given up after 15 s at most, so that hanging ones are the
# dearest: one per connector.
_ONCE = {
    "shared-storage": [
        *(Case("SIGKILL", victim, stage) for victim, stage in itertools.product((PREFILL, DECODE), Stage)),
        Case("SIGKILL", PEER, Stage.MID_STREAM),
        Case("SIGSTOP", DECODE, Stage.MID_STREAM),
        Case("SIGKILL and restart", PREFILL, Stage.PREFILLING),
        Case("slow", DECODE, Stage.FIRST_TOKEN),
        Case("clock jump", ROUTER, Stage.QUEUED),
    ],
    "redis": [
        Case("SIGKILL", PEER, Stage.PREFILLING),
        Case("SIGSTOP", PEER, Stage.MID_STREAM),
        Case("SIGKILL and restart", DECODE, Stage.MID_STREAM),
        Case("slow", PREFILL, Stage.QUEUED),
        Case("clock jump", DECODE, Stage.MID_STREAM),
    ],
    "nixl": [
        Case("SIGKILL", PEER, Stage.QUEUED),
        Case("SIGSTOP", PREFILL, Stage.HANDING_OFF),
        Case("SIGKILL and restart", PREFILL, Stage.HANDING_OFF),
        Case("slow", PREFILL, Stage.HANDING_OFF),
        Case("clock jump", PREFILL, Stage.PREFILLING),
    ],
}
COVERING = [(connector, case) for connector, cases in _ONCE.items() for case in cases]
COVERING += [(connector, Case(CUT, DECODE, Stage.HANDING_OFF)) for connector in CONNECTORS]
FURTHER = [cell for cell in ALL if cell not in COVERING]
