"""Fixtures around a router over fake pods."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from common.tokenization import Tokenizer
from router.serving.model_files import resolve_model
from router.testing import FakeDecodePod, FakePrefillPod, fixed_reply
from tests.unit.router.router_cluster import run_cluster


@pytest.fixture
async def start_cluster():
    """A function that starts a cluster, by default of one decode pod, and waits until all pods are ready."""
    async with AsyncExitStack() as stack:

        async def start(prefill=(), decode=None, *, wait=True, **settings):
            decode = [FakeDecodePod()] if decode is None else decode
            cluster = await stack.enter_async_context(run_cluster(prefill, decode, **settings))
            if wait:
                await cluster.until_ready()
            return cluster

        yield start


@pytest.fixture
async def pair(start_cluster):
    """One prefill and one decode pod."""
    return await start_cluster([FakePrefillPod()], [FakeDecodePod()])


@pytest.fixture(scope="session")
def tokenizer():
    """The demo model's, which the routers of these tests use."""
    return Tokenizer.from_directory(resolve_model("", None)[0])


@pytest.fixture
def says(tokenizer):
    """A reply that spells a text and ends with end-of-sequence."""
    eos = tokenizer._backend.token_to_id("<|im_end|>")
    return lambda text: fixed_reply([*tokenizer.encode(text), eos])
