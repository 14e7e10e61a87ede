"""Numbers that the guide shows, with how each was found.

    ./run.sh python guide/build.py --refresh     compute all of them, and write facts.json

A fact is computed by a function of this project, or recorded: a measured number that stands in a
document with its command, hardware and commit. guide/build.py computes the cheap ones again, and
fails if one differs from facts.json. A recorded fact fails if its document no longer has it.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers
from answers import ROOT, Schedule, config_of, global_shape
from pages import PageError

import dataset
from utils import GIB

STORE = Path(__file__).with_name("facts.json")
KINDS = ("exact", "predicted", "compiled", "measured")


@dataclass(frozen=True)
class Fact:
    name: str
    kind: str  # of KINDS
    text: str  # as it is shown, with its unit; {} is the value
    command: str  # that computes it, for the reader
    value: Callable[[], Any] | None = None  # None: recorded
    hardware: str = ""
    commit: str = ""
    document: str = ""  # of a recorded fact
    quote: str = ""  # text in the document, which contains the number

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PageError(f"fact {self.name} is of kind {self.kind!r}. Use one of {KINDS}.")
        if (self.value is None) == (not self.quote):
            raise PageError(f"fact {self.name} needs either a function or a quote of a document.")


def compute(fact: Fact) -> str:
    """Return the text of a fact. Raises PageError for a recorded one that its document lacks."""
    if fact.value is not None:
        value = fact.value()
        return fact.text.format(*value) if isinstance(value, tuple) else fact.text.format(value)
    document = " ".join((ROOT / fact.document).read_text().split())
    if " ".join(fact.quote.split()) not in document:
        raise PageError(
            f"fact {fact.name}: {fact.document} has no longer {fact.quote!r}. Record the new "
            "number."
        )
    return fact.text


def stored() -> dict[str, dict[str, str]]:
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def as_json(fact: Fact) -> dict[str, str]:
    names = ("kind", "command", "hardware", "commit")
    return {"text": compute(fact)} | {name: getattr(fact, name) for name in names}


def check(used: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Return the stored facts. Raises PageError if one is unknown, missing or stale."""
    known, kept = {fact.name: fact for fact in FACTS}, stored()
    for name, where in used.items():
        if name not in known:
            raise PageError(f"{where[0]} shows a fact {name!r} that guide/facts.py does not have.")
    for name, fact in known.items():
        if name not in used:
            raise PageError(f"no page shows the fact {name!r}. Delete it from guide/facts.py.")
        if kept.get(name) != (now := as_json(fact)):
            was = kept.get(name, {}).get("text", "not stored")
            raise PageError(
                f"fact {name} is stale: {was!r} is now {now['text']!r}. Check the pages "
                f"({', '.join(used[name])}), and run ./run.sh python guide/build.py --refresh."
            )
    return kept


def refresh() -> None:
    facts = {fact.name: as_json(fact) for fact in FACTS}
    STORE.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


# --- the facts ------------------------------------------------------------------------------------


def schedule_fact(name: str, text: str, sizes: tuple[int, int, int], value: Callable) -> Fact:
    pipeline, virtual, microbatches = sizes
    command = f"python pipeline.py --pipeline {pipeline} --virtual {virtual}"
    command += f" --microbatches {microbatches}"
    return Fact(name, "exact", text, command, lambda: value(Schedule(*sizes)))


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


PLAN = "python plan.py --config configs/jaxformer_1b.toml --chip v4"


@functools.cache
def plan(gather: str) -> Any:
    """Return the plan of the 1B model on 32 TPU v4, with weights gathered per step or layer."""
    import hardware
    import utils
    from planning import cost

    config = config_of("jaxformer_1b", 8, 2, 2)
    config = dataclasses.replace(config, fsdp=utils.Fsdp(gather=gather))
    return cost.predict(config, hardware.chip_named("v4"))


def jaxformer() -> Any:
    return config_of("jaxformer_1b", 8, 2, 2)


def planned(name: str, text: str, value: Callable[[Any], Any], gather: str = "step") -> Fact:
    command = PLAN + (" --fsdp.gather layer" if gather == "layer" else "")
    return Fact(name, "predicted", text, command, lambda: value(plan(gather)))


def sent_over(p: Any, axes: tuple[str, ...]) -> float:
    """Return the gigabytes that a device sends along these axes in a step."""
    return sum(t.sent_bytes for t in p.traffic if t.axes == axes) / 1e9


def embedding() -> tuple[int, int]:
    return global_shape("jaxformer_1b", "first.embedding", 8, 2, 2)


LINKS = {
    "document": "docs/measured.md",
    "command": "./run.sh python benchmark.py links",
    "hardware": "4 simulated hosts on 2 cores",
    "commit": "9259946",
}
LINK_ROWS = {
    "1000": "| 1000 Mbit/s | 953 | 0.02 | 1.51 / 0.99 / 1.18 | 1.38 /",
    "100": "| 100 Mbit/s | 93 | 0.01 | 5.68 / 3.86 / 5.78 | 1.93 /",
    "delay": "| not throttled, 5 ms | 801 | 10.46 | 2.53 / - / 2.16 | 5.68 /",
}


