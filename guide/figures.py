"""Draw the figures of the guide. Their numbers come from the project's code and documents."""

import json
import math
import re
from collections import Counter

import answers
import numpy as np
import pages
from answers import EXPERIMENTS, MEASURED, Schedule, plan
from svg import Svg, bars, plot

import hardware
from dataset import permute


def draw(name: str) -> str:
    """Return a figure as SVG: "token-path" by draw_token_path. Raises PageError for others."""
    kind, _, sizes = name.partition("-")
    if kind == "schedule":
        return str(schedule(*map(int, sizes.split("-"))))
    if name in COLLECTIVES:
        return str(collective(name))
    function = globals().get(f"draw_{name.replace('-', '_')}")
    if not function:
        raise pages.PageError(f"guide/figures.py draws no {name!r}.")
    return str(function())


# --- schedules ------------------------------------------------------------------------------------

CELL = 22


def schedule(pipeline: int, virtual: int, microbatches: int) -> Svg:
    """Draw which microbatch each rank runs in each tick: forward above, backward below."""
    s, left, row = Schedule(pipeline, virtual, microbatches), 60, 2 * CELL + 6
    label = (
        f"Schedule of {pipeline} ranks and {microbatches} microbatches, chunks a rank: {virtual}"
    )
    svg = Svg(left + s.ticks * CELL + 6, pipeline * row + 50, label)
    for rank in range(pipeline):
        svg.text(left - 8, rank * row + CELL, f"rank {rank}", anchor="end")
        for begin, end, *runs in s.phases:
            for tick in range(begin, end):
                tasks = {way: (chunk, m) for way, chunk, m in s.tasks_at(tick, rank)}
                for i, way in enumerate(("fwd", "bwd")):
                    x, y = left + tick * CELL, rank * row + i * CELL
                    if way in tasks:
                        chunk, m = tasks[way]
                        svg.cell(x, y, CELL, f"{way}{min(chunk, 3)}", m)
                    elif runs[i]:  # the phase runs this direction: an idle slot
                        svg.cell(x, y, CELL, "idle")
    y = pipeline * row + 8
    for tick in range(s.ticks):
        svg.text(left + (tick + 0.5) * CELL, y, tick, "faint")
    svg.text(left - 8, y, "tick", "faint", "end")
    names = {}
    for chunk in range(virtual):
        for way, name in (("fwd", "forward"), ("bwd", "backward")):
            names[f"{way}{chunk}"] = f"{name}, chunk {chunk}" if virtual > 1 else name
    svg.legend(left, y + 16, names | {"idle": "idle slot"})
    return svg


def draw_bubbles() -> Svg:
    microbatches = (4, 8, 16, 32, 64)
    series = {
        f"{v} chunk{'s' * (v > 1)} a rank": [
            (m, 100 * float(Schedule(4, v, m).bubble)) for m in microbatches
        ]
        for v in (1, 2, 4)
    }
    label = "Bubble of 4 pipeline ranks against the number of microbatches"
    ticks = microbatches, (0, 10, 20, 30, 40, 50)
    return plot(series, "microbatches of a step", "idle slots, %", label, ticks)


def draw_in_flight() -> Svg:
    """Draw how many microbatches each rank holds residuals of: GPipe, this executor, 1F1B."""
    s, cell = Schedule(4, 1, 16), 24
    svg = Svg(620, 236, "Microbatches in flight: GPipe, one program, and a program for each rank")
    svg.text(72, 12, "microbatches whose residuals wait, at most", anchor="start")
    for rank in range(4):
        y = 30 + 46 * rank
        svg.text(60, y + 18, f"rank {rank}", anchor="end")
        most, own = 2 * (s.pipeline - 1 - rank) + 1, s.pipeline - rank
        for row, (used, slots, kind) in enumerate(
            ((s.microbatches,) * 2 + ("c2",), (most, s.ring_slots, "c0"), (own, own, "c1"))
        ):
            for i in range(slots):
                kind_i = kind if i < used else "idle"
                svg.rect(72 + cell * i, y + 13 * row, cell - 2, 11, kind_i)
        right = 72 + cell * s.ring_slots + 8
        svg.text(right, y + 18, f"{most} of {s.ring_slots} slots", anchor="start")
    names = {"c2": "GPipe", "c0": "1F1B, one program", "c1": "1F1B, a program for each rank"}
    svg.legend(72, 216, names)
    return svg


