"""The command line as settings: flags, environment, node id."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import platform
import re
import secrets
import uuid
from pathlib import Path

from exo.cli.keys import cluster_key
from exo.errors import InvalidRequest
from exo.logs import show_from

DEFAULT_API_PORT = 52415


def home() -> Path:
    """Where exo keeps its node id and converted models: $EXO_HOME, else ~/.cache/exo."""
    chosen = os.environ.get("EXO_HOME")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exo"


def existing_part(folder: Path) -> Path:
    """The folder, or the last one above it that is there: the disk it is or would be on."""
    while not folder.exists():
        folder = folder.parent
    return folder


def node_id(folder: Path) -> str:
    """This machine's persistent id; a second process on it gets the next one, so that no two that
    run at once share theirs. Where it cannot be kept, it is another one each time."""
    try:
        return _kept_node_id(folder)
    except OSError as error:
        logging.getLogger(__name__).warning(
            "%s cannot be written (%s): this node's id is not kept; set EXO_HOME to a folder of "
            "your own",
            folder,
            error.strerror,
        )
        return _new_node_id()


def _new_node_id() -> str:
    machine = re.sub(r"[^\w-]", "", platform.node().split(".")[0])[:24] or "node"
    return f"{machine}-{secrets.token_hex(2)}"


def _kept_node_id(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    slot = 0
    while True:
        name = "node_id" if slot == 0 else f"node_id.{slot}"
        # Open, and so locked, for as long as this process lives.
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            slot += 1
            continue
        known = os.pread(file, 100, 0).decode(errors="replace").strip()
        if not re.fullmatch(r"[\w.-]{1,64}", known):
            known = _new_node_id()
            os.ftruncate(file, 0)
            os.pwrite(file, f"{known}\n".encode(), 0)
        return known


def set_up_logging() -> None:
    """DEBUG=0 shows warnings, 1 info, 2 to 9 everything; third parties stay at warnings below 9."""
    text = os.environ.get("DEBUG", "0")
    level = int(text) if text.isdigit() else 1
    if level < 9:
        # Read when gRPC is imported. What it notes of strangers that knock is told in our words.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    show_from(logging.WARNING if level < 1 else logging.INFO if level < 2 else logging.DEBUG)
    if level >= 9:
        logging.getLogger().setLevel(logging.DEBUG)
        # One line for every byte it moves says nothing about exo.
        logging.getLogger("asyncio").setLevel(logging.INFO)


def positive(text: str) -> int:
    """A number above 0, for argparse."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def counts(text: str) -> tuple[int, ...]:
    """ "128,512" as numbers, "0" as none, for argparse."""
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 128,512")
    return tuple(int(part) for part in parts if int(part))


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that starts a node."""
    who = parser.add_argument_group("this node")
    who.add_argument("--node-id", help="its name in the cluster (default: kept in the data folder)")
    who.add_argument(
        "--inference-engine",
        default="auto",
        choices=("auto", "cpu", "mlx", "dummy"),
        help="what computes: auto picks the best for this machine (default)",
    )
    who.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of the cpu engine (default: the physical cores exo may use)",
    )
    who.add_argument(
        "--precise",
        action="store_true",
        help="float activations on a CPU, float32 on a GPU; slower",
    )
    who.add_argument(
        "--memory", help="memory that models may take here, like 12GB (default: what is free)"
    )
    who.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory that a model's KV cache may take here, like 2GB (default: half of what is "
        "free once the model is loaded)",
    )
    who.add_argument(
        "--draft-model",
        metavar="MODEL",
        default="",
        help="a small model of the same vocabulary as those that are served, which guesses what "
        "comes next where this node heads a ring; it changes no answer",
    )
    who.add_argument(
        "--kv-bits",
        type=int,
        choices=(16, 8),
        default=16,
        help="8: keys and values in the KV cache as bytes, for nearly twice the context in the "
        "same memory (default: 16)",
    )
    who.add_argument(
        "--standby",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep layers next to this node's own in memory that nobody needs, so that answers go "
        "on sooner when another node is lost (default: yes)",
    )
    who.add_argument(
        "--preload",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load the models used most when the node starts (default: yes)",
    )
    who.add_argument(
        "--models-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder that holds a directory for each model, only read; may be repeated",
    )
    net = parser.add_argument_group("other nodes")
    net.add_argument(
        "--partition",
        choices=("auto", "memory", "speed"),
        default="auto",
        help="nodes that serve a model: the most that are nearly as fast as the fastest (auto, "
        "the default), all by their memory, or the fastest; what the planning node says holds",
    )
    net.add_argument(
        "--wire",
        choices=("exact", "bfloat16", "int8"),
        default="exact",
        help="hidden states that this node sends and is sent: as they were computed (exact, the "
        "default), or for slow links in half (bfloat16) or two sevenths (int8) of the bytes, which "
        "changes answers a little (docs/benchmarks.md)",
    )
    net.add_argument(
        "--cluster", default="exo", help="only nodes of the same name join (default exo)"
    )
    net.add_argument(
        "--cluster-key-file",
        type=Path,
        metavar="FILE",
        help="a secret that all nodes share: who has another one or none cannot join, and what "
        "nodes say to each other is encrypted (default: EXO_CLUSTER_KEY, else it is open); "
        "openssl rand -hex 32 > FILE makes one",
    )
    net.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="network interface to find and serve nodes on, may be repeated (default: private LAN)",
    )
    net.add_argument("--node-host", default="", help="address to listen on for nodes")
    net.add_argument(
        "--node-port",
        type=int,
        default=0,
        help="port for nodes; the next one is for rings (default: free ones)",
    )
    net.add_argument(
        "--listen-port",
        type=int,
        default=0,
        help="UDP port for announcements, the same on all nodes (default 52416)",
    )
    net.add_argument("--broadcast-port", type=int, default=0, help="the same as --listen-port")
    net.add_argument(
        "--discovery-module", default="", choices=("udp", "manual", "none"), help="(default udp)"
    )
    net.add_argument(
        "--peers", default="", help="host:port,host:port or a JSON file; implies manual"
    )
    net.add_argument(
        "--wait-for-peers", type=int, default=0, metavar="N", help="begin when N others are here"
    )
    api = parser.add_argument_group("answers")
    api.add_argument(
        "--chatgpt-api-port", type=int, default=DEFAULT_API_PORT, help="port of API and tinychat"
    )
    api.add_argument(
        "--chatgpt-api-host", default="127.0.0.1", help="0.0.0.0 serves the whole network"
    )
    api.add_argument(
        "--default-temp",
        type=float,
        help="temperature where neither the request nor the model says one (default 0: greedy)",
    )
    api.add_argument(
        "--max-requests",
        type=positive,
        default=512,
        metavar="N",
        help="of a model that run or wait; others get 429 and come again (default 512)",
    )
    api.add_argument(
        "--request-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="end answers that take longer (default: none does)",
    )
    api.add_argument(
        "--rejoin-wait",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for nodes that are needed and went away a moment ago (default 10)",
    )
    api.add_argument(
        "--speculation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cpu engine: compute ahead what repeats earlier text; changes no token (default: yes)",
    )
    api.add_argument("--max-generate-tokens", type=int, help="longest answer where none is asked")
    api.add_argument("--system-prompt", help="for conversations that bring none")
    api.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="a further name of a model, like claude-sonnet-4=qwen3-8b; may be repeated",
    )
    api.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="wanted of every client, may be repeated; better by file or in EXO_API_KEY, as other "
        "users of a machine see flags",
    )
    api.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="such keys, one a line, # for comments"
    )
    api.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="site whose pages may use the API, like http://localhost:3000, * for all; may be "
        "repeated",
    )
    api.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="lines of the log"
    )
    api.add_argument("--disable-tui", action="store_true", help="plain lines instead of a screen")


def aliases(args: argparse.Namespace) -> dict[str, str]:
    """Raises InvalidRequest for one that is not NAME=MODEL."""
    found = {}
    for text in args.alias:
        name, _, model = text.partition("=")
        if not name or not model:
            raise InvalidRequest(f"--alias {text}: expected NAME=MODEL")
        found[name] = model
    return found


def _folder(path: Path) -> Path:
    if not path.expanduser().is_dir():
        raise InvalidRequest(f"--models-dir {path}: there is no such folder")
    return path.expanduser().resolve()


def node_config(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The node's settings from parsed flags. Imports late: `exo --help` needs none of it."""
    from exo.models.card import resolve
    from exo.networking.rings.hidden_states import Wire
    from exo.orchestration.config import DEFAULT_BROADCAST_PORT, NodeConfig, ServingRules
    from exo.topology.capabilities import parse_memory
    from exo.topology.placement import PartitionRule

    if args.broadcast_port and args.listen_port and args.broadcast_port != args.listen_port:
        raise InvalidRequest(
            "--listen-port and --broadcast-port differ: nodes hear announcements on the port they "
            "are sent to"
        )
    folder = home()
    return NodeConfig(
        node_id=args.node_id or node_id(folder),
        instance_id=uuid.uuid4().hex,
        home=folder,
        cluster=args.cluster,
        cluster_key=cluster_key(args),
        listen_port=args.node_port,
        broadcast_port=args.broadcast_port or args.listen_port or DEFAULT_BROADCAST_PORT,
        discovery=args.discovery_module or ("manual" if args.peers else "udp"),
        interfaces=tuple(args.interface),
        node_host=args.node_host,
        peers=args.peers,
        engine=args.inference_engine,
        threads=args.threads,
        precise=args.precise,
        partition=PartitionRule(args.partition),
        wire=Wire(args.wire),
        memory_bytes=parse_memory(args.memory) if args.memory else None,
        kv_memory_bytes=parse_memory(args.kv_memory) if args.kv_memory else None,
        kv_bits=args.kv_bits,
        draft_model=resolve(args.draft_model).model_id if args.draft_model else "",
        models_folders=tuple(_folder(path) for path in args.models_dir),
        standby=args.standby,
        serving=ServingRules(
            request_timeout_s=args.request_timeout,
            rejoin_wait_s=args.rejoin_wait,
            max_requests=args.max_requests,
            speculates=args.speculation,
        ),
    )
