"""Context parallelism: the order of positions, and a model whose sequences are sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import context_parallel
import experts
import hardware
import hf_case
import model
import utils
from common import check_step, config_of, mesh_of
from planning import cost
from runtime import cli

S = 48


def on_mesh(function, context):
    """Return the function of what each rank of context returns, [context, ...]."""
    mesh = mesh_of(config_of((1, 1, 1, context, 1)))
    return jax.shard_map(
        lambda *a: function(*a)[None], mesh=mesh, in_specs=P(), out_specs=P("context"),
        check_vma=True,
    )  # fmt: skip


def on_ranks(function, context, *arrays):
    return np.asarray(jax.jit(on_mesh(function, context))(*arrays))


@pytest.mark.parametrize("context", [2, 4, 8])
def test_ranks_have_all_positions_and_as_many_scores_each(context):
    found = on_ranks(lambda: context_parallel.places(S), context)
    assert sorted(found.reshape(-1).tolist()) == list(range(S))
    assert (np.diff(found, axis=1) > 0).all()
    scores = (found + 1).sum(1)
    assert (scores == scores[0]).all()


@pytest.mark.parametrize("context", [2, 8])
def test_positions_are_gathered_in_order(context):
    x = np.random.default_rng(0).normal(size=(2, S, 3)).astype(np.float32)

    def both(x):
        own = context_parallel.own(x, 1)
        return jnp.stack([
            context_parallel.gather_positions(own),
            context_parallel.vary(context_parallel.complete(own, 1), ("context",)),
        ])  # fmt: skip

    for rank in on_ranks(both, context, x):
        np.testing.assert_array_equal(rank, [x, x])


def test_the_gradient_of_gathered_positions_is_a_float32_sum():
    """The rank of 256 and seven of 1 add up to 263, where sums in bfloat16 stay at 256."""

    def gradient(x):
        own = context_parallel.own(x, 1)
        _, back = jax.vjp(context_parallel.gather_positions, own)
        part = jnp.where(jax.lax.axis_index("context") == 0, 256.0, 1.0).astype(jnp.bfloat16)
        [grad] = back(jnp.broadcast_to(part, x.shape))
        return grad

    x = jnp.zeros((1, S), jnp.bfloat16)
    assert (on_ranks(gradient, 8, x).astype(np.float32) == 264).all()  # 263 in bfloat16
    # A CPU sums bfloat16 in float32 anyway; the program shows what other devices do.
    program = str(jax.make_jaxpr(on_mesh(gradient, 8))(x))
    assert re.findall(r"(\w+)\[[\d,]*\]\S* = reduce_scatter", program) == ["f32"]


def test_loss_gradients_and_routing_match_the_one_device_reference():
    config = config_of(
        (1, 1, 2, 2, 2), virtual=2, segments=True, capacity_factor=0.0, prefix_layers=1,
        q_lora_rank=24, z_loss=1e-3,
        train={"microbatches": 2, "remat": "latents,hidden", "loss_chunk_tokens": 15},
    )  # fmt: skip
    config = utils.changed(config, {"data.positions": "document"})
    check_step(config, hf_case.weights(config.model, seed=3))


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--mesh.context 4 --mesh.tensor 1 --train.seq_len 60", "= 8. Use --train.seq_len 64"),
        ("--mesh.context 2 --mesh.tensor 4 --train.seq_len 100", "= 8. Use --train.seq_len 104"),
    ],
)
def test_a_sequence_of_two_equal_chunks_for_each_rank_is_needed(flags, hint):
    with pytest.raises(utils.ConfigError, match=rf"--mesh.context x lcm.* {hint}"):
        cli.parse(flags.split())


@pytest.mark.parametrize(
    ("remat", "fields"),
    [
        ("none", {"attention": "gqa", "num_key_value_heads": 2, "head_dim": 64}),
        ("latents,attention,hidden", {}),
        ("full", {}),
    ],
)
def test_saved_activations_of_a_rank_are_divided_by_the_ranks(remat, fields):
    rows = {"seq_len": 4096, "microbatches": 1, "global_batch_size": 1, "remat": remat}
    fields = fields | {"moe_layers": 0, "blocks": 1, "compute_dtype": "bfloat16"}

    def held(context):
        step = cost.Step(config_of((1, 1, 1, context, 1), train=rows, **fields), "tpu")
        assert step.kernel == "splash"
        return step.held(step.block)

    assert held(8) <= 0.126 * held(1)


@pytest.mark.parametrize("kernel", ["cudnn", "triton"])
def test_squares_of_gpus_are_planned_as_the_causal_mask_of_one_rank(kernel):
    fields = {"moe_layers": 0, "blocks": 1, "compute_dtype": "bfloat16", "attention_kernel": kernel}
    fields |= {"attention": "gqa", "num_key_value_heads": 2, "head_dim": 64}
    rows = {"seq_len": 4096, "microbatches": 1, "global_batch_size": 1}

    def scores(context):
        config = config_of((1, 1, 1, context, 1), train=rows, **fields)
        assert cost.predict(config, hardware.chip_named("h100")).fits
        parts = cost.flops_by_part(cost.Step(config, "gpu9.0"))
        return sum(sum(kinds.values()) for part, kinds in parts.items() if "scores" in part)

    assert scores(4) == pytest.approx(scores(1) / 4)


def test_a_window_of_all_positions_is_none_in_a_kernel_of_squares():
    fields = {"attention": "gqa", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64}
    rows = {"seq_len": 64, "microbatches": 1, "global_batch_size": 2}
    config = config_of(
        (1, 1, 1, 2, 1), train=rows, attention_kernel="cudnn", blocks=1, moe_layers=0, **fields
    )
    check_step(config, hf_case.weights(config.model, seed=3))


def test_experts_that_do_not_divide_by_all_ranks_are_sharded_like_other_weights():
    config = config_of((1, 2, 1, 4, 1), n_routed_experts=4)
    assert not experts.uses_expert_parallelism(config)
    model.declare(config)
