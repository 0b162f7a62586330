"""The experts of a mixture for a few tokens: only those that tokens go to are read, and each once.

Tokens come as pairs with an expert, which are sorted by expert: `pairs` holds their numbers (token * choices + choice,
where each token has so many `choices`), `experts` the experts that there are, and `starts` where the pairs of each
begin, and of the last one end.
"""

from __future__ import annotations

from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.elementwise import silu
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value, lanes_of

BLOCK = MAX_LANES  # outputs of a task
MAX_TOKENS = 64
_ROWS = [rows for rows in (4, 2, 1) if 4 * rows <= BLOCK]  # multiplied at once, with as many times fewer outputs
_INTS = ElementType.INT64
_ROUTES = {"pairs": _INTS, "experts": _INTS, "starts": _INTS, "choices": None}


def can_multiply(size: int, width: int) -> bool:
    """True if the kernels take experts of this size and width."""
    return not (size % BLOCK or width % BLOCK)


@kernel_factory
def gated_experts_kernel(element: ElementType, size: int, width: int) -> KernelSource:
    """gated [pairs, width] = silu(gate) * up, in the order of `pairs`. A task is an expert and BLOCK outputs.

    inputs [tokens, size]; weight [experts, 2 * width, size], of gate and then up.
    """
    num_blocks = width // BLOCK

    def body(b: Builder, task: Value, a: Any) -> None:
        place, block = task // num_blocks, task % num_blocks * BLOCK
        gate = a.weight.at((a.experts.at(place).load() * (2 * width) + block) * size)
        up = gate.at(width * size)
        first, last = (a.starts.at(place + i).load() for i in (0, 1))

        def multiply(pair: Value, num_rows: int) -> None:
            tokens = [a.pairs.at(pair + row).load() // a.choices for row in range(num_rows)]
            rows = [a.inputs.at(token * size) for token in tokens]
            columns = BLOCK // num_rows
            for column in range(0, BLOCK, columns):
                gates, ups = (products(b, rows, each.at(column * size), size, columns) for each in (gate, up))
                found = silu(b, gates) * ups
                for row in range(num_rows):
                    a.gated.at((pair + row) * width + block + column).store(part_of(b, found, row, columns))

        by_rows(b, first, last, multiply)

    arguments = _ROUTES | {"inputs": element, "weight": element, "gated": element}
    return KernelSource("gated_experts", arguments, body)


@kernel_factory
def sum_experts_kernel(element: ElementType, size: int, width: int) -> KernelSource:
    """out [tokens, size] = sum of shares * (gated @ weight.T) over the experts of a token. A task is BLOCK outputs.

    gated [pairs, width] in the order of `pairs`; shares float32 [tokens, choices]; weight [experts, size, width]. There
    are `num_experts` in `experts`, and `num_tokens` tokens, at most MAX_TOKENS.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        block = task * BLOCK
        totals = b.scratch(MAX_TOKENS * BLOCK)
        with b.loop(0, a.num_tokens) as token:
            totals.at(token * BLOCK).store(b.number(0.0, BLOCK))
        with b.loop(0, a.num_experts) as place:
            weight = a.weight.at((a.experts.at(place).load() * size + block) * width)
            first, last = (a.starts.at(place + i).load() for i in (0, 1))

            def multiply(pair: Value, num_rows: int, weight: Pointer = weight) -> None:
                numbers = [a.pairs.at(pair + row).load() for row in range(num_rows)]
                rows = [a.gated.at((pair + row) * width) for row in range(num_rows)]
                columns = BLOCK // num_rows
                for column in range(0, BLOCK, columns):
                    found = products(b, rows, weight.at(column * width), width, columns)
                    for row, number in enumerate(numbers):
                        share = b.number(a.shares.at(number).load(), columns)
                        total = totals.at(number // a.choices * BLOCK + column)
                        total.store(b.fma(part_of(b, found, row, columns), share, total.load(columns)))

            by_rows(b, first, last, multiply)
        with b.loop(0, a.num_tokens) as token:
            a.out.at(token * size + block).store(totals.at(token * BLOCK).load(BLOCK))

    arguments = _ROUTES | {"gated": element, "shares": ElementType.FLOAT32, "weight": element, "out": element}
    return KernelSource("sum_experts", arguments | dict.fromkeys(("num_experts", "num_tokens")), body)


@kernel_factory
def combine_kernel(element: ElementType, size: int) -> KernelSource:
    """out [tokens, size] = sum of shares * results over the choices of a token; a task is a token.

    results [pairs, size] of `element` in the order of experts, of which there are `num_results`; places [tokens,
    choices], where each choice's is: from `num_results` on there is none; shares float32 [tokens, choices].
    """
    lanes = lanes_of(size)

    def body(b: Builder, token: Value, a: Any) -> None:
        totals = b.scratch(size)
        with b.loop(0, size, lanes) as i:
            totals.at(i).store(b.number(0.0, lanes))
        with b.loop(token * a.choices, (token + 1) * a.choices) as choice:
            place = a.places.at(choice).load()
            with b.when(place < a.num_results):
                share, result = b.number(a.shares.at(choice).load(), lanes), a.results.at(place * size)
                with b.loop(0, size, lanes) as i:
                    total = totals.at(i)
                    total.store(b.fma(result.at(i).load(lanes), share, total.load(lanes)))
        with b.loop(0, size, lanes) as i:
            a.out.at(token * size + i).store(totals.at(i).load(lanes))

    arguments = {"results": element, "places": _INTS, "shares": ElementType.FLOAT32, "out": element}
    return KernelSource("combine", arguments | dict.fromkeys(("choices", "num_results")), body)


def by_rows(b: Builder, first: Value, last: Value, multiply: Any) -> None:
    """Calls `multiply` for all pairs from one to another, several at once."""
    start = first
    for num_rows in _ROWS:
        stop = start + (last - start) // num_rows * num_rows
        with b.loop(start, stop, num_rows) as pair:
            multiply(pair, num_rows)
        start = stop


def products(b: Builder, rows: list[Pointer], weight: Pointer, size: int, columns: int) -> Value:
    """Products of rows [size] and `columns` outputs of a weight [columns, size]; those of a row are side by side."""
    sums = [b.variable(b.number(0.0, BLOCK)) for _ in range(BLOCK)]
    with b.loop(0, size, BLOCK) as i:
        inputs = [row.at(i).load(BLOCK) for row in rows]
        weights = [weight.at(i + column * size).load(BLOCK) for column in range(columns)]
        for column in range(columns, 2 * columns):
            b.prefetch(weight.at(i + column * size), BLOCK, near=False)
        for place, sum_ in enumerate(sums):
            sum_.set(b.fma(inputs[place // columns], weights[place % columns], sum_.get()))
    return b.sums(lambda place: sums[place].get(), BLOCK)


def part_of(b: Builder, found: Value, row: int, columns: int) -> Value:
    """The products of one of the rows."""
    return b.shuffle(found, found, range(row * columns, (row + 1) * columns))
