"""Muon on every mesh, against a NumPy reference by singular value decomposition.

Letters: m matrices, r rows, c columns.
"""

import collections
import contextlib
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import checkpoint
import model
import optimizer
import sharded_model
import train
import utils
import weights
from benchmarks.common import with_values
from common import canonical, config_of, jitted_step, mesh_of, mostly_long, on_mesh, put
from planning import cost, hlo, jaxpr
from runtime import resume, run_directory
from test_training import batch, copies

MESHES = {
    "1x1x1": ((1, 1, 1), 1),
    "8x1x1": ((8, 1, 1), 1),
    "1x1x8": ((1, 1, 8), 1),
    "2x2x2_virtual": ((2, 2, 2), 2),
    "2x1x2x2_virtual": ((2, 1, 2, 2), 2),
}
MODEL = {
    "num_attention_heads": 8,
    "q_lora_rank": 24,
    "prefix_layers": 2,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
}
# Numbers of a weight's last dimensions that are rows, and columns.
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
        optimizer={"name": "muon", "clip_norm": 0, "weight_decay": 0.3},
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
    """Return the updates of matrices in the last of several steps, with weight decay."""
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
    """Gradients of very different sizes; zero for some experts, and for some slices of others."""
    random = np.random.default_rng(seed)

    def draw(w):
        g = random.standard_normal(w.shape) * 10.0 ** random.uniform(-6, 0)
        if ".experts." in w.name:
            g *= (random.random(w.shape[:4]) < 0.7)[..., None, None]
            rows, columns = (size // 2 for size in w.shape[-2:])
            if seed % 2:  # a hidden value without gradient in this step
                g[..., 0, :rows, :] = g[..., 0, :, :columns] = 0
        return g.astype(np.float32)

    return jax.tree.map(draw, declared)


@functools.cache
def updated(name, layout="expert_parallel", dtype="float32"):
    """Run three steps from weights w; updates are those of the last."""
    config = muon_config(name, experts_layout=layout, compute_dtype=dtype)
    declared, mesh = model.declare(config), mesh_of(config)
    w, *grads = (drawn(declared, seed) for seed in range(4))
    rule = optimizer.make_optimizer(config, declared, mesh)

    def steps(grads, w):
        state = rule.init(w)
        for g in grads:
            updates, state = rule.update(g, state, w)
        return updates, state

    with jax.numpy_dtype_promotion("standard"):
        arrays = [put(mesh, declared, tree) for tree in grads], put(mesh, declared, w)
        program = jax.jit(steps).lower(*arrays).compile()
    return Updated(declared, grads, w, *program(*arrays), program.as_text())


class Updated(NamedTuple):
    declared: object
    grads: list  # of each step
    w: object
    updates: object
    state: object
    program: str


def test_trees_of_two_layouts_of_experts_have_two_structures():
    """Otherwise JAX would reuse the trace of one for the other."""
    spread, gathered = (
        jax.tree.structure(model.declare(muon_config("1x1x1", experts_layout=layout)))
        for layout in ("expert_parallel", "sharded")
    )
    assert spread != gathered


@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
@pytest.mark.parametrize("name", mostly_long(MESHES, "8x1x1", "2x2x2_virtual"))
def test_updates_match_the_singular_value_decomposition_on_every_mesh(name, layout):
    run = updated(name, layout)
    new, seen = expected(run.declared, run.grads, run.w), set()
    leaves = map(jax.tree.leaves, (run.declared, run.updates))
    for d, found, wanted in zip(*leaves, new, strict=True):
        if wanted is not None:
            seen.add(next(end for end in SIDES if d.name.endswith("." + end)))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=d.name)
    assert seen == set(SIDES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1x1x1", "2x2x2_virtual"])
def test_updates_in_bfloat16_are_close(name):
    """Two digits remain where singular values differ by 100, because the steps are steep."""
    run = updated(name, dtype="bfloat16")
    new = expected(run.declared, run.grads, run.w)
    for found, wanted in zip(jax.tree.leaves(run.updates), new, strict=True):
        if wanted is not None:
            away = np.sqrt(np.mean(np.square(found - wanted)))
            assert 0 < away < 0.05 * np.sqrt(np.mean(np.square(wanted)))


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_updates_and_momenta_have_the_same_bits_in_every_replica(name):
    run = updated(name)
    groups = [group for _, group in copies((run.updates, run.state)) if len(group) > 1]
    assert groups
    for first, *others in groups:
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_an_update_is_as_large_as_those_of_adamw():
    """Root mean square of about 0.2, whatever the gradient's size."""
    config = config_of(optimizer={"name": "muon", "weight_decay": 0.0}, **MODEL)
    declared = model.declare(config)
    w = drawn(declared, 0)
    rule = optimizer.make_optimizer(config, declared, mesh_of(config))
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(lambda g: rule.update(g, rule.init(w), w))(drawn(declared, 1))
    for d, new in zip(jax.tree.leaves(declared), jax.tree.leaves(updates), strict=True):
        if sides_of(d.name) and ".experts." not in d.name:
            assert 0.1 < np.sqrt(np.mean(np.square(new))) < 0.25, d.name


def test_zero_and_tiny_matrices_stay_finite():
    x = np.zeros((3, 4, 6), np.float32)
    x[1], x[2] = 1e-30, 1e-8 * np.eye(4, 6)
    found = np.asarray(optimizer.orthogonalize(jnp.asarray(x)))
    assert not found[0].any() and np.isfinite(found).all() and np.abs(found[1]).max() < 1e-3
    np.testing.assert_allclose(found[2], orthogonal(x[2:])[0], atol=1e-3)


def test_orthogonalization_does_not_communicate():
    """For each layout and shape of matrices one exchange there, one back, and a gather back if
    ranks have the same slices.
    """
    config = muon_config("2x2x2_virtual")
    ops, declared = cost.matrices(config).ops, model.declare(config)
    loops = [op for op in ops if op.body]
    assert loops and all(op.times == 5 for op in loops)
    assert not [op for loop in loops for op, _ in jaxpr.costs(loop.body.ops) if op.send]
    shapes = {cut for w in jax.tree.leaves(declared) if w.matrix for cut in [cut_on(w, config)]}
    sent = [op.send.kind for op in ops if op.send]
    assert sent.count("all-to-all") == 2 * sum(bool(cut.axes) for cut in shapes)
    assert sent.count("all-gather") == sum(bool(cut.free) for cut in shapes)
    assert len(sent) == sent.count("all-to-all") + sent.count("all-gather")  # expert parallelism
    assert len(loops) == len(shapes)


def test_momenta_with_different_layouts_in_memory_are_exchanged():
    """XLA for CPUs refused this step, without an error of this code (found by tests/fuzz.py)."""
    config = config_of(
        (2, 2, 1, 2),
        blocks=2,
        dense_layers=0,
        prefix_layers=2,
        hidden_size=16,
        intermediate_size=40,
        moe_intermediate_size=16,
        kv_lora_rank=24,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=12,
        train={"microbatches": 1, "global_batch_size": 8, "seq_len": 8},
        optimizer={"name": "muon"},
    )
    mesh, declared = mesh_of(config), model.declare(config)
    state = train.abstract_state(config, declared, mesh)
    step, s = train.jitted_step(config, declared, mesh), train.abstract_schedule(mesh)
    assert step.lower(state, sharded_model.abstract_batch(config, mesh), s).compile()


def cut_on(w, config):
    ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    shape = tuple(
        size // int(np.prod([ranks[axis] for axis in axes], dtype=int))
        for size, axes in zip(w.shape, w.dim_axes, strict=True)
    )
    return optimizer.slice_layout(w, shape)


def test_a_group_without_an_optimizer_is_an_error():
    config = muon_config("1x1x1")
    declared = jax.tree.map(lambda w: dataclasses.replace(w, group="tables"), model.declare(config))
    with pytest.raises(AssertionError, match=r"is of the group 'tables', which has no optimizer"):
        optimizer.make_optimizer(config, declared)


def test_a_name_without_an_optimizer_is_an_error_and_has_no_tuned_learning_rate():
    config = muon_config("1x1x1")
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name="lion")
    )
    declared = model.declare(config)
    w = jax.tree.map(lambda w: jnp.zeros(w.shape), declared)
    with pytest.raises(ValueError, match="lion"):
        optimizer.make_optimizer(config, declared).init(w)
    assert optimizer.learning_rate_warning(config) == ""


