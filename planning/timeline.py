"""Where a step's time went: a profiler's trace, by layer.

steady/jvp(attention) dot.12      an operation's name, the layers that it is in before it
"""

import gzip
import json
from pathlib import Path

from planning import hlo


def name_layers(file: Path, program: str) -> None:
    """Puts the layer that an operation belongs to in front of its name in a trace.

    file     perfetto_trace.json.gz; a CPU's has the compiler's names alone.
    program  text of the compiled step.
    """
    names = hlo.scopes(program)
    trace = json.loads(gzip.decompress(file.read_bytes()))
    for event in trace["traceEvents"]:
        scope = names.get(event.get("args", {}).get("hlo_op", ""))
        if scope:
            event["name"] = f"{scope} {event['name']}"
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))
