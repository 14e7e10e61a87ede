"""Interpreted kernels against plain attention, within the transformations of the model.

Letters: B sequences, T positions, N heads, A width of queries and keys, W of values.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import attention
import reference
import utils
from common import config_of, mesh_of, mostly_long, relative_error

B, T, N, A, W = 4, 640, 4, 24, 16  # five blocks of 128 positions
SCALE = 0.3  # of scores: not 1 / sqrt(A)
DRAWN = P("fsdp", None, "tensor")


def arrays():
    """Return q, k, v, and factors on the result for a loss."""
    random = np.random.default_rng(0)
    return [random.normal(size=(B, T, N, w)).astype(np.float32) for w in (A, A, W, W)]


def documents():
    return np.cumsum(np.random.default_rng(1).random((B, T)) < 0.01, axis=1, dtype=np.int32)


def written_out(q, k, v, segments):
    """softmax(SCALE q k^T) v with the full T x S scores."""
    scores = jnp.einsum("BTNA,BSNA->BNTS", q, k, precision="highest") * SCALE
    probs = jax.nn.softmax(
        jnp.where(reference.visible(segments, utils.Model()), scores, -jnp.inf), axis=-1
    )
    return jnp.einsum("BNTS,BSNW->BTNW", probs, v, precision="highest")


def twice(attend, remat):
    """Return (q, k, v, factors, segments) -> a loss of attention in a scan and after it.

    JAX checks the types in the bodies of scan and checkpoint separately.
    """

    def loss(q, k, v, factors, *segments):
        def layer(x, _):
            return q + attend(x, k, v, *segments).mean(axis=-1, keepdims=True), None

        x, _ = lax.scan(rematted(layer, remat), q, None, length=2)
        return (attend(x, k, v, *segments) * factors).sum()

    return loss


def rematted(layer, remat):
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*remat.split(","))
    return jax.checkpoint(layer, policy=policy)


@pytest.mark.parametrize(
    ("shape", "remat", "kernel", "segments"),
    [
        ((1, 1, 1), "none", "splash", True),
        ((2, 1, 4), "attention", "splash", True),
        pytest.param((2, 2, 2), "full", "splash", False, marks=pytest.mark.long),
        ((4, 1, 2), "none", "splash", False),
        ((1, 1, 1), "none", "cudnn", False),
        ((2, 1, 4), "attention", "cudnn", False),
        ((2, 2, 2), "full", "cudnn", False),
        pytest.param((1, 1, 1), "none", "triton", True, marks=pytest.mark.long),
        ((2, 1, 4), "attention", "triton", True),
        ((2, 2, 2), "full", "triton", False),
    ],
)
def test_a_kernel_and_its_gradient_match_plain_attention_on_every_mesh(
    shape, remat, kernel, segments
):
    inputs, ids = arrays(), (documents(),) if segments else ()
    plain = twice(
        lambda q, k, v, *ids: written_out(q, k, v, ids[0] if ids else np.zeros((B, T))), "none"
    )
    expected, gradients = jax.value_and_grad(plain, argnums=(0, 1, 2))(*inputs, *ids)

    def attend(q, k, v, *ids):
        return attention.attend(q, k, v, ids[0] if ids else None, kernel, SCALE)

    def local(*args):
        return lax.psum(twice(attend, remat)(*args), ("fsdp", "tensor"))

    sharded = jax.shard_map(
        local,
        mesh=mesh_of(config_of(shape)),
        in_specs=(DRAWN,) * 4 + (P("fsdp"),) * len(ids),
        out_specs=P(),
        check_vma=True,
    )
    found, found_gradients = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1, 2)))(*inputs, *ids)
    assert relative_error(found, expected) <= 1e-5
    for name, mine, theirs in zip("qkv", found_gradients, gradients, strict=True):
        assert relative_error(mine, theirs) <= 1e-5, name


@pytest.mark.parametrize(
    ("kernel", "window"),
    [("xla", 0), ("xla", 37), ("splash", 0), ("splash", 200), ("cudnn", 0), ("cudnn", 200),
     ("triton", 0)],
)  # fmt: skip
def test_fewer_key_heads_and_a_window_match_plain_attention(kernel, window):
    random = np.random.default_rng(0)
    shapes = (2, 256, 6, A), (2, 256, 2, A), (2, 256, 2, W), (2, 256, 6, W)
    q, k, v, factors = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    fields = dataclasses.replace(utils.Model(), sliding_window=window)
    mask = reference.visible(np.zeros((2, 256)), fields)[:, 0]

    def plain(q, k, v):
        """Each query head by itself."""
        total = 0.0
        for n in range(6):
            scores = SCALE * jnp.einsum("BTA,BSA->BTS", q[:, :, n], k[:, :, n // 3])
            share = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
            y = jnp.einsum("BTS,BSW->BTW", share, v[:, :, n // 3])
            total += (y * factors[:, :, n]).sum()
        return total

    def mine(q, k, v):
        return (attention.attend(q, k, v, None, kernel, SCALE, window) * factors).sum()

    expected, found = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2))) for f in (plain, mine))
    (loss, gradients), (found_loss, found_gradients) = expected(q, k, v), found(q, k, v)
    assert relative_error(found_loss, loss) <= 1e-4  # of a sum that nearly cancels
    for name, one, other in zip("qkv", found_gradients, gradients, strict=True):
        assert relative_error(one, other) <= 1e-5, name


@pytest.mark.parametrize("kernel", mostly_long(["splash", "cudnn", "triton"], "cudnn"))
def test_in_bfloat16_a_kernel_is_as_close_to_float32_as_xla_is(kernel):
    ids = None if kernel == "cudnn" else documents()

    def gradients(kernel, dtype):
        def loss(q, k, v):
            out = attention.attend(q, k, v, ids, kernel, SCALE)
            return (out.astype(jnp.float32) * factors).sum()

        *inputs, factors = arrays()
        inputs = [a.astype(dtype) for a in inputs]
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)

    def error(found):
        return max(
            float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
            for a, b in zip(found, exact, strict=True)
        )

    exact = gradients("xla", jnp.float32)
    mine, xla = (gradients(name, jnp.bfloat16) for name in (kernel, "xla"))
    assert all(a.dtype == jnp.bfloat16 for a in mine)
    # Splash rounds the scale with the queries.
    assert error(mine) <= 2 * error(xla) <= 0.02


@pytest.mark.parametrize("kernel", ["splash", "cudnn", "triton"])
def test_a_saved_result_of_a_kernel_is_not_recomputed(kernel):
    inputs = [jnp.zeros((1, 128, 2, w)) for w in (A, A, W, W)]

    def kernels(remat):
        step = jax.grad(twice(lambda *a: attention.attend(*a, None, kernel, SCALE), remat))
        return str(jax.make_jaxpr(step)(*inputs)).count("foreign_kernel[")

    # One in the scan and one after it, forward and backward; with full remat that of the scan once
    # more.
    assert kernels("attention") == kernels("none") == 4
    assert kernels("full") == 5


def config(**changes):
    train = {"seq_len": changes.pop("seq_len", 1024)}
    return config_of(train=train, **({"compute_dtype": "bfloat16"} | changes))


def test_auto_is_splash_on_a_tpu_if_it_can_run():
    assert attention.choose_kernel(config(), "tpu") == "splash"
    assert attention.choose_kernel(config(), "cpu") == "xla"
    assert attention.choose_kernel(config(compute_dtype="float32"), "tpu") == "xla"
    assert attention.choose_kernel(config(seq_len=1000), "tpu") == "xla"
    assert attention.choose_kernel(config(attention_kernel="xla"), "tpu") == "xla"
    assert attention.choose_kernel(config(attention_kernel="splash"), "cpu") == "splash"
    assert (
        attention.describe_kernel(config(), "tpu") == "splash"
        and attention.describe_kernel(config(), "cpu") == "xla"
    )
    assert (
        attention.describe_kernel(config(compute_dtype="float32"), "tpu")
        == "xla (splash: not for float32)"
    )
    assert attention.describe_kernel(config(attention_kernel="xla"), "tpu") == "xla"


def test_a_selected_kernel_that_cannot_run_is_an_error():
    with pytest.raises(ValueError, match=r"seq_len 1000.*Use --train.seq_len 1024"):
        attention.choose_kernel(config(attention_kernel="splash", seq_len=1000), "tpu")
    for words, platform in (("splash", "gpu9"), ("cudnn", "tpu"), ("triton", "tpu")):
        with pytest.raises(ValueError, match=rf"attention_kernel {words}: these devices have"):
            attention.choose_kernel(config(attention_kernel=words), platform)


LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NO_GPU = "it needs an NVIDIA GPU of compute capability 8.0 or later"


@pytest.mark.parametrize(
    ("changes", "platform", "why"),
    [
        ({}, "gpu9", ""),
        (LATENT, "gpu9", ""),
        ({}, "gpu10", ""),
        ({"v_head_dim": 24}, "gpu8", ""),
        ({"seq_len": 1000}, "gpu9", ""),
        ({}, "gpu8", "before Hopper it needs one head width up to 128, not 24 and 16"),
        (LATENT, "gpu8", "before Hopper it needs one head width up to 128, not 192 and"),
        ({}, "gpu7", NO_GPU),
        ({}, "gpugfx942", NO_GPU),
        ({"v_head_dim": 12}, "gpu9", "head widths 24 and 12 are not multiples of 8"),
        ({"qk_nope_head_dim": 256}, "gpu9", "heads of 264 are wider than 256"),
        ({"compute_dtype": "float32"}, "gpu9", "it does not support float32"),
    ],
)
def test_cudnn_is_chosen_on_a_gpu_if_it_can_run_and_the_error_says_why_not(changes, platform, why):
    check_choice("cudnn", changes, platform, why)


@pytest.mark.parametrize(
    ("changes", "platform", "why"),
    [
        ({}, "gpu9", ""),
        ({}, "gpu8", ""),
        ({"v_head_dim": 12}, "gpu9", ""),
        (LATENT, "gpu8", ""),
        ({"qk_nope_head_dim": 256}, "gpu9", "heads of 264 are wider than 256"),
        ({"v_head_dim": 32}, "gpu9", "values of 32 are wider than queries of 24"),
        ({}, "gpu7", NO_GPU),
        ({"seq_len": 1000}, "gpu9", "sequences of 1000 are not a multiple of 128"),
        ({"compute_dtype": "float32"}, "gpu9", "it does not support float32"),
    ],
)
def test_triton_is_chosen_for_segments_if_it_can_run_and_the_error_says_why_not(
    changes, platform, why
):
    check_choice("triton", changes, platform, why, segments=True)


def check_choice(kernel, changes, platform, why, **data):
    """Check auto for these sizes, and the result or error of selecting this kernel."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    data = utils.Data(**data)
    wanted = dataclasses.replace(config(**sizes | changes), data=data)
    found = attention.choose_kernel(wanted, platform)
    assert (found == kernel) == (not why)
    asked = config(attention_kernel=kernel, **sizes | changes)
    asked = dataclasses.replace(asked, data=data)
    if why:
        with pytest.raises(ValueError, match=rf"--model.attention_kernel {kernel}: {why}"):
            attention.choose_kernel(asked, platform)
    else:
        assert attention.choose_kernel(asked, platform) == kernel


