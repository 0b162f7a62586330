"""A token's step of causal convolutions, one for each channel, whose last inputs lie in slots."""

from __future__ import annotations

from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.elementwise import silu
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Value, lanes_of

CHANNELS = 64  # of a task, at most
_MAX_WIDTH = 8


def can_convolve(channels: int, width: int) -> bool:
    """True if the kernel takes such convolutions."""
    return lanes_of(channels) > 1 and 1 < width <= _MAX_WIDTH


@kernel_factory
def convolution_kernel(
    element: ElementType, channels: int, width: int, *, has_bias: bool, has_silu: bool
) -> KernelSource:
    """The last inputs of each channel move on by one, the sequence's input comes in, and out is their product with the
    weights. A task is min(CHANNELS, channels) of the channels of a sequence.

    inputs [sequences, channels], whose rows are `stride` numbers apart; out [sequences, channels], weight
    [channels, width] and bias [channels]; states [slots, channels, width], slots `slot` numbers apart. All of
    `element`.
    """
    lanes = lanes_of(channels)
    share = min(CHANNELS, channels)
    num_tasks = -(-channels // share)

    def body(b: Builder, task: Value, a: Any) -> None:
        sequence, first = task // num_tasks, task % num_tasks * share
        source, target = (a.states.at(each.at(sequence).load() * a.slot) for each in (a.sources, a.targets))
        inputs, out = a.inputs.at(sequence * a.stride), a.out.at(sequence * channels)
        last = first + share
        with b.loop(first, b.select(last < channels, last, channels), lanes) as channel:
            own = inputs.at(channel).load(lanes)
            known = [source.at(channel * width + place).load(lanes) for place in range(0, width * lanes, lanes)]
            weights = [a.weight.at(channel * width + place).load(lanes) for place in range(0, width * lanes, lanes)]
            moved = _moved(b, known, own, width)
            for place, each in enumerate(moved):
                target.at(channel * width + place * lanes).store(each)
            total = a.bias.at(channel).load(lanes) if has_bias else b.number(0.0, lanes)
            products = [each * weight for each, weight in zip(moved, weights, strict=True)]
            for tap in range(width):
                total = total + _every(b, products, tap, width)
            out.at(channel).store(silu(b, total) if has_silu else total)

    arguments = {
        "inputs": element,
        "weight": element,
        "bias": element,
        "states": element,
        "out": element,
        "sources": ElementType.INT64,
        "targets": ElementType.INT64,
        "stride": None,
        "slot": None,
    }
    return KernelSource("convolution", arguments, body)


def _moved(b: Builder, known: list[Value], own: Value, width: int) -> list[Value]:
    """The numbers [lanes, width] of vectors, after each row has lost its first and has its own last."""
    lanes = own.lanes
    moved = []
    for place, each in enumerate(known):
        following = known[min(place + 1, width - 1)]  # the last vector's last number is a row's own
        next_ones = b.shuffle(each, following, range(1, lanes + 1))
        numbers = [divmod(number, width) for number in range(place * lanes, (place + 1) * lanes)]
        order = [lanes + row if column == width - 1 else lane for lane, (row, column) in enumerate(numbers)]
        moved.append(b.shuffle(next_ones, own, order))
    return moved


def _every(b: Builder, vectors: list[Value], tap: int, width: int) -> Value:
    """Column `tap` of the numbers [lanes, width] of vectors."""
    lanes = vectors[0].lanes
    numbers = [lane * width + tap for lane in range(lanes)]
    found = vectors[0]
    for place, each in enumerate(vectors):
        order = [lanes + number % lanes if number // lanes == place else lane for lane, number in enumerate(numbers)]
        found = b.shuffle(found, each, order)
    return found
