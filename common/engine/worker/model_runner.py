"""Runs the model over one step's batch and samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from common.engine.attention.base import ProjectionAttention
from common.engine.attention.hook import install
from common.engine.attention.registry import create_backend
from common.engine.executor.base import FinishedStep, RunningStep
from common.engine.model.loader import LoadedModel
from common.engine.phases import Phase, PhaseClock
from common.engine.sampling.compiled_sampler import CompiledSampler
from common.engine.sampling.draws import Draws, Penalties
from common.engine.sampling.processors import LogitsProcessor
from common.engine.sampling.sampler import MASKED, Sampler, logprobs_of
from common.engine.scheduler.output import DeadEnd, ModelRunnerOutput, NewRequest, PromptLogprobs, SchedulerOutput
from common.engine.worker.batch import BatchPacker, PackedBatch
from common.engine.worker.constraints import TokenMask
from common.engine.worker.decode_graphs import CudaRecorder, DecodeGraphs, graph_sizes
from common.engine.worker.decode_inputs import DecodeInputs, RecordedStepError
from common.engine.worker.decode_programs import DecodePrograms
from common.engine.worker.request_table import RequestTable
from common.engine.worker.sampling_step import SamplingStep
from common.types import Logprobs, RequestId, SampledToken, SamplingParams

logger = logging.getLogger(__name__)

_DRAWN = SamplingParams(temperature=1.0)
_MAX_PROMPT_ROWS = 64  # positions whose log probabilities are computed at once


def device_sampler() -> Callable[[torch.Tensor, Draws, Penalties | None], torch.Tensor]:
    """See `sample_on_device`, which is imported where Triton is used only."""
    from common.engine.sampling.device_sampler import sample_on_device

    return sample_on_device


class _Sampled(NamedTuple):
    """What a step has sampled."""

    sampled: dict[RequestId, SampledToken | None]
    dead_ends: dict[RequestId, DeadEnd]  # of these the sampled tokens do not count
    late: frozenset[RequestId] = frozenset()  # nor of these


def _tokens(token_ids: npt.NDArray[np.int64]) -> list[SampledToken | None]:
    return [SampledToken(token_id) if token_id >= 0 else None for token_id in token_ids.tolist()]


class ModelRunner:
    """Owns the request table and the attention backend over `kv_cache`, which it writes but does not own."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: torch.Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        processors: Sequence[LogitsProcessor] = (),
        grammar_step_s: float = 0.005,
    ) -> None:
        """`grammar_step_s`: see Constraints."""
        self.max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._loaded = loaded
        self._kv_cache = kv_cache
        self._block_size = kv_cache.shape[4]
        self._attention = create_backend(loaded.attention_backend, kv_cache)
        if loaded.decoder is None:
            install(loaded.attention_modules, self._attention)
        self._recorded: DecodeGraphs | DecodePrograms | None = None
        self.num_failed_recordings = 0  # see Executor
        self._sampler = Sampler()
        self._compiled = loaded.sampler
        self._sample_on_device = device_sampler() if loaded.attention_backend == "triton" else None
        self._sampling: SamplingStep | None = None  # the last step that sampled on the device
        self._table = RequestTable(
            max_num_seqs,
            max_model_len,
            self._block_size,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            processors=processors,
            grammar_step_s=grammar_step_s,
        )
        self._packer = BatchPacker(self._table, self._block_size, loaded.device)

    def update_requests(self, step: SchedulerOutput) -> None:
        """Removes dropped requests and takes note of new blocks. Called for each step, before `run`."""
        self._table.update(step)

    def run(self, num_scheduled_tokens: dict[RequestId, int]) -> ModelRunnerOutput:
        """Computes the scheduled tokens; samples for the requests whose last token is among them. See `Sampler` for
        requests that get no token."""
        return self.submit(num_scheduled_tokens, PhaseClock()).result()

    @torch.inference_mode()
    def submit(self, num_scheduled_tokens: dict[RequestId, int], phases: PhaseClock) -> RunningStep:
        """Begins to. The step is over at once unless a GPU computes it and kernels can sample all requests.
        `phases`: see Executor."""
        before = self._sampling
        batch = self._packer.pack(num_scheduled_tokens)
        if batch.opened_blocks and self._attention.reads_whole_blocks:
            self._clear(batch.opened_blocks)
        if before is not None and not before.is_settled:
            batch = before.fill_in(batch)
        phases.enter(Phase.FORWARD)
        logits = self._forward(batch)
        phases.enter(Phase.SAMPLE)
        if self._samples_on_device(batch):
            assert self._sample_on_device is not None
            rows = batch.sampled_rows
            if before is not None and self._table.is_penalised[rows].any():
                before.settle()
            token_ids = self._sample_on_device(logits, self._table.draws(rows), self._table.penalties(rows))
            self._sampling = SamplingStep(token_ids, batch, self._table, phases)
            return self._sampling
        if before is not None:
            before.settle()
        return FinishedStep(self._finish(batch, logits))

    def _samples_on_device(self, batch: PackedBatch) -> bool:
        rows = batch.sampled_rows
        return (
            self._sample_on_device is not None
            and bool(batch.sampled_ids)
            and not batch.prompt_runs
            and bool(self._table.kernels_can_sample[rows].all())
        )

    def _finish(self, batch: PackedBatch, logits: torch.Tensor) -> ModelRunnerOutput:
        prompt_logprobs = self._prompt_logprobs(batch, logits[len(batch.sampled_ids) :]) if batch.prompt_runs else {}
        if not batch.sampled_ids:
            return ModelRunnerOutput(prompt_logprobs=prompt_logprobs)
        sampled, dead_ends, late = self._sample(batch, logits[: len(batch.sampled_ids)])
        masked = frozenset(request_id for request_id, token in sampled.items() if token is MASKED)
        sampled.update(dict.fromkeys(masked))
        return ModelRunnerOutput(
            sampled=sampled, dead_ends=dead_ends, masked=masked, late=late, prompt_logprobs=prompt_logprobs
        )

    def _forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [len(batch.logits_index), vocabulary]."""
        inputs = DecodeInputs(batch.input_ids, batch.positions, batch.attention)
        keeps_all = len(batch.logits_index) == len(batch.input_ids) and not batch.prompt_runs
        if keeps_all and self._recorded is not None and batch.attention.num_decodes == len(batch.input_ids):
            logits = self._run_recorded(self._recorded, inputs)
            if logits is not None:
                return logits[:, : self._loaded.vocab_size]
        return self._compute(inputs, None if keeps_all else batch.logits_index)

    def _run_recorded(self, recorded: DecodeGraphs | DecodePrograms, inputs: DecodeInputs) -> torch.Tensor | None:
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
        if self._loaded.decoder is not None:
            attention = cast("ProjectionAttention", self._attention)
            return self._loaded.decoder(*inputs, attention, wanted)[:, : self._loaded.vocab_size]
        self._attention.begin_step(inputs.attention)
        output = self._loaded.model(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,  # 0 keeps all
        )
        logits: torch.Tensor = output.logits[0, :, : self._loaded.vocab_size]
        return logits

    @torch.inference_mode()
    def record_decodes(self) -> None:
        """Records decode steps, if device and model allow it: on a GPU now, on a CPU as sizes are met."""
        if self._loaded.kernels == "fused" and self._loaded.attention_backend.startswith("cpu"):
            self._recorded = DecodePrograms(
                lambda inputs: self._compute(inputs, None),
                max_num_seqs=self._max_num_seqs,
                max_model_len=self.max_model_len,
                block_size=self._block_size,
            )
        elif self._loaded.device.type == "cuda" and self._attention.is_recordable:
            self._record_graphs()

    def _record_graphs(self) -> None:
        try:
            self._recorded = DecodeGraphs(
                lambda inputs: self._compute(inputs, None),
                CudaRecorder(),
                sizes=graph_sizes(self._max_num_seqs),
                max_model_len=self.max_model_len,
                block_size=self._block_size,
                device=self._loaded.device,
            )
        except RecordedStepError as error:
            self._give_up_recording(error)
        except Exception as error:  # noqa: BLE001  whatever a compiler or the modelling code raises
            logger.warning("decode steps run without CUDA graphs: %s", str(error).partition("\n")[0])

    def _sample(self, batch: PackedBatch, logits: torch.Tensor) -> _Sampled:
        constraints = self._table.constraints
        if not constraints:
            return _Sampled(self._sample_tokens(batch, logits, None), {})
        late = constraints.wait(batch.sampled_rows.tolist())  # while the device computes the logits
        late_ids = frozenset(batch.sampled_ids[position] for position in late)
        if late:
            self._table.put_off(batch.sampled_rows[late])
            kept = np.delete(np.arange(len(batch.sampled_ids)), late)
            if not len(kept):
                return _Sampled({}, {}, late_ids)
            batch, logits = batch.with_samples(kept), logits[torch.from_numpy(kept).to(logits.device)]
        rows = batch.sampled_rows.tolist()
        logits = logits.float()
        mask, dead_ends = constraints.mask(rows)
        sampled = self._sample_tokens(batch, logits, mask)
        ended: dict[RequestId, DeadEnd] = {}
        for position, (request_id, row) in enumerate(zip(batch.sampled_ids, rows, strict=True)):
            token = sampled[request_id]
            if position in dead_ends:
                ended[request_id] = dead_ends[position]
            elif token is not None and token is not MASKED:
                constraints.accept(row, token.token_id)
            elif constraints.has(row) and bool((logits[position] == -torch.inf).all()):
                ended[request_id] = DeadEnd.CONTRADICTION
        constraints.begin()
        return _Sampled(sampled, ended, late_ids)

    def _sample_tokens(
        self, batch: PackedBatch, logits: torch.Tensor, mask: TokenMask | None
    ) -> dict[RequestId, SampledToken | None]:
        """The tokens of the batch. With a mask, `logits` is overwritten."""
        rows = batch.sampled_rows
        if self._table.are_plain(rows):
            tokens = self._sampler.sample_plain(logits, mask)
        elif self._compiled is None or mask is not None:
            tokens = self._sample_with_torch(rows, logits, mask)
        else:
            tokens = self._sample_compiled(rows, logits, self._compiled)
        # A request without a token ends: what its row holds no longer matters.
        token_ids = [0 if token is None or token is MASKED else token.token_id for token in tokens]
        self._table.append_tokens(batch.sampled_rows, token_ids)
        return dict(zip(batch.sampled_ids, tokens, strict=True))

    def _sample_compiled(
        self, rows: npt.NDArray[np.int64], logits: torch.Tensor, sampler: CompiledSampler
    ) -> list[SampledToken | None]:
        """By compiled kernels, as far as they can."""
        can = self._table.keep_all[rows]
        if can.all():
            return _tokens(sampler.sample(logits, self._table.draws(rows)))
        tokens = np.empty(len(rows), dtype=object)
        tokens[~can] = self._sample_with_torch(rows[~can], logits[torch.from_numpy(~can)])
        if can.any():
            tokens[can] = _tokens(sampler.sample(logits[torch.from_numpy(can)], self._table.draws(rows[can])))
        found: list[SampledToken | None] = tokens.tolist()
        return found

    def _sample_with_torch(
        self, rows: npt.NDArray[np.int64], logits: torch.Tensor, mask: TokenMask | None = None
    ) -> list[SampledToken | None]:
        return self._sampler.sample(logits.float(), [self._table.sampling_row(row) for row in rows.tolist()], mask)

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

    def profile(self, num_tokens: int, sampling: SamplingParams = _DRAWN) -> None:
        """Runs a step of one prompt of `num_tokens` tokens, to measure time or memory, or so that kernels are compiled.
        Writes to the first blocks."""
        request_id = RequestId("profile")
        blocks = list(range(1, -(-num_tokens // self._block_size) + 1))
        new = NewRequest(request_id, [0] * num_tokens, num_tokens, sampling, blocks, 0)
        self.update_requests(SchedulerOutput(new_requests=[new]))
        self.run({request_id: num_tokens})
        self.update_requests(SchedulerOutput(dropped_request_ids=[request_id]))
