"""The page in a browser: what it shows while tokens stream, pods change and requests end, and whom it believes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from common.pb import pods_pb2
from router.testing import FakeDecodePod, FakePrefillPod
from tests.integration import speculation_rig
from tests.integration.cluster import running_cluster
from tests.page.answers import HOSTILE, answer_with, cluster, pod, request_list, summary, timeline
from tests.unit.router.security.conftest import ALICE, OPERATOR, key_file  # noqa: F401  (a fixture)

pytestmark = pytest.mark.page
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TEXT = "Paris is the capital of France, and has been for most of the last thousand years. It lies on the Seine."


async def send(page: Page, text: str = "What is the capital of France?") -> None:
    await expect(page.locator("#model option")).not_to_have_count(0)
    await page.get_by_label("Your message").fill(text)
    await page.get_by_label("Your message").press("Control+Enter")


async def test_tokens_are_shown_as_they_come_and_the_answer_leads_to_its_timeline(start_cluster, open_page, says):
    decode = FakeDecodePod(says(TEXT), step_s=0.01)
    decode.allowed = 8
    running = await start_cluster([FakePrefillPod(says(TEXT))], [decode])
    page = await open_page(running)
    await send(page)
    await expect(page.locator("#chat-status")).to_have_text("Generating…")
    await expect(page.locator("#answer")).to_contain_text("Paris")
    await expect(page.locator("#figure-ttft")).to_have_text(re.compile(r"\d m?s$"))
    assert TEXT not in await page.locator("#answer").inner_text()
    await decode.allow(None)
    await expect(page.locator("#answer")).to_have_text(TEXT)
    await expect(page.locator("#chat-status")).to_have_text("Done: stop.")
    usage = int(await page.locator("#figure-tokens").inner_text())
    assert usage == len(decode.reply(None))
    await expect(page.locator("#figure-rate")).to_have_text(re.compile(r"^[\d.,]+$"))
    await expect(page.get_by_role("img", name=re.compile(r"Gaps between tokens: \d+, the longest"))).to_be_visible()
    await page.screenshot(path=IMAGES / "page-playground.png")
    await page.get_by_role("link", name="Timeline of this request").click()
    await expect(page.locator("#timeline-title")).to_be_focused()
    await expect(page.locator("#lanes .bar[data-phase='prefill']").first).to_be_visible()
    await expect(page.locator("#recent tr")).to_have_count(1)
    await expect(page.locator("#timeline-figures")).to_contain_text("planned")


async def test_stop_ends_the_request_on_the_pod(start_cluster, open_page, says):
    decode = FakeDecodePod(says(TEXT))
    decode.allowed = 8
    running = await start_cluster([], [decode])
    page = await open_page(running)
    await send(page)
    await expect(page.locator("#answer")).not_to_be_empty()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator("#chat-status")).to_have_text("Stopped.")
    await decode.until(lambda: decode.aborts)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()


async def test_an_error_is_the_routers_message(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running, expects=("400",))
    await page.get_by_label("Max tokens").fill("100000")
    await send(page)
    await expect(page.locator("#chat-status")).to_contain_text("4096")


async def test_what_changes_on_a_pod_is_shown_without_a_reload(start_cluster, open_page):
    prefill, decode = FakePrefillPod(), FakeDecodePod()
    running = await start_cluster([prefill], [decode])
    page = await open_page(running, "/#cluster")
    row = page.locator("#pods tr", has_text=decode.address)
    await expect(row).to_contain_text("ready")
    await expect(page.locator("#total-ready")).to_have_text("2 of 2")
    await decode.set_stats(pods_pb2.PodStats(num_running=7, num_free_blocks=25, num_blocks=100))
    await expect(row).to_contain_text("75 %")
    await running.client.post(f"/admin/pods/{decode.address}/drain")
    await expect(row).to_contain_text("draining")
    await prefill.stop()
    await expect(page.get_by_role("log")).to_contain_text(f"at {prefill.address}: ready →")
    await page.get_by_label("Show").select_option("decode")
    await expect(page.locator("#pods tr:visible")).to_have_count(1)


async def test_ranks_are_shown_of_pods_that_have_several(start_cluster, open_page):
    prefill, decode = FakePrefillPod(), FakeDecodePod()
    running = await start_cluster([prefill], [decode])
    page = await open_page(running, "/#cluster")
    await expect(page.locator("#pods tr")).to_have_count(2)
    await expect(page.get_by_role("heading", name="Ranks")).to_be_hidden()
    ranks = [
        pods_pb2.RankStats(
            rank=rank, pid=70 + rank, device=HOSTILE, computing_s=6 + rank, waiting_s=3 - rank, delayed_s=1
        )
        for rank in range(2)
    ]
    await decode.set_stats(pods_pb2.PodStats(num_blocks=100, ranks=ranks))
    rows = page.locator("#ranks li")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_contain_text(f"rank 1: process 71, {HOSTILE[:64]}")
    await expect(rows.nth(1)).to_contain_text("computing 70 %, waiting 20 %, without a core 10 %")
    await expect(page.get_by_role("heading", name="Ranks")).to_be_visible()


async def test_drafts_are_shown_of_pods_that_propose_some(start_cluster, open_page):
    prefill, decode, other = FakePrefillPod(), FakeDecodePod(), FakeDecodePod()
    decode.info.proposer, other.info.proposer = "ngram", HOSTILE
    running = await start_cluster([prefill], [decode, other])
    page = await open_page(running, "/#cluster")

    def drafts(of):
        return page.locator("#pods tr", has_text=of.address).locator("td.drafts")

    await expect(drafts(prefill)).to_have_text("–")
    await expect(drafts(decode)).to_have_text("ngram: none verified")
    await expect(drafts(other)).to_have_text(f"{HOSTILE[:64]}: none verified")
    stats = pods_pb2.PodStats(num_blocks=100)
    stats.drafts.num_verified, stats.drafts.num_accepted, stats.drafts.num_verifications = 400, 252, 133
    await decode.set_stats(stats)
    await expect(drafts(decode)).to_have_text("ngram: 63 % right, 2.9 tok/step")


async def test_the_acceptance_of_eight_streams_is_shown(tmp_path, monkeypatch, open_page):
    speculation_rig.ask_and_verify_always(monkeypatch)
    async with running_cluster(tmp_path, "llama", speculative="ngram:min=1,depth=4") as running:
        page = await open_page(running, "/#cluster")
        plain = await speculation_rig.eight_streams(running.router, speculative=False)
        found = await speculation_rig.eight_streams(running.router)
        assert found.texts == plain.texts
        share = round(100 * found.num_accepted / (found.num_accepted + found.num_rejected))
        await expect(page.locator("#pods tr[data-role='decode'] .drafts")).to_contain_text(f"ngram: {share} % right, ")
        await expect(page.locator("#pods tr[data-role='prefill'] .drafts")).to_have_text("–")


async def test_two_hundred_pods_are_drawn_once_a_poll_and_only_where_they_changed(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running)
    ticks = iter(range(1, 10_000))

    def view():
        tick = next(ticks)
        pods = [pod(role, number, 1) for role in ("prefill", "decode") for number in range(100)]
        pods[3] = pod("prefill", 3, tick)  # the only one that changes
        return cluster(tick, pods, handoffs=64)

    await watch_drawing(page)
    await answer_with(page, "/v1/cluster", view)
    await page.evaluate("location.hash = '#cluster'")
    await expect(page.locator("#pods tr")).to_have_count(200)
    await poll(page)
    await poll(page)
    await page.evaluate("window.rows = [...document.querySelectorAll('#pods tr')], window.drawing.begin()")
    for _ in range(20):
        await poll(page)
    seen = await page.evaluate("window.drawing.end()")
    assert seen["frames"] == 20, "one frame a poll"
    assert seen["changed"] <= 20 * 12, "cells that have not changed are written"
    assert await page.evaluate("window.rows.every((row, at) => row === document.querySelectorAll('#pods tr')[at])")


WATCH_DRAWING = """() => {
  const drawing = { frames: 0, changed: 0, polls: 0 };
  const ask = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => ask((at) => {
    drawing.frames += 1;
    draw(at);
    drawing.polls += 1;
  });
  drawing.begin = () => {
    Object.assign(drawing, { frames: 0, changed: 0 });
    new MutationObserver((all) => { drawing.changed += all.length; }).observe(document.getElementById("pods"),
      { subtree: true, childList: true, characterData: true, attributes: true });
  };
  drawing.end = () => drawing;
  window.drawing = drawing;
}"""


async def watch_drawing(page: Page) -> None:
    """From now on the page's clock is the test's, and frames and changes are counted."""
    await page.clock.install()
    await page.evaluate(WATCH_DRAWING)


async def poll(page: Page) -> None:
    """The next answer is asked for and drawn; the page's clock is the test's."""
    before = await page.evaluate("window.drawing.polls")
    while await page.evaluate("window.drawing.polls") == before:
        await page.clock.run_for(500)


async def test_a_page_left_open_holds_no_more_than_after_its_first_minutes(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running)
    ticks = iter(range(1, 10_000))

    def view():
        tick = next(ticks)
        states = ("ready", "ejected")
        return cluster(tick, [pod("prefill", 1, tick), pod("decode", tick % 5, tick, state=states[tick % 2])])

    await watch_drawing(page)
    await answer_with(page, "/v1/cluster", view)
    await page.evaluate("location.hash = '#cluster'")
    sizes = []
    for _ in range(3):
        for _ in range(60):
            await poll(page)
        sizes.append(await page.evaluate("document.querySelectorAll('*').length"))
    assert abs(sizes[-1] - sizes[-2]) <= 12
    assert await page.locator("#events li").count() == 100


async def test_nothing_is_asked_for_while_the_tab_is_hidden(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    await page.clock.install()
    set_visibility = """(state) => {
      Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await page.evaluate(set_visibility, "hidden")
    await page.evaluate("location.hash = '#cluster'")
    await page.clock.run_for(60_000)
    assert [url for url in asked if "/v1/cluster" in url] == []
    async with page.expect_response("**/v1/cluster"):
        await page.evaluate(set_visibility, "visible")


async def test_a_timeline_has_bars_for_router_pods_and_wire_and_the_reasons(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running, "/", color_scheme="dark")
    others = [
        summary(id=f"chat-{number}", num_events=0, ttft_ms=200.0 + number, status="finished") for number in range(6)
    ]
    request = summary()
    await answer_with(page, "/v1/requests", lambda: request_list(request, *others))
    await answer_with(page, f"/v1/requests/{request['id']}", lambda: timeline(request))
    await page.get_by_role("link", name="Requests").click()
    await page.get_by_role("link", name="chat-4f2a91").click()
    await expect(page.locator(".lane-name")).to_have_text(["Router", "Prefill pod", "Wire", "Decode pod"])
    lane = page.locator(".lane")
    await expect(lane.nth(2).locator(".bar")).to_have_text("transfer")
    await expect(lane.nth(3).locator(".bar")).to_have_text(["decode queue", "first decode", "decode"])
    await expect(lane.nth(3).locator(".gap")).to_have_count(1)
    await expect(lane.nth(0).locator(".mark")).to_have_count(2)
    track, bar = await lane.nth(2).locator(".track").bounding_box(), await lane.nth(2).locator(".bar").bounding_box()
    assert bar["width"] / track["width"] == pytest.approx(180.0 / 4210.7, abs=0.01)
    assert (bar["x"] - track["x"]) / track["width"] == pytest.approx(598.0 / 4210.7, abs=0.01)
    await expect(page.locator("#timeline-figures")).to_contain_text("418 ms, before token 71")
    await expect(page.locator("#timeline-figures")).to_contain_text("planned")
    await expect(page.locator("#timeline-figures")).to_contain_text("96 of 152")
    await expect(page.locator("#fallbacks li").first).to_contain_text("prefill failed, unavailable, 10.0.1.1:50051")
    await expect(page.locator("#phases tr")).to_have_count(12)
    await page.screenshot(path=IMAGES / "page-timeline.png")
    await page.get_by_role("link", name="Close").click()
    await expect(page.locator("#timeline")).to_be_hidden()


async def test_a_key_is_asked_for_a_wrong_one_is_named_as_such_and_an_operators_sees_pods(
    start_cluster,
    open_page,
    key_file,  # noqa: F811
):
    running = await start_cluster([FakePrefillPod()], [FakeDecodePod()], security=key_file.security)
    page = await open_page(running, expects=("401", "403"))
    dialog = page.get_by_role("dialog")

    async def use(key):
        await dialog.get_by_label("Key").fill(key)
        await dialog.get_by_role("button", name="Use").click()

    await expect(dialog).to_contain_text("This router asks for an API key.")
    await use("not the key of anyone")
    await expect(dialog).to_contain_text("ASCII")
    await use("not-the-key-of-anyone")
    await expect(dialog).to_contain_text("The router does not accept this API key.")
    await use(ALICE)
    await expect(dialog).to_be_hidden()
    await send(page)
    await expect(page.locator("#chat-status")).to_contain_text("Done")
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.locator("#cluster-status")).to_contain_text("operators")
    await page.get_by_role("button", name="API key").click()
    await use(OPERATOR)
    await expect(page.locator("#pods tr")).to_have_count(2)
    await page.reload()
    await expect(page.locator("#pods tr")).to_have_count(2)
    assert await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    await page.get_by_role("button", name="API key").click()
    await dialog.get_by_role("button", name="Forget").click()
    await expect(dialog).to_contain_text("This router asks for an API key.")
    assert await page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("view", ["playground", "cluster", "requests/hostile"])
