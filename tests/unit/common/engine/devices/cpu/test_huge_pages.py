"""Memory moves to huge pages and keeps its content."""

import re
from pathlib import Path

import pytest
import torch

from common.engine.devices.cpu.huge_pages import use_huge_pages

HUGE = 2 << 20


def huge_bytes(address):
    """Of the mapping that the address is in."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return 1024 * int(re.search(r"AnonHugePages:\s+(\d+) kB", mapping)[1])
    raise AssertionError


def test_memory_moves_to_huge_pages_and_keeps_its_content():
    numbers = torch.arange(4 * HUGE)  # 64 MiB, mapped for itself
    moved = use_huge_pages(numbers.data_ptr(), numbers.nbytes)
    assert torch.equal(numbers, torch.arange(4 * HUGE))
    if not moved:
        pytest.skip("no huge pages for memory in use: Linux 6.1 has them")
    assert moved in (numbers.nbytes, numbers.nbytes - HUGE)
    # A system that is short of memory, or looks for idle pages, may split some again at once.
    assert huge_bytes(numbers.data_ptr() + numbers.nbytes // 2) >= HUGE


def test_less_than_a_huge_page_stays_where_it_is():
    numbers = torch.zeros(HUGE // 8)
    assert use_huge_pages(numbers.data_ptr(), numbers.nbytes) == 0
