"""Where a step's time went: a profiler's trace, by layer.

steady/jvp(attention) dot.12      an operation's name, the layers that it is in before it
moe/experts backward              the place that its time counts for
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
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


def name_layers(file: Path, program: str) -> None:
    """Puts the layer that an operation belongs to in front of its name in a trace.

    file     perfetto_trace.json.gz; a CPU's has the compiler's names alone.
    program  text of the compiled step.
    """
    names = hlo.scopes(program)
    trace = read(file)
    for event in trace["traceEvents"]:
        scope = names.get(event.get("args", {}).get("hlo_op", ""))
        if scope:
            event["name"] = f"{scope} {event['name']}"
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))


def read(file: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(file.read_bytes()))


# --- time by layer --------------------------------------------------------------------------------


def shares(file: Path, program: str) -> dict[str, float]:
    """{place: share of the time of all operations}, largest first; they sum to 1.

    file, program  as in name_layers, before names are changed there.
    """
    taken = Counter()
    for (place, _), seconds in operation_s(file, program).items():
        taken[place] += seconds
    total = sum(taken.values())
    return {place: seconds / total for place, seconds in taken.most_common()}


def largest(file: Path, program: str, most: int = 3) -> dict[str, dict[str, float]]:
    """{place: {operation: share of the time of all}}, the largest ones of each place."""
    taken = operation_s(file, program)
    total, found = sum(taken.values()), defaultdict(dict)
    for (where, name), seconds in taken.most_common():
        if len(found[where]) < most:
            found[where][name] = seconds / total
    return dict(found)


def operation_s(file: Path, program: str) -> Counter[tuple[str, str]]:
    """{(place, operation): its seconds in the trace}; `other` is what the program does not name.

    Raises  ValueError for a trace in which no operation of the program is.
    """
    places = places_of(program)
    flat = {_flat(name): name for name in places}
    taken: Counter[tuple[str, str]] = Counter()
    for event in operations(read(file)["traceEvents"]):
        given = event["args"].get("hlo_op", ""), event["name"]
        known = [name for name in (*given, *(flat.get(_flat(g)) for g in given)) if name in places]
        inside = [name for name in known if places[name] is not None]
        if not known or inside:
            where, name = (places[inside[0]], inside[0]) if inside else ("other", event["name"])
            taken[where, name] += event["dur"] / 1e6
    if not any(where != "other" for where, _ in taken):
        raise ValueError(
            f"{file} has no operation of the program: no step of it was traced, or the profiler "
            "may not read this device (a GPU needs CUPTI, and leave to use it). Trace a step of "
            "this program, with that leave."
        )
    return taken


def _flat(name: str) -> str:
    """A GPU's kernel is called as its operation is, in letters that C allows."""
    return re.sub(r"\W", "_", name)


def operations(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events of operations, each once: a GPU's streams, or else what the host ran of a program.

    Other lines of a GPU sum up what is in its streams.
    """
    named = [e for e in events if e.get("ph") == "M"]
    gpus = {
        e["pid"]
        for e in named
        if e["name"] == "process_name" and e["args"]["name"].startswith("/device:")
    }
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and e["args"]["name"].startswith("Stream")
    }
    for event in events:
        event = {"args": {}} | event
        if event.get("ph") == "X" and (
            (event["pid"], event["tid"]) in streams if gpus else "hlo_op" in event["args"]
        ):
            yield event


def places_of(program: str) -> dict[str, str | None]:
    """{operation: its place}; None for those that contain others."""
    computations = hlo.parse(program).computations
    return {
        i.name: None if i.opcode in CONTAINERS else place(op_name(i, computations))
        for computation in computations.values()
        for i in computation.values()
    }


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
