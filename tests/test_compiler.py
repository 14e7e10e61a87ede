import importlib.util

import pytest

import chips
from common import config_of
from planning import compiler, cost

V4 = chips.CHIPS["v4"]
LIBTPU = importlib.util.find_spec("libtpu") is not None


def test_a_step_is_compiled_for_pretended_devices_in_another_process(tmp_path):
    """Of more devices than this process has."""
    config = config_of((4, 2, 2), dense_layers=1, moe_layers=0, width=64, hidden=64)
    compiled, text = compiler.compile_step(config, None, "", tmp_path / "deep" / "step.hlo")
    assert (tmp_path / "deep" / "step.hlo").read_text() == text
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


def test_a_compiler_that_aborts_is_reported_and_takes_nothing_with_it(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "echo 'F0101 x.cc:1] Check failed: a == b'; kill -ABRT $$")
    with pytest.raises(
        ValueError,
        match=r"for cpu failed: the compiler stopped with SIGABRT: .*Check failed: a == b",
    ):
        compiler.compile_step(config_of(), None, "")


def test_a_compiler_that_is_killed_without_a_word_is_reported(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "kill -KILL $$")
    with pytest.raises(ValueError, match="stopped with SIGKILL"):
        compiler.compile_step(config_of(), None, "")


def test_an_error_of_the_compiler_is_its_last_line(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "echo one; echo 'RuntimeError: no'; exit 1")
    with pytest.raises(ValueError, match="compiling for cpu failed: RuntimeError: no"):
        compiler.compile_step(config_of(), None, "")


def test_a_config_that_the_child_refuses_is_refused_in_its_words():
    with pytest.raises(ValueError, match=r"failed: --model.heads 4 cannot be cut over"):
        compiler.compile_step(config_of((1, 1, 8)), None, "")


@pytest.mark.parametrize(
    "missing, command",
    [
        ({"libtpu"}, " -m pip install libtpu"),
        ({"libtpu", "pip"}, "uv pip install --python .* libtpu"),
    ],
)
def test_without_libtpu_the_way_to_get_it_is_said(monkeypatch, missing, command):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else object()
    )
    with pytest.raises(ValueError, match=f"{command}=={compiler.LIBTPU}"):
        compiler.compile_step(config_of(), V4, "2x2x1")
    compiler.check_compiler(None)


def test_a_gpu_program_is_not_compiled_without_the_gpu():
    with pytest.raises(ValueError, match=r"--chip h100: only TPU programs .* Use --chip v4"):
        compiler.compile_step(config_of(), chips.CHIPS["h100"], "")


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_topology_that_libtpu_refuses_is_refused_with_those_it_takes():
    with pytest.raises(ValueError, match=r"refuses the topology v4:3x3x3: .* 2x2x1, 2x2x2, 2x2x4"):
        compiler.compile_step(config_of((3, 3, 3)), V4, "3x3x3")


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_step_that_needs_more_memory_than_the_chip_has_is_refused_in_the_compilers_words():
    config = config_of(
        width=1024, vocabulary=50000, train={"sequences": 512, "sequence_length": 1024}
    )
    with pytest.raises(ValueError, match=r"RESOURCE_EXHAUSTED: .*exceeds available HBM"):
        compiler.compile_step(config, chips.CHIPS["v5e"], "1x1")


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_slice_of_another_size_than_the_mesh_is_refused():
    with pytest.raises(ValueError, match="is 2 devices, and there are 1"):
        compiler.compile_step(config_of((2, 1, 1)), V4, "1x1x1")


def test_the_child_asks_no_cloud_and_keeps_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    environment = compiler.child_environment()
    assert environment["XLA_FLAGS"] == "--xla_a=1"
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
