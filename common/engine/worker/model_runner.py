"""Runs the model over one step's batch and samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.masks import BatchMasks, MaskSource, no_masks
from common.engine.contract.step import (
    FinishedStep,
    ModelRunnerOutput,
    NewRequest,
    NoToken,
    Outcome,
    PromptLogprobs,
    RunningStep,
    SchedulerOutput,
    accepted,
    outcomes_of,
)
from common.engine.devices.attention import ProjectionAttention
from common.engine.devices.base import RowSampler
from common.engine.devices.decode_inputs import DecodeInputs, DecodeLimits, RecordedDecodes, RecordedStepError
from common.engine.model.attention_hook import clear_layer_attention, install
from common.engine.model.loader import LoadedModel
from common.engine.model.lora import RequestAdapters
from common.engine.model.stage_links import OneStage, StageLinks
from common.engine.phases import Phase, PhaseClock
from common.engine.sampling.processors import LogitsProcessor
from common.engine.sampling.sampler import Sample, Sampler, logprobs_of, samples_of
from common.engine.speculation.guard import NOTHING, GuardedProposer, Proposed
from common.engine.worker.batch import BatchPacker, PackedBatch
from common.engine.worker.pooler import ClassificationHead, Pooler
from common.engine.worker.request_table import RequestTable
from common.engine.worker.sampling_step import SamplingStep
from common.engine.worker.state_blocks import StateBlocks
from common.engine.worker.state_cache import StateCache
from common.engine.worker.token_mask import TokenMask
from common.types import Logprobs, RequestId, SamplingParams

logger = logging.getLogger(__name__)

_NO_DRAFTS: Mapping[RequestId, Sequence[int]] = MappingProxyType({})
_DRAWN = SamplingParams(temperature=1.0, speculative=False)
_ONE_STAGE = OneStage()
_MAX_PROMPT_ROWS = 64  # positions whose log probabilities are computed at once


class ModelRunner:
    """Owns the request table and the attention of each KV group over `kv_cache`, which it writes but does not own."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: torch.Tensor,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        processors: Sequence[LogitsProcessor] = (),
        proposer: GuardedProposer | None = None,
        links: StageLinks = _ONE_STAGE,
        inputs: Callable[[PackedBatch], torch.Tensor] | None = None,
        on_computed: Callable[[PackedBatch], None] | None = None,
    ) -> None:
        """`inputs` gives what a stage that is not the first takes in place of tokens; None: what comes by `links`.
        `on_computed` is called after each forward pass, before anything is sampled."""
        self.max_model_len = max_model_len
        self._loaded = loaded
        self._stage = stage = loaded.stage
        self._links = links
        self._inputs = inputs or self._receive
        self.on_computed = on_computed
        self._memory = loaded.device.memory
        self._kv_cache = kv_cache
        self._block_size = block_size
        kv_groups = [group for group in loaded.kv_groups if group.kind != "state"]
        self._attentions = [loaded.device.attention(kv_cache, loaded.kernels, loaded.dtype) for _ in kv_groups]
        if loaded.decoder is None:
            for group, attention in zip(kv_groups, self._attentions, strict=True):
                own = [layer - stage.kv_layers.start for layer in group.layers if layer in stage.kv_layers]
                install([loaded.attention_modules[layer] for layer in own], attention)
        self._recorded: RecordedDecodes | None = None
        self.num_failed_recordings = 0  # see Executor
        self._sampler = Sampler()
        self._row_sampler = loaded.row_sampler
        self._sample_on_device = loaded.step_sampler
        self._sampling: SamplingStep | None = None  # the last step that sampled on the device
        self._table = RequestTable(
            max_num_seqs,
            max_model_len,
            self._block_size,
            num_groups=len(loaded.kv_groups),
            position_dims=loaded.position_dims,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            processors=processors,
            pooling=loaded.pooling,
        )
        head = loaded.classification_head
        self._pooler = Pooler(loaded.pooling, None if head is None else ClassificationHead(*head))
        self._proposer = proposer
        self._states: StateCache | None = None
        if loaded.state_bytes:
            blocks = StateBlocks(
                kv_cache[:, : loaded.kv_spec.num_layers],
                loaded.ranks,
                num_kv_heads=loaded.kv_groups[0].num_kv_heads,
                blocks_per_state=len(loaded.kv_groups) - len(kv_groups),
            )
            self._states = StateCache(
                loaded.state_layers,
                blocks,
                self._table,
                block_size=block_size,
                memory=self._memory,
                recurrences=loaded.recurrences,
                adapters=None if loaded.adapters is None else loaded.adapters.batch,
            )
        windows = [group.sees for group in kv_groups or loaded.kv_groups[:1]]
        self._adapters = None if loaded.adapters is None else RequestAdapters(loaded.adapters, max_num_seqs)
        self._packer = BatchPacker(self._table, self._block_size, self._memory, windows, self._adapters)
        # Layers of blocks that a group does not use; those of features are of the first.
        num_layers = loaded.kv_spec.num_layers
        unused = [
            slice(min(len(group.layers), num_layers), None if number else num_layers)
            for number, group in enumerate(loaded.kv_groups)
        ]
        self._unused = [
            (number, layers) for number, layers in enumerate(unused) if len(range(kv_cache.shape[1])[layers])
        ]

    def update_requests(self, step: SchedulerOutput) -> None:
        """Removes dropped requests and takes note of new blocks. Called for each step, before `run`."""
        if self._proposer is not None and (dropped := self._table.contexts(step.dropped_request_ids)):
            self._proposer.forget(dropped)
        if self._proposer is not None and step.forgets_outputs:
            self._proposer.reset()
        if self._states is not None or self._adapters is not None:
            new = (new.request_id for new in step.new_requests)
            left = self._table.known_rows_of([*step.dropped_request_ids, *new])
            if self._states is not None:
                self._states.forget(left)
            if self._adapters is not None:
                self._adapters.clear(left)
        self._table.update(step)
        if self._adapters is not None:
            for request in step.new_requests:
                self._adapters.set(self._table.row_of(request.request_id), request.adapter)
        self._pooler.update(step)
        for group, layers in self._unused:
            self._clear_unused(group, layers, step)

    @property
    def block_tables(self) -> dict[RequestId, list[list[int]]]:
        """The blocks of each request that it knows, in each KV group."""
        return self._table.block_ids

    @property
    def table(self) -> RequestTable:
        """The requests that it knows."""
        return self._table

    def check_proposer(self) -> list[str]:
        """Violations of the proposer's own bounds."""
        return [] if self._proposer is None else self._proposer.check()

    def note_sampled(self, sampled: Mapping[RequestId, Sequence[int]]) -> None:
        """Takes the tokens that the last stage has sampled; none of a request whose last token is to be computed
        again."""
        self._table.note_sampled(sampled)

    def run(
        self, num_scheduled_tokens: dict[RequestId, int], drafts: Mapping[RequestId, Sequence[int]] = _NO_DRAFTS
    ) -> ModelRunnerOutput:
        """Computes the scheduled tokens; samples for the requests whose last token is among them. See `Sampler` for
        requests that get no token."""
        return self.submit(num_scheduled_tokens, drafts, no_masks, PhaseClock()).result()

    @torch.inference_mode()
    def submit(
        self,
        num_scheduled_tokens: dict[RequestId, int],
        drafts: Mapping[RequestId, Sequence[int]],
        masks: MaskSource,
        phases: PhaseClock,
    ) -> RunningStep:
        """Begins to. The step is over at once unless a GPU computes it and kernels can sample all requests.
        `masks`: see Executor; `phases` are entered as they begin."""
        before = self._sampling
        batch = self._packer.pack(num_scheduled_tokens, drafts)
        if batch.opened_blocks and self._attentions and self._attentions[0].reads_whole_blocks:
            self._clear(batch.opened_blocks)
        if before is not None and not before.is_settled:
            batch = before.fill_in(batch)
        phases.enter(Phase.FORWARD)
        if self._states is not None:
            self._states.begin_step(batch.rows, batch.attention)
        logits = self._forward(batch)
        if self._states is not None:
            self._states.end_step()
        if self.on_computed is not None:
            self.on_computed(batch)
        if not self._stage.is_last:
            self._links.send(logits)
            return FinishedStep(ModelRunnerOutput())
        phases.enter(Phase.SAMPLE)
        if self._samples_on_device(batch):
            assert self._sample_on_device is not None
            rows, lengths = batch.sampled_rows, batch.sampled_lengths
            if before is not None and self._table.is_penalised[rows].any():
                _settle(before, phases)
            draws, penalties = self._table.draws(rows, lengths), self._table.penalties(rows, lengths)
            token_ids = self._sample_on_device(logits, draws, penalties)
            if not drafts:
                copy = self._memory.to_host(token_ids)
                propose = partial(self._propose, are_verified=False)
                self._sampling = SamplingStep(token_ids, copy, batch, self._table, propose)
                return self._sampling
            return FinishedStep(self._answer(batch, samples_of(token_ids.tolist()), {}, drafts))
        if before is not None:
            _settle(before, phases)
        return FinishedStep(self._finish(batch, logits, masks, drafts))

    def _samples_on_device(self, batch: PackedBatch) -> bool:
        rows = batch.sampled_rows
        return (
            self._sample_on_device is not None
            and bool(batch.sampled_ids)
            and not batch.prompt_runs
            and not batch.pooled_runs
            and bool(self._table.kernels_can_sample[rows].all())
        )

    def _finish(
        self,
        batch: PackedBatch,
        logits: torch.Tensor,
        masks: MaskSource,
        drafts: Mapping[RequestId, Sequence[int]],
    ) -> ModelRunnerOutput:
        prompt_logprobs = self._prompt_logprobs(batch, logits[len(batch.sampled_ids) :]) if batch.prompt_runs else {}
        pooled = self._pooler.pool(batch.pooled_runs, self._loaded.head_inputs.take()) if batch.pooled_runs else {}
        if not batch.sampled_ids:
            return ModelRunnerOutput(prompt_logprobs=prompt_logprobs, pooled=pooled)
        found = masks(batch.sampled_ids, batch.sampled_lengths)  # while the device computes the logits
        logits = logits[: len(batch.sampled_ids)]
        rows, lengths = batch.sampled_rows, batch.sampled_lengths
        if found is None:
            samples = self._sample(rows, lengths, logits, None)
        else:
            samples = self._sample_masked(rows, lengths, logits, found)
        output = self._answer(batch, samples, prompt_logprobs, drafts)
        return replace(output, pooled=pooled) if pooled else output

    def _answer(
        self,
        batch: PackedBatch,
        samples: Sequence[Sample],
        prompt_logprobs: dict[RequestId, PromptLogprobs],
        drafts: Mapping[RequestId, Sequence[int]],
    ) -> ModelRunnerOutput:
        """The step's results; the request table notes the tokens."""
        rows, lengths = batch.sampled_rows, batch.sampled_lengths
        token_ids = [sample.token_id for sample in samples]
        # A request without a token ends: what its row holds no longer matters. One that is late goes on from here.
        self._table.append_tokens(rows, lengths, token_ids)
        if 0 in token_ids:
            late = [number for number, sample in enumerate(samples) if sample is NoToken.NOT_YET]
            if late:
                self._table.put_off(rows[late], lengths[late])
        outcomes = self._verify(batch, samples, drafts) if drafts else outcomes_of(batch.sampled_ids, samples)
        proposed = self._propose(outcomes, are_verified=bool(drafts))
        return ModelRunnerOutput(outcomes, prompt_logprobs, drafts=proposed.drafts, proposer_failure=proposed.failure)

    def _verify(
        self, batch: PackedBatch, samples: Sequence[Sample], drafts: Mapping[RequestId, Sequence[int]]
    ) -> dict[RequestId, Outcome]:
        """Outcomes of a batch of which some requests have drafts; the request table goes back to what holds."""
        found: dict[RequestId, list[tuple[int, Sample]]] = {}
        for request_id, length, sample in zip(batch.sampled_ids, batch.sampled_lengths.tolist(), samples, strict=True):
            found.setdefault(request_id, []).append((length, sample))
        outcomes: dict[RequestId, Outcome] = {}
        for request_id, rows in found.items():
            rows.sort(key=lambda row: row[0])
            outcome = accepted(drafts.get(request_id, ()), [sample for _, sample in rows])
            if request_id in drafts:
                num_new = len(outcome) if isinstance(outcome, list) else 0
                self._table.settle_drafts(request_id, rows[0][0] + num_new)
            outcomes[request_id] = outcome
        return outcomes

    def _propose(self, outcomes: Mapping[RequestId, Outcome], *, are_verified: bool) -> Proposed:
        """Drafts of what comes after the outcomes."""
        if self._proposer is None:
            return NOTHING
        sampled = (request_id for request_id, outcome in outcomes.items() if isinstance(outcome, list))
        return self._proposer.propose(self._table.contexts(sampled), are_verified=are_verified)

    def _forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [len(batch.logits_index), vocabulary]; see Stage.forward."""
        num_tokens = batch.input_ids.shape[0]
        tokens = batch.input_ids if self._stage.is_first else self._inputs(batch)
        inputs = DecodeInputs(tokens, batch.positions, batch.attention, batch.adapters)
        has_runs = bool(batch.prompt_runs or batch.pooled_runs)
        keeps_all = batch.logits_index.shape[0] == num_tokens and not has_runs
        is_recorded = not has_runs and batch.attention.num_decodes == num_tokens
        if batch.pooled_runs and self._stage.is_last:
            num_pooled = sum(run.num_tokens for run in batch.pooled_runs)
            self._loaded.head_inputs.keep_after(batch.logits_index.shape[0] - num_pooled)
        if self._recorded is not None and is_recorded and (self._states is None or self._states.stage()):
            found = self._run_recorded(self._recorded, inputs)
            if found is not None and not self._stage.is_last:
                return found.clone()
            if found is not None:
                found = found[:, : self._loaded.vocab_size]
                return found if keeps_all else found[batch.logits_index]
        return self._compute(inputs, None if keeps_all or not self._stage.is_last else batch.logits_index)

    def _receive(self, batch: PackedBatch) -> torch.Tensor:
        """Hidden states of the stage before."""
        hidden = self._links.receive((len(batch.input_ids), self._stage.hidden_size), self._passed_dtype)
        return hidden.to(self._kv_cache.device)

    @property
    def _passed_dtype(self) -> torch.dtype:
        """The type of the numbers that go from stage to stage."""
        return self._loaded.dtype if self._loaded.decoder is None else torch.float32

    def _run_recorded(self, recorded: RecordedDecodes, inputs: DecodeInputs) -> torch.Tensor | None:
        try:
            return recorded.run(inputs)
        except RecordedStepError as error:
            self._give_up_recording(error)
            return None

    def _give_up_recording(self, error: RecordedStepError) -> None:
        logger.warning("decode steps are computed kernel by kernel: %s", error)
        self._recorded = None
        self.num_failed_recordings += 1

    def _compute(self, inputs: DecodeInputs, wanted: torch.Tensor | None) -> torch.Tensor:
        """Logits [len(wanted), vocabulary] of the `wanted` tokens; None: of all."""
        if self._loaded.adapters is not None:
            self._loaded.adapters.begin_step(inputs.adapters)
        if self._loaded.decoder is not None:
            attention = cast("ProjectionAttention", self._attentions[0])  # a fused decoder has one KV group
            found = self._loaded.decoder(inputs.tokens, inputs.positions, inputs.attention, attention, wanted)
            return found[:, : self._loaded.vocab_size] if self._stage.is_last else found
        for backend, batch in zip(self._attentions, inputs.attention.by_group(), strict=False):  # none: only states
            backend.begin_step(batch)
        found = self._stage.forward(
            self._loaded.model,
            inputs.tokens,
            inputs.positions.unsqueeze(-2),  # [1, tokens], or [dimensions, 1, tokens]
            0 if wanted is None else wanted,  # 0 keeps all
        )
        return found[:, : self._loaded.vocab_size] if self._stage.is_last else found

    def _recordable(self, inputs: DecodeInputs) -> torch.Tensor:
        """See Forward."""
        if self._states is not None:
            self._states.begin_recorded(len(inputs.tokens))
        return self._compute(inputs, None)

    @torch.inference_mode()
    def record_decodes(self, max_num_decodes: int) -> None:
        """Records steps of up to so many decodes, if device and model allow it."""
        if self._loaded.position_dims > 1:
            return
        num_groups = max(1, len(self._attentions))  # of a model without attention, one that nothing reads
        limits = DecodeLimits(
            max_num_decodes,
            self.max_model_len,
            self._block_size,
            num_groups=num_groups,
            num_adapters=0 if self._loaded.adapters is None else self._loaded.adapters.num_slots,
        )
        if not self._stage.is_first:
            limits = limits._replace(token_shape=(self._stage.hidden_size,), token_dtype=self._passed_dtype)
        try:
            kernels = self._loaded.kernels if self._attentions else "attention"  # there is none that stands in the way
            self._recorded = self._loaded.device.record_decodes(self._recordable, kernels, limits)
        except RecordedStepError as error:
            self._give_up_recording(error)
        if self._recorded is None and self._states is not None:
            self._states.forget_recorded()

    def close(self) -> None:
        """Lets the model compute without this runner, whose KV cache and states it would keep alive."""
        for module in self._loaded.attention_modules:
            clear_layer_attention(module)
        if self._states is not None:
            self._states.hook.remove()

    def _sample_masked(
        self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], logits: torch.Tensor, masks: BatchMasks
    ) -> list[Sample]:
        """Samples for rows of which some have a mask, and some get no token."""
        if not masks.no_tokens:
            return self._sample_all_masked(rows, lengths, logits.float(), masks)
        samples = np.full(len(rows), None, dtype=object)
        for position, no_token in masks.no_tokens.items():
            samples[position] = no_token
        kept = np.flatnonzero(samples == None)  # noqa: E711  of each element
        if len(kept):
            own = logits[torch.from_numpy(kept).to(logits.device)].float()
            places = np.searchsorted(kept, masks.positions).tolist()
            own_masks = BatchMasks(places, masks.words, {})
            samples[kept] = self._sample_all_masked(rows[kept], lengths[kept], own, own_masks)
        found: list[Sample] = samples.tolist()
        return found

    def _sample_all_masked(
        self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], logits: torch.Tensor, masks: BatchMasks
    ) -> list[Sample]:
        """Samples for rows that all get a token. `logits` is overwritten."""
        samples = self._sample(rows, lengths, logits, TokenMask(masks.positions, masks.words, self._memory))
        for position in masks.positions:
            if isinstance(samples[position], NoToken) and bool((logits[position] == -torch.inf).all()):
                samples[position] = NoToken.CONTRADICTION
        return samples

    def _sample(
        self,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        logits: torch.Tensor,
        mask: TokenMask | None,
    ) -> list[Sample]:
        """Samples what follows the first `lengths` tokens of rows of the request table. With a mask, `logits` is
        overwritten."""
        if self._table.are_plain(rows):
            return self._sampler.sample_plain(logits, mask)
        if self._row_sampler is None or mask is not None:
            return self._sample_with_torch(rows, lengths, logits, mask)
        return self._sample_compiled(rows, lengths, logits, self._row_sampler)

    def _sample_compiled(
        self,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        logits: torch.Tensor,
        sampler: RowSampler,
    ) -> list[Sample]:
        """By compiled kernels, as far as they can."""
        can = self._table.keep_all[rows]
        if can.all():
            return samples_of(sampler.sample(logits, self._table.draws(rows, lengths)).tolist())
        tokens = np.empty(len(rows), dtype=object)
        tokens[~can] = self._sample_with_torch(rows[~can], lengths[~can], logits[torch.from_numpy(~can)])
        if can.any():
            draws = self._table.draws(rows[can], lengths[can])
            ids = sampler.sample(logits[torch.from_numpy(can)], draws).tolist()
            tokens[can] = samples_of(ids)
        found: list[Sample] = tokens.tolist()
        return found

    def _sample_with_torch(
        self,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        logits: torch.Tensor,
        mask: TokenMask | None = None,
    ) -> list[Sample]:
        views = [self._table.sampling_row(*each) for each in zip(rows.tolist(), lengths.tolist(), strict=True)]
        return self._sampler.sample(logits.float(), views, mask)

    def _prompt_logprobs(self, batch: PackedBatch, logits: torch.Tensor) -> dict[RequestId, PromptLogprobs]:
        """Log probabilities of the tokens that follow those of the prompt runs, whose logits are given; a few rows at a
        time, as those of the whole vocabulary take much memory in float32."""
        found: dict[RequestId, PromptLogprobs] = {}
        first = 0
        for run in batch.prompt_runs:
            entries: list[Logprobs] = []
            num_top = self._table.num_top_of_prompt(run.row)
            following = self._table.token_ids[run.row, run.start + 1 : run.start + run.num_tokens + 1]
            for at in range(0, run.num_tokens, _MAX_PROMPT_ROWS):
                part = torch.from_numpy(following[at : at + _MAX_PROMPT_ROWS]).to(logits.device)
                rows = logits[first : first + len(part)].float()
                entries += logprobs_of(rows, part, [num_top] * len(part), with_ranks=True)
                first += len(part)
            found[run.request_id] = PromptLogprobs(run.start + 1, entries)
        return found

    def _clear(self, block_ids: list[int]) -> None:
        """Zeroes blocks that will be partly empty: the attention masks values of an earlier owner, but a NaN would
        survive the mask."""
        self._kv_cache[torch.tensor(block_ids, device=self._kv_cache.device)] = 0

    def _clear_unused(self, group: int, layers: slice, step: SchedulerOutput) -> None:
        """Zeroes what a group leaves of the blocks that it gets, so that they are the same wherever they are computed,
        and take nothing of others along."""
        got = [new.block_ids[group][new.num_computed_tokens // self._block_size :] for new in step.new_requests]
        got += [block_ids[group] for block_ids in step.new_block_ids.values()]
        if any(got):
            ids = torch.tensor([each for block_ids in got for each in block_ids], device=self._kv_cache.device)
            self._kv_cache[ids, layers] = 0

    def profile(self, num_tokens: int, sampling: SamplingParams = _DRAWN) -> None:
        """Runs a step of one prompt of `num_tokens` tokens, to measure time or memory, or so that kernels are compiled.
        Writes to the first blocks."""
        request_id = RequestId("profile")
        blocks = list(range(1, -(-num_tokens // self._block_size) + 1))
        block_ids = [[0] * len(blocks) if group.kind == "state" else blocks for group in self._loaded.kv_groups]
        work = self._loaded.pooling.own_work
        new = NewRequest(request_id, [0] * num_tokens, num_tokens, sampling, block_ids, 0, pooling=work)
        self.update_requests(SchedulerOutput(new_requests=[new]))
        self.run({request_id: num_tokens})
        self.update_requests(SchedulerOutput(dropped_request_ids=[request_id]))


def _settle(step: SamplingStep, phases: PhaseClock) -> None:
    if not step.is_settled:
        interrupted = phases.enter(Phase.DEVICE)
        step.settle()
        phases.enter(interrupted)