async def test_hostile_names_ids_and_answers_are_text(start_cluster, open_page, says, view):
    running = await start_cluster([], [FakeDecodePod(says(HOSTILE))])
    page = await open_page(running)
    hostile = dict.fromkeys(("id", "model", "tenant", "error", "finish_reason", "prefill_pod", "decode_pod"), HOSTILE)
    request = summary(**hostile)
    bad = pod("decode", 1, 1, **dict.fromkeys(("address", "pod_id", "model", "version", "detail"), HOSTILE))
    models = {"object": "list", "data": [{"id": HOSTILE}, {"id": "baton-demo"}]}
    await answer_with(page, "/v1/models", lambda: models)
    await answer_with(page, "/v1/cluster", lambda: cluster(1, [pod("prefill", 1, 1), bad]))
    await answer_with(page, "/v1/requests", lambda: request_list(request))
    await answer_with(page, "/v1/requests/hostile", lambda: timeline(request, HOSTILE))
    elements = await page.evaluate("document.querySelectorAll('img, script').length")
    await page.goto(f"{running.router.http_url}/?again#{view}")
    shown = {"cluster": "#pods", "playground": "#answer", "requests/hostile": "#timeline"}[view]
    if view == "playground":
        await expect(page.locator("#model option")).to_have_count(2)
        await page.get_by_label("Model").select_option(running.router.service.models[0].name)
        await send(page, HOSTILE)
        await expect(page.locator("#chat-status")).to_contain_text("Done")
    await expect(page.locator(shown)).to_contain_text(HOSTILE)
    assert await page.evaluate("document.querySelectorAll('img, script').length") == elements


