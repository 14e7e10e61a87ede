"""The computation graph of a compiled training step, drawn by layer as an SVG.

    graph.draw(compiled.as_text(), Path("step.svg"), "tiny", branch_share)

The text, of a CPU or a TPU, is walked by hlo.py. What an instruction costs goes to the node that
its op_name tells of, a layer of a phase going forward, recomputed or backward; without an op_name,
to its caller's. The sums over all nodes are therefore `hlo.dot_flops` and those of
`hlo.collectives` of the same text. An edge is what one node makes and another reads. All counts are
of one device in one step.
"""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planning import hlo
from planning.hlo import NOTHING, Computation, Frame, Instruction, Value

if TYPE_CHECKING:  # imported late below, so that a program without pictures starts fast
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = ("warmup", "steady", "cooldown")  # named scopes of the pipeline's loops
PHASES = ("before", *TICKS, "after")
LAYERS = ("first", "attention", "mlp", "moe", "last", "first_backward")  # named scopes in them
WAYS = ("forward", "recomputed", "backward")
TITLES = {"first": "embedding", "first_backward": "embedding", "last": "loss"}
# Of what is in no layer; in the ticks "between layers": the ring, sends, masks, sums of gradients.
OTHER = {"before": "weights, batch", "after": "gradients, optimizer"}

# Not executed: names of values.
NAMES_ONLY = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
# What these give is their operand's value, or a piece of it, and was made by what made that.
SAME_VALUE = ("bitcast", "copy", "copy-start", "reshape", "broadcast", "convert", "opt-barrier")
PIECES = ("slice", "slice-start", "dynamic-slice")


class Place(NamedTuple):
    """Where in a step an instruction is."""

    phase: str  # one of PHASES
    layer: str  # one of LAYERS, or "other"
    way: str  # one of WAYS, or "" in "other", which serves both directions

    @property
    def name(self) -> str:
        if self.layer == "other":
            return OTHER.get(self.phase, "between layers")
        return f"{TITLES.get(self.layer, self.layer)} {self.way}"

    @property
    def column(self) -> tuple[str, str]:
        """Of the picture."""
        return self.phase, self.way


@dataclass(frozen=True)
class Node:
    place: Place
    flops: float  # of matrix products
    collectives: tuple[tuple[str, float], ...]  # (kind, bytes of results), most bytes first
    instructions: float  # executed, those inside of fusions as well


@dataclass(frozen=True)
class Edge:
    source: Place
    target: Place
    bytes: float  # read by the target


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]  # in the order of their first product or collective; the rest last
    edges: tuple[Edge, ...]


# --- the place of an instruction ------------------------------------------------------------------

_SCOPE = re.compile(r"(?:(?:jvp|transpose|vmap)\()*(\w+)\)*")
_NAMED_BY_COMPILER = re.compile(r"\w+\.\d+")  # as convert.42: the path before it is a guess


def tick_phase(op_name: str) -> str | None:
    """The phase whose scope an op_name is in."""
    return next((part for part in op_name.split("/") if part in TICKS), None)


def place_of(op_name: str, phase: str, caller: Place) -> Place:
    """The place that an op_name tells of, in a phase; of what it leaves out, the caller's."""
    if phase not in TICKS:
        return Place(phase, "other", "")
    *parts, last = op_name.split("/")
    scopes = [found[1] for part in parts if (found := _SCOPE.fullmatch(part))]
    layers = [scope for scope in scopes if scope in LAYERS]
    if not layers:
        # A path from the top is in no layer; the end of one may have lost it.
        from_top = op_name.startswith("jit(") or tick_phase(op_name)
        known = from_top and not _NAMED_BY_COMPILER.fullmatch(last)
        return Place(phase, "other", "") if known else caller._replace(phase=phase)
    return Place(phase, layers[-1], way_of(parts, layers, phase))


def way_of(parts: list[str], layers: list[str], phase: str) -> str:
    if "rematted_computation" in parts:
        return "recomputed"
    if layers[-1] == "first_backward" or any("transpose(" in part for part in parts):
        return "backward"
    # Forward inside of embedding's gradient is for the layers before the blocks. In cooldown it has
    # the name of an equal instruction of another phase.
    return "recomputed" if "first_backward" in layers or phase == "cooldown" else "forward"


