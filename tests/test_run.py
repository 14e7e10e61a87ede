import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import conftest
import processes

# Programs that macOS has too, and flock, which it has not.
TOOLS = (
    "basename bash cat cksum cmp cp dirname echo env getconf grep mkdir mktemp readlink rm sed sh"
)
TOOLS += " tail touch tr true uname flock"
DRIVER = {"cpu": "470.82.01", "cuda12": "550.54.14", "cuda13": "580.65.06"}

# Stand-ins, so that nothing is installed and no device is looked for.
UV = """#!/bin/sh
echo "uv $*" >>calls
echo "${UV_COMPILE_BYTECODE:-no}" >>bytecode
if [ "$1" = venv ]; then mkdir -p .venv/bin && cp "$STUBS/in-venv" .venv/bin/python; fi
if [ -e "killed-in-$1" ]; then kill -9 $PPID; fi
if [ -e "fails-in-$1" ]; then echo "no route to host"; exit 1; fi
"""
IN_VENV = """#!/bin/sh
echo "python $*" >>calls
if [ "$1" = data/prepare.py ]; then
  mkdir -p data/sample/train data/sample/val
  touch data/sample/train/index.json data/sample/val/index.json
elif [ "$1 $2 $3" = "-m pip --version" ]; then exit "${PIP_CODE:-0}"
elif [ "$1 $2 $3" = "-m pip install" ]; then cp "$STUBS/pip-uv" .venv/bin/uv
fi
exit "${EXIT_CODE:-0}"
"""
NVIDIA_SMI = """#!/bin/sh
echo "$DRIVER"
"""
OLD_PYTHON = """#!/bin/sh
exit 1
"""
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi
echo "python3 $*" >>calls
mkdir -p .venv/bin && cp "$STUBS/in-venv" .venv/bin/python
exit "${VENV_CODE:-0}"
"""
INSTALL = "uv pip install --quiet --python .venv/bin/python --require-hashes --no-build"


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Checkout:
    """A folder with run.sh, and a PATH with stand-ins and a few system tools alone."""

    def __init__(self, folder: Path):
        self.folder, self.stubs = folder, folder / "stubs"
        self.stubs.mkdir()
        shutil.copy(conftest.ROOT / "run.sh", folder)
        (folder / "locks").mkdir()
        for name in ("cpu", "cuda12", "cuda13", "dev", "tpu", "uv"):
            (folder / "locks" / f"{name}.txt").write_text(f"the lock {name}\n")
        for name in filter(shutil.which, TOOLS.split()):
            (self.stubs / name).symlink_to(shutil.which(name))
        for name, text in [("uv", UV), ("in-venv", IN_VENV), ("nvidia-smi", NVIDIA_SMI)]:
            script(self.stubs / name, text)

    def without_uv(self, python: str):
        """Leaves a python3 with this text in the place of uv."""
        (self.stubs / "uv").rename(self.stubs / "pip-uv")
        script(self.stubs / "python3", python)

    def run(self, *arguments, path: str = "", cwd: str | Path = "/", **environment):
        environment = {"DRIVER": DRIVER["cpu"], **environment}
        environment |= {"PATH": str(self.stubs), "STUBS": str(self.stubs)}
        command = [path or str(self.folder / "run.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)

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
        "uv venv --clear --python >=3.11,<3.15 .venv",
        f"{INSTALL} -r locks/cpu.txt",
    ]
    second = checkout.run("true")
    assert checkout.calls == []
    assert "setting up" not in second.stderr


@pytest.mark.parametrize(
    "environment, compiled",
    [
        ({}, "no"),
        ({"PYTHONDONTWRITEBYTECODE": ""}, "no"),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, "1"),
        ({"PYTHONDONTWRITEBYTECODE": "1", "UV_COMPILE_BYTECODE": "0"}, "0"),
    ],
)
def test_packages_are_compiled_at_their_installation_if_python_may_not_do_it_later(
    checkout, environment, compiled
):
    assert checkout.run("true", **environment).returncode == 0
    assert (checkout.folder / "bytecode").read_text().split() == [compiled, compiled]


def test_two_that_start_at_once_set_up_one_environment(checkout):
    script(checkout.stubs / "uv", UV.replace("#!/bin/sh", "#!/bin/sh\nsleep 0.5"))
    (checkout.stubs / "sleep").symlink_to(shutil.which("sleep"))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: checkout.run("true"), range(2)))
    assert [done.returncode for done in both] == [0, 0]
    assert [call.split()[1] for call in checkout.calls] == ["venv", "pip"]


def test_a_changed_lock_is_installed_into_the_same_environment(ready):
    (ready.folder / "locks" / "dev.txt").write_text("another-package\n")
    (ready.folder / "locks" / "tpu.txt").write_text("another-package\n")
    ready.run("true")
    assert ready.calls == []
    (ready.folder / "locks" / "cpu.txt").write_text("another-package\n")
    ready.run("true")
    assert ready.calls == [f"{INSTALL} -r locks/cpu.txt"]


DEV = ["pytest -q", "ruff check", "shellcheck run.sh", "python -m pytest", "python tests/chaos.py"]


@pytest.mark.parametrize("command", DEV)
def test_packages_of_tests_and_linters_are_installed_for_them_alone(ready, command):
    ready.run("python", "main.py")
    assert ready.calls == ["python main.py"]
    ready.run(*command.split())
    assert ready.calls[0] == f"{INSTALL} -r locks/cpu.txt -r locks/dev.txt"
    ready.run(*command.split())
    ready.run("python", "main.py")
    assert not any(call.startswith("uv") for call in ready.calls)


def test_a_link_to_run_sh_runs_in_the_tree(ready, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "bin").mkdir()
    (elsewhere / "tree").symlink_to(ready.folder)
    (elsewhere / "first").symlink_to("tree/run.sh")  # relative to the link
    (elsewhere / "bin" / "train").symlink_to("../first")
    # A relative path, whose folder is also in CDPATH.
    link = {"path": "bin/train", "cwd": elsewhere, "CDPATH": "/"}
    done = ready.run("env", **link)
    assert environment_of(done)["PWD"] == str(ready.folder) and ready.calls == []
    assert "./run.sh --help" in ready.run("--help", **link).stdout


def test_macos_has_what_a_run_needs(checkout):
    """Its uname and sysctl, no /proc and no flock; bash is the one of this machine."""
    for name in ("flock", "nvidia-smi", "uname"):
        (checkout.stubs / name).unlink()
    script(checkout.stubs / "uname", '#!/bin/sh\n[ "$1" = -m ] && echo arm64 || echo Darwin\n')
    script(checkout.stubs / "sysctl", '#!/bin/sh\necho "$2: ${CPU:-M1}"\n')
    text = (checkout.folder / "run.sh").read_text()
    (checkout.folder / "run.sh").write_text(text.replace("/proc/cpuinfo", "/no/cpuinfo"))
    done = checkout.run("--train.steps", "2", OSTYPE="darwin23")
    assert done.returncode == 0 and "flock is not installed" in done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert checkout.calls[-1] == "python main.py --config configs/tiny.toml --train.steps 2"
    caches = [environment_of(checkout.run("env", CPU=cpu)) for cpu in ("M1", "M2", "M1")]
    caches = [found["JAX_COMPILATION_CACHE_DIR"] for found in caches]
    assert caches[0] == caches[2] != caches[1]


# Features that bash 3.2 of macOS lacks, as far as one line shows them; the tests have no bash 3.2.
NEWER_THAN_BASH_3 = {
    "associative arrays, name references": r"\b(declare|local|typeset)\s+-\w*[Agn]",
    "mapfile": r"\b(mapfile|readarray|coproc|globstar|inherit_errexit|lastpipe)\b",
    "change of case": r"\$\{\w+(\[[^]]*\])?(,|\^)",
    "${name@Q}": r"\$\{\w+(\[[^]]*\])?@",
    "[[ -v name ]]": r"\[\[?( .*)? -v ",
    "&>> and |&": r"&>>|\|&",
    ";& and ;;&": r";&",
    "a negative index": r"\$\{\w+\[ *-|\$\{\w+:[^}]*: *-",
    "wait -n": r"\bwait\s+-n",
    "a timeout below a second": r"\bread\b.*-t\s*0?\.",
    "{fd} redirections": r"\{\w+\}[<>]",
    "time in printf": r"%\([^)]*\)T",
    "variables": r"\$\{?(BASHPID|EPOCH\w+|SRANDOM|PIPESTATUS_|BASH_ARGV0)\b",
    "unicode escapes": r"\$'[^']*\\[uU]",
    # Without an element it is an unset variable there.
    "an array that may be empty": r'(?<!\+)"\$\{(?!cpu_flags|files)\w+\[[@*]\]\}"',
}
ONLY_LINUX = (
    r"\b(nproc|timeout|realpath|tac|stat -c|date .*%N|sed -(i|u)|readlink -\w|base64 -\w)\b"
)


def code_of(text):
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def test_run_sh_is_written_for_bash_3_and_for_tools_that_macos_has_too():
    lines = code_of((conftest.ROOT / "run.sh").read_text())
    for name, pattern in {**NEWER_THAN_BASH_3, "a tool of Linux": ONLY_LINUX}.items():
        assert not [line for line in lines if re.search(pattern, line)], name


@pytest.mark.parametrize(
    "line",
    [
        "declare -A names", "local -n name=$1", "mapfile -t lines", 'echo "${name,,}"',
        'echo "${names[0]^}"', "echo ${name@Q}", "[[ -v name ]]", "cmd &>>log", "cmd |& tee",
        "x) true ;&", "echo ${names[-1]}", "wait -n", "read -t 0.5 x", "exec {fd}>file",
        "printf '%(%s)T'", "echo $EPOCHSECONDS", "echo $'\\u00e4'", 'for x in "${left[@]}"; do',
        "n=$(nproc)", "stat -c %Y x", "date +%s.%N", "sed -i s/a/b/ x", "readlink -f x",
    ],
)  # fmt: skip
def test_what_is_newer_than_bash_3_is_found(line):
    assert any(re.search(pattern, line) for pattern in (*NEWER_THAN_BASH_3.values(), ONLY_LINUX))


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_driver_decides_which_cuda_is_installed(checkout, extra):
    checkout.run("true", DRIVER=DRIVER[extra])
    assert checkout.calls[-1] == f"{INSTALL} -r locks/cpu.txt -r locks/{extra}.txt"


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


def test_a_driver_that_is_too_old_for_jax_is_logged_and_the_cpu_is_used(checkout):
    done = checkout.run("true")
    assert "NVIDIA driver (470) is older than 525" in done.stderr
    assert checkout.calls[-1].endswith(" -r locks/cpu.txt")


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_an_interrupted_set_up_starts_over(checkout, step):
    (checkout.folder / f"killed-in-{step}").touch()
    assert checkout.run("true").returncode != 0
    (checkout.folder / f"killed-in-{step}").unlink()
    assert checkout.calls[-1].startswith(f"uv {step}")
    assert checkout.run("true").returncode == 0
    assert [call.split()[1] for call in checkout.calls] == ["venv", "pip"]


def test_an_environment_whose_update_was_interrupted_is_created_again(ready):
    (ready.folder / "killed-in-pip").touch()
    assert ready.run("pytest").returncode != 0  # which needs another lock
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
    assert "no route to host" in (checkout.folder / ".cache" / "install.log").read_text()
    assert done.stderr.splitlines()[-1].startswith("run.sh: could not set up .venv")
    assert "hello" not in done.stdout


def test_a_python_that_the_locks_are_not_for_is_refused_with_the_fix(checkout):
    checkout.without_uv(OLD_PYTHON)
    done = checkout.run("true")
    assert done.returncode == 2
    assert "python3 is not Python 3.11 to 3.14" in done.stderr
    assert "Set PYTHON, as in PYTHON=python3.12 ./run.sh" in done.stderr


def test_without_uv_pip_installs_it_into_the_environment_and_checks_its_hash(checkout):
    checkout.without_uv(PYTHON)
    done = checkout.run("true")
    assert done.returncode == 0, done.stderr
    pip = "python -m pip install --quiet --disable-pip-version-check --require-hashes"
    assert checkout.calls == [
        "python3 -m venv --clear .venv",
        "python -m pip --version",
        f"{pip} --only-binary :all: -r locks/uv.txt",
        f"{INSTALL} -r locks/cpu.txt",
    ]
    assert checkout.run("uv", "pip", "list").returncode == 0  # for what a user adds
    assert checkout.calls == ["uv pip list"]


def test_an_environment_that_uv_made_gets_pip_first_where_uv_is_gone(ready):
    ready.without_uv(PYTHON)
    (ready.folder / "locks" / "cpu.txt").write_text("another-package\n")
    assert ready.run("true", PIP_CODE="1").returncode == 0
    assert [call.split()[2] for call in ready.calls] == ["pip", "ensurepip", "pip", "install"]


LEAKS = "PYTHONPATH PYTHONHOME PYTHONPLATLIBDIR PYTHONSAFEPATH PIP_TARGET PIP_PREFIX PIP_ROOT"
LEAKS += " PIP_PYTHON PIP_DRY_RUN PIP_CONSTRAINT PIP_REQUIREMENT"


def test_variables_that_change_what_python_and_pip_use_reach_neither_set_up_nor_command(checkout):
    see = '#!/bin/sh\nenv >>"$STUBS/seen"\n'
    checkout.without_uv(PYTHON.replace("#!/bin/sh\n", see))
    script(checkout.stubs / "in-venv", IN_VENV.replace("#!/bin/sh\n", see))
    leaks = dict.fromkeys(LEAKS.split(), "/elsewhere")
    done = checkout.run("env", PIP_INDEX_URL="https://mirror", PIP_USER="1", **leaks)
    assert done.returncode == 0, done.stderr
    seen = (checkout.stubs / "seen").read_text()
    assert "PIP_INDEX_URL=https://mirror" in seen  # where to find packages is the user's
    for text in (seen, done.stdout):
        assert "/elsewhere" not in text and "PIP_USER=0" in text and "PIP_USER=1" not in text
        assert "PYTHONUTF8=1" in text
    assert "PYTHONPATH is not used" in done.stderr


def test_pip_installs_into_the_environment_although_its_config_says_user(checkout, tmp_path):
    """PIP_USER of run.sh has precedence over `user = true` in pip.conf, for the real pip."""
    pytest.importorskip("pip")
    (tmp_path / "pip.conf").write_text("[install]\nuser = true\n")
    found = environment_of(checkout.run("env", PIP_CONFIG_FILE=str(tmp_path / "pip.conf")))
    code = "import sys; from pip._internal.commands import create_command as c"
    code += "; print(c('install').parse_args([])[0].use_user_site)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=found, capture_output=True, text=True)
    assert done.stdout.split() in (["0"], ["False"]), done.stderr


def test_an_environment_in_a_folder_that_was_moved_is_created_again(tmp_path):
    (tmp_path / "old").mkdir()
    assert Checkout(tmp_path / "old").run("true").returncode == 0
    (tmp_path / "old").rename(tmp_path / "new folder")
    moved = object.__new__(Checkout)
    moved.folder, moved.stubs = tmp_path / "new folder", tmp_path / "new folder" / "stubs"
    assert [call.split()[1] for call in moved.calls] == ["venv", "pip"]
    assert moved.run("true").returncode == 0
    assert [call.split()[1] for call in moved.calls] == ["venv", "pip"]
    moved.run("true")
    assert moved.calls == []


def test_a_link_to_the_environment_of_another_folder_is_used_as_it_is(ready, tmp_path_factory):
    other = Checkout(tmp_path_factory.mktemp("other"))
    (other.folder / ".venv").symlink_to(ready.folder / ".venv")
    assert other.run("true").returncode == 0
    assert other.calls == []


def test_a_system_without_venv_is_refused_with_the_fix(checkout):
    checkout.without_uv(PYTHON)
    done = checkout.run("true", VENV_CODE="1")
    assert done.returncode == 2
    assert "python3 -m venv failed. Install uv, or the system package python3-venv" in done.stderr


@pytest.mark.parametrize("minor", [10, 11, 14, 15])
def test_the_pythons_of_the_locks_are_accepted(checkout, minor):
    check = re.search(r"-c '(import sys; .*)'", (checkout.folder / "run.sh").read_text())[1]
    code = check.replace("sys.version_info", f"(3, {minor}, 1)")
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == (not 11 <= minor <= 14)


def test_a_cpu_machine_gets_the_devices_and_timeouts_that_the_tests_use(ready):
    flags = environment_of(ready.run("env"))["XLA_FLAGS"]
    assert sorted(flags.split()) == sorted(conftest.XLA_FLAGS)


def test_flags_that_are_given_are_kept(ready):
    given = "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false"
    flags = environment_of(ready.run("env", XLA_FLAGS=given))["XLA_FLAGS"]
    assert flags.startswith(given)
    assert flags.count("device_count") == 1
    assert sorted(flags.split()[2:]) == sorted(conftest.XLA_FLAGS[1:])
    assert processes.with_flags(given, conftest.XLA_FLAGS) == flags


def test_a_gpu_machine_gets_no_simulated_devices_unless_jax_uses_the_cpu(checkout):
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


@pytest.mark.parametrize("closed", ["", "1>&-", "2>&-", "1>&- 2>&-"])
def test_no_file_becomes_a_closed_standard_stream(ready, closed):
    """bash may leave run.sh itself there, which it has opened to read."""
    inside = "for n in 1 2; do readlink /proc/$$/fd/$n >$n; done"
    environment = {"PATH": str(ready.stubs), "STUBS": str(ready.stubs), "DRIVER": DRIVER["cpu"]}
    command = ["bash", "-c", f"{ready.folder}/run.sh bash -c '{inside}' {closed}"]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    harmless = "/dev/null", str(ready.folder / "run.sh")
    found = [(ready.folder / n).read_text().strip() in harmless for n in "12"]
    assert found == [f"{n}>" in closed for n in "12"]


def test_training_does_not_start_on_data_that_could_not_be_prepared(ready):
    (ready.folder / "data").write_text("in the way")
    assert ready.run(EXIT_CODE="1").returncode == 1
    assert not any("main.py" in call for call in ready.calls)
