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
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers
from answers import ROOT, Schedule, config_of, global_shape
from pages import PageError

import attention
import dataset
import hardware
import optimizer
import train
import utils
from data.settings import Prepare
from inference import decode
from planning import cost, rates
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


def compute(fact: Fact) -> str:
    """Return the text of a fact.

    Raises  PageError if its kind is unknown, its source is missing, or its document lacks it
    """
    if fact.kind not in KINDS:
        raise PageError(f"fact {fact.name} is of kind {fact.kind!r}. Use one of {KINDS}.")
    if (fact.value is None) == (not fact.quote):
        raise PageError(f"fact {fact.name} needs either a function or a quote of a document.")
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


def recorded(
    name: str,
    text: str,
    quote: str,
    command: str,
    commit: str,
    kind: str = "measured",
    hardware: str = "two CPU cores",
) -> Fact:
    """A number that stands in docs/measured.md."""
    document = "docs/measured.md"
    return Fact(name, kind, text, f"./run.sh {command}", None, hardware, commit, document, quote)


def compiled(name: str, text: str, quote: str, flags: str = "") -> Fact:
    """A number of the step of the 1B model, compiled for 32 TPU v4 without one."""
    command = f"{PLAN} {flags}--compile"
    return recorded(name, text, quote, command, "9c78e0d", "compiled", "libtpu 0.0.51")


def exact(name: str, text: str, command: str, value: Callable[[], Any]) -> Fact:
    return Fact(name, "exact", text, command, value)


def collectives(part: str, backward: bool = False) -> Fact:
    """The collectives of a compiled layer, counted here."""

    def count() -> str:
        found = sorted(answers.layer_collectives(part, backward).items())
        words = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in found]
        return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

    name = f"{part}-{'gradients' if backward else 'forward'}"
    command = f"guide/answers.py: layer_collectives({part!r}, {backward})"
    return Fact(name, "compiled", "{}", command, count, "8 simulated devices")


def gate_bytes(bytes_per_number: int, sent: bool = False, gathered: bool = False) -> float:
    """Return the bytes of the slice of a gate matrix on (8, 2, 2), of the whole, or sent of it."""
    rows, columns = answers.slice_shape("jaxformer_1b", "blocks.dense.mlp.gate", 8, 2, 2)
    whole = 8 * rows * columns * bytes_per_number
    if sent:
        return answers.sent_bytes("all-gather", whole, 8)
    return whole if gathered else whole / 8


def h100_days() -> float:
    """Return the days that one H100 takes for 200 billion tokens of a model of ten billion."""
    flops = 6 * 10e9 * 200e9
    return flops / (hardware.chip_named("h100").flops * 0.396) / 86400


def lost_share(interval_s: float, save_s: float = 5, failure_s: float = 6 * 3600) -> float:
    return 100 * (save_s / interval_s + interval_s / (2 * failure_s))


BEST_INTERVAL = math.sqrt(2 * 5 * 6 * 3600)


def bubble_fact(*sizes: int) -> Fact:
    name = "bubble-" + "-".join(map(str, sizes))
    return schedule_fact(name, "{}", sizes, lambda s: percent(float(s.bubble)))


TOKENS_SAME = "python tests/tokens_same.py --wheels wheels"
TOKENS_SAME_QUOTE = "(11,986,174, 7,466,042, 7,156,884 and 9,585,000 tokens), 0 documents differ"
GATE = "answers.slice_shape('jaxformer_1b', 'blocks.dense.mlp.gate', 8, 2, 2)"
LOST = "(save_s / interval_s + interval_s / (2 * failure_s)), 5 s and 6 hours"

