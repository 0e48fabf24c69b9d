"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """`check` is what was looked at, `mend` the one thing to do; empty where nothing is to be
    done."""

    check: str
    level: Level
    text: str
    mend: str = ""
