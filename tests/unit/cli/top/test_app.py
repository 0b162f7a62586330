"""`baton top` as its user sees it: keys go in, the screen is looked at."""

from __future__ import annotations

import asyncio

import pytest
from textual.color import Color

from cli.top.screens import TimelineScreen
from common.errors import UnauthenticatedError, UnreachableError
from common.pb import pods_pb2
from router.testing import FakeDecodePod, FakePrefillPod
from tests.page.answers import cluster, pod, summary
from tests.unit.cli.top.conftest import MadeUpRouter, run_top
from tests.unit.router.security.conftest import ALICE, OPERATOR, key_file  # noqa: F401  (a fixture)

HOSTILE = "\x1b[31m\x1b]0;owned\x07[red]x[/red][@click=app.quit]\r\n\u202egro.txt"


# --- over a real router ---


async def test_pods_of_a_router_and_what_changes_on_them(start_cluster, open_api):
    prefill, decode = FakePrefillPod(), FakeDecodePod()
    running = await start_cluster([prefill], [decode])
    async with run_top(open_api(running.router.http_url)) as top:
        await top.until_shown("Pods ready 2/2  prefill 1/1  decode 1/1", decode.address, prefill.address)
        assert top.column("ROLE") == ["prefill", "decode"]
        await decode.set_stats(pods_pb2.PodStats(num_running=7, num_waiting=3, num_free_blocks=25, num_blocks=100))
        await top.poll_until(lambda: top.column("RUN")[1] == "7")
        assert (top.column("WAIT")[1], top.column("KV")[1]) == ("3", "75%")
        await prefill.stop()
        await top.poll_until(lambda: " to down: " in top.screen)
        await top.until_shown("Pods ready 1/2", "ready to ")


async def test_requests_of_a_router_and_a_timeline(start_cluster, open_api, says):
    running = await start_cluster([FakePrefillPod(says("Paris."))], [FakeDecodePod(says("Paris."))])
    async with run_top(open_api(running.router.http_url)) as top:
        await top.press("2")
        await top.until_shown("No request yet.")
        for number in range(3):
            answer = await running.client.post(
                "/v1/completions",
                json={"model": "baton-demo", "prompt": "Where?", "max_tokens": 8},
                headers={"x-request-id": f"where-{number}"},
            )
            assert answer.status_code == 200
        await top.poll()
        assert top.column("REQUEST") == ["where-2", "where-1", "where-0"]
        assert top.column("STATUS") == ["finished: stop"] * 3
        await top.press("down", "enter")
        # The fake decode pod may answer before the prefill pod, which then has no lane.
        await top.until_shown("Request where-1", "Route planned", "Decode pod 127.0.0.1")
        await top.press("escape")
        await top.until_shown("The last 3 requests")


async def test_a_router_that_goes_away_is_waited_for(open_api, server):
    server.answers["/v1/cluster"] = 200, cluster(1, four_pods())
    await server.start()
    async with run_top(open_api(server.url), interval_s=0.1) as top:
        await top.until(lambda: len(server.requests) > 2)
        await server.stop()
        await top.until_shown("no answer for", "Connection refused")
        assert "Pods ready 3/4" in top.screen, "what was known is still shown"
        assert top.app.poller.pause_s >= 1.0
        await server.start()
        await top.until_shown("every 0.1 s", "Pods ready 3/4")


async def test_a_key_that_is_refused_while_it_runs_ends_it(start_cluster, open_api, key_file):  # noqa: F811
    running = await start_cluster(security=key_file.security)
    with pytest.raises(UnauthenticatedError, match="the router asks for an API key: set BATON_API_KEY"):
        await open_api(running.router.http_url).cluster()
    with pytest.raises(UnauthenticatedError, match="does not accept the API key in BATON_API_KEY"):
        await open_api(running.router.http_url, key="not-the-key-of-anyone").cluster()
    api = open_api(running.router.http_url, key=OPERATOR)
    tenants = open_api(running.router.http_url, key=ALICE)
    async with run_top(api) as top:
        await top.until_shown("Pods ready 1/1")
        top.app._api = tenants
        top.app.poller.now()
        await top.until(lambda: not top.app.is_running)
    assert "is for operators: set BATON_API_KEY to an operator's key" in top.app.return_value.message


# --- keys and mouse ---


def four_pods():
    return [pod("decode", 10, 1), pod("prefill", 1, 1), pod("decode", 2, 1), pod("prefill", 3, 1, state="ejected")]


async def test_columns_are_sorted_by_keys_and_by_the_mouse():
    router = MadeUpRouter(*four_pods())
    async with run_top(router) as top:
        assert top.column("POD") == ["prefill-1", "prefill-3", "decode-2", "decode-10"]
        await top.press("less_than_sign")
        assert top.column("POD") == ["decode-2", "decode-10", "prefill-1", "prefill-3"]
        await top.press("r")
        assert top.column("POD") == ["prefill-3", "prefill-1", "decode-10", "decode-2"]
        await top.press("greater_than_sign", "greater_than_sign", "greater_than_sign")
        assert top.column("RUN") == ["6", "5", "4", "3"], "numbers begin with the largest"
        await top.until_shown("RUN▼")
        at = top.screen.splitlines()[5].index("KV WAIT") + 1
        await top.pilot.click("#pods", offset=(at, 0))
        assert top.column("KV WAIT") == ["0", "0", "0", "0"]
        await top.until_shown("KV WAIT▼")
        await top.pilot.click("#pods", offset=(at, 0))
        await top.until_shown("KV WAIT▲")


