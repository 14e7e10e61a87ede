from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from common import collective_bytes
from planning import hlo

PRODUCT = 2 * 8 * 16 * 16  # FLOPs of [8, 16] @ [16, 16]


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jnp.ones(shape) for shape in shapes)).compile().as_text()


def count(text, opcode=None):
    """Instructions in the text, each once."""
    computations = hlo.parse(text).computations.values()
    return sum(opcode in (None, i.opcode) for c in computations for i in c.values())


def repeat(function, x, times):
    return lax.scan(lambda x, _: (function(x), None), x, None, length=times)[0]


def test_one_product_counts_two_flops_per_multiplication():
    assert hlo.dot_flops(compiled(lambda x, w: x @ w, (8, 16), (16, 24))) == 2 * 8 * 16 * 24


def test_products_of_batches_and_over_two_dims_count_every_multiplication():
    text = compiled(lambda a, b: jnp.einsum("bijk,bjkl->bil", a, b), (3, 4, 5, 6), (3, 5, 6, 7))
    assert hlo.dot_flops(text) == 2 * 3 * 4 * 5 * 6 * 7


def test_a_product_of_bfloat16_counts_once():
    a = jnp.ones((512, 256), jnp.bfloat16)
    text = jax.jit(lambda a: jnp.tanh(a @ a.T)).lower(a).compile().as_text()
    assert hlo.dot_flops(text) == 2 * 512 * 512 * 256


def test_a_product_in_a_loop_counts_once_per_trip():
    text = compiled(lambda x, w: repeat(lambda x: jnp.tanh(x @ w), x, 7), (8, 16), (16, 16))
    assert hlo.dot_flops(text) == 7 * PRODUCT
    assert count(text, "while") == 1


def test_trip_counts_of_nested_loops_multiply():
    def nested(x, w):
        return repeat(lambda x: repeat(lambda x: jnp.tanh(x @ w), x, 5) @ w, x, 7)

    text = compiled(nested, (8, 16), (16, 16))
    assert hlo.dot_flops(text) == (7 * 5 + 7) * PRODUCT
    assert count(text, "while") == 2


def test_gradients_and_recomputation_count_as_executed():
    def loss(x, w):
        step = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))
        return repeat(step, x, 3).sum()

    forward = compiled(loss, (8, 16), (16, 16))
    both = compiled(jax.value_and_grad(loss, 1), (8, 16), (16, 16))
    assert hlo.dot_flops(forward) == 3 * 2 * PRODUCT
    assert hlo.dot_flops(both) == 3 * (2 + 2 + 4) * PRODUCT


def branching(x, w):
    def step(x, i):
        with jax.named_scope("sometimes"):
            return lax.cond(i < 2, lambda x: jnp.tanh(x @ w), lambda x: x, x), None

    return lax.scan(step, x, jnp.arange(6))[0]


def test_branches_count_by_the_share_that_the_caller_gives():
    text, names = compiled(branching, (8, 16), (16, 16)), []

    def share(op_name):
        names.append(op_name)
        return Fraction(4, 6), Fraction(2, 6)

    assert hlo.dot_flops(text, share) == 2 * PRODUCT
    assert all("sometimes" in name for name in names)


@pytest.mark.parametrize("share", [None, lambda op_name: None])
def test_branches_that_differ_are_refused_without_a_share(share):
    with pytest.raises(ValueError, match=r"sometimes.*it is unknown how often.*branch_share"):
        hlo.dot_flops(compiled(branching, (8, 16), (16, 16)), share)


def test_shares_for_another_number_of_branches_are_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        hlo.dot_flops(compiled(branching, (8, 16), (16, 16)), lambda op_name: (1, 1, 1))


def test_branches_that_cost_the_same_need_no_share():
    def same(x, w):
        return lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: jnp.sin(w @ x.T).T)

    assert hlo.dot_flops(compiled(same, (8, 16), (16, 16))) == PRODUCT


def test_a_loop_of_unknown_length_is_refused_if_it_multiplies_and_ignored_if_not():
    def until_small(step, x):
        return lax.while_loop(lambda x: x.sum() > 5.0, step, x)

    with pytest.raises(ValueError, match=r"no known trip count.*lax.scan"):
        hlo.dot_flops(compiled(lambda x: until_small(lambda x: x @ x, x), (16, 16)))
    text = compiled(lambda x: until_small(lambda x: x / 2, x @ x), (16, 16))
    assert hlo.dot_flops(text) == 2 * 16**3