# --- collectives ----------------------------------------------------------------------------------

# What ranks 0 to 3 hold before and after, from top to bottom; a dot is nothing.
BY_BLOCK = "a0 b0 c0 d0 | a1 b1 c1 d1 | a2 b2 c2 d2 | a3 b3 c3 d3"
BY_RANK = "a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1 c2 c3 | d0 d1 d2 d3"
COLLECTIVES = {
    "all-gather": ("a . . . | . b . . | . . c . | . . . d", " | ".join(["a b c d"] * 4)),
    "psum-scatter": (BY_BLOCK, "Σa . . . | . Σb . . | . . Σc . | . . . Σd"),
    "psum": (BY_BLOCK, " | ".join(["Σa Σb Σc Σd"] * 4)),
    "all-to-all": (BY_RANK, BY_BLOCK),
    "ppermute": ("a | b | c | d", "d | a | b | c"),
}


def collective(name: str) -> Svg:
    """Draw what four ranks hold before and after a collective."""
    size, before = 26, COLLECTIVES[name][0]
    rows = len(before.partition("|")[0].split())
    svg = Svg(400, 32 + size * rows, f"What four ranks hold before and after {name}")
    middle = 24 + size * rows / 2
    svg.arrow(160, middle, 236, middle)
    for x, held in zip((10, 250), COLLECTIVES[name], strict=True):
        for rank, column in enumerate(held.split("|")):
            left = x + rank * (size + 10)
            svg.text(left + size / 2, 12, rank, "faint")
            for i, text in enumerate(column.split()):
                kind = "idle" if text == "." else f"c{'abcd'.index(text.strip('Σ0123'))}"
                svg.cell(left, 24 + i * size, size, kind, text.strip("."))
    return svg


# --- meshes ---------------------------------------------------------------------------------------


def draw_mesh() -> Svg:
    """Draw the eight devices of a (2, 2, 2) mesh with their coordinates."""
    svg = Svg(560, 250, "Eight devices as a mesh of fsdp, pipeline and tensor, two ranks each")
    for number in range(8):
        fsdp, pipeline, tensor = np.unravel_index(number, (2, 2, 2))
        x, y = 70 + 250 * fsdp + 100 * tensor, 40 + 90 * pipeline
        lines = f"device {number}", f"({fsdp}, {pipeline}, {tensor})"
        svg.box(x, y, 90, 62, f"c{pipeline}", *lines)
    for fsdp in range(2):
        svg.rect(62 + 250 * fsdp, 30, 206, 172, "frame", 6)
        svg.text(165 + 250 * fsdp, 14, f"fsdp rank {fsdp}")
        for tensor in range(2):
            svg.text(115 + 250 * fsdp + 100 * tensor, 218, f"tensor {tensor}", "faint")
    for y, name in ((70, "first"), (160, "second")):
        svg.text(56, y, name, "faint", "end")
        svg.text(56, y + 14, "layers", "faint", "end")
    svg.text(280, 242, "coordinates: (fsdp, pipeline, tensor)", "faint")
    return svg


def draw_layer() -> Svg:
    """Draw one feed-forward layer with its communication on two tensor ranks."""
    svg = Svg(660, 208, "A feed-forward layer on two tensor ranks")
    boxes = [  # left edge, lines, color
        (56, ("x", "[b, t, D]"), "c0"), (226, ("h", "[b, T, D]"), "c1"),
        (318, ("gate, up", "[D, f]"), "c2"), (410, ("down", "[f, D]"), "c2"),
        (580, ("y", "[b, t, D]"), "c0"),
    ]  # fmt: skip
    for rank, y in enumerate((34, 126)):
        svg.text(4, y + 22, f"rank {rank}", anchor="start")
        for x, lines, kind in boxes:
            svg.box(x, y, 78, 46, kind, *lines)
        for x in (305, 397):
            svg.arrow(x, y + 23, x + 12, y + 23)
        for x, name in ((180, "all_gather"), (534, "psum_scatter")):
            svg.text(x, (24, 186)[rank], f"{name} over tensor", "faint")
    for x in (138, 492):  # each rank sends to both
        for y, to_y in ((57, 57), (57, 149), (149, 57), (149, 149)):
            svg.line((x, y), (x + 84, to_y))
    return svg


