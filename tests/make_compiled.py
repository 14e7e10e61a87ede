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
import re
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
CHIPS = ("v4", "v5p")  # that TPU_CASES are compiled for; GPU_CASES for h100
NAMES = "latents,attention_out,expert_in,expert_hidden"
QWEN3_NAMES = "latents,attention,attention_out,hidden,expert_in,expert_hidden"
DENSE_NAMES = "latents,attention,attention_out,mlp_in,hidden"
# Settings that the cases of a config begin with.
ONE = "--mesh.fsdp 1 --mesh.pipeline 1 --mesh.tensor 1 --train.microbatches"
MANY = "--mesh.fsdp 8 --mesh.pipeline 2 --mesh.tensor 2 --mesh.virtual 2 --train.microbatches 8"
FIRST = {
    "dense_124m": f"{ONE} 4",
    "dense_1b": f"{ONE} 8",
    "moe_124m": f"{ONE} 8",
    "moe_1b": f"{MANY} --train.remat ALL",
    "llama_1b": f"{MANY} --train.remat {DENSE_NAMES}",
    "qwen3_moe_1b": f"{MANY} --train.remat {QWEN3_NAMES}",
}
# Settings of configs when their programs for TPUs were recorded.
CHUNK = "--train.loss_chunk_tokens 2048"
FORMER = f"--model.moe_intermediate_size 544 --model.intermediate_size 2816 {CHUNK}"
LONG = "--train.global_batch_size 1 --train.microbatches 1"
ALONE = "--mesh.virtual 1 --train.microbatches 16 --train.remat none --optimizer.name muon"

