"""The state that a worker keeps of each running request between steps: its tokens, block table and sampling parameters.

A request owns one row of a few fixed arrays from its NewRequest until it is dropped, so that building a step's batch is
array arithmetic over rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.sampling.draws import GENERATED, PROMPTED, Draws, Penalties, draw_params, keeps_all
from common.engine.sampling.noise import mixed_seed, stream_keys
from common.engine.sampling.processors import LogitsProcessor, SamplingRow
from common.engine.sampling.rules import NO_RULES, TokenRules, rules_of
from common.engine.sampling.sampler import is_plain
from common.engine.speculation.base import Context
from common.types import PoolingFacts, PromptPositions, RequestId, SamplingParams
from common.types.pooling import PoolingMethod

_NO_PARAMS = SamplingParams()
_NUM_COMPARED = 8  # requests whose rules a new one may share


class RequestTable:
    """Rows of at most `max_num_seqs` requests of at most `max_model_len` tokens. Memory is touched where used."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        *,
        num_groups: int = 1,
        position_dims: int = 1,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        processors: Sequence[LogitsProcessor] = (),
        pooling: PoolingFacts = PoolingFacts(),  # noqa: B008  (frozen)
    ) -> None:
        self._pooling = pooling
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._processors = processors
        self._processors_of: list[tuple[LogitsProcessor, ...]] = [()] * max_num_seqs
        # One token more than the longest request: the last one sampled is stored, never computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        table_shape = (max_num_seqs, -(-(max_model_len + 1) // block_size))
        self.block_tables = [np.zeros(table_shape, dtype=np.int64) for _ in range(num_groups)]
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.position_dims = position_dims
        # With several dimensions: positions of prompts that came with some, for how many tokens, and what the others
        # have beyond their places.
        self._positions = np.zeros((position_dims if position_dims > 1 else 0, *self.token_ids.shape), dtype=np.int64)
        self._num_positions = np.zeros(max_num_seqs, dtype=np.int64)
        self._position_deltas = np.zeros(max_num_seqs, dtype=np.int64)
        self.version = 0  # changes as requests get rows or lose them
        # Of rows that kernels can sample, see SamplingParams.kernels_can_sample; the others draw by their parameters.
        self.kernels_can_sample = np.zeros(max_num_seqs, dtype=np.bool_)
        self.is_penalised = np.zeros(max_num_seqs, dtype=np.bool_)
        self.keep_all = np.zeros(max_num_seqs, dtype=np.bool_)  # simple ones that draw from the whole vocabulary
        self._draw_params = np.zeros((max_num_seqs, 4), dtype=np.float32)  # see Draws
        self._mixed_seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._num_blocks = [0] * max_num_seqs
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._params = [_NO_PARAMS] * max_num_seqs
        self._is_producer = [False] * max_num_seqs
        self._roots = [b""] * max_num_seqs
        self._rules = [NO_RULES] * max_num_seqs
        self._ruled: deque[int] = deque(maxlen=_NUM_COMPARED)  # rows that got rules last
        # Few requests are in these, often none.
        self._not_plain: set[int] = set()  # rows; see sampler.is_plain
        self.num_prompt_logits: dict[int, int] = {}  # by row: leading tokens whose logits are wanted
        self.pools: dict[int, PoolingMethod] = {}  # by row, of requests that are pooled and sample nothing
        self._rows: dict[RequestId, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def block_ids(self) -> dict[RequestId, list[list[int]]]:
        """Block table of each request in each group. The null block stands for those that had fallen out."""
        return {
            request_id: [table[row, : self._num_blocks[row]].tolist() for table in self.block_tables]
            for request_id, row in self._rows.items()
        }

    def update(self, step: SchedulerOutput) -> None:
        """Removes dropped requests, then applies the step's changes of the others."""
        for request_id in step.dropped_request_ids:
            self._drop(request_id)
        for new in step.new_requests:
            self._add(new)
        for request_id, block_ids in step.new_block_ids.items():
            self._append_blocks(self._rows[request_id], block_ids)

    def put_off(self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Nothing was sampled after the first `lengths` tokens of rows, the last of which is to be computed again."""
        self.num_tokens[rows] = lengths
        self.num_computed_tokens[rows] = lengths - 1
        self.version += 1

    def rows_of(self, request_ids: Sequence[RequestId]) -> npt.NDArray[np.int64]:
        """Rows of the requests, in order."""
        rows = self._rows
        return np.array([rows[request_id] for request_id in request_ids], dtype=np.int64)

    def row_of(self, request_id: RequestId) -> int:
        """Row of a request."""
        return self._rows[request_id]

    def known_rows_of(self, request_ids: Iterable[RequestId]) -> list[int]:
        """Rows of those of the requests that have one."""
        rows = self._rows
        return [rows[request_id] for request_id in request_ids if request_id in rows]

    def positions(self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions [dimensions, tokens] of tokens by their rows and their places in them."""
        later = places + self._position_deltas[rows]
        return np.where(places < self._num_positions[rows], self._positions[:, rows, places], later)

    def append_tokens(
        self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], token_ids: Sequence[int]
    ) -> None:
        """Append one sampled token to each of the rows, after so many."""
        self.token_ids[rows, lengths] = token_ids
        self.num_tokens[rows] = lengths + 1

    def note_sampled(self, sampled: Mapping[RequestId, Sequence[int]]) -> None:
        """Another stage has sampled these tokens after the requests' last ones, all of which are computed. The last one
        of a request without any is to be computed again."""
        for request_id, token_ids in sampled.items():
            row = self._rows[request_id]
            start = int(self.num_tokens[row])
            end = start + len(token_ids)
            self.token_ids[row, start:end] = token_ids
            self.num_tokens[row] = end
            if self.num_computed_tokens[row] != end - 1:
                self.num_computed_tokens[row] = end - 1
                self.version += 1

    def put_drafts(self, request_id: RequestId, drafts: Sequence[int]) -> None:
        """Writes drafts where the request's next tokens will be."""
        row = self._rows[request_id]
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(drafts)] = drafts

    def settle_drafts(self, request_id: RequestId, num_tokens: int) -> None:
        """So many tokens hold, drafts that were right and what was sampled after them; all but the last are
        computed."""
        row = self._rows[request_id]
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = num_tokens - 1
        self.version += 1

    def correct_tokens(self, request_id: RequestId, token_ids: npt.NDArray[np.int64], start: int) -> None:
        """The request's tokens from the place `start` on are those of `token_ids`, whatever was taken for them. What
        was computed of others counts no longer; the last one is to be computed in any case."""
        row = self._rows[request_id]
        stop = min(int(self.num_tokens[row]), len(token_ids))
        wrong = np.flatnonzero(self.token_ids[row, start:stop] != token_ids[start:stop])
        num_right = start + int(wrong[0]) if len(wrong) else stop
        self.token_ids[row, start : len(token_ids)] = token_ids[start:]
        self.num_tokens[row] = len(token_ids)
        self.set_computed(row, min(int(self.num_computed_tokens[row]), num_right, len(token_ids) - 1))

    def set_computed(self, row: int, num_tokens: int) -> None:
        """So many leading tokens of the row are computed."""
        self.num_computed_tokens[row] = num_tokens
        self.version += 1

    def contexts(self, request_ids: Iterable[RequestId]) -> list[Context]:
        """Returns a proposer's views of those requests that it knows and that have not turned it off."""
        rows = self._rows
        known = [(each, rows[each]) for each in request_ids if each in rows]
        return [self._context(each, row) for each, row in known if self._params[row].speculative]

    def _context(self, request_id: RequestId, row: int) -> Context:
        num_known = int(self.num_tokens[row])
        while num_known and self.token_ids[row, num_known - 1] < 0:  # expected, by a step that runs
            num_known -= 1
        tokens = self.token_ids[row, :num_known]
        tokens.flags.writeable = False  # a proposer is to read them
        return Context(request_id, tokens, self._params[row], int(self._num_prompt_tokens[row]), self._roots[row])

    def expect_tokens(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One token for each of the rows is being sampled: -1, -2, ... stand for them until `settle_tokens`. Returns
        their places."""
        places = self.num_tokens[rows]
        self.token_ids[rows, places] = -1 - np.arange(len(rows))
        self.num_tokens[rows] = places + 1
        return places

    def settle_tokens(
        self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]
    ) -> None:
        """The tokens that were expected. Rows of requests dropped meanwhile are of no other request yet."""
        self.token_ids[rows, places] = token_ids

    def draws(self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Draws:
        """How the tokens that follow the first `lengths` of rows are drawn, if kernels can sample them."""
        positions = lengths - self._num_prompt_tokens[rows]
        return Draws(stream_keys(self._mixed_seeds[rows], positions), self._draw_params[rows])

    def penalties(self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Penalties | None:
        """Returns the penalties, which come before that, if tokens so far change logits of any of the rows."""
        penalised = np.flatnonzero(self.is_penalised[rows])
        if not len(penalised):
            return None
        params = [self._params[row] for row in rows[penalised].tolist()]
        factors = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
        places, weights = [], []
        for number, (row, length) in enumerate(zip(rows[penalised].tolist(), lengths[penalised].tolist(), strict=True)):
            token_ids = self.token_ids[row, :length]
            places.append(token_ids + number * self._vocab_size)
            weights.append(np.where(np.arange(len(token_ids)) < self._num_prompt_tokens[row], PROMPTED, GENERATED))
        return Penalties(
            penalised, np.array(factors, dtype=np.float32), np.concatenate(places), np.concatenate(weights)
        )

    def are_plain(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether the next token of each of the rows is the argmax of its logits."""
        return not self._not_plain or self._not_plain.isdisjoint(rows.tolist())

    def sampling_row(self, row: int, length: int) -> SamplingRow:
        """Returns the sampler's view of the first `length` tokens of a row."""
        return SamplingRow(
            self._params[row],
            self.token_ids[row, :length],
            int(self._num_prompt_tokens[row]),
            self._rules[row],
            self._processors_of[row],
        )

    def num_leaving_tokens(self, row: int) -> int:
        """After how many tokens what is known is handed over; 0: it is not."""
        return int(self._num_prompt_tokens[row]) if self._is_producer[row] else 0

    def has_grammar(self, row: int) -> bool:
        """Whether masks decide what the row may go on with."""
        return self._params[row].structured_outputs is not None

    def num_top_of_prompt(self, row: int) -> int:
        """How many most likely tokens are reported at each position of the prompt."""
        return self._params[row].prompt_logprobs or 0

    def _add(self, new: NewRequest) -> None:
        self._drop(new.request_id)
        self.version += 1
        row = self._free_rows.pop()
        self._rows[new.request_id] = row
        num_tokens = len(new.token_ids)
        self.token_ids[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        processors = tuple(each for each in self._processors if each.applies_to(new.sampling))
        self._processors_of[row] = processors
        if processors or not is_plain(new.sampling):
            self._not_plain.add(row)
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self.kernels_can_sample[row] = (
            new.sampling.kernels_can_sample and not processors and new.sampling.structured_outputs is None
        )
        self.is_penalised[row] = new.sampling.is_penalised
        self._draw_params[row] = draw_params(new.sampling)
        is_simple = self.kernels_can_sample[row] and not self.is_penalised[row]
        self.keep_all[row] = is_simple and keeps_all(new.sampling)
        self._mixed_seeds[row] = mixed_seed(new.sampling.settled_seed)
        self._rules[row] = self._rules_of(new.sampling)
        self._params[row] = new.sampling
        self._is_producer[row] = new.is_producer
        self._roots[row] = new.root
        if self._rules[row] is not NO_RULES:
            self._ruled.append(row)
        if new.wants_prompt_logprobs:
            self.num_prompt_logits[row] = new.num_prompt_tokens - 1
        if new.pooling is not None:
            self.pools[row] = self._pooling.method_of(new.pooling)
        if self.position_dims > 1:
            self._put_positions(row, new.positions)
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)

    def _put_positions(self, row: int, positions: PromptPositions | None) -> None:
        values, delta = ([[]], 0) if positions is None else (positions.values, positions.delta)
        num_positions = len(values[0])
        self._positions[:, row, :num_positions] = values
        self._num_positions[row] = num_positions
        self._position_deltas[row] = delta

    def _rules_of(self, params: SamplingParams) -> TokenRules:
        """Rules are shared by choices of one request, which differ in their seed only and often come together."""
        unseeded = msgspec.structs.replace(params, seed=None)
        for row in self._ruled:
            if msgspec.structs.replace(self._params[row], seed=None) == unseeded:
                return self._rules[row]
        return rules_of(params, self._eos_token_ids, self._vocab_size)

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        start = self._num_blocks[row]
        end = start + len(block_ids[0])
        for table, added in zip(self.block_tables, block_ids, strict=True):
            table[row, start:end] = added
        self._num_blocks[row] = end

    def forget_fallen(
        self, block_table: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], num_fallen: npt.NDArray[np.int64]
    ) -> None:
        """Puts the null block in place of the first `num_fallen` blocks of rows, which others may have by now."""
        last = np.maximum(num_fallen - 1, 0)
        for place in np.flatnonzero((num_fallen > 0) & (block_table[rows, last] != 0)).tolist():
            block_table[rows[place], : num_fallen[place]] = 0

    def _drop(self, request_id: RequestId) -> None:
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self.version += 1
        self._not_plain.discard(row)
        self.num_prompt_logits.pop(row, None)
        self.pools.pop(row, None)
        self._params[row], self._rules[row] = _NO_PARAMS, NO_RULES  # whose tables may be large
        for table in self.block_tables:
            table[row, : self._num_blocks[row]] = 0  # the null block pads shorter tables in a batch
        self._free_rows.append(row)