def entry_phases(entry: hlo.Computation) -> dict[str, str]:
    """{instruction: phase}: by name, else by whether the ticks need it, or it needs the ticks.

    The position in the text would not do: compilers order by memory and latency.
    """
    named = {name: tick_phase(i.op_name) for name, i in entry.items()}
    if not any(named.values()):
        raise ValueError(
            f"HLO text has none of the named scopes {', '.join(TICKS)}, so it is no training step "
            "and has no phases to draw. Give the text of a compiled step of train.py."
        )
    needed, latest = set(), {}
    for name in reversed(entry):
        if named[name] or name in needed:
            needed.update(o for o in entry[name].operands if o in entry)
    for name, instruction in entry.items():
        before = [latest[o] for o in instruction.operands if o in latest]
        latest[name] = named[name] or max(before, key=PHASES.index, default="before")
        if name not in needed and not named[name]:
            latest[name] = "after"
    return latest


# --- nodes and edges ------------------------------------------------------------------------------

# An hlo.Value is of makers, as (place, instruction): none made a constant.


def read_bytes(reader: Instruction, number: int, computation: Computation) -> int:
    """Bytes of an operand that are read; of a table, as many as are looked up or added to."""
    operands = reader.operands
    whole = hlo.result_bytes(computation[operands[number]])
    if number == 0 and reader.opcode == "gather":
        return min(whole, hlo.result_bytes(reader))
    if number == 0 and reader.opcode == "scatter":
        return min(whole, hlo.result_bytes(computation[operands[-1]]))
    return whole


def costs_at(place: Place, instruction: Instruction, computation: Computation) -> Counter:
    """{(place, what): how much} of one execution."""
    if instruction.opcode in NAMES_ONLY:
        return Counter()
    found = hlo.collective_cost(instruction, computation) | {"instructions": 1}
    if flops := hlo.flops(instruction, computation):
        found["flops"] = flops
    return Counter({(place, what): value for what, value in found.items()})


def edges_to(place: Place, reader: Instruction, operands: list[Value], frame: Frame) -> Counter:
    """{(place, place): bytes} of what an instruction reads; who reads twice has it sent once."""
    found: Counter = Counter()
    for number, value in enumerate(operands):
        makers = hlo.joined(value)
        if not makers or (makers, place) in frame.seen:
            continue
        frame.seen.add((makers, place))
        # Of what several may have made, as different ticks, each is taken to make its part.
        part = read_bytes(reader, number, frame.computation) / len(makers)
        for source, _ in sorted(makers):
            if source != place:
                found[source, place] += part
    return found


def passed_on(instruction: Instruction, operands: list[Value], frame: Frame) -> Value | None:
    """The value of an instruction that makes nothing new; None of one that does."""
    opcode = instruction.opcode
    if opcode == "parameter":
        number = int(instruction.argument)
        return frame.arguments[number] if number < len(frame.arguments) else NOTHING
    if opcode in ("constant", "iota", "while", "conditional", *hlo.CALLS):
        return NOTHING
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "get-tuple-element":
        index = int(re.search(r"index=(\d+)", instruction.attributes)[1])
        return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
    if opcode == "dynamic-update-slice":  # of a ring of slots: what was before and is stored
        return hlo.joined(tuple(operands[:2]))
    if opcode in PIECES:
        return frozenset((place, instruction.name) for place, _ in hlo.joined(operands[0]))
    if opcode in SAME_VALUE or opcode.endswith(("-done", "-update")):
        return operands[0]
    if 'custom_call_target="ConcatBitcast"' in instruction.attributes:  # the TPU's, of slices
        return hlo.joined(tuple(operands))
    return None


def costs(counts: Counter) -> Counter:
    """Products and collectives of all places together."""
    found: Counter = Counter()
    for (_, what), value in counts.items():
        if isinstance(what, str) and what != "instructions":
            found[what] += value
    return found


