"""Pictures of the two kinds that docs/ has, drawn as SVG, so that a page needs no script for them.

GitHub draws the same ```` ```mermaid ```` blocks by itself.
"""

import re
from collections.abc import Sequence
from html import escape

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINE, BOX, GAP = 22, 30, 58  # heights, in pixels
ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


def drawn(text: str) -> str:
    """Return a page with its pictures drawn."""
    return BLOCK.sub(lambda found: _draw(found[1].strip().splitlines()), text)


def _draw(lines: Sequence[str]) -> str:
    kinds = {"flowchart TD": layers, "sequenceDiagram": sequence}
    width, height, parts = kinds[lines[0].strip()]([line.strip() for line in lines[1:]])
    body = "".join([ARROW, *parts])
    return (
        f'<div class="picture"><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{height}" width="{width}" height="{height}" role="img">{body}</svg></div>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, style: str = "box") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{style}"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str = "arrow") -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{style}" '
        f'marker-end="url(#tip)"/>'
    )


def layers(lines: Sequence[str]) -> tuple[int, int, list[str]]:
    """Draw `a --> b`: each name in a row above all that it points to."""
    arrows = [tuple(line.split(" --> ")) for line in lines]
    depth = dict.fromkeys(sorted({name for arrow in arrows for name in arrow}), 0)
    for _ in depth:
        for above, below in arrows:
            depth[below] = max(depth[below], depth[above] + 1)
    rows = [[n for n in depth if depth[n] == k] for k in range(max(depth.values()) + 1)]
    wide, width = 104, 124 * max(map(len, rows))
    at = {}
    for k, row in enumerate(rows):
        for n, name in enumerate(row):
            at[name] = (width * (n + 0.5) / len(row), k * GAP + 2)
    parts = []
    for above, below in arrows:
        (x1, y1), (x2, y2) = at[above], at[below]
        parts.append(_line(x1, y1 + BOX, x2, y2 - 1))
    for name, (x, y) in at.items():
        parts += [_box(x - wide / 2, y, wide, BOX), _text(x, y + 20, name)]
    return width, (len(rows) - 1) * GAP + BOX + 4, parts


MESSAGE = re.compile(r"(\w+)(-->>|->>)(\w+): (.+)")


def sequence(lines: Sequence[str]) -> tuple[int, int, list[str]]:
    """Draw who says what to whom, one line below the other; `loop` and `end` are a frame."""
    heads = (re.fullmatch(r"participant (\w+)(?: as (.+))?", line) for line in lines)
    names = {head[1]: head[2] or head[1] for head in heads if head}
    step, y = 170, 2 * BOX
    at = {name: 85 + step * k for k, name in enumerate(names)}
    width = step * len(names)
    parts: list[str] = []
    loops: list[tuple[int, int, str]] = []
    for line in lines:
        found = MESSAGE.fullmatch(line)
        if found:
            y += LINE + 14
            x1, x2 = at[found[1]], at[found[3]]
            style = "arrow dashed" if found[2] == "-->>" else "arrow"
            parts += [_line(x1, y, x2, y, style), _text((x1 + x2) / 2, y - 6, found[4], style="s")]
        elif line.startswith("Note over "):
            who, _, said = line.removeprefix("Note over ").partition(": ")
            y += LINE + 18
            wide = 7 * len(said) + 16
            x = min(max(at[who], wide / 2), width - wide / 2)
            parts += [_box(x - wide / 2, y - 18, wide, 26, "note"), _text(x, y, said, style="s")]
        elif line.startswith("loop "):
            y += LINE + 8
            loops.append((y - 8, len(loops), line.removeprefix("loop ")))
            y += 10
        elif line == "end":
            y += 14
            top, inset, said = loops.pop()
            left = 4 + 10 * inset
            parts += [
                _box(left, top, width - 2 * left, y - top, "frame"),
                _text(left + 6, top + 15, said, "start", "s frame-title"),
            ]
    top_row = []
    for name, shown in names.items():
        top_row += [
            f'<line x1="{at[name]}" y1="{BOX}" x2="{at[name]}" y2="{y + 16}" class="life"/>',
            _box(at[name] - 80, 2, 160, BOX),
            _text(at[name], 22, shown),
        ]
    return width, y + 20, top_row + parts
