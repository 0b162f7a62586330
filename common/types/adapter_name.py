"""Names of LoRA adapters."""

from __future__ import annotations

from typing import NamedTuple


class AdapterName(NamedTuple):
    """A name that a pod has for one of its adapters. Pods tell routers, and these make pods agree."""

    name: str
    revision: int  # the higher one holds; nanoseconds since 1970, 1: from settings
    digest: bytes  # of the adapter's weights, ADAPTER_DIGEST_BYTES; empty: the name was taken away
    path: str  # directory or hub id from which it was loaded
    is_permanent: bool = False  # from a pod's settings

    @property
    def order(self) -> tuple[int, bytes]:
        """The place among changes of the name: the greatest holds."""
        return self.revision, self.digest
