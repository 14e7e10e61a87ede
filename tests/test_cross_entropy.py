"""The interpreted kernel of the loss against a plain softmax, and where it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import model
import sharded_model
import utils
import vocabulary
import weights
from common import config_of, mesh_of, relative_error
from device_kernels import choice, cross_entropy

# Two blocks of the kernel, the second one incomplete and with padding ids.
IDS, ROWS, D, TOKENS, Z = cross_entropy.BLOCK + 131, cross_entropy.BLOCK + 256, 6, 26, 0.03


def inputs():
    """Return the table, hidden states, targets of both blocks, and token weights, some 0."""
    random = np.random.default_rng(0)
    table, h = random.normal(size=(ROWS, D)), random.normal(size=(TOKENS, D))
    table[IDS:] *= 9  # padding would have most of the probability
    targets = np.where(np.arange(TOKENS) % 2, random.integers(0, IDS, TOKENS), IDS - 1)
    token_weights = random.random(TOKENS) * (random.random(TOKENS) < 0.7)
    kinds = np.float32, np.float32, np.int32, np.float32
    arrays = table, h, targets, token_weights
    return [a.astype(kind) for a, kind in zip(arrays, kinds, strict=True)]


def plain(table, h, targets, token_weights):
    logits = jnp.einsum("nD,vD->nv", h, table[:IDS], precision="highest")
    log_z = jax.nn.logsumexp(logits, axis=-1)
    losses = log_z - logits[jnp.arange(TOKENS), targets]
    sums = jnp.stack([(token_weights * losses).sum(), (token_weights * log_z**2).sum()])
    return sums[0] + Z * sums[1], sums


@pytest.mark.parametrize("fsdp", [1, 2])
def test_the_kernel_has_the_loss_and_the_gradients_of_a_plain_softmax(fsdp):
    def local(table, h, *rest):
        table, h = weights.vary((table, h))
        chunks = vocabulary.in_chunks((h, *rest), 8)  # the last one is padded
        loss = vocabulary.chunked_loss(vocabulary.LossOptions(IDS, Z, True, True), table, *chunks)
        return lax.psum(loss, utils.DATA_AXES)

    tokens = P(utils.DATA_AXES)
    mesh, specs = mesh_of(config_of((fsdp, 1, 1))), (P(utils.VOCABULARY_AXES), *[tokens] * 3)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    step = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    (loss, sums), (d_table, d_h) = step(*inputs())
    expected = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(*inputs())
    found = loss, sums, d_table[:IDS], d_h
    (loss, sums), (of_table, of_h) = expected
    for mine, theirs in zip(found, (loss, sums, of_table[:IDS], of_h), strict=True):
        assert relative_error(mine, theirs) <= 2e-6
    assert not np.any(d_table[IDS:]) and not np.any(d_h[inputs()[3] == 0])


@pytest.mark.parametrize(
    ("shape", "fields", "platform", "fused"),
    [
        ((2, 1, 1), {}, "gpu9.0", True),
        ((1, 1, 1), {}, "gpu8.0", True),
        ((1, 1, 1), {}, "gpu7.0", False),
        ((1, 1, 1), {}, "tpu", False),
        ((1, 1, 1), {}, "cpu", False),
        ((1, 1, 2), {}, "gpu9.0", False),
        ((1, 2, 1), {}, "gpu9.0", False),
        ((1, 1, 1), {"attention_kernel": "xla"}, "gpu9.0", False),
        ((1, 1, 1), {"compute_dtype": "float32"}, "gpu9.0", False),
    ],
)
def test_a_gpu_with_the_complete_vocabulary_has_the_loss_in_one_kernel(
    shape, fields, platform, fused
):
    config = config_of(shape, blocks=2, **{"compute_dtype": "bfloat16"} | fields)
    assert choice.fuses_loss(config, platform) == fused


@pytest.mark.parametrize(("platform", "fused"), [("gpu9.0", True), ("cpu", False)])
def test_the_step_has_the_kernel_where_it_is_chosen(platform, fused, monkeypatch):
    config = config_of((2, 1, 1), blocks=1, moe_layers=0, compute_dtype="bfloat16")
    monkeypatch.setattr(sharded_model, "platform", lambda mesh: platform)
    declared, mesh = model.declare(config), mesh_of(config)
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared)
    args = w, sharded_model.abstract_batch(config, mesh), jnp.int32(0)
    step = jax.make_jaxpr(sharded_model.loss_and_gradients(config, declared, mesh))(*args)
    assert ("cross_entropy_kernel" in str(step)) == fused
