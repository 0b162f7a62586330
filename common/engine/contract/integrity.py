"""The state that all ranks must share with the scheduler between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from common.types import RequestId

_MAX_VIOLATIONS = 16  # of one rank; the first few tell what has happened


class KnownRequests(msgspec.Struct, frozen=True):
    """The requests that the scheduler has told ranks of."""

    block_ids: dict[RequestId, list[list[int]]]  # block table in each KV group; 0 where a block fell out
    dropped_request_ids: list[RequestId]  # which the next step will drop

    def violations(self, block_tables: Mapping[RequestId, Sequence[Sequence[int]]]) -> list[str]:
        """How `block_tables`, those of a rank, differ. One line each."""
        known = {*self.block_ids, *self.dropped_request_ids}
        violations = [f"request {each} is unknown" for each in sorted(known - block_tables.keys())]
        violations += [f"request {each} is kept after its end" for each in sorted(block_tables.keys() - known)]
        for request_id, expected in self.block_ids.items():
            for group, (wanted, found) in enumerate(zip(expected, block_tables.get(request_id, []), strict=False)):
                if len(wanted) != len(found):
                    problem = f"{len(found)} blocks in group {group}, not {len(wanted)}"
                    violations.append(f"request {request_id} has {problem}")
                elif differing := [index for index, block in enumerate(wanted) if block not in (0, found[index])]:
                    index = differing[0]
                    problem = f"block {found[index]} at {index} in group {group}, not {wanted[index]}"
                    violations.append(f"request {request_id} has {problem}")
        return violations[:_MAX_VIOLATIONS]
