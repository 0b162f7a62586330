import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import ConfigError, UnavailableError
from common.rpc.channel import ChannelPool, connect, open_channel
from common.rpc.server import LIVENESS, RpcServer, join_address

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_follows_set_serving_for_every_service() -> None:
    async with RpcServer("127.0.0.1", 0, ["baton.v1.Prefill"]) as server, open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> set[int]:
            names = ("", "baton.v1.Prefill")
            return {
                (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status for name in names
            }

        assert await statuses() == {NOT_SERVING}
        await server.set_serving(True)
        assert await statuses() == {SERVING}
        await server.set_serving(False)
        assert await statuses() == {NOT_SERVING}


async def test_a_process_that_does_not_serve_is_alive() -> None:
    async with RpcServer("127.0.0.1", 0, ["baton.v1.Prefill"]) as server, open_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        for serving in (False, True, False):
            await server.set_serving(serving)
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert response.status == SERVING


async def test_reflection_lists_the_services() -> None:
    async with RpcServer("127.0.0.1", 0, ["baton.v1.Prefill"]) as server, open_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {"baton.v1.Prefill", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_request_that_is_no_message_is_the_callers_fault(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with RpcServer("127.0.0.1", 0, []) as server, open_channel(server.address) as channel:
        make = channel.unary_unary if method == "Check" else channel.unary_stream
        call = make(f"/grpc.health.v1.Health/{method}")(b"\xff", timeout=30)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be parsed" in await call.details()
        # asyncio's are of an earlier test's loop, that is closed
        assert not [record for record in caplog.records if record.name != "asyncio"]
        assert await channel.unary_unary("/baton.v1.None/None")(b"", timeout=30).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_taken_port_is_a_config_error_naming_it() -> None:
    async with RpcServer("127.0.0.1", 0, []) as first:
        with pytest.raises(ConfigError, match=str(first.port)) as caught:
            await RpcServer("127.0.0.1", first.port, []).start()
        assert caught.value.param == "port"


async def test_refused_connection_is_noticed_at_once() -> None:
    async with RpcServer("127.0.0.1", 0, []) as server:
        address = server.address
    async with open_channel(address) as channel:
        with pytest.raises(UnavailableError, match="refused"):
            await connect(channel, timeout_s=60)


async def test_silent_address_is_given_up_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and never says a word
        async with open_channel(f"127.0.0.1:{mute.getsockname()[1]}") as channel:
            with pytest.raises(UnavailableError, match="no connection within"):
                await connect(channel, timeout_s=0.05)


async def test_pool_shares_a_channel_and_replaces_a_broken_one() -> None:
    async with ChannelPool() as pool:
        first = RpcServer("127.0.0.1", 0, [])
        await first.start()
        async with pool.channel(first.address, 10) as one, pool.channel(first.address, 10) as two:
            assert one is two
        await first.stop()
        await one.wait_for_state_change(grpc.ChannelConnectivity.READY)  # until the client has noticed
        with pytest.raises(UnavailableError):
            async with pool.channel(first.address, 10):
                pass
        async with RpcServer("127.0.0.1", first.port, []) as second, pool.channel(second.address, 10) as three:
            assert three is not one


async def test_pool_closes_surplus_idle_channels() -> None:
    async with RpcServer("127.0.0.1", 0, []) as a, RpcServer("127.0.0.1", 0, []) as b, ChannelPool(max_idle=1) as pool:
        async with pool.channel(a.address, 10) as first:
            pass
        async with pool.channel(b.address, 10):
            pass
        assert first.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_addresses_of_both_families() -> None:
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"
