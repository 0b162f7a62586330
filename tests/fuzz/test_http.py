"""Whatever comes over HTTP: a true answer or an error that names the fault, in time, and nothing is left of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.security.config import SecurityConfig
from tests.fuzz.host import Host, profile, sizes
from tests.fuzz.http_strategies import Call, calls, cut_into_pieces, mutated, streams
from tests.fuzz.raw_http import RawAnswer, exchange, leave
from tests.fuzz.router_host import budget, check_quiet, key_file, router_host
from tests.unit.router.router_cluster import RouterCluster

_SERVER_ERRORS = {503, 504}  # no pod for it, or not in the time that it has named
_LIMIT_HEADERS = {"x-request-timeout-ms", "x-slo-ttft-ms", "x-slo-itl-ms"}


@pytest.fixture(scope="module", params=[False, True], ids=["open", "keys"])
def host(request, tmp_path_factory) -> Iterator[Host[RouterCluster]]:
    with router_host(security=key_file(tmp_path_factory.mktemp("keys")) if request.param else SecurityConfig()) as host:
        yield host


@sizes(20, 4_000)
def test_any_request_is_answered(host, num_examples):
    @profile(num_examples)
    @given(calls, st.data())
    def holds(call: Call, data: st.DataObject) -> None:
        pieces = data.draw(cut_into_pieces(call.encode()))
        with budget(host):
            answer = host.run(exchange(host.value.router.port, pieces))
        assert answer is not None
        check_answer(answer)

    holds()
    check_quiet(host)


@sizes(20, 4_000)
def test_any_bytes_are_answered_or_refused(host, num_examples):
    @profile(num_examples)
    @given(mutated(), st.data())
    def holds(sent: bytes, data: st.DataObject) -> None:
        pieces = data.draw(cut_into_pieces(sent))
        with budget(host):
            answer = host.run(exchange(host.value.router.port, pieces))
        if answer is not None:
            check_answer(answer)

    holds()
    check_quiet(host)


@sizes(25, 4_000)
def test_clients_that_go_away_leave_nothing_behind(host, num_examples):
    @profile(num_examples)
    @given(calls | streams(), st.data())
    def holds(call: Call, data: st.DataObject) -> None:
        sent = call.encode()
        sent = sent[: data.draw(st.integers(0, len(sent)))] if data.draw(st.booleans()) else sent
        pieces = data.draw(cut_into_pieces(sent))
        num_answer_bytes = data.draw(st.integers(0, 2000)) if sent == call.encode() else 0
        reset = data.draw(st.booleans())
        with budget(host):
            host.run(leave(host.value.router.port, pieces, num_answer_bytes, reset=reset))

    holds()
    check_quiet(host)


def check_answer(answer: RawAnswer) -> None:
    assert answer.status < 500 or answer.status in _SERVER_ERRORS, answer
    if answer.status >= 400 and not answer.is_to_head:
        check_error(answer)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        check_events(answer.body)


def check_error(answer: RawAnswer) -> None:
    assert answer.headers["content-type"] == "application/json", answer
    error = answer.json["error"]
    assert set(answer.json) == {"error"} or (answer.json["type"], len(answer.json)) == ("error", 2)  # Anthropic's form
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"], error
    assert error["code"] != "internal"
    if answer.status in (429, 503) and error["param"] not in _LIMIT_HEADERS:  # those no later time could keep
        assert re.fullmatch(r"\d+", answer.headers.get("retry-after", "")), answer


def check_events(body: bytes) -> None:
    last = body.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert body.endswith(b"\n\n"), body
    assert last.startswith((b"data: [DONE]", b"event: message_stop", b"event: error", b"event: response.")), body
    assert b"internal error" not in body