def draw_hosts() -> Svg:
    """Draw four hosts of four devices in a mesh of (4, 2, 2), and the sequences that each reads."""
    svg = Svg(640, 226, "Four hosts in a mesh of (4, 2, 2), and the sequences that each reads")
    for fsdp in range(4):
        x = 24 + 154 * fsdp
        svg.rect(x - 8, 34, 140, 122, "frame", 6)
        svg.text(x + 62, 20, f"host {fsdp}, fsdp rank {fsdp}")
        for pipeline, tensor in np.ndindex(2, 2):
            left, top = x + 64 * tensor, 42 + 56 * pipeline
            svg.box(left, top, 60, 50, f"c{pipeline}", f"p {pipeline}", f"t {tensor}")
        svg.text(x + 62, 174, f"reads {2 * fsdp} and {2 * fsdp + 1}")
    for y, text in (
        (196, "sequences of a microbatch of 8; all four devices of a host need both"),
        (214, "p: pipeline rank, t: tensor rank; the same color has the same layers"),
    ):
        svg.text(320, y, text, "faint")
    return svg


def draw_mesh_chain() -> Svg:
    """Draw the meshes of a chain of resumed runs, with the differences of docs/measured.md."""
    row = r"\| (\d+ to \d+) \| \d x \d \| (\(\d, \d, \d\)) \| \d \| \d \| (\S+) \|"
    svg = Svg(640, 112, "One run on five meshes")
    for i, (steps, mesh, difference) in enumerate(re.findall(row, MEASURED)):
        x = 10 + 126 * i
        svg.box(x, 20, 104, 44, f"c{i % 5}", mesh, f"steps {steps}")
        svg.text(x + 52, 84, f"{float(difference):.1e}" if float(difference) else "the same")
        if i:
            svg.arrow(x - 21, 42, x - 2, 42)
    svg.text(320, 104, "difference of a step's loss", "faint")
    return svg


# --- data and runs --------------------------------------------------------------------------------


def draw_windows() -> Svg:
    """Draw two windows of T = 6 over a row of tokens."""
    svg = Svg(560, 150, "Two windows of T = 6, each of seven tokens, over a stream of tokens")
    svg.text(52, 72, "token", "faint", "end")
    for i, kind in enumerate(["c0"] * 6 + ["c2"] + ["c1"] * 6 + ["idle"]):
        svg.box(60 + 34 * i, 56, 32, 32, kind, i, radius=2)
    for begin, y, tip, name in ((0, 30, 8, "window 0"), (6, 114, -8, "window 1")):
        left, right, kind = 60 + 34 * begin, 60 + 34 * (begin + 7) - 2, f"line s{name[-1]}"
        svg.line((left, y + tip), (left, y), (right, y), (right, y + tip), kind=kind)
        svg.text((left + right) / 2, y - 1.5 * tip, name)
    return svg


def draw_permutation() -> Svg:
    """Draw which window is read at each position of two epochs."""
    size, cell = 24, 17
    svg = Svg(90 + size * cell, 208, "Windows in the order of two epochs")
    svg.text(80, 10, "height: number of the window; from left to right: position", "faint", "start")
    for epoch, bottom in enumerate((100, 192)):
        svg.text(4, bottom - 46, f"epoch {epoch}", anchor="start")
        for position, window in enumerate(permute(np.arange(size), size, 0, epoch)):
            height = 4 + 3 * int(window)
            svg.rect(80 + cell * position, bottom - height, cell - 2, height, f"c{epoch}", 1)
    return svg


def draw_start() -> Svg:
    """Draw the start of two processes, with the points at which they wait."""
    svg = Svg(640, 210, "The start of a job of two processes, from left to right in time")
    parts = {"check this host": 106, "connect": 70, "compare": 74, "open data": 80}
    x = 84
    for i, (name, width) in enumerate((parts | {"weights": 70, "steps": 60}).items()):
        for y in (40, 124):
            svg.box(x, y, width, 40, f"c{i % 3}", name)
        x += width + 14
        if name not in ("check this host", "steps"):
            svg.rect(x - 8, 26, 1, 152, "frame")
    for process in range(2):
        svg.text(76, 60 + 84 * process, f"process {process}", anchor="end")
    svg.text(330, 194, "after each dashed line, all have done the part before it", "faint")
    return svg


def draw_kills() -> Svg:
    """Draw the kills of docs/measured.md by kind of work."""
    document = MEASURED.partition("## Runs that are killed")[2]
    rows = []
    kinds = ("step", "save", "evaluation", "samples", "restore", "compile", "batch", "pictures")
    for kind in kinds:
        one, two = re.search(rf"\| {kind} \| (\d+) \| (\d+) \|", document).groups()
        rows += [(f"{kind}, of one", float(one)), (f"{kind}, of two", float(two))]
    return bars(rows, "kills", "Kills by the kind of work", ("c0", "c1"))


