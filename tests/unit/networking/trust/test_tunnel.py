"""Both ends of a tunnel, without a connection between them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.networking.rings.test_stream import Unheard

from exo.errors import InvalidFrame
from exo.networking.connections import Connections
from exo.networking.rings.grpc_wire import GrpcWire
from exo.networking.trust.cluster_key import ClusterKey
from exo.networking.trust.tunnel import SealedTunnel

# Each as on a machine of its own, of two clusters.
A, B = (Connections(ClusterKey("the secret of a cluster")) for _ in range(2))
OTHER = Connections(ClusterKey("the secret of another one"))


def ends(client: Connections, server: Connections) -> tuple[SealedTunnel, SealedTunnel]:
    one, other = client.tunnel(is_client=True), server.tunnel(is_client=False)
    assert isinstance(one, SealedTunnel) and isinstance(other, SealedTunnel)
    return one, other


def pump(a: SealedTunnel, b: SealedTunnel, piece: int = 2**30) -> tuple[bytes, bytes]:
    """Carry what waits to the other end, in pieces, until nothing waits; what each got."""
    got = {a: bytearray(), b: bytearray()}
    while a.outgoing or b.outgoing:
        for sender, receiver in ((a, b), (b, a)):
            data = bytes(sender.outgoing)
            sender.outgoing.clear()
            for at in range(0, len(data), piece):
                got[receiver] += receiver.receive(data[at : at + piece])
    return bytes(got[a]), bytes(got[b])


@given(st.lists(st.binary(max_size=3000), max_size=8), st.integers(1, 5000))
def test_what_is_sent_arrives_in_any_pieces(said: list[bytes], piece: int) -> None:
    client, server = ends(A, B)
    for part in (b"", *said):  # before anybody has proved anything
        client.send(part)
    server.send(b"hello")
    assert pump(client, server, piece) == (b"hello", b"".join(said))
    for part in said:
        server.send(part)
    assert pump(client, server, piece) == (b"".join(said), b"")


def test_more_than_a_record_arrives_and_none_of_it_can_be_read_on_its_way() -> None:
    client, server = ends(A, A)
    data = b"a secret of somebody's " * 200_000
    client.send(data)
    pump_greeting = bytes(client.outgoing)
    assert b"secret" not in pump_greeting
    sealed = bytearray()
    while client.outgoing or server.outgoing:
        sealed += client.outgoing
        server_got = server.receive(bytes(client.outgoing))
        client.outgoing.clear()
        client.receive(bytes(server.outgoing))
        server.outgoing.clear()
        if server_got:
            assert server_got == data
    assert b"secret" not in sealed and len(sealed) > len(data)


@pytest.mark.parametrize(("client", "server"), [(A, OTHER), (OTHER, A)])
def test_who_has_another_key_gets_nothing(client: Connections, server: Connections) -> None:
    one, other = ends(client, server)
    one.send(b"a secret")
    other.send(b"another")
    with pytest.raises(InvalidFrame, match="another cluster key"):
        pump(one, other)
    for end in (one, other):
        end.send(b"more")  # says nothing, and breaks nothing
        assert b"more" not in end.outgoing and b"secret" not in end.outgoing


def test_who_is_refused_is_told_why() -> None:
    one, other = ends(A, OTHER)
    one.send(b"")
    other.receive(bytes(one.outgoing))
    with pytest.raises(InvalidFrame, match="another cluster key"):
        one.receive(bytes(other.outgoing))
    one_said = bytes(one.outgoing)
    with pytest.raises(InvalidFrame):
        other.receive(one_said[-7:] if len(one_said) > 7 else one_said)


@pytest.mark.parametrize(
    "noise",
    [
        bytes(GrpcWire(Unheard(), is_client=True).outgoing),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 100,
        os.urandom(2**16),
    ],
)
@pytest.mark.parametrize("at_client", [False, True])
def test_what_is_no_tls_is_refused_in_words(noise: bytes, at_client: bool) -> None:
    client, server = ends(A, B)
    if at_client:
        client.send(b"")
    with pytest.raises(InvalidFrame, match="no cluster key"):
        (client if at_client else server).receive(noise)


def test_what_is_damaged_on_its_way_is_refused() -> None:
    client, server = ends(A, B)
    client.send(b"")
    pump(client, server)
    client.send(b"hello")
    data = bytearray(client.outgoing)
    data[-1] ^= 1
    with pytest.raises(InvalidFrame, match="broken"):
        server.receive(bytes(data))