async def test_colours_are_the_systems_until_one_is_chosen_and_the_choice_is_kept(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running, color_scheme="light")

    async def ground():
        return await page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = await ground()
    await page.emulate_media(color_scheme="dark")
    dark = await ground()
    assert light != dark
    button = page.get_by_role("button", name="Theme")
    await button.click()
    await expect(button).to_have_text("Theme: light")
    assert await ground() == light
    await page.reload()
    assert await ground() == light
    await button.click()
    await page.emulate_media(color_scheme="light")
    assert await ground() == dark
    for theme in ("light", "dark"):
        await page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        assert await page.evaluate(LEAST_CONTRAST) >= 4.5


LEAST_CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => {
    const pairs = style.getPropertyValue(name).trim().slice(1).match(/../g);
    const [r, g, b] = pairs.map((hex) => parseInt(hex, 16) / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const contrast = (one, other) => Math.max(of(one), of(other)) / Math.min(of(one), of(other));
  const texts = ["--text", "--soft", "--accent", "--good", "--warn", "--bad"];
  const fills = ["--accent", "--prefill", "--wire", "--decode"];
  return Math.min(...texts.flatMap((text) => [contrast(text, "--surface"), contrast(text, "--ground")]),
    ...fills.map((fill) => contrast("--on-accent", fill)));
}"""


async def test_the_keyboard_reaches_everything_and_every_field_has_a_name(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running, reduced_motion="reduce")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    for role in ("banner", "navigation", "main"):
        await expect(page.get_by_role(role)).to_have_count(1)
    nameless = """[...document.querySelectorAll('input, select, textarea, button')].filter(
      (each) => !(each.labels?.length || each.textContent.trim() || each.getAttribute('aria-label'))).length"""
    assert await page.evaluate(nameless) == 0
    await answer_with(page, "/v1/cluster", lambda: cluster(1, [pod("prefill", 1, 1), pod("decode", 1, 1)]))
    await page.get_by_role("link", name="Cluster").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("link", name="Cluster")).to_have_attribute("aria-current", "page")
    flowing = page.locator(".wire.flows").first
    assert await flowing.evaluate("node => getComputedStyle(node).animationName") == "none"


async def test_the_cluster_as_in_the_documentation(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running, reduced_motion="reduce", viewport={"width": 1360, "height": 900})
    ticks = iter(range(1, 10_000))

    def view():
        tick = next(ticks)
        pods = [*(pod("prefill", number, tick) for number in (1, 2)), *(pod("decode", n, tick) for n in (1, 2, 3, 4))]
        if tick > 2:
            why = "stall: no step for 4.1 s with 6 requests running; tried again in 12 s"
            pods[4] |= {"state": "ejected", "detail": why}
            pods[5] |= {"state": "draining"}
        return cluster(tick, pods, handoffs=5)

    await answer_with(page, "/v1/cluster", view)
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.get_by_role("log")).to_contain_text("ready → ejected: stall")
    await expect(page.locator("#total-prompt")).to_have_text(re.compile(r"\d"))
    await page.screenshot(path=IMAGES / "page-cluster.png", full_page=True)


async def test_the_apis_description_needs_no_other_server(start_cluster, open_page):
    running = await start_cluster()
    page = await open_page(running, "/docs")
    await expect(page.get_by_text("/v1/chat/completions").first).to_be_visible()
    await expect(page.get_by_text("/v1/cluster").first).to_be_visible()