# NAME CONFIG [FSDP,PIPELINE,TENSOR] FLAGS
TPU_CASES = f"""
jaxformer jaxformer_1b
jaxformer-full jaxformer_1b --train.remat full
jaxformer-full-layer jaxformer_1b --train.remat full --fsdp.gather layer
jaxformer-all-names-16x1x2 jaxformer_1b 16,1,2 --train.remat ALL
jaxformer-two-names-8x4x1 jaxformer_1b 8,4,1 --train.remat latents,attention
jaxformer-full-4x2x4-interleaved jaxformer_1b 4,2,4 --mesh.virtual 2 --train.remat full
jaxformer-none jaxformer_1b --train.remat none
moe-full-interleaved moe_1b {FORMER} --train.remat full
moe-muon-full-interleaved moe_1b {FORMER} --train.remat full --optimizer.name muon
moe-all-names-layer moe_1b {FORMER} --train.remat ALL --fsdp.gather layer
moe-two-names-16x2x1 moe_1b 16,2,1 {FORMER} --mesh.virtual 1 --train.remat {NAMES}
moe-dropless-full-interleaved moe_1b {FORMER} --train.remat full --model.capacity_factor 0.0
moe-dropless-gathered-16x2x1 moe_1b 16,2,1 {FORMER} --mesh.virtual 1 --model.capacity_factor 0.0 \
 --model.experts_layout sharded --train.remat {NAMES}
jaxformer-prefix-untied-gathered-4x2x4 jaxformer_1b 4,2,4 --model.num_hidden_layers 60 \
 --model.first_k_dense_replace 12 --model.no_rope_layer_interval 0 --train.remat full \
 --model.experts_layout sharded --model.no-tie_word_embeddings
dense-full-layer-32x1x1 dense_1b 32,1,1 {CHUNK} --train.microbatches 8 --train.remat full \
 --fsdp.gather layer
dense-names-4x4x2 dense_1b 4,4,2 {CHUNK} --train.microbatches 16 --train.remat {DENSE_NAMES}
dense-full-8x1x4 dense_1b 8,1,4 {CHUNK} --train.microbatches 4 --train.remat full
llama-interleaved llama_1b
qwen3-moe-full-interleaved qwen3_moe_1b --train.remat full
jaxformer-none-xla jaxformer_1b --train.remat none --model.attention_kernel xla
dense-names-xla-4x4x2 dense_1b 4,4,2 {CHUNK} --train.microbatches 16 --train.remat {DENSE_NAMES} \
 --model.attention_kernel xla
llama-muon-context-8-full-layer llama_1b 1,1,1 --mesh.virtual 1 --mesh.context 8 {LONG} \
 --train.seq_len 32768 --train.remat full --fsdp.gather layer --optimizer.name muon
small-none-8x1x1 dense_124m 8,1,1 {CHUNK} --train.microbatches 8 --train.global_batch_size 256 \
 --train.remat none
"""
# gpu-moe-gathered is what a search finds for one host of 8 GPUs, with chunks of the loss that were
# given to it.
GPU_CASES = f"""
gpu-dense-124m dense_124m 1,1,1
gpu-dense-124m-xla dense_124m 1,1,1 --model.attention_kernel xla
gpu-dense-124m-documents dense_124m 1,1,1 --data.segments
gpu-dense-124m-muon dense_124m 1,1,1 --optimizer.name muon
gpu-dense-1b dense_1b 1,1,1 --optimizer.name muon
gpu-dense-1b-fp8 dense_1b 1,1,1 --optimizer.name muon --model.matmul_dtype float8
gpu-moe-1b moe_1b 1,1,1 {ALONE}
gpu-moe-1b-dropless moe_1b 1,1,1 {ALONE} --model.capacity_factor 0.0
gpu-moe-124m moe_124m 1,1,1 --optimizer.name muon
gpu-dense-names-8x1x1 dense_1b 8,1,1 --train.microbatches 4 --train.remat {DENSE_NAMES}
gpu-dense-muon-8x1x1 dense_1b 8,1,1 --train.microbatches 4 --train.remat {DENSE_NAMES} \
 --optimizer.name muon
gpu-dense-names-1x1x8 dense_1b 1,1,8 --train.global_batch_size 64 --train.remat {DENSE_NAMES}
gpu-moe-none-8x1x1 moe_1b 8,1,1 --mesh.virtual 1 --train.remat none
gpu-moe-gathered-8x1x1 moe_1b 8,1,1 --mesh.virtual 1 --model.experts_layout sharded \
 --train.microbatches 1 --train.loss-chunk-tokens 8192 --train.remat attention,hidden
gpu-moe-names-2x2x2-interleaved moe_1b 2,2,2
gpu-moe-dropless-names-2x2x2-interleaved moe_1b 2,2,2 --model.capacity_factor 0.0
gpu-dense-names-2x2x2-interleaved dense_1b 2,2,2 --mesh.virtual 2 --train.microbatches 16 \
 --train.remat {DENSE_NAMES}
gpu-llama-names-8x1x1 llama_1b 8,1,1 --mesh.virtual 1 --train.microbatches 4
gpu-llama-8b-context-8-full-layer llama_1b 1,1,1 --mesh.virtual 1 --mesh.context 8 {LONG} \
 --train.seq_len 131072 --train.remat full --fsdp.gather layer --model.hidden_size 4096 \
 --model.num_hidden_layers 32 --model.intermediate_size 14336 --model.head_dim 128 \
 --model.vocab_size 128256
gpu-moe-context-8 moe_1b 1,1,1 --mesh.virtual 1 --mesh.context 8 {LONG} --train.seq_len 131072
gpu-qwen3-moe-names-2x2x2-interleaved qwen3_moe_1b 2,2,2
gpu-moe-full-layer-16x1x1 moe_1b 16,1,1 --mesh.virtual 1 --train.remat full --fsdp.gather layer
"""


def flags_of(name: str, config: str, *words: str) -> tuple[str, list[str]]:
    """Return a case's name and its flags of main.py. words  the mesh if it has one, and flags."""
    mesh, first = [], FIRST.get(config, "").split()
    if words and re.fullmatch(r"\d+,\d+,\d+", words[0]):
        sizes = zip(("fsdp", "pipeline", "tensor"), words[0].split(","), strict=True)
        mesh, words = [f"--mesh.{axis}={size}" for axis, size in sizes], words[1:]
    flags = ["--config", str(ROOT / "configs" / f"{config}.toml"), *first, *mesh, *words]
    if "--optimizer.name" not in words:
        flags.append("--optimizer.name=adamw")
    return name, [flag.replace("ALL", ",".join(utils.REMAT_NAMES)) for flag in flags]


