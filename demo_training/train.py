"""Train the demo model from scratch on the CPU, or measure what it knows.

    python -m demo_training.train --out DIR         # tokenizer, config and weights
    python -m demo_training.train --evaluate DIR    # a table of accuracies

Training takes fifteen to twenty-five minutes on two cores. The same seed gives the same weights on the
same machine.
"""

# ruff: noqa: T201 - its output is what it prints

import argparse
import copy
import math
import random
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from demo_training.corpus import END_OF_TEXT, MESSAGE_END, SPECIAL_TOKENS, Corpus
from demo_training.facts import all_facts

VOCAB_SIZE = 2048
MAX_POSITION_EMBEDDINGS = 4096
TOKENS_PER_STEP = 2048
SHORT, LONG, FULL = 256, 1024, MAX_POSITION_EMBEDDINGS  # tokens in a row
ROW_LENGTHS = [SHORT, SHORT, SHORT, LONG] * 3 + [SHORT, SHORT, SHORT, FULL]  # of one step after another
PEAK_LEARNING_RATE = 2.5e-3
WARM_UP_STEPS = 100
STEPS_PER_SAVE = 250

# Words keep their leading space, and digits stand alone.
WORDS = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = r"""{%- for message in messages %}
{%- if loop.first and tools %}
{{- '<|im_start|>system\n' + (message['content'] + '\n\n' if message['role'] == 'system' else '') }}
{{- 'You may call these functions:\n<tools>\n' }}
{%- for tool in tools %}
{{- tool['function'] | tojson + '\n' }}
{%- endfor %}
{{- '</tools>\nCall one as:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- if not (loop.first and tools and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; its merges come from ASCII text alone.

    So any text round trips, and each character beyond ASCII spans several tokens: streaming an answer with
    accents, CJK or emoji exercises incremental detokenization.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document for document in Corpus(seed).take(40_000) if document.isascii())
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION_EMBEDDINGS,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """An untrained model of 3.7 million parameters."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(MESSAGE_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def packed_rows(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[torch.Tensor]:
    """Batches of rows of documents, [rows, tokens + 1]; each row begins with the start of a document."""
    documents = Corpus(seed).documents()

    def row(length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += tokenizer.encode(next(documents))
        return tokens[:length]

    for length in cycle(ROW_LENGTHS):
        yield torch.tensor([row(length + 1) for _ in range(max(1, TOKENS_PER_STEP // length))])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return PEAK_LEARNING_RATE * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(out: Path, steps: int, seed: int) -> None:
    """Train for `steps` steps and save the tokenizer, the config and bfloat16 weights in `out`."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed)
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    model.train()
    started = time.monotonic()
    for step, batch in zip(range(steps), packed_rows(tokenizer, seed + 1), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:6.0f} s", flush=True)
        if (step + 1) % STEPS_PER_SAVE == 0 or step == steps - 1:
            save(copy.deepcopy(model), tokenizer, out)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Save what `from_pretrained` needs, with the weights in bfloat16."""
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (MESSAGE_END, END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    model.to(torch.bfloat16).eval().save_pretrained(out)
    tokenizer.save_pretrained(out)


class Greedy:
    """Greedy generation in float32, one prompt at a time."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model = model.eval()

    def complete(self, prompt: str, max_new_tokens: int = 64) -> str:
        """What the model writes after `prompt`, with its end token if it wrote one."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))

    def answer(self, question: str, max_new_tokens: int = 64) -> str:
        """The model's answer to a chat of one question."""
        messages = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.complete(prompt, max_new_tokens)


def evaluate(directory: Path, facts_per_topic: int = 120) -> None:
    """Print how many facts of each topic the model completes and answers right."""
    greedy = Greedy(directory)
    rng = random.Random(0)
    print(f"{'topic':22} {'facts':>5} {'completion':>11} {'chat':>6}")
    for topic, facts in all_facts().items():
        sample = rng.sample(facts, min(len(facts), facts_per_topic))
        completed = sum(greedy.complete(fact.stem, 32).startswith(f" {fact.ending}") for fact in sample)
        answered = sum(greedy.answer(fact.questions[0]) == f"{fact.statement}{MESSAGE_END}" for fact in sample)
        print(f"{topic:22} {len(sample):5} {completed / len(sample):11.0%} {answered / len(sample):6.0%}")
    for prompt in ("The capital of France is", "Once upon a time"):
        print(f"\n> {prompt}\n{greedy.complete(prompt, 128)}")
    for question in (
        "What is the capital of Italy?",
        "Who are you?",
        "Say hello in Japanese",
        "Tell me a story about a fox.",
    ):
        print(f"\n> {question}\n{greedy.answer(question, 256)}")


def main() -> None:
    """The command line."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="train, and save the model in this directory")
    action.add_argument("--evaluate", type=Path, metavar="DIR", help="measure the model in this directory")
    parser.add_argument("--steps", type=int, default=2000, help="training steps of about 2048 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.evaluate:
        torch.set_num_threads(1)  # one short sequence at a time gains nothing from more
        evaluate(arguments.evaluate)
    else:
        torch.set_num_threads(arguments.threads)
        train(arguments.out, arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
