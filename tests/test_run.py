import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import conftest

TOOLS = "bash cat cp dirname echo env flock grep mkdir rm sed sh tail touch true cksum tr"
DRIVER = {"cpu": "470.82.01", "cuda12": "550.54.14", "cuda13": "580.65.06"}

# Stand-ins, so that nothing is installed and no device is looked for.
UV = """#!/bin/sh
echo "uv $*" >>calls
if [ "$1" = venv ]; then mkdir -p .venv/bin && cp "$STUBS/in-venv" .venv/bin/python; fi
if [ -e "killed-in-$1" ]; then kill -9 $PPID; fi
if [ -e "fails-in-$1" ]; then echo "no route to host"; exit 1; fi
"""
IN_VENV = """#!/bin/sh
echo "python $*" >>calls
if [ "$1" = data/prepare.py ]; then
  mkdir -p data/sample/train data/sample/val
  touch data/sample/train/index.json data/sample/val/index.json
fi
exit "${EXIT_CODE:-0}"
"""
NVIDIA_SMI = """#!/bin/sh
echo "$DRIVER"
"""
OLD_PYTHON = """#!/bin/sh
exit 1
"""


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Checkout:
    """A folder with run.sh, and a PATH with stand-ins and a few system tools alone."""

    def __init__(self, folder: Path):
        self.folder, self.stubs = folder, folder / "stubs"
        self.stubs.mkdir()
        for name in ("run.sh", "requirements.txt"):
            shutil.copy(conftest.ROOT / name, folder)
        for name in filter(shutil.which, TOOLS.split()):
            (self.stubs / name).symlink_to(shutil.which(name))
        for name, text in [("uv", UV), ("in-venv", IN_VENV), ("nvidia-smi", NVIDIA_SMI)]:
            script(self.stubs / name, text)

    def run(self, *arguments, **environment):
        environment = {"DRIVER": DRIVER["cpu"], **environment}
        environment |= {"PATH": str(self.stubs), "STUBS": str(self.stubs)}
        command = [str(self.folder / "run.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")

    @property
    def calls(self):
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    assert checkout.run("true").returncode == 0
    assert len(checkout.calls) == 2
    return checkout


def environment_of(done):
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_help_prints_the_usage_and_sets_nothing_up(checkout):
    done = checkout.run("--help")
    assert done.returncode == 0
    assert "./run.sh COMMAND [ARGUMENT..]" in done.stdout
    assert "set -euo" not in done.stdout
    assert checkout.calls == []


def test_the_environment_is_set_up_once(checkout):
    first = checkout.run("true")
    assert "setting up .venv" in first.stderr
    assert checkout.calls == [
        "uv venv --clear --python >=3.11 .venv",
        "uv pip install --quiet --python .venv/bin/python -r requirements.txt",
    ]
    second = checkout.run("true")
    assert checkout.calls == []
    assert "setting up" not in second.stderr


def test_two_that_start_at_once_set_up_one_environment(checkout):
    script(checkout.stubs / "uv", UV.replace("#!/bin/sh", "#!/bin/sh\nsleep 0.5"))
    (checkout.stubs / "sleep").symlink_to(shutil.which("sleep"))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: checkout.run("true"), range(2)))
    assert [done.returncode for done in both] == [0, 0]
    assert [call.split()[1] for call in checkout.calls] == ["venv", "pip"]


def test_changed_requirements_are_installed_into_the_same_environment(ready):
    with (ready.folder / "requirements.txt").open("a") as file:
        file.write("another-package\n")
    ready.run("true")
    assert [call.split()[1] for call in ready.calls] == ["pip"]


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_driver_decides_which_cuda_is_installed(checkout, extra):
    checkout.run("true", DRIVER=DRIVER[extra])
    assert checkout.calls[-1].endswith(f"-r requirements.txt jax[{extra}]")


