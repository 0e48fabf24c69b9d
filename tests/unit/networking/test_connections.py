"""Calls between nodes that have the same cluster key, another one, or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from cryptography import x509

from exo.errors import ExoError, InvalidRequest, PeerUnavailable
from exo.networking.calls.messages import PROTOCOL
from exo.networking.calls.peer_handle import PeerHandle
from exo.networking.connections import OPEN, Connections
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import (
    NodeServiceServicer,
    NodeServiceStub,
    add_NodeServiceServicer_to_server,
)
from exo.networking.trust.cluster_key import ClusterKey

# Each as on a machine of its own.
A, B = (Connections(ClusterKey("the secret of a cluster")) for _ in range(2))
PINNED = "10cd574cd0b380e1a43b585296f368826e73e39555f413b97489e91e1c0a31c7"
OTHER = Connections(ClusterKey("the secret of another one"))


class Peer(NodeServiceServicer):
    """A fake peer that answers every hello."""

    async def Hello(self, request: pb.HelloRequest, context: object) -> pb.HelloReply:
        return pb.HelloReply(protocol=PROTOCOL, node_id="peer", instance_id="1")


@contextlib.asynccontextmanager
async def peer(connections: Connections) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_NodeServiceServicer_to_server(Peer(), server)
    port = connections.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


async def hello(own: Connections, address: str) -> str:
    handle = PeerHandle(address, own)
    try:
        return (await handle.hello(pb.HelloRequest(protocol=PROTOCOL))).node_id
    finally:
        await handle.close()


@pytest.mark.parametrize(("own", "theirs"), [(A, B), (A, A), (OPEN, OPEN)])
async def test_nodes_with_the_same_key_talk(own: Connections, theirs: Connections) -> None:
    async with peer(theirs) as address:
        assert await hello(own, address) == "peer"
        with own.channel(address) as channel:
            call = NodeServiceStub(channel).Hello
            reply = await asyncio.to_thread(call, pb.HelloRequest(), timeout=5)
            assert reply.node_id == "peer"


@pytest.mark.parametrize(
    ("own", "theirs", "error", "words"),
    [
        (A, OTHER, InvalidRequest, "has another cluster key than this node: start all nodes"),
        (A, OPEN, InvalidRequest, "has no cluster key, and this node has one: start all nodes"),
        (OPEN, A, PeerUnavailable, "it hangs up; a node with a cluster key does"),
    ],
)
async def test_others_are_told_in_words(
    own: Connections, theirs: Connections, error: type[ExoError], words: str
) -> None:
    async with peer(theirs) as address:
        with pytest.raises(error, match=words):
            await hello(own, address)


def authority(key: ClusterKey) -> object:
    return x509.load_pem_x509_certificate(key.root).public_key().public_numbers()  # type: ignore[union-attr]


def test_a_secret_gives_the_same_authority_on_all_machines_and_each_node_a_key_of_its_own() -> None:
    """For ever: nodes of other versions of exo must find each other."""
    one, same, other = (ClusterKey(secret) for secret in ("s" * 16, "s" * 16, "t" * 16))
    assert one.signature(b"x") == same.signature(b"x") != other.signature(b"x")
    assert authority(one) == authority(same) != authority(other)
    assert one.private_key != same.private_key
    assert one.signature(b"x") == PINNED
