"""Processes of a job: how they find each other, share errors, and end."""

import http.server
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

import utils
from conftest import ROOT
from processes import environments, free_port, run_all
from runtime import distributed, native_output


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TPU_", "MEGASCALE_")) or name in distributed.JAX_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def place(monkeypatch, *values):
    for name, value in zip(distributed.JAX_VARIABLES, values, strict=False):
        if value is not None:
            monkeypatch.setenv(name, value)
    return distributed.process_info()


def test_variables_of_jax_say_which_process_this_is(monkeypatch):
    assert place(monkeypatch, "10.0.0.2:8476", "4", "3") == ("10.0.0.2:8476", 4, 3, None)


@pytest.mark.parametrize(
    "values",
    [
        ("10.0.0.2:8476", None, None),
        (None, "4", "0"),
        ("10.0.0.2:8476", "4", None),
        ("10.0.0.2", "4", "0"),
        ("8476", "4", "0"),
        (":8476", "4", "0"),
        ("10.0.0.2:8476", "four", "0"),
        ("10.0.0.2:8476", "4", "-1"),
        ("10.0.0.2:8476", "4", "4"),
    ],
)
def test_variables_that_are_set_in_part_or_do_not_fit_are_refused(monkeypatch, values):
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS.*Set all: host:port") as refused:
        place(monkeypatch, *values)
    assert ("not set" in str(refused.value)) == (None in values)


def test_without_a_cluster_a_process_is_alone(monkeypatch):
    assert distributed.process_info() is None and not distributed.on_tpu_vm()
    assert distributed.gather(b"own") == [b"own"]
    with pytest.raises(KeyError), distributed.shared_errors():
        raise KeyError("passes unchanged")
    with distributed.job():
        pass


def slurm(monkeypatch, folder, names, **step):
    """As in a step of Slurm whose scontrol prints these names."""
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "show hostnames nodes" ] && echo "{names}"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    given = {"JOB_ID": 12, "STEP_ID": 3, "PROCID": 2, "LOCALID": 0, "STEP_NODELIST": "nodes"}
    given |= {"STEP_NUM_TASKS": 4, "STEP_NUM_NODES": 4} | step
    for name, value in given.items():
        if value is not None:
            monkeypatch.setenv(f"SLURM_{name}", str(value))
    return distributed.process_info()


@pytest.mark.parametrize("names", ["gpu01-ib\ngpu02-ib", "a\nb", "one"])
def test_a_task_of_slurm_connects_to_the_first_host_of_its_step(monkeypatch, tmp_path, names):
    first = names.split()[0]
    assert slurm(monkeypatch, tmp_path, names) == (f"{first}:61455", 4, 2, None)


def test_a_step_of_slurm_without_scontrol_is_refused_with_the_fix(monkeypatch, tmp_path):
    slurm(monkeypatch, tmp_path, "a")
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    with pytest.raises(utils.ConfigError, match=r"scontrol, .* cannot be started.*or set JAX"):
        distributed.process_info()


def test_steps_of_one_job_use_different_ports(monkeypatch, tmp_path):
    assert slurm(monkeypatch, tmp_path, "a", STEP_ID=4)[0] == "a:61456"


def test_tasks_that_share_a_host_have_a_gpu_each_unless_slurm_bound_them(monkeypatch, tmp_path):
    shared = {"STEP_NUM_NODES": 2, "LOCALID": 1}
    assert slurm(monkeypatch, tmp_path, "a", **shared)[3] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert slurm(monkeypatch, tmp_path, "a", **shared)[3] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert slurm(monkeypatch, tmp_path, "a", **shared)[3] is None


@pytest.mark.parametrize("tasks", ["1", None])
def test_an_interactive_shell_of_an_allocation_is_one_process(monkeypatch, tmp_path, tasks):
    monkeypatch.setenv("SLURM_NTASKS", "8")  # of the allocation
    assert slurm(monkeypatch, tmp_path, "a", STEP_NUM_TASKS=tasks) is None


@pytest.mark.parametrize(("nodes", "names"), [("", "a"), ("nodes", "")])
def test_a_step_without_names_of_hosts_is_refused(monkeypatch, tmp_path, nodes, names):
    with pytest.raises(ValueError, match="names no host for SLURM_STEP_NODELIST"):
        slurm(monkeypatch, tmp_path, names, STEP_NODELIST=nodes)


# --- two processes --------------------------------------------------------------------------------


