"""A node from its settings."""

from __future__ import annotations

from functools import partial

from exo.download.sharing import Sharing
from exo.download.store import ModelStore, default_sources
from exo.errors import InvalidRequest
from exo.inference.choose import make_engine
from exo.networking.calls.peer_files import GrpcFilePeer
from exo.networking.connections import Connections
from exo.networking.discovery.base import Discovery, NoDiscovery
from exo.networking.discovery.interfaces import Interface
from exo.networking.discovery.manual import ManualDiscovery
from exo.networking.discovery.network import Network
from exo.networking.discovery.udp import UDPDiscovery
from exo.networking.trust.cluster_key import ClusterKey
from exo.orchestration.config import NodeConfig
from exo.orchestration.node import StandardNode


def build_node(config: NodeConfig) -> StandardNode:
    """Everything a node is made of, not yet started.

    Raises:
        InvalidRequest: a setting that cannot be.
    """
    network = Network(config.interfaces)
    key = ClusterKey(config.cluster_key) if config.cluster_key else None
    connections = Connections(key)
    sharing = Sharing(config.node_id, connect=partial(GrpcFilePeer, connections=connections))
    sources = default_sources(config.models_dir, sharing, config.models_folders)
    store = ModelStore(config.models_dir, sources)
    engine = make_engine(
        config.engine, config.threads, precise=config.precise, kernels=config.home / "kernels"
    )
    engine.read_rates = config.home / "read_rates.json"
    engine.kv_memory, engine.kv_bits = config.kv_memory_bytes, config.kv_bits
    discovery = _discovery(config, network.interfaces, key)
    return StandardNode(config, engine, store, sharing, discovery, network, connections)


def _discovery(
    config: NodeConfig, interfaces: list[Interface], key: ClusterKey | None
) -> Discovery:
    if config.discovery == "none":
        return NoDiscovery()
    if config.discovery == "manual":
        if not config.peers:
            raise InvalidRequest("--discovery-module manual needs --peers host:port,… or a file")
        return ManualDiscovery(config.peers, config.announce_interval_s)
    if config.discovery == "udp":
        return UDPDiscovery(
            config.node_id,
            config.instance_id,
            config.cluster,
            interfaces,
            config.broadcast_port,
            config.announce_interval_s,
            key,
        )
    raise InvalidRequest(
        f"--discovery-module {config.discovery!r} is unknown; expected udp, manual or none"
    )