def test_an_optimizer_of_elementwise_rules_has_no_matrices_to_plan(monkeypatch):
    config = muon_config("1x1x1")
    assert cost.matrices(config)
    monkeypatch.setattr(optimizer, "make_optimizer", lambda *_: optax.scale_by_lion())
    cost.matrices.cache_clear()
    assert cost.matrices(config) is None
    cost.matrices.cache_clear()


def test_muon_for_a_weight_without_a_matrix_is_an_error():
    field = weights.weight("D", weights.ones, group="matrix")
    norm = dataclasses.make_dataclass("Norm", [("scale", jax.Array, field)])
    with pytest.raises(AssertionError, match=r"scale is '' as a matrix, in dimensions D"):
        weights.declare(norm, {"D": weights.Size(4, "model.hidden_size")})


def test_adamw_is_that_of_its_paper():
    """arXiv:1711.05101, algorithm 2, after clipping by the global norm; two updates."""
    options = {"beta1": 0.8, "beta2": 0.7, "epsilon": 1e-3, "weight_decay": 0.05, "clip_norm": 0.5}
    config = config_of(optimizer=options)
    declared, random = model.declare(config), np.random.default_rng(0)
    w, *grads = (
        jax.tree.map(lambda d: random.normal(size=d.shape).astype(np.float32), declared)
        for _ in range(3)
    )
    rule = optimizer.make_optimizer(config, declared)
    state, moments, squares = rule.init(w), 0.0, 0.0
    for number, grad in enumerate(grads, 1):
        with jax.numpy_dtype_promotion("standard"):
            found, state = rule.update(grad, state, w)
        leaves = [leaf.astype(np.float64) for leaf in jax.tree.leaves(grad)]
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
        clipped = np.array([leaf * min(1, 0.5 / norm) for leaf in leaves], object)
        moments = 0.8 * moments + 0.2 * clipped
        squares = 0.7 * squares + 0.3 * clipped**2
        for update, m, v, weight, d in zip(
            *(jax.tree.leaves(found), moments, squares, jax.tree.leaves(w)),
            jax.tree.leaves(declared),
            strict=True,
        ):
            decayed = 0.05 * (d.decay and d.group != "embedding")
            adam = (m / (1 - 0.8**number)) / (np.sqrt(v / (1 - 0.7**number)) + 1e-3)
            np.testing.assert_allclose(update, adam + decayed * weight, rtol=2e-4, atol=1e-5)


