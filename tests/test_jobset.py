"""jobset.yaml by the schema of JobSet and of all that is in it, as kubeflow_trainer_api has them.

That leaves out fields which it does not know; so what comes back has to be what went in.
"""

import copy

import pytest
import yaml
from kubeflow_trainer_api import models

import multihost
import utils
from conftest import ROOT
from faults import Exit

TEXT = (ROOT / "jobset.yaml").read_text()
FREE = {"annotations", "nodeSelector", "limits"}  # whose keys are anybody's


def wrong(manifest):
    """What is wrong with it, or None."""
    try:
        known = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    except (ValueError, AttributeError) as error:
        return error
    return None if known == manifest else known


def places(value, path=()):
    """(path, key) of all fields."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(value, dict):
            yield path, key
        if isinstance(inner, dict | list) and key not in FREE:
            yield from places(inner, (*path, key))


def inside(manifest, path):
    for key in path:
        manifest = manifest[key]
    return manifest


@pytest.fixture
def manifest():
    return yaml.safe_load(TEXT)


@pytest.mark.parametrize("kind", ["", "#TPU ", "#GPU "])
def test_it_is_what_the_schemas_know(kind):
    manifest = yaml.safe_load(TEXT.replace(kind, ""))
    assert wrong(manifest) is None
    assert len(list(places(manifest))) > 50


def test_a_misspelt_field_is_found_wherever_it_is():
    manifest = yaml.safe_load(TEXT.replace("#TPU ", ""))
    for path, key in places(manifest):
        other = copy.deepcopy(manifest)
        field = inside(other, path)
        field[f"{key}s"] = field.pop(key)
        assert wrong(other) is not None, (path, key)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "maxRestarts"), "many"),
        (("spec", "replicatedJobs", 0, "template", "spec", "completions"), "2"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers"), {}),
    ],
)
def test_a_value_of_another_type_is_found(manifest, path, value):
    inside(manifest, path[:-1])[path[-1]] = value
    assert wrong(manifest) is not None


def test_its_pods_find_each_other_as_the_processes_of_one_job(manifest, monkeypatch):
    [job] = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    env = {one["name"]: one for one in container["env"]}
    index = env.pop("JAX_PROCESS_ID")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    for name, one in env.items():
        monkeypatch.setenv(name, one["value"])
    monkeypatch.setenv("JAX_PROCESS_ID", str(spec["completions"] - 1))
    name = manifest["metadata"]["name"]
    assert manifest["spec"]["network"]["enableDNSHostnames"] and job["replicas"] == 1
    # <jobset>-<replicated job>-<job>-<pod>.<subdomain>, which is the jobset's name
    port = container["ports"][0]["containerPort"]
    first = f"{name}-{job['name']}-0-0.{name}:{port}"
    count = spec["completions"]
    assert multihost.process_info() == (first, count, count - 1, None)
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"


def test_what_has_to_be_fixed_first_fails_all_and_the_rest_starts_again(manifest):
    policy = manifest["spec"]["failurePolicy"]
    assert policy["rules"] == [
        {
            "name": "mendFirst",
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
            "values": [Exit.BUG, Exit.MEND],
        },
    }
    # which Kubernetes asks for beside a podFailurePolicy, and by which one failed pod is enough
    assert spec["template"]["spec"]["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    assert policy["maxRestarts"] > 0
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


def test_it_calls_run_sh_with_settings_that_there_are(manifest, monkeypatch):
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["command"] == ["./run.sh"] and container["args"][:2] == ["python", "main.py"]
    monkeypatch.chdir(ROOT)
    config = utils.parse(container["args"][2:])
    assert config.run.dir == "/shared/runs" and config.data.train == "/shared/data/train"
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in spec["volumes"]}
