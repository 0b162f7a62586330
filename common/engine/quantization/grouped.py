"""Linear layers whose weights are codes of 4 or 8 bits, with a scale for each group of inputs of an output.

A weight is the number that its code stands for, times the scale of its group, plus the group's shift. Checkpoints in
which weights are quantised are read into this form (`checkpoints`), whatever they pack them in. Activations and sums
keep their type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from common.engine.quantization.base import QuantizedLinear, joined_bias

PER_WORD = 8  # codes of 4 bits in an int32
MIDDLE = 8  # the code of 4 bits that stands for 0
_BITS = 4


class GroupedLinear(QuantizedLinear):
    """See QuantizedLinear. The type of `codes` says what they stand for: int32 for PER_WORD integers from -8 to 7, the
    first one in the lowest bits; int8 for itself; float8_e4m3fn for itself."""

    codes: torch.Tensor  # int32 [in_features / PER_WORD, out_features], others [in_features, out_features]
    scale: torch.Tensor  # float32 [groups, out_features]
    shift: torch.Tensor | None  # the same; None: zeros
    order: torch.Tensor | None  # int64 [in_features]: inputs in the order of the codes; None: it is their own

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
    ) -> None:
        num_inputs = len(codes) * (PER_WORD if codes.dtype == torch.int32 else 1)
        super().__init__(torch.Size((codes.shape[1], num_inputs)), bias, dtype)
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.float().contiguous())
        self.register_buffer("shift", None if shift is None or not shift.any() else shift.float().contiguous())
        self.register_buffer("order", order)

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.in_features // len(self.scale)

    @classmethod
    def can_join(cls, linears: Sequence[QuantizedLinear]) -> bool:
        """See QuantizedLinear."""
        own = [linear for linear in linears if isinstance(linear, cls)]
        return len(own) == len(linears) and all(map(own[0]._is_like, own))  # noqa: SLF001

    @classmethod
    def joined(cls, linears: Sequence[GroupedLinear]) -> GroupedLinear:
        """See QuantizedLinear."""
        group = math.gcd(*(linear.group for linear in linears))
        linears = [linear.regrouped(group) for linear in linears]
        shifts = [torch.zeros_like(each.scale) if each.shift is None else each.shift for each in linears]
        return cls(
            torch.cat([linear.codes for linear in linears], 1),
            torch.cat([linear.scale for linear in linears], 1),
            torch.cat(shifts, 1),
            joined_bias(linears),
            linears[0].weight.dtype,
            linears[0].order,
        )

    def regrouped(self, group: int) -> GroupedLinear:
        """The same layer with smaller groups, of which there is a whole number in each of its own."""
        repeats = self.group // group
        if repeats == 1:
            return self
        shift = None if self.shift is None else self.shift.repeat_interleave(repeats, 0)
        return self._with(self.codes, self.scale.repeat_interleave(repeats, 0), shift)

    def outputs(self, index: slice | torch.Tensor, padding: int = 0) -> GroupedLinear:
        """The layer with some of its outputs, without a bias, and so many of zeros after them."""
        parts = [None if each is None else each[:, index] for each in (self.codes, self.scale, self.shift)]
        codes, scale, shift = (None if part is None else functional.pad(part, (0, padding)) for part in parts)
        assert codes is not None
        assert scale is not None
        return self._with(codes, scale, shift)

    def inputs(self, start: int, stop: int) -> GroupedLinear:
        """The layer with some of its inputs, without a bias. Raises ValueError if codes cannot be cut there."""
        if self.order is not None:
            raise ValueError("inputs that are ordered by activation")
        group = math.gcd(self.group, start, stop)
        per_row = self.in_features // len(self.codes)
        if group % per_row:
            raise ValueError(f"codes of {per_row} inputs in a word")
        whole = self.regrouped(group)
        groups, rows = slice(start // group, stop // group), slice(start // per_row, stop // per_row)
        return self._with(whole.codes[rows], whole.scale[groups], None if whole.shift is None else whole.shift[groups])

    def numbers(self) -> torch.Tensor:
        """Returns what the codes stand for, float32 [in_features, out_features], in their order."""
        if self.codes.dtype != torch.int32:
            return self.codes.float()
        places = torch.arange(0, _BITS * PER_WORD, _BITS, dtype=torch.int32, device=self.codes.device)
        nibbles = (self.codes[:, None] >> places[:, None]) & (2 * MIDDLE - 1)
        return (nibbles - MIDDLE).flatten(0, 1).float()

    def dequantized(self) -> torch.Tensor:
        """The weight [out_features, in_features], float32."""
        weight = self.numbers().view(-1, self.group, self.out_features) * self.scale[:, None]
        if self.shift is not None:
            weight += self.shift[:, None]
        weight = weight.flatten(0, 1)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(0, self.order, weight)
        return weight.T

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See QuantizedLinear."""
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(inputs.float(), self.dequantized(), bias).to(inputs.dtype)

    def _is_like(self, other: GroupedLinear) -> bool:
        """Whether both have codes of one kind, for inputs in the same order."""
        if self.codes.dtype != other.codes.dtype:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def _with(self, codes: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> GroupedLinear:
        layer = type(self)(codes, scale, shift, None, self.weight.dtype, self.order)
        layer.bias = self.bias if layer.out_features == self.out_features else None
        return layer


def pack_words(numbers: torch.Tensor) -> torch.Tensor:
    """Packs integers from -8 to 7 [in_features, out_features] as `codes`."""
    nibbles = (numbers.to(torch.int64) + MIDDLE).view(-1, PER_WORD, numbers.shape[1])
    places = torch.arange(0, _BITS * PER_WORD, _BITS)
    return to_int32((nibbles << places[:, None]).sum(1))


def to_int32(words: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to 2**32 - 1 as the int32 of the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
