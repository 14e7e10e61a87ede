"""Compile training steps for TPU v4 and v5p and for H100s, and compare plan.py's predictions.

    ./run.sh python tests/make_compiled.py                all of them: about 40 minutes
    ./run.sh python tests/make_compiled.py NAME ...       only these, e.g. jaxformer-full v5p
    ./run.sh python tests/make_compiled.py --print        the table of what is recorded

Writes what the compiler planned to tests/compiled.json, which tests/test_cost.py reads, and prints
a table of ratios, predicted over compiled. Needs libtpu, and jax's CUDA plugin (plan.py --compile
says how to get them). Run one at a time: each rewrites the file.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hardware  # noqa: E402
import utils  # noqa: E402
from planning import compiler, cost  # noqa: E402
from planning.results import Compiled  # noqa: E402
from runtime import cli, errors  # noqa: E402

RECORDED = Path(__file__).with_name("compiled.json")
CHIPS = ("v4", "v5p")  # that CASES are compiled for; GPU_CASES for h100
ALL_NAMES = ",".join(utils.REMAT_NAMES)

# {name: (topology, config, flags)}
CASES = {
    "jaxformer": ("2x4x4", "jaxformer_1b", {}),
    "jaxformer-full": ("2x4x4", "jaxformer_1b", {"train.remat": "full"}),
    "jaxformer-full-layer": (
        "2x4x4",
        "jaxformer_1b",
        {"train.remat": "full", "fsdp.gather": "layer"},
    ),
    "jaxformer-all-names-16x1x2": (
        "2x4x4",
        "jaxformer_1b",
        {"mesh": (16, 1, 2), "train.remat": ALL_NAMES},
    ),
    "jaxformer-two-names-8x4x1": (
        "2x4x4",
        "jaxformer_1b",
        {"mesh": (8, 4, 1), "train.remat": "latents,attention"},
    ),
    "jaxformer-full-4x2x4-interleaved": (
        "2x4x4",
        "jaxformer_1b",
        {"mesh": (4, 2, 4), "mesh.virtual": 2, "train.remat": "full"},
    ),
    "jaxformer-none": ("2x4x4", "jaxformer_1b", {"train.remat": "none"}),
    "moe-full-interleaved": ("2x4x4", "moe_1b", {"train.remat": "full"}),
    "moe-muon-full-interleaved": (
        "2x4x4",
        "moe_1b",
        {"train.remat": "full", "optimizer.name": "muon"},
    ),
    "moe-all-names-layer": (
        "2x4x4",
        "moe_1b",
        {"train.remat": ALL_NAMES, "fsdp.gather": "layer"},
    ),
    "moe-two-names-16x2x1": (
        "2x4x4",
        "moe_1b",
        {
            "mesh": (16, 2, 1),
            "mesh.virtual": 1,
            "train.remat": "latents,attention_out,expert_in,expert_hidden",
        },
    ),
    "moe-dropless-full-interleaved": (
        "2x4x4",
        "moe_1b",
        {"train.remat": "full", "model.capacity_factor": 0.0},
    ),
    "moe-dropless-gathered-16x2x1": (
        "2x4x4",
        "moe_1b",
        {
            "mesh": (16, 2, 1),
            "mesh.virtual": 1,
            "model.capacity_factor": 0.0,
            "model.experts_layout": "sharded",
            "train.remat": "latents,attention_out,expert_in,expert_hidden",
        },
    ),
    "jaxformer-prefix-untied-gathered-4x2x4": (
        "2x4x4",
        "jaxformer_1b",
        {
            "mesh": (4, 2, 4),
            "model.num_hidden_layers": 60,
            "model.first_k_dense_replace": 12,
            "model.experts_layout": "sharded",
            "model.no-tie_word_embeddings": None,
            "train.remat": "full",
        },
    ),
    "dense-full-layer-32x1x1": (
        "2x4x4",
        "dense_1b",
        {
            "mesh": (32, 1, 1),
            "train.microbatches": 8,
            "train.remat": "full",
            "fsdp.gather": "layer",
        },
    ),
    "dense-names-4x4x2": (
        "2x4x4",
        "dense_1b",
        {
            "mesh": (4, 4, 2),
            "train.microbatches": 16,
            "train.remat": "latents,attention,attention_out,mlp_in,hidden",
        },
    ),
    "dense-full-8x1x4": (
        "2x4x4",
        "dense_1b",
        {"mesh": (8, 1, 4), "train.microbatches": 4, "train.remat": "full"},
    ),
    "llama-interleaved": ("2x4x4", "llama_1b", {}),
    "qwen3-moe-full-interleaved": ("2x4x4", "qwen3_moe_1b", {"train.remat": "full"}),
    "jaxformer-none-xla": (
        "2x4x4",
        "jaxformer_1b",
        {"train.remat": "none", "model.attention_kernel": "xla"},
    ),
    "dense-names-xla-4x4x2": (
        "2x4x4",
        "dense_1b",
        {
            "mesh": (4, 4, 2),
            "train.microbatches": 16,
            "train.remat": "latents,attention,attention_out,mlp_in,hidden",
            "model.attention_kernel": "xla",
        },
    ),
    "small-none-8x1x1": (
        "2x2x2",
        "dense_124m",
        {
            "mesh": (8, 1, 1),
            "train.microbatches": 8,
            "train.global_batch_size": 256,
            "train.remat": "none",
        },
    ),
}
ONE = {"mesh": (1, 1, 1)}
GPU_CASES = {
    "gpu-dense-124m": ("", "dense_124m", ONE),
    "gpu-dense-124m-xla": ("", "dense_124m", ONE | {"model.attention_kernel": "xla"}),
    "gpu-dense-124m-documents": ("", "dense_124m", ONE | {"data.segments": None}),
    "gpu-dense-names-8x1x1": ("", "dense_1b", {"mesh": (8, 1, 1), "train.microbatches": 4}),
    "gpu-dense-muon-8x1x1": (
        "",
        "dense_1b",
        {"mesh": (8, 1, 1), "train.microbatches": 4, "optimizer.name": "muon"},
    ),
    "gpu-dense-names-1x1x8": ("", "dense_1b", {"mesh": (1, 1, 8), "train.global_batch_size": 64}),
    "gpu-moe-none-8x1x1": (
        "",
        "moe_1b",
        {"mesh": (8, 1, 1), "mesh.virtual": 1, "train.remat": "none"},
    ),
    # What a search finds for one host of 8 GPUs, and chunks of the loss that were given to it.
    "gpu-moe-gathered-8x1x1": (
        "",
        "moe_1b",
        {
            "mesh": (8, 1, 1),
            "mesh.virtual": 1,
            "model.experts_layout": "sharded",
            "train.microbatches": 1,
            "train.loss-chunk-tokens": 8192,
            "train.remat": "attention,hidden",
        },
    ),
    "gpu-moe-names-2x2x2-interleaved": ("", "moe_1b", {"mesh": (2, 2, 2)}),
    "gpu-moe-dropless-names-2x2x2-interleaved": (
        "",
        "moe_1b",
        {"mesh": (2, 2, 2), "model.capacity_factor": 0.0},
    ),
    "gpu-dense-names-2x2x2-interleaved": (
        "",
        "dense_1b",
        {"mesh": (2, 2, 2), "mesh.virtual": 2, "train.microbatches": 16},
    ),
    "gpu-llama-names-8x1x1": (
        "",
        "llama_1b",
        {"mesh": (8, 1, 1), "mesh.virtual": 1, "train.microbatches": 4},
    ),
    "gpu-qwen3-moe-names-2x2x2-interleaved": ("", "qwen3_moe_1b", {"mesh": (2, 2, 2)}),
    "gpu-moe-full-layer-16x1x1": (
        "",
        "moe_1b",
        {
            "mesh": (16, 1, 1),
            "mesh.virtual": 1,
            "train.remat": "full",
            "fsdp.gather": "layer",
        },
    ),
}


def chips_of(name: str) -> tuple[str, ...]:
    return CHIPS if name in CASES else ("h100",)


def config_of(name: str) -> tuple[str, utils.Config]:
    """(topology, config) of a case."""
    topology, file, changes = (CASES | GPU_CASES)[name]
    flags = []
    for key, value in ({"optimizer.name": "adamw"} | changes).items():
        keys = [key] if key != "mesh" else ["mesh.fsdp", "mesh.pipeline", "mesh.tensor"]
        values = value if key == "mesh" else [value]
        flags += [
            f"--{k}={v}" if v is not None else f"--{k}" for k, v in zip(keys, values, strict=True)
        ]
    return topology, cli.parse(["--config", str(ROOT / "configs" / f"{file}.toml"), *flags])


def recorded() -> dict[str, dict]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def record(name: str, chip: str) -> None:
    topology, config = config_of(name)
    found, text = compiler.compile_step(config, hardware.chip_named(chip), topology)
    if folder := os.environ.get("KEEP_HLO"):
        Path(folder, f"{name}.{chip}.hlo").write_text(text)
    rows = recorded()
    rows[f"{name} {chip}"] = dataclasses.asdict(found)
    RECORDED.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def ratios(name: str, chip: str, found: dict) -> dict[str, float]:
    """Predicted over compiled, of memory, FLOPs, and traffic of each axis that carries any."""
    _, config = config_of(name)
    return cost.predict(config, hardware.chip_named(chip)).over(Compiled(**found))


def table(rows: dict[str, dict]) -> str:
    """Markdown: a row per step, with the chips' numbers beside each other."""
    lines = [
        f"| step | GiB, {' and '.join(CHIPS)} or h100 | memory | FLOPs | traffic through memory | "
        "traffic by mesh axes |",
        "|---|---|---|---|---|---|",
    ]
    for name in CASES | GPU_CASES:
        chips_here = [chip for chip in chips_of(name) if f"{name} {chip}" in rows]
        found = [rows[f"{name} {chip}"] for chip in chips_here]
        if not found:
            continue
        each = [ratios(name, chip, row) for chip, row in zip(chips_here, found, strict=True)]
        gib = ", ".join(f"{row['memory_bytes_per_chip'] / 2**30:.2f}" for row in found)
        parts = {part: [r[part] for r in each if part in r] for part in each[0]}
        columns = [
            ", ".join(f"{ratio:.3f}" for ratio in parts.pop(part, []))
            for part in ("memory", "FLOPs", "memory traffic")
        ]
        axes = ", ".join(f"{axes} {span(values)}" for axes, values in parts.items())
        lines.append(f"| {name} | {gib} | {' | '.join(columns)} | {axes} |")
    return "\n".join(lines)


def span(values: list[float]) -> str:
    """Lowest to highest."""
    least, most = f"{min(values):.3f}", f"{max(values):.3f}"
    return least if least == most else f"{least} to {most}"


def main() -> None:
    words = sys.argv[1:]
    if words != ["--print"]:
        cases = list(CASES | GPU_CASES)
        wanted = [w for w in words if w in hardware.CHIPS]
        names = [w for w in words if w not in hardware.CHIPS] or cases
        unknown = set(names) - set(cases)
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is not a case. Use one of {', '.join(cases)}.")
        pairs = [(n, c) for n in names for c in chips_of(n) if not wanted or c in wanted]
        if not pairs:
            raise ValueError(f"{' and '.join(names)} is not compiled for {' or '.join(wanted)}.")
        for name, chip in pairs:
            print(name, chip, flush=True)
            record(name, chip)
    print(table(recorded()))


if __name__ == "__main__":
    errors.run_command(main)
