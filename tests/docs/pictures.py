"""The pictures of docs/architecture.md: the rooms, and the path of a graph through them.

``pytest tests/docs --update-golden`` writes them. Which room imports which is read from the rule that
tests/house/test_layers.py enforces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

# A room's colour, in both pictures.
COLOURS = {
    "ir": "#fde7b0", "scheduler": "#cfe8cf", "codegen": "#cfe0f5", "runtime": "#e3d5f0",
    "dynamo_backend": "#f7d3cc", "torch": "#eeeeee",
}  # fmt: skip
_FONT = 'font-family="DejaVu Sans, Verdana, sans-serif" fill="#222222"'


@dataclass(slots=True)
class Drawing:
    """An SVG picture, drawn a shape after another; lengths are pixels, y goes down."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        room: str,
        title: str,
        lines: Sequence[str] = (),
        bold: bool = True,
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{COLOURS[room]}" stroke="#555555"/>'
        )
        top = y + h / 2 - 8 * len(lines) + 5
        self.text(x + w / 2, top, title, 14, True)
        for number, line in enumerate(lines, 1):
            self.text(x + w / 2, top + 2 + 16 * number, line, 12)

    def text(self, x: float, y: float, text: str, size: int = 12, bold: bool = False, anchor: str = "middle") -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}"{weight} text-anchor="{anchor}" {_FONT}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        way = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{way}" fill="none" stroke="#555555" marker-end="url(#tip)"/>')

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {self.height}">'
        tip = (
            '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            '<path d="M0,0 L9,4 L0,8 z" fill="#555555"/></marker></defs>'
        )
        paper = f'<rect {size} rx="10" fill="#ffffff"/>'
        return "\n".join([head, tip, paper, *self.parts, "</svg>", ""])


# What each room holds: x, y and width of its box, and two lines.
_ROOMS: Mapping[str, tuple[int, int, int, tuple[str, str]]] = {
    "dynamo_backend": (20, 20, 660, ("torch in, callable out: entry, ATen passes, importing, converters,",
                                     "repeats, reports, explain, the command line, the demo")),
    "runtime": (20, 130, 660, ("text to machine code, loading, launching, caches, settings,",
                               "processes that compile and measure, CUDA graphs")),
    "scheduler": (20, 240, 320, ("graph passes, fusion, calls,", "schedules, rules, tuning, costs")),
    "codegen": (360, 240, 320, ("scheduled loops to text: Triton,", "LLVM IR; the host program")),
    "ir": (20, 350, 660, ("expressions, graphs, tensor functions, loop nests, monoids;",
                          "printer, parser, verifier, oracle; targets")),
}  # fmt: skip


def rooms(may_import: Mapping[str, set[str]]) -> str:
    """The rooms, each above those that it may import, with an arrow to the ones right below it."""
    picture = Drawing(700, 450)
    for room, (x, y, w, lines) in _ROOMS.items():
        picture.box(x, y, w, 80, room, f"{room}/", lines)
    for room, (x, y, w, _) in _ROOMS.items():
        for other in sorted(may_import[room] & set(_ROOMS)):
            left, below, width, _ = _ROOMS[other]
            if below - y == 110:
                middle = max(x, left) + min(w, width) / 2
                picture.arrow((middle, y + 80), (middle, below))
    return str(picture)


def path() -> str:
    """What a graph is, stage after stage, from Dynamo's to a function that can be called."""
    picture = Drawing(760, 560)

    def stage(x: int, y: int, room: str, title: str, *lines: str, w: int = 200) -> None:
        picture.box(x, y, w, 62, room, title, lines)

    stage(20, 20, "torch", "FX graph", "Dynamo has captured it")
    stage(280, 20, "dynamo_backend", "ATen graphs", "AOTAutograd, ATen passes,", "forward and backward apart")
    stage(540, 20, "dynamo_backend", "Graph", "import: a converter an op")
    picture.arrow((220, 51), (280, 51))
    picture.arrow((480, 51), (540, 51))
    stage(540, 130, "scheduler", "Graph", "after the graph passes")
    picture.arrow((640, 82), (640, 130))
    stage(280, 130, "scheduler", "calls", "fuse: kernels and libraries")
    picture.arrow((540, 161), (480, 161))
    picture.text(130, 236, "once a kernel", 12, True)
    picture.text(630, 236, "once a graph", 12, True)
    stage(60, 255, "scheduler", "tensor functions", "stages over one domain", w=280)
    stage(420, 255, "scheduler", "calls in order", "few launches, little memory", w=280)
    picture.arrow((340, 192), (200, 255))
    picture.arrow((420, 192), (560, 255))
    stage(60, 345, "scheduler", "loop nest, schedule", "lower; by hand, from the database, by rule", w=280)
    picture.arrow((200, 317), (200, 345))
    stage(60, 435, "codegen", "Triton source or LLVM IR", "emit; compiled by the runtime", w=280)
    picture.arrow((200, 407), (200, 435))
    stage(420, 345, "codegen", "steps of the host program", "memory planned", w=280)
    picture.arrow((560, 317), (560, 345))
    stage(420, 435, "codegen", "host program", "Python text or LLVM IR", w=280)
    picture.arrow((560, 407), (560, 435))
    picture.box(240, 515, 280, 34, "runtime", "a function, kept in the cache")
    picture.arrow((200, 497), (200, 532), (240, 532))
    picture.arrow((560, 497), (560, 532), (520, 532))
    return str(picture)
