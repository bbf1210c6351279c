"""Draws some SMs of a trace of `nanok3 trace` as an SVG: one row an SM, a colour an op, waits grey.

    python scripts/draw_trace.py TRACE.json OUT.svg [FIRST_OP [SMS]]

From the second time that an op named FIRST_OP (attn_res) begins on SM 0 to the third.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

WIDTH, ROW, TOP, LEFT = 1120, 12, 40, 40
COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1"),
    *("#ff9da7", "#9c755f", "#86bcb6", "#d37295", "#a0cbe8", "#8cd17d"),
)


def window(spans: list[dict[str, Any]], first_op: str) -> tuple[float, float]:
    own = [s for s in spans if s["tid"] == 0]
    begins = [
        s["ts"]
        for before, s in pairwise(own)
        if s["args"]["op"] == first_op and before["args"]["op"] != first_op
    ]
    return begins[1], begins[2]


def draw(spans: list[dict[str, Any]], first_op: str, every: int) -> str:
    begin, end = window(spans, first_op)
    shown = [
        s for s in spans if s["ts"] + s["dur"] > begin and s["ts"] < end and s["tid"] % every == 0
    ]
    ops = list(dict.fromkeys(s["args"]["op"] for s in shown if s["tid"] == 0))
    colour = {op: COLOURS[i % len(COLOURS)] for i, op in enumerate(ops)}
    scale = (WIDTH - LEFT) / (end - begin)
    sms = sorted({s["tid"] for s in shown})
    height = TOP + ROW * len(sms) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="14">one layer, {end - begin:.1f} us; a row an SM; grey: waits</text>',
    ]
    for s in shown:
        left = max(s["ts"], begin)
        width = (min(s["ts"] + s["dur"], end) - left) * scale
        fill = "#dddddd" if s["name"] == "wait" else colour.get(s["args"]["op"], "black")
        y = TOP + ROW * sms.index(s["tid"])
        parts.append(
            f'<rect x="{LEFT + (left - begin) * scale:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{ROW - 1}" fill="{fill}"/>'
        )
    for sm in sms:
        parts.append(f'<text x="2" y="{TOP + ROW * sms.index(sm) + 10}">SM {sm}</text>')
    for i, op in enumerate(ops):
        x, y = LEFT + i % 7 * 150, height - 44 + i // 7 * 18
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour[op]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{op}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    source, target, *rest = sys.argv[1:]
    events = json.loads(Path(source).read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    first_op, every = (rest + ["attn_res", "6"][len(rest) :])[:2]
    Path(target).write_text(draw(spans, first_op, int(every)))


if __name__ == "__main__":
    main()
