"""A node's settings, resolved once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_BROADCAST_PORT = 52416


@dataclass(frozen=True)
class NodeConfig:
    """Times are in seconds.

    `heartbeat_timeout_s` after the last beat a peer counts as dead: shorter finds a hung peer
    sooner, longer forgives a busy one. `step_timeout_s` bounds one step through the whole ring.
    """

    node_id: str
    instance_id: str
    home: Path
    cluster: str = "exo"
    listen_port: int = 0
    broadcast_port: int = DEFAULT_BROADCAST_PORT
    discovery: str = "udp"  # udp, manual or none
    interfaces: tuple[str, ...] = field(default=())
    node_host: str = ""
    peers: str = ""
    engine: str = "auto"
    threads: int | None = None  # of the cpu engine; None: the physical cores it may use
    precise: bool = False  # float instead of 8-bit activations in the cpu engine
    memory_bytes: int | None = None
    quantize: int | None = None
    models_folders: tuple[Path, ...] = ()  # of the user's, a directory for each model, only read
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 1.4
    announce_interval_s: float = 1.0
    step_timeout_s: float = 120.0

    @property
    def models_dir(self) -> Path:
        return self.home / "models"