async def test_the_cursor_stays_on_its_pod_and_its_details_are_shown():
    router = MadeUpRouter(*four_pods())
    router.pods[2]["detail"] = "stall: no step for 4.1 s"
    async with run_top(router) as top:
        await top.press("down", "j")
        assert top.table.selected.pod.pod_id == "decode-2"
        await top.until_shown("10.0.2.2:50051  version 1  model qwen3-8b  ready: stall: no step for 4.1 s")
        await top.press("greater_than_sign", "greater_than_sign")
        router.pods = [pod("decode", 0, 2), *router.pods]
        await top.poll()
        assert top.table.selected.pod.pod_id == "decode-2"
        await top.press("end")
        assert top.table._cursor == 4
        await top.press("home")
        first = top.column("POD")[0]
        await top.press("r")
        assert top.table._cursor == 0
        assert top.column("POD")[0] != first, "on the first line it stays there"


async def test_pods_are_filtered_by_role_state_and_model():
    router = MadeUpRouter(*four_pods())
    router.models = ["qwen3-8b", "llama"]
    router.pods[0]["model"] = "llama"
    async with run_top(router) as top:
        await top.until_shown("m Model")
        await top.press("f")
        assert top.column("POD") == ["prefill-1", "prefill-3"]
        await top.press("f")
        assert top.column("POD") == ["decode-2", "decode-10"]
        await top.press("m", "m")
        assert top.column("POD") == ["decode-10"]
        await top.until_shown("1 of 4 pods: decode, model llama")
        await top.press("m", "f")
        assert top.column("POD") == ["prefill-3"]
        await top.press("f")
        await top.until_shown("All 4 pods")


async def test_requests_are_filtered_by_how_they_went():
    router = MadeUpRouter()
    router.summaries = [
        summary(id="fails", status="failed", finish_reason=None, error="unavailable", num_events=0),
        summary(id="runs", status="running", finish_reason=None, num_events=0),
        summary(id="recovered"),
    ]
    async with run_top(router) as top:
        await top.press("2")
        await top.until_shown("fails", "runs", "recovered", "failed: unavailable")
        for seen in (["runs"], ["fails"], ["recovered"]):
            await top.press("f")
            assert top.column("REQUEST") == seen


async def test_help_names_keys_and_columns_and_closes():
    async with run_top(MadeUpRouter(), size=(80, 24)) as top:
        await top.press("question_mark")
        await top.until_shown("Keys", "reverse the order")
        await top.press("end")
        await top.press("q")
        await top.until_shown("Pods ready 2/2")
        await top.press("q")
        await top.until(lambda: not top.app.is_running)
    assert top.app.return_value is None


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (220, 60)])
async def test_it_fits_terminals_of_any_size(size):
    router = MadeUpRouter(*four_pods())
    async with run_top(router, size=size) as top:
        await top.until_shown("Pods ready 3/4", "prefill-1", "Cluster")
        assert max(map(len, top.screen.splitlines())) <= size[0]
        assert ("Changes" in top.screen) == (size[1] >= 20)
        if size == (80, 24):
            await top.until_shown("PROMPT/S  OUTPUT/S  HIT", "q Quit")
        await top.press("2")
        await top.until_shown("chat-4f2a91")
        await top.press("enter")
        await top.until_shown("Request chat-4f2a91", "612 ms")


async def test_without_colour_nothing_is_coloured(monkeypatch):
    async def colours():
        async with run_top(MadeUpRouter(*four_pods())) as top:
            await top.until_shown("ejected")
            strips = top.strips
            for active in (each for each in top.app._filters if each.enabled):
                strips = [strip.apply_filter(active, Color(0, 0, 0)) for strip in strips]
            styles = {segment.style for strip in strips for segment in strip if segment.style}
            assert any(style.reverse for style in styles), "the cursor is seen"
            return {str(colour.name) for style in styles for colour in (style.color, style.bgcolor) if colour}

    assert "color(1)" in await colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert await colours() == {"default"}


# --- texts of others ---


