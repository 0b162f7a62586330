"""An EAGLE-3 head changes no token, and proposes what plain torch does that computes all tokens at once."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.demo_model import demo_model_path
from common.engine.client.inproc import InprocClient
from common.engine.contract.step import NOTHING_ASKED
from common.engine.devices.host_memory import HostMemory
from common.engine.llm import LLM
from common.engine.messages import AddRequest
from common.engine.scheduler import scheduler
from common.engine.scheduler.draft_depth import DraftDepth
from common.engine.speculation.base import Context
from common.engine.worker.features import TAG_BYTES
from common.engine.worker.head import Head
from common.errors import ConfigError
from common.types import RequestId, SamplingParams
from tests.eagle3_heads import HEAD_DIM, HIDDEN, NUM_KV_HEADS, reference_drafts, tiny_head_dir
from tests.integration import handoff_rig
from tests.integration import speculation_rig as rig
from tests.integration.handoff_rig import Handoffs, create_engine
from tests.integration.ranks_rig import assert_same, generate, open_llm
from tests.integration.test_draft_model import GREEDY, LENGTHS, MAX_TOKENS, PARAMS, answer, figures_of
from tests.pods import wait_for
from tests.tiny_models import prompt_of, random_model, reference_generate, tiny_config, tiny_model_dir

LLAMA = tiny_model_dir("llama")
HEAD = tiny_head_dir(LLAMA)
TEXTS = ["The capital of France is", "Once upon a time there was a king who had"]


def make_llm(name: str = "llama", head: Path | None = None, depth: int = 4, **options: object) -> LLM:
    settings = dict(rig.SETTINGS)
    if head is not None:
        settings["speculative"] = f"eagle3:model={head},depth={depth}"
    return LLM(tiny_model_dir(name), **settings | options)


@pytest.fixture(autouse=True)
def _all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take."""
    rig.ask_and_verify_always(monkeypatch)


