"""Processes of a job that start, share errors and end each other."""

import re
import signal

import pytest

from processes import environments, free_port, run_all
from test_distributed import metadata
from tiny_run import FLAGS as TINY

JOB = """
import os, sys
import jax
from runtime import distributed, errors
from runtime.errors import TransientError

sys.argv.append(os.environ.get("OTHER", ""))
rank = jax.process_index

def main():
    with distributed.job(6.0):
        sizes = [len(text) for text in distributed.gather(b"x" * 3000 * rank())]
        print("gathered", sizes, flush=True)
        {block}

errors.run_command(main)
"""


def run_job(block, places=None):
    """Run two processes with this block in the job. Return (exit codes, output of each)."""
    return run_all(places or environments(2, 1), "-c", JOB.format(block=block))


def test_workers_of_a_plain_tpu_pod_find_each_other():
    pytest.importorskip("libtpu")
    # jax sets the first variable where there are no chips.
    program = f"import jax, os; os.environ.pop('TPU_SKIP_MDS_QUERY', None);{JOB}"
    pod = {"JAX_FORCE_TPU_INIT": "1", "JAX_COORDINATOR_PORT": str(free_port())}
    with metadata(0) as first, metadata(1) as second:
        places = [environments(1, 1, GCE_METADATA_IP=s, **pod)[0] for s in (first, second)]
        codes, printed = run_all(places, "-c", program.format(block="pass"))
    assert codes == [0, 0], printed
    assert all("gathered [0, 3000]" in text for text in printed)


def test_an_error_on_one_process_ends_all_with_its_code_and_reason():
    block = """with distributed.shared_errors():
            if rank() == 1:
                raise TransientError("no such data")
        print("went on")"""
    codes, printed = run_job(block)
    assert codes == [75, 75], printed
    for text in printed:
        assert "gathered [0, 3000]" in text and "went on" not in text
        assert re.search(r"process 1 \(.*\): '?no such data", text)


ALONE = """if rank() == {index}:
            {end}
        for _ in range(1000):
            distributed.gather(b"step")"""


def test_an_error_of_one_process_ends_it_with_its_code_and_the_other_with_one_that_restarts():
    codes, printed = run_job(ALONE.format(index=1, end="raise KeyError('a bug')"))
    assert codes[1] == 1 and "KeyError: 'a bug'" in printed[1]
    assert codes[0] in (75, -signal.SIGABRT), printed


@pytest.mark.parametrize("index", [0, 1])
def test_the_output_names_the_process_that_was_killed(index):
    codes, printed = run_job(ALONE.format(index=index, end="os.kill(os.getpid(), 9)"))
    assert codes[index] == -signal.SIGKILL and codes[1 - index] == -signal.SIGABRT, printed
    lost = "coordination service" if index == 0 else "unhealthy (stopped sending heartbeats):\n1\n"
    assert lost in printed[1 - index], printed


def test_processes_that_are_started_differently_report_the_difference():
    places = environments(2, 1)
    places[1]["OTHER"] = "--steps=9"
    codes, printed = run_job("pass", places)
    assert codes == [2, 2], printed
    for text in printed:
        assert "the processes do not start alike" in text
        assert re.search(r"command differs: -c on process 0 .*, -c --steps=9 on process 1", text)


HIDING = """
import os, pathlib, sys
import main
from runtime import errors

read_bytes = pathlib.Path.read_bytes

def read(path):
    if "HIDDEN" in os.environ and str(path).startswith(os.environ["HIDDEN"]):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return read_bytes(path)

pathlib.Path.read_bytes = read
errors.run_command(lambda: main.run(main.parse(sys.argv[1:])))
"""


def test_data_that_one_host_cannot_read_ends_all_with_2_and_the_reason(data, tmp_path):
    places = environments(2, 4)
    places[1]["HIDDEN"] = data[1]
    codes, printed = run_all(places, "-c", HIDING, *TINY, *data, "--run.dir", str(tmp_path))
    assert codes == [2, 2], printed
    for text in printed:
        assert re.search(r"error: process 1 \(.*\): .*" + re.escape(data[1]), text), text
    assert not any(tmp_path.iterdir())