def draw_interval() -> Svg:
    series = {}
    intervals_s = [30 * 2**i for i in range(10)]
    for save_s, hours in ((5, 6), (60, 6), (5, 48)):
        points = [(s, 100 * answers.lost_share(s, save_s, 3600 * hours)) for s in intervals_s]
        series[f"{save_s} s, every {hours} h"] = [point for point in points if point[1] <= 20]
    label = "Share of time that is lost against the interval of saves"
    ticks = (30, 120, 480, 1920, 7680, 15360), (0, 5, 10, 15, 20)
    return plot(series, "seconds between two saves", "time lost, %", label, ticks)


def draw_merges() -> Svg:
    """Draw the pieces of a word after each join."""
    word = " function"
    steps = answers.merges(word)
    svg = Svg(150 + 24 * len(word), 12 + 30 * len(steps), f"The joins of {word.strip()}")
    for i, pieces in enumerate(steps):
        y, x = 8 + 30 * i, 90
        svg.text(82, y + 12, f"{i} joins" if i != 1 else "1 join", "faint", "end")
        for piece in pieces:
            width, kind = 24 * len(piece) - 3, f"c{min(len(piece) - 1, 5)}"
            svg.box(x, y, width, 24, kind, piece.replace(" ", "\u2423"), radius=2)
            x += width + 3
    return svg


def draw_shards() -> Svg:
    """Draw files, splits, shards and the index of a preparation."""
    svg = Svg(640, 236, "Files are divided into splits, each split becomes shards and a record")
    for x, name in ((60, "source"), (210, "splits"), (370, "shards and record"), (560, "index")):
        svg.text(x, 12, name)
    for y, end, name in ((36, 82, "a, b, c.txt"), (92, 178, "large.jsonl"), (188, 228, "d.txt.gz")):
        svg.box(14, y, 92, end - y, "c0", name)
    for i, (y, height) in enumerate(((36, 46), (92, 41), (137, 41), (188, 40))):
        middle = y + height / 2
        svg.box(170, y, 80, height, "c1", f"split {i}")
        svg.arrow(108, middle, 166, middle)
        svg.arrow(252, middle, 300, middle)
        for x in (304, 348):
            svg.rect(x, middle - 13, 40, 26, "c2")
        svg.box(400, middle - 13, 52, 26, "c3", "record", radius=2)
        svg.arrow(454, middle, 512, 132)
    svg.box(516, 106, 96, 52, "c4", "index.json")
    return svg


def draw_vocabularies() -> Svg:
    """Draw the bytes per token of four tokenizers, from docs/measured.md."""
    document = " ".join(MEASURED.split())
    found = re.search(
        r"24\.0 MB, of which .*? with `sample`, `cl100k_base`, `o200k_base` and `p50k_base` "
        r"\(([\d,]+), ([\d,]+), ([\d,]+) and ([\d,]+) tokens\)",
        document, re.I,
    )  # fmt: skip
    sample, cl100k, o200k, p50k = (24e6 / int(n.replace(",", "")) for n in found.groups())
    rows = [
        ("sample, 4,096", sample), ("p50k_base, 50,281", p50k),
        ("cl100k_base, 100,277", cl100k), ("o200k_base, 200,019", o200k),
    ]  # fmt: skip
    return bars(rows, "bytes", "Bytes per token, by vocabulary")


def draw_preparation() -> Svg:
    """Draw the speed of a preparation, from docs/measured.md."""
    rows = []
    for processes in ("1 process", "2 processes"):
        for program, name in (("encode_ordinary", "tiktoken"), ("data/prepare.py", "prepare.py")):
            speed = re.search(rf"\| {processes[0]} \| `{program}` \| ([\d.]+) \(", MEASURED)[1]
            rows.append((f"{name}, {processes}", float(speed)))
    return bars(rows, "M tokens/s", "Speed of a preparation", ("c0", "c1"))


# Of one run of configs/tiny.toml: [step, value] of each record, by its name.
RECORDS = json.loads((pages.FOLDER / "tiny_run.json").read_text())


