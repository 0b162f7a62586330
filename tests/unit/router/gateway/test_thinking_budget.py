"""What becomes of `thinking_token_budget`: tokens for the pods, or a refusal that says what is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from common.errors import InvalidRequestError
from common.tokenization import Tokenizer
from common.tokenization.chat import ChatTemplate
from common.types import Constraint, SamplingParams
from router.gateway.anthropic.bodies import parse_messages
from router.replies.reply import ReplyOptions, ReplyParsing
from router.requests.request import ChatPrompt, Draft, GenerationRequest, TextPrompt
from router.requests.terms import Terms

OPENING, CLOSING = 256, 257
QWEN, DEEPSEEK = "</think>", "<\uff5cAssistant\uff5c></think>"  # what of the templates tells the families
PARAM = "thinking_token_budget"


def tokenizer_of(template: str, tags: tuple[str, ...] = ("<think>", "</think>")) -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(list(tags))
    return Tokenizer(backend, chat_template=ChatTemplate(template, {}))


async def sampling_of(
    template: str,
    prompt: str,
    *,
    is_chat: bool = True,
    tags: tuple[str, ...] = ("<think>", "</think>"),
    reasoning_parser: str = "auto",
    **given: Any,
) -> SamplingParams:
    """What the pods get for a prompt that is rendered so."""
    tokenizer = tokenizer_of(template, tags)

    async def prepare(draft: Draft) -> GenerationRequest:
        return GenerationRequest(
            request_id="a", model_id=0, prompt_token_ids=tokenizer.encode(prompt), block_hashes=b"",
            sampling=SamplingParams(**draft.sampling), stops=(), cache_salt="", priority=0,
            kv_failure_policy="recompute", terms=Terms(), continues_prompt=False, arrived_at=0.0, deadline=1.0,
        )  # fmt: skip

    draft = Draft(
        request_id="a", model=None, prompt=ChatPrompt([], 0) if is_chat else TextPrompt(prompt), prompt_param="prompt",
        sampling=given, max_tokens=None, default_max_tokens=None, seed=None, arrived_at=0.0,
    )  # fmt: skip
    parsing = ReplyParsing(tokenizer, tool_parser="none", reasoning_parser=reasoning_parser)
    return (await parsing.prepare(draft, ReplyOptions(), prepare)).sampling


@pytest.mark.parametrize(
    ("template", "prompt", "is_chat", "start", "end"),
    [
        (QWEN, "<|im_start|>assistant\n", True, (OPENING,), (CLOSING,)),
        (QWEN, "assistant\n<think>\n", True, (), (CLOSING,)),
        (QWEN, "assistant\n<think>\n\n</think>\n\n", True, (), ()),  # reasoning is turned off
        (DEEPSEEK, "<\uff5cAssistant\uff5c>", True, (), (CLOSING,)),
        (DEEPSEEK, "Once upon a time", False, (OPENING,), (CLOSING,)),
        (DEEPSEEK, "<think>", False, (), (CLOSING,)),
    ],
)
async def test_pods_get_the_tokens(
    template: str, prompt: str, is_chat: bool, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    sampling = await sampling_of(template, prompt, is_chat=is_chat, thinking_token_budget=7)
    assert (sampling.thinking_start_token_ids, sampling.thinking_end_token_ids) == (start, end)
    assert sampling.thinking_token_budget == (7 if end else None)


async def test_pods_get_the_tokens_of_a_message() -> None:
    tags = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    template = "<|start|>assistant<|channel|>analysis<|message|>"
    sampling = await sampling_of(template, "<|start|>assistant", tags=tags, thinking_token_budget=7)
    encoded = tokenizer_of(template, tags).encode("<|channel|>analysis<|message|>")
    assert sampling.thinking_start_token_ids == tuple(encoded)
    assert sampling.thinking_end_token_ids == (tokenizer_of(template, tags).encode("<|end|>")[0],)


@pytest.mark.parametrize(
    "given", [{}, {PARAM: -1}, {PARAM: 7, "structured_outputs": Constraint.regex("a")}], ids=["no", "-1", "constrained"]
)
async def test_pods_get_none_where_nothing_is_bounded(given: dict[str, Any]) -> None:
    sampling = await sampling_of(QWEN, "<think>", **given)
    assert (sampling.thinking_token_budget, sampling.thinking_end_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("template", "options", "problem"),
    [
        ("plain", {}, "no reasoning that the router knows"),
        (QWEN, {"reasoning_parser": "none"}, "--reasoning-parser is none"),
        (QWEN, {"tags": ("<think>",)}, "no token </think>"),
        (QWEN, {"tags": ()}, "no token <think>"),
    ],
)
async def test_what_is_missing_is_named(template: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        await sampling_of(template, "a", thinking_token_budget=0, **options)
    assert caught.value.param == PARAM


@pytest.mark.parametrize(
    ("thinking", "budget", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 49}, 49, {"enable_thinking": True}),
        ({"type": "enabled"}, None, {"enable_thinking": True}),
        ({"type": "adaptive"}, None, {"enable_thinking": True}),
        ({"type": "disabled"}, None, {"enable_thinking": False}),
    ],
)
def test_the_budget_of_a_message_is_that_of_a_chat(
    thinking: dict[str, Any], budget: int | None, variables: dict[str, Any]
) -> None:
    asked = {"max_tokens": 50, "messages": [{"role": "user", "content": "a"}], "thinking": thinking}
    (draft,) = parse_messages(json.dumps(asked).encode()).drafts("a", 0.0, Terms())
    assert draft.sampling.get(PARAM) == budget
    assert isinstance(draft.prompt, ChatPrompt)
    assert draft.prompt.template_variables == variables