def graph(text: str, branch_share: hlo.BranchShare | None = None) -> Graph:
    """Nodes and edges of the text of a compiled training step.

    branch_share   as for `hlo.executed`; pipeline.py has the one of its schedule.
    Raises  ValueError for a text without phases, and where hlo.py does.
    """
    program = hlo.parse(text)
    entry = program.computations[program.entry]
    phases = entry_phases(entry)

    def visit(
        instruction: Instruction, operands: list[Value], frame: Frame
    ) -> tuple[Counter, Place, Value]:
        phase = phases[instruction.name] if frame.computation is entry else frame.place.phase
        place = place_of(instruction.op_name, phase, frame.place)
        counts = costs_at(place, instruction, frame.computation)
        value = passed_on(instruction, operands, frame)
        if value is None:
            counts += edges_to(place, instruction, operands, frame)
            value = frozenset({(place, instruction.name)})
        return counts, place, value

    top = Place("before", "other", "")
    arguments = sum(i.opcode == "parameter" for i in entry.values())
    made = [frozenset({(top, f"argument {n}")}) for n in range(arguments)]
    counts, _ = hlo.Walk(program, branch_share, visit, costs).run(program.entry, top, made)
    # Masks and constants are often made far before their layer is run.
    in_order = sorted(counts, key=lambda key: key[1] == "instructions")
    nodes = []
    for place in dict.fromkeys(place for place, what in in_order if isinstance(what, str)):
        sent = [(kind, counts[place, kind]) for kind in hlo.COLLECTIVES if counts[place, kind]]
        sent = tuple(sorted(sent, key=lambda pair: -pair[1]))
        nodes.append(Node(place, counts[place, "flops"], sent, counts[place, "instructions"]))
    edges = sorted((k, n) for k, n in counts.items() if isinstance(k[1], Place) and n)
    return Graph(tuple(nodes), tuple(Edge(*key, n) for key, n in edges))


# --- the picture ----------------------------------------------------------------------------------

# Inches.
BOX, GAP, LINE, MARGIN, HEADER, LEGEND = 1.75, 0.44, 0.165, 0.25, 1.2, 2.0
ARM = 0.3 * GAP  # of an arrow, straight out of a box and into one
RIGHT, UP, LEFT, DOWN = 0, 90, 180, -90  # degrees
SHOWN = 0.08  # of what a box reads: see `shown`
COLORS = {"forward": "#0072B2", "recomputed": "#009E73", "backward": "#D55E00", "": "#777777"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and copied
    "svg.hashsalt": "graph",  # the same graph makes the same file
    "font.family": "sans-serif",
    "font.size": 9.0,
}


class Box(NamedTuple):
    """In inches, from the top left."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class Layout:
    boxes: dict[Place, Box]
    bands: dict[str, Box]  # phase -> what its boxes stand in
    width: float
    height: float


def quantity(value: float, unit: str) -> str:
    """Three digits with a prefix, as "1.24 TFLOP"."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def lines(node: Node, total: float) -> list[str]:
    """What stands in a box below its name."""
    found = [f"{quantity(node.flops, 'FLOP')}, {node.flops / total:.1%}"] if node.flops else []
    found += [f"{kind} {quantity(sent, 'B')}" for kind, sent in node.collectives]
    return [*found, f"{node.instructions:,.0f} instructions"]


def row_of(place: Place) -> str:
    return "first" if place.layer == "first_backward" else place.layer


