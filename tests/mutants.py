"""Measure the power of the tests: apply one fault at a time, and see whether they fail.

    ./run.sh python tests/mutants.py --check                verify that each fault applies
    ./run.sh python tests/mutants.py                        run the tests of all faults
    ./run.sh python tests/mutants.py --only NAME ..         those of some faults
    ./run.sh python tests/mutants.py --files model.py ..    those of the faults in some files

A fault is a line that a person could write by mistake. For each, this script copies the tree to a
temporary folder, applies the fault there, and runs its test files until a test fails. A fault is
caught if a test fails, if the process of the tests crashes, or after LIMIT_S. Compiled programs are
cached in the folder that run.sh sets.

RECORD has a line for each result, and a stopped run continues. A result is valid for one content of
the fault, its file and its test files. Ctrl-C waits for the fault that runs. Exit code: 1 if fewer
of the faults are caught than ENOUGH.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".cache" / "mutants.jsonl"
LIMIT_S = 900  # of the tests of a fault
ENOUGH = 0.95
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]


class Fault(NamedTuple):
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # files that should notice it


# mutants.txt describes its form.
FAULTS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")


def parse(text: str) -> Iterator[Fault]:
    """Yield the faults of a table like FAULTS."""
    file, common, name, tests, old, new = "", "", "", "", [], []
    for line in [*text.strip().splitlines(), "== end:"]:
        if line.startswith("#"):
            continue
        if line.startswith(("- ", "+ ")):
            (old if line[0] == "-" else new).append(line[2:])
            continue
        if old:
            files = tuple(f"tests/test_{test}.py" for test in (tests or common).split())
            yield Fault(name, file, "\n".join(old), "\n".join(new), files)
            old, new = [], []
        if line.startswith("== "):
            file, common = line[3:].split(":")
        else:
            name, _, tests = line.partition(":")


def problems() -> list[str]:
    """Return the faults that do not apply to one place, end the syntax, or lack a name or tests."""
    found, names = [], [fault.name for fault in parse(FAULTS)]
    for f in parse(FAULTS):
        text = (ROOT / f.file).read_text(encoding="utf-8")
        if (count := text.count(f.old)) != 1 or names.count(f.name) != 1 or f.old == f.new:
            found.append(f"{f.name}: its old text occurs {count} times, or its name twice")
        found += [f"{f.name}: no file {test}" for test in f.tests if not (ROOT / test).is_file()]
        if f.file.endswith(".py"):
            ast.parse(text.replace(f.old, f.new), f.name)
    return found


def key_of(fault: Fault) -> str:
    """Return a hash of what determines a result."""
    files = [(ROOT / name).read_text(encoding="utf-8") for name in (fault.file, *fault.tests)]
    return hashlib.sha256(json.dumps([fault, files]).encode()).hexdigest()[:16]


def copy_tree(tree: Path) -> None:
    """Clone the repository and copy what is not committed. Ignored files are not copied."""
    run = {"cwd": ROOT, "check": True, "stdout": subprocess.PIPE, "text": True}
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tree], **run)
    command = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(command, **run).stdout.split("\0")):
        (tree / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    for name in (".venv", ".cache"):
        (tree / name).symlink_to(ROOT / name)


def result(fault: Fault) -> dict:
    """Apply a fault to a copy of the tree and run its tests."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        tree, log = Path(folder, "tree"), Path(folder, "log")
        copy_tree(tree)
        text = (tree / fault.file).read_text(encoding="utf-8")
        (tree / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [*PYTEST, "--basetemp", f"{folder}/tmp", *fault.tests]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=tree, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # children too
                process.wait()
        text = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", text, re.MULTILINE)
    if not failed and code in range(1, 6):  # such as no test, or a wrong argument
        raise RuntimeError(f"{fault.name}: pytest ended with {code}:\n{text[-3000:]}")
    how = "" if code == 0 else "time limit" if code is None else f"exit code {code}"
    found = {"name": fault.name, "file": fault.file, "caught": code != 0}
    found |= {"test": failed[1] if failed else how, "s": round(time.monotonic() - began, 1)}
    return found | {"key": key_of(fault)}


def run_all(faults: list[Fault], jobs: int) -> list[dict]:
    """Return the results of all faults; run those without one."""
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a+") as record, ThreadPoolExecutor(jobs) as pool:
        record.seek(0)
        done = {found["key"]: found for found in map(json.loads, record)}
        todo = [fault for fault in faults if key_of(fault) not in done]
        for found in pool.map(result, todo):
            done[found["key"]] = found
            record.write(json.dumps(found) + "\n")
            record.flush()
            what = found["test"] if found["caught"] else "SURVIVED"
            print(f"{found['s']:7.1f} s  {found['name']}: {what}", flush=True)
    return [done[key_of(fault)] for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--files", nargs="+", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    flags = parser.parse_args()
    wrong, faults = problems(), [*parse(FAULTS)]
    print(*wrong, f"{len(faults)} faults in {len({f.file for f in faults})} files", sep="\n")
    if flags.check or wrong:
        sys.exit(bool(wrong))
    faults = [f for f in faults if not flags.only or f.name in flags.only]
    faults = [f for f in faults if not flags.files or f.file in flags.files]
    found = run_all(faults, flags.jobs)
    caught, minutes = sum(r["caught"] for r in found), sum(r["s"] for r in found) / 60
    for r in found:
        if not r["caught"]:
            print(f"survived: {r['name']} ({r['file']})")
    print(f"caught {caught} of {len(found)} faults, in {minutes:.0f} minutes of tests")
    sys.exit(caught < ENOUGH * len(found))


if __name__ == "__main__":
    main()