@pytest.fixture
def metadata():
    """A server that answers as GCE's does on the workers of a TPU; PORT decides which."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            name = self.path.rpartition("/")[2]
            answer = {
                "agent-worker-number": str(self.server.number),
                "worker-network-endpoints": "a:0:127.0.0.1,b:1:127.0.0.1",
                "tpu-env": "ACCELERATOR_TYPE: 'v4-16'",
            }.get(name)
            self.send_response(200 if answer else 404)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        def log_message(self, *words):
            pass

    servers = []
    for number in range(2):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.number = number
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield [f"127.0.0.1:{server.server_address[1]}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


ON_A_POD = """
import os, sys
import jax
os.environ.pop("TPU_SKIP_MDS_QUERY", None)  # jax sets it where there are no chips
from runtime import distributed, native_output
with distributed.job():
    names = [name.decode() for name in distributed.gather(f"worker {jax.process_index()}".encode())]
    print("gathered", names)
"""


def test_workers_of_a_plain_tpu_pod_find_each_other(metadata):
    pytest.importorskip("libtpu")
    port = str(free_port())
    pod = {"JAX_FORCE_TPU_INIT": "1", "JAX_COORDINATOR_PORT": port, "JAX_PLATFORMS": "cpu"}
    places = [environments(1, 1, GCE_METADATA_IP=server, **pod)[0] for server in metadata]
    codes, printed = run_all(places, "-c", ON_A_POD)
    assert codes == [0, 0], printed
    assert all("gathered ['worker 0', 'worker 1']" in text for text in printed)


def test_the_metadata_server_decides_whether_a_host_with_a_tpu_is_a_tpu_vm(monkeypatch, metadata):
    monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
    monkeypatch.setenv("GCE_METADATA_IP", metadata[0])
    assert distributed.on_tpu_vm()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{free_port()}")
    assert not distributed.on_tpu_vm()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")  # of GKE
    assert distributed.on_tpu_vm()
    monkeypatch.delenv("JAX_FORCE_TPU_INIT")
    assert not distributed.on_tpu_vm()  # JAX_PLATFORMS is cpu


SHARED = """
import sys
import jax
from runtime import errors
from runtime import distributed, native_output
from runtime.errors import TransientError
from utils import ConfigError

def main():
    with distributed.job(10.0):
        sizes = [len(text) for text in distributed.gather(b"x" * 3000 * jax.process_index())]
        print("gathered", sizes)
        with distributed.shared_errors():
            if jax.process_index() == 1:
                raise {error}
        print("went on")

errors.run_command(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError('no such data')", 2),
        ("TransientError('no such data')", 75),
        ("KeyError('no such data')", 1),
    ],
)
def test_an_error_on_one_process_ends_all_with_its_code_and_reason(error, code):
    codes, printed = run_all(environments(2, 1), "-c", SHARED.format(error=error))
    assert codes == [code, code], printed
    for text in printed:
        assert "gathered [0, 3000]" in text and "went on" not in text
        assert re.search(r"process 1 \(.*\): '?no such data", text)


ALONE = """
import os, sys
import jax
from runtime import errors
from runtime import distributed, native_output

def main():
    with distributed.job(6.0):
        print("connected", flush=True)
        if jax.process_index() == int(sys.argv[1]):
            raise {error}
        for _ in range(1000):
            distributed.gather(b"step")

errors.run_command(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_an_error_of_one_process_ends_it_with_its_code_and_the_other_with_one_that_restarts(index):
    started = time.monotonic()
    program = ALONE.format(error="KeyError('a bug')")
    codes, printed = run_all(environments(2, 1), "-c", program, str(index))
    assert codes[index] == 1 and "KeyError: 'a bug'" in printed[index]
    assert codes[1 - index] in (75, -signal.SIGABRT), printed
    assert time.monotonic() - started < 60


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_the_last_line_names_the_process_that_was_killed(index):
    program = ALONE.format(error="SystemExit(os.kill(os.getpid(), 9))")
    codes, printed = run_all(environments(2, 1), "-c", program, str(index))
    assert codes[index] == -signal.SIGKILL and codes[1 - index] == -signal.SIGABRT, printed
    text = printed[1 - index]
    assert text.endswith(native_output.LOST.format(index) + "\n"), text
    assert "[Gloo]" not in text and "    @ 0x" not in text


STACK_TRACE = """*** Check failure stack trace: ***
    @     0x7fe2b9440634  absl::LogMessage::SendToLog()