def convolution(x, kernel, **settings):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, dimension_numbers=layout, **settings)


def test_a_convolution_counts_positions_that_meet_an_input():
    settings = {"window_strides": (2, 1), "padding": ((1, 1), (0, 2)), "rhs_dilation": (1, 2)}
    text = compiled(
        lambda x, k: convolution(x, k, feature_group_count=2, **settings),
        (3, 8, 9, 4),
        (3, 3, 2, 6),
    )
    # rows: 4 windows of 3 at -1, 1, 3, 5, the first of which begins in padding
    # columns: 7 windows of 0, 2, 4 on from 0, ..., 6, the last two of which end in padding
    assert hlo.dot_flops(text) == 2 * 3 * 2 * 6 * (4 * 3 - 1) * (7 * 3 - 2)


# A loop as the TPU compiler writes it, without a noted trip count, around a product of 8 pairs of
# matrices that is written as a convolution over the batch.
TPU = """HloModule step, is_scheduled=true

%fused (p.0: bf16[8,32,16], p.1: bf16[8,64,16]) -> bf16[8,32,64] {
  %p.0 = bf16[8,32,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[8,64,16]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %conv = bf16[8,32,64]{2,1,0:T(8,128)} convolution(%p.0, %p.1), \
window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf
}

%body (b: (s32[], bf16[8,32,16], bf16[8,64,16])) -> (s32[], bf16[8,32,16], bf16[8,64,16]) {
  %b = (s32[]{:T(128)}, bf16[8,32,16]{2,1,0:T(8,128)(2,1)}, /*index=2*/bf16[8,64,16]{2,1,0}) \
parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %x = bf16[8,32,16]{2,1,0:T(8,128)(2,1)} get-tuple-element(%b), index=1
  %y = bf16[8,64,16]{2,1,0} get-tuple-element(%b), index=2
  %xy = bf16[8,32,64]{2,1,0:T(8,128)} fusion(%x, %y), kind=kOutput, calls=%fused
  %start = (bf16[8,32,16]{2,1,0}, bf16[8,32,16]{2,1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %done = bf16[8,32,16]{2,1,0} collective-permute-done(%start)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], bf16[8,32,16]{2,1,0}, bf16[8,64,16]{2,1,0}) tuple(%next, %done, %y)
}

%less (a: s32[], l: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %l = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %l), direction=LT
}

%condition (c: (s32[], bf16[8,32,16], bf16[8,64,16])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[8,32,16]{2,1,0}, bf16[8,64,16]{2,1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%c), index=0
  %limit = s32[]{:T(128)} constant(9)
  ROOT %go = pred[]{:T(512)} fusion(%j, %limit), kind=kLoop, calls=%less
}

ENTRY %main (u: bf16[8,32,16], v: bf16[8,64,16]) -> bf16[8,32,16] {
  %u = bf16[8,32,16]{2,1,0} parameter(0)
  %v = bf16[8,64,16]{2,1,0} parameter(1)
  %first = s32[] constant(2)
  %first.copy = s32[] copy(%first)
  %state = (s32[], bf16[8,32,16]{2,1,0}, bf16[8,64,16]{2,1,0}) tuple(%first.copy, %u, %v)
  %loop = (s32[], bf16[8,32,16]{2,1,0}, bf16[8,64,16]{2,1,0}) while(%state), \
condition=%condition, body=%body
  %kernel = (f32[8]{0}, u8[4]{0}) custom-call(%u), custom_call_target="tpu_custom_call"
  ROOT %out = bf16[8,32,16]{2,1,0} get-tuple-element(%loop), index=1
}
"""


def test_text_without_trip_counts_takes_them_from_the_condition_and_the_first_count():
    assert hlo.dot_flops(TPU) == (9 - 2) * 2 * 8 * 32 * 64 * 16


def test_an_asynchronous_collective_counts_once():
    assert collective_bytes(TPU) == {"collective-permute": 7 * 8 * 32 * 16 * 2}


