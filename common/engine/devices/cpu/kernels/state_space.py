"""A token's step of selective state spaces, Mamba and Mamba 2, whose states lie in slots.

For each channel c, with a state s [size]:

    s = exp(dt A) s + dt x B;  y = s C + D x;  out = y silu(z)

The channels of a Mamba 2 are in heads, of which each has one dt, A and D, and heads in groups, of which each has one B
and C; of a Mamba each channel has its own dt, A [size] and D, and all have one B and C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.elementwise import silu
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Value, lanes_of

CHANNELS = 64  # of a task, at most


class StateSpaceShape(NamedTuple):
    """The shape of a layer. A head of a Mamba is one channel."""

    element: ElementType
    state_element: ElementType
    channels: int
    heads: int
    groups: int
    size: int

    @property
    def lanes(self) -> int:
        """Channels that are computed at once, and numbers of their states."""
        channels = self.channels if self.heads == self.channels else self.channels // self.heads
        return min(lanes_of(channels), lanes_of(self.size))

    @property
    def is_supported(self) -> bool:
        """True if the kernel takes it."""
        return self.lanes > 1 and not self.channels % self.heads and not self.heads % self.groups

    @property
    def share(self) -> int:
        """Channels of a task."""
        return min(CHANNELS, self.channels)


@kernel_factory
def state_space_kernel(shape: StateSpaceShape, *, has_skip: bool, has_gate: bool) -> KernelSource:
    """A task is `shape.share` channels of a sequence.

    inputs and gate (z) [sequences, channels], rows `inputs_stride` and `gate_stride` numbers apart; steps (dt)
    [sequences, heads], decays (A) [heads] or, of a Mamba, [channels, size], and skip (D) [heads], float32; written (B)
    and read (C) [sequences, groups, size]; states [slots, channels, size] of `state_element`, slots `slot` numbers
    apart; out [sequences, channels].
    """
    channels, heads, size, lanes = shape.channels, shape.heads, shape.size, shape.lanes
    num_tasks = -(-channels // shape.share)
    per_head, is_single = channels // heads, channels == heads

    def body(b: Builder, task: Value, a: Any) -> None:
        sequence, first = task // num_tasks, task % num_tasks * shape.share
        source, target = (a.states.at(each.at(sequence).load() * a.slot) for each in (a.sources, a.targets))
        inputs, gate = a.inputs.at(sequence * a.inputs_stride), a.gate.at(sequence * a.gate_stride)
        steps, out = a.steps.at(sequence * heads), a.out.at(sequence * channels)
        scaled = b.scratch(lanes)
        last = first + shape.share
        with b.loop(first, b.select(last < channels, last, channels), lanes) as channel:
            head = channel // per_head
            place = (sequence * shape.groups + head // (heads // shape.groups)) * size
            written, read = a.written.at(place), a.read.at(place)
            own = inputs.at(channel).load(lanes)
            step = steps.at(channel).load(lanes) if is_single else b.number(steps.at(head).load(), lanes)
            scaled.store(own * step)
            decay = None if is_single else b.number(b.exp(steps.at(head).load() * a.decays.at(head).load()), lanes)
            sums = [b.variable(b.number(0.0, lanes)) for _ in range(lanes)]
            with b.loop(0, size, lanes) as i:
                writes, reads = written.at(i).load(lanes), read.at(i).load(lanes)
                for row, sum_ in enumerate(sums):
                    at = (channel + row) * size + i
                    shrinks = decay or b.exp(a.decays.at(at).load(lanes) * steps.at(channel + row).load())
                    kept = source.at(at).load(lanes) * shrinks
                    state = b.fma(writes, b.number(scaled.at(row).load(), lanes), kept)
                    target.at(at).store(state)
                    sum_.set(b.fma(state, reads, sum_.get()))
            total = b.sums(lambda row, sums=sums: sums[row].get(), lanes)  # type: ignore[misc]
            if has_skip:
                skip = a.skip.at(channel).load(lanes) if is_single else b.number(a.skip.at(head).load(), lanes)
                total = b.fma(own, skip, total)
            if has_gate:
                total = total * silu(b, gate.at(channel).load(lanes))
            out.at(channel).store(total)

    floats, ints = ElementType.FLOAT32, ElementType.INT64
    pointers = {
        "inputs": shape.element,
        "gate": shape.element,
        "steps": floats,
        "decays": floats,
        "skip": floats,
        "written": shape.element,
        "read": shape.element,
        "states": shape.state_element,
        "out": shape.element,
        "sources": ints,
        "targets": ints,
    }
    return KernelSource("state_space", pointers | dict.fromkeys(("inputs_stride", "gate_stride", "slot")), body)
