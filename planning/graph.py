"""The computation graph of a compiled training step, drawn by layer as an SVG.

    graph.draw(compiled.as_text(), Path("step.svg"), "tiny", branch_share)

The text is walked as hlo.py walks it, for a CPU or a TPU: through loops, branches, calls and
fusions, each as often as it runs. What an instruction costs goes to the node that its op_name tells
of, a layer of a phase going forward, recomputed or backward; without an op_name, to its caller's.
The sums over all nodes are therefore `hlo.dot_flops` and `hlo.collective_bytes` of the same text.
An edge is what one node makes and another reads. All counts are of one device in one step.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planning import hlo
from planning.hlo import Instruction

if TYPE_CHECKING:  # imported late below, so that a program without pictures starts fast
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch

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
CALLS = ("fusion", "call", "async-start")


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


# --- the walk -------------------------------------------------------------------------------------

Makers = frozenset[tuple[Place, str]]  # of an array: (place, instruction); none made a constant
Value = Makers | tuple  # a tuple's are its members'
NOTHING: Makers = frozenset()


def makers_of(value: Value) -> Makers:
    if isinstance(value, frozenset):
        return value
    return frozenset().union(*map(makers_of, value))


def either(one: Value, other: Value) -> Value:
    """What is one or the other, as after a branch."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(either, one, other))
    return makers_of(one) | makers_of(other)


def result_bytes(instruction: Instruction) -> int:
    return sum(map(hlo.shape_bytes, instruction.shapes))


def read_bytes(reader: Instruction, number: int, computation: hlo.Computation) -> int:
    """Bytes of an operand that are read; of a table, as many as are looked up or added to."""
    operands = reader.operands
    whole = result_bytes(computation[operands[number]])
    if number == 0 and reader.opcode == "gather":
        return min(whole, result_bytes(reader))
    if number == 0 and reader.opcode == "scatter":
        return min(whole, result_bytes(computation[operands[-1]]))
    return whole


@dataclass(frozen=True)
class Walker:
    """Counts {(place, what): how much} and {(place, place): bytes} of computations."""

    program: hlo.Program
    branch_share: hlo.BranchShare | None
    entry_phases: dict[str, str]

    def walk(self, name: str, caller: Place, args: list[Value], seen: set) -> tuple[Counter, Value]:
        """Counts of one execution, and what it returns.

        seen   values that a place has read already: whoever reads twice has it sent once.
        """
        computation = self.program.computations[name]
        found: Counter = Counter()
        values: dict[str, Value] = {}
        value: Value = NOTHING  # of an instruction; in the end of the root, which is written last
        for instruction in computation.values():
            own = self.entry_phases[instruction.name] if name == self.program.entry else None
            place = place_of(instruction.op_name, own or caller.phase, caller)
            operands = [values.get(operand, NOTHING) for operand in instruction.operands]
            self.add_costs(found, instruction, place, computation)
            if instruction.opcode in CALLS:
                names = instruction.computations("calls") + instruction.computations("to_apply")
                value = NOTHING
                for callee in names:
                    more, value = self.walk(callee, place, operands, seen)
                    add(found, more, 1)
            elif instruction.opcode == "while":
                value = self.loop(found, instruction, place, operands, computation)
            elif instruction.opcode == "conditional":
                value = self.conditional(found, instruction, place, operands)
            else:
                value = passed_on(instruction, operands, args)
                if value is None:
                    self.add_edges(found, instruction, place, operands, computation, seen)
                    value = frozenset({(place, instruction.name)})
            values[instruction.name] = value
        return found, value

    def add_costs(
        self, found: Counter, instruction: Instruction, place: Place, computation: hlo.Computation
    ) -> None:
        if instruction.opcode in NAMES_ONLY:
            return
        found[place, "instructions"] += 1
        if flops := hlo.flops(instruction, computation):
            found[place, "flops"] += flops
        # As hlo.py: an asynchronous collective counts where it is done.
        kind = instruction.opcode.removesuffix("-done")
        if kind in hlo.COLLECTIVES:
            found[place, kind] += result_bytes(instruction)

    def add_edges(
        self,
        found: Counter,
        reader: Instruction,
        place: Place,
        operands: list[Value],
        computation: hlo.Computation,
        seen: set,
    ) -> None:
        for number, value in enumerate(operands):
            makers = makers_of(value)
            if not makers or (makers, place) in seen:
                continue
            seen.add((makers, place))
            # Of what several may have made, as different ticks, each is taken to make its part.
            part = read_bytes(reader, number, computation) / len(makers)
            for source, _ in sorted(makers):
                if source != place:
                    found[source, place] += part

    def loop(
        self,
        found: Counter,
        loop: Instruction,
        place: Place,
        operands: list[Value],
        computation: hlo.Computation,
    ) -> Value:
        """The first trip reads what is made before the loop, the others what the trip before made.

        Raises  ValueError for a loop of unknown length that has a product or a collective.
        """
        body, condition = (loop.computations(a)[0] for a in ("body", "condition"))
        state = operands[0]
        first, after = self.walk(body, place, [state], set())
        check, _ = self.walk(condition, place, [state], set())
        try:
            trips = hlo.trip_count(loop, computation, self.program)
        except ValueError:
            if costs(first) or costs(check):
                raise
            trips = 1
        add(found, check, trips + 1)
        add(found, first, min(trips, 1))
        if trips > 1:
            again, after = self.walk(body, place, [after], set())
            add(found, again, trips - 1)
        return after

    def conditional(
        self, found: Counter, conditional: Instruction, place: Place, operands: list[Value]
    ) -> Value:
        """Raises  ValueError as hlo.shares does, for branches that differ and are not known."""
        names, args = hlo.branches(conditional), operands[1:]
        if not conditional.computations("branch_computations"):
            args = args[::-1]  # the true one's is written first
        walks = [
            self.walk(name, place, [arg], set()) for name, arg in zip(names, args, strict=True)
        ]
        given = self.branch_share(conditional.op_name) if self.branch_share else None
        if given is None:
            hlo.shares(conditional, [costs(counts) for counts, _ in walks], None)
            given = [1 / len(walks)] * len(walks)
        value = walks[0][1]
        for (counts, made), share in zip(walks, given, strict=True):
            add(found, counts, share)
            value = either(value, made)
        return value


