"""The web page and /docs as files, and GET /v1/cluster."""

from __future__ import annotations

import asyncio
import math
import re
from importlib.resources import files

import pytest

from common.pb import pods_pb2
from router.admission.config import AdmissionConfig
from router.pods.pod import PodState
from router.testing import FakeDecodePod, FakePrefillPod
from tests.unit.router.dispatching.test_two_legs import BODY, Stream
from tests.unit.router.security.conftest import ALICE, OPERATOR, bearer, key_file  # noqa: F401  (a fixture)

STATIC = files("router.page") / "static"
TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
SCRIPTS = sorted(file.name for file in STATIC.iterdir() if file.name.endswith(".js"))
_LINK = re.compile(r'(?:src|href)="(?!data:)([^"#]+)"|from "\./([^"]+)"')
# What takes text for markup or code.
_UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML|srcdoc"
    r"|\beval\(|\bFunction\(|import\(|javascript:|setAttribute\(\s*[\"'`](?:on|href|src|style)|https?://"
)


def path_of(name):
    return {"index.html": "/", "docs.html": "/docs", "docs.js": "/docs/docs.js"}.get(name, f"/page/{name}")


async def test_every_file_is_served_with_its_type_and_a_policy_and_is_kept_by_its_tag(start_cluster, key_file):  # noqa: F811
    cluster = await start_cluster(security=key_file.security)  # none of these needs a key
    names = [file.name for file in STATIC.iterdir()]
    assert len(names) == 11
    for name in names:
        response = await cluster.client.get(path_of(name))
        assert (response.status_code, response.content) == (200, (STATIC / name).read_bytes()), name
        assert response.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        policy = response.headers["content-security-policy"].split("; ")
        assert {"default-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"} <= set(policy)
        assert not any("script-src" in rule or "http" in rule or "unsafe-eval" in rule for rule in policy)
        kept = await cluster.client.get(path_of(name), headers={"if-none-match": response.headers["etag"]})
        assert (kept.status_code, kept.content) == (304, b"")
    assert (await cluster.client.head("/")).status_code == 200
    assert (await cluster.client.post("/")).status_code == 405
    for path in ("/page/", "/page/none.js", "/page/../config.py", "/page/%2e%2e/__init__.py"):
        assert (await cluster.client.get(path)).status_code == 401, "as of all paths that are not known to be open"
        assert (await cluster.client.get(path, headers=bearer(ALICE))).status_code == 404


