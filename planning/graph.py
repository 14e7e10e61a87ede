"""Draw the computation graph of a compiled training step by layer, as an SVG.

    graph.draw(compiled.as_text(), Path("step.svg"), "tiny", branch_share)

hlo.py walks the text, of a CPU or a TPU. An instruction's costs go to the node that its op_name
names: a layer of a phase, in the forward, recomputed or backward direction. Without an op_name,
they go to its caller's node. The sums over all nodes are therefore those of `hlo.dot_flops` and
`hlo.collectives`. An edge is what one node makes and another reads. All counts are of one device
in one step.
"""

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planning import hlo
from planning.hlo import NOTHING, Computation, Frame, Instruction, Value
from utils import ConfigError

if TYPE_CHECKING:  # imported late below, so that a program without pictures starts fast
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

TICKS = ("warmup", "steady", "cooldown")  # named scopes of the pipeline's loops
PHASES = ("before", *TICKS, "after")
LAYERS = ("first", "attention", "mlp", "moe", "last", "first_backward")  # named scopes in them
DIRECTIONS = ("forward", "recomputed", "backward")
TITLES = {"first": "embedding", "first_backward": "embedding", "last": "loss"}
# Titles of what is in no layer. In the ticks it is "between layers": the ring, sends, masks, sums.
OTHER = {"before": "weights, batch", "after": "gradients, optimizer"}

# Not executed: names of values.
NAMES_ONLY = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
# Their result is their operand's value, or a slice of it.
SAME_VALUE = ("bitcast", "copy", "copy-start", "reshape", "broadcast", "convert", "opt-barrier")
SLICES = ("slice", "slice-start", "dynamic-slice")


class Scope(NamedTuple):
    """The part of a step that an instruction belongs to."""

    phase: str  # one of PHASES
    layer: str  # one of LAYERS, or "other"
    direction: str  # one of DIRECTIONS, or "" in "other", which serves both

    @property
    def name(self) -> str:
        if self.layer == "other":
            return OTHER.get(self.phase, "between layers")
        return f"{TITLES.get(self.layer, self.layer)} {self.direction}"


class Node(NamedTuple):
    scope: Scope
    flops: float  # of matrix products
    collectives: tuple[tuple[str, float], ...]  # (kind, bytes of results), most bytes first
    instructions: float  # executed, including those in fusions


class Edge(NamedTuple):
    source: Scope
    target: Scope
    bytes: float  # read by the target


class Graph(NamedTuple):
    nodes: tuple[Node, ...]  # in the order of their first product or collective; the rest last
    edges: tuple[Edge, ...]


# --- the scope of an instruction ------------------------------------------------------------------

_SCOPE = re.compile(r"(?:(?:jvp|transpose|vmap)\()*(\w+)\)*")
_NAMED_BY_COMPILER = re.compile(r"\w+\.\d+")  # such as convert.42: the path before it is a guess


def tick_phase(op_name: str) -> str | None:
    """Return the phase whose named scope contains an op_name."""
    return next((part for part in op_name.split("/") if part in TICKS), None)


def scope_of(op_name: str, phase: str, caller: Scope) -> Scope:
    """Return the scope of an op_name in a phase. What the name omits is the caller's."""
    if phase not in TICKS:
        return Scope(phase, "other", "")
    *parts, last = op_name.split("/")
    scopes = [found[1] for part in parts if (found := _SCOPE.fullmatch(part))]
    layers = [scope for scope in scopes if scope in LAYERS]
    if not layers:
        # A path from the top is in no layer; the end of a path may have lost its layer.
        from_top = op_name.startswith("jit(") or tick_phase(op_name)
        known = from_top and not _NAMED_BY_COMPILER.fullmatch(last)
        return Scope(phase, "other", "") if known else caller._replace(phase=phase)
    direction = "forward"
    if "rematted_computation" in parts:
        direction = "recomputed"
    elif layers[-1] == "first_backward" or any("transpose(" in part for part in parts):
        direction = "backward"
    elif "first_backward" in layers or phase == "cooldown":
        # Forward inside of the embedding's gradient is for the layers before the blocks. In
        # cooldown it has the name of an equal instruction of another phase.
        direction = "recomputed"
    return Scope(phase, layers[-1], direction)


