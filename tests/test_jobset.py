"""launch/jobset.yaml against the schemas of JobSet, Job and pods in kubeflow_trainer_api.

The package drops fields that it does not know, so a valid manifest comes back unchanged.
"""

import re

import pytest
import yaml
from kubeflow_trainer_api import models

from conftest import ROOT
from runtime import cli, distributed
from runtime.errors import Exit

TEXT = (ROOT / "launch" / "jobset.yaml").read_text()


def is_valid(text):
    manifest = yaml.safe_load(text)
    try:
        return models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    except (ValueError, AttributeError):
        return False


def test_the_manifest_is_valid_and_no_longer_with_any_other_field():
    text = TEXT.replace("#TPU ", "")
    assert is_valid(TEXT) and is_valid(text) and is_valid(TEXT.replace("#GPU ", ""))
    fields = list(re.finditer(r"^[ -]*(\w+):", text, re.MULTILINE))
    assert len(fields) > 50
    for field in fields:
        if not re.match(r"google.com|nvidia.com|cloud", field[1]):
            assert not is_valid(f"{text[: field.end(1)]}s{text[field.end(1) :]}"), field
    assert not is_valid(TEXT.replace("completions: 2", "completions: '2'"))


@pytest.fixture
def manifest():
    return yaml.safe_load(TEXT)


def container_of(manifest):
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    return container


def test_the_pods_find_each_other_as_processes_of_one_job(manifest, monkeypatch):
    [job] = manifest["spec"]["replicatedJobs"]
    spec, container = job["template"]["spec"], container_of(manifest)
    env = {one["name"]: one for one in container["env"]}
    index = env.pop("JAX_PROCESS_ID")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    owner = env.pop("RUN_OWNER")["valueFrom"]["fieldRef"]["fieldPath"]
    # The same in all pods and after a restart.
    assert owner == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    for name, one in env.items():
        monkeypatch.setenv(name, one["value"])
    monkeypatch.setenv("JAX_PROCESS_ID", str(spec["completions"] - 1))
    name = manifest["metadata"]["name"]
    assert manifest["spec"]["network"]["enableDNSHostnames"] and job["replicas"] == 1
    # <jobset>-<replicated job>-<job>-<pod>.<subdomain>, which is the jobset's name
    port = container["ports"][0]["containerPort"]
    first = f"{name}-{job['name']}-0-0.{name}:{port}"
    count = spec["completions"]
    assert distributed.process_info() == (first, count, count - 1, None)
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"


def test_exit_codes_that_need_a_fix_fail_the_job_and_others_restart_it(manifest):
    policy = manifest["spec"]["failurePolicy"]
    [fails] = policy["rules"]
    assert fails["action"] == "FailJobSet" and fails["onJobFailureReasons"] == ["PodFailurePolicy"]
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    codes = {"containerName": container_of(manifest)["name"], "operator": "In"}
    codes["values"] = [Exit.BUG, Exit.CONFIG]
    assert spec["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onExitCodes": codes}]
    # A podFailurePolicy requires the first; with the second, one failed pod fails the job.
    assert spec["template"]["spec"]["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    assert policy["maxRestarts"] > 0
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


def test_it_calls_run_sh_with_settings_that_exist(manifest, monkeypatch):
    container = container_of(manifest)
    assert container["command"] == ["./run.sh"] and container["args"][:2] == ["python", "main.py"]
    monkeypatch.chdir(ROOT)
    config = cli.parse(container["args"][2:])
    assert config.run.dir == "/shared/runs" and config.data.train == "/shared/data/train"
