"""An engine whose steps are submitted before the tokens of the step before are known."""

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from common.engine.messages import AddRequest
from common.engine.speculation.fake import FakeProposer
from common.engine.worker.sampling_step import SamplingStep
from common.types import RequestId, SamplingParams
from tests.integration.speculation_rig import ask_and_verify_always
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


def generate(device, params, *, speculative=None, **settings):
    """Outputs of prompts of 5, 6, ... tokens, all at once; and how many steps got tokens that were not known."""
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_model_dir("llama")), device=device, dtype="float32", **settings),
        cache=CacheConfig(block_size=4, num_blocks=128),
        scheduler=SchedulerConfig(max_num_seqs=8),
        speculation=SpeculationConfig(speculative=speculative),
    )
    filled = []
    with pytest.MonkeyPatch.context() as patch, InprocClient(config) as client:
        fill_in = SamplingStep.fill_in
        patch.setattr(SamplingStep, "fill_in", lambda *args: filled.append(1) or fill_in(*args))
        outputs = {RequestId(f"r{i}"): [] for i in range(len(params))}
        for i, sampling in enumerate(params):
            client.add_request(
                AddRequest(request_id=RequestId(f"r{i}"), prompt_token_ids=prompt_of(5 + i), sampling=sampling)
            )
        while client.has_unfinished:
            for output in client.step().outputs:
                outputs[output.request_id] += [token.token_id for token in output.tokens]
        assert client.check_integrity().violations == []
        if speculative:
            assert client.stats().drafts.num_accepted > 0
    return list(outputs.values()), len(filled)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.kernels), GPU], indirect=True)
def test_greedy_tokens_are_those_of_transformers(device):
    lengths = [6, 3, 9]
    expected = [reference_generate(tiny_model_dir("llama"), prompt_of(5 + i), n) for i, n in enumerate(lengths)]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in lengths]
    stop = expected[2][5]
    expected[2] = expected[2][: expected[2].index(stop) + 1]
    params[2] = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(stop,))
    outputs, num_ahead = generate(device, params)
    assert outputs == expected
    assert num_ahead > 3


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.kernels), GPU], indirect=True)
def test_others_in_the_batch_wait_for_their_tokens(device):
    """Drawn tokens are the same beside requests whose parameters look at the tokens before, where no step is ahead."""
    drawn = [SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=5) for i in range(2)]
    alone, num_ahead = generate(device, drawn)
    assert num_ahead > 1
    penalised = SamplingParams(temperature=1.0, seed=3, max_tokens=5, repetition_penalty=1.3)
    mixed, num_ahead = generate(device, [*drawn, penalised])
    assert mixed[:2] == alone
    assert num_ahead == 0


NUM_UNKNOWN = 6  # tokens of an answer before the proposer knows how it goes on
ANSWER = []


class LateProposer(FakeProposer):
    """Knows the rest of ANSWER, after a while."""

    def propose(self, requests):
        assert all(int(each.token_ids.min()) >= 0 for each in requests), "placeholders reach the proposer"
        drafts = super().propose(requests)
        return [
            found if len(each.token_ids) >= each.num_prompt_tokens + NUM_UNKNOWN else []
            for each, found in zip(requests, drafts, strict=True)
        ]


def knowing_late(_):
    return LateProposer(lambda known, _: ANSWER[len(known)], "right", 3, vocab_size=256)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.kernels), GPU], indirect=True)
def test_steps_run_ahead_until_there_are_drafts(device, monkeypatch):
    ask_and_verify_always(monkeypatch)
    answer = reference_generate(tiny_model_dir("llama"), prompt_of(5), 20)
    ANSWER[:] = [*prompt_of(5), *answer]
    params = [SamplingParams(temperature=0.0, max_tokens=18)]
    outputs, num_ahead = generate(device, params, speculative=f"{__name__}:knowing_late")
    assert outputs == [answer[:18]]
    assert NUM_UNKNOWN - 3 <= num_ahead <= NUM_UNKNOWN
