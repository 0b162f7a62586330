from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from kv_store.block_format import HEADER_BYTES
from kv_store.staging import create_staging, layout_of

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
@pytest.mark.parametrize(
    ("sources", "targets"), [([2, 4], [5, 0]), ([1, 2, 3], [4, 5, 0]), ([3, 2, 1], [3, 4, 5]), ([4], [4]), ([], [])]
)
def test_blocks_go_out_and_in(device, dtype, sources, targets):
    cache = torch.arange(torch.Size(SHAPE).numel(), device=device).to(dtype).view(SHAPE)
    expected = cache.clone()
    expected[targets] = cache[sources]
    staging = create_staging(cache, 1 << 20)
    assert {len(frame) for frame in staging.frames} == {HEADER_BYTES + layout_of(cache).payload_bytes}

    staging.gather(sources, 0)
    for block_id, frame in zip(sources, staging.frames, strict=False):
        assert bytes(frame[HEADER_BYTES:]) == cache[block_id].flatten().view(torch.uint8).cpu().numpy().tobytes()
    staging.scatter(targets, 0)

    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("num_bytes", "num_frames"), [(1, 1), (2, 1), (3.5, 3), (100, 6)])
def test_staging_is_bounded_by_its_setting_and_never_larger_than_the_cache(num_bytes, num_frames):
    cache = torch.zeros(SHAPE)
    frame_bytes = HEADER_BYTES + layout_of(cache).payload_bytes
    staging = create_staging(cache, 1 if num_bytes == 1 else int(num_bytes * frame_bytes) - 1)
    assert len(staging.frames) == num_frames
