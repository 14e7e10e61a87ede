import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest

import hardware
from common import config_of
from conftest import XLA_FLAGS
from planning import compiler, cost, targets

V4 = hardware.CHIPS["v4"]
JAX = importlib.metadata.version("jax")
LIBTPU = importlib.util.find_spec("libtpu") is not None


def test_a_step_is_compiled_for_simulated_devices_in_another_process():
    """Of more devices than this process has."""
    config = config_of(
        (4, 2, 2), dense_layers=1, moe_layers=0, hidden_size=64, intermediate_size=64
    )
    compiled, text = compiler.compile_step(config, None, "")
    assert text.startswith("HloModule")
    predicted = cost.predict(config, None)
    assert compiled.flops_per_chip == pytest.approx(predicted.flops_per_chip, rel=0.01)
    assert compiled.model_flops_per_chip == predicted.model_flops_per_chip
    assert compiled.collective_bytes_per_chip.keys() == predicted.collective_bytes_per_chip.keys()
    parts = compiled.argument_bytes + compiled.temporary_bytes
    assert parts <= compiled.memory_bytes_per_chip < 1.1 * parts
    assert compiled.compile_s > 0.1
    by_axes = dict.fromkeys(compiled.collective_bytes_per_chip, 0.0)
    for row in compiled.collectives:
        by_axes[row["axes"]] += row["bytes"]
    assert by_axes == compiled.collective_bytes_per_chip


def python_that(tmp_path, monkeypatch, script):
    """A stand-in for the child's interpreter."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(compiler.sys, "executable", str(file))


def test_a_compiler_that_aborts_is_reported(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "echo 'F0101 x.cc:1] Check failed: a == b'; kill -ABRT $$")
    with pytest.raises(
        ValueError,
        match=r"for cpu failed: the compiler stopped with SIGABRT: .*Check failed: a == b",
    ):
        compiler.compile_step(config_of(), None, "")


def test_a_compiler_that_is_killed_is_reported(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "kill -KILL $$")
    with pytest.raises(ValueError, match="stopped with SIGKILL"):
        compiler.compile_step(config_of(), None, "")


def test_an_error_of_the_compiler_is_its_last_line(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "echo one; echo 'RuntimeError: no'; exit 1")
    with pytest.raises(ValueError, match="compiling for cpu failed: RuntimeError: no"):
        compiler.compile_step(config_of(), None, "")


def test_a_config_that_the_child_refuses_is_refused_with_its_message():
    with pytest.raises(
        ValueError, match=r"failed: --model.num_attention_heads 4 is not divisible by"
    ):
        compiler.compile_step(config_of((1, 1, 8)), None, "")


def test_a_missing_libtpu_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(targets, "_has", lambda *_: False)
    with pytest.raises(ValueError, match=f"uv pip install libtpu=={targets.LIBTPU}"):
        compiler.compile_step(config_of(), V4, "2x2x1")
    targets.check(None)


def test_a_gpu_that_is_not_described_is_refused_with_those_that_are():
    known = r"Use one of a100, a100-40gb, h100, h200, or benchmark.py step"
    with pytest.raises(
        ValueError,
        match=rf"--chip h100-pcie: planning/targets.py does not describe this GPU\. {known}",
    ):
        compiler.compile_step(config_of(), hardware.CHIPS["h100-pcie"], "")


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({}, "jax-cuda12-plugin and jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, which"),
        (
            {"jax-cuda12-plugin": "0.1", "jax-cuda12-pjrt": JAX},
            "jax-cuda12-plugin and nvidia-cuda-n",
        ),
        ({"jax-cuda12-plugin": JAX, "jax-cuda12-pjrt": JAX}, "needs nvidia-cuda-nvcc-cu12, which"),
    ],
)
def test_missing_gpu_packages_are_reported_with_the_command_that_installs_them(
    monkeypatch, installed, named
):
    def distributions(name, path):
        assert path[0] == str(targets.GPU_FOLDER)
        return [SimpleNamespace(version=installed[name])] if name in installed else []

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    with pytest.raises(ValueError, match=named) as raised:
        compiler.compile_step(config_of(), hardware.CHIPS["h100"], "")
    where = f"--target {targets.GPU_FOLDER} "
    packages = f"jax-cuda12-plugin=={JAX} jax-cuda12-pjrt=={JAX} nvidia-cuda-nvcc-cu12=="
    assert f"{where}{packages}{targets.NVCC}" in str(raised.value)


def test_gpus_are_on_as_few_hosts_as_they_fill():
    assert [targets.gpu_topology(n) for n in (1, 6, 8, 12, 16)] == [
        *("1x1x1", "1x1x6", "1x1x8"),
        *("1x3x4", "1x2x8"),
    ]


@pytest.mark.parametrize("name", targets.GPUS)
def test_a_gpu_is_described_with_its_own_figures(name):
    chip, text = hardware.CHIPS[name], targets.described(hardware.CHIPS[name])
    assert text.count("{") == text.count("}")
    assert f"device_memory_size: {chip.memory_bytes} " in text
    assert f"memory_bandwidth: {round(chip.memory_bandwidth)}\n" in text
    assert f"major: {chip.generation}" in text
    assert f"fpus_per_core: {64 if chip.generation == 8 else 128}\n" in text
    assert f"active_links: {12 if chip.generation == 8 else 18} " in text


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_topology_that_libtpu_refuses_is_refused_with_valid_ones():
    with pytest.raises(ValueError, match=r"refuses the topology v4:3x3x3: .* 2x2x1, 2x2x2, 2x2x4"):
        compiler.compile_step(config_of((3, 3, 3)), V4, "3x3x3")


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_step_that_exceeds_the_chips_memory_is_refused_with_the_compilers_message():
    config = config_of(
        hidden_size=1024, vocab_size=50000, train={"global_batch_size": 512, "seq_len": 1024}
    )
    with pytest.raises(ValueError, match=r"RESOURCE_EXHAUSTED: .*exceeds available HBM"):
        compiler.compile_step(config, hardware.CHIPS["v5e"], "1x1")


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_slice_of_another_size_than_the_mesh_is_refused():
    with pytest.raises(ValueError, match="is 2 devices, and there are 1"):
        compiler.compile_step(config_of((2, 1, 1)), V4, "1x1x1")


def test_the_child_queries_no_cloud_and_keeps_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " ".join(["--xla_a=1", *XLA_FLAGS]))
    environment = compiler.child_environment()
    assert environment["XLA_FLAGS"] == "--xla_a=1"
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
