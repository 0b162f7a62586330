"""Settings of admission."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is taken on at once, and how much may wait."""

    max_inflight: Annotated[int, Meta(ge=1, description="Most generations under way at once; more wait.")] = 2048
    max_queued: Annotated[
        int, Meta(ge=0, description="Most generations that wait to be dispatched; more are refused with 429.")
    ] = 1024
    overcommit: Annotated[
        float,
        Meta(
            ge=1,
            description="A pod gets no more work while it has this many times what one of its steps takes: "
            "max_num_seqs requests, max_num_batched_tokens of prompts. More than 1, so that it never idles between "
            "two reports; less keeps more of the queue here, where priorities count.",
        ),
    ] = 2.0
    prediction_margin: Annotated[
        float,
        Meta(
            gt=0, description="Predicted times are taken this many times longer when compared with a request's limits."
        ),
    ] = 1.25