def draw_tiny_loss() -> Svg:
    series = {"training": RECORDS["loss"], "validation": RECORDS["validation"]}
    label = "Losses of configs/tiny.toml against the step"
    ticks = (1, 4, 16, 64, 250), (2, 3, 4, 5, 6, 7, 8, 9)
    return plot(series, "step", "loss, nats for a token", label, ticks)


def draw_tiny_norm() -> Svg:
    label = "Norm of the gradient in a run of configs/tiny.toml"
    ticks = (1, 4, 16, 64, 250), (0.1, 1, 10, 100)
    return plot({"gradient": RECORDS["grad_norm"]}, "step", "norm", label, ticks, log_y=True)


# --- the model ------------------------------------------------------------------------------------


def draw_rope_distance() -> Svg:
    """Draw the mean of cos(distance * frequency) over the rotary pairs of the 1B model."""
    distances = [2**i for i in range(13)]
    points = [(n, np.cos(n * answers.rope_frequencies()).mean()) for n in distances]
    label = "Score of a query and an equal key against their distance"
    x_label, y_label = "distance of two positions", "score, over that at distance 0"
    ticks = distances[::2], (-0.25, 0, 0.25, 0.5, 0.75, 1)
    return plot({"128 numbers": points}, x_label, y_label, label, ticks)


CACHES = ("jaxformer_1b", "llama_1b", "qwen3_moe_1b")


def draw_cache_values() -> Svg:
    rows = []
    for name in CACHES:
        rows.append((name, answers.cached_values(name)))
        rows.append((f"{name}, plain", answers.plain_values(name)))
    return bars(rows, "", "Numbers that a layer caches of a token", ("c0", "idle"))


def draw_latent_attention() -> Svg:
    """Draw what queries, keys and values of latent attention are computed from."""
    svg = Svg(620, 230, "Queries, keys and values of latent attention")
    svg.box(10, 88, 96, 44, "c5", "hidden", "D")
    middle = [(20, "query latent, Q"), (96, "latent, C"), (172, "rotary key, R")]
    for i, (y, name) in enumerate(middle):
        svg.box(190, y, 130, 30, f"c{i}", name)
        svg.arrow(108, 110, 186, y + 15)
    for y in (90, 166):
        svg.rect(184, y, 142, 42, "frame", 6)
    svg.text(255, 222, "framed: cached", "faint")
    svg.line((360, 0), (360, 230), kind="frame")
    for y, name, source in (
        (2, "queries, H", 0), (36, "rotated, R", 0), (84, "keys, H", 1), (118, "values, W", 1),
        (178, "rotated, R", 2),
    ):  # fmt: skip
        svg.box(400, y, 104, 28, f"c{source}", name)
        svg.arrow(322, middle[source][0] + 15, 396, y + 14)
        svg.text(512, y + 14, "for all heads" if source == 2 else "of each head", "faint", "start")
    return svg


def draw_token_path() -> Svg:
    """Draw one token that a router sends to two of eight experts, and the shared expert."""
    svg = Svg(620, 250, "One token, its router, two of eight experts and the shared expert")
    svg.box(8, 104, 80, 40, "c5", "token")
    svg.box(130, 104, 80, 40, "c0", "router")
    svg.arrow(90, 124, 126, 124)
    for e in range(8):
        svg.box(300, 6 + 24 * e, 120, 20, "c1" if e in (2, 5) else "idle", f"expert {e}", radius=2)
    for y, x, weight_y, weight in ((64, 232, 64, "0.6"), (136, 256, 146, "0.4")):
        svg.arrow(212, 124, 296, y)
        svg.arrow(422, y, 516, 124)
        svg.text(x, weight_y, weight)
    svg.box(300, 218, 120, 20, "c2", "shared", radius=2)
    svg.arrow(60, 146, 296, 228)
    svg.arrow(422, 228, 516, 140)
    svg.box(520, 104, 90, 40, "c5", "sum")
    return svg


LOADS, SLOTS, TILE = (11, 6, 5, 2), 8, 4  # of 24 tokens among four experts