def test_foreign_functions_are_named_with_how_often_they_run():
    assert hlo.custom_calls(TPU) == {"tpu_custom_call": 1}
    assert hlo.custom_calls(compiled(lambda x, w: x @ w, (8, 16), (16, 16))) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("constant(9)", "parameter(1)"),
        ("get-tuple-element(%c), index=0", "parameter(1)"),
    ],
)
def test_a_condition_that_is_not_a_counter_below_a_constant_is_refused(old, new):
    with pytest.raises(ValueError, match=r"Loop loop .* no known trip count"):
        hlo.dot_flops(TPU.replace(old, new))


METADATA = """frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 512}"
}}, metadata={op_name="jit(step)/steady/while/body/SCOPE/attention/pallas_call" stack_frame_id=4}"""
SPLASH = """
ENTRY %main (q: bf16[4,6,1024,192]) -> bf16[4,6,1024,64] {
  %m = s8[1,2,2]{2,1,0} parameter(0)
  %q = bf16[4,6,1024,192]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %v = bf16[4,6,1024,64]{3,2,1,0:T(8,128)(2,1)} parameter(2)
  %l = f32[4,6,1,1024]{3,2,1,0:T(1,128)} parameter(3)
  %p = s32[1024,128]{1,0} parameter(4)
  %splash_mha_fwd_residuals.15 = (f32[4,512,128]{2,1,0}, bf16[4,6,1024,64]{3,2,1,0}) \
custom-call(%m, %m, %q, %q, %v, /*index=5*/%p), custom_call_target="tpu_custom_call", FORWARD
  %splash_mha_dkv_segmented_no_residuals.2 = (bf16[4,6,1024,192]{3,2,1,0}, \
bf16[4,6,1024,64]{3,2,1,0}) custom-call(%m, %m, %q, %q, %v, /*index=5*/%l, %v, %l, %p), \
custom_call_target="tpu_custom_call", BACKWARD
  %splash_mha_dq_no_residuals.4 = (f32[4,512,192]{2,1,0}, bf16[4,6,1024,192]{3,2,1,0}) \
custom-call(%m, %m, %q, %q, %v, /*index=5*/%l, %v, %l, %p), \
custom_call_target="tpu_custom_call", BACKWARD
  ROOT %out = bf16[4,6,1024,64]{3,2,1,0} get-tuple-element(%splash_mha_fwd_residuals.15), index=1
}
"""
for word, scope in (("FORWARD", "jvp()"), ("BACKWARD", "transpose(jvp())")):
    SPLASH = SPLASH.replace(word, METADATA.replace("SCOPE", scope))


def test_kernels_of_splash_count_by_the_blocks_that_they_compute():
    pairs = 4 * 6 * 3 * 512 * 512  # of 2 x 2 blocks those not above the diagonal
    forward, dkv, dq = 192 + 64, 2 * 192 + 2 * 64, 2 * 192 + 64
    assert hlo.dot_flops(SPLASH) == 2 * pairs * (forward + dkv + dq)
    assert hlo.custom_calls(SPLASH) == {}
    one = SPLASH.replace("[4,6,", "[6,").replace("{3,2,1,0", "{2,1,0")  # sequence
    assert hlo.dot_flops(one) == hlo.dot_flops(SPLASH) / 4
    oblong = SPLASH.replace("s8[1,2,2]", "s8[1,2,4]")
    with pytest.raises(ValueError, match="are not square: 2 by 4"):
        hlo.dot_flops(oblong)


CUDNN = """ENTRY %main (q: bf16[4,1024,6,96], v: bf16[4,1024,6,64]) -> bf16[4,1024,6,64] {
  %q = bf16[4,1024,6,96]{3,2,1,0} parameter(0)
  %v = bf16[4,1024,6,64]{3,2,1,0} parameter(1)
  %f = (bf16[4,6,1024,64]{3,1,2,0}, f32[4,6,1024]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %v), \
custom_call_target="__cudnn$fmhaSoftmax"
  %l = f32[4,6,1024]{2,1,0} get-tuple-element(%f), index=1
  %b = (bf16[4,6,1024,96]{3,1,2,0}, bf16[4,6,1024,96]{3,1,2,0}, bf16[4,6,1024,64]{3,1,2,0}, \
u8[0]{0}) custom-call(%q, %q, %v, %l, %v, /*index=5*/%v), \
custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %out = bf16[4,6,1024,64]{3,2,1,0} get-tuple-element(%b), index=2
}
"""


