"""A pod's record in the registry, by which routers find it. The pod's own GetInfo is authoritative."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"

Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class RecordError(Exception):
    """A record is invalid; the message names the problem."""


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a pod. Fields that a newer pod adds are ignored."""

    role: Literal["prefill", "decode"]
    address: Annotated[str, Meta(pattern=_ADDRESS, max_length=260)]  # host:port where others reach it
    pod_id: Annotated[str, Meta(min_length=1, max_length=256)]
    incarnation: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    fingerprint: Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=256)]  # of the model, in hex
    num_blocks: Count
    max_num_seqs: Count
    max_model_len: Count
    lease_s: Annotated[float, Meta(gt=0, le=3600)]  # seconds for which it is valid without renewal

    def encode(self) -> bytes:
        """Encodes the record as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, text: bytes) -> PodRecord:
        """Raises RecordError."""
        try:
            record = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(" ".join(str(error).split())) from error
        if not 0 < int(record.address.rpartition(":")[2]) < 65536:
            raise RecordError(f"address: {record.address} has no port from 1 to 65535")
        return record