def draw_dispatch() -> Svg:
    """Draw 24 choices among four experts: with eight slots each, and in tiles of four."""
    svg = Svg(560, 300, "Choices with a fixed capacity, and in tiles")
    tiles = [-(-load // TILE) for load in LOADS]
    for e, load in enumerate(LOADS):
        x = 90 + 110 * e
        svg.text(x + 44, 10, f"expert {e}")
        for i in range(max(load, SLOTS)):
            kind = "idle" if i >= load else f"c{e}" if i < SLOTS else "frame"
            svg.rect(x + 22 * (i % 4), 24 + 22 * (i // 4), 20, 20, kind)
        for i in range(tiles[e] * TILE):
            kind = f"c{e}" if i < load else "idle"
            svg.rect(x + 22 * (i % 4), 150 + 26 * (i // 4), 20, 20, kind)
    slots, dropped = SLOTS * len(LOADS), sum(max(0, n - SLOTS) for n in LOADS)
    svg.text(82, 46, f"capacity {SLOTS}", anchor="end")
    svg.text(82, 160, f"tiles of {TILE}", anchor="end")
    for y, text in (
        (112, f"{slots} rows, {dropped} choices dropped (dashed)"),
        (266, f"{sum(tiles) * TILE} rows in {sum(tiles)} tiles, none dropped"),
        (290, "gray: empty rows, which are computed too"),
    ):
        svg.text(90, y, text, "faint", "start")
    return svg


def draw_balance_bias() -> Svg:
    """Simulate the bias of a router whose experts start with different scores."""
    rng, E, K, speed = np.random.default_rng(0), 16, 2, 0.01
    favor, bias, loads = 0.5 * rng.normal(size=E), np.zeros(E), []
    for _ in range(128):
        scores = 1 / (1 + np.exp(-rng.normal(size=(1024, E)) - favor))
        chosen = np.argsort(-(scores + bias), axis=1)[:, :K]
        load = np.bincount(chosen.ravel(), minlength=E) * E / (K * len(scores))
        loads.append(load)
        bias += speed * np.sign(load.mean() - load)
    steps = (1, 2, 4, 8, 16, 32, 64, 128)
    series = {
        "busiest": [(step, loads[step - 1].max()) for step in steps],
        "least used": [(step, loads[step - 1].min()) for step in steps],
    }
    label = "Load of the busiest and least used of 16 experts"
    return plot(series, "step", "load over the mean", label, (steps, (0, 1, 2, 3, 4)))


def draw_singular_values() -> Svg:
    """Draw what five Newton-Schulz steps make of singular values."""
    ticks = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), (0, 0.25, 0.5, 0.75, 1, 1.25)
    series = {
        f"{steps} step{'s' * (steps > 1)}": [
            (value, answers.polynomial(value, steps)) for value in np.geomspace(0.001, 1, 200)
        ]
        for steps in (1, 3, 5)
    }
    label = "Singular values after Newton-Schulz steps"
    x_label = "singular value, over the norm of the matrix"
    return plot(series, x_label, "after", label, ticks)


def draw_ladder() -> Svg:
    """Draw the validation loss of recipes by size, from docs/experiments.md."""
    rows, names = [], ("AdamW", "Muon for matrices", "Muon, wsd and weight decay 1")
    for size in ("1M", "5M", "20M"):
        for name in names:
            loss = re.search(rf"\| {size} \| {name} \| [^|]* \| \d \| 3 \| ([\d.]+) ", EXPERIMENTS)
            rows.append((f"{size}, {name}", float(loss[1])))
    return bars(rows, "nats", "Validation loss of recipes, by size", ("c0", "c1", "c2"))


def draw_experts_gain() -> Svg:
    """Draw the validation loss of models with and without experts, from docs/ladder.jsonl."""
    series = {}
    for depth, dense in ((2, True), (2, False), (4, True), (4, False)):
        curve = answers.ladder(depth, dense)["curve"][1:]
        name = f"{depth} layers, {'dense' if dense else 'experts'}"
        series[name] = [(step * 4.096, loss) for step, loss in curve]
    label, ticks = "Loss with and without experts", ((64, 128, 256, 512), (3.5, 4, 4.5, 5))
    return plot(series, "thousand tokens", "nats", label, ticks)


# --- plans ----------------------------------------------------------------------------------------


def draw_gather_memory() -> Svg:
    rows = [
        (f"{name}, per {gather}", plan(gather).memory[name] / 2**20)
        for name in ("weights", "weights in use", "gradients", "optimizer state", "one layer")
        for gather in ("step", "layer")
    ]
    label = "Memory by part, with weights gathered per step or layer"
    return bars(rows, "MiB", label, ("c0", "c1"))


def draw_traffic() -> Svg:
    sent: Counter = Counter()
    for t in plan().traffic:
        sent[f"{t.cause} ({'+'.join(t.axes)})"] += t.sent_bytes / 1e6
    return bars(sent.most_common(10), "MB", "Bytes that a device sends in a step, by cause")


def draw_roofline() -> Svg:
    series = {}
    for shown, name in (("TPU v4", "v4"), ("H100", "h100")):
        chip = hardware.chip_named(name)
        points = sorted([1, 4, 16, 64, 256, 1024, 4096, answers.intensity(name)])
        series[shown] = [(x, min(chip.flops, x * chip.memory_bandwidth) / 1e12) for x in points]
    label = "Rooflines of a TPU v4 and an H100"
    ticks = (1, 4, 16, 64, 256, 1024, 4096), (1, 10, 100, 1000)
    return plot(series, "operations for a byte", "TFLOP/s at most", label, ticks, log_y=True)


def draw_mesh_ruler() -> Svg:
    """Draw operations for a byte: what axes offer, and what links need."""
    left, top, width = 150, 124, 540
    svg = Svg(left + width + 40, 300, "Operations for each byte that is sent, of axes and of links")

    def at(operations: float) -> float:
        return left + width * math.log10(operations / 100) / 4

    for i in range(5):
        svg.text(at(10 ** (2 + i)), 262, f"{10 ** (2 + i):,}", "faint")
    links = {
        "v4, six links": ("v4", "fsdp"), "H100, NVLink": ("h100", "fsdp"),
        "v5e, one link": ("v5e", "tensor"), "v4, one link": ("v4", "pipeline"),
        "H100, network": ("h100s", "pipeline"), "10 Gbit/s": ("pcs", "fsdp"),
    }  # fmt: skip
    for i, (name, link) in enumerate(links.items()):
        x, y = at(answers.link_intensity(*link)), 10 + 17 * i
        svg.line((x, y - 6), (x, 246), kind="frame")
        svg.text(x + 5, y, name, anchor="start")
    models = {"c0": (768, 12), "c1": (2048, 20), "c2": (8192, 80)}
    rows = {
        "fsdp, n tokens": dict(zip(models, (1024, 8192, 262144), strict=True)),
        "tensor 8": {kind: 4.5 * D / 7 for kind, (D, _) in models.items()},
        "tensor 2": {kind: 4.5 * D for kind, (D, _) in models.items()},
        "pipeline 4": {
            kind: 72 * D * L / 4 / answers.pipeline_bytes(4) for kind, (D, L) in models.items()
        },
    }
    for i, (name, offered) in enumerate(rows.items()):
        y = top + 34 * i
        svg.text(left - 14, y, name, anchor="end")
        svg.line((left, y), (left + width, y), kind="grid")
        for kind, operations in offered.items():
            svg.rect(at(operations) - 5, y - 5, 10, 10, kind if i else "ink", 5)
            if i == 0:
                svg.text(at(operations) + 6, y - 11, f"{operations:,}", anchor="start")
    shown = {kind: f"width {D:,}, {L} layers" for kind, (D, L) in models.items()}
    svg.legend(left, 280, shown)
    return svg


def draw_plan_flops() -> Svg:
    total: Counter = Counter()
    for kinds in plan().flops.values():
        for kind, flops in kinds.items():
            total[kind] += flops / 1e12
    return bars([*total.items()], "TFLOP", "Operations of a device in a step, by kind")


def draw_plan_meshes() -> Svg:
    rows = [(f"({mesh})", 1e3 * found["serial"]) for mesh, found in answers.plans().items()]
    label = "Planned time of a step without overlap, by mesh (fsdp, pipeline, tensor)"
    return bars(sorted(rows, key=lambda row: row[1])[:12], "ms", label)


def draw_predicted_memory() -> Svg:
    """Draw predicted over compiled memory, sorted, from docs/measured.md."""
    ratios = sorted(answers.over_compiled(3))
    svg = Svg(70 + 9 * len(ratios), 230, "Predicted over compiled memory of each program, in order")
    for ratio in (0.9, 1.0, 1.1):
        y = 210 - 850 * (ratio - 0.88)
        svg.line((50, y), (60 + 9 * len(ratios), y), kind="grid")
        svg.text(44, y, f"{ratio:.1f}", "faint", "end")
    for i, ratio in enumerate(ratios):
        svg.dot(60 + 9 * i, 210 - 850 * (ratio - 0.88), "c2")
    svg.text(50 + 4.5 * len(ratios), 220, f"{len(ratios)} programs", "faint")
    return svg
