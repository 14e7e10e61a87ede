"""Counts of compiled programs, and of texts as compilers for TPUs and GPUs write them, in hlo/."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from conftest import ROOT
from planning import hlo
from utils import ConfigError

PRODUCT = 2 * 8 * 16 * 16  # FLOPs of [8, 16] @ [16, 16]


def compiled(function, *shapes, dtype=jnp.float32):
    args = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return jax.jit(function).lower(*args).compile().as_text()


def read(name):
    return (ROOT / "tests" / "hlo" / f"{name}.hlo").read_text()


def repeat(function, x, times):
    return lax.scan(lambda x, _: (function(x), None), x, None, length=times)[0]


def test_a_product_counts_two_flops_per_multiplication():
    assert hlo.dot_flops(compiled(lambda x, w: x @ w, (8, 16), (16, 24))) == 2 * 8 * 16 * 24
    text = compiled(lambda a, b: jnp.einsum("bijk,bjkl->bil", a, b), (3, 4, 5, 6), (3, 5, 6, 7))
    assert hlo.dot_flops(text) == 2 * 3 * 4 * 5 * 6 * 7
    text = compiled(lambda a: jnp.tanh(a @ a.T), (512, 256), dtype=jnp.bfloat16)
    assert hlo.dot_flops(text) == 2 * 512 * 512 * 256


def test_trip_counts_of_nested_loops_multiply():
    def nested(x, w):
        return repeat(lambda x: repeat(lambda x: jnp.tanh(x @ w), x, 5) @ w, x, 7)

    assert hlo.dot_flops(compiled(nested, (8, 16), (16, 16))) == (7 * 5 + 7) * PRODUCT


def test_branches_count_by_the_share_that_the_caller_gives():
    def branching(x, w):
        def step(x, i):
            with jax.named_scope("sometimes"):
                return lax.cond(i < 2, lambda x: jnp.tanh(x @ w), lambda x: x, x), None

        return lax.scan(step, x, jnp.arange(6))[0]

    text, names = compiled(branching, (8, 16), (16, 16)), []

    def share(op_name):
        names.append(op_name)
        return Fraction(4, 6), Fraction(2, 6)

    assert hlo.dot_flops(text, share) == 2 * PRODUCT
    assert all("sometimes" in name for name in names)
    for unknown in (None, lambda op_name: None):
        with pytest.raises(ValueError, match=r"sometimes.*it is unknown how often.*branch_share"):
            hlo.dot_flops(text, unknown)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        hlo.dot_flops(text, lambda op_name: (1, 1, 1))


def test_a_loop_of_unknown_length_is_refused_if_it_multiplies_and_ignored_if_not():
    def until_small(step, x):
        return lax.while_loop(lambda x: x.sum() > 5.0, step, x)

    with pytest.raises(ValueError, match=r"no known trip count.*lax.scan"):
        hlo.dot_flops(compiled(lambda x: until_small(lambda x: x @ x, x), (16, 16)))
    text = compiled(lambda x: until_small(lambda x: x / 2, x @ x), (16, 16))
    assert hlo.dot_flops(text) == 2 * 16**3


def test_a_loop_counts_from_a_constant_to_a_constant_or_is_refused():
    def loop(first, last, step):
        def run(x, w, n):
            first_, last_ = (n if at is None else at for at in (first, last))
            go = lambda s: s[0] < last_ if step > 0 else s[0] > last_  # noqa: E731
            return lax.while_loop(go, lambda s: (s[0] + step, jnp.tanh(s[1] @ w)), (first_, x))[1]

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16))]
        n = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(run).lower(*shapes, n).compile().as_text()

    for limits, trips in (((0, 9, 2), 5), ((3, 9, 1), 6), ((9, 0, -1), 9)):
        assert hlo.dot_flops(loop(*limits)) == trips * PRODUCT
    for limits in ((None, 9, 1), (0, None, 1)):
        with pytest.raises(ConfigError, match=r"no known trip count.*lax.scan"):
            hlo.dot_flops(loop(*limits))


def test_a_loop_of_a_tpu_takes_its_trips_from_the_condition_and_the_first_count():
    text = read("tpu_loop")
    # A product of 8 pairs of matrices, written as a convolution over the batch.
    assert hlo.dot_flops(text) == (9 - 2) * 2 * 8 * 32 * 64 * 16
    # An asynchronous collective counts once.
    permute = hlo.Collective(("fsdp",), "collective-permute", False)
    assert hlo.collectives(text, {"fsdp": 2}) == {permute: 7 * 8 * 32 * 16 * 2}
    # A condition that is not a counter below a constant is refused.
    for part in ("direction=LT", "constant(9)", "get-tuple-element(%c), index=0"):
        with pytest.raises(ValueError, match=r"Loop loop .* no known trip count"):
            hlo.dot_flops(text.replace(part, "parameter(1)"))


def test_kernels_of_splash_count_by_the_blocks_that_they_compute():
    text = read("splash")
    pairs = 4 * 6 * 3 * 512 * 512  # of 2 x 2 blocks those not above the diagonal
    forward, dkv, dq = 192 + 64, 2 * 192 + 2 * 64, 2 * 192 + 64
    assert hlo.dot_flops(text) == 2 * pairs * (forward + dkv + dq)
    one = text.replace("[4,6,", "[6,").replace("{3,2,1,0", "{2,1,0")  # sequence
    assert hlo.dot_flops(one) == hlo.dot_flops(text) / 4
    with pytest.raises(ValueError, match="are not square: 2 by 4"):
        hlo.dot_flops(text.replace("s8[1,2,2]", "s8[1,2,4]"))
    # A kernel is in its scopes though its attributes take three lines.
    [computation] = hlo.parse(text).computations.values()
    for name in ("splash_mha_fwd_residuals.15", "splash_mha_dq_no_residuals.4"):
        assert "/attention/" in computation[name].op_name


CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
PAIRS = 4 * 6 * 36 * 128 * 128  # of 8 x 8 tiles of 128 those not above the diagonal
GEMM = 2 * 384 * 24 * 4096


def test_calls_of_cudnn_and_cublas_count_as_products():
    text = read("gpu_calls")
    assert hlo.dot_flops(text) == 2 * PAIRS * ((96 + 64) + (3 * 96 + 2 * 64)) + GEMM


def test_kernels_of_triton_count_as_those_of_cudnn_by_what_each_multiplies():
    def named(name):
        call = 'custom_call_target="__gpu$xla.gpu.triton"'
        return f'{call}, backend_config={{ir = "mha{{", name = "{name}", '

    text = read("gpu_calls").replace("bf16[4,1024,6,64]", "bf16[4,1024,6,96]")
    forward, backward = (f'custom_call_target="{name}"' for name in CUDNN)
    text = text.replace(backward, named("mha_backward")).replace(forward, named("mha_forward"))
    assert hlo.dot_flops(text) == 2 * PAIRS * (2 * 96 + 7 * 96) + GEMM
    for other in ("mine", "mha_preprocess_backward"):
        changed = text.replace('name = "mha_forward"', f'name = "{other}"')
        assert hlo.dot_flops(changed) == 2 * PAIRS * 7 * 96 + GEMM


def test_bytes_of_an_array_follow_its_type():
    arrays = [("f32", (3, 5)), ("bf16", ()), ("pred", (7,)), ("s4", (3,))]
    assert [hlo.shape_bytes(array) for array in arrays] == [60, 2, 7, 2]


# --- collectives ---------------------------------------------------------------------------------

MESH = {"fsdp": 2, "pipeline": 2, "tensor": 2}


@pytest.mark.parametrize(
    "written, groups",
    [
        ("replica_groups={{0,1},{2,3}}, x=1", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,2},{2,0}}", [[0, 2], [2, 0]]),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups={}", []),
    ],
)
def test_groups_of_devices_are_read_however_they_are_written(written, groups):
    assert hlo.device_groups(written) == groups


def test_collectives_are_counted_by_kind_and_axes_with_the_bytes_of_a_device():
    everything = tuple(MESH)
    functions = {
        ("all-reduce", ("pipeline",), 1): lambda x: lax.psum(x, "pipeline"),
        ("all-gather", ("fsdp", "tensor"), 4): lambda x: lax.all_gather(
            x, ("fsdp", "tensor"), tiled=True
        ),
        ("reduce-scatter", ("tensor",), 1 / 2): lambda x: lax.psum_scatter(x, "tensor", tiled=True),
        ("all-to-all", everything, 1): lambda x: lax.all_to_all(x, everything, 0, 0, tiled=True),
        ("collective-permute", ("fsdp",), 1): lambda x: lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
    }

    def local(x, w):
        def step(x):
            for function in functions.values():
                x = x + function(jnp.tanh(x)).sum()
            return x @ w

        return repeat(step, x, 3)

    mesh, spec = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), everything), P(everything)
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=False)
    text, own = compiled(run, (64, 64), (64, 64)), 8 * 64 * 4
    assert hlo.dot_flops(text) == 3 * 2 * 8 * 64 * 64
    assert hlo.collectives(text, MESH) == {
        hlo.Collective(axes, kind, False): 3 * own * share for kind, axes, share in functions
    }


def test_fused_and_overlapped_collectives_of_a_tpu_are_recognized():
    """An all-reduce of which a rank keeps its slice is a reduce-scatter; a collective is overlapped
    if something is computed between its start and its end.
    """
    text = read("tpu_collectives")
    assert hlo.collectives(text, {"fsdp": 2}) == {
        hlo.Collective(("fsdp",), "reduce-scatter", False): 4 * 128 * 4,
        hlo.Collective(("fsdp",), "collective-permute", True): 8 * 128 * 4,
        hlo.Collective(("fsdp",), "all-gather", False): 16 * 128 * 4,
    }
    whole = text.replace("dynamic-slice(%flat, %i, %z), dynamic_slice_sizes={4,128}", "add(%i)")
    kept = hlo.Collective(("fsdp",), "all-reduce", False)
    assert hlo.collectives(whole, {"fsdp": 2})[kept] == 8 * 128 * 4


def test_transfers_between_slices_are_collectives_along_the_outermost_axis():
    [(found, size)] = hlo.collectives(read("tpu_slices"), {"replica": 2, "fsdp": 4}).items()
    assert found == (("replica",), "all-reduce", True)
    assert size == 4 * 2752 * 8