INTRODUCTION = [
    exact("parameters", "{:,} parameters", PLAN, lambda: plan("step").parameters),
    exact("state-gib", "{:.1f} GiB", PLAN, lambda: 16 * plan("step").parameters / GIB),
    exact("state-10b", "{:.0f} GiB", "16 * 10**10 / 2**30", lambda: 16 * 10**10 / GIB),
    exact(
        "v4-memory",
        "{:.0f} GiB",
        "hardware.chip_named('v4')",
        lambda: hardware.chip_named("v4").memory_bytes / GIB,
    ),
    exact(
        "h100-memory",
        "{:.1f} GiB",
        "hardware.chip_named('h100')",
        lambda: hardware.chip_named("h100").memory_bytes / GIB,
    ),
    exact(
        "h100-peak",
        "{:.0f} TFLOP/s",
        "hardware.chip_named('h100')",
        lambda: hardware.chip_named("h100").flops / 1e12,
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
    exact("run-flops", "{:.1e} FLOPs", "6 * 10e9 * 200e9", lambda: 6 * 10e9 * 200e9),
    Fact(
        "h100-days",
        "predicted",
        "{:.0f} days",
        "6 * 10e9 * 200e9 / (hardware.chip_named('h100').flops * 0.396) / 86400",
        h100_days,
    ),
    recorded(
        "tiny-time",
        "202 s",
        "| 2.05 | 202 s: set-up 22 s, compilation 18 s,",
        "",
        "2f004e1",
    ),
    recorded(
        "tiny-loss",
        "3.6452",
        "| `2f004e1` | 3.6452 (",
        "",
        "2f004e1",
    ),
    recorded(
        "first-losses",
        "8.382348",
        "Losses of the first two steps are 8.382348 and 7.570373 on all",
        "--train.steps 4",
        "0eec93a",
    ),
]

TOKENIZATION = [
    exact(
        "sample-vocabulary",
        "{:,}",
        "data.tokenizer.load_tokenizer('sample').n_vocab",
        lambda: answers.tokenizer.n_vocab,
    ),
    *(
        recorded(name, text, TOKENS_SAME_QUOTE, TOKENS_SAME, "f8631c4")
        for name, text in (
            ("tokens-sample", "11,986,174"),
            ("tokens-cl100k", "7,466,042"),
            ("tokens-o200k", "7,156,884"),
        )
    ),
    recorded(
        "text-mb",
        "24.0 MB",
        "2,915 documents, 24.0 MB, of which 2.47 MB are letters of scripts other than Latin",
        TOKENS_SAME,
        "f8631c4",
    ),
    exact(
        "vocabulary-share",
        "{:.0f} million of {:.0f} million",
        PLAN,
        lambda: (math.prod(embedding()) / 1e6, plan("step").parameters / 1e6),
    ),
    *(
        recorded(
            name,
            text,
            "for training 693 documents, 4,283,957 tokens, 2.67 bytes per token; for validation "
            "37, 259,203 and 2.56",
            "python data/prepare.py --source python-stdlib --tokenizer sample --out data/sample",
            "289691d",
            hardware="Python 3.11.7",
        )
        for name, text in (
            ("sample-tokens", "4,283,957 tokens"),
            ("sample-validation", "259,203 tokens"),
            ("bytes-per-token", "2.56 bytes"),
        )
    ),
    *(
        recorded(name, text, quote, "python benchmark.py tokenize --mb 24 --rounds 3", "ef35d66")
        for name, text, quote in (
            ("prepare-1", "5.66 million tokens/s", "| 1 | `data/prepare.py` | 5.66 ("),
            ("prepare-2", "11.6 million tokens/s", "| 2 | `data/prepare.py` | 11.63 ("),
            ("tiktoken-1", "5.95 million tokens/s", "| 1 | `encode_ordinary` | 5.95 ("),
        )
    ),
    *(
        recorded(
            name,
            text,
            "| JSON lines | 5,000 | 57 | 179 | 2 | 212.6 (2,234 M tokens) |",
            "python data/prepare.py --source SOURCE.jsonl --out OUT --workers 2",
            "ef35d66",
        )
        for name, text in (("worker-memory", "179 MB"), ("large-source", "5,000 MB"))
    ),
    exact(
        "shard-mb",
        "{:.0f} or {:.0f} MB",
        "data.settings.Prepare.shard_tokens * 2 / 10**6, and * 4",
        lambda: (Prepare.shard_tokens * 2 / 1e6, Prepare.shard_tokens * 4 / 1e6),
    ),
    Fact(
        "trillion-days",
        "predicted",
        "{:.1f} days",
        "10**12 / 5.66e6 / 86400",
        lambda: 10**12 / 5.66e6 / 86400,
    ),
]

ROPE_LONGEST = "2 * pi / attention.rope_frequencies(model, 128)[-1]"


def rope_longest() -> float:
    m = jaxformer().model
    return 2 * math.pi / float(attention.rope_frequencies(m, m.qk_rope_head_dim)[-1])


def attention_share() -> float:
    costs = answers.layer_costs("jaxformer_1b", jaxformer().train.seq_len)
    flops = [(part, flops) for part, _, flops in costs]
    return sum(f for part, f in flops if not part.startswith("mlp")) / sum(f for _, f in flops)


BASE_MODEL = [
    exact("layers", "{}", PLAN, lambda: jaxformer().model.num_hidden_layers),
    exact("masked", "{:g}", "attention.MASKED", lambda: attention.MASKED),
    exact("rope-longest", "{:,.0f} positions", ROPE_LONGEST, rope_longest),
    exact(
        "cached-plain",
        "{:,}",
        "answers.plain_values('jaxformer_1b')",
        lambda: answers.plain_values("jaxformer_1b"),
    ),
    exact(
        "cached-mla",
        "{}",
        "answers.cached_values('jaxformer_1b')",
        lambda: answers.cached_values("jaxformer_1b"),
    ),
    exact("cache-block", "{}", "inference.decode.BLOCK", lambda: decode.BLOCK),
    exact(
        "attention-share",
        "{}",
        "answers.layer_costs('jaxformer_1b', 1024)",
        lambda: percent(attention_share()),
    ),
    exact("embedding-rows", "{:,}", PLAN, lambda: embedding()[0]),
]

SHARDED_MODEL = [
    planned("memory-step", "{:.2f} GiB", lambda p: p.memory_bytes_per_chip / GIB),
    planned("memory-layer", "{:.2f} GiB", lambda p: p.memory_bytes_per_chip / GIB, "layer"),
    planned("saved-activations", "{:.2f} GiB", lambda p: p.memory["saved activations"] / GIB),
    exact("microbatches", "{}", PLAN, lambda: jaxformer().train.microbatches),
    planned("fsdp-step", "{:.2f} GB", lambda p: sent_over(p, ("fsdp",))),
    planned("fsdp-layer", "{:.2f} GB", lambda p: sent_over(p, ("fsdp",)), "layer"),
    planned("tensor-sent", "{:.2f} GB", lambda p: sent_over(p, ("tensor",))),
    planned("experts-sent", "{:.2f} GB", lambda p: sent_over(p, ("fsdp", "tensor"))),
    planned("pipeline-sent", "{:.2f} GB", lambda p: sent_over(p, ("pipeline",))),
    exact("embedding", "{:,} numbers", PLAN, lambda: math.prod(embedding())),
    exact("embedding-shape", "{:,} x {:,}", PLAN, embedding),
    exact("logits-mib", "{:,.0f} MiB", PLAN, lambda: 4096 * embedding()[0] * 4 / 2**20),
    exact("gate-slice", "{:.0f} KiB", GATE, lambda: gate_bytes(4) / 2**10),
    exact("gate-bf16", "{:.0f} KiB", GATE, lambda: gate_bytes(2) / 2**10),
    exact("gate-gathered", "{:.1f} MiB", GATE, lambda: gate_bytes(2, gathered=True) / 2**20),
    exact("gate-sent", "{:.1f} MiB", GATE, lambda: gate_bytes(2, sent=True) / 2**20),
    exact("gate-gradient", "{:.0f} MiB", GATE, lambda: gate_bytes(4, gathered=True) / 2**20),
    exact("gate-gradient-sent", "{:.1f} MiB", GATE, lambda: gate_bytes(4, sent=True) / 2**20),
    exact(
        "latents-width",
        "{} numbers",
        "model.declare: attention.query.down and attention.kv_down",
        lambda: sum(
            global_shape("jaxformer_1b", f"blocks.dense.attention.{name}", 8, 2, 2)[-1]
            for name in ("query.down", "kv_down")
        ),
    ),
    *(collectives(part, backward) for part in ("mlp", "attention") for backward in (False, True)),
    compiled("compiled-memory", "4.52 GiB", "| memory per chip | 4.52 GiB |"),
    compiled(
        "compiled-full",
        "1.57 GiB",
        "| with `--train.remat full` | 1.57 GiB, compiled over model FLOPs 1.513 |",
        "--train.remat full ",
    ),
    compiled(
        "compiled-full-flops",
        "1.513",
        "| with `--train.remat full` | 1.57 GiB, compiled over model FLOPs 1.513 |",
        "--train.remat full ",
    ),
    compiled("compiled-flops", "1.254", "| compiled over model FLOPs | 1.254 |"),
    *(
        compiled(name, text, "| 9.09 GB, of which 6.46 are asynchronous and 6.28 have work")
        for name, text in (("compiled-sent", "9.09 GB"), ("compiled-hidden", "6.28 GB"))
    ),
]

EXPERTS = [
    exact("active", "{:.0f} million", PLAN, lambda: plan("step").active_parameters / 1e6),
    *(
        recorded(name, text, quote, "python benchmark.py experts", "cc6d282")
        for name, text, quote in (
            ("dropped-125", "2.60 %", "| 1.25 | 2.656 | 0.979 | 2.60 % |"),
            ("dropped-150", "0.77 %", "| 1.5 | 2.714 | 1.000 | 0.77 % |"),
            ("dropless-ratio", "1.033", "| dropless | 2.805 | 1.033 | 0 |"),
        )
    ),
    exact(
        "dropless-rows",
        "{:.3f}",
        "answers.dropless_rows(2048, 6, 64)",
        lambda: answers.dropless_rows(2048, 6, 64),
    ),
    *(
        recorded(
            name,
            text,
            quote,
            f"python plan.py --config configs/moe_1b.toml {flags} --compile",
            "cc6d282",
            "compiled",
            chip,
        )
        for name, text, quote, flags, chip in (
            (
                "dropless-sent",
                "33.4 GB",
                "| 0 (dropless) | 8 H100 | 16.14 | 109.6 | 33.4 |",
                "--chip h100 --chips 8",
                "XLA's compiler for GPUs",
            ),
            (
                "capacity-sent",
                "50.3 GB",
                "| 1.25 | 8 H100 | 17.02 | 113.8 | 50.3 |",
                "--chip h100 --chips 8",
                "XLA's compiler for GPUs",
            ),
            (
                "dropless-sent-v4",
                "19.8 GB",
                "| 0 (dropless) | 32 v4 | 1.41 | 33.5 | 19.8 |",
                "--chip v4 --train.remat full",
                "libtpu 0.0.51",
            ),
            (
                "capacity-sent-v4",
                "16.7 GB",
                "| 1.25 | 32 v4 | 1.38 | 34.8 | 16.7 |",
                "--chip v4 --train.remat full",
                "libtpu 0.0.51",
            ),
        )
    ),
]

SCHEDULES = [
    *(bubble_fact(*sizes) for sizes in ((4, 1, 8), (4, 2, 8), (4, 1, 16))),
    schedule_fact("ticks-4-1-8", "{}", (4, 1, 8), lambda s: s.ticks),
    schedule_fact("ring-4-1-8", "{}", (4, 1, 8), lambda s: s.ring_slots),
    *(link_fact(layout, row) for row in LINK_ROWS for layout in ("fsdp", "1f1b")),
    *(
        Fact(f"links-{name}", "measured", text, quote=quote, **LINKS)
        for name, text, quote in (
            ("sent-fsdp", "36.8 MB", "A host sends 36.8 MB in a step of FSDP, 9.2 of 1F1B"),
            ("sent-1f1b", "9.2 MB", "A host sends 36.8 MB in a step of FSDP, 9.2 of 1F1B"),
            ("count-fsdp", "19", "Its step has 19 collectives, that of 1F1B 72"),
            ("count-1f1b", "72", "Its step has 19 collectives, that of 1F1B 72"),
        )
    ),
]

PROCESSES_QUOTE = (
    "32 processes connected, compared and took a step in 17.5 s, and stopped 4.9 s after a SIGTERM"
)

DISTRIBUTED = [
    *(
        recorded(name, text, PROCESSES_QUOTE, "python main.py, in 32 processes", "3bd7fff")
        for name, text in (("processes-32", "17.5 s"), ("processes-32-stop", "4.9 s"))
    ),
    *(
        recorded(
            name,
            text,
            "compiled in 53 s; 1.57 s a step (median); loss 8.3823 at the first step, validation "
            "loss 5.8874 |",
            "--run.name two --train.steps 4, in two terminals",
            "2f004e1",
        )
        for name, text in (("two-compile", "53 s"), ("two-loss", "8.3823"))
    ),
    recorded(
        "chain-loss",
        "4.8e-7",
        "| 5 to 8 | 1 x 8 | (8, 1, 1) | 1 | 2 | 4.8e-07 | 4.8e-07 | 85 of 85",
        "pytest tests/system/test_run_meshes.py",
        "edb01e4",
    ),
    recorded(
        "chain-arrays",
        "85",
        "| 17 to 20 | 1 x 1 | (1, 1, 1) | 1 | 2 | 4.8e-07 | 0.0e+00 | 85 of 85",
        "pytest tests/system/test_run_meshes.py",
        "edb01e4",
    ),
]

RELIABILITY = [
    recorded(
        "chaos-kills",
        "230",
        "--kills 200 --pairs 30 --stops 1 --seed 11",
        "python tests/chaos.py --kills 200 --pairs 30 --stops 1 --seed 11",
        "847273f",
    ),
    *(
        recorded(
            name,
            text,
            "| s until all had ended, median (longest) | | | | 2.29 (8.07) | 2.06 (4.60) |",
            "python tests/chaos.py --kills 40 --pairs 10 --terms 10 --pair_terms 6",
            "38a0b7f",
        )
        for name, text in (("stop-median", "2.29 s"), ("stop-longest", "8.07 s"))
    ),
    exact(
        "heartbeat",
        "{:.0f} seconds",
        "utils.Run.peer_seconds",
        lambda: utils.Run().peer_seconds,
    ),
    exact("stall", "{:.0f} minutes", "utils.Run.stall_minutes", lambda: utils.Run().stall_minutes),
    exact("spike-steps", "{}", "train.NORMS", lambda: train.NORMS),
    *(
        recorded(
            name,
            text,
            "| 29.24 s | 29.12 s | 0.993 (0.982 to 1.002) | 0.986 (0.974 to 0.998) | 0.18 s "
            "| 0.62 s | 53.8 MiB |",
            "python benchmark.py checkpoint --rounds 3",
            "ed84b64",
        )
        for name, text in (
            ("save-call", "0.18 s"),
            ("save-disk", "0.62 s"),
            ("save-size", "53.8 MiB"),
        )
    ),
    recorded(
        "digest-time",
        "0.04 to 0.07 s",
        "the digests of a checkpoint take 0.04 to 0.07 s per save",
        "python main.py --config configs/tiny.toml",
        "2dda853",
    ),
    exact("best-interval", "{:.0f} seconds", "math.sqrt(2 * 5 * 21600)", lambda: BEST_INTERVAL),
    exact("best-loss", "{:.1f} %", LOST, lambda: lost_share(BEST_INTERVAL)),
    exact("twice-loss", "{:.1f} %", LOST, lambda: lost_share(2 * BEST_INTERVAL)),
]

DATASET = [
    exact(
        "requests-windows",
        "{:.0f} million",
        "10**12 / 2 / 2048",
        lambda: 10**12 / 2 / 2048 / 1e6,
    ),
    exact(
        "requests-blocks",
        "{:.1f} million",
        "2 * 10**12 / dataset.CHUNK_BYTES",
        lambda: 2 * 10**12 / dataset.CHUNK_BYTES / 1e6,
    ),
    exact("shuffle-table", "{:.1f} GB", "8 * 10**12 / 2 / 2048", lambda: 8 * 1e12 / 2 / 2048 / 1e9),
    exact("chunk", "{:.0f} MiB", "dataset.CHUNK_BYTES", lambda: dataset.CHUNK_BYTES / 2**20),
    exact("rounds", "{}", "dataset.FEISTEL_ROUNDS", lambda: dataset.FEISTEL_ROUNDS),
    exact("pattern", "{:,}", "dataset.PERIOD", lambda: dataset.PERIOD),
    recorded(
        "h100-tokens",
        "361,994 tokens/s",
        "| `dense_124m-none` | 131,072 | 0.362 | 361,994 |",
        "python benchmark.py gpu dense_124m-none",
        "856dad2",
        hardware="one NVIDIA H100",
    ),
    *(
        recorded(
            name,
            text,
            quote,
            "python benchmark.py data --tokens 40_000_000 --rounds 3 --steps 20",
            "ef35d66",
        )
        for name, text, quote in (
            ("read-rate", "49 million tokens/s", "| M tokens/s from a disk, 256 rows of 256 | 49."),
            ("open-1000", "5.86 ms", "| ms until opened, 1,000 shards | 5.86 ("),
            (
                "bucket-rate",
                "24 million tokens/s",
                "| the same with `--data.order blocks` | 24.49 (",
            ),
            (
                "bucket-windows",
                "0.1 million tokens/s",
                "That gives 0.1 M tokens/s with rows of 256 and 0.3 with rows of 1,024.",
            ),
        )
    ),
]


def chip_fact(name: str, text: str, chip: str, value: Callable[[Any], Any]) -> Fact:
    command = f"hardware.chip_named({chip!r})"
    return exact(name, text, command, lambda: value(hardware.chip_named(chip)))


def measured_over(column: int) -> list[float]:
    """Return a column of ratios of the table "Predicted over compiled"."""
    document = (ROOT / "docs/measured.md").read_text().partition("## Predicted over compiled")[2]
    lines = document.partition("\n## ")[0].splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| ")]
    table = [row for row in rows if len(row) >= 7 and re.match(r" [\d.]+", row[3])]
    return [float(x) for row in table for x in re.findall(r"\d\.\d+", row[column])]


PLANNING = [
    chip_fact("v4-flops", "{:.0f} TFLOP/s", "v4", lambda chip: chip.flops / 1e12),
    *(
        chip_fact(f"{chip}-{name}", "{:,.0f} GB/s", chip, value)
        for chip in ("v4", "h100")
        for name, value in (
            ("bandwidth", lambda chip: chip.memory_bandwidth / 1e9),
            ("link", lambda chip: chip.link_bandwidth / 1e9),
        )
    ),
    exact(
        "h100-intensity", "{:.0f}", "answers.intensity('h100')", lambda: answers.intensity("h100")
    ),
    planned("plan-step", "{:.3f} s", lambda p: p.chip_s),
    planned("plan-serial", "{:.3f} s", lambda p: p.step_s),
    exact("programs", "{}", "tests/make_compiled.py --print", lambda: len(measured_over(3))),
    *(
        exact(name, "{}", "planning/rates.py", lambda value=value: percent(value))
        for name, value in (
            ("h100-time-error", rates.RATES["h100"].error),
            ("h100-memory-share", rates.RATES["h100"].memory),
        )
    ),
    recorded(
        "h100-slower",
        "1.7 to 2.3 times",
        "On one H100 a step takes 1.7 to 2.3 times as long",
        "python benchmark.py gpu",
        "856dad2",
        hardware="one NVIDIA H100",
    ),
    recorded(
        "h100-memory-over",
        "3 to 10 %",
        "The plan is 3 to 10 % above the memory that was used.",
        "python benchmark.py gpu",
        "856dad2",
        hardware="one NVIDIA H100",
    ),
    recorded(
        "h100-products",
        "69 %",
        "681 TFLOP/s in 8192 x 8192 x 8192 bfloat16 products, 69 % of the peak",
        "python benchmark.py gpu machine",
        "856dad2",
        hardware="one NVIDIA H100",
    ),
]

LADDER = "python main.py --config configs/ladder.toml, as docs/experiments.jsonl has it"


def ladder_fact(name: str, text: str, quote: str) -> Fact:
    """A number of docs/experiments.md."""
    where = ("one CPU core", "acf62cd", "docs/experiments.md")
    return Fact(name, "measured", text, f"./run.sh {LADDER}", None, *where, quote)


MUON = "Muon is 1.5 % of the FLOPs and 0.3 % of the bytes sent"
MUON_COMMAND = "python plan.py --config configs/moe_1b.toml --chip v4 --chips 32 --compile"

OPTIMIZER = [
    exact("update-rms", "{:g}", "optimizer.UPDATE_RMS", lambda: optimizer.UPDATE_RMS),
    *(
        recorded(name, text, MUON, MUON_COMMAND, "03f9736", "compiled", "libtpu 0.0.51")
        for name, text in (("muon-flops", "1.5 %"), ("muon-sent", "0.3 %"))
    ),
    ladder_fact("ladder-muon", "0.3064 ± 0.0080", "3.1574 ± 0.0130 | AdamW | -0.3064 ± 0.0080 |"),
    *(
        ladder_fact(f"ladder-{size}", text, f"| AdamW | {difference} | {text} ±")
        for size, text, difference in (
            ("1m", "0.621", "-0.2853 ± 0.0060"),
            ("5m", "0.613", "-0.3064 ± 0.0080"),
            ("20m", "0.600", "-0.3787 ± 0.0138"),
        )
    ),
]


def run_hours() -> float:
    p = plan("step")
    return 6.5e9 / p.tokens_per_step * p.chip_s / 3600


BITS = "3.6452 / math.log(2) / 2.56"
EXPORTED = "`validate.py --model.eval_capacity_factor 8` prints 3.4083 nats per token"

FINAL_RUN = [
    Fact(
        "run-hours",
        "predicted",
        "{:.1f} hours",
        f"{PLAN} --tokens 6.5e9",
        run_hours,
    ),
    exact("tiny-bits", "{:.2f} bits", BITS, lambda: 3.6452 / math.log(2) / 2.56),
    *(
        recorded(name, text, "takes 1.89 bits a byte with `gzip -9` and 1.61 with `xz -9`", "", "")
        for name, text in (("gzip-bits", "1.89 bits"), ("xz-bits", "1.61 bits"))
    ),
    recorded("our-loss", "3.4083", EXPORTED, "python validate.py --run runs/tiny", "d7c7bab"),
    recorded(
        "hf-loss",
        "3.408285",
        "The exported model in transformers 5.23 has a mean of 3.408285",
        "python convert.py export --run runs/tiny --out exported --remote_code",
        "d7c7bab",
    ),
    recorded(
        "peer-ratio",
        "0.76",
        "this project has 0.76 of torch.compile's speed",
        "python benchmark.py peer",
        "d09b425",
    ),
]

FACTS = [
    *INTRODUCTION,
    *TOKENIZATION,
    *BASE_MODEL,
    *SHARDED_MODEL,
    *EXPERTS,
    *SCHEDULES,
    *DISTRIBUTED,
    *RELIABILITY,
    *DATASET,
    *PLANNING,
    *OPTIMIZER,
    *FINAL_RUN,
]