"""
UNHEALTHY = """F1129 client.h:80] The following tasks are unhealthy (stopped sending heartbeats):
3, 12
The tasks have crashed.
"""
UNREACHED = "E1129 agent.cc:1] Failed to send RPC to coordination service. Either\n"
IS_CONNECTED = " is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
GLOO = f"[Gloo] Rank 1[Gloo] Rank 0{IS_CONNECTED}{IS_CONNECTED}1\n"
FAILED = "F1129 Check failed: a == b\n" + STACK_TRACE


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (UNHEALTHY + STACK_TRACE, UNHEALTHY + native_output.LOST.format("3, 12") + "\n"),
        (UNREACHED + STACK_TRACE, UNREACHED + native_output.LOST.format("0") + "\n"),
        (GLOO + UNHEALTHY + UNREACHED + STACK_TRACE, None),
        (
            "F1129 Check failed: a == b\n" + STACK_TRACE,
            "F1129 Check failed: a == b\n" + STACK_TRACE,
        ),
        ("warning: \xff 1 peer\n12 GB", "warning: \xff 1 peer\n12 GB"),
    ],
)
def test_output_of_cpp_loses_only_noise_and_names_the_lost_process(text, left):
    left = left or UNHEALTHY + UNREACHED + native_output.LOST.format("3, 12") + "\n"
    program = [sys.executable, "-S", native_output.__file__]
    found = subprocess.run(program, input=text.encode("latin-1"), capture_output=True)
    assert (found.returncode, found.stdout) == (0, b"")
    assert found.stderr.decode("latin-1") == left


def test_processes_that_are_started_differently_report_the_difference():
    places = environments(2, 1)
    places[1]["OTHER"] = "--steps=9"
    program = "import os, sys; sys.argv.append(os.environ.get('OTHER', ''));" + SHARED
    codes, printed = run_all(places, "-c", program.format(error="KeyError('not reached')"))
    assert codes == [2, 2], printed
    for text in printed:
        assert "the processes do not start alike" in text
        assert re.search(r"command differs: -c on process 0 .*, -c --steps=9 on process 1", text)


@pytest.mark.slow
def test_data_that_one_host_cannot_read_ends_all_with_2_and_the_reason(data, tmp_path):
    """Of the other host the folder is hidden; the time is from the end of the pre-flight checks."""
    from tiny_run import FLAGS as TINY

    places = environments(2, 4)
    places[1]["HIDDEN"] = data[1]
    # What a host cannot see does not exist there.
    program = """
import os, pathlib, sys, time
import main
from runtime import errors
from runtime import distributed, native_output
hidden, start = os.environ.get("HIDDEN"), distributed.start
if hidden:
    exists, opened = os.path.exists, pathlib.Path.open
    import builtins, io
    def hide(function):
        def found(path, *words, **how):
            if str(path).startswith(hidden):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *words, **how)
        return found
    pathlib.Path.open = hide(pathlib.Path.open)
    pathlib.Path.read_text = hide(pathlib.Path.read_text)
    pathlib.Path.read_bytes = hide(pathlib.Path.read_bytes)
    builtins.open = io.open = hide(io.open)
def started(*words, **how):
    start(*words, **how)
    print(f"started at {time.time()}", flush=True)
distributed.start = started
try:
    errors.run_command(lambda: main.run(main.parse(sys.argv[1:])))
finally:
    print(f"ended at {time.time()}", flush=True)
"""
    flags = [*TINY, *data, "--run.dir", str(tmp_path)]
    codes, printed = run_all(places, "-c", program, *flags)
    assert codes == [2, 2], printed
    for text in printed:
        assert re.search(r"error: process 1 \(.*\): .*" + re.escape(data[1]), text), text
        began, ended = (float(re.search(rf"{w} at (\S+)", text)[1]) for w in ("started", "ended"))
        assert ended - began < 15
    assert not any(tmp_path.iterdir())


def test_run_sh_leaves_the_up_file_to_the_commands_that_connect():
    """It lists them; a new one has to be added there."""
    listed = re.search(r'" (main\.py[^"]*) " ==', (ROOT / "run.sh").read_text())[1].split()
    using = {
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), ROOT / "tests" / "stand_in.py"]
        if re.search(r"distributed\.(job|start)\(", path.read_text())
        and "__main__" in path.read_text()
    }
    assert using - {"benchmarks/links.py"} == set(listed)
