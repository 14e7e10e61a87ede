"""Run every test on 8 CPU devices with strict types."""

import contextlib
import fcntl
import gc
import importlib.util
import os
import shutil
import subprocess
import warnings

from processes import FAST, ROOT, with_flags

# Devices that share two cores reach a collective late: long timeouts, so that a slow test passes.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_timeout_seconds=3600",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",  # run.sh says why
    "--xla_disable_hlo_passes=simplify-while-loops",
)

# Read once, when jax is imported, so set before that.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), XLA_FLAGS + FAST)
os.environ.setdefault("PJRT_NPROC", "32")  # as in run.sh
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax" / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

NEEDS = {
    "huggingface": ("torch", "transformers", "safetensors", "lm_eval"),
    "notebooks": ("nbclient", "ipykernel"),
    "ray": ("ray",),
}


@pytest.hookimpl(tryfirst=True)  # before fixtures, which import these packages
def pytest_runtest_setup(item):
    for mark, packages in NEEDS.items():
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing and item.get_closest_marker(mark):
            pytest.skip(
                f"{', '.join(missing)} not installed: see the mark {mark} in pyproject.toml"
            )


CACHE_ENABLED = jax.config.jax_enable_compilation_cache


@pytest.fixture(autouse=True)
def compilation_cache_stays_enabled():
    """Fail if a test, or the import of its file, disabled the cache: later tests would be slow."""
    yield
    assert jax.config.jax_enable_compilation_cache == CACHE_ENABLED


# --- a tiny run that several files of tests inspect (tiny_run.py) ---------------------------------


@contextlib.contextmanager
def shared(tmp_path_factory, name):
    """Yield a path that all processes of the tests share, to one of them at a time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / name


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Flags for shards of this project's own files."""
    from data import prepare

    with shared(tmp_path_factory, "data") as out:
        if not out.exists():
            source = ["--source", str(ROOT), "--glob", "*.py", "--val-share", "0.2"]
            prepare.main([*source, "--out", str(out)])
    return ["--data.train", str(out / "train"), "--data.val", str(out / "val")]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def whole(data, runs, tmp_path_factory):
    """The directory of a run of six steps that was never stopped; each process has a copy."""
    from tiny_run import start  # late: other files need not wait for main

    with shared(tmp_path_factory, "whole") as made:
        if not made.exists():
            shutil.copytree(start(data, runs, "whole"), made)
        return shutil.copytree(made, runs / "whole", dirs_exist_ok=True)


# --- an emulated bucket whose requests can fail (fake_bucket.py) ----------------------------------


@pytest.fixture(scope="session")
def bucket_server():
    """One for all tests: clients keep its address for as long as the process lives."""
    from fake_bucket import Server  # late: other files need not wait for the emulator

    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def abandoned_connections():
    """Close the connections that clients left, before tests of another file warn of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def bucket(bucket_server, abandoned_connections, monkeypatch):
    """A new, empty bucket for this process and its children."""
    for name, value in bucket_server.environment.items():
        monkeypatch.setenv(name, value)
    made = bucket_server.bucket()
    yield made
    made.clear_faults()
    bucket_server.remove_buckets()


# --- a small disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """(a folder with space for half of what is written, a function that makes it larger)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.strip()}")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=9m", folder], check=True)
    subprocess.run(["umount", folder], check=True)