def test_kernels_of_cudnn_count_by_tiles_of_128():
    pairs = 4 * 6 * 36 * 128 * 128  # of 8 x 8 tiles those not above the diagonal
    assert hlo.dot_flops(CUDNN) == 2 * pairs * ((96 + 64) + (3 * 96 + 2 * 64))
    assert hlo.custom_calls(CUDNN) == {}


def test_kernels_of_triton_count_as_those_of_cudnn_by_what_each_multiplies():
    def named(name):
        call = 'custom_call_target="__gpu$xla.gpu.triton"'
        return f'{call}, backend_config={{ir = "mha{{", name = "{name}", '

    text = CUDNN.replace("bf16[4,1024,6,64]", "bf16[4,1024,6,96]")
    forward, backward = (f'custom_call_target="{name}"' for name in hlo.CUDNN)
    text = text.replace(backward, named("mha_backward")).replace(forward, named("mha_forward"))
    pairs = 4 * 6 * 36 * 128 * 128
    assert hlo.dot_flops(text) == 2 * pairs * (2 * 96 + 7 * 96)
    assert hlo.custom_calls(text) == {}
    other = text.replace('name = "mha_forward"', 'name = "mine"')
    assert hlo.custom_calls(other) == {"__gpu$xla.gpu.triton": 1}
    assert hlo.dot_flops(other) == 2 * pairs * 7 * 96
    before = text.replace('name = "mha_forward"', 'name = "mha_preprocess_backward"')
    assert hlo.dot_flops(before) == hlo.dot_flops(other) and hlo.custom_calls(before) == {}


IN_MEMORY = """
%add_one (a: f32[4,100], b: s32[]) -> f32[4,100] {
  %a = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,100]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,100}
  %more = f32[1,100]{1,0} add(%row, %row)
  ROOT %out = f32[4,100]{1,0} dynamic-update-slice(%a, %more, %i, %i)
}

%whole (c: f32[4,100], d: f32[4,100]) -> f32[4,100] {
  %c = f32[4,100]{1,0} parameter(0)
  %d = f32[4,100]{1,0} parameter(1)
  ROOT %sum = f32[4,100]{1,0} add(%c, %d)
}

%put (e: f32[4,100], k: s32[2,1], u: f32[2,100]) -> f32[4,100] {
  %e = f32[4,100]{1,0} parameter(0)
  %k = s32[2,1]{1,0} parameter(1)
  %u = f32[2,100]{1,0} parameter(2)
  ROOT %at = f32[4,100]{1,0} scatter(%e, %k, %u), update_window_dims={1}
}

%body (s: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %s = (s32[], f32[4,100]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = f32[4,100]{1,0} get-tuple-element(%s), index=1
  %f = f32[4,100]{1,0} fusion(%x, %n), kind=kLoop, calls=%add_one, \
metadata={op_name="jit(step)/steady/mlp/add"}
  ROOT %t = (s32[], f32[4,100]{1,0}) tuple(%n, %f)
}

%check (s: (s32[], f32[4,100])) -> pred[] {
  %s = (s32[], f32[4,100]{1,0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (x: f32[4,100], u: f32[2,100]) -> f32[4,100] {
  %x = f32[4,100]{1,0} parameter(0)
  %u = f32[2,100]{1,0} parameter(1)
  %k = s32[2,1]{1,0} constant({ {0}, {1} })
  %z = s32[] constant(0)
  %t = (s32[], f32[4,100]{1,0}) tuple(%z, %x)
  %w = (s32[], f32[4,100]{1,0}) while(%t), condition=%check, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[4,100]{1,0} get-tuple-element(%w), index=1
  %sum = f32[4,100]{1,0} fusion(%x, %y), kind=kLoop, calls=%whole, \
metadata={op_name="jit(step)/optimizer/add"}
  %put.1 = f32[4,100]{1,0} fusion(%sum, %k, %u), kind=kInput, calls=%put, \
metadata={op_name="jit(step)/embedding/add"}
  %start = (f32[4,100]{1,0}, f32[8,100]{1,0}) all-gather-start(%put.1)
  %done = f32[8,100]{1,0} all-gather-done(%start), metadata={op_name="jit(step)/gather/all"}
  ROOT %copy = f32[8,100]{0,1} copy(%done)
}
"""


