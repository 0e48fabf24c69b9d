"""How a page looks beside how it looked: pictures an eighth as large, so that a word, a number or a
font more or less is nothing and a panel, a color or a column is much.

EXO_LOOKS=new keeps what is seen as what is right, in tests/looks/: look at it before committing.
EXO_SHOTS=FOLDER keeps whole pictures to look at.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from PIL import Image, ImageChops

LOOKS = Path(__file__).parent / "looks"

SHRUNK = 8
UNLIKE = 12
"""Of 255, in one color of a small picture's point."""

MOST = 0.02
"""Of the points, that may be unlike."""


def compare(picture: bytes, name: str) -> None:
    """Fails if a screenshot is unlike the kept one of that name; says where the new one is."""
    if folder := os.environ.get("EXO_SHOTS"):
        (Path(folder) / f"{name}.png").write_bytes(picture)
    seen = _small(picture)
    kept = LOOKS / f"{name}.png"
    if os.environ.get("EXO_LOOKS") == "new":
        LOOKS.mkdir(exist_ok=True)
        seen.save(kept, optimize=True)
        return
    share = unlike(seen, Image.open(kept).convert("RGB"))
    if share > MOST:
        new = Path(os.environ.get("EXO_SHOTS", ".")) / f"{name}-unlike.png"
        new.write_bytes(picture)
        raise AssertionError(f"{share:.0%} of {name} looks otherwise than {kept}: see {new}")


def unlike(one: Image.Image, other: Image.Image) -> float:
    """The share of points that differ."""
    if one.size != other.size:
        return 1.0
    red, green, blue = ImageChops.difference(one, other).split()
    most = ImageChops.lighter(ImageChops.lighter(red, green), blue).histogram()
    return sum(most[UNLIKE:]) / sum(most)


def _small(picture: bytes) -> Image.Image:
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    size = (whole.width // SHRUNK, whole.height // SHRUNK)
    return whole.resize(size, Image.Resampling.BOX)
