"""Each sum and maximum over ranks is left out once: the types refuse the program at trace time."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

import model
import sharded_model
from common import config_of, mesh_of
from inference import decode
from processes import ROOT

FILES = ("model.py", "attention.py", "weights.py", "pipeline.py", "sharded_model.py")
KINDS = ("psum", "pmax", "pmin", "pmean")  # whose results are equal on all ranks of an axis
# Factors of a product with values that vary in any case: no type differs without their sums.
ACCEPTED = {("balance", "psum"), ("scales", "psum")}
EXPERTS = {"prefix_layers": 1, "capacity_factor": 0.0}
CAPACITY = EXPERTS | {"capacity_factor": 4.0}
CONFIGS = {
    "dropless": EXPERTS,
    "expert_parallel": CAPACITY | {"experts_layout": "expert_parallel"},
    "sharded": CAPACITY | {"experts_layout": "sharded"},
    "layer": EXPERTS | {"gather": "layer"},
}


def train(config):
    declared, mesh = model.declare(config), mesh_of(config)
    step = sharded_model.loss_and_gradients(config, declared, mesh)
    return step, sharded_model.abstract_batch(config, mesh), jnp.int32(0)


def token_losses(config):
    declared, mesh = model.declare(config), mesh_of(config)
    losses = sharded_model.token_losses(config, declared, mesh)
    return losses, sharded_model.abstract_batch(config, mesh)


def trace(name):
    """Trace one program on (fsdp, pipeline, tensor) = (2, 2, 2), or decoding on (2, 1, 2)."""
    jax.clear_caches()  # which hold what was traced with the collective
    if name == "decode":
        config = decode.decoding_config(config_of((2, 1, 2), **EXPERTS), 2, 2)
        declared, mesh = model.declare(config), mesh_of(config)
        w = decode.abstract_weights(config, declared, mesh)
        cache = decode.abstract_cache(config, mesh, 4, 8)
        ids, one = jnp.zeros((4, 2), jnp.int32), jnp.zeros(4, jnp.int32)
        jax.eval_shape(decode.extend(config, declared, mesh), w, cache, ids, one, ids)
        return
    program, _, kind = name.partition(" ")
    config = config_of((2, 2, 2), **CONFIGS[kind])
    function, *rest = {"train": train, "token_losses": token_losses}[program](config)
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), model.declare(config))
    jax.eval_shape(function, w, *rest)


PROGRAMS = (*(f"train {kind}" for kind in CONFIGS), "token_losses dropless", "decode")


def patch(monkeypatch, removed, found):
    """Make each call in FILES note its place in `found`; leave out those at `removed`."""

    def patched(kind, original):
        def call(*args, **keywords):
            frame = sys._getframe(1)
            path = Path(frame.f_code.co_filename)
            place = path.name, frame.f_lineno, kind
            if path.parent != ROOT or path.name not in FILES:
                return original(*args, **keywords)
            found.setdefault(place, frame.f_code.co_qualname.partition(".<locals>")[0])
            if place == removed:
                return args[0]
            return original(*args, **keywords)

        return call

    for kind in KINDS:
        monkeypatch.setattr(lax, kind, patched(kind, getattr(lax, kind)))


def test_a_missing_sum_over_ranks_is_an_error_at_trace_time_except_in_two_factors(monkeypatch):
    programs, functions = {}, {}
    for program in PROGRAMS:
        with monkeypatch.context() as patches:
            patch(patches, None, found := {})
            trace(program)
        functions |= found
        programs |= dict.fromkeys(found, program)
    lines = {
        (name, number + 1)
        for name in FILES
        for number, line in enumerate((ROOT / name).read_text().splitlines())
        if any(f"lax.{kind}(" in line for kind in KINDS)
    }
    assert lines == {place[:2] for place in programs}  # the programs run all of them
    accepted = set()
    for place, program in programs.items():
        with monkeypatch.context() as patches:
            patch(patches, place, {})
            try:
                trace(program)
            except (TypeError, ValueError):
                continue
            accepted.add((functions[place], place[2]))
    assert accepted == ACCEPTED
