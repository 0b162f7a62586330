"""Train the demo model on the CPU, or measure what it knows.

    python -m tools.demo_training.train --out TALKS  # from scratch: tokenizer, config and weights
    python -m tools.demo_training.train --stage tools --start TALKS --out CALLS
    python -m tools.demo_training.train --stage drills --start CALLS --out DRILLED
    python -m tools.demo_training.train --stage names --start DRILLED --out READS
    python -m tools.demo_training.train --stage review --start READS --out DIR
    python -m tools.demo_training.train --evaluate DIR  # a table of accuracies

The shipped model went through the five stages, each of which takes ten to twenty-five minutes on two idle cores.
With --threads 1 a busy machine trains faster. The same seed gives the same weights on the same machine.
"""

# ruff: noqa: T201 - its output is what it prints

import argparse
import copy
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

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

from tools.demo_training.corpus import END_OF_TEXT, MESSAGE_END, SPECIAL_TOKENS, Corpus
from tools.demo_training.facts import all_facts
from tools.demo_training.tool_chats import PLAIN_MIX, Document, Mix, Part, ToolCorpus

VOCAB_SIZE = 2048
MAX_POSITION_EMBEDDINGS = 4096
TOKENS_PER_STEP = 2048
SHORT, MEDIUM, LONG, FULL = 256, 512, 1024, MAX_POSITION_EMBEDDINGS  # tokens in a row
LATER_ROW_LENGTHS = [MEDIUM, LONG] * 5 + [MEDIUM, FULL]
WARM_UP_STEPS = 100
STEPS_PER_SAVE = 250
NOT_LEARNED = -100  # the target that cross_entropy ignores

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


def plain_documents(seed: int) -> Iterator[Document]:
    """Documents of the first stage, every token of which is learned."""
    return ([Part(text, is_learned=True)] for text in Corpus(seed).documents())


def mixed_documents(seed: int, tools_share: float, mix: Mix = PLAIN_MIX) -> Iterator[Document]:
    """Documents of the later stages: tools and JSON, and what was learned before."""
    rng = random.Random(seed)
    plain, tools = plain_documents(seed + 1), ToolCorpus(seed + 2, mix).documents()
    while True:
        yield next(tools) if rng.random() < tools_share else next(plain)


class Batch(NamedTuple):
    """Rows of a step and what is learned of them: [rows, tokens] both."""

    inputs: torch.Tensor
    targets: torch.Tensor  # the next token of each, or NOT_LEARNED


