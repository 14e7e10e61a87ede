"""The locks that run.sh installs: what they hold, and that they agree with the requirements."""

import functools
import importlib.metadata
import platform
import re
import subprocess

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import simulated_hosts
from conftest import ROOT

LOCKS = ["cpu", "cuda12", "cuda13", "dev", "tpu", "uv"]
ACCELERATORS = ["tpu", "cuda12", "cuda13"]
PIN = re.compile(r"([a-z0-9-]+)==(\S+)(?: ; (.*?))?(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
PYTHON = platform.python_version()
PYTHONS = ["3.11.0", "3.12.0", "3.14.0"]  # between them the locks change
REMAKE = "run ./run.sh locks/make.sh"


def text_of(lock):
    return (ROOT / "locks" / f"{lock}.txt").read_text()


@functools.cache
def pins(lock, python=PYTHON):
    """{package: version} on this machine with a version of Python."""
    found = [match.groups() for match in PIN.finditer(text_of(lock))]
    return {
        name: version for name, version, marker in found if not marker or applies(marker, python)
    }


def applies(marker, python):
    versions = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return Marker(str(marker)).evaluate(versions)


def unmet(requirements, *locks, python=PYTHON):
    """The requirements that these locks do not meet."""
    pinned = {name: version for lock in locks for name, version in pins(lock, python).items()}

    def is_met(one):
        version = pinned.get(canonicalize_name(one.name), "0")
        needed = not one.marker or applies(one.marker, python)
        return not needed or one.specifier.contains(version, prereleases=True)

    return [str(one) for one in map(Requirement, requirements) if not is_met(one)]


def lines(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_every_line_of_a_lock_is_a_package_with_its_version_and_hashes():
    assert sorted(path.stem for path in (ROOT / "locks").glob("*.txt")) == LOCKS
    for lock in LOCKS:
        assert lines(PIN.sub("", text_of(lock))) == [] and pins(lock), lock
        assert not re.search(r"://|index|find-links|trusted", text_of(lock)), lock
        if lock != "cpu":  # no package is in two locks that are installed together
            cpu, own = ({match[1] for match in PIN.finditer(text_of(n))} for n in ("cpu", lock))
            assert not cpu & own


def test_pythons_after_3_11_have_a_newer_jax_and_the_same_other_packages():
    for lock in LOCKS:
        old, new, newest = (pins(lock, python) for python in PYTHONS)
        differ = {name for name in new if new[name] != old[name]}
        assert differ == {name for name in new if re.fullmatch("jax.*|libtpu", name)}, lock
        assert all(Version(new[name]) > Version(old[name]) for name in differ)
        assert newest.items() <= new.items() and old.keys() == new.keys()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_locks_meet_the_requirements(python):
    run, dev = (lines((ROOT / f"requirements{kind}.txt").read_text()) for kind in ("", "-dev"))
    assert len(run) > 15 and len(dev) > 5
    assert unmet(run, "cpu", python=python) == [], REMAKE
    assert unmet(dev, "cpu", "dev", python=python) == [], REMAKE
    assert unmet(["pytest>=9", "jax>9"], "cpu", python=python) == ["pytest>=9", "jax>9"]


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