def layout(graph: Graph) -> Layout:
    """A band per phase, a column in it per way, a row per layer through all of them.

    Rows are in the order in which layers first run, and what is in no layer is below them; where
    a phase has nothing else, it is beside all of them.
    """
    places = sorted((node.place for node in graph.nodes), key=lambda p: p.layer == "other")
    height = LINE * (2 + max(len(lines(node, 1)) for node in graph.nodes))
    rows = dict.fromkeys(map(row_of, places))
    top = {row: HEADER + (height + GAP) * number for number, row in enumerate(rows)}
    whole = (height + GAP) * len(rows) - GAP
    boxes, bands, x = {}, {}, MARGIN + GAP
    for phase in [phase for phase in PHASES if any(p.phase == phase for p in places)]:
        here = [p for p in places if p.phase == phase]
        ways = [way for way in WAYS if any(p.way == way for p in here)]
        width = (BOX + GAP) * max(1, len(ways)) - GAP
        for p in here:
            boxes[p] = Box(x, top[row_of(p)], width, height)
            if p.way:
                left = x + (BOX + GAP) * ways.index(p.way)
                boxes[p] = boxes[p]._replace(left=left, width=BOX)
            elif not ways:
                boxes[p] = boxes[p]._replace(top=HEADER, height=whole)
        bands[phase] = Box(x - GAP, HEADER - 0.5, width + 2 * GAP, whole + 0.7)
        x += width + 2.5 * GAP
    return Layout(boxes, bands, x - 1.5 * GAP + MARGIN, HEADER + whole + LEGEND)


def shown(edges: tuple[Edge, ...]) -> list[Edge]:
    """The edges that are a fair part of what their target reads, at all or from its own column.

    The widest are last. The largest that leaves a box is among them.
    """

    def near(edge: Edge) -> bool:
        return edge.source.column == edge.target.column

    read, most = Counter(), Counter()
    for edge in edges:
        read[edge.target, False] += edge.bytes
        read[edge.target, True] += edge.bytes * near(edge)
        most[edge.source] = max(most[edge.source], edge.bytes)
    least = {edge: SHOWN * read[edge.target, near(edge)] for edge in edges}
    kept = [e for e in edges if e.bytes >= least[e] or e.bytes == most[e.source]]
    return sorted(kept, key=lambda edge: edge.bytes)


Point = tuple[float, float]


def route(source: Box, target: Box) -> tuple[Point, int, Point, int]:
    """Where an arrow leaves a box and which way, where it meets the other and on which side.

    What leaves a box does so below its middle, and what enters it above; down is left of up.
    """
    y_out, y_in = source.top + 0.65 * source.height, target.top + 0.35 * target.height
    down = source.top < target.top
    if source.left == target.left and source.width == target.width:
        if abs(source.top - target.top) > 2 * source.height:  # around what is between them
            x, side = (source.right, RIGHT) if down else (source.left, LEFT)
            return (x, y_out), side, (x, y_in), side
        x = source.left + (0.35 if down else 0.65) * source.width
        if down:
            return (x, source.bottom), DOWN, (x, target.top), UP
        return (x, source.top), UP, (x, target.bottom), DOWN
    if target.left <= source.left and source.right <= target.right:  # down into a wide one
        return (source.right, y_out), RIGHT, (source.right + ARM, target.top), UP
    if source.left <= target.left and target.right <= source.right:  # up out of it
        return (target.left - ARM, source.top), UP, (target.left, y_in), LEFT
    # A box along the whole side is met at the height of the other.
    if source.height > target.height:
        y_out = y_in
    elif target.height > source.height:
        y_in = y_out
    if source.left < target.left:
        return (source.right, y_out), RIGHT, (target.left, y_in), LEFT
    return (source.left, y_out), LEFT, (target.right, y_in), RIGHT


def width_of(share: float) -> float:
    """Points of an arrow, of the widest's bytes: by the root, as a step moves from kB to TB."""
    return 0.6 + 6.4 * share**0.5


def shade(share: float) -> tuple[float, ...]:
    """Nearly white for none of the FLOPs, darkest for the node with most; text stays readable."""
    from matplotlib import colormaps

    return colormaps["YlOrBr"](0.5 * share)


def draw_box(axes: "Axes", box: Box, **colors) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((box.left, box.top), box.width, box.height, style, **colors))


def draw_arrow(axes: "Axes", source: Box, target: Box, color: str, width: float) -> None:
    start, out, end, into = route(source, target)
    arm = 72 * ARM  # points, as all of an arrow
    style = {
        "arrowstyle": f"-|>,head_length={3 + width},head_width={1.6 + 0.6 * width}",
        "connectionstyle": f"arc,angleA={out},angleB={into},armA={arm},armB={arm},rad={arm / 2}",
        **{"mutation_scale": 1, "shrinkA": 0, "shrinkB": 0},
        **{"color": color, "lw": width, "alpha": 0.65},
    }
    axes.annotate("", end, start, arrowprops=style, zorder=0.5)  # below the nodes