def test_memory_traffic_counts_slices_and_updates_by_their_own_size():
    row, four, eight = 400, 1600, 3200
    kernels = {
        "add_one": 3 * (row + 4 + row),  # read, the index, written: the rest stays in its place
        "whole": 3 * four,
        "put": 2 * (row + 4 + row),  # rows and their numbers read, rows written
        "all-gather": four + eight,
        "copy": 2 * eight,
    }
    assert hlo.memory_bytes(IN_MEMORY) == sum(kernels.values())


def test_a_kernel_is_in_its_scopes_though_its_attributes_take_three_lines():
    scopes = hlo.scopes(SPLASH)
    assert scopes["splash_mha_fwd_residuals.15"] == "steady/attention"
    assert scopes["splash_mha_dq_no_residuals.4"] == "steady/attention"
    found = hlo.parse(SPLASH).computations["main"]["splash_mha_dkv_segmented_no_residuals.2"]
    assert "transpose(jvp())/attention/" in found.op_name


def test_a_call_of_cublas_counts_as_a_product():
    text = """ENTRY %main (a: f32[8,16], b: f32[16,24]) -> f32[8,24] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,24]{1,0} parameter(1)
  %g = (f32[8,24]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{\
"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %c = f32[8,24]{1,0} get-tuple-element(%g), index=0
}
"""
    assert hlo.dot_flops(text) == 2 * 8 * 16 * 24
    assert hlo.custom_calls(text) == {}


def test_text_that_is_not_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.dot_flops("stablehlo.module")


@pytest.fixture(scope="module")
def sharded():
    """A loop of every collective that the model uses, on 2 x 4 devices."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("fsdp", "tensor"))

    def step(x, w):
        x = lax.all_gather(x, "tensor", axis=0, tiled=True) @ w
        x = lax.psum_scatter(x, "tensor", scatter_dimension=0, tiled=True)
        return lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])

    def run(x, w):
        x = repeat(lambda x: step(x, w), x, 5)
        moved = lax.all_to_all(x, "tensor", split_axis=1, concat_axis=0, tiled=True)
        return moved, lax.psum(x.T @ x, ("fsdp", "tensor"))

    cut = P(("fsdp", "tensor"))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(cut, P()), out_specs=(cut, P()))
    return compiled(mapped, (64, 16), (16, 16))


def test_products_inside_shard_map_count_as_one_device_executes_them(sharded):
    assert hlo.dot_flops(sharded) == 5 * 2 * 32 * 16 * 16 + 2 * 16 * 8 * 16


def test_collectives_count_the_bytes_of_their_results_on_one_device(sharded):
    assert collective_bytes(sharded) == {
        "all-gather": 5 * 32 * 16 * 4,
        "reduce-scatter": 5 * 8 * 16 * 4,
        "collective-permute": 5 * 8 * 16 * 4,
        "all-to-all": 8 * 16 * 4,
        "all-reduce": 16 * 16 * 4,
    }


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(("f32", (3, 5)), 60), (("bf16", ()), 2), (("pred", (7,)), 7), (("s4", (3,)), 2)],
)
def test_bytes_of_an_array_follow_its_type(shape, expected):
    assert hlo.shape_bytes(shape) == expected


def test_instructions_are_counted_once_whatever_the_trips():
    counts = [
        count(compiled(lambda x, w, n=n: repeat(lambda x: x @ w, x, n), (8, 16), (16, 16)))
        for n in (3, 30)
    ]
    assert counts[0] == counts[1] > 5
    assert count(TPU) == 28


def test_an_instruction_is_named_by_the_scopes_it_was_written_in():
    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    def run(x, w):
        with jax.named_scope("steady"):
            return jax.lax.scan(layer, x, w)[0]

    text = jax.jit(run).lower(jnp.ones((4, 4)), jnp.ones((3, 4, 4))).compile().as_text()
    assert "steady/mlp" in hlo.scopes(text).values()


# --- which ranks meet ----------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    "axes", [("fsdp",), ("pipeline",), ("tensor",), ("fsdp", "tensor"), tuple(MESH)], ids=str
)
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_collectives_are_counted_by_their_axes(kind, axes):
    here = Mesh(np.array(jax.devices()[:8]).reshape(tuple(MESH.values())), tuple(MESH))
    ranks = 2 ** len(axes)
    functions = {
        "all-reduce": lambda x: lax.psum(x, axes),
        "all-gather": lambda x: lax.all_gather(x, axes, tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axes, tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
    }
    local = 8 * 64 * 4
    result = {"all-gather": local * ranks, "reduce-scatter": local // ranks}.get(kind, local)

    def loop(x):
        return repeat(lambda x: x + functions[kind](x).sum(), x, 3)

    spec = P(tuple(MESH))
    run = jax.shard_map(loop, mesh=here, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(run).lower(jnp.ones((64, 64))).compile().as_text()
    found = hlo.collectives(text, MESH)
    assert found == {hlo.Collective(axes, kind, False, False): 3 * result}
    assert collective_bytes(text) == {kind: 3 * result}


FUSED = """
HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter (p: f32[8,128], i: s32[]) -> f32[4,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %whole = f32[8,128]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  %flat = f32[8,128]{1,0} bitcast(%whole)
  ROOT %own = f32[4,128]{1,0} dynamic-slice(%flat, %i, %z), dynamic_slice_sizes={4,128}
}