def test_a_run_with_adamw_does_not_resume_with_muon():
    before = dataclasses.asdict(config_of())
    with pytest.raises(ValueError, match=r"optimizer.name 'adamw' -> 'muon'"):
        resume.check_compatible(
            before, dataclasses.asdict(muon_config("1x1x1")), run_directory.at("absent"), 1
        )


@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
@pytest.mark.parametrize("name", MESHES)
def test_planned_flops_and_communication_match_the_compiled_program(name, layout):
    config, text = muon_config(name, experts_layout=layout), updated(name, layout).program
    ops = list(jaxpr.costs(cost.matrices(config).ops))
    flops = sum(cost.only(op.flops) * n for op, n in ops if op.flops is not None)
    # The last of three steps; the updates of the others are not read.
    assert flops == hlo.dot_flops(text, None) > 0
    ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    planned, found = collections.Counter(), collections.Counter()
    for op, n in ops:
        axes = op.send and tuple(a for a in utils.MESH_AXES if a in op.send.axes and ranks[a] > 1)
        if axes:
            planned[axes, op.send.kind] += n * cost.only(op.send.bytes)
    for row, size in hlo.collectives(text, ranks, None).items():
        found[row.axes, row.kind] += size
    assert found == planned


STEPS = 5
MICROBATCHES = {"1x1x1": 2, "8x1x1": 1, "1x1x8": 2, "2x2x2_virtual": 2, "2x1x2x2_virtual": 2}


def run_config(name):
    rows = {
        "microbatches": MICROBATCHES[name],
        "global_batch_size": 8,
        "steps": STEPS,
        "remat": "full",
    }
    config = muon_config(name, z_loss=1e-3)
    return with_values(config, train=rows, optimizer={"lr": 3e-3, "warmup_steps": 1})


@functools.cache
def run(name):
    """Return (config, weights after five steps, state)."""
    config = run_config(name)
    declared, mesh = model.declare(config), mesh_of(config)
    step = jitted_step(config, declared, mesh)
    state = train.initial_state(config, declared, mesh)
    for number in range(STEPS):
        state, report = step(state, on_mesh(config, mesh, batch(config, number)))
    assert report["skipped"] == 0
    return config, canonical(config, state.weights), state


@pytest.mark.long
@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_five_steps_end_at_the_same_weights_on_every_mesh(name):
    (_, one, _), (_, other, state) = run("1x1x1"), run(name)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    groups = [group for _, group in copies((state.weights, state.optimizer)) if len(group) > 1]
    assert groups and all(np.array_equal(first, a) for first, *rest in groups for a in rest)


@pytest.mark.long
def test_a_step_that_is_not_finite_does_not_change_weights_or_momenta():
    name = "2x2x2_virtual"
    config, before, state = run(name)
    step = jitted_step(config, model.declare(config), mesh_of(config))
    momenta = jax.device_get(state.optimizer)
    arrays = jax.tree.map(jnp.copy, state)  # a step donates its state
    bad = batch(config, STEPS)
    bad["loss_weights"] = bad["loss_weights"].copy()
    bad["loss_weights"][5, 3] = np.nan
    after, report = step(arrays, on_mesh(config, mesh_of(config), bad))
    assert report["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, canonical(config, after.weights), before)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.optimizer), momenta)


@pytest.mark.long
def test_a_checkpoint_restores_onto_any_mesh(tmp_path):
    """Weights, momentum and the next step match those of the saved run."""
    config, before, state = run("2x2x2_virtual")
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 1)) as saved:
        saved.save(STEPS, state, dataclasses.asdict(config))
        saved.wait()
        after = [stepped(saved, name, before, state) for name in ("2x2x2_virtual", "8x1x1")]
    for a, b in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def stepped(saved, name, weights_before, state_before):
    """Return the weights after a step from the checkpoint, bit-identical on this mesh."""
    config = run_config(name)
    declared, mesh = model.declare(config), mesh_of(config)
    shapes = train.abstract_state(config, declared, mesh)
    state = saved.restore(STEPS, shapes)
    jax.tree.map(np.testing.assert_array_equal, canonical(config, state.weights), weights_before)
    slots = [jax.tree.leaves(s.optimizer) for s in (state, state_before)]
    assert all(np.array_equal(a.reshape(-1), b.reshape(-1)) for a, b in zip(*slots, strict=True))
    step = jitted_step(config, declared, mesh)
    state, _ = step(state, on_mesh(config, mesh, batch(config, STEPS)))
    return canonical(config, state.weights)
