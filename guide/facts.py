"""Numbers that the guide shows, with how each was found.

    ./run.sh python guide/build.py --refresh     compute all formulas, and write facts.json

A fact is computed by a formula below, or recorded in facts.json alone: with a quote of the document
that has the number, and the command, hardware and commit of the measurement. guide/build.py
computes all formulas again, and fails if one differs from facts.json. A recorded fact fails if its
document has its quote no longer.
"""

import functools
import json
import re
from pathlib import Path

import answers
from pages import PageError

STORE = Path(__file__).with_name("facts.json")
KINDS = ("exact", "predicted", "compiled", "measured")

PLAN = "python plan.py --config configs/jaxformer_1b.toml --chip v4"
PLAN_PER_LAYER = f"{PLAN} --fsdp.gather layer"

# When an axis of the mesh waits for its links, by machine: operations for a byte, and the bound.
AXES = [
    (m, a) for m in ("v4", "v5e", "h100", "h100s", "pcs") for a in ("fsdp", "tensor", "pipeline")
]
INTENSITIES = {f"alpha-{m}-{a}": ("{:,.0f}", f"link_intensity('{m}', '{a}')") for m, a in AXES}
BOUNDS = {f"least-{m}-{a}": ("{:,.0f}", f"least('{m}', '{a}')") for m, a in AXES}

# Operations for a byte of 256 ranks of fsdp on 512 v4, beside 2 of tensor, which have one link.
BESIDE = (
    "hardware.chip_named('v4').flops * 256 / 255 * collectives.collective_s("
    "hardware.chip_named('v4'), 'all-gather', 1.0, ((256, 2),), 512)"
)
BESIDE_FSDP = f"{BESIDE} * 255 / 256 / 1024"  # time of links over operations, with 1,024 tokens
BESIDE_TENSOR = "link_intensity('v4', 'pipeline') / 4.5 / 2048"  # for layers 2,048 wide