def test_triton_is_chosen_if_cudnn_cannot_run_with_the_reason():
    packed = dataclasses.replace(config(), data=utils.Data(segments=True))
    documents = "cudnn: it does not support --data.segments"
    assert attention.describe_kernel(packed, "gpu9") == f"triton ({documents})"
    both = dataclasses.replace(config(seq_len=1000), data=packed.data)
    blocks = "triton: sequences of 1000 are not a multiple of 128"
    assert attention.describe_kernel(both, "gpu9") == f"xla ({documents}; {blocks})"
    assert attention.describe_kernel(config(compute_dtype="float32"), "gpu9").startswith(
        "xla (cudnn: not for"
    )
    packed = dataclasses.replace(packed, model=config(attention_kernel="cudnn").model)
    with pytest.raises(ValueError, match=r"it does not support --data.segments"):
        attention.choose_kernel(packed, "gpu9")


@pytest.mark.parametrize(
    ("length", "blocks"), [(128, 1), (512, 1), (640, 5), (768, 2), (1024, 2), (4096, 8)]
)
def test_kernels_compute_the_blocks_at_and_below_the_diagonal(length, blocks):
    share = attention.computed_share(config(seq_len=length), "tpu")
    computed = sum(row >= column for row in range(blocks) for column in range(blocks))
    assert share == computed / blocks**2
    assert attention.computed_share(config(seq_len=length), "cpu") == 1
    tiles = length // 128
    wide = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    share = attention.computed_share(config(seq_len=length, **wide), "gpu9")
    assert share == (tiles + 1) / (2 * tiles)


