"""What happened when, as an SVG: a row for each who, bars for what lasted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

ROW, LABEL, WIDTH, BAR = 22, 80, 1100, 12
COLOURS = {"answer": "#7fb48a", "fault": "#d1495b", "pause": "#edae49", "lost": "#222222"}


@dataclass(frozen=True)
class Bar:
    """From `began` to `ended` in seconds; `kind` names its colour."""

    began: float
    ended: float
    kind: str
    text: str = ""


def timeline(rows: Mapping[str, Sequence[Bar]]) -> str:
    """One row each, in their order, over one axis of seconds."""
    total = max((bar.ended for bars in rows.values() for bar in bars), default=1.0)
    scale, height = (WIDTH - LABEL - 10) / total, ROW * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    step = next(s for s in (1, 2, 5, 10, 20, 60, 120, 300, 600, 3600) if total / s <= 20)
    for second in range(0, int(total) + 1, step):
        x = LABEL + second * scale
        parts.append(f'<path d="M{x:.1f} {ROW}V{height - ROW}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{ROW - 8}" fill="#666666">{second} s</text>')
    for index, (name, bars) in enumerate(rows.items()):
        y = ROW * (index + 1) + 5
        parts.append(f'<text x="4" y="{y + BAR - 2}">{escape(name)}</text>')
        for bar in sorted(bars, key=lambda bar: bar.kind != "answer"):
            x, width = LABEL + bar.began * scale, max(1.5, (bar.ended - bar.began) * scale)
            title = f"<title>{escape(bar.text)}</title>" if bar.text else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{COLOURS[bar.kind]}" stroke="#ffffff" stroke-width="0.5">{title}</rect>'
            )
            if bar.kind == "fault":
                parts.append(
                    f'<text x="{x + width + 2:.1f}" y="{y + BAR - 2}" font-size="9" '
                    f'fill="#555555">{escape(bar.text)}</text>'
                )
    y = height - 6
    for index, (kind, colour) in enumerate(COLOURS.items()):
        x = LABEL + index * 90
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])