# {name: (text, formula over the names of answers.py, command that shows it if not the formula)}.
# The text has one {} for each value of the formula.
EXACT = {
    # The model of configs/jaxformer_1b.toml.
    "parameters": ("{:,} parameters", "plan().parameters", PLAN),
    "active": ("{:.0f} million", "plan().active_parameters / 1e6", PLAN),
    "state-gib": ("{:.1f} GiB", "16 * plan().parameters / GIB"),
    "state-32": ("{:.2f} GiB", "16 * plan().parameters / 32 / GIB"),
    "layers": ("{}", "config_of('jaxformer_1b').model.num_hidden_layers"),
    "microbatches": ("{}", "config_of('jaxformer_1b').train.microbatches"),
    "embedding": ("{:,} numbers", "math.prod(global_shape('first.embedding'))"),
    "embedding-rows": ("{:,}", "global_shape('first.embedding')[0]"),
    "embedding-shape": ("{:,} x {:,}", "global_shape('first.embedding')"),
    "vocabulary-share": (
        "{:.0f} million of {:.0f} million",
        "(math.prod(global_shape('first.embedding')) / 1e6, plan().parameters / 1e6)",
    ),
    "vocabulary-doubled": (
        "{:.0f} % more products to save {:.0f} % of the tokens",
        "(100 * math.prod(global_shape('first.embedding')) / plan().active_parameters,"
        " 100 - 100 * 7156884 / 7466042)",
    ),
    "logits-mib": ("{:,.0f} MiB", "4096 * global_shape('first.embedding')[0] * 4 / 2**20"),
    "context-contiguous": ("{:.2f}", "(2 * 8 - 1) / 8"),
    "rope-longest": ("{:,.0f} positions", "2 * math.pi / rope_frequencies()[-1]"),
    "cached-plain": ("{:,}", "plain_values('jaxformer_1b')"),
    "cached-mla": ("{}", "cached_values('jaxformer_1b')"),
    "cache-text-plain": ("{:,.0f} MiB", "plain_values('jaxformer_1b') * 48 * 4096 * 2 / 2**20"),
    "cache-text-mla": ("{:.0f} MiB", "cached_values('jaxformer_1b') * 48 * 4096 * 2 / 2**20"),
    "weights-bf16": ("{:,.0f} MiB", "2 * plan().parameters / 2**20"),
    "attention-share": ("{:.0f} %", "100 - 100 * flops_share('jaxformer_1b', 1024, 'mlp')"),
    "latents-width": (
        "{} numbers",
        "sum(global_shape(f'blocks.dense.attention.{w}')[-1] for w in ('query.down', 'kv_down'))",
    ),
    "gate-slice": ("{:.0f} KiB", "math.prod(slice_shape('blocks.dense.mlp.gate')) * 4 / 2**10"),
    "gate-bf16": ("{:.0f} KiB", "math.prod(slice_shape('blocks.dense.mlp.gate')) * 2 / 2**10"),
    "gate-gathered": ("{:.1f} MiB", "gathered_bytes('blocks.dense.mlp.gate', 2) / 2**20"),
    "gate-sent": (
        "{:.1f} MiB",
        "sent_bytes('all-gather', gathered_bytes('blocks.dense.mlp.gate', 2), 8) / 2**20",
    ),
    "gate-gradient": ("{:.0f} MiB", "gathered_bytes('blocks.dense.mlp.gate', 4) / 2**20"),
    "gate-gradient-sent": (
        "{:.1f} MiB",
        "sent_bytes('all-gather', gathered_bytes('blocks.dense.mlp.gate', 4), 8) / 2**20",
    ),
    # A model of ten billion parameters, and 200 billion tokens.
    "state-10b": ("{:.0f} GiB", "16 * 10**10 / 2**30"),
    "run-flops": ("{:.1e} FLOPs", "6 * 10e9 * 200e9"),
    # Chips.
    "v4-memory": ("{:.0f} GiB", "hardware.chip_named('v4').memory_bytes / GIB"),
    "v4-flops": ("{:.0f} TFLOP/s", "hardware.chip_named('v4').flops / 1e12"),
    "v4-bandwidth": ("{:,.0f} GB/s", "hardware.chip_named('v4').memory_bandwidth / 1e9"),
    "v4-link": ("{:,.0f} GB/s", "hardware.chip_named('v4').link_bandwidth / 1e9"),
    "h100-memory": ("{:.1f} GiB", "hardware.chip_named('h100').memory_bytes / GIB"),
    "h100-peak": ("{:.0f} TFLOP/s", "hardware.chip_named('h100').flops / 1e12"),
    "h100-bandwidth": ("{:,.0f} GB/s", "hardware.chip_named('h100').memory_bandwidth / 1e9"),
    "h100-link": ("{:,.0f} GB/s", "hardware.chip_named('h100').link_bandwidth / 1e9"),
    "h100-intensity": ("{:.0f}", "intensity('h100')"),
    "llama-1b": ("{:.2f} billion parameters", "llama_plan('pcs', (2, 1, 1))[1].parameters / 1e9"),
    "ethernet": (
        "{:.0f} Gbit/s",
        "8e-9 * hardware.chip_named(MACHINES['pcs'].chip).link_bandwidth",
    ),
    "nvlink-faster": (
        "{:.0f}",
        "hardware.chip_named('h100').link_bandwidth"
        " / hardware.chip_named(MACHINES['pcs'].chip).link_bandwidth",
    ),
    "pcs-tokens": ("{:,.0f} tokens", "llama_plan('pcs', (2, 1, 1))[1].tokens_per_step / 2"),
    "pcs-card": ("{:.0f} GiB", "hardware.chip_named(MACHINES['pcs'].chip).memory_bytes / GIB"),
    "pcs-usable": ("{:.1f} GiB", "usable_bytes(hardware.chip_named(MACHINES['pcs'].chip)) / GIB"),
    "alpha-beside": ("{:,.0f}", BESIDE),
    "beside-fsdp": ("{:.2f}", BESIDE_FSDP),
    "beside-tensor": ("{:.2f}", BESIDE_TENSOR),
    "beside-both": ("{:.2f}", f"{BESIDE_FSDP} + {BESIDE_TENSOR}"),
    "least-two": ("{:,.0f}", "link_intensity('v4', 'pipeline') / 4.5"),
    **INTENSITIES,
    **BOUNDS,
    # Schedules, of (pipeline ranks, chunks of a rank, microbatches).
    "bubble-4-1-8": ("{:.0f} %", "100 * float(Schedule(4, 1, 8).bubble)"),
    "bubble-split-4-1-8": ("{:.0f} %", "100 * float(Schedule(4, 1, 8, True).bubble)"),
    "bubble-4-2-8": ("{:.0f} %", "100 * float(Schedule(4, 2, 8).bubble)"),
    "bubble-4-1-16": ("{:.0f} %", "100 * float(Schedule(4, 1, 16).bubble)"),
    "ticks-4-1-8": ("{}", "Schedule(4, 1, 8).ticks"),
    "ring-4-1-8": ("{}", "Schedule(4, 1, 8).ring_slots"),
    # Texts, shards and their order.
    "sample-vocabulary": ("{:,}", "tokenizer.n_vocab"),
    "shard-mb": ("{:.0f} or {:.0f} MB", "tuple(Prepare.shard_tokens * n / 1e6 for n in (2, 4))"),
    "requests-windows": ("{:.0f} million", "10**12 / 2 / 2048 / 10**6"),
    "requests-blocks": ("{:.1f} million", "2 * 10**12 / dataset.PAGE_BYTES / 10**6"),
    "shuffle-table": ("{:.1f} GB", "8 * 10**12 / 2 / 2048 / 10**9"),
    "block-size": ("{:.0f} MiB", "dataset.PAGE_BYTES / 2**20"),
    "page-cache": ("{:.0f} MiB", "dataset.CACHED_PAGES * dataset.PAGE_BYTES / 2**20"),
    "eval-windows": ("{}", "utils.Eval().sequences"),
    "rounds": ("{}", "dataset.FEISTEL_ROUNDS"),
    "pattern": ("{:,}", "dataset.PERIOD"),
    "tiny-bits": ("{:.2f} bits", "3.6532 / math.log(2) / 2.56"),
    # Constants and defaults.
    "masked": ("{:g}", "attention.MASKED"),
    "cache-block": ("{}", "decode.KEY_BLOCK"),
    "dropless-rows": ("{:.3f}", "dropless_rows(2048, 6, 64)"),
    "update-rms": ("{:g}", "optimizer.UPDATE_RMS"),
    "rate-width": ("{}", "depth.LR['muon'].width"),
    "balance-factor": ("{:g}", "utils.Model().aux_loss_alpha"),
    "heartbeat": ("{:.0f} seconds", "utils.Run().peer_seconds"),
    "stall": ("{:.0f} minutes", "utils.Run().stall_minutes"),
    "spike-steps": ("{}", "train.NORMS"),
    "skipped-limit": ("{}", "utils.Train().max_skipped_in_row"),
    # The interval of saves that take 5 s, with a failure every six hours.
    "best-interval": ("{:.0f} seconds", "math.sqrt(2 * 5 * 21600)"),
    "best-loss": ("{:.1f} %", "100 * lost_share(math.sqrt(2 * 5 * 21600), 5, 21600)"),
    "twice-loss": ("{:.1f} %", "100 * lost_share(2 * math.sqrt(2 * 5 * 21600), 5, 21600)"),
    # What experts bring at equal FLOPs, on the ladder.
    "gain-depth-2": ("{:.3f} nats", "ladder(2, True)['loss'] - ladder(2, False)['loss']"),
    "loss-depth-4": ("{:.3f}", "ladder(4, False)['loss']"),
    "dense-loss-depth-4": ("{:.3f}", "ladder(4, True)['loss']"),
    # What --depth 12 sets.
    "depth-ratio": ("{}", "depth.TOKENS_PER_PARAMETER"),
    "depth-width": ("{}", "depth_config(12).model.hidden_size"),
    "depth-tokens": ("{:.2f} billion tokens", "depth.tokens(12) / 1e9"),
    "depth-steps": ("{:,} steps", "depth_config(12).train.steps"),
    "depth-batch": (
        "{} x {:,} tokens",
        "(depth_config(12).train.global_batch_size, depth_config(12).train.seq_len)",
    ),
    # Plans beside compiled programs.
    "programs": ("{}", "len(over_compiled(3))", "tests/make_compiled.py --print"),
    "h100-time-error": ("{:.0f} %", "100 * rates.ERROR", "planning/rates.py"),
    "h100-memory-share": ("{:.0f} %", "100 * rates.MEMORY", "planning/rates.py"),
    "unrolled-share": ("{:.0f} %", "100 * rates.UNROLLED", "planning/rates.py"),
}
PREDICTED = {
    "memory-step": ("{:.2f} GiB", "plan().memory_bytes_per_chip / GIB", PLAN),
    "memory-layer": ("{:.2f} GiB", "plan('layer').memory_bytes_per_chip / GIB", PLAN_PER_LAYER),
    "saved-activations": ("{:.2f} GiB", "plan().memory['saved activations'] / GIB", PLAN),
    "fsdp-step": ("{:.2f} GB", "sent_over(plan(), 'fsdp') / 1e9", PLAN),
    "fsdp-layer": ("{:.2f} GB", "sent_over(plan('layer'), 'fsdp') / 1e9", PLAN_PER_LAYER),
    "tensor-sent": ("{:.2f} GB", "sent_over(plan(), 'tensor') / 1e9", PLAN),
    "experts-sent": ("{:.2f} GB", "sent_over(plan(), 'fsdp', 'tensor') / 1e9", PLAN),
    "pipeline-sent": ("{:.2f} GB", "sent_over(plan(), 'pipeline') / 1e9", PLAN),
    "pcs-memory": (
        "{:.1f} GiB",
        "llama_plan('pcs', (2, 1, 1))[1].memory_bytes_per_chip / GIB",
        "python plan.py --config configs/llama_1b.toml --chips 2 --chip "
        "name=pc,flops=165,memory=24,bandwidth=1008,link=1.25 --optimizer.name adamw "
        "--optimizer.lr 1e-3 --mesh.fsdp 2 --mesh.pipeline 1 --mesh.tensor 1 "
        "--train.microbatches 64 --train.remat none --fsdp.gather step",
    ),
    "pcs-fsdp": ("{:.2f}", "links_over_compute('pcs', 'fsdp', (2, 1, 1))[1]"),
    "h100-tensor": ("{:.2f}", "links_over_compute('h100', 'tensor', (1, 1, 8))[1]"),
    "plan-step": ("{:.3f} s", "plan().chip_s", PLAN),
    "plan-serial": ("{:.3f} s", "plan().step_s", PLAN),
    "run-hours": (
        "{:.1f} hours",
        "6.5e9 / plan().tokens_per_step * plan().chip_s / 3600",
        f"{PLAN} --tokens 6.5e9",
    ),
    "run-mfu": (
        "{:.0f} %",
        "100 * plan().tokens_per_step / plan().chip_s * flops_per_token('jaxformer_1b')"
        " / (32 * hardware.chip_named('v4').flops)",
        PLAN,
    ),
    "h100-days": ("{:.0f} days", "6 * 1e10 * 2e11 / hardware.CHIPS['h100'].flops / 0.396 / 86400"),
    "trillion-days": ("{:.1f} days", "10**12 / 5.66e6 / 86400"),
}
COMPILED = {
    "mlp-forward": ("{}", "listed(layer_collectives('mlp'))"),
    "mlp-gradients": ("{}", "listed(layer_collectives('mlp', backward=True))"),
    "attention-forward": ("{}", "listed(layer_collectives('attention'))"),
    "attention-gradients": ("{}", "listed(layer_collectives('attention', backward=True))"),
}


