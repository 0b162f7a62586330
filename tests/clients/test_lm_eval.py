"""lm-eval gets the same answers to multiple-choice questions from Baton as from `transformers` in its own process."""

import json
from pathlib import Path

import pytest
import yaml

from tests.clients.page import between
from tools.demo_training.facts import COUNTRIES

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]  # environments may have to be built

NUM_QUESTIONS = 40
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def test_multiple_choice(client):
    lm_eval = client("lm-eval", "lm-eval", ["lm-eval", "transformers"])
    write_task(lm_eval.directory)
    task = ("--tasks", "capitals", "--include_path", ".", "--log_samples", "--output_path")
    local = f"pretrained={lm_eval.model},dtype=float32"
    lm_eval.run(
        "lm_eval",
        "--model",
        "hf",
        "--device",
        "cpu",
        "--model_args",
        local,
        *task,
        "local",
        **OFFLINE,
        OMP_NUM_THREADS="1",
    )
    served = f"model=baton-demo,base_url={lm_eval.url}/v1/completions,tokenizer={lm_eval.model},num_concurrent=4"
    lm_eval.run_and_tell(
        "lm_eval", "--model", "local-completions", "--model_args", served, *task, "served",
        excerpt=lambda output: f"{between(output, 'Metric', 'acc')}\n\n{compare(lm_eval.directory)}", env=OFFLINE,
    )  # fmt: skip


def compare(directory: Path) -> str:
    """Checks the answers that were served against those of `transformers`; returns a summary."""
    answers, expected = (log_likelihoods(directory / name) for name in ("served", "local"))
    assert len(answers) == NUM_QUESTIONS
    worst = 0.0
    for question, choices in expected.items():
        values, other_values = ([value for value, _ in each[question]] for each in (answers, expected))
        assert [is_greedy for _, is_greedy in answers[question]] == [is_greedy for _, is_greedy in choices]
        assert values.index(max(values)) == other_values.index(max(other_values))
        worst = max(worst, *(abs(value - other) for value, other in zip(values, other_values, strict=True)))
    assert worst < 1e-3
    return f"{len(answers)} questions: the answers of `--model hf`; log likelihoods differ by {worst:.0e} at most."


def write_task(directory: Path) -> None:
    """Questions about capitals, each with four choices."""
    known = [country for country in COUNTRIES if country.capital]
    rows = []
    for number, country in enumerate(known[:NUM_QUESTIONS]):
        others = [known[(number + step) % len(known)].capital for step in (7, 11, 13)]
        place = number % 4
        choices = [f" {capital}." for capital in (*others[:place], country.capital, *others[place:])]
        rows.append({"question": f"The capital of {country.name} is", "choices": choices, "answer": place})
    (directory / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "capitals.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (directory / "capitals.yaml").write_text(yaml.safe_dump(task))


def log_likelihoods(directory: Path) -> dict[str, list[tuple[float, bool]]]:
    """Log likelihood of each choice, and whether it is what the model would say; by question."""
    (path,) = directory.rglob("samples_capitals_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        sample["doc"]["question"]: [(float(value), is_greedy == "True") for ((value, is_greedy),) in sample["resps"]]
        for sample in samples
    }
