"""`exo doctor`: what is wrong here, and the one thing to do about each."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import platform
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console

from exo import __version__
from exo.cli.client import get_json
from exo.cli.doctor.cluster import cluster
from exo.cli.doctor.finding import Finding
from exo.cli.doctor.machine import machine
from exo.cli.doctor.models import damaged, hub
from exo.cli.settings import home
from exo.errors import PeerUnavailable

_SIGNS = {"ok": "[green]ok[/]   ", "note": "[yellow]note[/] ", "wrong": "[red]wrong[/]"}


def doctor(args: argparse.Namespace) -> int:
    """1 if something is wrong."""
    view = _view(args.chatgpt_api_port)
    console = Console(soft_wrap=True, quiet=args.json, highlight=False)
    found = []
    for finding in _findings(args, view):
        found.append(finding)
        console.print(f"{_SIGNS[finding.level]}  {finding.check}: ", finding.text, sep="")
        if finding.mend:
            console.print(f"         [dim]→ {finding.mend}[/]")
    if args.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))  # noqa: T201
    if args.bundle:
        _write(args.bundle, found, view)
        console.print(f"\nfor a bug report: {args.bundle} (look into it: names of this machine)")
    return 1 if any(finding.level == "wrong" for finding in found) else 0


def _view(port: int) -> dict[str, Any] | None:
    try:
        view: dict[str, Any] = asyncio.run(get_json(port, "/v1/topology"))
    except PeerUnavailable:
        return None
    return view


def _findings(args: argparse.Namespace, view: dict[str, Any] | None) -> Iterator[Finding]:
    yield Finding(
        "exo", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    yield from machine(home(), args.inference_engine, tuple(args.interface))
    if view is None:
        text = f"no node answers on port {args.chatgpt_api_port}: the cluster was not looked at"
        yield Finding("cluster", "note", text, "start `exo`, and run `exo doctor` beside it")
    else:
        yield from cluster(view)
    yield from hub()
    if args.verify:
        yield from damaged()


def _write(path: Path, found: list[Finding], view: dict[str, Any] | None) -> None:
    """Nothing of the environment, no keys, no conversations."""
    parts = {
        "findings.json": [asdict(finding) for finding in found],
        "topology.json": view,
        "packages.json": sorted(f"{d.name} {d.version}" for d in distributions()),
    }
    with tarfile.open(path, "w:gz") as bundle:
        for name, content in parts.items():
            data = json.dumps(content, indent=2).encode()
            entry = tarfile.TarInfo(f"exo-doctor/{name}")
            entry.size = len(data)
            bundle.addfile(entry, io.BytesIO(data))
