"""`exo update`: whether there is a newer exo than this one, what is new in it, how to get it.

It changes nothing: `git fetch` brings to a clone's store what others have, and leaves its files.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import exo
from exo.errors import ExoError

ASK_S = 60.0
"""As long may the place asked take to answer."""

SHOWN = 12
"""Lines of what is new."""


@dataclass(frozen=True)
class Found:
    """What a clone knows of itself and of the branch it follows."""

    version: str
    commit: str
    followed: str  # "origin/main"
    newer: int  # commits that it has and this clone has not
    own: int  # commits of this clone's own
    is_changed: bool  # files of it, by hand
    news: list[str]


def update(args: argparse.Namespace) -> int:
    """Tell it; 1, on stderr, if nobody can."""
    root = Path(exo.__file__).resolve().parents[1]
    found = look(root)
    if args.json:
        _say(json.dumps(asdict(found)))
        return 0
    here = f"exo {found.version} ({found.commit})"
    if not found.newer:
        _say(f"{here}: there is nothing newer in {found.followed}")
        return 0
    _say(f"{here}: {found.followed} is {_commits(found.newer)} ahead")
    for line in found.news[:SHOWN]:
        _say(f"  {line}")
    if len(found.news) > SHOWN:
        _say(f"  and {len(found.news) - SHOWN} lines more in CHANGELOG.md")
    if found.own or found.is_changed:
        _say("this clone has changes of its own, for you to bring together with those")
    clone, script = (shlex.quote(str(path)) for path in (root, root / "scripts" / "exo"))
    _say(f"to update: exo drain; git -C {clone} pull && {script} --version; then start it again")
    return 0


def look(root: Path) -> Found:
    """Ask the remote of the branch that the clone at `root` follows.

    Raises:
        ExoError: it is no clone, follows nothing, or the remote does not answer.
    """
    if not (root / ".git").exists():
        raise ExoError(
            f"exo {exo.__version__} is installed as a package: what installed it knows what is "
            "newer (pip install --upgrade, uv tool upgrade or pipx upgrade)"
        )
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    remote = _git(root, "config", "--default", "", f"branch.{branch}.remote")
    if not remote:
        raise ExoError(
            f"the clone at {root} is at {branch}, which follows no branch of another repository: "
            "git switch main, or git branch --set-upstream-to=origin/main"
        )
    print(f"asking {remote} what is newer", file=sys.stderr, flush=True)  # noqa: T201
    _git(root, "fetch", "--quiet", remote)
    followed = _git(root, "rev-parse", "--abbrev-ref", "HEAD@{upstream}")
    own, newer = _git(root, "rev-list", "--left-right", "--count", f"HEAD...{followed}").split()
    return Found(
        version=exo.__version__,
        commit=_git(root, "log", "-1", "--format=%h of %cs"),
        followed=followed,
        newer=int(newer),
        own=int(own),
        is_changed=bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        news=_news(root, followed) if int(newer) else [],
    )


def _news(root: Path, followed: str) -> list[str]:
    """Lines that the followed branch's changelog has and this one's has not; if there are none,
    what its commits are named."""
    changed = _git(root, "diff", "--unified=0", f"HEAD...{followed}", "--", "CHANGELOG.md")
    lines = [line[1:].rstrip() for line in changed.splitlines() if line.startswith("+")]
    lines = [line for line in lines if line and not line.startswith("++")]
    return lines or _git(root, "log", "--format=- %s", f"HEAD..{followed}").splitlines()


def _git(root: Path, *arguments: str) -> str:
    command = ("git", "-C", str(root), *arguments)
    # A question nobody sees would be waited for.
    environment = os.environ | {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_S, check=False, env=environment
        )
    except FileNotFoundError as error:
        raise ExoError("git is not on this machine: install it to ask what is newer") from error
    except subprocess.TimeoutExpired as error:
        raise ExoError(f"no answer to git {arguments[0]} in {ASK_S:.0f} s: try again") from error
    if done.returncode:
        why = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise ExoError(f"git {arguments[0]} in {root}: {why}")
    return done.stdout.strip()


def _commits(number: int) -> str:
    return "1 commit" if number == 1 else f"{number} commits"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
