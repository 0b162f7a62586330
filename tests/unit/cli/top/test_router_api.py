"""What the endpoints' answers become, and what is said where there are none."""

from __future__ import annotations

import msgspec
import pytest

from cli.top import answers as ours
from cli.top.router_api import NotARouterError
from common.errors import (
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownRequestError,
    UnreachableError,
)
from router.gateway.operators.timelines import RequestList
from router.serving.cluster_view import ClusterView
from router.timelines.views import RequestTimeline
from tests.page.answers import cluster, pod, summary


def request(**fields):
    return msgspec.convert(summary() | fields, ours.Request)


PAIRS = [
    (ours.ClusterView, ClusterView),
    (ours.RequestList, RequestList),
    (ours.Timeline, RequestTimeline),
]


@pytest.mark.parametrize(("our", "router"), PAIRS)
def test_every_field_is_one_that_routers_send(our, router):
    def check(our, router, path):
        for name, kind in our.items():
            assert name in router, f"{path}.{name}"
            if isinstance(kind, dict):
                check(kind, router[name], f"{path}.{name}")
            else:
                assert kind == router[name], f"{path}.{name}"

    check(shape_of(our), shape_of(router), our.__name__)


def shape_of(struct):
    """Names and types of fields, of nested structs too."""

    def described(kind):
        if isinstance(kind, msgspec.inspect.StructType):
            return {field.name: described(field.type) for field in kind.fields}
        if isinstance(kind, msgspec.inspect.ListType):
            return described(kind.item_type)
        if isinstance(kind, msgspec.inspect.UnionType):
            structs = [each for each in kind.types if isinstance(each, msgspec.inspect.StructType)]
            return described(structs[0]) if structs else frozenset(map(repr, kind.types))
        return repr(kind)

    return described(msgspec.inspect.type_info(struct))


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, b"", UnauthenticatedError, "the router asks for an API key: set BATON_API_KEY to an operator's"),
        (403, b"", PermissionDeniedError, "the cluster is for operators: set BATON_API_KEY to an operator's key"),
        (429, {"error": {"message": "too many"}}, UnavailableError, "GET /v1/cluster: status 429: too many"),
        (502, b"<h1>Bad \x1b[31mGateway", UnavailableError, "status 502: '<h1>Bad \\x1b[31mGateway'"),
        (404, b"", NotARouterError, "URL is not the HTTP address of a Baton router: GET /v1/cluster: status 404"),
        (302, b"", NotARouterError, "URL is not the HTTP address of a Baton router: GET /v1/cluster: status 302"),
        (200, b"<html>", NotARouterError, "the answer is not a router's: JSON is malformed"),
        (200, {"object": "list", "data": []}, NotARouterError, "the answer is not a router's"),
        (200, b" " * (33 << 20), NotARouterError, "the answer has more than"),
    ],
)
async def test_an_answer_that_cannot_be_used_is_named(server, open_api, status, body, error, message):
    server.answers["/v1/cluster"] = status, body
    await server.start()
    with pytest.raises(error) as raised:
        await open_api(server.url).cluster()
    assert type(raised.value) is error
    assert message.replace("URL", server.url) in raised.value.message
    assert raised.value.message.isprintable()


async def test_a_router_of_another_version_may_send_more(server, open_api):
    server.answers["/v1/cluster"] = 200, cluster(1, [pod("decode", 1, 1)]) | {"news": 1}
    server.answers["/v1/cluster"][1]["pods"][0]["colour"] = "green"
    await server.start()
    view = await open_api(server.url, key="the-key").cluster()
    assert [each.name for each in view.pods] == ["decode-1"]
    assert "authorization: Bearer the-key\r\n" in server.requests[0]


async def test_every_call_has_a_deadline(server, open_api):
    await server.start()
    server.may_answer.clear()
    api = open_api(server.url, timeout_s=0.05)
    for call in (api.cluster(), api.requests(), api.timeline(request())):
        with pytest.raises(UnreachableError, match="no complete answer within 0"):
            await call


async def test_a_timeline_that_is_no_longer_kept(server, open_api):
    await server.start()
    with pytest.raises(UnknownRequestError, match="no more"):
        await open_api(server.url).timeline(request(id="a/../b ?#é", tenant=""))
    assert server.requests[0].startswith("GET /v1/requests/a%2F..%2Fb%20%3F%23%C3%A9 HTTP/1.1\r\n")


async def test_the_timeline_is_that_of_the_requests_tenant(server, open_api):
    await server.start()
    with pytest.raises(UnknownRequestError):
        await open_api(server.url).timeline(request(id="a", tenant="team a&b"))
    assert server.requests[0].startswith("GET /v1/requests/a?tenant=team%20a%26b HTTP/1.1\r\n")


async def test_nothing_listens(server, open_api):
    await server.start()
    await server.stop()
    with pytest.raises(UnreachableError, match=r"cannot connect to 127.0.0.1:[0-9]+: Connection refused$"):
        await open_api(server.url).cluster()