def test_jax_looks_for_no_tpu_on_a_cpu_and_takes_most_of_a_gpu(checkout):
    cpu = environment_of(checkout.run("env"))
    assert cpu["JAX_PLATFORMS"] == "cpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in cpu
    assert environment_of(checkout.run("env", JAX_PLATFORMS="tpu"))["JAX_PLATFORMS"] == "tpu"
    gpu = environment_of(checkout.run("env", DRIVER=DRIVER["cuda13"]))
    assert gpu["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92" and "JAX_PLATFORMS" not in gpu


FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def once(size=1 << 28):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_freed_is_used_again_on_a_cpu(checkout):
    def faults(tunables):
        command, environment = [sys.executable, "-c", FAULTS], {"GLIBC_TUNABLES": tunables}
        return int(subprocess.run(command, env=environment, capture_output=True, text=True).stdout)

    tunables = environment_of(checkout.run("env"))["GLIBC_TUNABLES"]
    assert faults(tunables) < 100 < faults("")
    assert environment_of(checkout.run("env", GLIBC_TUNABLES=""))["GLIBC_TUNABLES"] == ""
    assert "GLIBC_TUNABLES" not in environment_of(checkout.run("env", DRIVER=DRIVER["cuda13"]))


def test_a_driver_that_is_too_old_for_jax_is_said_and_the_cpu_used(checkout):
    done = checkout.run("true")
    assert "NVIDIA driver (470) is older than 525" in done.stderr
    assert checkout.calls[-1].endswith("-r requirements.txt")


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_an_interrupted_set_up_is_started_anew(checkout, step):
    (checkout.folder / f"killed-in-{step}").touch()
    assert checkout.run("true").returncode != 0
    (checkout.folder / f"killed-in-{step}").unlink()
    assert checkout.calls[-1].startswith(f"uv {step}")
    assert checkout.run("true").returncode == 0
    assert [call.split()[1] for call in checkout.calls] == ["venv", "pip"]


def test_an_environment_whose_update_was_interrupted_is_made_anew(ready):
    (ready.folder / "requirements.txt").write_text("another-package\n")
    (ready.folder / "killed-in-pip").touch()
    assert ready.run("true").returncode != 0
    (ready.folder / "killed-in-pip").unlink()
    assert [call.split()[1] for call in ready.calls] == ["pip"]
    ready.run("true")
    assert [call.split()[1] for call in ready.calls] == ["venv", "pip"]


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_a_failed_set_up_shows_why_and_exits_2_before_the_command(checkout, step):
    (checkout.folder / f"fails-in-{step}").touch()
    done = checkout.run("echo", "hello")
    assert done.returncode == 2
    assert "no route to host" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("run.sh: could not")
    assert "hello" not in done.stdout


def test_a_python_that_is_too_old_is_refused_with_the_mend(checkout):
    (checkout.stubs / "uv").unlink()
    script(checkout.stubs / "python3", OLD_PYTHON)
    done = checkout.run("true")
    assert done.returncode == 2
    assert "python3 is not Python 3.11 or newer" in done.stderr
    assert "PYTHON=python3.12 ./run.sh" in done.stderr


def test_without_uv_the_environment_is_made_by_the_python_that_is_named(checkout):
    (checkout.stubs / "uv").unlink()
    (checkout.folder / "requirements.txt").write_text("# nothing\n")
    done = checkout.run("python", "-c", "import sys; print(sys.prefix)", PYTHON=sys.executable)
    assert done.stdout.strip() == str(checkout.folder / ".venv")
    assert done.returncode == 0


def test_a_cpu_machine_gets_the_devices_and_timeouts_that_the_tests_use(ready):
    flags = environment_of(ready.run("env"))["XLA_FLAGS"]
    assert sorted(flags.split()) == sorted(conftest.XLA_FLAGS)


def test_flags_that_are_given_are_kept(ready):
    given = "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false"
    flags = environment_of(ready.run("env", XLA_FLAGS=given))["XLA_FLAGS"]
    assert flags.startswith(given)
    assert flags.count("device_count") == 1
    assert sorted(flags.split()[2:]) == sorted(conftest.XLA_FLAGS[1:])
    assert conftest.with_flags(given, conftest.XLA_FLAGS) == flags


def test_a_gpu_machine_gets_no_pretend_devices_unless_jax_is_told_to_use_the_cpu(checkout):
    gpu = {"DRIVER": DRIVER["cuda13"]}
    assert "XLA_FLAGS" not in environment_of(checkout.run("env", **gpu))
    assert "XLA_FLAGS" in environment_of(checkout.run("env", JAX_PLATFORMS="cpu", **gpu))


def test_commands_run_in_the_repository_with_the_environment_first_on_the_path(ready):
    found = environment_of(ready.run("env"))
    venv = ready.folder / ".venv"
    assert found["PATH"].split(os.pathsep)[0] == str(venv / "bin")
    assert found["VIRTUAL_ENV"] == str(venv)
    assert found["PWD"] == str(ready.folder)
    assert Path(found["JAX_COMPILATION_CACHE_DIR"]).parent == ready.folder / ".cache" / "jax"


def test_programs_are_cached_for_each_kind_of_cpu(ready):
    """One that was compiled for another kind ends with an illegal instruction."""
    script = (ready.folder / "run.sh").read_text()
    caches = []
    for flags in ("avx2", "avx2 amx_tile", "avx2"):
        (ready.folder / "cpuinfo").write_text(f"model name : x\nflags : {flags}\n")
        other = script.replace("/proc/cpuinfo", str(ready.folder / "cpuinfo"))
        (ready.folder / "run.sh").write_text(other)
        caches.append(environment_of(ready.run("env"))["JAX_COMPILATION_CACHE_DIR"])
    assert caches[0] == caches[2] != caches[1]


def test_a_compilation_cache_that_is_given_is_kept(ready):
    found = environment_of(ready.run("env", JAX_COMPILATION_CACHE_DIR="/elsewhere"))
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"


def test_without_arguments_the_sample_is_prepared_once_and_tiny_is_trained(ready):
    ready.run()
    prepare = "python data/prepare.py --source python-stdlib --tokenizer sample --out data/sample"
    assert ready.calls == [prepare, "python main.py --config configs/tiny.toml"]
    ready.run()
    assert ready.calls == ["python main.py --config configs/tiny.toml"]


def test_flags_alone_go_to_main_on_tiny(ready):
    ready.run("--run.name", "other name")
    assert ready.calls[-1] == "python main.py --config configs/tiny.toml --run.name other name"


def test_the_exit_code_is_that_of_the_command(ready):
    assert ready.run("sh", "-c", "exit 75").returncode == 75
    assert ready.run("--train.steps", "3", EXIT_CODE="2").returncode == 2
    assert ready.run("no-such-command").returncode == 127


def test_training_does_not_start_on_data_that_could_not_be_prepared(ready):
    (ready.folder / "data").write_text("in the way")
    assert ready.run(EXIT_CODE="1").returncode == 1
    assert not any("main.py" in call for call in ready.calls)