@pytest.mark.parametrize("keys", [(), ("2",), ("2", "enter")])
async def test_foreign_texts_are_neither_commands_nor_markup(keys):
    names = dict.fromkeys(("pod_id", "model", "version", "detail"), HOSTILE)
    router = MadeUpRouter(pod("prefill", 1, 1), pod("decode", 1, 1, state="ejected", address=HOSTILE, **names))
    router.models = [HOSTILE]
    router.reason = HOSTILE
    hostile = dict.fromkeys(("id", "model", "tenant", "error", "prefill_pod", "decode_pod"), HOSTILE)
    router.summaries = [summary(**hostile)]
    async with run_top(router, size=(400, 50)) as top:
        await top.press("end")
        await top.press(*keys)
        await top.until_shown("\\x1b[31m\\x1b]0;owned\\x07[red]x[/red][@click=app.quit]\\r\\n\\u202egro.txt")
        router.pods[1] |= {"state": "down"}
        await top.poll()
        router.error = UnreachableError(HOSTILE)
        await top.poll()
        await top.until_shown("no answer")
        assert all(line.isprintable() for line in top.screen.splitlines())


# --- polling ---


async def test_a_slow_router_is_asked_once_and_keys_still_work():
    router = MadeUpRouter(*four_pods())
    async with run_top(router, interval_s=0.1) as top:
        router.may_answer.clear()
        await top.until(lambda: router.num_under_way)
        calls = router.num_calls
        await top.until_shown("waiting for an answer")
        await top.press("less_than_sign")
        assert top.column("POD")[0] == "decode-2"
        await top.press("2")
        await top.press("1")
        assert (router.num_calls, router.most_under_way) == (calls, 1)
        router.may_answer.set()
        await top.until(lambda: router.num_calls > calls + 3)
        assert router.most_under_way == 1


async def test_an_answer_that_comes_while_it_is_closed_ends_nothing():
    router = MadeUpRouter(*four_pods())
    async with run_top(router) as top:
        router.may_answer.clear()
        asking = asyncio.create_task(top.app._refresh())
        await top.until(lambda: router.num_under_way)
    router.may_answer.set()
    await asking


async def test_only_what_is_seen_is_asked_for():
    router = MadeUpRouter()
    router.summaries = [summary(status="running", finish_reason=None)]
    async with run_top(router) as top:

        async def calls_of_a_poll():
            before = router.num_calls
            await top.poll()
            return router.num_calls - before

        assert await calls_of_a_poll() == 1
        await top.press("2")
        await top.until_shown("chat-4f2a91")
        assert await calls_of_a_poll() == 2
        await top.press("enter")
        await top.until_shown("running")
        assert await calls_of_a_poll() == 3
        router.summaries = [summary()]
        await top.poll()
        assert await calls_of_a_poll() == 2, "a timeline that has ended changes no more"
        assert isinstance(top.app.screen, TimelineScreen)


async def test_rates_are_unknown_until_there_are_two_answers_in_a_row():
    router = MadeUpRouter(pod("decode", 1, 1))
    async with run_top(router) as top:

        async def rate_after(tick, error=None):
            router.tick, router.pods, router.error = tick, [pod("decode", 1, tick)], error
            await top.poll()
            return top.column("OUTPUT/S")[0]

        assert top.column("OUTPUT/S") == ["-"]
        assert await rate_after(2) == "417"
        await rate_after(3, UnreachableError("gone"))
        assert await rate_after(50) == "-"
        assert await rate_after(51) == "417"


async def test_long_tables_scroll_with_the_cursor_and_not_with_answers():
    router = MadeUpRouter(*(pod("decode", number, 1) for number in range(100)))
    async with run_top(router, size=(80, 24)) as top:
        await top.press("end")
        await top.until_shown("POD ", "decode-99 ")
        await top.press(*["up"] * 20)
        await top.until(lambda: top.screen.count("decode-79 ") == 2)  # in the table, and below it
        assert top.table.selected.pod.pod_id == "decode-79"
        top.table.scroll_to(y=30, animate=False)
        await top.until_shown("decode-30 ")
        router.pods = [pod("prefill", 1, 1), *router.pods]
        await top.poll()
        await top.until_shown("decode-30 ")
        assert top.table.selected.pod.pod_id == "decode-79"
        await top.press("home")
        await top.until_shown("POD ", "prefill-1 ")


async def test_of_two_hundred_pods_only_lines_that_changed_are_drawn_again(monkeypatch):
    router = MadeUpRouter(*(pod(role, number, 1) for role in ("prefill", "decode") for number in range(100)))
    async with run_top(router, size=(160, 220)) as top:
        await top.poll()
        await top.poll()  # rates are known
        drawn = []
        render_line = type(top.table).render_line
        monkeypatch.setattr(type(top.table), "render_line", lambda table, y: drawn.append(y) or render_line(table, y))
        assert len(top.column("POD")) == 200
        router.pods[3] = pod("prefill", 3, 1, num_requests=0) | {"load": router.pods[4]["load"]}
        await top.poll()
        assert set(drawn) == {3 + 1}, "one line below the header"


async def test_an_hour_of_changes_takes_no_more_memory_than_the_first_minutes():
    router = MadeUpRouter()
    async with run_top(router) as top:
        for tick in range(300):
            router.tick = tick
            router.pods = [pod("prefill", 1, 1), pod("decode", tick, 1, state=("ready", "ejected")[tick % 2])]
            top.app._show_cluster(await router.cluster())
        await asyncio.sleep(0)
        assert len(top.app._cluster._changes) == 100
        assert len(top.table._lines) == 2
