"""Many clients of one name spread over its servers; a list keeps its order."""

from __future__ import annotations

import grpc.aio
import pytest

from outrider.rpc.channels import options_of

SERVERS, CLIENTS = 3, 24  # of all clients of a fair draw at one server: one in 3 ** 23


@pytest.mark.parametrize("address", ["router:7070", "dns:///router:7070", "127.0.0.1:7070"])
def test_the_addresses_of_a_name_are_shuffled(address: str) -> None:
    assert "shuffleAddressList" in str(dict(options_of(address))["grpc.service_config"])


async def test_clients_of_a_name_use_different_servers_and_clients_of_a_list_its_first() -> None:
    ports: list[int] = []
    servers = []
    for number in range(SERVERS):

        async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes], number: int = number) -> bytes:
            return bytes([number])

        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Numbers", {"Which": handler}),))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    listed = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)  # what a resolver makes of a name

    async def which(address: str) -> int:
        async with grpc.aio.insecure_channel(listed, options=options_of(address)) as channel:
            return int((await channel.unary_unary("/Numbers/Which")(b""))[0])

    try:
        of_name = [await which("router:7070") for _ in range(CLIENTS)]
        of_list = [await which(listed) for _ in range(CLIENTS)]
    finally:
        for server in servers:
            await server.stop(None)
    assert len(set(of_name)) > 1
    assert set(of_list) == {0}