def passed_on(instruction: Instruction, operands: list[Value], args: list[Value]) -> Value | None:
    """The value of an instruction that makes nothing new; None of one that does."""
    opcode = instruction.opcode
    if opcode == "parameter":
        number = int(instruction.argument)
        return args[number] if number < len(args) else NOTHING
    if opcode in ("constant", "iota"):
        return NOTHING
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "get-tuple-element":
        index = int(re.search(r"index=(\d+)", instruction.attributes)[1])
        return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
    if opcode == "dynamic-update-slice":
        # A ring of slots holds what was stored last and what was before.
        return makers_of(operands[0]) | makers_of(operands[1])
    if opcode in PIECES:
        return frozenset((place, instruction.name) for place, _ in makers_of(operands[0]))
    if opcode in SAME_VALUE or opcode.endswith(("-done", "-update")):
        return operands[0]
    if 'custom_call_target="ConcatBitcast"' in instruction.attributes:  # the TPU's, of slices
        return frozenset().union(*map(makers_of, operands))
    return None


def add(found: Counter, more: Counter, times: float) -> None:
    for key, value in more.items():
        found[key] += value * times


def costs(counts: Counter) -> dict[str, float]:
    """Products and collectives of all places together."""
    found: Counter = Counter()
    for (_, what), value in counts.items():
        if isinstance(what, str) and what != "instructions":
            found[what] += value
    return dict(found)


def graph(text: str, branch_share: hlo.BranchShare | None = None) -> Graph:
    """Nodes and edges of the text of a compiled training step.

    branch_share   as for `hlo.dot_flops`; pipeline.py has the one of its schedule.
    Raises  ValueError for a text without phases, and where hlo.py does.
    """
    program = hlo.parse(text)
    entry = program.computations[program.entry]
    walker = Walker(program, branch_share, entry_phases(entry))
    top = Place("before", "other", "")
    arguments = sum(i.opcode == "parameter" for i in entry.values())
    args: list[Value] = [frozenset({(top, f"argument {n}")}) for n in range(arguments)]
    counts, _ = walker.walk(program.entry, top, args, set())
    # Masks and constants are often made far before their layer is run.
    in_order = sorted(counts, key=lambda key: key[1] == "instructions")
    places = dict.fromkeys(place for place, what in in_order if isinstance(what, str))
    edges = {key: n for key, n in counts.items() if isinstance(key[1], Place) and n}
    return Graph(
        tuple(_node(place, counts) for place in places),
        tuple(Edge(*key, n) for key, n in sorted(edges.items())),
    )


def _node(place: Place, counts: Counter) -> Node:
    sent = [(kind, counts[place, kind]) for kind in hlo.COLLECTIVES if counts[place, kind]]
    sent.sort(key=lambda pair: -pair[1])
    return Node(place, counts[place, "flops"], tuple(sent), counts[place, "instructions"])


# --- the picture ----------------------------------------------------------------------------------