@pytest.mark.parametrize("window", [1, 128, 129, 130, 512, 700, 4096])
def test_kernels_skip_the_blocks_that_a_window_covers(window):
    length, size = 1024, 128
    narrow = {"attention": "gqa", "head_dim": 64, "num_key_value_heads": 2}
    share = attention.computed_share(
        config(seq_len=length, sliding_window=window, **narrow), "gpu9"
    )
    behind = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (behind >= 0) & (behind < window)
    blocks = visible.reshape(length // size, size, length // size, size).any((1, 3))
    assert share == blocks.mean()


def test_a_kernel_without_windows_gives_way_to_one_that_has_them():
    fields = {"attention": "gqa", "head_dim": 64, "num_key_value_heads": 2, "sliding_window": 300}
    packed = dataclasses.replace(config(**fields), data=utils.Data(segments=True))
    reason = "triton: it does not support --model.sliding_window"
    assert reason in attention.describe_kernel(packed, "gpu9")
    assert attention.choose_kernel(packed, "gpu9") == "xla"
    assert attention.choose_kernel(config(**fields), "gpu9") == "cudnn"
    assert attention.choose_kernel(config(**fields), "tpu") == "splash"
    long = config(**fields | {"sliding_window": 1024}, attention_kernel="triton")
    assert attention.choose_kernel(long, "gpu9") == "triton"  # all positions are in the window
