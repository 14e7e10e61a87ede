"""Draw boxes, arrows, lines and bars as SVG.

Colors are classes of guide/static/guide.css (`c0` to `c5`, `ink`, `faint`, `frame`), so that a
figure inlined in a page follows its light or dark palette.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FONT = 13
LINE = 18  # from one line of a box to the next, in pixels
LETTER = 6.4  # estimated width of a character, in pixels


@dataclass
class Svg:
    """A drawing of a fixed size, in pixels."""

    width: float
    height: float
    label: str  # for readers who cannot see it
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, kind: str, radius: float = 2) -> None:
        size = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"'
        self.parts.append(f'<rect {size} class="{kind}"/>')

    def text(
        self, x: float, y: float, text: object, kind: str = "ink", anchor: str = "middle"
    ) -> None:
        """y is the middle of the line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y + 0.35 * FONT:g}" text-anchor="{anchor}" class="{kind}">'
            f"{html.escape(str(text))}</text>"
        )

    def box(
        self, x: float, y: float, w: float, h: float, kind: str, *lines: object, radius: float = 4
    ) -> None:
        """Draw a rectangle with lines of text in its middle."""
        self.rect(x, y, w, h, kind, radius)
        for i, line in enumerate(lines):
            below = LINE * (i - (len(lines) - 1) / 2)
            self.text(x + w / 2, y + h / 2 + below, line, "faint" if kind == "idle" else "on")

    def cell(self, x: float, y: float, size: float, kind: str, text: object = "") -> None:
        self.box(x + 0.5, y + 0.5, size - 1, size - 1, kind, text, radius=2)

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{kind}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.line((x, y), (to_x, to_y))
        angle = math.degrees(math.atan2(to_y - y, to_x - x))
        turned = f"translate({to_x:g} {to_y:g}) rotate({angle:g})"
        self.parts.append(f'<polygon points="0,0 -7,3 -7,-3" transform="{turned}" class="tip"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3" class="{kind}"/>')

    def legend(self, x: float, y: float, names: dict[str, str]) -> None:
        """Draw the name of each color, from left to right."""
        for kind, name in names.items():
            self.rect(x, y, 14, 14, kind)
            self.text(x + 20, y + 7, name, anchor="start")
            x += 34 + LETTER * len(name)
        self.width = max(self.width, x)

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        title = f"<title>{html.escape(self.label)}</title>"
        return f'<svg {size} class="drawing" role="img">{title}{"".join(self.parts)}</svg>'


def plot(
    series: dict[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    label: str,
    ticks: tuple[Sequence[float], Sequence[float]],
    log_y: bool = False,
) -> Svg:
    """Draw lines over a logarithmic x, with markers if they have few points, and their names."""
    width, height, left, bottom = 560, 300, 58, 42
    svg = Svg(width + 150, height, label)
    xs, ys = ticks
    scale = math.log if log_y else float

    def at(x: float, y: float) -> tuple[float, float]:
        u = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        v = (scale(y) - scale(ys[0])) / (scale(ys[-1]) - scale(ys[0]))
        return left + u * (width - left - 10), 30 + (1 - v) * (height - bottom - 30)

    for y in ys:
        svg.line(at(xs[0], y), at(xs[-1], y), kind="grid")
        svg.text(left - 8, at(xs[0], y)[1], f"{y:g}", "faint", "end")
    for x in xs:
        svg.text(at(x, ys[0])[0], height - bottom + 14, f"{x:g}", "faint")
    svg.text((left + width) / 2, height - 10, x_label)
    svg.text(4, 8, y_label, anchor="start")
    ends = []
    for i, (name, points) in enumerate(series.items()):
        svg.line(*(at(*point) for point in points), kind=f"line s{i}")
        for point in points if len(points) < 20 else ():
            svg.dot(*at(*point), f"c{i}")
        ends.append((at(*points[-1])[1], name, f"c{i}"))
    lowest = math.inf
    for y, name, kind in sorted(ends, reverse=True):  # from the bottom, without overlap
        lowest = min(y, lowest - FONT - 2)
        svg.text(width + 2, lowest, name, kind, "start")
    return svg


def bars(
    rows: Sequence[tuple[str, float]], unit: str, label: str, kinds: Sequence[str] = ("c0",)
) -> Svg:
    """Draw horizontal bars with their values."""
    most = max(value for _, value in rows)
    left = 12 + LETTER * max(len(name) for name, _ in rows)
    svg = Svg(left + 400, 12 + 28 * len(rows), label)
    for i, (name, value) in enumerate(rows):
        y = 8 + 28 * i
        svg.text(left - 8, y + 10, name, anchor="end")
        svg.rect(left, y, max(1.0, 290 * value / most), 20, kinds[i % len(kinds)])
        shown = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:#.3g}"
        svg.text(left + 6 + 290 * value / most, y + 10, f"{shown} {unit}", anchor="start")
    return svg