# Inches, from the top left.
BOX, GAP, ROW_GAP, BAND_GAP = 1.75, 0.44, 0.42, 0.22
LINE, TITLE, HEADER, LEGEND, MARGIN = 0.165, 0.45, 0.55, 1.35, 0.25
NARROWEST = 11.0  # that the legend has room
SHOWN = 0.08  # of what a box reads: see `shown`
COLORS = {"forward": "#0072B2", "recomputed": "#009E73", "backward": "#D55E00", "": "#777777"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and copied
    "svg.hashsalt": "graph",  # the same graph makes the same file
    "font.family": "sans-serif",
    "font.size": 9.0,
}


class Box(NamedTuple):
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

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


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


def _is_other(place: Place) -> bool:
    return place.layer == "other"


def row_of(place: Place) -> str:
    return "first" if place.layer == "first_backward" else place.layer


def layout(graph: Graph) -> Layout:
    """A band per phase, a column in it per way, a row per layer through all of them.

    Rows are in the order in which layers first run, and what is in no layer is below them; where
    a phase has nothing else, it is beside all of them.
    """
    places = [node.place for node in graph.nodes]
    rows = [*dict.fromkeys(map(row_of, sorted(places, key=_is_other)))]
    size = dict.fromkeys(rows, 0.0)
    for node in graph.nodes:
        height = LINE * (len(lines(node, 1)) + 2)
        size[row_of(node.place)] = max(size[row_of(node.place)], height)
    top, y = {}, MARGIN + TITLE + HEADER
    for row in rows:
        top[row] = y
        y += size[row] + ROW_GAP
    boxes, bands, x = {}, {}, MARGIN
    for phase in [phase for phase in PHASES if any(p.phase == phase for p in places)]:
        here = [p for p in places if p.phase == phase]
        ways = [way for way in WAYS if any(p.way == way for p in here)] or [""]
        width = len(ways) * (BOX + GAP) + GAP
        bands[phase] = Box(x, MARGIN + TITLE, width, y - MARGIN - TITLE)
        for p in here:
            box = Box(x + GAP, top[row_of(p)], width - 2 * GAP, size[row_of(p)])
            if p.way:
                box = box._replace(left=box.left + ways.index(p.way) * (BOX + GAP), width=BOX)
            elif len(here) == 1:
                box = box._replace(top=top[rows[0]], height=box.bottom - top[rows[0]])
            boxes[p] = box
        x += width + BAND_GAP
    return Layout(boxes, bands, max(x - BAND_GAP + MARGIN, NARROWEST), y + LEGEND)


def shown(edges: tuple[Edge, ...]) -> list[Edge]:
    """The edges that are a fair part of what their target reads, at all or from its own column.

    The widest are last. The largest that leaves a box is among them.
    """
    read: Counter = Counter()
    most: Counter = Counter()
    for edge in edges:
        read[edge.target] += edge.bytes
        read[edge.target, _column(edge.source)] += edge.bytes
        most[edge.source] = max(most[edge.source], edge.bytes)

    def kept(edge: Edge) -> bool:
        column = _column(edge.source)
        return (
            edge.bytes == most[edge.source]
            or edge.bytes >= SHOWN * read[edge.target]
            or (column == _column(edge.target) and edge.bytes >= SHOWN * read[edge.target, column])
        )

    return sorted(filter(kept, edges), key=lambda edge: edge.bytes)


def _column(place: Place) -> tuple[str, str]:
    return place.phase, place.way