def draw_node(axes: "Axes", node: Node, box: Box, total: float, most: float) -> None:
    color = COLORS[node.place.way]
    draw_box(axes, box, facecolor=shade(node.flops / most), edgecolor=color, linewidth=1.4)
    below = lines(node, total)
    x, y = box.left + box.width / 2, box.top + (box.height - LINE * (len(below) - 1)) / 2
    axes.text(x, y, node.place.name, ha="center", va="bottom", weight="bold")
    axes.text(x, y, "\n".join(below), ha="center", va="top", size=8, linespacing=1.4)


def draw_legend(figure: "Figure", total: float, most: float, widest: float) -> None:
    """What colours of arrows and boxes, and widths, stand for: a column of each."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def line(color: str, width: float, label: str) -> Line2D:
        return Line2D([], [], color=color, lw=width, label=label)

    def patch(share: float) -> Patch:
        label = f"{share * most / total:.1%} of FLOPs"
        return Patch(facecolor=shade(share), edgecolor=COLORS[""], label=label)

    signs = [line(color, 2.0, f"made {way or 'in no layer'}") for way, color in COLORS.items()]
    for share in (1.0, 0.1, 0.01, 0.001):
        signs.append(line(COLORS[""], width_of(share), quantity(share * widest, "B")))
    signs += [patch(share) for share in (0.0, 0.25, 0.5, 1.0)]
    note = (
        f"One device, one step: {quantity(total, 'FLOP')} of matrix products. A box: FLOPs of "
        "matrix products, bytes of collectives' results, instructions executed. An arrow: what one "
        f"box makes and another reads, if at least {SHOWN:.0%} of all that the other reads, or of "
        "what it reads from its own column, or the most of what the one makes."
    )
    look = {"ncols": 3, "loc": "lower left", "alignment": "left", "frameon": False}
    figure.legend(handles=signs, title=textwrap.fill(note, 90), **look)


def picture(graph: Graph, title: str) -> "Figure":
    """The graph, its phases from left to right."""
    from matplotlib.figure import Figure

    plan, edges = layout(graph), shown(graph.edges)
    total = sum(node.flops for node in graph.nodes) or 1.0
    most = max(node.flops for node in graph.nodes) or 1.0
    widest = max((edge.bytes for edge in edges), default=1.0)
    figure = Figure(figsize=(plan.width, plan.height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, plan.width), ylim=(plan.height, 0))
    axes.set_axis_off()
    axes.text(MARGIN, 0.35, title, size=14, weight="bold", va="center")
    for phase, band in plan.bands.items():
        draw_box(axes, band, facecolor="#f4f4f4", edgecolor="#dddddd", zorder=0)
        name = phase if phase in TICKS else f"{phase} the ticks"
        x, y = band.left + band.width / 2, band.top + 0.2
        axes.text(x, y, name, size=12, ha="center", va="center", color="#444444")
    for edge in edges:
        ends = plan.boxes[edge.source], plan.boxes[edge.target]
        draw_arrow(axes, *ends, COLORS[edge.source.way], width_of(edge.bytes / widest))
    for node in graph.nodes:
        draw_node(axes, node, plan.boxes[node.place], total, most)
    draw_legend(figure, total, most, widest)
    return figure


def draw(text: str, path: Path, title: str, branch_share: hlo.BranchShare | None = None) -> None:
    """The graph of the text of a compiled training step, as an SVG at `path`.

    Raises  ValueError for a file that is not named as an SVG, and where `graph` does.
    """
    if path.suffix != ".svg":
        raise ValueError(
            f"The graph cannot be written to {path}: it is drawn as an SVG, and the name does not "
            f"end in .svg. Use {path.with_suffix('.svg')}."
        )
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = picture(graph(text, branch_share), title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
