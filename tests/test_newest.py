import shutil
import subprocess
from pathlib import Path

import pytest

import conftest

TOOLS = "bash cat cp dirname env mkdir sed sh sort"

# Stand-ins, so that nothing is installed: a Python of a version, and run.sh with its uv.
PYTHON = """#!/bin/sh
case "$1$2" in
-c*) exit {old} ;;
-mpytest) echo "tests run by {name}: $3"; exit 5 ;;
-) echo "versions of {name}" ;;
esac
"""
RUN = """#!/bin/sh
case "$2" in
venv) mkdir -p "$7/bin" && cp "$6" "$7/bin/python" ;;
pip) cat "$9" "${11}" >required; exit "${PIP:-0}" ;;
esac
"""


class Checkout:
    """A folder with tests/newest.sh, and a PATH with stand-ins and a few system tools alone."""

    def __init__(self, folder: Path):
        self.folder, self.stubs = folder, folder / "stubs"
        self.stubs.mkdir()
        (folder / "tests").mkdir()
        for name in ("requirements.txt", "requirements-dev.txt", "tests/newest.sh"):
            shutil.copy(conftest.ROOT / name, folder / name)
        self._add("run.sh", RUN)
        for name in filter(shutil.which, TOOLS.split()):
            (self.stubs / name).symlink_to(shutil.which(name))

    def add_python(self, path: str, old: int = 0):
        self._add(path, PYTHON.format(old=old, name=path))

    def _add(self, path: str, script: str):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
        file.chmod(0o755)

    def run(self, *arguments, **environment):
        environment |= {"PATH": str(self.stubs), "HOME": str(self.folder)}
        command = [str(self.folder / "tests/newest.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_help_prints_the_usage_and_sets_nothing_up(checkout):
    done = checkout.run("--help")
    assert done.returncode == 0 and "tests/newest.sh --help" in done.stdout
    assert not (checkout.folder / ".cache").exists()


def test_without_a_new_python_the_error_names_the_fix(checkout):
    checkout.add_python("stubs/python3", old=1)
    done = checkout.run()
    assert done.returncode == 2 and "'uv python install 3.13', or set PYTHON" in done.stderr
    done = checkout.run(PYTHON="python3")
    assert done.returncode == 2 and "python3 is not Python 3.12 or newer" in done.stderr


def test_the_newest_python_runs_the_tests_with_a_jax_of_any_version(checkout):
    checkout.add_python("stubs/python3", old=1)
    checkout.add_python(".pyenv/versions/3.9.18/bin/python3", old=1)
    for version in ("3.12.1", "3.13.0"):
        checkout.add_python(f".pyenv/versions/{version}/bin/python3")
    done = checkout.run("tests/test_hlo.py")
    assert done.stdout.splitlines() == [
        "versions of .pyenv/versions/3.13.0/bin/python3",
        "tests run by .pyenv/versions/3.13.0/bin/python3: tests/test_hlo.py",
    ]
    assert done.returncode == 5
    required = (checkout.folder / "required").read_text().splitlines()
    assert "jax" in required and any(line.startswith("flax>=") for line in required)
    assert any(line.startswith("pytest>=") for line in required)


def test_an_environment_that_cannot_be_set_up_runs_no_tests(checkout):
    checkout.add_python("stubs/python3.13")
    done = checkout.run(PIP="1")
    assert done.returncode == 2 and "could not set up .cache/newest" in done.stderr
    assert "tests run" not in done.stdout