def straight(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """A curve's points on a line; apart, as the head of an arrow takes its direction from them."""
    (x, y), (to_x, to_y) = start, end
    return [(x + (to_x - x) * part, y + (to_y - y) * part) for part in (0, 1 / 3, 2 / 3, 1)]


def route(source: Box, target: Box, boxes: Collection[Box]) -> list[tuple[float, float]]:
    """Four points of a cubic curve from box to box.

    What leaves a box does so below its middle, and what enters it above; down is left of up.
    """
    y_out, y_in = source.middle + 0.15 * source.height, target.middle - 0.15 * target.height
    down = source.top < target.top
    if source.left == target.left and source.width == target.width:
        x = source.left + (0.35 if down else 0.65) * source.width
        ends = (source.bottom, target.top) if down else (source.top, target.bottom)
        between = [b for b in boxes if b.left == source.left and min(ends) < b.middle < max(ends)]
        if not between:
            return straight((x, ends[0]), (x, ends[1]))
        side, bulge = (source.right, 0.6 * GAP) if down else (source.left, -0.6 * GAP)
        return [(side, y_out), (side + bulge, y_out), (side + bulge, y_in), (side, y_in)]
    if target.left <= source.left and source.right <= target.right:  # down into a wide one
        x = source.right + 0.3 * GAP
        return [(source.right, y_out), (x, y_out), (x, y_out), (x, target.top)]
    if source.left <= target.left and target.right <= source.right:  # up out of it
        x = target.left - 0.3 * GAP
        return [(x, source.top), (x, y_in), (x, y_in), (target.left, y_in)]
    # A box along the whole side is met at the height of the other.
    if source.height > 2 * target.height:
        y_out = y_in
    elif target.height > 2 * source.height:
        y_in = y_out
    rightward = source.right <= target.left
    start, end = (source.right, target.left) if rightward else (source.left, target.right)
    bend = (start + end) / 2
    return [(start, y_out), (bend, y_out), (bend, y_in), (end, y_in)]


def width_of(size: float, most: float) -> float:
    """Points of an arrow for bytes: by the root, as a step moves from kilobytes to terabytes."""
    return 0.6 + 6.4 * (size / most) ** 0.5


def arrow(points: list[tuple[float, float]], way: str, width: float) -> "FancyArrowPatch":
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    curve = Curve(points, [Curve.MOVETO] + 3 * [Curve.CURVE4])
    style = f"-|>,head_length={3 + width},head_width={1.6 + 0.6 * width}"
    return FancyArrowPatch(
        path=curve, arrowstyle=style, mutation_scale=1, lw=width, color=COLORS[way], alpha=0.65
    )


def shade(share: float, most: float) -> tuple[float, ...]:
    """White for none of the FLOPs, darkest for the node with most; text stays readable on it."""
    from matplotlib import colormaps

    return colormaps["YlOrBr"](0.5 * share / most) if share else (1.0, 1.0, 1.0, 1.0)


def draw_box(
    axes: "Axes", box: Box, face: tuple[float, ...] | str, edge: str, width: float
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    corner = (box.left, box.top)
    axes.add_patch(FancyBboxPatch(corner, box.width, box.height, style, fc=face, ec=edge, lw=width))


def draw_node(axes: "Axes", node: Node, box: Box, total: float, most: float) -> None:
    draw_box(axes, box, shade(node.flops, most), COLORS[node.place.way], 1.4)
    below = lines(node, total)
    x, y = box.left + box.width / 2, box.middle - LINE * len(below) / 2
    axes.text(x, y, node.place.name, ha="center", va="center", weight="bold")
    for number, line in enumerate(below, 1):
        axes.text(x, y + number * LINE, line, ha="center", va="center", size=8)


def draw_legend(axes: "Axes", plan: Layout, widest: float, most: float, total: float) -> None:
    """What colours of arrows and boxes, and widths, stand for."""
    y, x = plan.height - LEGEND + 0.25, MARGIN
    for way in (*WAYS, ""):
        axes.add_patch(arrow(straight((x, y), (x + 0.5, y)), way, 2.0))
        axes.text(x + 0.6, y, f"made {way}" if way else "made in no layer", va="center")
        x += 1.9
    y, x = y + 0.35, MARGIN
    for part in (1.0, 0.1, 0.01):
        size = widest * part
        points = straight((x, y), (x + 0.5, y))
        axes.add_patch(arrow(points, "", width_of(size, widest)))
        axes.text(x + 0.6, y, quantity(size, "B"), va="center")
        x += 1.5
    for part in (0.0, 0.25, 0.5, 1.0):
        draw_box(axes, Box(x, y - 0.1, 0.3, 0.2), shade(part * most, most), "#777777", 0.8)
        axes.text(x + 0.4, y, f"{part * most / total:.1%} of FLOPs", va="center")
        x += 1.5
    note = (
        "One device, one step. A box: FLOPs of matrix products, bytes of collectives' results, "
        "instructions executed.\nAn arrow: what one box makes and another reads, "
        f"if at least {SHOWN:.0%} of all that the other reads, or of what it reads from its own "
        "column, or the most of what the one makes."
    )
    axes.text(MARGIN, y + 0.25, note, va="top", size=8, color="#444444")


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
    axes.text(MARGIN, MARGIN + 0.1, title, size=14, weight="bold", va="center")
    flops = f"{quantity(total, 'FLOP')} of matrix products per device and step"
    axes.text(plan.width - MARGIN, MARGIN + 0.1, flops, size=11, va="center", ha="right")
    for phase, band in plan.bands.items():
        draw_box(axes, band, "#f4f4f4", "#dddddd", 0.8)
        name = phase if phase in TICKS else f"{phase} the ticks"
        x, y = band.left + band.width / 2, band.top + 0.25
        axes.text(x, y, name, size=12, ha="center", va="center", color="#444444")
    for edge in edges:
        points = route(plan.boxes[edge.source], plan.boxes[edge.target], plan.boxes.values())
        axes.add_patch(arrow(points, edge.source.way, width_of(edge.bytes, widest)))
    for node in graph.nodes:
        draw_node(axes, node, plan.boxes[node.place], total, most)
    draw_legend(axes, plan, widest, most, total)
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
