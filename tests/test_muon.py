"""Muon on every mesh, beside a NumPy reference that takes singular values apart.

Letters: m matrices, r rows, c columns.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import muon
import resume
import train
import utils
import weights
from common import canonical, config_of, mesh_of, on_mesh, put
from planning import cost, hlo, jaxpr
from test_training import batch, copies

MESHES = {
    "1x1x1": ((1, 1, 1), 1),
    "8x1x1": ((8, 1, 1), 1),
    "1x1x8": ((1, 1, 8), 1),
    "2x2x2_virtual": ((2, 2, 2), 2),
    "2x1x2x2_virtual": ((2, 1, 2, 2), 2),
}
MODEL = {"heads": 8, "q_lora_rank": 24, "prefix_layers": 2, "tied": False, "shared_experts": 1}
# How many of a weight's last dimensions are rows, and columns; the others count matrices.
SIDES = {
    "query.down": (1, 1),
    "query.up": (1, 2),
    "kv_down": (1, 1),
    "kv_up": (1, 2),
    "attention.out": (2, 1),
    "gate": (1, 1),
    "up": (1, 1),
    "down": (1, 1),
}


def muon_config(name, **fields):
    shape, virtual = MESHES[name]
    return config_of(
        shape,
        virtual,
        optimizer={"matrices": "muon", "clip_norm": 0, "weight_decay": 0.3},
        **(MODEL | fields),
    )


def sides_of(name):
    found = [sides for end, sides in SIDES.items() if name.endswith("." + end)]
    return found[0] if found else None


def orthogonal(m_mrc):
    """U p(S) V^T, where p is five times 3.4445 s - 4.775 s^3 + 2.0315 s^5, S over its own norm."""
    U, S, V = np.linalg.svd(m_mrc.astype(np.float64), full_matrices=False)
    s = S / np.maximum(np.sqrt((S**2).sum(-1, keepdims=True)), 1e-300)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return (U * s[:, None, :]) @ V


def expected(declared, grads, w):
    """Updates of matrices after the last of some steps' gradients, decay with them."""
    updates, momenta = [], [np.zeros(a.shape) for a in jax.tree.leaves(w)]
    for step in grads:
        updates = []
        for i, (d, g, old) in enumerate(
            zip(*map(jax.tree.leaves, (declared, step, w)), strict=True)
        ):
            momenta[i] = 0.95 * momenta[i] + g
            if (sides := sides_of(d.name)) is None:
                updates.append(None)
                continue
            rows, columns = (
                int(np.prod(part))
                for part in np.split(np.array(g.shape[-sum(sides) :]), [sides[0]])
            )
            look_ahead, g = ((a.reshape(-1, rows, columns)) for a in (g + 0.95 * momenta[i], g))
            new = 0.2 * max(rows, columns) ** 0.5 * orthogonal(look_ahead)
            if ".experts." in d.name:
                new[~g.any((1, 2))] = 0
            updates.append(new.reshape(old.shape) + 0.3 * old)
    return updates


def drawn(declared, seed):
    """Gradients of very different sizes; no token chose some of the experts."""
    random = np.random.default_rng(seed)

    def draw(w):
        g = random.standard_normal(w.shape) * 10.0 ** random.uniform(-6, 0)
        if ".experts." in w.name:
            g *= (random.random(w.shape[:4]) < 0.7)[..., None, None]
        return g.astype(np.float32)

    return jax.tree.map(draw, declared)


@functools.cache
def updated(name, layout="auto"):
    """(declared weights, gradients of three steps, weights, updates and state after them)."""
    config = muon_config(name, experts_layout=layout)
    declared, mesh = model.declare(config), mesh_of(config)
    w, *grads = (drawn(declared, seed) for seed in range(4))
    rule = train.optimizer(config, declared, mesh)

    def steps(grads, w):
        state = rule.init(w)
        for g in grads:
            updates, state = rule.update(g, state, w)
        return updates, state

    with jax.numpy_dtype_promotion("standard"):
        arrays = [put(mesh, declared, tree) for tree in grads]
        updates, state = jax.jit(steps)(arrays, put(mesh, declared, w))
    return declared, grads, w, updates, state


@pytest.mark.parametrize("layout", ["spread", "gathered"])
@pytest.mark.parametrize("name", MESHES)
def test_updates_are_those_of_singular_values_on_every_mesh(name, layout):
    declared, grads, w, updates, _ = updated(name, layout)
    seen = set()
    for d, new, found in zip(
        jax.tree.leaves(declared),
        expected(declared, grads, w),
        jax.tree.leaves(updates),
        strict=True,
    ):
        if new is not None:
            seen.add(next(end for end in SIDES if d.name.endswith("." + end)))
            np.testing.assert_allclose(found, new, rtol=0, atol=1e-5, err_msg=d.name)
    assert seen == set(SIDES)


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_updates_and_momenta_have_the_same_bits_in_every_replica(name):
    *_, updates, state = updated(name, "spread")
    groups = [group for _, group in copies((updates, state)) if len(group) > 1]
    assert groups
    for first, *others in groups:
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_an_update_is_as_large_as_those_of_adamw():
    """Root mean square of about 0.2, whatever the gradient's size."""
    config = config_of(optimizer={"matrices": "muon", "weight_decay": 0.0}, **MODEL)
    declared = model.declare(config)
    w = drawn(declared, 0)
    rule = train.optimizer(config, declared, mesh_of(config))
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(lambda g: rule.update(g, rule.init(w), w))(drawn(declared, 1))
    for d, new in zip(jax.tree.leaves(declared), jax.tree.leaves(updates), strict=True):
        if sides_of(d.name) and ".experts." not in d.name:
            assert 0.1 < np.sqrt(np.mean(np.square(new))) < 0.25, d.name


