"""A run continues, and its checkpoint is evaluated, on another mesh than it was trained on."""

import gzip
import json

import numpy as np
import pytest

import train
import validate
from runtime import jsonl
from tiny_run import arrays, losses, start

# Another order of the blocks in memory as well, and other ranks for every expert.
OTHER_MESH = "--mesh.fsdp 4 --mesh.pipeline 2 --mesh.tensor 1 --mesh.virtual 2"
OTHER_MESH = [*OTHER_MESH.split(), "--train.microbatches", "2"]
ONE_DEVICE = "--mesh.fsdp 1 --mesh.pipeline 1 --mesh.tensor 1 --train.microbatches 1"


def test_a_run_that_moves_between_meshes_has_the_losses_of_one_that_stays(
    data, runs, whole, capsys
):
    profile = "--profile.first_step 1 --profile.steps 1"
    for steps, flags in (("2", profile.split()), ("4", OTHER_MESH), ("6", ONE_DEVICE.split())):
        moved = start(data, runs, "moved", *flags, "--train.steps", steps)
    assert capsys.readouterr().out.count(" with 2 virtual stages on 8 x cpu") == 1
    np.testing.assert_allclose(losses(moved), losses(whole), rtol=0, atol=1e-4)
    for one, other in zip(arrays(moved, 6), arrays(whole, 6), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_profiled_step_leaves_a_trace_with_its_layers_named(runs):
    """Of the run above."""
    [file] = (runs / "moved" / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = " ".join(event["name"] for event in events if "hlo_op" in event.get("args", {}))
    for layer in ("attention", "mlp", "moe", "loss"):
        assert layer in names


def test_another_mesh_gives_the_same_validation_loss(whole, capsys, monkeypatch):
    shapes, make = [], train.make_mesh
    monkeypatch.setattr(train, "make_mesh", lambda c: shapes.append(c.mesh.shape) or make(c))
    capsys.readouterr()
    validate.main(["--run", str(whole), "--json", *OTHER_MESH])
    found = json.loads(capsys.readouterr().out)["loss/val"]
    assert shapes == [(1, 4, 2, 1, 1)]
    last = jsonl.read(whole / "metrics.jsonl")[-1]
    assert last["step"] == 6 and found == pytest.approx(last["loss/val"], abs=1e-5)