class Seen:
    """What heads proposed: the tokens before it, the drafts, and the place at which the head began."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int], int]] = []

    def compare(self, head: Path, allowed: Sequence[int] = (), target: Path = LLAMA) -> None:
        """With the reference."""
        assert len(self.drafts) > 8
        for token_ids, proposed, start in self.drafts:
            assert proposed == reference_drafts(target, head, token_ids, len(proposed), start, allowed)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    propose = Head.propose

    def watched(self: Head, requests: Sequence[Context]) -> list[list[int]]:
        drafts = propose(self, requests)
        for each, own in zip(requests, drafts, strict=True):
            if own:
                start = self._requests[each.request_id].shift - 1
                found.drafts.append((each.token_ids.tolist(), own, start))
        return drafts

    monkeypatch.setattr(Head, "propose", watched)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("has_embedding", [True, False])
def test_drafts_are_those_of_the_reference(name: str, has_embedding: bool, seen: Seen) -> None:
    prompts = [prompt_of(length) for length in (*LENGTHS, 90)]
    expected = [reference_generate(tiny_model_dir(name), prompt, MAX_TOKENS) for prompt in prompts]
    head = tiny_head_dir(tiny_model_dir(name), has_embedding=has_embedding, is_normed=has_embedding)
    with make_llm(name, head) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert answer(llm, prompts, GREEDY) == expected
        assert llm._client.stats().prefix_cache_hits
        assert figures_of(llm).num_verified > 50
        assert figures_of(llm).num_unseen == 0
    assert len(seen.drafts) > 50
    seen.compare(head, target=tiny_model_dir(name))


def test_drafts_after_right_and_wrong_ones(seen: Seen) -> None:
    few = (5, 6)  # so that drafts are often right
    params = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=few)
    prompts = [prompt_of(length) for length in LENGTHS]
    with make_llm() as llm:
        plain = answer(llm, prompts, params)
    with make_llm(head=HEAD, depth=5) as llm:
        assert answer(llm, prompts, params) == plain
        figures = figures_of(llm)
    assert 0.1 < figures.num_accepted / figures.num_verified < 0.9
    assert figures.accepted_by_position[3] > 0
    assert figures.num_caught_up < sum(LENGTHS) + 8, "what was right is computed again beside the next drafts"
    seen.compare(HEAD, few)


def test_drafts_after_prefix_hits_and_where_blocks_were_others(seen: Seen) -> None:
    """23 blocks: what one turn leaves in the prefix cache, the next partly uses and partly overwrites."""
    first, second = prompt_of(13, seed=1), prompt_of(17, seed=2)
    turns = [[first, second], [first + second, second, second], [prompt_of(19, seed=3)], [first, first + second]]
    with make_llm(head=HEAD, num_blocks=24, max_model_len=60) as llm:
        for prompts in turns:
            expected = [reference_generate(LLAMA, prompt, MAX_TOKENS) for prompt in prompts]
            assert answer(llm, prompts, GREEDY) == expected
        figures, stats = figures_of(llm), llm._client.stats()
    assert stats.prefix_cache_hits > 0
    assert figures.num_unseen == 0
    assert figures.num_caught_up < sum(len(prompt) for turn in turns for prompt in turn)
    seen.compare(HEAD)


def test_drafts_of_requests_that_part_at_the_end_of_a_block(seen: Seen) -> None:
    """One after the other: what follows the last token of a block that they share is not the same."""
    common = prompt_of(16)
    with make_llm(head=HEAD) as llm:
        for last in range(20, 28):
            prompt = [*common, last, *prompt_of(6, seed=last)]
            assert answer(llm, [prompt], GREEDY) == [reference_generate(LLAMA, prompt, MAX_TOKENS)]
        assert llm._client.stats().prefix_cache_hits
    seen.compare(HEAD)


def test_drafts_after_preemption(seen: Seen) -> None:
    """Each of the four needs seven of the 15 blocks."""
    prompts = [prompt_of(length) for length in (9, 10, 11, 12)]
    with make_llm(head=HEAD, num_blocks=16, max_model_len=28, enable_prefix_caching=False) as llm:
        assert answer(llm, prompts, GREEDY) == [reference_generate(LLAMA, prompt, MAX_TOKENS) for prompt in prompts]
        assert llm._client.stats().num_preemptions > 0
    seen.compare(HEAD)


class Pods:
    """Engines on one medium, which end sound."""

    def __init__(self, connector: str, path: Path) -> None:
        self._connector = connector
        self._path = path
        self._opened: list[InprocClient] = []

    def open(self, head: Path | None, *, setting: str = "speculative", **options: Any) -> InprocClient:
        of_head = {} if head is None else {setting: f"eagle3:model={head},depth=3"}
        self._opened.append(create_engine(LLAMA, self._path, connector_name=self._connector, **of_head, **options))
        return self._opened[-1]

    def close(self) -> None:
        for engine in self._opened:
            handoff_rig.check_integrity(engine)
            engine.close()


@pytest.fixture(params=["shared-storage", "nixl"])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pods]:
    opened = Pods(request.param, tmp_path / "kv")
    yield opened
    opened.close()


HANDED_OVER = [1, 16, 17, 37, 90]  # tokens; a block has 16, and a step of the producer 32
STARTS = [-(-length // handoff_rig.BLOCK_SIZE) * handoff_rig.BLOCK_SIZE for length in HANDED_OVER]


def hand_over(producer: InprocClient, consumer: InprocClient, lengths: Sequence[int] = HANDED_OVER) -> None:
    prompts = [prompt_of(length) for length in lengths]
    decoded = Handoffs(producer, consumer).run(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    assert [each.token_ids for each in decoded] == [reference_generate(LLAMA, each, 40) for each in prompts]
    assert {each.received.recompute_reason for each in decoded if each.received} == {""}


@pytest.mark.parametrize(
    ("executor", "device"),
    [
        ("inproc", "cpu"),
        pytest.param("multiproc", "cpu", marks=pytest.mark.matrix),
        pytest.param("inproc", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_features_travel_with_a_handoff(pods: Pods, seen: Seen, executor: str, device: str) -> None:
    """The head sees the prompt, also where blocks come from prefix caches of either side."""
    producer = pods.open(HEAD, setting="for_heads", executor=executor, device=device)
    consumer = pods.open(HEAD, device=device)
    for lengths in (HANDED_OVER, [17, 100], [90, 120]):
        hand_over(producer, consumer, lengths)
    assert consumer.stats().drafts.num_unseen == 0
    assert {start for *_, start in seen.drafts} == {0}
    seen.compare(HEAD)


@pytest.mark.parametrize("of_producer", [None, tiny_head_dir(LLAMA, seed=1), tiny_head_dir(LLAMA, has_embedding=False)])
def test_drafts_after_a_handoff_without_features(
    pods: Pods, seen: Seen, of_producer: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The producer has no head, or another, of the same size or not: the consumer's sees what is computed there."""
    consumer = pods.open(HEAD)
    hand_over(pods.open(of_producer, setting="for_heads"), consumer)
    assert {len(tokens) - start > 1 for tokens, _, start in seen.drafts} == {True}
    assert {start for *_, start in seen.drafts} <= {0, *STARTS}
    assert consumer.stats().drafts.num_unseen >= sum(HANDED_OVER[1:])
    assert caplog.text.count("the head does without") == 1
    seen.compare(HEAD)


