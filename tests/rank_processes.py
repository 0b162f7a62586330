"""The processes of ranks, seen from outside."""

import contextlib

import psutil


def ranks_of(pid: int) -> list[psutil.Process]:
    """Those that a driver has started and that have not ended, in the order of their numbers: of several engines in
    its process, the newest one's. Numbers of processes wrap around, so their order says nothing."""
    ranks = {}
    for child in sorted(psutil.Process(pid).children(), key=psutil.Process.create_time):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if child.status() != psutil.STATUS_ZOMBIE and (command := child.cmdline()) and "rank" in command[-1]:
                ranks[int(command[-1].split()[1])] = child
    return [ranks[number] for number in sorted(ranks)]
