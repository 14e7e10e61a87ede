"""Interpreted kernels against plain attention, within the transformations of the model.

Letters: B sequences, T positions, N query heads, Y heads of keys and values, A width of queries and
keys, W of values.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import attention
import reference
import utils
from common import config_of, mesh_of, relative_error
from conftest import ROOT
from device_kernels import adapter, choice, splash
from device_kernels.splash import splash_kernel

B, N, Y, A, W = 2, 8, 4, 24, 16
SCALE = 0.3  # of scores: not 1 / sqrt(A)


def arrays(T):
    """Return q, k, v, and factors on the result for a loss."""
    random, shapes = np.random.default_rng(0), [(N, A), (Y, A), (Y, W), (N, W)]
    return [random.normal(size=(B, T, *shape)).astype(np.float32) for shape in shapes]


def documents(T):
    return np.cumsum(np.random.default_rng(1).random((B, T)) < 0.01, axis=1, dtype=np.int32)


def written_out(q, k, v, sinks, segments, window):
    """softmax(SCALE q k^T) v of each query head by itself, with the full T x S scores.

    A sink is one more key, whose score is given and whose value is 0.
    """
    fields = dataclasses.replace(utils.Model(), sliding_window=window)
    mask, y = reference.visible(segments, fields)[:, 0], []
    for n in range(N):
        of_key = n // (N // Y)
        scores = SCALE * jnp.einsum("BTA,BSA->BTS", q[:, :, n], k[:, :, of_key])
        scores = jnp.where(mask, scores, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[n], (*scores.shape[:2], 1))
            scores = jnp.concatenate([sink, scores], axis=-1)
        share = jax.nn.softmax(scores, axis=-1)[..., -k.shape[1] :]
        y.append(jnp.einsum("BTS,BSW->BTW", share, v[:, :, of_key]))
    return jnp.stack(y, axis=2)


def twice(attend, remat):
    """Return (q, k, v, sinks, factors, segments) -> a loss of attention in a scan and after it.

    JAX checks the types in the bodies of scan and checkpoint separately.
    """

    def loss(q, k, v, sinks, factors, segments):
        def layer(x, _):
            return q + attend(x, k, v, sinks, segments).mean(axis=-1, keepdims=True), None

        policy = jax.checkpoint_policies.save_only_these_names(remat)
        layer = layer if remat == "none" else jax.checkpoint(layer, policy=policy)
        x, _ = lax.scan(layer, q, None, length=2)
        return (attend(x, k, v, sinks, segments) * factors).sum()

    return loss


@pytest.mark.parametrize(
    ("kernel", "T", "segments", "window", "remat", "sinks"),
    [  # 640 positions are five blocks of splash
        ("xla", 256, True, 37, "none", True),
        ("splash", 640, True, 200, "attention", True),
        ("splash", 640, False, 0, "full", False),
        ("cudnn", 256, False, 200, "attention", True),
        ("cudnn", 256, False, 0, "none", False),
        ("triton", 256, True, 0, "full", True),
    ],
)
def test_attention_and_its_gradient_match_plain_attention(
    kernel, T, segments, window, remat, sinks
):
    q, k, v, factors = arrays(T)
    # One of a head outweighs all scores, and one has no weight.
    sink_n = np.linspace(-4, 9, N, dtype=np.float32) if sinks else None
    ids = documents(T) if segments else np.zeros((B, T), np.int32)
    inputs, of = (q, k, v, sink_n, factors, ids), (0, 1, 2, 3) if sinks else (0, 1, 2)
    plain = twice(lambda *args: written_out(*args, window), "none")
    expected, gradients = jax.jit(jax.value_and_grad(plain, of))(*inputs)

    def attend(q, k, v, sinks, ids):
        ids = ids if segments else None
        return attention.attend(kernel, attention.Inputs(q, k, v, ids, SCALE, window, sinks))

    def local(*args):
        return lax.psum(twice(attend, remat)(*args), ("fsdp", "tensor"))

    heads = P("fsdp", None, "tensor")
    run = jax.shard_map(
        local, mesh=mesh_of(config_of((2, 1, 2))), out_specs=P(), check_vma=True,
        in_specs=(heads, heads, heads, P("tensor"), heads, P("fsdp")),
    )  # fmt: skip
    loss, loss_gradients = jax.jit(jax.value_and_grad(run, of))(*inputs)
    assert relative_error(loss, expected) <= 1e-4  # of a sum that may nearly cancel
    for i, (mine, theirs) in enumerate(zip(loss_gradients, gradients, strict=True)):
        assert relative_error(mine, theirs) <= 1e-5, i


@pytest.mark.parametrize("window", [0, 200])
def test_a_mask_of_the_device_is_that_of_the_host(window, monkeypatch):
    """As for sequences beyond HOST_MASK, whose mask would take the host minutes."""
    q, k, v, factors = arrays(640)
    found = []

    def loss(q, k, v):
        inputs = attention.Inputs(q, k, v, documents(640), SCALE, window)
        return (attention.attend("splash", inputs) * factors).sum()

    for longest in (splash.HOST_MASK, 0):
        monkeypatch.setattr(splash, "HOST_MASK", longest)
        found.append(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v))
    for host, device in zip(*map(jax.tree.leaves, found), strict=True):
        assert relative_error(device, host) <= 1e-6


@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_in_bfloat16_a_kernel_is_as_close_to_float32_as_xla_is(kernel):
    def gradients(kernel, dtype):
        def loss(q, k, v):
            out = attention.attend(kernel, attention.Inputs(q, k, v, None, SCALE))
            return (out.astype(jnp.float32) * factors).sum()

        *inputs, factors = arrays(256)
        inputs = [a.astype(dtype) for a in inputs]
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)

    exact = gradients("xla", jnp.float32)
    mine, xla = (gradients(name, jnp.bfloat16) for name in (kernel, "xla"))
    assert all(a.dtype == jnp.bfloat16 for a in mine)
    mine, xla = (max(map(relative_error, gradients, exact)) for gradients in (mine, xla))
    assert mine <= 2 * xla <= 0.02  # splash rounds the scale with the queries


@pytest.mark.parametrize("kernel", ["splash", "cudnn", "triton"])
def test_a_saved_result_of_a_kernel_is_not_recomputed(kernel):
    def kernels(remat):
        step = jax.grad(
            twice(lambda *a: attention.attend(kernel, attention.Inputs(*a[:3], None, SCALE)), remat)
        )
        *heads, factors = arrays(128)
        return str(jax.make_jaxpr(step)(*heads, None, factors, None)).count("foreign_kernel[")

    # One in the scan and one after it, forward and backward; with full remat that of the scan once
    # more.
    assert kernels("attention") == kernels("none") == 4
    assert kernels("full") == 5


# --- kernels by themselves, and the private names of JAX that they need --------------------------


def test_this_jax_has_the_private_names_in_use_and_the_error_for_others_has_its_version():
    calls = ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p", "MaskType")
    names = [adapter.CHECK, adapter.SPLASH_BACKWARD, adapter.TRITON_BACKWARD]
    names += [f"{adapter.CUDNN}.{call}" for call in calls]
    assert all(adapter.private(name) is not None for name in names)
    for name in ("jax._src.config._gone", "jax._src.gone.name"):
        message = rf"jax {re.escape(jax.__version__)} has no {name}.*--model.attention_kernel xla"
        with pytest.raises(ImportError, match=message):
            adapter.private(name)


def test_no_other_file_uses_private_names_of_jax():
    private = re.compile(r"\bjax\._[a-z]|(?<!checkpoint\.)\b_src\b")
    files = [p for p in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")] if p.parent.name != "tests"]
    assert [p.name for p in files if private.search(p.read_text())] == ["adapter.py"]


@pytest.mark.parametrize(
    ("kernel", "platform", "call", "count"),
    [("cudnn", "cuda", "__cudnn$fmhaSoftmax", 2), ("splash", "tpu", "tpu_custom_call", 3)],
)
def test_a_kernel_lowers_without_its_device(kernel, platform, call, count):
    """Forward and backward. JAX's primitives of kernels have other parameters in other versions."""

    def loss(*arrays):
        return (
            attention.attend(kernel, attention.Inputs(*arrays, None, SCALE))
            .astype(jnp.float32)
            .sum()
        )

    inputs = [a.astype(jnp.bfloat16) for a in arrays(128)[:3]]
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*inputs)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"custom_call @{call}") == count