async def test_files_name_only_files_that_are_served(start_cluster):
    cluster = await start_cluster()
    for file in STATIC.iterdir():
        for link, module in _LINK.findall(file.read_text()):
            path = f"/{link}" if link else f"/page/{module}"
            assert (await cluster.client.get(path)).status_code == 200, (file.name, path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_take_no_text_for_markup_and_name_no_other_server(name):
    script = (STATIC / name).read_text()
    assert _UNSAFE.findall(script) == []


@pytest.mark.parametrize("name", ["index.html", "docs.html", "style.css"])
def test_html_has_no_inline_script_or_style_and_names_no_other_server(name):
    text = (STATIC / name).read_text()
    assert not re.search(r"https?://|//cdn|<style|\sstyle=|\son[a-z]+=|@import", text)
    assert all(tag.endswith("></script>") for tag in re.findall(r"<script[^>]*>.{0,9}", text))


def test_dark_is_the_same_whether_the_system_asks_for_it_or_the_button():
    blocks = re.findall(r"color-scheme: dark;([^}]*)}", (STATIC / "style.css").read_text())
    chosen, of_system = (block.split() for block in blocks)
    assert len(chosen) > 20
    assert chosen == of_system


async def test_the_setting_turns_the_page_off_but_not_the_description(start_cluster):
    cluster = await start_cluster(page=False)
    assert [(await cluster.client.get(path)).status_code for path in ("/", "/page/app.js")] == [404, 404]
    for path in ("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"):
        assert (await cluster.client.get(path)).status_code == 200


# --- GET /v1/cluster ---


async def test_the_clusters_pods_their_load_and_handoffs_between_them(start_cluster):
    prefill, decode = FakePrefillPod(), FakeDecodePod()
    decode.info.proposer = "ngram"
    cluster = await start_cluster([prefill], [decode])
    ranks = [pods_pb2.RankStats(rank=rank, computing_s=1.5, waiting_s=math.nan) for rank in range(100)]
    stats = pods_pb2.PodStats(num_running=3, num_free_blocks=25, num_blocks=100, num_generation_tokens=7, ranks=ranks)
    stats.drafts.num_verified, stats.drafts.num_accepted, stats.drafts.num_verifications = 9, 6, 3
    await decode.set_stats(stats)
    (seen,) = cluster.router.cluster.decode_pods
    decode.allowed = 1
    async with Stream(cluster) as stream:
        await stream.next()
        while seen.stats.num_running != 3:  # comes by itself
            view = (await cluster.client.get("/v1/cluster")).json()
        view = (await cluster.client.get("/v1/cluster")).json()
        assert (view["object"], view["num_under_way"]) == ("cluster", 1)
        assert view["handoffs"] == [
            {"prefill": prefill.address, "decode": decode.address, "num_running": 1, "num_ended": 0}
        ]
        await decode.allow(None)
        await stream.rest()
    await cluster.until_quiet()
    later = (await cluster.client.get("/v1/cluster")).json()
    assert [(each["num_running"], each["num_ended"]) for each in later["handoffs"]] == [(0, 1)]
    assert later["at_s"] > view["at_s"]
    pods = {pod["role"]: pod for pod in later["pods"]}
    assert pods["decode"]["address"] == decode.address
    assert (pods["decode"]["state"], pods["decode"]["detail"]) == ("ready", "")
    load = pods["decode"]["load"]
    assert (load["num_running"], load["num_free_blocks"], load["num_blocks"]) == (3, 25, 100)
    assert load["num_generation_tokens"] == 7
    drafts = [load[f"num_{name}"] for name in ("verified_drafts", "accepted_drafts", "draft_verifications")]
    assert (pods["decode"]["proposer"], drafts) == ("ngram", [9, 6, 3])
    assert pods["prefill"]["proposer"] is None
    assert [each["rank"] for each in load["ranks"]] == [*range(64)]  # of 100
    assert (load["ranks"][1]["computing_s"], load["ranks"][1]["waiting_s"]) == (1.5, 0.0)
    assert pods["decode"]["parallel_sizes"] == {}
    await prefill.stop()
    (lost,) = cluster.router.cluster.prefill_pods
    await cluster.until(lambda: lost.state is PodState.DOWN)
    (gone,) = [pod for pod in (await cluster.client.get("/v1/cluster")).json()["pods"] if pod["role"] == "prefill"]
    assert gone["state"] == "down"
    assert (gone["pod_id"], gone["version"], gone["load"]) == (prefill.info.pod_id, None, None)
    assert gone["detail"]


async def test_what_waits_in_the_router_is_counted_by_model(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], admission=AdmissionConfig(max_inflight=1))
    decode.allowed = 1
    async with Stream(cluster) as stream:
        await stream.next()
        waits = asyncio.create_task(cluster.complete(**BODY))
        while True:
            view = (await cluster.client.get("/v1/cluster")).json()
            if view["num_under_way"] == 2:
                break
        (model,) = view["models"]
        name = cluster.router.service.models[0].name
        assert model == {"name": name, "reason": "", "num_queued": 1, "adapters": []}
        await decode.allow(None)
        await stream.rest()
        await waits
    assert (await cluster.client.get("/v1/cluster")).json()["models"][0]["num_queued"] == 0


async def test_the_cluster_is_for_operators_where_there_are_keys(start_cluster, key_file):  # noqa: F811
    cluster = await start_cluster(security=key_file.security)
    answers = [await cluster.client.get("/v1/cluster", headers=bearer(key)) for key in (ALICE, OPERATOR)]
    assert [answer.status_code for answer in answers] == [403, 200]
    assert cluster.decode[0].address not in answers[0].text
    assert (await cluster.client.get("/v1/cluster")).status_code == 401
