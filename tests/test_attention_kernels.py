"""Kernels alone, and the private names of JAX that they need.

Attention with them is in test_attention.py.

Letters: B sequences, T positions, N heads, A width of queries and keys, W of values.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from attention_kernels import adapter
from attention_kernels.splash import splash_kernel
from common import config_of, mesh_of
from conftest import ROOT

B, T, N, A, W = 4, 640, 4, 24, 16


CALLS = ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p", "MaskType")


@pytest.mark.parametrize(
    "name",
    [
        adapter.CHECK,
        adapter.SPLASH_BACKWARD,
        adapter.TRITON_BACKWARD,
        *(f"{adapter.CUDNN}.{name}" for name in CALLS),
    ],
)
def test_this_jax_has_the_private_names_in_use(name):
    assert adapter.private(name) is not None


@pytest.mark.parametrize("name", ["jax._src.config._gone", "jax._src.gone.name"])
def test_the_error_for_a_missing_private_name_has_the_version_of_jax(name):
    version = re.escape(jax.__version__)
    with pytest.raises(
        ImportError, match=rf"jax {version} has no {name}.*--model.attention_kernel xla"
    ):
        adapter.private(name)


def test_no_other_file_uses_private_names_of_jax():
    private = re.compile(r"\bjax\._[a-z]|(?<!checkpoint\.)\b_src\b")
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    used = {path.name for path in files if private.search(path.read_text())}
    tests = {"test_attention_kernels.py", "test_checkpoint.py"}  # of such checks
    assert used == {"adapter.py"} | tests


@pytest.mark.parametrize("name", ["plain", "forward", "backward"])
def test_the_precision_of_products_follows_the_dtype_and_not_the_default(name):
    kernel = splash_kernel(N, T, window=0)
    function = adapter.untyped(getattr(kernel, name), interpret=False)

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


def test_a_kernel_whose_arguments_vary_along_different_axes_is_an_error():
    q, k, v = (jnp.zeros((B, T, N, w)) for w in (A, A, W))
    kernel = splash_kernel(N, T, window=0)

    def local(*args):
        return adapter.foreign_p.bind(*args, function=kernel.plain)[0]

    run = jax.shard_map(
        local,
        mesh=mesh_of(config_of((2, 1, 1))),
        in_specs=(P(), P("fsdp"), P("fsdp")),
        out_specs=P(),
        check_vma=True,
    )
    with pytest.raises(AssertionError, match="vary along different axes"):
        jax.eval_shape(run, q[: B // 2], k, v)
