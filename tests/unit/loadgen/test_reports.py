"""Reports: text is never markup, nothing is loaded, and the table has what users of vLLM look for."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from loadgen import page
from loadgen.compare import differences
from loadgen.figures import summarise
from loadgen.load import Run
from loadgen.samples import Failure, Sample
from loadgen.slo import parse_slo
from loadgen.sweep import Found, Try
from loadgen.table import as_table
from loadgen.workload import LoadOptions

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> \" ' &"
SLO = parse_slo(["ttft:500"])
OPTIONS = LoadOptions(request_rate="2", max_concurrency=8)


def a_run(slower: float = 1.0) -> Run:
    good = [
        Sample(float(n), n + 0.02, [n + 0.1 * slower, n + 0.2 * slower, n + 0.3 * slower], 10, 3, has_usage=n > 0)
        for n in range(5)
    ]
    return Run([*good, Sample(9.0, 9.0, failure=Failure(HOSTILE, HOSTILE))], 0.0, 10.0, 9.5)


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_pages_load_nothing_and_hostile_text_is_no_markup() -> None:
    run, settings = a_run(), {"model": HOSTILE, HOSTILE: 3}
    figures = summarise(run, SLO)
    found = differences([figures] * 6, [summarise(a_run(1.5), SLO)] * 6)
    pages = [
        page.run_page(run, figures, SLO, OPTIONS, settings),
        page.sweep_page(Found(2.0, 2.1, [Try(2.0, 1.0, True), Try(2.1, 0.5, False)]), 0.99, settings),
        page.compare_page(found, [run], [a_run(1.5)], settings),
    ]
    for text in pages:
        elements = Elements(text)
        assert "svg" in elements.tags
        assert not {"script", "img", "link", "iframe", "object"} & set(elements.tags)
        assert not [name for name, _ in elements.attributes if name.startswith("on") or name in ("src", "href")]
        assert "http://" not in text
        assert "https://" not in text
        assert "prefers-color-scheme: dark" in text
        assert "&lt;script&gt;" in text
    assert "nan" not in "".join(pages)


def test_an_empty_run_has_a_report() -> None:
    run = Run([Sample(None, failure=Failure("connect", "refused"))], 0.0, 1.0, 0.0)
    assert "<svg" in page.run_page(run, summarise(run, SLO), SLO, OPTIONS, {})


def test_the_table_has_the_lines_of_vllm_and_what_limits_them() -> None:
    text = as_table(summarise(a_run(), SLO), SLO, OPTIONS)
    lines = dict(re.findall(r"^([^:\n]+):\s+([\d.]+)$", text, re.MULTILINE))
    assert lines["Successful requests"] == "5"
    assert lines["Failed requests"] == "1"
    assert lines["Maximum request concurrency"] == "8"
    assert lines["Request rate configured (RPS)"] == "2.00"
    assert lines["Total generated tokens"] == "15"
    assert lines["Output token throughput (tok/s)"] == "1.50"
    assert lines["Median TTFT (ms)"] == "80.00"
    assert lines["P99 ITL (ms)"] == "100.00"
    assert lines["Mean TPOT (ms)"] == "100.00"
    assert lines["Median E2EL (ms)"] == "280.00"
    assert lines["Median delay (ms)"] == "20.00"
    assert "note: the load generator was busy for 95% of the time" in text
    assert "note: 1 answers came without usage" in text
    assert "note: requests were sent late" in text
    assert "Drafts" not in text


def test_the_table_has_acceptance_where_there_were_drafts() -> None:
    run = a_run()
    run.samples[0].num_accepted_drafts, run.samples[0].num_rejected_drafts = 5, 3
    lines = dict(re.findall(r"^([^:\n]+):\s+([\d.]+)$", as_table(summarise(run, SLO), SLO, OPTIONS), re.MULTILINE))
    assert lines["Drafts that were right (%)"] == "62.5"
    assert lines["Output tokens per step of a request"] == "1.50"


def test_a_difference_beyond_noise_is_named_and_another_is_not() -> None:
    slow = [summarise(a_run(1.5 + number / 100), SLO) for number in range(6)]
    fast = [summarise(a_run(1.0 + number / 100), SLO) for number in range(6)]
    verdicts = {each.name: each.verdict for each in differences(fast, slow)}
    assert verdicts["Median TTFT (ms)"] == "B is higher"
    assert verdicts["Output token throughput (tok/s)"] == "within noise"
    assert {each.verdict for each in differences(fast, fast)} == {"within noise"}
