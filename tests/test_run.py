"""run.sh and tests/newest.sh with stand-ins. CI runs the tests with newest.sh itself."""

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
from simulated_hosts import write_script

# Programs that macOS has too, and flock, which it has not.
TOOLS = """basename bash cat cksum cmp cp dirname echo env getconf grep mkdir mktemp readlink rm sed
sh sleep sort tail touch tr true uname flock"""
DRIVER = {"cpu": "470.82.01", "cuda12": "550.54.14", "cuda13": "580.65.06"}
STAND_INS = {
    "uv": """echo "uv $*" >>calls
sleep ${SLOW:-0}
if [ "$1" = venv ]; then mkdir -p .venv/bin && cp "$STUBS/in-venv" .venv/bin/python; fi
if [ -e "killed-in-$1" ]; then kill -9 $PPID; fi
if [ -e "fails-in-$1" ]; then echo "no route to host"; exit 1; fi
""",
    "in-venv": """echo "python $*" >>calls
env >>"$STUBS/seen"
if [ "$1" = data/prepare.py ]; then
  mkdir -p data/sample/train data/sample/val
  touch data/sample/train/index.json data/sample/val/index.json
elif [ "$1 $2 $3" = "-m pip install" ]; then cp "$STUBS/pip-uv" .venv/bin/uv
fi
exit "${EXIT_CODE:-0}"
""",
    "nvidia-smi": 'echo "$DRIVER"\n',
}
PYTHON = """if [ "$1" = -c ]; then exit ${OLD:-0}; fi
echo "python3 $*" >>calls
mkdir -p .venv/bin && cp "$STUBS/in-venv" .venv/bin/python
exit "${VENV_CODE:-0}"
"""
INSTALL = "uv pip install --quiet --python .venv/bin/python --require-hashes --no-build"


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
        for name, text in STAND_INS.items():
            write_script(self.stubs / name, text)

    def without_uv(self):
        (self.stubs / "uv").rename(self.stubs / "pip-uv")
        write_script(self.stubs / "python3", PYTHON)

    def run(self, *arguments, path: str = "", cwd: str | Path = "/", **environment):
        environment = {"DRIVER": DRIVER["cpu"], **environment}
        environment |= {"PATH": str(self.stubs), "STUBS": str(self.stubs)}
        command = [path or str(self.folder / "run.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)

    def variables(self, **environment):
        lines = self.run("env", **environment).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    @property
    def calls(self):
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    @property
    def steps(self):
        """Of the calls of uv: venv creates the environment, pip installs."""
        return [call.split()[1] for call in self.calls]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    assert checkout.run("true").returncode == 0
    assert len(checkout.calls) == 2
    return checkout


def test_the_environment_is_set_up_once_and_not_for_help(checkout):
    done = checkout.run("--help")
    assert done.returncode == 0 and "./run.sh COMMAND [ARGUMENT..]" in done.stdout
    assert "set -euo" not in done.stdout and checkout.calls == []
    with ThreadPoolExecutor(2) as pool:  # two at once
        both = list(pool.map(lambda _: checkout.run("true", SLOW="0.2"), range(2)))
    assert [done.returncode for done in both] == [0, 0]
    assert any("setting up .venv" in done.stderr for done in both)
    create = "uv venv --clear --python >=3.11,<3.15 .venv"
    assert checkout.calls == [create, f"{INSTALL} -r locks/cpu.txt"]
    assert "setting up" not in checkout.run("true").stderr and checkout.calls == []


def test_a_changed_lock_is_installed_into_the_same_environment(ready):
    for name in ("dev", "tpu", "cpu"):
        assert ready.run("true").returncode == 0 and ready.calls == []
        (ready.folder / "locks" / f"{name}.txt").write_text("another-package\n")
    ready.run("true")
    assert ready.calls == [f"{INSTALL} -r locks/cpu.txt"]


def test_packages_of_tests_and_linters_are_installed_for_them_alone(ready):
    ready.run("python", "main.py")
    assert ready.calls == ["python main.py"]
    for command in ("pytest -q", "ruff check", "shellcheck run.sh", "python tests/chaos.py"):
        for expected in ([f"{INSTALL} -r locks/cpu.txt -r locks/dev.txt"], []):
            ready.run(*command.split())
            assert [call for call in ready.calls if call.startswith("uv")] == expected
        (ready.folder / ".venv" / ".locks" / "dev.txt").unlink()


def test_an_interrupted_set_up_or_update_starts_over(checkout):
    for step, command in (("venv", "true"), ("pip", "pytest")):  # which needs another lock
        (checkout.folder / f"killed-in-{step}").touch()
        assert checkout.run(command).returncode != 0
        (checkout.folder / f"killed-in-{step}").unlink()
        assert checkout.steps == [step]
        assert checkout.run("true").returncode == 0
        assert checkout.steps == ["venv", "pip"]


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_a_failed_set_up_shows_why_and_exits_2_before_the_command(checkout, step):
    (checkout.folder / f"fails-in-{step}").touch()
    done = checkout.run("echo", "hello")
    assert done.returncode == 2 and "hello" not in done.stdout
    assert "no route to host" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("run.sh: could not set up .venv")


def test_an_environment_whose_folder_was_moved_is_created_again_and_a_link_is_used(tmp_path):
    (tmp_path / "old").mkdir()
    moved = Checkout(tmp_path / "old")
    assert moved.run("true").returncode == 0
    moved.folder = moved.folder.rename(tmp_path / "new folder")
    moved.stubs = moved.folder / "stubs"
    for expected in (["venv", "pip"], ["venv", "pip"], []):
        assert moved.steps == expected
        assert moved.run("true").returncode == 0
    (tmp_path / "other").mkdir()
    other = Checkout(tmp_path / "other")
    (other.folder / ".venv").symlink_to(moved.folder / ".venv")
    assert other.run("true").returncode == 0 and other.calls == []


def test_without_uv_a_python_that_cannot_be_used_is_refused_with_the_fix(checkout):
    checkout.without_uv()
    for given, message in (
        ({"OLD": "1"}, "python3 is not Python 3.11 to 3.14. Set PYTHON, as in"),
        ({"VENV_CODE": "1"}, "python3 -m venv failed. Install uv"),
    ):
        done = checkout.run("true", **given)
        assert done.returncode == 2 and message in done.stderr
    check = re.search(r"-c '(import sys; .*)'", (checkout.folder / "run.sh").read_text())[1]
    for minor in (10, 11, 14, 15):
        code = check.replace("sys.version_info", f"(3, {minor}, 1)")
        assert subprocess.run([sys.executable, "-c", code]).returncode == (not 11 <= minor <= 14)


def test_without_uv_pip_installs_it_into_the_environment_and_checks_its_hash(checkout):
    checkout.without_uv()
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


LEAKS = """PYTHONPATH PYTHONHOME PYTHONPLATLIBDIR PYTHONSAFEPATH PIP_TARGET PIP_PREFIX PIP_ROOT
PIP_PYTHON PIP_DRY_RUN PIP_CONSTRAINT PIP_REQUIREMENT"""


def test_variables_that_change_what_python_and_pip_use_reach_neither_set_up_nor_command(checkout):
    checkout.without_uv()
    leaks = dict.fromkeys(LEAKS.split(), "/elsewhere")
    done = checkout.run("env", PIP_INDEX_URL="https://mirror", PIP_USER="1", **leaks)
    assert done.returncode == 0 and "PYTHONPATH is not used" in done.stderr, done.stderr
    seen = (checkout.stubs / "seen").read_text()
    assert "PIP_INDEX_URL=https://mirror" in seen  # where to find packages is the user's
    for text in (seen, done.stdout):
        assert "/elsewhere" not in text and "PIP_USER=0" in text and "PIP_USER=1" not in text
        assert "PYTHONUTF8=1" in text


def test_macos_has_what_a_run_needs(checkout):
    """Its sysctl, no /proc and no flock; bash is the one of this machine."""
    for name in ("flock", "nvidia-smi"):
        (checkout.stubs / name).unlink()
    write_script(checkout.stubs / "sysctl", 'echo "$2: ${CPU:-M1}"\n')
    text = (checkout.folder / "run.sh").read_text()
    (checkout.folder / "run.sh").write_text(text.replace("/proc/cpuinfo", "/no/cpuinfo"))
    done = checkout.run("--train.steps", "2")
    assert done.returncode == 0 and "flock is not installed" in done.stderr
    assert len(done.stderr.splitlines()) == 3
    one, other = (checkout.variables(CPU=cpu) for cpu in ("M1", "M2"))
    assert one["JAX_COMPILATION_CACHE_DIR"] != other["JAX_COMPILATION_CACHE_DIR"]


# What bash 3.2 and the tools of macOS lack, as far as one line shows it, each with an example; the
# tests have no bash 3.2.
LACKING = {
    r"\b(declare|local|typeset)\s+-\w*[Agn]": "local -n name=$1",
    r"\b(mapfile|readarray|coproc|wait\s+-n)\b": "mapfile -t lines",
    r"\$\{\w+(\[[^]]*\])?(,|\^|@)": 'echo "${names[0]^}"',
    r"\[\[?( .*)? -v |&>>|\|&|;&": "[[ -v name ]]",
    r"\$\{\w+\[ *-|\$\{\w+:[^}]*: *-": "echo ${names[-1]}",
    r"\{\w+\}[<>]|%\([^)]*\)T|\$EPOCH": "exec {fd}>file",
    # Without an element an array is an unset variable there.
    r'(?<!\+)"\$\{(?!cpu_flags|files)\w+\[[@*]\]\}"': 'for x in "${left[@]}"; do',
    r"\b(nproc|timeout|realpath|tac|stat -c|date .*%N|sed -[iu]|readlink -\w|base64 -\w)\b": "tac",
}


def test_run_sh_is_written_for_bash_3_and_for_tools_that_macos_has_too():
    text = (conftest.ROOT / "run.sh").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for pattern, example in LACKING.items():
        assert re.search(pattern, example)
        assert not [line for line in lines if re.search(pattern, line)], pattern


def test_the_driver_decides_which_packages_and_settings_a_gpu_or_cpu_gets(checkout):
    assert "NVIDIA driver (470) is older than 525" in checkout.run("true").stderr
    assert checkout.calls[-1] == f"{INSTALL} -r locks/cpu.txt"
    cpu = checkout.variables()
    assert cpu["JAX_PLATFORMS"] == "cpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in cpu
    assert sorted(cpu["XLA_FLAGS"].split()) == sorted(conftest.XLA_FLAGS)
    assert "malloc.trim_threshold=" in cpu["GLIBC_TUNABLES"]  # freed memory is used again
    for extra in ("cuda12", "cuda13"):
        gpu = checkout.variables(DRIVER=DRIVER[extra])
        assert checkout.calls[-1] == f"{INSTALL} -r locks/cpu.txt -r locks/{extra}.txt"
        assert gpu["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
        assert not {"JAX_PLATFORMS", "XLA_FLAGS", "GLIBC_TUNABLES"} & gpu.keys()
    assert "XLA_FLAGS" in checkout.variables(DRIVER=DRIVER["cuda13"], JAX_PLATFORMS="cpu")


def test_what_the_user_sets_is_kept(ready):
    given = "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false"
    kept = {"JAX_PLATFORMS": "tpu", "GLIBC_TUNABLES": "", "JAX_COMPILATION_CACHE_DIR": "/elsewhere"}
    found = ready.variables(XLA_FLAGS=given, **kept)
    assert {name: found[name] for name in kept} == kept
    flags = found["XLA_FLAGS"]
    assert flags.startswith(given) and flags.count("device_count") == 1
    assert sorted(flags.split()[2:]) == sorted(conftest.XLA_FLAGS[1:])
    assert processes.with_flags(given, conftest.XLA_FLAGS) == flags


def test_programs_are_cached_for_each_kind_of_cpu(ready):
    script, caches, info = ready.folder / "run.sh", [], ready.folder / "cpuinfo"
    script.write_text(script.read_text().replace("/proc/cpuinfo", str(info)))
    for flags in ("avx2", "avx2 amx_tile", "avx2"):
        info.write_text(f"model name : x\nflags : {flags}\n")
        caches.append(ready.variables()["JAX_COMPILATION_CACHE_DIR"])
    assert caches[0] == caches[2] != caches[1]
    assert Path(caches[0]).parent == ready.folder / ".cache" / "jax"


def test_commands_run_in_the_repository_also_by_a_link_with_the_environment(ready, tmp_path):
    (tmp_path / "elsewhere" / "bin").mkdir(parents=True)
    (tmp_path / "elsewhere" / "tree").symlink_to(ready.folder)
    (tmp_path / "elsewhere" / "first").symlink_to("tree/run.sh")  # relative to the link
    (tmp_path / "elsewhere" / "bin" / "train").symlink_to("../first")
    # A relative path, whose folder is also in CDPATH.
    for how in ({}, {"path": "bin/train", "cwd": tmp_path / "elsewhere", "CDPATH": "/"}):
        found, venv = ready.variables(**how), ready.folder / ".venv"
        assert found["PATH"].split(os.pathsep)[0] == str(venv / "bin")
        assert found["VIRTUAL_ENV"] == str(venv) and found["PWD"] == str(ready.folder)
        assert ready.calls == [] and "./run.sh --help" in ready.run("--help", **how).stdout


def test_without_a_command_the_sample_is_prepared_once_and_tiny_is_trained(ready):
    prepare = "python data/prepare.py --source python-stdlib --tokenizer sample --out data/sample"
    train = "python main.py --config configs/tiny.toml"
    assert ready.run(EXIT_CODE="1").returncode == 1  # training does not start without data
    assert ready.calls == [prepare]
    shutil.rmtree(ready.folder / "data")
    ready.run()
    assert ready.calls == [prepare, train]
    assert ready.run("--run.name", "other name", EXIT_CODE="75").returncode == 75
    assert ready.calls == [f"{train} --run.name other name"]
    ready.run("--depth", "4")
    ready.run("python", "main.py", "--depth", "4")
    assert ready.calls == ["python main.py --depth 4"] * 2
    shutil.rmtree(ready.folder / "data")
    ready.run("python", "main.py", "--depth", "4", "--data.train", "x")
    assert ready.calls == ["python main.py --depth 4 --data.train x"], "no sample is needed"
    ready.run("--depth", "4")
    assert ready.calls == [prepare, "python main.py --depth 4"]


def test_the_newest_jax_needs_a_newer_python_and_a_set_up_that_succeeds(checkout):
    (checkout.folder / "tests").mkdir()
    shutil.copy(conftest.ROOT / "tests" / "newest.sh", checkout.folder / "tests")
    write_script(checkout.folder / "run.sh", "exit 1\n")
    path = str(checkout.folder / "tests" / "newest.sh")
    for old, given, message in (
        (1, {}, "'uv python install 3.13', or set PYTHON"),
        (1, {"PYTHON": "python3"}, "python3 is not Python 3.12 or newer"),
        (0, {"PYTHON": "python3"}, "could not set up .cache/newest with python3"),
    ):
        write_script(checkout.stubs / "python3", f"exit {old}\n")
        done = checkout.run(path=path, HOME=str(checkout.folder), **given)
        assert done.returncode == 2 and message in done.stderr


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
