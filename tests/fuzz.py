"""Compare randomly drawn models on randomly drawn meshes with the one-device reference.

    ./run.sh python tests/fuzz.py --cases 500 --out runs/fuzz.jsonl     seeds 0 to 499
    ./run.sh python tests/fuzz.py --seed 7 --cases 1                    one seed
    ./run.sh python tests/fuzz.py --case '{"shape": [1, 2, 2], ...}'    one case, as printed

A case is a config and two meshes. Three checks are made of it:

    step    loss, its parts and every gradient, against tests/reference.py; of a fifth of the cases
            with low-rank adapters, whose reference is the merged model
    decode  logits of incremental decoding, against the full forward pass
    resume  a state saved on the first mesh and restored on the second: the same bits, and the same
            next step

The command that repeats a failing case is printed; simplify its settings by hand. With --out each
seed is recorded when it ends, and is not run again.

Exit code: 0 if no case fails; else 1.
"""

import argparse
import functools
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# The script's folder first; the root has the programs. conftest sets 8 devices before jax starts.
sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import common  # noqa: E402
import conftest  # noqa: E402, F401  before jax
import hf_case  # noqa: E402
import lora  # noqa: E402
import model  # noqa: E402
import reference  # noqa: E402
import sharded_model  # noqa: E402
import train  # noqa: E402
import utils  # noqa: E402
from checkpoint import Checkpoints  # noqa: E402
from common import jitted_step, mesh_of, relative_error, transformer_of  # noqa: E402
from inference import decode  # noqa: E402
from runtime import cli, jsonl  # noqa: E402
from test_lora import as_stored, by_name, in_pairs, weights_of  # noqa: E402
from test_lora import merged as merged_model  # noqa: E402

BOUND = 2e-5  # relative, of a loss or of the largest gradient of an array
LOGITS = 1e-4
STEPS = 1e-4  # of losses after steps on another mesh


# --- cases ----------------------------------------------------------------------------------------


def draw_shape(r: random.Random, devices: int) -> list[int]:
    """Return (replica, fsdp, pipeline, tensor) with this product."""
    shape = [1, 1, 1, 1]
    while devices > 1:
        shape[r.choice((0, 1, 1, 2, 2, 3, 3))] *= 2
        devices //= 2
    return shape


def draw(seed: int) -> dict[str, Any]:
    """Return a valid case. The same seed always gives the same one."""
    case = draw_base(seed)
    # From streams of their own, so that the other settings of a seed do not depend on them.
    restart = case["segments"] and random.Random(f"positions {seed}").random() < 0.5
    case["positions"] = "document" if restart else "window"
    case |= draw_pattern(random.Random(f"pattern {seed}"), case)
    case |= draw_context(random.Random(f"context {seed}"), case)
    case |= draw_options(random.Random(f"options {seed}"), case)
    case |= draw_adapters(random.Random(f"lora {seed}"), case)
    split = case | {"split_backward": random.Random(f"split {seed}").random() < 0.5}
    return split if is_valid(split) else case


def draw_base(seed: int) -> dict[str, Any]:
    r = random.Random(seed)
    while not is_valid(case := draw_any(r)):
        pass
    return case | {"positions": "window"}


