"""Kernels by themselves, and the names of jax that they need; attention by it is in
test_attention.py.

Letters: B sequences, T positions, N heads, A width of queries and keys, W of values.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import attention_kernels
from common import config_of, mesh_of
from conftest import ROOT

B, T, N, A, W = 4, 640, 4, 24, 16


CALLS = ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p", "MaskType")


@pytest.mark.parametrize(
    "name",
    [
        attention_kernels.CHECK,
        attention_kernels.BACKWARD,
        attention_kernels.TRITON_BACKWARD,
        *(f"{attention_kernels.CUDNN}.{name}" for name in CALLS),
    ],
)
def test_this_jax_has_what_is_used_of_it_though_it_is_private(name):
    assert attention_kernels.private(name) is not None


@pytest.mark.parametrize("name", ["jax._src.config._gone", "jax._src.gone.name"])
def test_a_private_name_that_a_jax_lacks_is_named_with_its_version(name):
    version = re.escape(jax.__version__)
    with pytest.raises(ValueError, match=rf"jax {version} has no {name}.*--model.attention xla"):
        attention_kernels.private(name)


def test_no_other_file_uses_what_is_private_in_jax():
    private = re.compile(r"\bjax\._[a-z]|(?<!checkpoint\.)\b_src\b")
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    used = {path.name for path in files if private.search(path.read_text())}
    assert used == {"attention_kernels.py", "test_attention_kernels.py"}


@pytest.mark.parametrize("name", ["plain", "forward", "backward"])
def test_products_are_as_precise_as_the_type_says_whatever_the_default(name):
    kernel = attention_kernels.splash_kernel(N, T)
    function = attention_kernels.untyped(getattr(kernel, name), interpret=False)

    def precisions(dtype, default):
        wide, narrow = (jnp.zeros((B, T, N, w), dtype) for w in (A, W))
        args = [wide, wide, narrow]
        if name == "backward":
            args = [narrow, *args, narrow, jnp.zeros((B, N, T))]
        with jax.default_matmul_precision(default):
            text = str(jax.make_jaxpr(function)(*args))
        return set(re.findall(r"Precision\.(\w+)", text))

    assert precisions(jnp.float32, "bfloat16") == {"HIGHEST"}
    assert "HIGHEST" not in precisions(jnp.bfloat16, "highest")


def test_a_kernel_whose_arguments_differ_along_different_axes_is_refused():
    q, k, v = (jnp.zeros((B, T, N, w)) for w in (A, A, W))
    kernel = attention_kernels.splash_kernel(N, T)

    def local(*args):
        return attention_kernels.foreign_p.bind(*args, function=kernel.plain)[0]

    run = jax.shard_map(
        local,
        mesh=mesh_of(config_of((2, 1, 1))),
        in_specs=(P(), P("fsdp"), P("fsdp")),
        out_specs=P(),
        check_vma=True,
    )
    with pytest.raises(AssertionError, match="differ along different axes"):
        jax.eval_shape(run, q[: B // 2], k, v)
