"""The locks that run.sh installs: what they hold, and that they agree with the requirements."""

import functools
import importlib.metadata
import re
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import simulated_hosts
from conftest import ROOT

LOCKS = ["cpu", "cuda12", "cuda13", "dev", "tpu", "uv"]
ACCELERATORS = ["tpu", "cuda12", "cuda13"]
PIN = re.compile(r"([a-z0-9-]+)==(\S+)( ; .*?)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
REMAKE = "run ./run.sh locks/make.sh"


def text_of(lock):
    return (ROOT / "locks" / f"{lock}.txt").read_text()


@functools.cache
def pins(lock):
    """{package: version}"""
    return {match[1]: match[2] for match in PIN.finditer(text_of(lock))}


def unmet(requirements, *locks):
    """The requirements that these locks do not meet."""
    pinned = {name: version for lock in locks for name, version in pins(lock).items()}

    def is_met(one):
        version = pinned.get(canonicalize_name(one.name), "0")
        return one.specifier.contains(version, prereleases=True)

    return [str(one) for one in map(Requirement, requirements) if not is_met(one)]


def lines(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_every_line_of_a_lock_is_a_package_with_its_version_and_hashes():
    assert sorted(path.stem for path in (ROOT / "locks").glob("*.txt")) == LOCKS
    for lock in LOCKS:
        assert lines(PIN.sub("", text_of(lock))) == [] and pins(lock), lock
        assert not re.search(r"://|index|find-links|trusted", text_of(lock)), lock
        if lock != "cpu":  # no package is in two locks that are installed together
            assert not pins("cpu").keys() & pins(lock).keys()


def test_the_locks_meet_the_requirements():
    run, dev = (lines((ROOT / f"requirements{kind}.txt").read_text()) for kind in ("", "-dev"))
    assert len(run) > 15 and len(dev) > 5
    assert unmet(run, "cpu") == [], REMAKE
    assert unmet(dev, "cpu", "dev") == [], REMAKE
    assert unmet(["pytest>=9", "jax>0.10.2"], "cpu") == ["pytest>=9", "jax>0.10.2"]


@pytest.mark.skipif(
    importlib.metadata.version("jax") != pins("cpu")["jax"], reason="another jax than in the locks"
)
@pytest.mark.parametrize("extra", ACCELERATORS)
def test_the_lock_of_an_accelerator_has_what_jax_needs_for_it(extra):
    needs = importlib.metadata.requires("jax")
    needs = [line.split(";")[0] for line in needs if re.search(f"extra == [\"']{extra}[\"']", line)]
    assert needs
    assert unmet(needs, "cpu", extra) == [], REMAKE
    assert len(pins(extra)) == 1 or any("cudnn" in name for name in pins(extra))


def test_make_sh_describes_its_use_and_refuses_bad_input(tmp_path):
    path = simulated_hosts.path_with(tmp_path / "bin", "bash dirname env sed")
    for word, code, text in (
        ("--help", 0, "locks/make.sh --upgrade"),
        ("--quick", 2, "unknown option --quick"),
        ("", 2, "Use ./run.sh locks/make.sh"),
    ):
        command = [ROOT / "locks" / "make.sh", *word.split()]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True)
        assert done.returncode == code and text in done.stdout + done.stderr