@functools.cache
def computed() -> dict[str, dict[str, str]]:
    """Compute all formulas."""
    found = {}
    for kind, facts in (("exact", EXACT), ("predicted", PREDICTED), ("compiled", COMPILED)):
        for name, (text, formula, *command) in facts.items():
            value = answers.evaluate(formula)
            values = value if isinstance(value, tuple) else (value,)
            shown = {"kind": kind, "command": command[0] if command else formula}
            found[name] = {"text": text.format(*values), **shown}
    return found


def stored() -> dict[str, dict[str, str]]:
    return json.loads(STORE.read_text())


def check_recorded(name: str, fact: dict[str, str]) -> None:
    """Raise PageError for an unknown kind, and if the document lacks the quote or its number."""
    if fact["kind"] not in KINDS:
        raise PageError(f"fact {name} is of kind {fact['kind']!r}. Use one of {KINDS}.")
    document = (answers.ROOT / fact["document"]).read_text()
    if " ".join(fact["quote"].split()) not in " ".join(document.split()):
        raise PageError(
            f"fact {name}: {fact['document']} has no longer {fact['quote']!r}. Record the new "
            "number in guide/facts.json."
        )
    if missing := [n for n in re.findall(r"\d[\d.,]*", fact["text"]) if n not in fact["quote"]]:
        raise PageError(f"fact {name}: {missing[0]} does not stand in {fact['quote']!r}.")


def check(used: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Return the stored facts. Raises PageError if one is unknown, missing or stale."""
    formulas, kept = EXACT | PREDICTED | COMPILED, stored()
    recorded = {name: fact for name, fact in kept.items() if "quote" in fact}
    known = formulas.keys() | recorded.keys()
    for name in used.keys() - known:
        raise PageError(f"{used[name][0]} shows {name!r}, which is no fact of guide/facts.py.")
    for name in known - used.keys():
        raise PageError(f"no page shows the fact {name!r}. Delete it.")
    for name, fact in recorded.items():
        check_recorded(name, fact)
    for name, now in computed().items():
        if kept.get(name) != now:
            was = kept.get(name, {}).get("text", "not stored")
            raise PageError(
                f"fact {name} is stale: {was!r} is now {now['text']!r}. Check the pages "
                f"({', '.join(used[name])}), and run ./run.sh python guide/build.py --refresh."
            )
    return recorded | computed()


def refresh() -> None:
    """Write facts.json: recorded facts as they are, and all formulas computed."""
    recorded = {name: fact for name, fact in stored().items() if "quote" in fact}
    facts = json.dumps(recorded | computed(), indent=1, sort_keys=True, ensure_ascii=False)
    STORE.write_text(facts + "\n")
