import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import hardware
from common import config_of
from conftest import XLA_FLAGS
from planning import compiler, targets

JAX = importlib.metadata.version("jax")


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (-6, "one\nF0101 x.cc:1] Check failed: a == b\nlast", "SIGABRT: .*Check failed: a == b"),
        (-9, "", "the process stopped with SIGKILL"),
        (1, "one\nRuntimeError: no\n", "^RuntimeError: no"),
        (1, "error: --model.x 1 is wrong.\nlast", "^--model.x 1 is wrong"),
        (3, "", "exit code 3"),
    ],
)
def test_an_error_of_the_compiler_is_reported_in_one_line(code, log, said):
    assert re.search(said, compiler.failure(code, log))


def test_a_chip_whose_compiler_is_not_here_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr(targets, "_has", lambda *_: False)
    unknown = r"describe this chip\. Use one of v4, .*h100, .*, or benchmark.py step"
    libtpu = f"uv pip install libtpu=={targets.LIBTPU}"
    for name, message in (("v4", libtpu), ("h100-pcie", unknown), ("v7x", unknown)):
        with pytest.raises(ValueError, match=message):
            compiler.compile_step(config_of(), hardware.CHIPS[name], "")


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({}, "jax-cuda12-plugin and jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, which"),
        ({"jax-cuda12-plugin": "0.1", "jax-cuda12-pjrt": JAX}, "jax-cuda12-plugin and nvidia-cud"),
    ],
)
def test_missing_gpu_packages_are_named_with_a_command(monkeypatch, installed, named):
    def distributions(name, path):
        assert path[0] == str(targets.GPU_FOLDER)
        return [SimpleNamespace(version=installed[name])] if name in installed else []

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    with pytest.raises(ValueError, match=named) as raised:
        compiler.compile_step(config_of(), hardware.CHIPS["h100"], "")
    packages = f"jax-cuda12-plugin=={JAX} jax-cuda12-pjrt=={JAX} nvidia-cuda-nvcc-cu12=="
    assert f"--target {targets.GPU_FOLDER} {packages}{targets.NVCC}" in str(raised.value)


def test_gpus_are_on_as_few_hosts_as_they_fill_and_described_with_their_figures():
    shapes = {1: "1x1x1", 6: "1x1x6", 8: "1x1x8", 12: "1x3x4", 16: "1x2x8"}
    assert {count: targets.gpu_topology(count) for count in shapes} == shapes
    kinds = ("a100", 64, 12), ("h100", 128, 18), ("h200", 128, 18), ("rtx4090", 128, 0)
    for name, units, links in kinds:
        chip, text = hardware.CHIPS[name], targets.described(hardware.CHIPS[name])
        assert f"device_memory_size: {chip.memory_bytes} " in text
        assert f"memory_bandwidth: {round(chip.memory_bandwidth)}\n" in text
        assert f"active_links: {links} " in text
        major, minor = re.search(r"major: (\d+) minor: (\d+) ", text).groups()
        assert f"{major}.{minor}" == chip.capability
        assert ("ACCELERATED" in text) == (major == "9")
        assert f"fpus_per_core: {units}\n" in text and text.count("{") == text.count("}")


def test_the_child_queries_no_cloud_and_keeps_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " ".join(["--xla_a=1", *XLA_FLAGS]))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_b=1")
    environment = compiler.child_environment(hardware.CHIPS["v4"], Path("texts"))
    assert environment["XLA_FLAGS"] == "--xla_a=1"
    assert environment["LIBTPU_INIT_ARGS"].startswith("--xla_b=1 --xla_jf_dump_to=texts ")
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
