from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from kv_store.block_format import HEADER_BYTES
from kv_store.staging import create_staging, layout_of, record_fence

SHAPE = (6, 3, 2, 2, 4, 8)


def test_a_dtype_without_a_code_is_refused():
    with pytest.raises(ConfigError) as caught:
        layout_of(torch.zeros(SHAPE, dtype=torch.float64))
    assert caught.value.param == "dtype"


def test_another_layout_is_a_defect():
    with pytest.raises(ValueError, match="block-major"):
        layout_of(torch.zeros(SHAPE).transpose(0, 1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_out_and_in(device, dtype):
    cache = torch.arange(torch.Size(SHAPE).numel(), device=device).to(dtype).view(SHAPE)
    expected = cache.clone()
    expected[5] = expected[2]
    staging = create_staging(cache)
    assert len(staging.frame) == HEADER_BYTES + layout_of(cache).payload_bytes

    staging.gather(2, record_fence(cache))
    assert bytes(staging.frame[HEADER_BYTES:]) == cache[2].flatten().view(torch.uint8).cpu().numpy().tobytes()
    staging.scatter(5, record_fence(cache))

    assert torch.equal(cache, expected)