CASES = dict(flags_of(*line.split()) for line in (TPU_CASES + GPU_CASES).splitlines() if line)


def chips_of(name: str) -> tuple[str, ...]:
    return ("h100",) if name.startswith("gpu-") else CHIPS


def config_of(name: str) -> utils.Config:
    return cli.parse(CASES[name])


COLUMNS = ("axes", "kind", "overlapped", "bytes")  # of a row of collectives


def recorded() -> dict[str, dict]:
    """Return {"NAME CHIP": fields of Compiled}."""
    programs = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for found in programs.values():
        rows = found["collectives"]
        found["collectives"] = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return programs


def text_of(programs: dict[str, dict]) -> str:
    """Return JSON with a line for the numbers of each program, and one for each of its tables."""
    lines = []
    for key, found in sorted(programs.items()):
        rows = [[row[column] for column in COLUMNS] for row in found["collectives"]]
        fields = (found | {"collectives": rows}).items()
        texts = [
            ("\n  " if isinstance(value, dict | list) else "") + json.dumps({name: value})[1:-1]
            for name, value in fields
        ]
        lines.append(f'"{key}": {{{", ".join(texts)}}}'.replace(", \n", ",\n"))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def record(name: str, chip_name: str) -> None:
    config, chip = config_of(name), hardware.chip_named(chip_name)
    found, _ = compiler.compile_step(config, chip)
    RECORDED.write_text(text_of(recorded() | {f"{name} {chip_name}": dataclasses.asdict(found)}))


def ratios(name: str, chip: str, found: dict) -> dict[str, float]:
    """Predicted over compiled, of memory, FLOPs, time, and traffic of each axis that has any."""
    return cost.predict(config_of(name), hardware.chip_named(chip)).over(Compiled(**found))


def table(rows: dict[str, dict]) -> str:
    """Markdown: a row per step, with the chips' numbers beside each other."""
    lines = [
        f"| step | GiB, {' and '.join(CHIPS)} or h100 | memory | FLOPs | time | traffic by axes |",
        "|---|---|---|---|---|---|",
    ]
    for name in CASES:
        keys = {chip: f"{name} {chip}" for chip in chips_of(name)}
        found = {chip: rows[key] for chip, key in keys.items() if key in rows}
        if not found:
            continue
        each = [ratios(name, chip, row) for chip, row in found.items()]
        gib = ", ".join(f"{row['memory_bytes_per_chip'] / 2**30:.2f}" for row in found.values())
        parts = {part: [r[part] for r in each if part in r] for part in each[0]}
        columns = [
            ", ".join(f"{ratio:.3f}" for ratio in parts.pop(part, []))
            for part in ("memory", "FLOPs", "time")
        ]
        ends = {axes: (f"{min(of):.3f}", f"{max(of):.3f}") for axes, of in parts.items()}
        axes = ", ".join(f"{axes} {' to '.join(dict.fromkeys(two))}" for axes, two in ends.items())
        lines.append(f"| {name} | {gib} | {' | '.join(columns)} | {axes} |")
    return "\n".join(lines)


def main() -> None:
    words = sys.argv[1:]
    if words != ["--print"]:
        wanted = [word for word in words if word in hardware.CHIPS]
        names = [word for word in words if word not in hardware.CHIPS] or list(CASES)
        if unknown := sorted(set(names) - set(CASES)):
            raise ValueError(f"{unknown[0]} is not a case. Use one of {', '.join(CASES)}.")
        for name, chip in ((n, c) for n in names for c in chips_of(n)):
            if not wanted or chip in wanted:
                print(name, chip, flush=True)
                record(name, chip)
    print(table(recorded()))


if __name__ == "__main__":
    errors.run_command(main)
