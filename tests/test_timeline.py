import gzip
import json
from pathlib import Path

import pytest

from planning import timeline

PROGRAM = """HloModule jit_step

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %loop_add_fusion.1 = f32[8]{0} add(%a, %a), metadata={op_name="jit(step)/steady/jvp(mlp)/add"}
  %call.2 = f32[8]{0} call(%a), to_apply=%x, metadata={op_name="jit(step)/steady/jvp(mlp)/call"}
  ROOT %mul.3 = f32[8]{0} multiply(%a, %a), metadata={op_name="jit(step)/mul"}
}
"""


def trace_of(path: Path, lines, events) -> Path:
    """Write a trace of events (name, process, thread, seconds, hlo_op)."""
    found = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
    ]
    thread = {"ph": "M", "name": "thread_name", "pid": 1}
    found += [thread | {"tid": tid, "args": {"name": name}} for tid, name in lines.items()]
    for name, pid, tid, seconds, op in events:
        args = {"args": {"hlo_op": op}} if op else {}
        found.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": 1e6 * seconds} | args)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": found}).encode()))
    return path


def test_kernels_of_a_gpu_count_once_and_by_name_if_they_have_no_operation(tmp_path):
    file = trace_of(
        tmp_path / "perfetto_trace.json.gz",
        {7: "Stream #7(Compute)", 8: "XLA Ops"},
        [
            ("loop_add_fusion_1", 1, 7, 3, None),  # in a CUDA graph: only the name of the kernel
            ("nvjet_tst", 1, 7, 4, "mul.3"),
            ("loop_add_fusion_1", 1, 7, 1, "call.2"),
            ("MemcpyD2D", 1, 7, 2, None),
            ("loop_add_fusion.1", 1, 8, 3, "loop_add_fusion.1"),  # repeats the stream
            ("launch", 2, 7, 100, "mul.3"),  # of the host
        ],
    )
    taken = timeline.name_layers(file, PROGRAM)
    shares = {"mlp forward": {"loop_add_fusion.1": 0.4}, "update": {"mul.3": 0.4}}
    assert timeline.shares(taken) == shares | {"other": {"MemcpyD2D": 0.2}}
    file = trace_of(tmp_path / "t.json.gz", {7: "Stream #7"}, [("nothing", 1, 7, 1, "known.9")])
    with pytest.raises(ValueError, match="no operation of the program"):
        timeline.name_layers(file, PROGRAM)


def test_named_scopes_give_layer_part_and_direction():
    loop = "jit(step)/steady/while/body/closed_call"
    backward = f"{loop}/while/body/closed_call/transpose(jvp(jvp()))/checkpoint"
    layers = {
        f"{loop}/while/body/jvp(attention)/bnTS,bSnW->bTnW/dot_general": "attention forward",
        f"{loop}/while/body/closed_call/attention/transpose": "attention forward",
        f"{backward}/moe/experts/ECD,EDG->ECG/dot_general": "moe/experts backward",
        f"{loop}/dynamic_slice": "between layers",
        f"{loop}/last/cond/branch_1_fun/add": "loss forward",
        "jit(step)/steady/while/body/first_backward/cond/branch_1_fun/add": "embedding backward",
        "jit(step)/mul": "update",
        f"{backward}/rematted_computation/mlp/silu": "mlp recomputed",
        f"{loop}/weight_gradients/while/body/rematted_computation/mlp/io,bo->ib": "mlp backward",
    }
    assert {path: timeline.layer_of(path) for path in layers} == layers
