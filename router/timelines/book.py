"""Keeps the timelines of the last requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from router.requests.preprocess import choice_id
from router.timelines.timeline import Timeline


class TimelineBook:
    """Bounded in number; the oldest goes first, whether or not its request still runs."""

    def __init__(self, max_timelines: int) -> None:
        """0 keeps none."""
        self._max = max_timelines
        self._kept: dict[int, Timeline] = {}
        self._serials = count()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_on(self) -> bool:
        """Whether any is kept."""
        return self._max > 0

    def keep(self, timeline: Timeline) -> int:
        """Keeps it. Returns a number for `drop`."""
        serial = next(self._serials)
        if self._max:
            self._kept[serial] = timeline
            if len(self._kept) > self._max:
                del self._kept[next(iter(self._kept))]
        return serial

    def drop(self, *serials: int) -> None:
        """Forgets those that are still there."""
        for serial in serials:
            self._kept.pop(serial, None)

    def newest_first(self) -> Iterator[Timeline]:
        """All of them."""
        return reversed(self._kept.values())

    def find(self, request_id: str, tenant_name: str | None) -> Timeline | None:
        """The newest of this id, or of the first choice of a request that has several. `tenant_name`: whose it must
        be; None: anyone's."""
        ids = (request_id, choice_id(request_id, 0))
        for timeline in self.newest_first():
            if timeline.request_id in ids and tenant_name in (None, timeline.tenant_name):
                return timeline
        return None