def test_zero_and_tiny_matrices_stay_finite():
    x = np.zeros((3, 4, 6), np.float32)
    x[1], x[2] = 1e-30, 1e-8 * np.eye(4, 6)
    found = np.asarray(muon.orthogonalize(jnp.asarray(x)))
    assert not found[0].any() and np.isfinite(found).all() and np.abs(found[1]).max() < 1e-3
    np.testing.assert_allclose(found[2], orthogonal(x[2:])[0], atol=1e-3)


def test_nothing_is_sent_while_matrices_are_orthogonalized():
    """All that is sent: an exchange there and one back for each layout and shape of matrices."""
    config = muon_config("2x2x2_virtual")
    declared, mesh = model.declare(config), mesh_of(config)
    rule = train.optimizer(config, declared, mesh)
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared)
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(rule.update)(w, jax.eval_shape(rule.init, w), w)
    ops = jaxpr.Reader(jaxpr.Sizes(1, ((1, 1),)), 1.0).read(closed).ops
    loops = [op for op in ops if op.body]
    assert loops and all(op.times == 5 for op in loops)
    assert not [op for loop in loops for op, _ in jaxpr.costs(loop.body.ops) if op.send]
    shapes = {cut for w in jax.tree.leaves(declared) if w.matrix for cut in [cut_on(w, config)]}
    sent = [op.send.kind for op in ops if op.send]
    assert sent.count("all-to-all") == 2 * sum(bool(cut.axes) for cut in shapes)
    assert len(loops) == len(shapes)


def cut_on(w, config):
    ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    shape = tuple(
        size // int(np.prod([ranks[axis] for axis in axes], dtype=int))
        for size, axes in zip(w.shape, w.cuts, strict=True)
    )
    return muon.cut_of(w, shape)


def test_a_group_without_an_optimizer_is_refused():
    config = muon_config("1x1x1")
    declared = jax.tree.map(lambda w: dataclasses.replace(w, group="tables"), model.declare(config))
    with pytest.raises(ValueError, match=r"is of the group 'tables', which has no optimizer"):
        train.optimizer(config, declared)


def test_muon_is_refused_for_a_weight_that_is_no_matrix():
    field = weights.weight("D", weights.ones, group="matrix")
    norm = dataclasses.make_dataclass("Norm", [("scale", jax.Array, field)])
    with pytest.raises(ValueError, match=r"scale is of the group 'matrix' and says no rows"):
        weights.declare(norm, {"D": weights.Size(4, "model.width")})


@pytest.mark.parametrize("known", [True, False])
def test_a_run_with_adamw_is_not_continued_with_muon(known):
    before = dataclasses.asdict(config_of())
    if not known:  # a checkpoint from before there was a choice
        del before["optimizer"]["matrices"]
    with pytest.raises(ValueError, match=r"optimizer.matrices 'adamw' -> 'muon'"):
        resume.what_must_match(before, dataclasses.asdict(muon_config("1x1x1")))


@pytest.mark.parametrize("layout", ["spread", "gathered"])
@pytest.mark.parametrize("name", MESHES)
def test_a_plan_tells_the_flops_and_bytes_that_are_compiled(name, layout):
    config = muon_config(name, experts_layout=layout)
    declared, mesh = model.declare(config), mesh_of(config)
    rule = train.optimizer(config, declared, mesh)
    shapes = train.abstract_state(config, declared, mesh)
    with jax.numpy_dtype_promotion("standard"):
        update = jax.jit(rule.update).lower(shapes.weights, shapes.optimizer, shapes.weights)
    text = update.compile().as_text()
    planned = cost.optimizer_costs(config)
    flops = sum(int(op.flops[0]) * n for op, n in planned if op.flops is not None)
    assert flops == hlo.dot_flops(text, None) > 0
    ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    sent = collections.Counter()
    for op, n in planned:
        axes = op.send and tuple(a for a in utils.MESH_AXES if a in op.send.axes and ranks[a] > 1)
        if axes:
            sent[axes, op.send.kind] += int(op.send.bytes[0]) * n
    found = collections.Counter()
    for row, size in hlo.collectives(text, ranks, None).items():
        found[row.axes, row.kind] += size
    assert found == sent


STEPS = 5
MICROBATCHES = {"1x1x1": 2, "8x1x1": 1, "1x1x8": 2, "2x2x2_virtual": 2, "2x1x2x2_virtual": 2}


@functools.cache
def run(name):
    """(config, weights after five whole steps, copies of weights and state on all devices)."""
    config = muon_config(name, z_loss=1e-3)
    rows = {"microbatches": MICROBATCHES[name], "sequences": 8, "steps": STEPS, "remat": "full"}
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **rows))
    declared, mesh = model.declare(config), mesh_of(config)
    step = train.jitted_step(config, declared, mesh)
    state = train.initial_state(config, declared, mesh)
    for number in range(STEPS):
        state, told = step(state, on_mesh(config, mesh, batch(config, number)))
    assert told["skipped"] == 0
    return canonical(config, state.weights), list(copies((state.weights, state.optimizer)))


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_five_steps_end_at_the_same_weights_on_every_mesh(name):
    (one, _), (other, replicas) = run("1x1x1"), run(name)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for _, (first, *others) in replicas:
        for copy in others:
            np.testing.assert_array_equal(first, copy)
