"""The offline LLM and the router spell the same tokens alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.demo_model import demo_model_path
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.llm import LLM, Completion
from common.tokenization import Tokenizer
from common.types import FinishReason, SamplingParams
from router.dispatching.text_generation import TextGeneration
from router.dispatching.token_log import OutputDelta

VOCAB_SIZE = 2048  # of the demo model, whose tokenizer is used
NUM_TOKENS = 40
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Hello"}]


class Pods:
    """A generation whose pods bring these tokens, three at a time, until the text is stopped."""

    def __init__(self, request: SimpleNamespace, token_ids: list[int], reason: FinishReason) -> None:
        self.request = request
        self._deltas = [
            OutputDelta(at, token_ids[at : at + 3], [], reason if at + 3 >= len(token_ids) else None)
            for at in range(0, len(token_ids), 3)
        ]
        self._is_stopped = False

    async def __anext__(self) -> OutputDelta:
        if self._is_stopped or not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    def finish(self, _: FinishReason) -> None:
        self._is_stopped = True


async def routed(
    tokenizer: Tokenizer, completion: Completion, sampling: SamplingParams, stops: list[str], is_chat: bool
) -> tuple[str, list[int], FinishReason | None]:
    """Text, token ids and finish reason as a client of the router would get them."""
    tokens = expected_tokens(completion.prompt_token_ids, NUM_TOKENS, vocab_size=VOCAB_SIZE)
    ends = [index for index, token in enumerate(tokens, 1) if token in sampling.stop_token_ids]
    ends = [index for index in ends if index > sampling.min_tokens]
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    request = SimpleNamespace(
        prompt_token_ids=completion.prompt_token_ids, continues_prompt=not is_chat, has_no_output=False,
        spelled_ids=frozenset(), stops=tuple(stops), sampling=sampling, resumption=None, trace=None,
    )  # fmt: skip
    generation = TextGeneration(Pods(request, tokens[: ends[0]] if ends else tokens, reason), tokenizer)  # type: ignore[arg-type]
    deltas = [delta async for delta in generation]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return "".join(delta.text for delta in deltas), token_ids, deltas[-1].finish_reason


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("min_tokens", [0, 12])
@pytest.mark.parametrize("end", ["length", "stop string", "stop token", "both"])
async def test_the_same_tokens_are_the_same_text(end: str, min_tokens: int, is_chat: bool) -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    with LLM(executor=FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE, max_model_len=512), block_size=4) as llm:

        def answer(sampling: SamplingParams, stops: list[str]) -> Completion:
            if is_chat:
                return llm.chat(MESSAGES, sampling, stop=stops, use_tqdm=False)[0]
            return llm.generate(PROMPT, sampling, stop=stops, use_tqdm=False)[0]

        whole = answer(SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS), [])
        stops = [whole.text[8:11], whole.text[-9:-5]] if end in ("stop string", "both") else []
        stop_token_ids = [whole.token_ids[6], whole.token_ids[30]] if end in ("stop token", "both") else []
        sampling = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=min_tokens, stop_token_ids=stop_token_ids
        )
        offline = answer(sampling, stops)
    text, token_ids, reason = await routed(tokenizer, offline, sampling, stops, is_chat)
    assert (offline.text, offline.token_ids, offline.finish_reason) == (text, token_ids, reason)
    assert (offline.text == whole.text) == (end == "length")
