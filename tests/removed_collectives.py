"""Leave out each collective of the layers once, and compare loss and gradients with the reference.

    ./run.sh python tests/removed_collectives.py       about 6 minutes on two cores

A step and Muon's update run on (fsdp, pipeline, tensor) = (2, 2, 2), decoding on (2, 1, 2). Instead
of a collective a rank gets what it has without the others, in the same shape: copies of its slice,
its part, or its values. Prints the error at trace time or the largest relative error. BOUNDS are
those of the tests. Exit code 1 if a collective is neither refused nor above 100 times its bound.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import hf_case  # noqa: E402
import model  # noqa: E402
import optimizer  # noqa: E402
from inference import decode  # noqa: E402

FILES = ("model.py", "weights.py", "pipeline.py", "sharded_model.py", "optimizer.py", "decode.py")
BOUNDS = {"train": 2e-5, "muon": 1e-5, "decode": 1e-4}
EXPERTS = {"prefix_layers": 1, "capacity_factor": 0.0}
CAPACITY = EXPERTS | {"capacity_factor": 4.0}
CONFIGS = {
    "dropless": EXPERTS,
    "expert_parallel": CAPACITY | {"experts_layout": "expert_parallel"},
    "sharded": CAPACITY | {"experts_layout": "sharded"},
    "layer": EXPERTS | {"gather": "layer"},
}


def gather(x, axis_name, axis=0, tiled=False, to="varying"):
    assert tiled
    out = jnp.concatenate([x] * lax.axis_size(axis_name), axis)
    return lax.pmax(out, axis_name) if to == "invarying" else out


def scatter(x, axis_name, scatter_dimension=0, tiled=False):
    part = x.shape[scatter_dimension] // lax.axis_size(axis_name)
    start = lax.axis_index(axis_name) * part
    return lax.dynamic_slice_in_dim(x, start, part, scatter_dimension)


def exchange(x, axis_name, split_axis=0, concat_axis=0, tiled=False):
    return gather(scatter(x, axis_name, split_axis), axis_name, concat_axis, tiled)


def own(x, *_, **__):
    return x


WITHOUT = dict.fromkeys(("psum", "pmax", "ppermute"), own)
WITHOUT |= {"all_to_all": exchange, "all_gather": gather, "psum_scatter": scatter}


def weights_of(config):
    return common.transformer_of(config, common.mesh_of(config), hf_case.weights(config.model, 3))


def train(kind):
    """Return loss and gradients of a step."""
    config = common.config_of((2, 2, 2), **CONFIGS[kind])
    batch = common.on_mesh(config, common.mesh_of(config), common.batch_of(config, 1))
    return jax.device_get(common.step_of(config)(weights_of(config), batch))


def muon(_):
    """Return the second update of all weights, in which some ranks have a gradient of 0."""
    config = common.config_of((2, 2, 2), optimizer={"name": "muon"}, **CONFIGS["sharded"])
    w = weights_of(config)
    rule = optimizer.make_optimizer(config, model.declare(config), common.mesh_of(config))
    grads = jax.tree.map(lambda a: a.at[..., : a.shape[-1] // 2].set(0), w)

    def second(w, grads):
        return rule.update(grads, rule.update(w, rule.init(w), w)[1], w)[0]

    return jax.device_get(jax.jit(second)(w, grads))


def decoding(_):
    """Return the logits after two tokens; 0 for padding ids, which have -inf."""
    config = decode.decoding_config(common.config_of((2, 1, 2), **EXPERTS), 2, 2)
    tokens = np.random.default_rng(0).integers(0, 500, (4, 2)).astype(np.int32)
    logits = common.decoded_logits(config, hf_case.weights(config.model, 3), tokens)
    return np.where(np.isfinite(logits), logits, 0)


PROGRAMS = {f"train {kind}": train for kind in CONFIGS} | {"muon": muon, "decode": decoding}


def run(program, removed, found):
    """Return the arrays of a program without the collective at `removed`; note all in `found`."""

    def patched(kind, original):
        def call(*args, **keywords):
            frame = sys._getframe(1)
            if Path(frame.f_code.co_filename).name == "api_util.py":  # of functools.partial
                frame = frame.f_back
            place = Path(frame.f_code.co_filename).name, frame.f_lineno, kind
            if place[0] not in FILES:
                return original(*args, **keywords)
            found.setdefault(place, frame.f_code.co_qualname.replace(".<locals>", ""))
            return (WITHOUT[kind] if place == removed else original)(*args, **keywords)

        return call

    common.step_of.cache_clear()
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for kind in WITHOUT:
            new = patched(kind, getattr(lax, kind))
            stack.enter_context(mock.patch.object(lax, kind, new))
        return jax.tree.leaves(PROGRAMS[program](program.partition(" ")[2]))


def main():
    failed, seen = [], set()
    print(f"{'place':58} {'collective':13} {'program':22} result")
    for program in sys.argv[1:] or PROGRAMS:
        expected = run(program, None, found := {})
        for place in sorted(found.keys() - seen):
            seen.add(place)
            try:
                arrays = run(program, place, {})
                both = zip(arrays, expected, strict=True)
                error = max(common.relative_error(a, b) for a, b in both)
                result = f"relative error {error:.1e}"
                if not error > 100 * BOUNDS[program.split()[0]]:
                    failed.append(place)
            except (TypeError, ValueError) as problem:
                result = f"refused: {str(problem).splitlines()[0][:60]}"
            text = f"{place[0]}:{place[1]} {found[place]}"
            print(f"{text:58} {place[2]:13} {program:22} {result}", flush=True)
    print(f"{len(seen)} collectives, not noticed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