def link_fact(layout: str, row: str) -> Fact:
    """A measured step over links, whose number is the first of its cell."""
    cells = [cell.strip() for cell in LINK_ROWS[row].split("|")[1:]]
    cell = cells[3 if layout == "fsdp" else 4]
    text = f"{cell.split('/')[0].strip()} s"
    return Fact(f"links-{layout}-{row}", "measured", text, quote=LINK_ROWS[row], **LINKS)


def recorded(name: str, text: str, quote: str, command: str, commit: str) -> Fact:
    """A number of docs/measured.md, from a command on two CPU cores."""
    document, hardware = "docs/measured.md", "two CPU cores"
    return Fact(
        name, "measured", text, f"./run.sh {command}", None, hardware, commit, document, quote
    )


def bubble_fact(*sizes: int) -> Fact:
    name = "bubble-" + "-".join(map(str, sizes))
    return schedule_fact(name, "{}", sizes, lambda s: percent(float(s.bubble)))


FACTS = [
    *(bubble_fact(*sizes) for sizes in ((4, 1, 8), (4, 2, 8), (4, 1, 16))),
    Fact(
        "requests-windows",
        "exact",
        "{:.0f} million",
        "10**12 / 2 / 2048",
        lambda: 10**12 / 2 / 2048 / 1e6,
    ),
    Fact(
        "requests-blocks",
        "exact",
        "{:.1f} million",
        "2 * 10**12 / dataset.CHUNK_BYTES",
        lambda: 2 * 10**12 / dataset.CHUNK_BYTES / 1e6,
    ),
    schedule_fact("ticks-4-1-8", "{}", (4, 1, 8), lambda s: s.ticks),
    schedule_fact("ring-4-1-8", "{}", (4, 1, 8), lambda s: s.ring_slots),
    Fact("parameters", "exact", "{:,} parameters", PLAN, lambda: plan("step").parameters),
    Fact("state-gib", "exact", "{:.1f} GiB", PLAN, lambda: 16 * plan("step").parameters / GIB),
    planned("memory-step", "{:.2f} GiB", lambda p: p.memory_bytes_per_chip / GIB),
    planned("memory-layer", "{:.2f} GiB", lambda p: p.memory_bytes_per_chip / GIB, "layer"),
    planned("saved-activations", "{:.2f} GiB", lambda p: p.memory["saved activations"] / GIB),
    Fact("microbatches", "exact", "{}", PLAN, lambda: jaxformer().train.microbatches),
    planned("fsdp-step", "{:.2f} GB", lambda p: sent_over(p, ("fsdp",))),
    planned("fsdp-layer", "{:.2f} GB", lambda p: sent_over(p, ("fsdp",)), "layer"),
    Fact("embedding", "exact", "{:,} numbers", PLAN, lambda: math.prod(embedding())),
    Fact("embedding-shape", "exact", "{:,} x {:,}", PLAN, embedding),
    Fact("logits-mib", "exact", "{:,.0f} MiB", PLAN, lambda: 2048 * embedding()[0] * 4 / 2**20),
    Fact(
        "sample-vocabulary",
        "exact",
        "{:,}",
        "data.tokenizer.load_tokenizer('sample').n_vocab",
        lambda: answers.tokenizer.n_vocab,
    ),
    *(
        recorded(name, text, quote, "python benchmark.py tokenize --mb 24 --rounds 3", "ef35d66")
        for name, text, quote in (
            ("prepare-1", "5.66 million tokens/s", "| 1 | `data/prepare.py` | 5.66 ("),
            ("prepare-2", "11.6 million tokens/s", "| 2 | `data/prepare.py` | 11.63 ("),
            ("tiktoken-1", "5.95 million tokens/s", "| 1 | `encode_ordinary` | 5.95 ("),
        )
    ),
    Fact(
        "h100-dense",
        "measured",
        "39.6 %",
        "./run.sh python benchmark.py gpu dense_1b-none",
        None,
        "one NVIDIA H100",
        "856dad2",
        "docs/measured.md",
        "| `dense_1b-none` | 65,536 | 1.069 | 61,310 | 39.6 % |",
    ),
    recorded(
        "processes-32",
        "17.5 s",
        "32 processes connected, compared and took a step in 17.5 s",
        "python tests/many_processes.py --count 32",
        "3bd7fff",
    ),
    recorded(
        "chain-loss",
        "4.8e-7",
        "| 5 to 8 | 1 x 8 | (8, 1, 1) | 1 | 2 | 4.8e-07 | 4.8e-07 | 85 of 85",
        "python tests/mesh_chain.py",
        "edb01e4",
    ),
    recorded(
        "chain-arrays",
        "85",
        "| 17 to 20 | 1 x 1 | (1, 1, 1) | 1 | 2 | 4.8e-07 | 0.0e+00 | 85 of 85",
        "python tests/mesh_chain.py",
        "edb01e4",
    ),
    recorded(
        "chaos-kills",
        "230",
        "--kills 200 --pairs 30 --stops 1 --seed 11",
        "python tests/chaos.py --kills 200 --pairs 30 --stops 1 --seed 11",
        "847273f",
    ),
    *(link_fact(layout, row) for row in LINK_ROWS for layout in ("fsdp", "1f1b")),
]
