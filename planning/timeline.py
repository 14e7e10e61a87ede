"""Where a step's time went: a profiler's trace, by layer.

steady/jvp(attention) dot.12      an operation's name, the layers that it is in before it
moe/experts backward              the place that its time counts for
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from planning import hlo
from planning.hlo import Instruction

# Named scopes of model.py, and what of them is told apart; then those of pipeline.py around them.
LAYERS = ("attention", "mlp", "moe", "embedding", "loss")
PARTS = ("router", "balance", "dispatch", "experts", "return", "shared")
ENDS = {"first": "embedding", "first_backward": "embedding", "last": "loss"}
PHASES = ("warmup", "steady", "cooldown")

CONTAINERS = ("while", "conditional", "call")  # what runs inside is in the trace too


def read(file: Path) -> dict[str, Any]:
    """A trace: perfetto_trace.json.gz. A CPU's has the compiler's names alone."""
    return json.loads(gzip.decompress(file.read_bytes()))


def name_layers(file: Path, program: str) -> None:
    """Puts the layer that an operation of the compiled program belongs to in front of its name."""
    names, trace = hlo.scopes(program), read(file)
    for event in trace["traceEvents"]:
        if scope := names.get(event.get("args", {}).get("hlo_op", "")):
            event["name"] = f"{scope} {event['name']}"
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))


Seconds = Counter[tuple[str, str]]  # by place and operation


def shares(taken: Seconds) -> dict[str, float]:
    """{place: share of the time of all operations}, largest first; they sum to 1."""
    places = Counter()
    for (where, _), seconds in taken.items():
        places[where] += seconds
    return {where: seconds / taken.total() for where, seconds in places.most_common()}


def largest(taken: Seconds, most: int = 3) -> dict[str, dict[str, float]]:
    """{place: {operation: share of the time of all}}, the largest ones of each place."""
    found = defaultdict(dict)
    for (where, name), seconds in taken.most_common():
        if len(found[where]) < most:
            found[where][name] = seconds / taken.total()
    return dict(found)


def operation_s(file: Path, program: str) -> Seconds:
    """Seconds of each operation in a trace; `other` is what the program does not name.

    file    before name_layers.
    Raises  ValueError for a trace in which no operation of the program is.
    """
    known, taken = places_of(program), Counter()
    for event in operations(read(file)["traceEvents"]):
        spelt = event["args"].get("hlo_op", ""), event["name"]
        found = [known[name] for name in spelt if name in known]
        inside = [(where, name) for where, name in found if where]
        if inside or not found:
            taken[inside[0] if inside else ("other", event["name"])] += event["dur"] / 1e6
    if not any(where != "other" for where, _ in taken):
        raise ValueError(
            f"{file} has no operation of the program. Trace a step of it, with CUPTI and leave to "
            "use it on a GPU."
        )
    return taken


def operations(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a GPU's streams, which its other lines sum up, or else what the host ran."""
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["args"]["name"].startswith("Stream")
    }
    ran = [{"args": {}} | e for e in events if e.get("ph") == "X"]
    return [
        e for e in ran if ((e["pid"], e["tid"]) in streams if streams else "hlo_op" in e["args"])
    ]


def places_of(program: str) -> dict[str, tuple[str | None, str]]:
    """{operation: (its place, operation)}; no place for those that contain others.

    Also as a GPU's kernel is called: as its operation is, in letters that C allows.
    """
    computations = hlo.parse(program).computations
    found = {}
    for i in (i for computation in computations.values() for i in computation.values()):
        where = None if i.opcode in CONTAINERS else place(op_name(i, computations))
        found[i.name] = found[re.sub(r"\W", "_", i.name)] = where, i.name
    return found


def op_name(instruction: Instruction, computations: dict[str, hlo.Computation]) -> str:
    """Its own, or the last of those in a fusion that has none."""
    inside = [i for name in instruction.computations("calls") for i in computations[name].values()]
    names = [i.op_name for i in (*inside, instruction) if "/" in i.op_name]
    return names[-1] if names else ""


def place(op_name: str) -> str:
    """The layer, part and direction of a path of named scopes; `again` is what remat repeats.

    `between layers` are slices of weights, gradients added up, what is carried; `update` is what is
    done once a step: casts, gathers, the optimizer.
    """
    words = re.findall(r"\w+", op_name)
    layer = next((w for w in words if w in LAYERS), None)
    end = next((ENDS[w] for w in words if w in ENDS), None)
    if not layer and not end:
        return "between layers" if set(words) & set(PHASES) else "update"
    part = next((w for w in words[words.index(layer) :] if w in PARTS), None) if layer else None
    way = "backward" if "transpose(" in op_name or "first_backward" in words else "forward"
    way = "again" if "rematted_computation" in words else way
    return f"{layer or end}{'/' + part if part else ''} {way}"
