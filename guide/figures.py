"""Draw the figures of the guide as SVG.

Colors are classes of guide/static/guide.css (`c0` to `c5`, `ink`, `faint`, `frame`), so that a
figure inlined in a page follows its light or dark palette. Numbers come from the project's code.
"""

import html
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import answers
import facts
import numpy as np
import pages
from answers import ROOT, Schedule

import hardware
import utils
from dataset import permute

FONT = 13
LETTER = 7.3  # estimated width of a character, in pixels


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

    def line(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{kind}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.line([(x, y), (to_x, to_y)])
        angle = math.atan2(to_y - y, to_x - x)
        corners = [(to_x, to_y)]
        corners += [
            (to_x - 8 * math.cos(angle + turn), to_y - 8 * math.sin(angle + turn))
            for turn in (0.4, -0.4)
        ]
        path = " ".join(f"{a:g},{b:g}" for a, b in corners)
        self.parts.append(f'<polygon points="{path}" class="tip"/>')

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        title = f"<title>{html.escape(self.label)}</title>"
        return f'<svg {size} class="drawing" role="img">{title}{"".join(self.parts)}</svg>'


# --- schedules ------------------------------------------------------------------------------------

CELL = 22


def schedule(sizes: tuple[int, int, int], left: float = 60) -> str:
    """Draw which microbatch each rank runs in each tick: forward above, backward below."""
    s = Schedule(*sizes)
    pipeline, virtual, microbatches = sizes
    row = 2 * CELL + 6
    label = (
        f"Schedule of {pipeline} ranks and {microbatches} microbatches, chunks a rank: {virtual}"
    )
    svg = Svg(left + s.ticks * CELL + 6, pipeline * row + 50, label)
    for rank in range(pipeline):
        y = rank * row
        svg.text(left - 8, y + CELL, f"rank {rank}", anchor="end")
        for tick in range(s.ticks):
            tasks = {way: (chunk, m) for way, chunk, m in s.tasks_at(tick, rank)}
            for i, way in enumerate(("fwd", "bwd")):
                x, top = left + tick * CELL, y + i * CELL
                if way in tasks:
                    chunk, m = tasks[way]
                    svg.rect(x + 0.5, top + 0.5, CELL - 1, CELL - 1, f"{way}{min(chunk, 3)}")
                    svg.text(x + CELL / 2, top + CELL / 2, m, "on")
                else:
                    phases = [p for p in s.phases if p[0] <= tick < p[1]]
                    if phases[0][2 + i]:  # the phase runs this direction: an idle slot
                        svg.rect(x + 0.5, top + 0.5, CELL - 1, CELL - 1, "idle")
    y = pipeline * row + 8
    for tick in range(s.ticks):
        svg.text(left + (tick + 0.5) * CELL, y, tick, "faint")
    svg.text(left - 8, y, "tick", "faint", "end")
    x = left
    kinds = [("fwd0", "forward"), ("bwd0", "backward")]
    if virtual > 1:
        kinds = [(f"{w}{c}", f"{n}, chunk {c}") for c in range(virtual) for w, n in
                 (("fwd", "forward"), ("bwd", "backward"))]  # fmt: skip
    for kind, name in [*kinds, ("idle", "idle slot")]:
        svg.rect(x, y + 16, 14, 14, kind)
        svg.text(x + 20, y + 23, name, anchor="start")
        x += 34 + LETTER * len(name)
    svg.width = max(svg.width, x)
    return str(svg)


def plot(
    series: dict[str, list[tuple[float, float]]],
    x_label: str,
    y_label: str,
    label: str,
    ticks: tuple[Sequence[float], Sequence[float]],
    text: Callable[[float], str] = "{:g}".format,
    logarithmic: bool = False,
    markers: bool = True,
) -> str:
    """Draw lines with markers, and their names at their ends."""
    width, height, left, bottom = 560, 300, 58, 42
    svg = Svg(width + 150, height, label)
    xs, ys = ticks
    scale = math.log if logarithmic else float

    def at(x: float, y: float) -> tuple[float, float]:
        u = (math.log(x) - math.log(xs[0])) / (math.log(xs[-1]) - math.log(xs[0]))
        v = (scale(y) - scale(ys[0])) / (scale(ys[-1]) - scale(ys[0]))
        return left + u * (width - left - 10), 30 + (1 - v) * (height - bottom - 30)

    for y in ys:
        svg.line([at(xs[0], y), at(xs[-1], y)], "grid")
        svg.text(left - 8, at(xs[0], y)[1], text(y), "faint", "end")
    for x in xs:
        svg.text(at(x, ys[0])[0], height - bottom + 14, f"{x:g}", "faint")
    svg.text((left + width) / 2, height - 10, x_label)
    svg.text(4, 8, y_label, anchor="start")
    ends: list[tuple[float, str]] = []
    for i, (name, points) in enumerate(series.items()):
        svg.line([at(*p) for p in points], f"line s{i}")
        for p in points if markers or len(points) < 20 else ():
            x, y = at(*p)
            svg.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3" class="c{i}"/>')
        ends.append((at(*points[-1])[1], name))
    lowest = math.inf
    for y, name in sorted(ends, reverse=True):  # from the bottom, without overlap
        lowest = min(y, lowest - FONT - 2)
        kind = f"c{[*series].index(name)}"
        svg.text(width + 2, lowest, name, kind, "start")
    return str(svg)


def bubbles() -> str:
    series = {
        f"{v} chunk{'s' * (v > 1)} a rank": [
            (m, 100 * float(Schedule(4, v, m).bubble)) for m in (4, 8, 16, 32, 64)
        ]
        for v in (1, 2, 4)
    }
    return plot(
        series, "microbatches of a step", "idle slots, %", "Bubble of 4 pipeline ranks against the "
        "number of microbatches", ((4, 8, 16, 32, 64), (0, 10, 20, 30, 40, 50)),
    )  # fmt: skip


def in_flight() -> str:
    """Draw how many microbatches each rank holds residuals of: this executor, and 1F1B per rank."""
    s = Schedule(4, 1, 8)
    svg = Svg(430, 200, "Microbatches in flight: one program, and one for each rank")
    for rank in range(4):
        most = 2 * (s.pipeline - 1 - rank) + 1
        own = s.pipeline - rank
        y = 30 + 36 * rank
        svg.text(60, y + 12, f"rank {rank}", anchor="end")
        for i in range(s.ring_slots):
            svg.rect(72 + 26 * i, y, 24, 12, "c0" if i < most else "idle")
        for i in range(own):
            svg.rect(72 + 26 * i, y + 14, 24, 12, "c1")
        svg.text(
            72 + 26 * s.ring_slots + 8, y + 6, f"{most} of {s.ring_slots} slots", "ink", "start"
        )
    for x, kind, name in ((72, "c0", "one program"), (200, "c1", "a program for each rank")):
        svg.rect(x, 180, 14, 14, kind)
        svg.text(x + 20, 187, name, anchor="start")
    svg.text(72, 12, "microbatches whose residuals wait, at most", anchor="start")
    return str(svg)


# --- collectives ----------------------------------------------------------------------------------

RANKS = 4
BOX = 26


def _arrays(svg: Svg, x: float, y: float, cells: list[list[tuple[str, str]]]) -> None:
    """Draw one column of cells for each rank: (text, color)."""
    for rank, column in enumerate(cells):
        left = x + rank * (BOX + 10)
        svg.text(left + BOX / 2, y - 12, rank, "faint")
        for i, (text, kind) in enumerate(column):
            svg.rect(left, y + i * BOX, BOX - 1, BOX - 1, kind)
            if text:
                svg.text(
                    left + BOX / 2, y + i * BOX + BOX / 2, text, "on" if kind != "idle" else "faint"
                )


def collective(kind: str) -> str:
    """Draw what four ranks hold before and after a collective."""
    names = "abcd"
    own = [[(names[i] if i == rank else "", f"c{i}" if i == rank else "idle") for i in range(RANKS)]
           for rank in range(RANKS)]  # fmt: skip
    whole = [[(names[i], f"c{i}") for i in range(RANKS)] for _ in range(RANKS)]
    partial = [[(f"{names[i]}{rank}", f"c{i}") for i in range(RANKS)] for rank in range(RANKS)]
    summed = [[(f"Σ{names[i]}", f"c{i}") for i in range(RANKS)] for _ in range(RANKS)]
    scattered = [[(f"Σ{names[i]}" if i == rank else "", f"c{i}" if i == rank else "idle")
                  for i in range(RANKS)] for rank in range(RANKS)]  # fmt: skip
    sent = [[(f"{names[rank]}{i}", f"c{rank}") for i in range(RANKS)] for rank in range(RANKS)]
    received = [[(f"{names[i]}{rank}", f"c{i}") for i in range(RANKS)] for rank in range(RANKS)]
    moved = [[(names[(rank - 1) % RANKS], f"c{(rank - 1) % RANKS}")] for rank in range(RANKS)]
    single = [[(names[rank], f"c{rank}")] for rank in range(RANKS)]
    before, after = {
        "all_gather": (own, whole),
        "psum_scatter": (partial, scattered),
        "psum": (partial, summed),
        "all_to_all": (sent, received),
        "ppermute": (single, moved),
    }[kind]
    height = 24 + BOX * len(before[0]) + 8
    svg = Svg(400, height, f"What four ranks hold before and after {kind}")
    _arrays(svg, 10, 24, before)
    middle = 24 + BOX * len(before[0]) / 2
    svg.arrow(160, middle, 236, middle)
    _arrays(svg, 250, 24, after)
    return str(svg)


# --- meshes ---------------------------------------------------------------------------------------


def mesh() -> str:
    """Draw the eight devices of a (2, 2, 2) mesh with their coordinates."""
    svg = Svg(560, 250, "Eight devices as a mesh of fsdp, pipeline and tensor, two ranks each")
    for number in range(8):
        fsdp, pipeline, tensor = number // 4, number // 2 % 2, number % 2
        x, y = 70 + 250 * fsdp + 100 * tensor, 40 + 90 * pipeline
        svg.rect(x, y, 90, 62, f"c{pipeline}", 4)
        svg.text(x + 45, y + 20, f"device {number}", "on")
        svg.text(x + 45, y + 42, f"({fsdp}, {pipeline}, {tensor})", "on")
    for fsdp in range(2):
        svg.rect(62 + 250 * fsdp, 30, 206, 172, "frame", 6)
        svg.text(165 + 250 * fsdp, 14, f"fsdp rank {fsdp}")
        for tensor in range(2):
            svg.text(115 + 250 * fsdp + 100 * tensor, 218, f"tensor {tensor}", "faint")
    for pipeline in range(2):
        svg.text(56, 70 + 90 * pipeline, "first" if pipeline == 0 else "second", "faint", "end")
        svg.text(56, 84 + 90 * pipeline, "layers", "faint", "end")
    svg.text(280, 242, "coordinates: (fsdp, pipeline, tensor)", "faint")
    return str(svg)


def layer() -> str:
    """Draw one feed-forward layer with its communication on two tensor ranks."""
    svg = Svg(660, 208, "A feed-forward layer on two tensor ranks")
    steps = [
        ("x", "[b, t, D]", "c0"), ("all_gather", "tensor", ""), ("h", "[b, T, D]", "c1"),
        ("gate, up", "[D, f]", "c2"), ("down", "[f, D]", "c2"), ("psum_scatter", "tensor", ""),
        ("y", "[b, t, D]", "c0"),
    ]  # fmt: skip
    for rank in range(2):
        y = 34 + 92 * rank
        svg.text(4, y + 22, f"rank {rank}", anchor="start")
        x = 56.0
        for i, (name, shape, kind) in enumerate(steps):
            if kind:
                svg.rect(x, y, 78, 46, kind, 4)
                svg.text(x + 39, y + 15, name, "on")
                svg.text(x + 39, y + 32, shape, "on")
                x += 78
            else:
                svg.text(
                    x + 46, y - 10 if rank == 0 else y + 60, f"{name} over {shape}"[:24], "faint"
                )
                x += 92
            if i + 1 < len(steps) and kind and steps[i + 1][2]:
                svg.arrow(x + 1, y + 23, x + 13, y + 23)
                x += 14
    for x in (134 + 22, 134 + 92 + 78 + 14 + 78 + 14 + 78 + 22):
        svg.line([(x - 18, 57), (x + 66, 149)])
        svg.line([(x - 18, 149), (x + 66, 57)])
        svg.line([(x - 18, 57), (x + 66, 57)])
        svg.line([(x - 18, 149), (x + 66, 149)])
    return str(svg)


def bars(
    rows: list[tuple[str, float]], unit: str, label: str, kinds: Sequence[str] = ("c0",)
) -> str:
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
    return str(svg)


def gather_memory() -> str:
    names = ("weights", "weights in use", "gradients", "optimizer state", "one layer")
    rows = []
    for name in names:
        for gather in ("step", "layer"):
            rows.append((f"{name}, per {gather}", facts.plan(gather).memory[name] / 2**20))
    return bars(
        rows, "MiB", "Memory by part, with weights gathered per step or layer", ("c0", "c1")
    )


def traffic() -> str:
    sent: Counter = Counter()
    for t in facts.plan("step").traffic:
        sent[f"{t.cause} ({'+'.join(t.axes)})"] += t.sent_bytes / 1e6
    return bars(sent.most_common(10), "MB", "Bytes that a device sends in a step, by cause")


def windows() -> str:
    """Draw two windows of T = 6 over a row of tokens."""
    svg = Svg(560, 150, "Two windows of T = 6, each of seven tokens, over a stream of tokens")
    for i in range(14):
        x = 60 + 34 * i
        kind = "c2" if i == 6 else "c0" if i < 6 else "c1" if i < 13 else "idle"
        svg.rect(x, 56, 32, 32, kind)
        svg.text(x + 16, 72, i, "faint" if i > 12 else "on")
    for begin, y, kind, name in ((0, 30, "s0", "window 0"), (6, 114, "s1", "window 1")):
        left, right = 60 + 34 * begin, 60 + 34 * (begin + 7) - 2
        tip = 8 if y < 56 else -8
        svg.line([(left, y + tip), (left, y), (right, y), (right, y + tip)], f"line {kind}")
        svg.text((left + right) / 2, y - 12 if y < 56 else y + 14, name)
    svg.text(52, 72, "token", "faint", "end")
    return str(svg)


def permutation() -> str:
    """Draw which window is read at each position of two epochs."""
    size, cell = 24, 17
    svg = Svg(90 + size * cell, 2 * 92 + 24, "Windows in the order of two epochs")
    for epoch in range(2):
        top = 24 + 92 * epoch
        svg.text(4, top + 30, f"epoch {epoch}", anchor="start")
        for position, window in enumerate(permute(np.arange(size), size, 0, epoch)):
            x, height = 80 + cell * position, 4 + 3 * int(window)
            svg.rect(x, top + 76 - height, cell - 2, height, f"c{epoch}", 1)
    svg.text(80, 10, "height: number of the window; from left to right: position", "faint", "start")
    return str(svg)


def start() -> str:
    """Draw the start of two processes, with the points at which they wait."""
    svg = Svg(640, 210, "The start of a job of two processes, from left to right in time")
    boxes = [("check this host", 106), ("connect", 70), ("compare", 74), ("open data", 80)]
    boxes += [("weights", 70), ("steps", 60)]
    for process in range(2):
        y, x = 40 + 84 * process, 84.0
        svg.text(76, y + 20, f"process {process}", anchor="end")
        for i, (name, width) in enumerate(boxes):
            svg.rect(x, y, width, 40, f"c{i % 3}", 4)
            svg.text(x + width / 2, y + 20, name, "on")
            x += width + 14
    x = 84.0
    for name, width in boxes[:-1]:
        x += width
        if name != "check this host":
            svg.rect(x + 6, 26, 1, 152, "frame")
        x += 14
    svg.text(330, 194, "after each dashed line, all have done the part before it", "faint")
    return str(svg)


def mesh_chain() -> str:
    """Draw the meshes of a chain of resumed runs, with the differences of docs/measured.md."""
    document = (ROOT / "docs/measured.md").read_text()
    row = r"\| (\d+ to \d+) \| \d x \d \| (\(\d, \d, \d\)) \| \d \| \d \| (\S+) \|"
    svg = Svg(640, 112, "One run on five meshes")
    for i, (steps, mesh, difference) in enumerate(re.findall(row, document)):
        x = 10 + 126 * i
        svg.rect(x, 20, 104, 44, f"c{i % 5}", 4)
        svg.text(x + 52, 34, mesh, "on")
        svg.text(x + 52, 52, f"steps {steps}", "on")
        svg.text(x + 52, 84, f"{float(difference):.1e}" if float(difference) else "the same", "ink")
        if i:
            svg.arrow(x - 21, 42, x - 2, 42)
    svg.text(320, 104, "difference of a step's loss", "faint")
    return str(svg)


def kills() -> str:
    """Draw the kills of docs/measured.md by kind of work."""
    document = (ROOT / "docs/measured.md").read_text().partition("## Runs that are killed")[2]
    rows = []
    for kind in (
        "step",
        "save",
        "evaluation",
        "samples",
        "restore",
        "compile",
        "batch",
        "pictures",
    ):
        one, two = re.search(rf"\| {kind} \| (\d+) \| (\d+) \|", document).groups()
        rows.append((f"{kind}, of one", float(one)))
        rows.append((f"{kind}, of two", float(two)))
    return bars(rows, "kills", "Kills by the kind of work", ("c0", "c1"))


def interval() -> str:
    series = {}
    for save_s, hours in ((5, 6), (60, 6), (5, 48)):
        points = [30 * 2**i for i in range(10)]
        series[f"{save_s} s, every {hours} h"] = [
            (i, share) for i in points if (share := 100 * (save_s / i + i / (7200 * hours))) <= 20
        ]
    ticks = (30, 120, 480, 1920, 7680, 15360), (0, 5, 10, 15, 20)
    label = "Share of time that is lost against the interval of saves"
    return plot(series, "seconds between two saves", "time lost, %", label, ticks)


def merges(word: str = " function") -> str:
    """Draw the pieces of a word after each join."""
    steps = answers.merges(word)
    svg = Svg(90 + 24 * len(word) + 60, 12 + 30 * len(steps), f"The joins of {word.strip()}")
    for i, pieces in enumerate(steps):
        y, x = 8 + 30 * i, 90.0
        svg.text(82, y + 12, f"{i} joins" if i != 1 else "1 join", "faint", "end")
        for piece in pieces:
            width = 24 * len(piece) - 3
            svg.rect(x, y, width, 24, f"c{min(len(piece) - 1, 5)}")
            svg.text(x + width / 2, y + 12, piece.replace(" ", "\u2423"), "on")
            x += width + 3
    return str(svg)


def shards() -> str:
    """Draw files, splits, shards and the index of a preparation."""
    svg = Svg(640, 236, "Files are divided into splits, each split becomes shards and a record")
    columns = [("source", 60), ("splits", 210), ("shards and record", 370), ("index", 560)]
    for name, x in columns:
        svg.text(x, 12, name)
    rows = [(36, 46, "a, b, c.txt"), (92, 86, "large.jsonl"), (188, 40, "d.txt.gz")]
    for y, height, name in rows:
        svg.rect(14, y, 92, height, "c0", 4)
        svg.text(60, y + height / 2, name, "on")
    splits = [(36, 46), (92, 41), (137, 41), (188, 40)]
    for i, (y, height) in enumerate(splits):
        middle = y + height / 2
        svg.rect(170, y, 80, height, "c1", 4)
        svg.text(210, middle, f"split {i}", "on")
        svg.arrow(108, middle, 166, middle)
        svg.arrow(252, middle, 300, middle)
        for k in range(2):
            svg.rect(304 + 44 * k, middle - 13, 40, 26, "c2")
        svg.rect(400, middle - 13, 52, 26, "c3")
        svg.text(426, middle, "record", "on")
        svg.arrow(454, middle, 512, 132)
    svg.rect(516, 106, 96, 52, "c4", 4)
    svg.text(564, 132, "index.json", "on")
    return str(svg)


def vocabularies() -> str:
    """Draw the bytes per token of four tokenizers, from docs/measured.md."""
    document = " ".join((ROOT / "docs/measured.md").read_text().split())
    found = re.search(
        r"24\.0 MB, of which .*? with `sample`, `cl100k_base`, `o200k_base` and `p50k_base` "
        r"\(([\d,]+), ([\d,]+), ([\d,]+) and ([\d,]+) tokens\)",
        document, re.I,
    )  # fmt: skip
    names = ("sample, 4,096", "cl100k_base, 100,277", "o200k_base, 200,019", "p50k_base, 50,281")
    rows = [
        (name, 24e6 / int(count.replace(",", "")))
        for name, count in zip(names, found.groups(), strict=True)
    ]
    return bars([rows[i] for i in (0, 3, 1, 2)], "bytes", "Bytes per token, by vocabulary")


def preparation() -> str:
    """Draw the speed of a preparation, from docs/measured.md."""
    document = (ROOT / "docs/measured.md").read_text()
    rows = []
    for processes in (1, 2):
        for program, name in (("encode_ordinary", "tiktoken"), ("data/prepare.py", "prepare.py")):
            speed = re.search(rf"\| {processes} \| `{program}` \| ([\d.]+) \(", document)[1]
            unit = "process" if processes == 1 else "processes"
            rows.append((f"{name}, {processes} {unit}", float(speed)))
    return bars(rows, "M tokens/s", "Speed of a preparation", ("c0", "c1"))


def hosts() -> str:
    """Draw four hosts of four devices in a mesh of (4, 2, 2), and the sequences that each reads."""
    svg = Svg(640, 226, "Four hosts in a mesh of (4, 2, 2), and the sequences that each reads")
    for fsdp in range(4):
        x = 24 + 154 * fsdp
        svg.rect(x - 8, 34, 140, 122, "frame", 6)
        svg.text(x + 62, 20, f"host {fsdp}, fsdp rank {fsdp}")
        for pipeline, tensor in ((0, 0), (0, 1), (1, 0), (1, 1)):
            left, top = x + 64 * tensor, 42 + 56 * pipeline
            svg.rect(left, top, 60, 50, f"c{pipeline}", 4)
            svg.text(left + 30, top + 17, f"p {pipeline}", "on")
            svg.text(left + 30, top + 35, f"t {tensor}", "on")
        svg.text(x + 62, 174, f"reads {2 * fsdp} and {2 * fsdp + 1}")
    svg.text(
        320, 196, "sequences of a microbatch of 8; all four devices of a host need both", "faint"
    )
    svg.text(
        320, 214, "p: pipeline rank, t: tensor rank; the same color has the same layers", "faint"
    )
    return str(svg)


def rope_distance() -> str:
    distances = [2**i for i in range(13)]
    scores = answers.rope_scores(distances)
    return plot(
        {"128 numbers": list(zip(distances, scores, strict=True))},
        "distance of two positions", "score, over that at distance 0",
        "Score of a query and an equal key against their distance",
        (distances[::2], (-0.25, 0, 0.25, 0.5, 0.75, 1)),
    )  # fmt: skip


CACHES = ("jaxformer_1b", "llama_1b", "qwen3_moe_1b")


def cache_values() -> str:
    rows = []
    for name in CACHES:
        rows.append((name, float(answers.cached_values(name))))
        rows.append((f"{name}, plain", float(answers.plain_values(name))))
    return bars(rows, "", "Numbers that a layer caches of a token", ("c0", "idle"))


def latent_attention() -> str:
    """Draw what queries, keys and values of latent attention are computed from."""
    svg = Svg(620, 230, "Queries, keys and values of latent attention")
    svg.rect(10, 88, 96, 44, "c5", 4)
    svg.text(58, 102, "hidden", "on")
    svg.text(58, 119, "D", "on")
    middle = [("query latent, Q", 20, "c0"), ("latent, C", 96, "c1"), ("rotary key, R", 172, "c2")]
    right = [
        ("queries, H", 2, "c0", 0), ("rotated, R", 36, "c0", 0), ("keys, H", 84, "c1", 1),
        ("values, W", 118, "c1", 1), ("rotated, R", 178, "c2", 2),
    ]  # fmt: skip
    for name, y, kind in middle:
        svg.rect(190, y, 130, 30, kind, 4)
        svg.text(255, y + 15, name, "on")
        svg.arrow(108, 110, 186, y + 15)
    for y in (90, 166):
        svg.rect(184, y, 142, 42, "frame", 6)
    svg.text(255, 222, "framed: cached", "faint")
    svg.line([(360, 0), (360, 230)], "frame")
    for name, y, kind, source in right:
        svg.rect(400, y, 104, 28, kind, 4)
        svg.text(452, y + 14, name, "on")
        svg.arrow(322, middle[source][1] + 15, 396, y + 14)
        svg.text(512, y + 14, "for all heads" if source == 2 else "of each head", "faint", "start")
    return str(svg)


def token_path() -> str:
    """Draw one token that a router sends to two of eight experts, and the shared expert."""
    svg = Svg(620, 250, "One token, its router, two of eight experts and the shared expert")
    svg.rect(8, 104, 80, 40, "c5", 4)
    svg.text(48, 124, "token", "on")
    svg.rect(130, 104, 80, 40, "c0", 4)
    svg.text(170, 124, "router", "on")
    svg.arrow(90, 124, 126, 124)
    for e in range(8):
        y = 6 + 24 * e
        chosen = e in (2, 5)
        svg.rect(300, y, 120, 20, "c1" if chosen else "idle")
        svg.text(360, y + 10, f"expert {e}", "on" if chosen else "faint")
        if chosen:
            svg.arrow(212, 124, 296, y + 10)
            svg.arrow(422, y + 10, 516, 124)
            svg.text(232, y + (10 if e < 4 else 6), "0.6" if e < 4 else "0.4")
    svg.rect(300, 218, 120, 20, "c2")
    svg.text(360, 228, "shared", "on")
    svg.arrow(60, 146, 296, 228)
    svg.arrow(422, 228, 516, 140)
    svg.rect(520, 104, 90, 40, "c5", 4)
    svg.text(565, 124, "sum", "on")
    return str(svg)


LOADS, SLOTS, TILE = (11, 6, 5, 2), 8, 4  # of 24 tokens among four experts


def dispatch() -> str:
    """Draw 24 choices among four experts: with eight slots each, and in tiles of four."""
    svg = Svg(560, 300, "Choices with a fixed capacity, and in tiles")
    for e, load in enumerate(LOADS):
        x = 90 + 110 * e
        svg.text(x + 44, 10, f"expert {e}")
        for i in range(max(load, SLOTS)):
            kind = "idle" if i >= load else f"c{e}" if i < SLOTS else "frame"
            svg.rect(x + 22 * (i % 4), 24 + 22 * (i // 4), 20, 20, kind)
        tiles = -(-load // TILE)
        for i in range(tiles * TILE):
            kind = f"c{e}" if i < load else "idle"
            svg.rect(x + 22 * (i % 4), 150 + 26 * (i // 4), 20, 20, kind)
    dropped, slots = sum(max(0, n - SLOTS) for n in LOADS), SLOTS * len(LOADS)
    tiles = sum(-(-n // TILE) for n in LOADS)
    svg.text(82, 46, "capacity 8", anchor="end")
    svg.text(90, 112, f"{slots} rows, {dropped} choices dropped (dashed)", "faint", "start")
    svg.text(82, 160, "tiles of 4", anchor="end")
    svg.text(90, 266, f"{tiles * TILE} rows in {tiles} tiles, none dropped", "faint", "start")
    svg.text(90, 290, "gray: empty rows, which are computed too", "faint", "start")
    return str(svg)


def balance_bias() -> str:
    """Simulate the bias of a router whose experts start with different scores."""
    rng, E, K, speed = np.random.default_rng(0), 16, 2, 0.01
    favor, bias, loads = 0.5 * rng.normal(size=E), np.zeros(E), []
    for _ in range(128):
        scores = 1 / (1 + np.exp(-rng.normal(size=(1024, E)) - favor))
        chosen = np.argsort(-(scores + bias), axis=1)[:, :K]
        load = np.bincount(chosen.ravel(), minlength=E) * E / (K * len(scores))
        loads.append((load.max(), load.min()))
        bias += speed * np.sign(load.mean() - load)
    steps = (1, 2, 4, 8, 16, 32, 64, 128)
    series = {
        name: [(step, loads[step - 1][i]) for step in steps]
        for i, name in enumerate(("busiest", "least used"))
    }
    return plot(
        series, "step", "load over the mean", "Load of the busiest and least used of 16 experts",
        (steps, (0, 1, 2, 3, 4)),
    )  # fmt: skip


def singular_values() -> str:
    """Draw what five Newton-Schulz steps make of singular values."""
    values = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    series = {
        f"{steps} step{'s' * (steps > 1)}": [
            (v, answers.polynomial(v, steps)) for v in np.geomspace(values[0], 1, 200)
        ]
        for steps in (1, 3, 5)
    }
    return plot(
        series, "singular value, over the norm of the matrix", "after", "Singular values after "
        "Newton-Schulz steps", (values, (0, 0.25, 0.5, 0.75, 1, 1.25)), markers=False,
    )  # fmt: skip


def ladder() -> str:
    """Draw the validation loss of recipes by size, from docs/experiments.md."""
    rows, names = [], ("AdamW", "Muon for matrices", "Muon, wsd and weight decay 1")
    document = (ROOT / "docs/experiments.md").read_text()
    for size in ("1M", "5M", "20M"):
        for name in names:
            loss = re.search(rf"\| {size} \| {name} \| [^|]* \| \d \| 3 \| ([\d.]+) ", document)
            rows.append((f"{size}, {name}", float(loss[1])))
    return bars(rows, "nats", "Validation loss of recipes, by size", ("c0", "c1", "c2"))


def roofline() -> str:
    series = {}
    for name in ("v4", "h100"):
        chip = hardware.chip_named(name)
        corner = chip.flops / chip.memory_bandwidth
        points = sorted([1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, corner])
        series[{"v4": "TPU v4", "h100": "H100"}[name]] = [
            (x, min(chip.flops, x * chip.memory_bandwidth) / 1e12) for x in points
        ]
    return plot(
        series, "operations for a byte", "TFLOP/s at most", "Rooflines of a TPU v4 and an H100",
        ((1, 4, 16, 64, 256, 1024, 4096), (1, 10, 100, 1000)), logarithmic=True,
    )  # fmt: skip


def plan_flops() -> str:
    total: Counter = Counter()
    for kinds in facts.plan("step").flops.values():
        for kind, flops in kinds.items():
            total[kind] += flops / 1e12
    return bars([*total.items()], "TFLOP", "Operations of a device in a step, by kind")


def plan_meshes() -> str:
    found = answers.plans()
    rows = [(f"({mesh})", 1e3 * found[mesh]["serial"]) for mesh in found]
    rows.sort(key=lambda row: row[1])
    label = "Planned time of a step without overlap, by mesh (fsdp, pipeline, tensor)"
    return bars(rows[:12], "ms", label)


def predicted_memory() -> str:
    """Draw predicted over compiled memory, sorted, from docs/measured.md."""
    ratios = sorted(facts.measured_over(3))
    svg = Svg(70 + 9 * len(ratios), 230, "Predicted over compiled memory of each program, in order")
    for ratio in (0.9, 1.0, 1.1):
        y = 210 - 850 * (ratio - 0.88)
        svg.line([(50, y), (60 + 9 * len(ratios), y)], "grid")
        svg.text(44, y, f"{ratio:.1f}", "faint", "end")
    for i, ratio in enumerate(ratios):
        y = 210 - 850 * (ratio - 0.88)
        svg.parts.append(f'<circle cx="{60 + 9 * i:g}" cy="{y:g}" r="3.5" class="c2"/>')
    svg.text(50 + 4.5 * len(ratios), 220, f"{len(ratios)} programs", "faint")
    return str(svg)


RECORDS = pages.FOLDER / "tiny_run.json"  # losses and norms of one run of configs/tiny.toml


def of_run(
    names: dict[str, str], label: str, y_label: str, ys: Sequence[float], logarithmic: bool = False
) -> str:
    """Draw values of RECORDS against the step. names  of lines by their keys there."""
    records = json.loads(RECORDS.read_text())
    series = {name: [(step, value) for step, value in records[key]] for key, name in names.items()}
    ticks = (1, 4, 16, 64, 250), ys
    return plot(series, "step", y_label, label, ticks, logarithmic=logarithmic, markers=False)


def tiny_loss() -> str:
    names = {"loss": "training", "validation": "validation"}
    label = "Losses of configs/tiny.toml against the step"
    return of_run(names, label, "loss, nats for a token", (2, 3, 4, 5, 6, 7, 8, 9))


def tiny_norm() -> str:
    label = "Norm of the gradient in a run of configs/tiny.toml"
    return of_run({"grad_norm": "gradient"}, label, "norm", (0.1, 1, 10, 100), True)


FIGURES: dict[str, Callable[[], str]] = {
    "tiny-loss": tiny_loss,
    "tiny-norm": tiny_norm,
    "roofline": roofline,
    "plan-flops": plan_flops,
    "plan-meshes": plan_meshes,
    "predicted-memory": predicted_memory,
    "token-path": token_path,
    "dispatch": dispatch,
    "balance-bias": balance_bias,
    "singular-values": singular_values,
    "ladder": ladder,
    "schedule-4-1-8": lambda: schedule((4, 1, 8)),
    "schedule-4-2-8": lambda: schedule((4, 2, 8)),
    "schedule-4-1-4": lambda: schedule((4, 1, 4)),
    "schedule-1-1-4": lambda: schedule((1, 1, 4)),
    "bubbles": bubbles,
    "in-flight": in_flight,
    "rope-distance": rope_distance,
    "cache-values": cache_values,
    "latent-attention": latent_attention,
    "mesh": mesh,
    "layer": layer,
    "gather-memory": gather_memory,
    "traffic": traffic,
    "windows": windows,
    "permutation": permutation,
    "start": start,
    "merges": merges,
    "shards": shards,
    "mesh-chain": mesh_chain,
    "kills": kills,
    "interval": interval,
    "vocabularies": vocabularies,
    "preparation": preparation,
    "hosts": hosts,
    **{
        kind.replace("_", "-"): lambda kind=kind: collective(kind)
        for kind in ("all_gather", "psum_scatter", "psum", "all_to_all", "ppermute")
    },
}


# --- tables ---------------------------------------------------------------------------------------


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML. The cells are text."""

    def line(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(titles, 'th')}</thead><tbody>{body}</tbody></table>"


def layouts() -> str:
    """Return the layout of the weights of one dense layer of the 1B model on (8, 2, 2)."""
    config = facts.jaxformer()
    dims = {
        "attention.query.down": "D Q", "attention.query.up": "Q N A", "attention.norm": "D",
        "attention.kv_down": "D C+R", "attention.kv_up": "C N H+W", "attention.out": "N W D",
        "mlp.norm": "D", "mlp.gate": "D F", "mlp.down": "F D",
    }  # fmt: skip
    rows = []
    for name, letters in dims.items():
        weight = answers.weights_of(config)[f"blocks.dense.{name}"]
        own = letters.split()
        axes, shape = weight.dim_axes[-len(own) :], weight.shape[-len(own) :]
        layout = [f"{d}/{'+'.join(a)}" if a else d for d, a in zip(own, axes, strict=True)]
        ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
        slices = [
            size // math.prod(ranks[axis] for axis in along)
            for size, along in zip(shape, axes, strict=True)
        ]
        cells = (" ".join(layout), " x ".join(map(str, shape)), " x ".join(map(str, slices)))
        rows.append((name, *cells, f"{4 * math.prod(slices) / 1024:,.1f} KiB"))
    return table(("weight", "layout", "shape", "slice of a device", "float32"), rows)


def memory() -> str:
    """Return the predicted memory of a device for the 1B model on (8, 2, 2), by its parts."""
    meanings = {
        "saved activations": "values of the forward pass that the backward pass needs",
        "one layer": "what the backward pass of one layer computes and needs at a time",
        "gradients": "float32 sums, of the gathered weights",
        "optimizer state": "two float32 averages of each stored slice",
        "weights in use": "gathered bfloat16 weights",
        "weights": "float32 slices",
        "gaps": "space that the allocator cannot use",
        "pipeline buffers": "activations between stages",
    }
    parts = {name: size for name, size in facts.plan("step").memory.items() if size >= 2**20}
    if parts.keys() != meanings.keys():
        raise pages.PageError(f"the plan's parts of memory are now {sorted(parts)}")
    rows = [
        (name, meanings[name], f"{parts[name] / utils.GIB:.2f} GiB")
        for name in sorted(parts, key=parts.__getitem__, reverse=True)
    ]
    return table(("part", "what it is", "predicted"), rows)


def layer_costs() -> str:
    """Return parameters and FLOPs of each part of a dense layer of the 1B model."""
    costs = answers.layer_costs("jaxformer_1b", facts.jaxformer().train.seq_len)
    rows = [(part, f"{size:,}", f"{flops / 1e6:,.2f} M") for part, size, flops in costs if flops]
    norms = sum(size for _, size, flops in costs if not flops)
    total = [sum(cost[i] for cost in costs) for i in (1, 2)]
    rows += [("norms", f"{norms:,}", ""), ("all", f"{total[0]:,}", f"{total[1] / 1e6:,.2f} M")]
    return table(("part", "parameters", "FLOPs forward"), rows)


def plan_seconds() -> str:
    """Return the predicted busy seconds of a step of the 1B model on (8, 2, 2)."""
    meanings = {
        "compute": "operations",
        "memory": "operands and results of products, and the optimizer",
        "fsdp": "gathers of weights, reductions of gradients",
        "tensor": "activations of each layer",
        "fsdp+tensor": "tokens to their experts and back",
        "pipeline": "activations between stages",
    }
    seconds = facts.plan("step").seconds
    rows = [
        (name, meanings.get(name, "embedding and loss"), f"{1e3 * s:.1f} ms")
        for name, s in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return table(("busy", "with what", "predicted"), rows)


def hf_names() -> str:
    """Return the tensors of one layer with experts of the 1B model."""
    rows = []
    for name, mapping in answers.hf_mappings("jaxformer_1b").items():
        if name.startswith("blocks.moe."):
            theirs = next(iter(mapping.tensor_names.values()))
            shape = " x ".join(map(str, mapping.hf_shape))
            rows.append((name.removeprefix("blocks.moe."), theirs, shape))
    return table(("here", "there, the first of its kind", "shape there"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "hf-names": hf_names,
    "plan-seconds": plan_seconds,
    "layouts": layouts,
    "memory": memory,
    "layer-costs": layer_costs,
}