def test_a_handoff_with_features_to_a_pod_without_a_head(pods: Pods) -> None:
    hand_over(pods.open(HEAD, setting="for_heads"), pods.open(None))


@pytest.mark.parametrize("num_producers", [1, 2])
def test_features_of_blocks_that_were_kept(num_producers: int, tmp_path: Path, seen: Seen) -> None:
    """By a tier, for this engine and others. What an engine without a head has kept has none."""
    pods, prompt = Pods("shared-storage", tmp_path / "kv"), prompt_of(90)
    expected = reference_generate(LLAMA, prompt, 20)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for head in [None, HEAD][-num_producers:]:
        assert handoff_rig.generate(pods.open(head, options={"offload": True}), [prompt], params) == [expected]
    last = pods.open(HEAD)
    assert handoff_rig.generate(last, [prompt], params) == [expected]
    assert last.stats().tier_hits == 80
    assert last.stats().drafts.num_unseen == (0 if num_producers == 1 else 80)
    pods.close()
    seen.compare(HEAD)


@pytest.mark.parametrize("speculative", [True, False])
def test_what_drafts_do_not_pay_for_is_kept_with_features(
    speculative: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps that ask nothing of the head, and requests that have turned it off, compute features all the same."""
    monkeypatch.setattr(scheduler, "DraftDepth", DraftDepth)
    monkeypatch.setattr(DraftDepth, "ask", lambda *_: NOTHING_ASKED)
    pods, prompt = Pods("shared-storage", tmp_path / "kv"), prompt_of(40)
    params = SamplingParams(temperature=0.0, max_tokens=60, speculative=speculative)
    first = pods.open(HEAD, options={"offload": True})
    (answer,) = handoff_rig.generate(first, [prompt], params)
    last = pods.open(HEAD, options={"offload": True})
    handoff_rig.generate(last, [[*prompt, *answer, 5]], SamplingParams(temperature=0.0, max_tokens=2))
    assert last.stats().tier_hits == 96
    assert last.stats().drafts.num_unseen == 0
    pods.close()


def test_a_reset_while_a_handoff_is_under_way_loses_nothing(tmp_path: Path) -> None:
    pods = Pods("nixl", tmp_path)
    producer, consumer = pods.open(HEAD, setting="for_heads"), pods.open(HEAD)
    handoffs = Handoffs(producer, consumer)
    request_id, prompt, params = RequestId("r"), prompt_of(90), SamplingParams(temperature=0.0, max_tokens=20)
    tell, handoffs._tell_consumer = handoffs._tell_consumer, lambda _: None
    handoffs.start_producer(request_id, prompt, params)
    handoffs.start_consumer(request_id)

    def is_written() -> bool:
        if consumer.has_work:
            handoffs.step_consumer()
        if producer.has_work:
            handoffs.step_producer()
        return handoffs.prefilled[request_id].is_over(len(prompt))

    asyncio.run(wait_for(is_written))
    consumer.reset_prefix_cache()
    other = RequestId("other")
    handoffs.decoded[other] = handoff_rig.Decoded()
    consumer.add_request(AddRequest(request_id=other, prompt_token_ids=prompt_of(5), sampling=params))
    while handoffs.decoded[other].finish_reason is None:
        handoffs.step_consumer()
    tell(request_id)
    handoffs.run_to_the_end()
    received = handoffs.decoded[request_id].received
    assert received is not None
    assert (received.num_tokens, received.recompute_reason) == (90, "")
    pods.close()


@pytest.mark.parametrize("kind", PARAMS)
def test_a_head_changes_no_token_however_they_are_drawn(kind: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    params = [SamplingParams(**{"seed": seed, "max_tokens": 20, **PARAMS[kind]}) for seed in range(len(prompts))]
    with make_llm() as llm:
        plain = answer(llm, prompts, params)
    with make_llm(head=HEAD) as llm:
        assert answer(llm, prompts, params) == plain
        assert figures_of(llm).num_verified > 0


def test_recorded_steps_give_features(seen: Seen) -> None:
    """The tiny models' heads are of a size that is not recorded on CPUs."""
    demo = demo_model_path()
    head = tiny_head_dir(demo, has_embedding=False)
    with LLM(num_threads=1, num_blocks=64) as llm:
        plain = [each.token_ids for each in llm.generate(TEXTS, GREEDY, use_tqdm=False)]
    with LLM(num_threads=1, num_blocks=64, speculative=f"eagle3:model={head}") as llm:
        assert [each.token_ids for each in llm.generate(TEXTS, GREEDY, use_tqdm=False)] == plain
        assert figures_of(llm).num_verified > 0
    seen.compare(head, target=demo)


def test_its_kv_and_features_count_as_memory() -> None:
    with make_llm() as llm:
        of_model = llm.spec.bytes_per_block  # of three layers
    with make_llm(head=HEAD) as llm:
        assert llm.spec.draft_bytes_per_block == 4 * 2 * NUM_KV_HEADS * HEAD_DIM * 4
        assert of_model // 3 > 4 * HIDDEN * 4 + TAG_BYTES
        assert llm.spec.bytes_per_block == of_model * 4 // 3
        in_all = llm.spec.bytes_per_block + llm.spec.draft_bytes_per_block
    with make_llm(head=HEAD, num_blocks=None, kv_cache_memory=33 * in_all - 1) as llm:
        assert llm.spec.num_blocks == 32


@pytest.mark.parametrize("what", ["a KV cache of 128 blocks", "a head's input for 128 blocks"])
def test_memory_that_does_not_fit_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = HostMemory.zeros

    def zeros(memory: HostMemory, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if (len(shape) == 3) == ("head" in what):  # [tokens, states, size]; a KV cache has more dimensions
            raise MemoryError
        return own(memory, shape, dtype)

    monkeypatch.setattr(HostMemory, "zeros", zeros)
    with pytest.raises(ConfigError, match=rf"^{what} takes 0\.0 GiB, more than is free on cpu$"):
        make_llm(head=HEAD)


@pytest.mark.matrix
@pytest.mark.cell(feature="an EAGLE-3 head", degrees="2")
def test_the_rank_that_answers_has_one() -> None:
    head = tiny_head_dir(demo_model_path())
    with open_llm() as llm:
        alone = generate(llm)
    with open_llm(speculative=f"eagle3:model={head}", tensor_parallel_size=2) as llm:
        assert_same(generate(llm), alone)
        assert figures_of(llm).num_verified > 0


FC = load_file(HEAD / "model.safetensors")["fc.weight"]


def changed_head(
    directory: Path, *, without: str = "", config: dict[str, object] | None = None, **weights: torch.Tensor
) -> Path:
    """HEAD with other weights and settings."""
    shutil.copytree(HEAD, directory)
    stored = load_file(HEAD / "model.safetensors")
    stored.pop(without, None)
    save_file(stored | weights, directory / "model.safetensors")
    own = json.loads((HEAD / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(own | (config or {})))
    return directory


def test_what_is_no_head_for_the_model_is_refused_before_that_is_loaded(tmp_path: Path) -> None:
    unloadable = tmp_path / "model"
    unloadable.mkdir()
    shutil.copy(LLAMA / "config.json", unloadable)
    larger, wider = tmp_path / "larger", tmp_path / "wider"
    random_model(tiny_config("LlamaConfig", vocab_size=300)).save_pretrained(larger)
    random_model(tiny_config("LlamaConfig", hidden_size=64)).save_pretrained(wider)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}
    for number, (head, problem) in enumerate(
        {
            LLAMA: "is no EAGLE-3 head with weights of its own: it has no fc",
            tiny_head_dir(larger): "is for a vocabulary of 300 tokens, and .* has one of 256",
            tiny_head_dir(wider): "is for a model of hidden size 64, and that of .* is 48",
            tmp_path / "nowhere": "does not exist",
            changed_head(tmp_path / "1", without="midlayer.hidden_norm.weight"): "lacks the weight midlayer",
            changed_head(tmp_path / "2", other=torch.ones(1)): "has a weight that is not known here, other",
            changed_head(tmp_path / "3", d2t=torch.full((100,), 200)): "proposes tokens outside the vocabulary",
            changed_head(tmp_path / "4", without="d2t"): "proposes 100 tokens of 256, and does not say which",
            changed_head(tmp_path / "5", config={"rope_scaling": {"rope_type": "dynamic"}}): "of type 'dynamic'",
            changed_head(tmp_path / "6", config={"eagle_config": layers}): "takes layers .*7.* and .* has 3",
            changed_head(tmp_path / "7", config={"intermediate_size": 7}): "is .*64.* and by the configuration .*7",
            changed_head(tmp_path / "8", config={"eagle_config": [1]}): "cannot be built: AttributeError",
            changed_head(tmp_path / "9", config={"rope_scaling": "yarn"}): "cannot be built: AttributeError",
            changed_head(tmp_path / "10", **{"fc.weight": torch.ones(5)}): "cannot be built: IndexError",
            changed_head(tmp_path / "11", t2d=torch.tensor(True)): "cannot be built: TypeError",
            changed_head(tmp_path / "12", **{"fc.weight": FC.to(torch.int8)}): "fc.weight has other values",
            changed_head(tmp_path / "13", **{"fc.weight": FC * torch.nan}): "fc.weight has other values",
            changed_head(tmp_path / "14", **{"embed_tokens.weight": torch.ones(9, 40)}): "embeddings of 9 tokens",
        }.items()
    ):
        with pytest.raises(ConfigError, match=f"^--speculative: eagle3:model: .*{problem}") as caught:
            LLM(unloadable, speculative=f"eagle3:model={head}")
        assert "\n" not in caught.value.message, number
        assert caught.value.param == "speculative"
    with pytest.raises(ConfigError, match=r"^--speculative: eagle3:model: .* does not say which its layers are"):
        LLM(tiny_model_dir("gpt2"), speculative=f"eagle3:model={HEAD}")
    with pytest.raises(ConfigError, match=r"^--speculative: eagle3: not for a model that is cut into stages"):
        LLM(LLAMA, speculative=f"eagle3:model={HEAD}", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="has no safetensors weights"):
        LLM(unloadable, speculative=f"eagle3:model={HEAD}")