%double (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  ROOT %twice = f32[8,128]{1,0} add(%x, %x)
}

ENTRY %main (p0: f32[8,128], p1: s32[]) -> (f32[4,128], f32[8,128], f32[16,128]) {
  %p0 = f32[8,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %cut = f32[4,128]{1,0} fusion(%p0, %p1), kind=kCustom, calls=%all-reduce-scatter
  %permute = (f32[8,128]{1,0}, f32[8,128]{1,0}) collective-permute-start(%p0), PAIRS
  %more = f32[8,128]{1,0} fusion(%p0), kind=kLoop, calls=%double
  %moved = f32[8,128]{1,0} collective-permute-done(%permute)
  %start = (f32[8,128]{1,0}, f32[16,128]{1,0}) all-gather-start(%p0), dimensions={0}, GROUPS
  %all = f32[16,128]{1,0} all-gather-done(%start)
  ROOT %result = (f32[4,128]{1,0}, f32[8,128]{1,0}, f32[16,128]{1,0}) tuple(%cut, %more, %all)
}
""".replace("PAIRS", "source_target_pairs={{0,1},{1,0}}").replace(
    "GROUPS", "replica_groups={{0,1}}"
)


def test_fused_and_overlapped_collectives_of_a_tpu_are_recognized():
    """An all-reduce of which a rank keeps its slice is a reduce-scatter; a collective is overlapped
    if something is computed between its start and its end.
    """
    found = hlo.collectives(FUSED, {"fsdp": 2})
    assert found == {
        hlo.Collective(("fsdp",), "reduce-scatter", False, False): 4 * 128 * 4,
        hlo.Collective(("fsdp",), "collective-permute", True, True): 8 * 128 * 4,
        hlo.Collective(("fsdp",), "all-gather", True, False): 16 * 128 * 4,
    }
    whole = FUSED.replace("dynamic-slice(%flat, %i, %z), dynamic_slice_sizes={4,128}", "add(%i)")
    kept = hlo.Collective(("fsdp",), "all-reduce", False, False)
    assert hlo.collectives(whole, {"fsdp": 2})[kept] == 8 * 128 * 4


def test_transfers_between_slices_are_collectives_along_the_outermost_axis():
    how = 'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = f"""
ENTRY %main (p: f32[2752,8]) -> f32[2752,8] {{
  %p = f32[2752,8]{{1,0}} parameter(0)
  %token = token[] after-all()
  %send = (f32[2752,8]{{1,0}}, u32[], token[]) send(%p, %token), channel_id=2, {how}
  %recv = (f32[2752,8]{{1,0}}, u32[], token[]) recv(%token), channel_id=3, {how}
  %product = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  %send-done = token[] send-done(%send), channel_id=2
  %recv-done = (f32[2752,8]{{1,0}}, token[]) recv-done(%recv), channel_id=3
  ROOT %sum = f32[2752,8]{{1,0}} get-tuple-element(%recv-done), index=0
}}
"""
    [(found, size)] = hlo.collectives(text, {"replica": 2, "fsdp": 4}).items()
    assert found == (("replica",), "all-reduce", True, True)
    assert size == 4 * 2752 * 8
