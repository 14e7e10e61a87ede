"""The program of the digests, compiled for TPUs by libtpu."""

from importlib import util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import array_digests


@pytest.mark.skipif(not util.find_spec("libtpu"), reason="libtpu compiles for TPUs")
def test_the_program_needs_no_copy_of_an_array_on_a_tpu(monkeypatch):
    """XLA fuses the hashes into the sums. Its CPU backend does not: it is for simulated devices."""
    monkeypatch.delenv("XLA_FLAGS")  # libtpu aborts on those that it does not know
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setenv(name, "1")
    devices = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), ("x", "y", "z"))
    kinds = [((16, 1024, 2048), P("x", None, "z"), t) for t in (jnp.float32, jnp.bfloat16)]
    kinds.append(((2, 2, 4, 1000, 512), P(None, "y", None, "x"), jnp.float32))
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec, dtype in kinds
    ]
    program = array_digests.jitted(NamedSharding(mesh, P()), (1, 1, 3)).lower(arrays).compile()
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes > 50e6
    assert memory.temp_size_in_bytes < 0.01 * memory.argument_size_in_bytes
