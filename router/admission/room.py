"""Whether the pods can take more without keeping it waiting themselves."""

from __future__ import annotations

from typing import NamedTuple

from router.placing.policies import PodColumns

# A pod gets no more work while it has this many times what one of its steps takes: max_num_seqs requests, and
# max_num_batched_tokens of prompts. More than 1, so that it never idles between two reports; no more than that, so that
# the queue stays in the router, where priorities count.
OVERCOMMIT = 2.0


class Room(NamedTuple):
    """The room that the ready pods have now."""

    capacity: float  # requests that decode pods take in all, if they had none; 0: none can be served
    free: float  # part of the capacity that is free
    takes_prompts: bool  # some pod that computes prompts has not too much to compute

    def fits(self, num_requests: int) -> bool:
        """Whether so many may be dispatched together. A request of more than all the pods take needs them all."""
        return self.takes_prompts and self.free >= min(num_requests, self.capacity) > 0


NO_ROOM = Room(0.0, 0.0, takes_prompts=False)


def room_of(decode: PodColumns, computing: PodColumns) -> Room:
    """`computing`: the pods that prompts are sent to.

    Other routers' requests count as far as the pods have reported them.
    """
    slots = OVERCOMMIT * decode.max_num_seqs
    return Room(
        capacity=float(slots.sum()),
        free=float((slots - decode.num_requests).clip(min=0).sum()),
        takes_prompts=bool((computing.queued_tokens < OVERCOMMIT * computing.max_num_batched_tokens).any()),
    )
