"""Counter-based noise: a number for each (seed, position, token id), the same on every device and in every batch.

Tokens are drawn by the Gumbel-max trick: the argmax of log probability + Gumbel noise is distributed as the
probabilities. Next to inverting the CDF with one uniform number per position it needs no sort, and it is far less
sensitive to the last bits of the logits, which differ between batch sizes: with logits disturbed by 1e-6, one token in
130 changes under an inverted CDF over a flat distribution of 32000 tokens, and none in 4000 under Gumbel-max. So the
same request gives the same tokens alone, batched and on another pod.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) used as a
hash of a counter, in 64-bit integers that wrap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

UNIT = 2.0**-53  # distance of the uniform numbers
GOLDEN = 0x9E3779B97F4A7C15  # odd, 2**64 / golden ratio
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


def stream_key(seed: int, position: int) -> int:
    """Start of the counter for one output position: a signed 64-bit integer. Only the seed's low 64 bits matter."""
    return _signed(_mix(mixed_seed(seed) + GOLDEN * (position + 1)))


def mixed_seed(seed: int) -> int:
    """Mixes a seed into the unsigned 64-bit integer that `stream_keys` takes."""
    return _mix(seed & _MASK64)


def mixed_seeds(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """`mixed_seed` of several seeds, unsigned 64-bit integers."""
    return _mix_array(np.array(seeds, dtype=np.uint64))


def stream_keys(mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`stream_key` of several seeds, each with a position of its own."""
    bits = mixed_seeds + np.uint64(GOLDEN) * (positions.astype(np.uint64) + np.uint64(1))
    keys: npt.NDArray[np.int64] = _mix_array(bits).view(np.int64)
    return keys


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float64 for each token of each row.

    `keys` is [rows, 1] int64 from `stream_key`; `token_ids` is int64, [rows, n] or [n].
    """
    bits = hash_with_numpy(keys, token_ids) if keys.is_cpu else hash_with_torch(keys, token_ids)
    uniform = bits.double().add_(0.5).mul_(UNIT)  # in (0, 1), never 0 or 1
    return uniform.log_().neg_().log_().neg_()


def hash_with_numpy(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The high 53 bits of the generator's output, [rows, n] int64. On a CPU numpy multiplies integers several times as
    fast as torch."""
    counters = token_ids.numpy().view(np.uint64) * np.uint64(GOLDEN) + keys.numpy().view(np.uint64)
    bits = _mix_array(counters)
    bits >>= np.uint64(11)
    return torch.from_numpy(bits.view(np.int64))


def hash_with_torch(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The same on any device."""
    bits = token_ids * _signed(GOLDEN) + keys
    bits = (bits ^ _shift(bits, 30)).mul_(_signed(MIX_1))
    bits = (bits ^ _shift(bits, 27)).mul_(_signed(MIX_2))
    bits = bits.bitwise_xor_(_shift(bits, 31))
    return _shift(bits, 11)


def _mix_array(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser, in place."""
    shifted = np.empty_like(bits)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        bits ^= np.right_shift(bits, np.uint64(shift), out=shifted)
        bits *= np.uint64(factor)
    bits ^= np.right_shift(bits, np.uint64(31), out=shifted)
    return bits


def _mix(bits: int) -> int:
    """SplitMix64's finaliser on Python integers."""
    bits &= _MASK64
    bits = ((bits ^ (bits >> 30)) * MIX_1) & _MASK64
    bits = ((bits ^ (bits >> 27)) * MIX_2) & _MASK64
    return bits ^ (bits >> 31)


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
