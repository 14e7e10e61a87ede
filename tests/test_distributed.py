"""How the processes of a job find each other, share errors, and filter what C++ prints."""

import contextlib
import http.server
import json
import os
import re
import threading

import jax
import pytest

from conftest import ROOT
from processes import free_port
from runtime import distributed
from runtime.errors import TransientError
from simulated_hosts import write_script
from utils import ConfigError


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    others = {*distributed.JAX_VARIABLES, "JAX_FORCE_TPU_INIT", "CUDA_VISIBLE_DEVICES"}
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TPU_", "MEGASCALE_")) or name in others:
            monkeypatch.delenv(name)


def place(monkeypatch, *values):
    for name, value in zip(distributed.JAX_VARIABLES, values, strict=False):
        if value is not None:
            monkeypatch.setenv(name, value)
    return distributed.process_info()


@pytest.mark.parametrize(
    "values",
    [
        ("10.0.0.2:8476", None, None),
        (None, "4", "0"),
        ("10.0.0.2", "4", "0"),
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
    assert place(monkeypatch, "10.0.0.2:8476", "4", "3") == ("10.0.0.2:8476", 4, 3, None)


def test_without_a_cluster_a_process_is_alone(monkeypatch):
    assert distributed.process_info() is None and not distributed.on_tpu_vm()
    assert distributed.gather(b"own") == [b"own"]
    with pytest.raises(KeyError), distributed.shared_errors():
        raise KeyError("passes unchanged")
    with distributed.job():
        pass


def slurm(monkeypatch, folder, names, **step):
    """As in a step of Slurm whose scontrol prints these names."""
    shown = f'[ "$1 $2 $3" = "show hostnames nodes" ] && echo "{names}"\n'
    write_script(folder / "scontrol", shown)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    given = {"JOB_ID": 12, "STEP_ID": 3, "PROCID": 2, "LOCALID": 0, "STEP_NODELIST": "nodes"}
    given |= {"STEP_NUM_TASKS": 4, "STEP_NUM_NODES": 4} | step
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    return distributed.process_info()


def test_a_task_of_slurm_connects_to_the_first_host_at_a_port_of_its_step(monkeypatch, tmp_path):
    assert slurm(monkeypatch, tmp_path, "gpu1-ib\ngpu2-ib") == ("gpu1-ib:61455", 4, 2, None)
    assert slurm(monkeypatch, tmp_path, "one", STEP_ID=4)[0] == "one:61456"


def test_tasks_that_share_a_host_have_a_gpu_each_unless_slurm_bound_them(monkeypatch, tmp_path):
    shared = {"STEP_NUM_NODES": 2, "LOCALID": 1}
    for visible, devices in ((None, [1]), ("0,1", [1]), ("1", None)):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert slurm(monkeypatch, tmp_path, "a", **shared)[3] == devices
    for tasks in ("1", ""):  # in an interactive shell of an allocation
        assert slurm(monkeypatch, tmp_path, "a", STEP_NUM_TASKS=tasks) is None


def test_a_step_without_scontrol_or_names_of_hosts_is_refused(monkeypatch, tmp_path):
    for nodes, names in (("", "a"), ("nodes", "")):
        with pytest.raises(ConfigError, match="names no host for SLURM_STEP_NODELIST"):
            slurm(monkeypatch, tmp_path, names, STEP_NODELIST=nodes)
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"scontrol, .* cannot be started.*or set JAX"):
        distributed.process_info()


@contextlib.contextmanager
def metadata(number):
    """A server that answers as GCE's does on a worker of a TPU; its address."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            answers = {
                "agent-worker-number": str(number),
                "worker-network-endpoints": "a:0:127.0.0.1,b:1:127.0.0.1",
                "tpu-env": "ACCELERATOR_TYPE: 'v4-16'",
            }
            answer = answers.get(self.path.rpartition("/")[2], "")
            self.send_response(200 if answer else 404)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_metadata_server_decides_whether_a_host_with_a_tpu_is_a_tpu_vm(monkeypatch):
    monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
    with metadata(0) as server:
        monkeypatch.setenv("GCE_METADATA_IP", server)
        assert distributed.on_tpu_vm()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{free_port()}")
    assert not distributed.on_tpu_vm()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")  # of GKE
    assert distributed.on_tpu_vm()
    monkeypatch.delenv("JAX_FORCE_TPU_INIT")
    assert not distributed.on_tpu_vm()  # JAX_PLATFORMS is cpu


@pytest.mark.parametrize(
    ("others", "code", "text"),
    [
        ([[2, "process 1 (b)", "no disk"]], 2, "process 0 (.*): no answer; process 1 .b.: no disk"),
        ([[75, "process 1 (b)", "no answer"]], 75, "^no answer$"),
        ([None], 75, "^process 0 .*: no answer$"),
    ],
)
def test_an_error_is_that_of_all_processes_with_the_lowest_code(monkeypatch, others, code, text):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    theirs = [json.dumps(other).encode() if other else b"" for other in others]
    monkeypatch.setattr(distributed, "gather", lambda own: [own, *theirs])
    with pytest.raises(distributed.JobFailed, match=text) as failed, distributed.shared_errors():
        raise TransientError("no answer")
    assert failed.value.code == code


def test_run_sh_lists_the_commands_that_connect_and_leaves_the_up_file_to_them():
    listed = re.search(r'" (main\.py[^"]*) " ==', (ROOT / "run.sh").read_text())[1].split()
    using = {
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), ROOT / "tests" / "stand_in.py"]
        if re.search(r"distributed\.(job|start)\(", path.read_text())
        and "__main__" in path.read_text()
    }
    assert using == set(listed)
