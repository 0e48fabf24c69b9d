"""`exo service`: a node that starts with the machine, kept by systemd or launchd."""

from __future__ import annotations

import argparse
import os
import platform
import plistlib
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from exo.cli.keys import CLUSTER_KEY, api_keys, cluster_key
from exo.errors import ExoError, InvalidRequest

NAME = "exo"
LABEL = "net.exo.node"

STOP_S = 12
"""A node hands over before it ends, which takes it ten seconds at most."""

_KEPT = ("EXO_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HTTPS_PROXY", "SSL_CERT_FILE")
"""Of the environment, what says where things are. Keys and tokens belong in files."""

_FILES = ("--models-dir", "--api-key-file", "--cluster-key-file")
"""Flags that name a file or a folder."""


class Service(ABC):
    """The user's own service manager."""

    @abstractmethod
    def install(self, command: list[str]) -> None: ...

    @abstractmethod
    def remove(self) -> None: ...

    @abstractmethod
    def status(self) -> int: ...

    @abstractmethod
    def logs(self, *, follow: bool) -> int: ...


class Systemd(Service):
    """A user unit; see systemd.service(5), systemd.exec(5)."""

    def __init__(self) -> None:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        self.file = config / "systemd" / "user" / f"{NAME}.service"

    def install(self, command: list[str]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.unit(command), "utf-8")
        _run("systemctl", "--user", "daemon-reload")
        _run("systemctl", "--user", "enable", "--now", NAME)
        _say(f"{self.file} is installed and runs; it starts when you log in.")
        _say("For a start with the machine, without anybody logged in: loginctl enable-linger")

    def unit(self, command: list[str]) -> str:
        environment = (f"Environment={_quoted(f'{key}={value}')}" for key, value in _environment())
        lines = [
            "[Unit]",
            "Description=exo, a node of a cluster that runs language models",
            "After=network-online.target",
            "",
            "[Service]",
            f"ExecStart={' '.join(map(_quoted, command))}",
            *environment,
            "Restart=on-failure",
            "RestartSec=5",
            "SuccessExitStatus=130",
            f"TimeoutStopSec={STOP_S}",
            "LimitNOFILE=65536",
            "UMask=0077",
            "NoNewPrivileges=yes",
            "RestrictSUIDSGID=yes",
            "LockPersonality=yes",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
        return "\n".join(lines)

    def remove(self) -> None:
        _installed(self.file)
        _run("systemctl", "--user", "disable", "--now", NAME)
        self.file.unlink()
        _run("systemctl", "--user", "daemon-reload")
        _say(f"{self.file} is gone; models and settings stay.")

    def status(self) -> int:
        _installed(self.file)
        return _show("systemctl", "--user", "--no-pager", "status", NAME)

    def logs(self, *, follow: bool) -> int:
        _installed(self.file)
        more = ["--follow"] if follow else ["--no-pager"]
        return _show("journalctl", "--user", "--unit", NAME, "--lines", "200", *more)


class Launchd(Service):
    """A launch agent; see launchd.plist(5)."""

    def __init__(self) -> None:
        self.file = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._log = Path.home() / "Library" / "Logs" / "exo.log"
        self._domain = f"gui/{os.getuid()}"

    def install(self, command: list[str]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            _run("launchctl", "bootout", f"{self._domain}/{LABEL}", may_fail=True)
        self.file.write_bytes(self.agent(command))
        _run("launchctl", "bootstrap", self._domain, str(self.file))
        _say(f"{self.file} is installed and runs; it starts when you log in.")

    def agent(self, command: list[str]) -> bytes:
        return plistlib.dumps(
            {
                "Label": LABEL,
                "ProgramArguments": command,
                "EnvironmentVariables": dict(_environment()),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ExitTimeOut": STOP_S,
                "ProcessType": "Interactive",  # else it computes on the slow cores
                "SoftResourceLimits": {"NumberOfFiles": 65536},
                "Umask": 0o077,
                "StandardOutPath": str(self._log),
                "StandardErrorPath": str(self._log),
            }
        )

    def remove(self) -> None:
        _installed(self.file)
        _run("launchctl", "bootout", f"{self._domain}/{LABEL}", may_fail=True)
        self.file.unlink()
        _say(f"{self.file} is gone; models and settings stay.")

    def status(self) -> int:
        _installed(self.file)
        return _show("launchctl", "print", f"{self._domain}/{LABEL}")

    def logs(self, *, follow: bool) -> int:
        _installed(self.file)
        return _show("tail", "-n", "200", *(["-F"] if follow else []), str(self._log))


def service(args: argparse.Namespace) -> int:
    """Install, remove, look."""
    kept_by: Service = Launchd() if platform.system() == "Darwin" else Systemd()
    if args.what == "install":
        kept_by.install([*_exo(), "--disable-tui", *_node_flags(args.flags)])
    elif args.what == "remove":
        kept_by.remove()
    elif args.what == "status":
        return kept_by.status()
    else:
        return kept_by.logs(follow=args.follow)
    return 0


def _exo() -> list[str]:
    """This very program, by its whole path."""
    script = Path(sys.executable).with_name("exo")
    return [str(script)] if script.exists() else [sys.executable, "-m", "exo.cli.main"]


def _node_flags(flags: list[str]) -> list[str]:
    """Checked now: a service that cannot start tells nobody.

    Raises:
        InvalidRequest: one is none of a node's, or a key, which a unit would show to all.
    """
    from exo.cli.main import build_parser

    flags = flags[1:] if flags[:1] == ["--"] else flags
    if any(flag.split("=")[0] == "--api-key" for flag in flags):
        raise InvalidRequest("a key in a unit can be read by others: use --api-key-file FILE")
    args, unknown = build_parser().parse_known_args(flags)
    if unknown or args.command:
        raise InvalidRequest(f"a service is a node: {shlex.join(unknown or [args.command])}?")
    if cluster_key(args) and args.cluster_key_file is None:
        raise InvalidRequest(
            f"{CLUSTER_KEY} is set, and a service does not see it: use --cluster-key-file FILE"
        )
    api_keys(args)
    return _with_whole_paths(flags)


def _with_whole_paths(flags: list[str]) -> list[str]:
    """A service starts in another folder."""
    apart: list[str] = []
    for flag in flags:
        name = flag.partition("=")[0]
        apart += flag.split("=", 1) if name in _FILES else [flag]
    pairs = zip(["", *apart], apart, strict=False)
    return [str(Path(f).expanduser().resolve()) if name in _FILES else f for name, f in pairs]


def _environment() -> list[tuple[str, str]]:
    return [(name, os.environ[name]) for name in _KEPT if os.environ.get(name)]


def _quoted(text: str) -> str:
    """As systemd.syntax(7) reads it: in quotes, its specifiers and variables doubled."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'


def _installed(file: Path) -> None:
    if not file.exists():
        raise InvalidRequest("no service is installed: exo service install")


def _run(*command: str, may_fail: bool = False) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise ExoError(f"{command[0]} is not on this machine: start `exo` as you like") from error
    if done.returncode and not may_fail:
        raise ExoError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")


def _show(*command: str) -> int:
    return subprocess.run(command, check=False).returncode


def _say(text: str) -> None:
    print(text)  # noqa: T201
