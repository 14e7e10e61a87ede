"""launch/jobset.yaml against the schemas of JobSet, Job and pods in kubeflow_trainer_api.

The package drops fields that it does not know, so a valid manifest comes back unchanged.
"""

import copy

import pytest
import yaml
from kubeflow_trainer_api import models

from conftest import ROOT
from runtime import cli, distributed
from runtime.errors import Exit

TEXT = (ROOT / "launch" / "jobset.yaml").read_text()
FREE = {"annotations", "nodeSelector", "limits"}  # with any keys


def rejected(manifest):
    """Return what the schemas reject, or None."""
    try:
        known = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    except (ValueError, AttributeError) as error:
        return error
    return None if known == manifest else known


def fields(value, path=()):
    """Yield (path, key) of all fields."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(value, dict):
            yield path, key
        if isinstance(inner, dict | list) and key not in FREE:
            yield from fields(inner, (*path, key))


def inside(manifest, path):
    for key in path:
        manifest = manifest[key]
    return manifest


@pytest.fixture
def manifest():
    return yaml.safe_load(TEXT)


@pytest.mark.parametrize("kind", ["", "#TPU ", "#GPU "])
def test_the_manifest_is_valid(kind):
    manifest = yaml.safe_load(TEXT.replace(kind, ""))
    assert rejected(manifest) is None
    assert len(list(fields(manifest))) > 50


def test_any_misspelt_field_is_found():
    manifest = yaml.safe_load(TEXT.replace("#TPU ", ""))
    for path, key in fields(manifest):
        other = copy.deepcopy(manifest)
        field = inside(other, path)
        field[f"{key}s"] = field.pop(key)
        assert rejected(other) is not None, (path, key)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "maxRestarts"), "many"),
        (("spec", "replicatedJobs", 0, "template", "spec", "completions"), "2"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers"), {}),
    ],
)
def test_a_value_of_a_wrong_type_is_found(manifest, path, value):
    inside(manifest, path[:-1])[path[-1]] = value
    assert rejected(manifest) is not None


def test_the_pods_find_each_other_as_processes_of_one_job(manifest, monkeypatch):
    [job] = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    env = {one["name"]: one for one in container["env"]}
    index = env.pop("JAX_PROCESS_ID")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    owner = env.pop("RUN_OWNER")["valueFrom"]["fieldRef"]["fieldPath"]
    assert (
        owner == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    )  # the same in all pods and after a restart
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
    assert policy["rules"] == [
        {
            "name": "fixFirst",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = spec["podFailurePolicy"]["rules"]
    [container] = spec["template"]["spec"]["containers"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": container["name"],
            "operator": "In",
            "values": [Exit.BUG, Exit.CONFIG],
        },
    }
    # A podFailurePolicy requires the first; with the second, one failed pod fails the job.
    assert spec["template"]["spec"]["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    assert policy["maxRestarts"] > 0
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


def test_it_calls_run_sh_with_settings_that_exist(manifest, monkeypatch):
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["command"] == ["./run.sh"] and container["args"][:2] == ["python", "main.py"]
    monkeypatch.chdir(ROOT)
    config = cli.parse(container["args"][2:])
    assert config.run.dir == "/shared/runs" and config.data.train == "/shared/data/train"
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in spec["volumes"]}
