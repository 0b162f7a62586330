"""`baton bench` and `baton run-batch` against a cluster of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cli.main import main
from tests.e2e.cluster import ROOT, Cluster
from tests.tls_front import create_authority, tls_front

WEIGHTS = ROOT / "common" / "demo_model" / "weights"
SMALL = ["--input-len", "24", "--output-len", "6", "--ignore-eos"]
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def url(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BATON_URL", cluster.url)
    return cluster.url


@pytest.mark.parametrize(("api", "around"), [("completions", 0), ("chat", 8)])
def test_serve_counts_what_was_sent(api: str, around: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, report = tmp_path / "r.json", tmp_path / "r.html"
    argv = ["bench", "serve", "--api", api, "--tokenizer", str(WEIGHTS), "--num-prompts", "6", "--request-rate", "50"]
    assert main([*argv, *SMALL, "--goodput", "e2el:60000", "--json", str(results), "--html", str(report)]) == 0
    found = json.loads(results.read_text())
    assert (found["completed"], found["failed"], found["slo_attainment"]) == (6, 0, 1.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * (24 + around), 36)
    assert [request["output_tokens"] for request in found["requests"]] == [6] * 6
    for request in found["requests"]:
        assert request["sent"] >= request["due"] - 0.001
        assert request["ttft_ms"] > 0
    assert (found["settings"]["model"], found["settings"]["url"]) == ("baton-demo", os.environ["BATON_URL"])
    assert 0 < found["median_ttft_ms"] < found["median_e2el_ms"] < found["duration"] * 1e3
    assert re.search(r"Successful requests: +6\n", capsys.readouterr().out)
    assert report.read_text().count("<svg") == 7


def test_conversations_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "serve", "--api", "chat", "--dataset-name", "multi-turn", "--turns", "2", "--num-prompts", "4"]
    assert main([*argv, *SMALL]) == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "' + "word " * 9000 + '"}\n')
    argv = ["bench", "serve", "--dataset-name", "file", "--dataset-path", str(prompts), "--output-len", "4"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert re.search(r"status 400: +1\n", out)
    assert "note: status 400, first of 1:" in out


def test_sweep_says_if_no_rate_keeps_the_slos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "r.json"
    argv = ["bench", "sweep", *SMALL, "--goodput", "ttft:0.001", "--try-s", "0.001", "--start-rate", "20000"]
    assert main([*argv, "--json", str(results)]) == 1
    found = json.loads(results.read_text())
    assert (found["highest_rate"], [each["rate"] for each in found["tries"]]) == (None, [20000])
    assert "no rate keeps the SLOs" in capsys.readouterr().out


def test_compare_takes_turns(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, report = tmp_path / "r.json", tmp_path / "r.html"
    argv = ["bench", "compare", "--url-b", url, *SMALL, "--num-prompts", "2", "--json", str(results)]
    assert main([*argv, "--html", str(report)]) == 0
    found = json.loads(results.read_text())
    assert {side: len(runs) for side, runs in found["runs"].items()} == {"A": 6, "B": 6}
    assert len(found["differences"]) == 6
    assert "exact rank-sum test over runs" in capsys.readouterr().out


def test_tls_is_verified(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = create_authority(tmp_path / "authority")
    with tls_front(authority, int(url.rpartition(":")[2])) as port:
        argv = ["bench", "serve", "--url", f"https://localhost:{port}", "--num-prompts", "2", *SMALL]
        assert main([*argv, "--tls-ca", str(authority.ca_file)]) == 0
        assert main(argv) == 3
    assert "--tls-ca names the authority to trust" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--url", "http://127.0.0.1:1"], 3, "cannot connect to 127.0.0.1:1: Connection refused"),
        (["--url", "nonsense"], 2, "--url: expected http://host:port"),
        (["--model", "nope"], 1, "the first request failed (status 404)"),
        (["--request-rate", "0"], 2, "--request-rate: must be a number above 0, or inf, got '0'"),
        (["--dataset-name", "trace"], 2, "--dataset-path: required with --dataset-name file or trace"),
        (["--extra-body", "[]"], 2, "--extra-body: expected a JSON object"),
        (["--html", "/dev/null/x"], 2, "--html: cannot write /dev/null/x"),
        (["--goodput", "ttft"], 2, "--goodput: expected NAME:MILLISECONDS"),
        (["--tokenizer", "/dev"], 2, "--tokenizer: /dev has no tokenizer.json"),
    ],
)
def test_what_cannot_be_measured_is_named(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--num-prompts", "1", *argv]) == code
    assert message in capsys.readouterr().err


def batch_line(number: int, max_tokens: int) -> str:
    body = {"model": "baton-demo", "prompt": f"Number {number}", "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def test_a_batch_that_is_interrupted_goes_on(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(batch_line(number, 2 if number < 3 else 3000) for number in range(6)))
    argv = ["run-batch", "-i", str(source), "-o", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *argv, "--max-concurrency", "2"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and (not output.exists() or output.read_text().count("\n") < 3):
        httpx.get(f"{url}/livez", timeout=DEADLINE_S)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert "interrupted at 3 of 6 answers; the same command continues" in stderr
    # What was left would take long; the end of the input is made short instead.
    source.write_text("".join(batch_line(number, 2 if number < 3 else 4) for number in range(6)))
    done = output.read_text()
    assert main(argv) == 0
    assert capsys.readouterr().out == "6 requests: 6 answered, 0 with an error; 3 of them in earlier runs\n"
    assert output.read_text().startswith(done)
    answers = {line["custom_id"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert sorted(answers) == [f"{number}" for number in range(6)]
    assert {number: answers[number]["response"]["body"]["usage"]["completion_tokens"] for number in "05"} == {
        "0": 2,
        "5": 4,
    }
    assert main(argv) == 0
    assert output.read_text().count("\n") == 6


def test_files_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(batch_line(1, 1))
    assert main(["run-batch", "-i", str(source), "-o", str(source)]) == 2
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 2
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [re.sub(r"/\S+", "...", error) for error in errors] == [
        "baton: error: --output-file: is the input file",
        "baton: error: --input-file: ... is no file",
        "baton: error: --output-file: cannot open ... Is a directory",
    ]