def draw_pattern(r: random.Random, case: dict[str, Any]) -> dict[str, Any]:
    """Return settings of layers that differ within a block, for a third of all cases."""
    step = case["dense_layers"] + case["moe_layers"]
    if r.random() >= 1 / 3:
        return {}
    kinds = utils.FULL_ATTENTION, utils.SLIDING_ATTENTION
    pattern = {
        "layer_types": [r.choice(kinds) for _ in range(r.choice((2, 3)))],
        "no_rope_layer_interval": r.choice((0, 2, 3)), "sliding_window": r.choice((3, 5)),
    }  # fmt: skip
    period = math.lcm(step, len(pattern["layer_types"]), pattern["no_rope_layer_interval"] or 1)
    layers = case["prefix_layers"] + max(1, case["blocks"] * step // period) * period
    pattern |= {"num_hidden_layers": layers}
    return pattern if period <= 6 and is_valid(case | pattern) else {}


def draw_context(r: random.Random, case: dict[str, Any]) -> dict[str, Any]:
    """Return the mesh with the ranks of fsdp or tensor in context, for a third of all cases."""
    if r.random() >= 1 / 3:
        return {}
    replica, fsdp, pipeline, tensor = case["shape"]
    shape = r.choice(([replica, 1, pipeline, fsdp, tensor], [replica, fsdp, pipeline, tensor, 1]))
    return {"shape": shape} if is_valid(case | {"shape": shape}) else {}


def draw_options(r: random.Random, case: dict[str, Any]) -> dict[str, Any]:
    """Return options of further families, for a third of all cases."""
    if r.random() >= 1 / 3:
        return {}
    grouped, window = case["attention"] == "gqa", case["sliding_window"] > 0
    return {
        "norms": r.choice(("before", "after", "both")),
        "qk_norm_all_heads": r.random() < 0.5 and grouped and case["qk_norm"],
        "attention_out_bias": r.random() < 0.5 and grouped,
        "attention_sinks": r.random() < 0.5 and grouped,
        "query_pre_attn_scalar": r.choice((0.0, 5.0)) * grouped,
        "embedding_multiplier": r.choice((1.0, 3.0)),
        "rope_local_base_freq": r.choice((0.0, 70.0)) * window,
        "swiglu_limit": r.choice((0.0, 0.7)),
        "hidden_act": r.choice(("silu", "gelu_pytorch_tanh")),
        "experts_bias": case["dropless"] and case["moe_layers"] > 0 and r.random() < 0.5,
    }  # fmt: skip


def draw_adapters(r: random.Random, case: dict[str, Any]) -> dict[str, Any]:
    """Return {"lora": settings} for a fifth of all cases, else nothing."""
    if r.random() >= 0.2:
        return {}
    while True:
        adapters = {
            "rank": r.choice((1, 2, 5)), "alpha": r.choice((2.0, 8.0)),
            "targets": [target for target in lora.TARGETS if r.random() < 0.6],
            "base": r.choice(("float32", "bfloat16", "nf4")),
        }  # fmt: skip
        if adapters["targets"] and is_valid(case | {"lora": adapters}):
            return {"lora": adapters}


def draw_any(r: random.Random) -> dict[str, Any]:
    names, choice = [*utils.REMAT_NAMES], r.choice
    experts = r.choice((2, 4, 6, 8, 12))
    groups = r.choice([n for n in (1, 2, 3) if experts % n == 0 and experts // n >= 2])
    heads = r.choice((2, 4, 6))
    return {
        "shape": draw_shape(r, choice((1, 2, 4, 8, 8))),
        "other_shape": draw_shape(r, choice((1, 2, 4, 8))), "virtual": choice((1, 1, 2)),
        "other_virtual": choice((1, 1, 2)), "gather": choice(("step", "layer")),
        "segments": r.random() < 0.4,
        "remat": choice(("none", "full", ",".join(sorted(r.sample(names, 3), key=names.index)))),
        "layers": choice(("unrolled", "scanned")),
        "microbatches": choice((1, 2, 3, 4)), "optimizer": choice(("adamw", "muon")),
        "prefix_layers": choice((0, 0, 1, 2)), "dense_layers": choice((0, 1, 2)),
        "moe_layers": choice((0, 1, 1, 1)), "dropless": r.random() < 0.7,
        "blocks": choice((1, 2, 4)), "n_routed_experts": experts,
        "num_experts_per_tok": r.randint(1, min(4, experts // groups)),
        "n_shared_experts": choice((0, 0, 1, 2)), "n_group": groups,
        "topk_group": r.randint(1, groups),
        "experts_layout": choice(("auto", "auto", "expert_parallel", "sharded")),
        "scoring_func": choice(("sigmoid", "softmax")), "norm_topk_prob": r.random() < 0.7,
        "no_rope_layer_interval": 2 * (r.random() > 0.8),
        "q_lora_rank": choice((0, 0, 8, 24)),
        "tie_word_embeddings": r.random() < 0.5, "yarn": r.random() < 0.25,
        "z_loss": choice((0.0, 0.01)), "aux_loss_alpha": choice((0.0, 0.1)),
        "loss_chunk_tokens": choice((5, 16, 2048)), "vocab_size": choice((96, 257, 500)),
        "seq_len": choice((8, 12, 16, 24)), "sequences": choice((4, 8, 12, 16)),
        "num_attention_heads": heads, "hidden_size": choice((16, 24, 48)),
        "kv_lora_rank": choice((8, 24)), "qk_nope_head_dim": choice((4, 10)),
        "qk_rope_head_dim": choice((4, 14)), "v_head_dim": choice((6, 9)),
        "intermediate_size": choice((24, 40)), "moe_intermediate_size": choice((16, 24)),
        "attention": choice(("mla", "gqa")),
        "num_key_value_heads": choice([n for n in (1, 2, 3, 4, 6) if heads % n == 0]),
        "head_dim": choice((6, 10)), "qk_norm": r.random() < 0.4,
        "attention_bias": r.random() < 0.3, "sliding_window": choice((0, 0, 5)),
        "topk_method": choice(("noaux_tc", "group_limited_greedy")), "llama3": r.random() < 0.5,
    }  # fmt: skip


NOT_OF_MODEL = {
    *("shape", "other_shape", "virtual", "other_virtual", "gather", "segments", "remat", "yarn"),
    *("llama3", "layers", "lora", "positions", "split_backward"),
    *("microbatches", "optimizer", "loss_chunk_tokens", "seq_len", "sequences", "dropless"),
}


def config(case: dict[str, Any], other: bool = False) -> utils.Config:
    """Return the config of a case, on its first or its other mesh."""
    fields = {name: value for name, value in case.items() if name not in NOT_OF_MODEL}
    for_all = fields["n_routed_experts"] / fields["num_experts_per_tok"]  # drops nothing
    fields["capacity_factor"] = 0.0 if case["dropless"] else for_all
    fields |= {"router_bias_update_speed": 0.0}
    fields["layer_types"] = tuple(fields.get("layer_types", ()))
    if case["yarn"]:
        fields |= hf_case.YARN
        if case["llama3"]:
            fields |= {"rope_rope_type": "llama3", "rope_low_freq_factor": 0.5}
    made = common.config_of(
        case["other_shape"] if other else case["shape"],
        virtual=case["other_virtual"] if other else case["virtual"],
        gather=case["gather"],
        segments=case["segments"],
        train={
            name: case[name]
            for name in ("seq_len", "microbatches", "remat", "layers", "loss_chunk_tokens")
        }
        | {"steps": 3, "global_batch_size": case["sequences"]},
        optimizer={"name": case["optimizer"], "lr": 1e-3, "warmup_steps": 3},
        **fields,
    )
    split = case.get("split_backward", False) and not other
    more = {"data.positions": case.get("positions", "window"), "pipeline.split_backward": split}
    return utils.changed(made, more)


def adapted(case: dict[str, Any]) -> utils.Config:
    """Return the config of a case on its first mesh, with its adapters."""
    rule = {f"lora.{name}": value for name, value in case.get("lora", {}).items()}
    return utils.changed(config(case), rule)


def is_valid(case: dict[str, Any]) -> bool:
    """Whether both configs are accepted. Only a ConfigError refuses one.

    The normalized weight of a single expert is 1. Without a balance loss the gradient of its
    router is 0, and that of a program is rounding errors. So is that of a bias that adds the same
    to all keys of a query, without rotation or norm.
    """
    constant = case["num_experts_per_tok"] == 1 and case["norm_topk_prob"]
    if constant and not case["aux_loss_alpha"]:
        return False
    biased = case["attention"] == "gqa" and case["attention_bias"] and not case["qk_norm"]
    if biased and case["no_rope_layer_interval"]:
        return False
    try:
        for c in (adapted(case), config(case, other=True)):
            cli.check(c)
            model.declare(c)
            sharded_model.schedule_of(c)
            sharded_model.check_split(c)
    except utils.ConfigError:
        return False
    return True


# --- checks: each returns what differs, or an empty text ------------------------------------------


def check_step(case: dict[str, Any]) -> str:
    """A near tie of two experts can be decided by rounding, so three sets of weights are tried."""
    for seed in (3, 4, 5):
        if not (found := differences_of_step(case, seed)):
            return ""
    return str(found)


def differences_of_step(case: dict[str, Any], seed: int) -> dict[str, float]:
    c, mesh = adapted(case), mesh_of(config(case))
    tree, batch = hf_case.weights(c.model, seed), common.batch_of(c, seed)
    run = sharded_model.loss_and_gradients(c, model.declare(c), mesh)
    step = jax.jit(lambda w, data: run(w, data, jnp.int32(0)))
    if c.lora.rank:
        w, trained = weights_of(c, tree)
        scale = c.lora.alpha / c.lora.rank
        merged = functools.partial(merged_model, as_stored(c, tree), scale=scale)
    else:
        w, trained, merged = transformer_of(c, mesh, tree), tree, lambda tree: tree
    grads, stats = step(w, common.on_mesh(c, mesh, batch))
    if not c.data.segments:
        batch["segments"] = np.zeros_like(batch["segments"])

    def loss_of(trained: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return reference.loss(merged(trained), batch, c.model)

    wanted = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, parts), wanted_grads = wanted(trained, batch)
    arrays = in_pairs(by_name(grads)) if c.lora.rank else common.canonical(c, grads)
    found = common.errors(arrays, wanted_grads)
    found |= {f"{name} loss": relative_error(getattr(stats, name), parts[name])
              for name in ("cross_entropy", "balance", "z")}  # fmt: skip
    found["loss"] = relative_error(stats.loss, loss)
    found["dropped"] = float(stats.dropped)
    different = {name: float(error) for name, error in found.items() if not error <= BOUND}
    if not different:
        return {}
    # A deep model without norms before its layers can amplify rounding a thousandfold. So a
    # gradient may differ by what a millionth of each weight changes in the reference.
    signs = np.random.default_rng(seed)
    nearby = jax.tree.map(lambda x: x * (1 + 1e-6 * signs.choice((-1, 1), x.shape)), trained)
    nearby = jax.tree.map(np.float32, nearby)
    amplified = common.errors(wanted(nearby, batch)[1], wanted_grads)
    return {name: e for name, e in different.items() if not e <= amplified.get(name, 0.0)}


def check_decode(case: dict[str, Any]) -> str:
    decode.KEY_BLOCK = 8  # so that there are several blocks
    case = case | {"segments": False, "positions": "window", "microbatches": 1}
    if not is_valid(case):
        return ""
    c, mesh = config(case), mesh_of(config(case))
    declared, batch = model.declare(c), common.batch_of(c, 1)
    w = transformer_of(c, mesh, hf_case.weights(c.model, 3))
    whole = np.asarray(common.full_logits(c, declared, mesh)(w, common.on_mesh(c, mesh, batch)))[0]
    try:
        model.declare(decode.decoding_config(c, c.mesh.fsdp, c.mesh.tensor))
    except utils.ConfigError:  # the model does not divide over the mesh to decode on
        return ""
    found = common.decoded_logits(c, hf_case.weights(c.model, 3), batch["tokens"])
    seen = whole > -np.inf  # padding of the vocabulary is not
    error = relative_error(found[seen], whole[seen])
    return "" if error <= LOGITS else f"logits differ by {error:.1e}"


def check_resume(case: dict[str, Any]) -> str:
    c, o = config(case), config(case, other=True)
    mesh, other_mesh = mesh_of(c), mesh_of(o)
    declared, other_declared = model.declare(c), model.declare(o)
    step = jitted_step(c, declared, mesh)
    state = train.initial_state(c, declared, mesh)
    for number in range(2):
        state, _ = step(state, common.on_mesh(c, mesh, common.batch_of(c, 10 + number)))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder, "checkpoints"), keep=2)
        checkpoints.save(2, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(2, train.abstract_state(o, other_declared, other_mesh))
        checkpoints.close()
    for name in ("weights", "optimizer"):
        both = (jax.tree.leaves(getattr(s, name)) for s in (state, restored))
        for a, b in zip(*both, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if a.tobytes() != b.tobytes():  # stacks differ in shape, and not in order
                return f"an array of {name} of shape {a.shape} is not restored"
    batch = common.batch_of(c, 12)
    _, one = step(state, common.on_mesh(c, mesh, batch))
    other_step = jitted_step(o, other_declared, other_mesh)
    _, two = other_step(restored, common.on_mesh(o, other_mesh, batch))
    losses = [float(report["stats"].loss) for report in (one, two)]
    norms = [float(report["grad_norm"]) for report in (one, two)]
    if abs(losses[0] - losses[1]) <= STEPS and abs(norms[0] / norms[1] - 1) <= 1e-3:
        return ""
    return f"losses {losses} and gradient norms {norms} of the step after it"


CHECKS = {"step": check_step, "decode": check_decode, "resume": check_resume}


def failure_of(case: dict[str, Any]) -> str:
    """Return what fails, or an empty text. Compiled programs of earlier cases are dropped."""
    jax.clear_caches()
    for name, check in CHECKS.items():
        try:
            failure = check(case)
        except Exception as error:
            failure = "".join(traceback.format_exception(error)[-6:])
        if failure:
            return f"{name}: {failure}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--cases", type=int, default=6, help="number of seeds")
    parser.add_argument("--case", type=json.loads, help="one case in JSON, in place of seeds")
    parser.add_argument("--out", type=Path, help="file of records, to continue later")
    flags = parser.parse_args(arguments)
    if flags.case:
        failure = failure_of(flags.case)
        print(failure or "all checks pass")
        return bool(failure)
    seeds, failures = range(flags.seed, flags.seed + flags.cases), {}
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        failures = {r["seed"]: r["failure"] for r in jsonl.read(flags.out) if r["seed"] in seeds}
    for seed in seeds:
        if seed in failures:
            continue
        case, began = draw(seed), time.monotonic()
        failure = failures[seed] = failure_of(case)
        mesh, seconds = "x".join(map(str, case["shape"])), time.monotonic() - began
        print(f"seed {seed}  {mesh}  {seconds:.0f} s  {failure or 'equal'}", flush=True)
        if failure:
            print(f"  ./run.sh python tests/fuzz.py --case '{json.dumps(case)}'")
        if flags.out:
            jsonl.append(flags.out, [{"seed": seed, "case": case, "failure": failure}])
    failed = sum(map(bool, failures.values()))
    print(f"{flags.cases} cases, {failed} differ")
    return bool(failed)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # no program is compiled twice
    sys.exit(main())