def entry_phases(entry: Computation) -> dict[str, str]:
    """Return {instruction: phase}: by name, else by whether the ticks need it or it needs them.

    The position in the text is no criterion: compilers order by memory and latency.
    """
    named = {name: tick_phase(i.op_name) for name, i in entry.items()}
    if not any(named.values()):
        raise ConfigError(
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

# An hlo.Value is a set of makers, as (scope, instruction). A constant has none.


def read_bytes(reader: Instruction, number: int, computation: Computation) -> int:
    """Return the bytes of an operand that are read; of a table, those looked up or updated."""
    operands = reader.operands
    whole = hlo.result_bytes(computation[operands[number]])
    if number == 0 and reader.opcode == "gather":
        return min(whole, hlo.result_bytes(reader))
    if number == 0 and reader.opcode == "scatter":
        return min(whole, hlo.result_bytes(computation[operands[-1]]))
    return whole


def costs_in(scope: Scope, instruction: Instruction, computation: Computation) -> Counter:
    """Return {(scope, what): how much} of one execution."""
    if instruction.opcode in NAMES_ONLY:
        return Counter()
    found = hlo.collective_cost(instruction, computation) | {"instructions": 1}
    if flops := hlo.flops(instruction, computation):
        found["flops"] = flops
    return Counter({(scope, what): value for what, value in found.items()})


def edges_to(scope: Scope, reader: Instruction, operands: list[Value], frame: Frame) -> Counter:
    """Return {(source, target): bytes} of what an instruction reads; a value is sent once."""
    found: Counter = Counter()
    for number, value in enumerate(operands):
        makers = hlo.joined(value)
        if not makers or (makers, scope) in frame.seen:
            continue
        frame.seen.add((makers, scope))
        # If several may have made it, such as different ticks, each makes an equal part.
        part = read_bytes(reader, number, frame.computation) / len(makers)
        for source, _ in sorted(makers):
            if source != scope:
                found[source, scope] += part
    return found


def forwarded(instruction: Instruction, operands: list[Value], frame: Frame) -> Value | None:
    """Return the value of an instruction that makes nothing new, or None."""
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
    if opcode == "dynamic-update-slice":  # of a ring of slots: the old content and the new slot
        return hlo.joined(tuple(operands[:2]))
    if opcode in SLICES:
        return frozenset((scope, instruction.name) for scope, _ in hlo.joined(operands[0]))
    if opcode in SAME_VALUE or opcode.endswith(("-done", "-update")):
        return operands[0]
    if 'custom_call_target="ConcatBitcast"' in instruction.attributes:  # a TPU's, of slices
        return hlo.joined(tuple(operands))
    return None


def costs(counts: Counter) -> Counter:
    """Sum products and collectives over all scopes."""
    found: Counter = Counter()
    for (_, what), value in counts.items():
        if isinstance(what, str) and what != "instructions":
            found[what] += value
    return found


def graph(text: str, branch_share: hlo.BranchShare | None = None) -> Graph:
    """Return the nodes and edges of the text of a compiled training step.

    branch_share   as in `hlo.executed`; pipeline.py has the one of its schedule.
    Raises  ConfigError for a text without phases, and where hlo.py does.
    """
    program = hlo.parse(text)
    entry = program.computations[program.entry]
    phases = entry_phases(entry)

    def visit(
        instruction: Instruction, operands: list[Value], frame: Frame
    ) -> tuple[Counter, Scope, Value]:
        phase = phases[instruction.name] if frame.computation is entry else frame.scope.phase
        scope = scope_of(instruction.op_name, phase, frame.scope)
        counts = costs_in(scope, instruction, frame.computation)
        value = forwarded(instruction, operands, frame)
        if value is None:
            counts += edges_to(scope, instruction, operands, frame)
            value = frozenset({(scope, instruction.name)})
        return counts, scope, value

    top = Scope("before", "other", "")
    arguments = sum(i.opcode == "parameter" for i in entry.values())
    made = [frozenset({(top, f"argument {n}")}) for n in range(arguments)]
    counts, _ = hlo.Walk(program, branch_share, visit, costs).run(program.entry, top, made)
    # Masks and constants are often made long before their layer runs.
    in_order = sorted(counts, key=lambda key: key[1] == "instructions")
    nodes = []
    for scope in dict.fromkeys(scope for scope, what in in_order if isinstance(what, str)):
        sent = [(kind, counts[scope, kind]) for kind in hlo.COLLECTIVES if counts[scope, kind]]
        sent = tuple(sorted(sent, key=lambda pair: -pair[1]))
        nodes.append(Node(scope, counts[scope, "flops"], sent, counts[scope, "instructions"]))
    edges = sorted((k, n) for k, n in counts.items() if isinstance(k[1], Scope) and n)
    return Graph(tuple(nodes), tuple(Edge(*key, n) for key, n in edges))


# --- the picture ----------------------------------------------------------------------------------

# Inches.
WIDTH, GAP, LINE, MARGIN, HEADER, LEGEND = 1.75, 0.44, 0.165, 0.25, 1.2, 2.0
SHOWN = 0.08  # of what a node reads: see `shown`
COLORS = {"forward": "#0072B2", "recomputed": "#009E73", "backward": "#D55E00", "": "#777777"}
STYLE = {
    "svg.fonttype": "none",  # text stays text, which can be searched and copied
    "svg.hashsalt": "graph",  # the same graph makes the same file
    "font.family": "sans-serif",
    "font.size": 9.0,
}


class Rectangle(NamedTuple):
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


class Layout(NamedTuple):
    nodes: dict[Scope, Rectangle]
    bands: dict[str, Rectangle]  # phase -> what encloses its nodes
    width: float
    height: float


def quantity(value: float, unit: str) -> str:
    """Format with three digits and a prefix, as "1.24 TFLOP"."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def node_text(node: Node, total: float) -> list[str]:
    """Return the lines below a node's name."""
    found = [f"{quantity(node.flops, 'FLOP')}, {node.flops / total:.1%}"] if node.flops else []
    found += [f"{kind} {quantity(sent, 'B')}" for kind, sent in node.collectives]
    return [*found, f"{node.instructions:,.0f} instructions"]


def layout(graph: Graph) -> Layout:
    """Arrange a band per phase, in it a column per direction, and a row per layer.

    Rows are in the order in which layers first run. The node of what is in no layer is below them,
    or as high as all rows if its phase has no other node.
    """
    scopes = sorted((node.scope for node in graph.nodes), key=lambda s: s.layer == "other")
    height = LINE * (2 + max(len(node_text(node, 1)) for node in graph.nodes))
    rows = dict.fromkeys(s.layer.removesuffix("_backward") for s in scopes)
    top = {row: HEADER + (height + GAP) * number for number, row in enumerate(rows)}
    total = (height + GAP) * len(rows) - GAP
    nodes, bands, x = {}, {}, MARGIN + GAP
    for phase in [phase for phase in PHASES if any(s.phase == phase for s in scopes)]:
        here = [s for s in scopes if s.phase == phase]
        columns = [d for d in DIRECTIONS if any(s.direction == d for s in here)]
        width = (WIDTH + GAP) * max(1, len(columns)) - GAP
        for s in here:
            if s.direction:
                left = x + (WIDTH + GAP) * columns.index(s.direction)
                nodes[s] = Rectangle(left, top[s.layer.removesuffix("_backward")], WIDTH, height)
            elif columns:
                nodes[s] = Rectangle(x, top["other"], width, height)
            else:
                nodes[s] = Rectangle(x, HEADER, width, total)
        bands[phase] = Rectangle(x - GAP, HEADER - 0.5, width + 2 * GAP, total + 0.7)
        x += width + 2.5 * GAP
    return Layout(nodes, bands, x - 1.5 * GAP + MARGIN, HEADER + total + LEGEND)


def shown(edges: tuple[Edge, ...]) -> list[Edge]:
    """Return the edges that are at least SHOWN of what their target reads, the largest last.

    The share is of all that it reads, or of what it reads from its own column. The largest edge
    that leaves a node is included.
    """

    def near(edge: Edge) -> bool:
        return edge.source[::2] == edge.target[::2]  # phase and direction

    read, most = Counter(), Counter()
    for edge in edges:
        read[edge.target, False] += edge.bytes
        read[edge.target, True] += edge.bytes * near(edge)
        most[edge.source] = max(most[edge.source], edge.bytes)
    least = {edge: SHOWN * read[edge.target, near(edge)] for edge in edges}
    kept = [e for e in edges if e.bytes >= least[e] or e.bytes == most[e.source]]
    return sorted(kept, key=lambda edge: edge.bytes)


def line_width(share: float) -> float:
    """Return the points of an arrow: by the root, as a step moves from kB to TB."""
    return 0.6 + 6.4 * share**0.5


def shade(share: float) -> tuple[float, ...]:
    """Return nearly white for no FLOPs, darkest for the node with most; text stays readable."""
    from matplotlib import colormaps

    return colormaps["YlOrBr"](0.5 * share)


def draw_box(axes: "Axes", r: Rectangle, **colors) -> "Patch":
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    return axes.add_patch(FancyBboxPatch((r.left, r.top), r.width, r.height, style, **colors))


def draw_node(axes: "Axes", node: Node, r: Rectangle, total: float, most: float) -> "Patch":
    below = node_text(node, total)
    x, y = r.left + r.width / 2, r.top + (r.height - LINE * (len(below) - 1)) / 2
    axes.text(x, y, node.scope.name, ha="center", va="bottom", weight="bold")
    axes.text(x, y, "\n".join(below), ha="center", va="top", size=8, linespacing=1.4)
    colors = {"facecolor": shade(node.flops / most), "edgecolor": COLORS[node.scope.direction]}
    return draw_box(axes, r, **colors, linewidth=1.4)


def draw_arrow(axes: "Axes", source: "Patch", target: "Patch", color: str, width: float) -> None:
    """Draw an arrow between the borders of two boxes, below all boxes."""
    start, end = (box.get_path().get_extents().get_points().mean(0) for box in (source, target))
    style = {
        "arrowstyle": f"-|>,head_length={3 + width},head_width={1.6 + 0.6 * width}",
        "connectionstyle": "arc3,rad=0.15",
        **{"patchA": source, "patchB": target, "mutation_scale": 1, "shrinkA": 0, "shrinkB": 0},
        **{"color": color, "lw": width, "alpha": 0.65},
    }
    axes.annotate("", end, start, arrowprops=style, zorder=0.5)


def draw_legend(figure: "Figure", total: float, most: float, widest: float) -> None:
    """Draw three columns: colors of arrows, widths of arrows, colors of nodes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    signs = [
        Line2D([], [], color=color, lw=2.0, label=f"made {direction or 'in no layer'}")
        for direction, color in COLORS.items()
    ]
    for share in (1.0, 0.1, 0.01, 0.001):
        label, width = quantity(share * widest, "B"), line_width(share)
        signs.append(Line2D([], [], color=COLORS[""], lw=width, label=label))
    for share in (0.0, 0.25, 0.5, 1.0):
        label = f"{share * most / total:.1%} of FLOPs"
        signs.append(Patch(facecolor=shade(share), edgecolor=COLORS[""], label=label))
    note = (
        f"One device, one step: {quantity(total, 'FLOP')} of matrix products. A box: FLOPs of "
        "matrix products, bytes of collectives' results, instructions executed. An arrow: what one "
        f"box makes and another reads, if it is at least {SHOWN:.0%} of all that the other reads, "
        "or of what it reads from its own column, or the most of what the one makes."
    )
    place = {"ncols": 3, "loc": "lower left", "alignment": "left", "frameon": False}
    figure.legend(handles=signs, title=textwrap.fill(note, 90), **place)


def picture(graph: Graph, title: str) -> "Figure":
    """Draw the graph, its phases from left to right."""
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
    boxes = {n.scope: draw_node(axes, n, plan.nodes[n.scope], total, most) for n in graph.nodes}
    for edge in edges:
        ends, color = (boxes[edge.source], boxes[edge.target]), COLORS[edge.source.direction]
        draw_arrow(axes, *ends, color, line_width(edge.bytes / widest))
    draw_legend(figure, total, most, widest)
    return figure


def draw(text: str, path: Path, title: str, branch_share: hlo.BranchShare | None = None) -> None:
    """Draw the graph of the text of a compiled training step as an SVG at `path`.

    Raises  ConfigError for a file that is not named as an SVG, and where `graph` does.
    """
    if path.suffix != ".svg":
        raise ConfigError(
            f"The graph cannot be written to {path}: it is an SVG, and the name does not end in "
            f".svg. Use {path.with_suffix('.svg')}."
        )
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = picture(graph(text, branch_share), title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