def packed_rows(
    tokenizer: PreTrainedTokenizerBase, documents: Iterator[Document], row_lengths: Sequence[int]
) -> Iterator[Batch]:
    """Batches of rows of documents; each row begins with the start of a document."""

    def row(length: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        learned: list[int] = []
        while len(tokens) < length:
            for part in next(documents):
                ids = tokenizer.encode(part.text)
                tokens += ids
                learned += ids if part.is_learned else [NOT_LEARNED] * len(ids)
        return tokens[:length], learned[:length]

    for length in cycle(row_lengths):
        rows = torch.tensor([row(length + 1) for _ in range(max(1, TOKENS_PER_STEP // length))])
        yield Batch(rows[:, 0, :-1], rows[:, 1, 1:])


class Stage(NamedTuple):
    """One of the stages of training."""

    documents: Iterator[Document]
    row_lengths: list[int]  # of one step after another
    peak_learning_rate: float
    steps: int  # of about TOKENS_PER_STEP tokens


def talk_stage(seed: int) -> Stage:
    """From scratch: facts, arithmetic, stories and chats."""
    row_lengths = [SHORT, SHORT, SHORT, LONG] * 3 + [SHORT, SHORT, SHORT, FULL]
    return Stage(plain_documents(seed + 1), row_lengths, 2.5e-3, steps=2000)


def tools_stage(seed: int) -> Stage:
    """Tools and JSON, too, in rows that are long enough for them."""
    return Stage(mixed_documents(seed + 2, tools_share=0.5), LATER_ROW_LENGTHS, 1.5e-3, steps=1600)


def drills_stage(seed: int) -> Stage:
    """Drills for calls, and more of what the first stage taught, some of which the second makes a model forget."""
    return Stage(mixed_documents(seed + 5, tools_share=0.4, mix=Mix(drills=11)), LATER_ROW_LENGTHS, 1.2e-3, steps=1000)


def names_stage(seed: int) -> Stage:
    """Tools whose names cannot be guessed, so that they have to be read in their definitions."""
    mix = Mix(drills=10, repetitions=8, strange_names=0.5)
    return Stage(mixed_documents(seed + 8, tools_share=0.5, mix=mix), LATER_ROW_LENGTHS, 1.5e-3, steps=900)


def review_stage(seed: int) -> Stage:
    """All of it."""
    mix = Mix(drills=8, repetitions=2, strange_names=0.25)
    return Stage(mixed_documents(seed + 11, tools_share=0.4, mix=mix), LATER_ROW_LENGTHS, 1.2e-3, steps=1200)


STAGES = {
    "talk": talk_stage,
    "tools": tools_stage,
    "drills": drills_stage,
    "names": names_stage,
    "review": review_stage,
}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return peak * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))


def untrained(seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """A model to begin with, and its tokenizer."""
    tokenizer = train_tokenizer(seed)
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    return model, tokenizer


def trained(start: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """The model in `start` and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(start)


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, stage: Stage, out: Path, steps: int | None
) -> None:
    """Train for `steps` steps, else for those of the stage; save the model in `out` now and then and at the end."""
    steps = steps or stage.steps
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    model.train()
    started = time.monotonic()
    batches = packed_rows(tokenizer, stage.documents, stage.row_lengths)
    for step, batch in zip(range(steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, stage.peak_learning_rate)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch.inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NOT_LEARNED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:6.0f} s", flush=True)
        if (step + 1) % STEPS_PER_SAVE == 0 or step == steps - 1:
            save(copy.deepcopy(model), tokenizer, out)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Save what `from_pretrained` needs. Weights are stored in bfloat16, but computed with in float32: answers of the
    demo do not depend on whether a processor multiplies bfloat16."""
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (MESSAGE_END, END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    model.to(torch.bfloat16).eval().save_pretrained(out)
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)
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
    evaluate_tools(greedy)
    for prompt in ("The capital of France is", "Once upon a time"):
        print(f"\n> {prompt}\n{greedy.complete(prompt, 128)}")
    for question in (
        "What is the capital of Italy?",
        "Who are you?",
        "Say hello in Japanese",
        "Tell me a story about a fox.",
    ):
        print(f"\n> {question}\n{greedy.answer(question, 256)}")


def evaluate_tools(greedy: Greedy, num_documents: int = 300) -> None:
    """Print how many parts of chats with tools and of JSON the model writes as the corpus does."""
    right: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for document in islice(ToolCorpus(seed=-1).documents(), num_documents):
        for index, part in enumerate(document[:-1]):
            if part.is_learned:
                before = "".join(earlier.text for earlier in document[:index])
                kind = _kind_of(before, part.text)
                parts[kind] += 1
                right[kind] += greedy.complete(before, 160) == part.text.rstrip("\n")
    print()
    for kind, count in parts.items():
        print(f"{kind:22} {count:5} {right[kind] / count:11.0%}")


def _kind_of(prompt: str, expected: str) -> str:
    if expected.startswith("<tool_call>"):
        return "call"
    if "<tools>" not in prompt:
        return "JSON" if prompt.endswith("assistant\n") else "forced JSON"
    if not prompt.endswith("assistant\n"):
        return "forced call"
    return "answer to a result" if prompt.rpartition("<|im_start|>tool")[2].count("<|im_start|>") == 1 else "no call"


def main() -> None:
    """The command line."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="train, and save the model in this directory")
    action.add_argument("--evaluate", type=Path, metavar="DIR", help="measure the model in this directory")
    parser.add_argument("--stage", choices=list(STAGES), default="talk")
    parser.add_argument("--start", type=Path, metavar="DIR", help="go on with the model in this directory")
    parser.add_argument("--steps", type=int, help="training steps of about 2048 tokens instead of the stage's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.evaluate:
        torch.set_num_threads(1)  # one short sequence at a time gains nothing from more
        evaluate(arguments.evaluate)
    else:
        torch.set_num_threads(arguments.threads)
        torch.manual_seed(arguments.seed)
        model, tokenizer = trained(arguments.start) if arguments.start else untrained(arguments.seed)
        train(model, tokenizer, STAGES[arguments.stage](arguments.seed), arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