@pytest.mark.parametrize("name", ["plain", "forward", "backward"])
def test_the_precision_of_products_follows_the_dtype_and_not_the_default(name):
    kernel = splash_kernel(N, 128, 128, window=0)
    function = adapter.untyped(getattr(kernel, name), interpret=False)

    def precisions(dtype, default):
        wide, narrow = (jnp.zeros((B, 128, N, w), dtype) for w in (A, W))
        args = [wide, wide, narrow]
        if name == "backward":
            args = [narrow, *args, narrow, jnp.zeros((B, N, 128))]
        with jax.default_matmul_precision(default):
            text = str(jax.make_jaxpr(function)(*args))
        return set(re.findall(r"Precision\.(\w+)", text))

    assert precisions(jnp.float32, "bfloat16") == {"HIGHEST"}
    assert "HIGHEST" not in precisions(jnp.bfloat16, "highest")


# --- the choice of a kernel -----------------------------------------------------------------------


def config(segments=False, seq_len=1024, context=1, **fields):
    """Return a config whose heads every kernel can run."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return config_of(
        (1, 1, 1, context, 1),
        segments=segments,
        train={"seq_len": seq_len},
        **{"compute_dtype": "bfloat16"} | sizes | fields,
    )


LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
OLD = "it needs an NVIDIA GPU of compute capability 8.0 or later"
WINDOW = {"attention": "gqa", "head_dim": 64, "num_key_value_heads": 2, "sliding_window": 300}


@pytest.mark.parametrize(
    ("kernel", "fields", "platform", "why"),
    [
        ("splash", {}, "tpu", ""),
        ("splash", {}, "gpu9.0", "these devices have"),
        ("splash", {}, "tpuv3", "it needs a TPU v4 or later"),
        ("cudnn", {}, "gpu9.0", ""),
        ("cudnn", LATENT | {"seq_len": 1000}, "gpu10.0", ""),
        ("cudnn", {"v_head_dim": 24}, "gpu8.0", ""),
        ("cudnn", {}, "gpu8.9", "on these GPUs it needs one head width up to 128, not 24 and 16"),
        ("cudnn", {}, "gpu12.0", "on these GPUs it needs one head width up to 128"),
        ("cudnn", {"v_head_dim": 24}, "gpu12.1", ""),
        ("cudnn", {}, "gpu7.5", OLD),
        ("cudnn", {}, "gpugfx942", OLD),
        ("cudnn", {"v_head_dim": 12}, "gpu9.0", "head widths 24 and 12 are not multiples of 8"),
        ("cudnn", {"qk_nope_head_dim": 256}, "gpu9.0", "heads of 264 are wider than 256"),
        ("cudnn", {"compute_dtype": "float32"}, "gpu9.0", "it does not support float32"),
        ("cudnn", {"segments": True}, "gpu9.0", "it does not support --data.segments"),
        ("triton", LATENT | {"segments": True, "v_head_dim": 12}, "gpu8.0", ""),
        ("triton", {"v_head_dim": 32}, "gpu9.0", "values of 32 are wider than queries of 24"),
        ("triton", {"seq_len": 1000}, "gpu9.0", "sequences of 1000 are not a multiple of 128"),
        ("triton", WINDOW, "gpu9.0", "it does not support --model.sliding_window"),
        ("splash", {"context": 4}, "tpu", ""),
        ("splash", {"context": 8}, "tpu", "chunks of --mesh.context 8 of 64 positions are not a"),
        ("cudnn", {"context": 4}, "gpu9.0", ""),
        (
            "cudnn",
            WINDOW | {"context": 2},
            "gpu9.0",
            "it does not support --model.sliding_window w",
        ),
        (
            "triton",
            {"context": 2, "segments": True},
            "gpu9.0",
            "it does not support --data.segment",
        ),
    ],
)
def test_a_kernel_is_chosen_if_it_can_run_and_the_error_says_why_not(kernel, fields, platform, why):
    chosen = choice.choose_kernel(config(**fields), platform)
    asked = config(attention_kernel=kernel, **fields)
    if not why:
        assert chosen == kernel == choice.choose_kernel(asked, platform)
        return
    assert chosen != kernel
    with pytest.raises(utils.ConfigError, match=rf"--model.attention_kernel {kernel}: {why}"):
        choice.choose_kernel(asked, platform)


def test_a_selected_kernel_runs_on_a_cpu_and_where_its_window_has_all_positions():
    assert choice.choose_kernel(config(attention_kernel="splash"), "cpu") == "splash"
    with pytest.raises(utils.ConfigError, match="splash: sequences of 1000 are not"):
        choice.choose_kernel(config(attention_kernel="splash", seq_len=1000), "cpu")
    whole = config(attention_kernel="triton", **WINDOW | {"sliding_window": 1024})
    assert choice.choose_kernel(whole, "gpu9.0") == "triton"


@pytest.mark.parametrize(
    ("fields", "platform", "text"),
    [
        ({}, "cpu", "xla"),
        ({"compute_dtype": "float32"}, "tpu", "xla (splash: not for float32)"),
        ({"segments": True}, "gpu9.0", "triton (cudnn: it does not support --data.segments)"),
    ],
)
def test_the_kernel_is_described_with_why_not_a_better_one(fields, platform, text):
    assert choice.describe_kernel(config(**fields), platform) == text
    assert choice.choose_kernel(config(**fields), platform) == text.split()[0]


def test_kernels_skip_blocks_above_the_diagonal_and_before_the_window():
    for length, blocks in [(512, 1), (640, 5), (768, 2), (4096, 8)]:
        share = choice.computed_share(config(seq_len=length), "tpu")
        assert share == sum(range(blocks + 1)) / blocks**2
    assert choice.computed_share(config(), "cpu") == 1
    behind = np.arange(1024)[:, None] - np.arange(1024)[None, :]
    for window in (1, 128, 129, 130, 700, 4096):
        share = choice.computed_share(config(**WINDOW), "gpu9.0", window)
        visible = (behind >= 0) & (behind < window)
        assert share == visible.reshape(8, 128, 8, 128).any((1, 3)).mean()
    # Five of six layers with a window of 512, and 8,192 positions.
    types = (utils.SLIDING_ATTENTION,) * 5 + (utils.FULL_ATTENTION,)
    pattern = config(seq_len=8192, **WINDOW | {"sliding_window": 512, "layer_types": types})
    shares = dict(choice.window_shares(pattern, "tpu"))
    assert (5 * shares[512] + shares[0]) / 6 <= 0.3 * shares[0]


@pytest.mark.parametrize("rotated", [True, False])
def test_heads_that_are_written_in_place_equal_those_that_are_concatenated(rotated):
    yarn = utils.RopeScaling(factor=4.0, original_max_position_embeddings=16, mscale=0.7)
    m = dataclasses.replace(utils.Model(), q_lora_rank=0, rope_scaling=yarn)
    rope = utils.Rope(m.rope_theta, yarn) if rotated else None
    random, T = np.random.default_rng(0), 24
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    wide = m.qk_nope_head_dim + m.v_head_dim
    query = attention.Query(up=draw(m.hidden_size, N, m.qk_nope_head_dim + m.qk_rope_head_dim))
    w = attention.LatentAttention(
        query=query, norm=None, kv_down=None, kv_norm=None, out=None, norm_after=None,
        kv_up=draw(m.kv_lora_rank, N, wide),
    )  # fmt: skip
    inputs = draw(B, T, m.hidden_size + m.kv_lora_rank + m.qk_rope_head_dim)
    at = random.integers(0, 100, (B, T), dtype=np.int32)
    found = {}
    for kernel in ("xla", "cudnn"):

        def both(w, x, kernel=kernel):
            heads, back = jax.vjp(lambda w, x: w.heads(x, m, at, rope, kernel), w, x)
            gradient = (jnp.cos(jnp.arange(a.size, dtype=jnp.float32)) for a in heads)
            gradient = (g.reshape(a.shape) for g, a in zip(gradient, heads, strict=True))
            return heads, back(tuple(gradient))

        run = jax.shard_map(both, mesh=mesh_of(config_of()), in_specs=P(), out_specs=P())
        found[kernel] = jax.tree.leaves(jax.jit(run)(w, inputs))
    for one, other in zip(*found.values(), strict=True):
        assert relative_error(other, one) < 1e-6
