"""Checkpoints of a job of two processes, of which one cannot read or write."""

import pytest

from conftest import ROOT
from processes import environments, run_all
from saved_state import FAULTS, assert_newest, mesh_of, names_in, opened, saved, state_on

# A job as main.py starts it: an error that all processes raise is one line and an exit code.
JOB = """
import contextlib, sys
import conftest
import jax
from checkpoint import Checkpoints, Damaged, StoredArray
from runtime import distributed, errors
from saved_state import CONFIG, FAULTS, abstract, assert_newest, mesh_of, state_on

FOLDER, NAME, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])

def job():
    with distributed.job():
        is_this = jax.process_index() == RANK
        (cannot_write if NAME in FAULTS else cannot_read)(Checkpoints(FOLDER, keep=3), is_this)

def cannot_write(checkpoints, is_this):
    state = state_on(mesh_of(2, 2, 2), seed=2)
    assert_newest(checkpoints, 2, state)
    try:
        with FAULTS[NAME][0]() if is_this else contextlib.nullcontext():
            checkpoints.save(3, state, CONFIG)
            checkpoints.wait()
    finally:
        checkpoints.close()
        print("closed", flush=True)

def cannot_read(checkpoints, is_this):
    read, state = StoredArray.read, state_on(mesh_of(1, 4, 2), seed=1, virtual=2)

    def denied(*given):
        raise ValueError("PERMISSION_DENIED: Error reading")

    def flipped(self, *given):
        found = read(self, *given)
        if f"{FOLDER}/2/" in str(self._store.spec().to_json()):
            found.view("uint8").reshape(-1)[0] ^= 1
        return found

    for broken, kind, error in (
        (denied, errors.JobFailed, "PERMISSION_DENIED"),
        (flipped, Damaged, "does not have the values"),
    ):
        StoredArray.read = broken if is_this else read
        try:
            checkpoints.restore(2, abstract(state))
        except (Damaged, errors.JobFailed) as raised:
            assert type(raised) is kind and error in str(raised), raised
        else:
            raise AssertionError(error)
    assert_newest(checkpoints, 1, state)
    StoredArray.read = read
    for seed in (2, 3):
        checkpoints.save(seed, state_on(mesh_of(1, 4, 2), seed=seed, virtual=2), CONFIG)
    assert_newest(checkpoints, 3, state_on(mesh_of(4, 1, 2), seed=3))
    checkpoints.close()

errors.run_command(job)
"""


@pytest.fixture
def folder(tmp_path):
    saved(tmp_path / "checkpoints", 1, 2).close()
    return tmp_path / "checkpoints"


def in_two_processes(folder, name, rank):
    places = environments(2, 4, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    return run_all(places, "-c", JOB, str(folder), name, str(rank))


def test_all_processes_restore_the_previous_step_if_one_reads_damaged_values(folder):
    codes, outputs = in_two_processes(folder, "cannot read", 1)
    assert codes == [0, 0], "\n".join(outputs)
    assert outputs[0].count("step 2 in") == 1 and "warning" not in outputs[1]
    assert names_in(folder) == ["1", "2", "3", "damaged-2"]
    with opened(folder) as reader:
        assert_newest(reader, 3, state_on(mesh_of(8, 1, 1), seed=3))


@pytest.mark.parametrize(("fault", "rank"), [("disk full", 1), ("an error in a thread", 0)])
def test_all_processes_end_with_the_reason_why_one_cannot_write(folder, fault, rank):
    codes, outputs = in_two_processes(folder, fault, rank)
    code = 1 if fault == "an error in a thread" else 2
    assert codes == [code, code], "\n".join(outputs)
    for output in outputs:
        [reason] = [line for line in output.splitlines() if f"process {rank} (" in line]
        assert FAULTS[fault][2] in reason and "closed" in output
    assert {"1", "2"} <= set(names_in(folder)) and "3" not in names_in(folder)
