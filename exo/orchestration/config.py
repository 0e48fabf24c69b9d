"""A node's settings, resolved once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from exo.networking.rings.hidden_states import Wire
from exo.topology.placement import PartitionRule

DEFAULT_BROADCAST_PORT = 52416


@dataclass(frozen=True)
class ServingRules:
    """How the head of a ring serves.

    A step that is not back after `step_timeout_s` seconds has failed, and so has a request of this
    node's clients whose answer has not ended after `request_timeout_s`, 0 being never. An answer
    that has begun waits `rejoin_wait_s` for nodes that went away and are needed. At most
    `max_requests` run or wait. `speculates`: what can be guessed is computed ahead, where that
    changes no token.
    """

    step_timeout_s: float = 120.0
    request_timeout_s: float = 0.0
    rejoin_wait_s: float = 10.0
    max_requests: int = 512
    speculates: bool = True


@dataclass(frozen=True)
class NodeConfig:
    """Times are in seconds.

    A peer that takes `heartbeat_timeout_s` to answer a beat counts as dead: shorter finds a hung
    peer sooner, longer forgives a busy one. See membership/patience.py for who is given less.
    """

    node_id: str
    instance_id: str
    home: Path
    cluster: str = "exo"
    cluster_key: str = field(default="", repr=False)  # all nodes' secret; none: they are not asked
    listen_port: int = 0
    broadcast_port: int = DEFAULT_BROADCAST_PORT
    discovery: str = "udp"  # udp, manual or none
    interfaces: tuple[str, ...] = field(default=())
    node_host: str = ""
    peers: str = ""
    engine: str = "auto"
    threads: int | None = None  # of the cpu engine; None: the physical cores it may use
    precise: bool = False  # float instead of 8-bit activations in the cpu engine
    partition: PartitionRule = PartitionRule.AUTO
    wire: Wire = Wire.EXACT  # of hidden states that it sends and is sent
    memory_bytes: int | None = None
    kv_memory_bytes: int | None = None  # of a model's KV cache; None: half of what is free
    draft_model: str = ""  # guesses for what this node heads
    kv_bits: int = 16  # of a key or value in it: 16 or 8
    models_folders: tuple[Path, ...] = ()  # of the user's, a directory for each model, only read
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 1.4
    announce_interval_s: float = 1.0
    standby: bool = True  # layers next to its own in memory that nobody needs
    serving: ServingRules = field(default_factory=ServingRules)

    @property
    def models_dir(self) -> Path:
        return self.home / "models"
