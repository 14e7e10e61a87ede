"""Attribute the time of a step in a profiler's trace to layers.

A trace is a perfetto_trace.json.gz. `name_layers` puts layer, part and direction of an operation
before its name, as in "moe/experts backward dot.12", and sums times by them.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

from planning import hlo
from schedule import PHASES
from utils import ConfigError

# Named scopes of model.py, and those in them that are separate; then those of pipeline.py.
LAYERS = ("attention", "mlp", "moe", "embedding", "loss")
PARTS = ("router", "balance", "dispatch", "experts", "return", "shared")
ENDS = {"first": "embedding", "first_backward": "embedding", "last": "loss"}

CONTAINERS = ("while", "conditional", "call")  # the trace also has the operations in them

Seconds = Counter[tuple[str, str]]  # by (layer, operation)


def name_layers(file: Path, program: str) -> Seconds:
    """Put the layer of each operation before its name in a trace; return the seconds of each.

    `other` is what the program does not name. Of a GPU the events of its streams count, whose sums
    other lines repeat, and else those of the host.

    Raises  ConfigError for a trace without an operation of the program.
    """
    known, taken = operation_layers(program), Counter()
    trace = json.loads(gzip.decompress(file.read_bytes()))
    streams = {
        (e["pid"], e["tid"])
        for e in trace["traceEvents"]
        if e.get("name") == "thread_name" and e["args"]["name"].startswith("Stream")
    }
    for event in (e for e in trace["traceEvents"] if e.get("ph") == "X"):
        operation = event.get("args", {}).get("hlo_op")
        named = [known[name] for name in (operation, event["name"]) if name in known]
        layer, name = next((f for f in named if f[0]), ("other", event["name"]))
        counts = (event["pid"], event["tid"]) in streams if streams else operation is not None
        if counts and (layer != "other" or not named):  # else it is a container
            taken[layer, name] += event["dur"] / 1e6
        if layer != "other":
            event["name"] = f"{layer} {event['name']}"
    if not any(layer != "other" for layer, _ in taken):
        raise ConfigError(
            f"{file} has no operation of the program. Trace one of its steps. A GPU needs CUPTI "
            "and permission to use it."
        )
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return taken


def operation_layers(program: str) -> dict[str, tuple[str | None, str]]:
    """Return {operation: (layer, operation)}; the layer of a container is None.

    A GPU kernel has the name of its operation with underscores for other characters, and is
    included too.
    """
    computations = hlo.parse(program).computations
    layers = {}
    for i in (i for computation in computations.values() for i in computation.values()):
        # A fusion without a name has that of its last instruction.
        fused = (n for name in i.computations("calls") for n in computations[name].values())
        names = [n.op_name for n in (*fused, i) if "/" in n.op_name]
        layer = None if i.opcode in CONTAINERS else layer_of(names[-1] if names else "")
        layers[i.name] = layers[re.sub(r"\W", "_", i.name)] = layer, i.name
    return layers


def layer_of(op_name: str) -> str:
    """Return the layer, part and direction of a path of named scopes.

    `between layers` are slices of weights, sums of gradients and the carry. `update` is what runs
    once per step: casts, gathers, the optimizer.
    """
    words = re.findall(r"\w+", op_name)
    layer = next((w for w in words if w in LAYERS), None)
    end = next((ENDS[w] for w in words if w in ENDS), None)
    if not layer and not end:
        return "between layers" if set(words) & {*PHASES.values()} else "update"
    part = next((w for w in words[words.index(layer) :] if w in PARTS), None) if layer else None
    direction = "backward" if "transpose(" in op_name or "first_backward" in words else "forward"
    if "rematted_computation" in words:  # so is the split of a backward pass
        direction = "backward" if "weight_gradients" in words else "recomputed"
    return f"{layer or end}{'/' + part if part else ''} {direction}"


def shares(taken: Seconds) -> dict[str, dict[str, float]]:
    """Return {layer: {operation: share of the total time}}, the largest first."""
    by_layer = defaultdict(dict)
    for (layer, name), seconds in taken.most_common():
        by_layer[layer][name] = seconds / taken.total()
    return dict(sorted(by_layer.items(), key=lambda item: -sum(item[1].values())))
