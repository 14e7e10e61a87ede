import argparse
import gzip
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import benchmark
import benchmark_checkpoint
import benchmark_decode
import benchmark_gpu as gpu
import benchmark_tokenize as tokenize
import checkpoint
import chips
import model
import weights
from conftest import ROOT
from planning import cost, timeline

# What a machine with a GPU may lack. rich is not here: flax imports it.
ABSENT = (
    *("tyro", "google.cloud", "google_crc32c", "datasets", "wandb", "orbax", "tensorstore"),
    *("tiktoken", "matplotlib"),
)
ROWS = ("machine", "check", "dense_124m-none", "dense_124m-profile")
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


# --- the whole of it, in toy sizes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(records by row, printed text, folder of logs) of `benchmark.py gpu --toy` on this CPU."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    )
    command = [sys.executable, "benchmark.py", "gpu", *ROWS, "--toy", "--minutes=60"]
    command += [f"--out={folder / 'toy.jsonl'}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "XLA_FLAGS": FAST}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    logs = "\n".join(log.read_text() for log in folder.rglob("*.log"))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    records = gpu.read(folder / "toy.jsonl")
    return {r["row"]: r for r in records}, run.stdout, folder / "toy"


def test_rows_are_measured_where_only_jax_flax_and_optax_are_installed(told):
    records, text, _ = told
    assert tuple(records) == ROWS
    assert all(r["status"] == "ok" for r in records.values()), text


def test_a_blocked_package_is_missed(tmp_path):
    """The fixture's way of taking packages away does so."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['tyro'] = None\n")
    command = [sys.executable, "-c", "import tyro"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode and "tyro" in run.stderr


def test_each_record_says_where_it_is_from(told):
    for record in told[0].values():
        for name in ("chip", "driver", "jax", "jaxlib", "python", "commit", "gpu", "started"):
            assert name in record
        assert record["toy"] is True and record["wall_s"] > 0


def test_a_step_is_the_median_of_eight_after_two_and_all_else_follows_from_it(told):
    found = told[0]["dense_124m-none"]
    config = gpu.config_of("dense_124m-none", toy=True)
    assert len(found["steps_s"]) == len(found["losses"]) == 10
    timed = sorted(found["steps_s"][2:])
    assert found["step_s"] == pytest.approx((timed[3] + timed[4]) / 2)
    tokens = config.train.sequences * config.train.sequence_length
    assert found["tokens_per_s"] == pytest.approx(tokens / found["step_s"])
    assert found["planned_bytes"] == cost.predict(config, None, "cpu").memory_bytes_per_chip
    assert found["compiler_bytes"] > 0 and found["memory_bytes"] > 0 and found["compile_s"] > 0
    # Of this CPU no peak is known, so that there is no MFU.
    assert found["mfu"] is None and found["mfu_whole_square"] is None


def test_the_check_tells_the_error_of_each_weight(told):
    found = told[0]["check"]
    assert found["float32_loss_error"] == 0  # the same device, in this test
    errors = found["bfloat16_gradient_errors"]
    assert "blocks.moe.moe.experts.gate" in errors and "first.embedding" in errors
    assert 1e-4 < max(errors.values()) < 0.1


def test_shares_of_layers_sum_to_one(told):
    found = told[0]["dense_124m-profile"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["busy_s"] > 0
    for place in ("attention forward", "attention backward", "mlp backward", "loss backward"):
        assert found["shares"][place] > 0.001
    assert found["shares"].get("other", 0) < 0.05
    for place, kernels in found["kernels"].items():
        assert 0 < sum(kernels.values()) <= found["shares"][place] + 1e-9


def test_the_trace_is_kept_with_names_of_layers(told):
    [file] = (told[2] / "dense_124m-profile").rglob("perfetto_trace.json.gz")
    trace = timeline.read(file)
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert any(name.startswith("steady/attention ") for name in names)


def test_without_a_gpu_real_sizes_are_refused_with_the_mend():
    device = benchmark.jax.devices()[0]
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*--toy"):
        gpu.accelerator(toy=False)
    assert gpu.accelerator(toy=True) == device


# --- rows that fail, time, and memory of rows -----------------------------------------------------


def fake(ends):
    """A stand-in for run_row, and the list of rows that it was called with."""
    called = []

    def run(row, toy, folder, limit_s):
        called.append(row)
        return {"text": "fine", "error": "broken", "status": ends.get(row, "ok")}

    return run, called


def flags(tmp_path, *names, **given):
    parsed = gpu.parse([*names, f"--out={tmp_path / 'x' / 'gpu.jsonl'}"])
    return argparse.Namespace(**vars(parsed) | {"minutes": 1e6} | given)


def test_a_row_whose_process_fails_is_told_with_its_error(tmp_path):
    found = gpu.run_row("no_such-none", True, tmp_path, 300)
    assert found["status"] == "failed" and "there is no row no_such-none" in found["error"]


def test_a_failed_row_does_not_end_the_rest(tmp_path, capsys):
    run, called = fake({"dense_124m-none": "failed", "dense_1b-none": "memory"})
    assert gpu.session(flags(tmp_path), run) == []
    assert called == list(gpu.ROWS)
    text = capsys.readouterr().out
    assert "failed: broken" in text and "out of memory" in text


@pytest.mark.parametrize("gate", gpu.GATES)
def test_a_failed_check_ends_the_rest_unless_forced(tmp_path, gate):
    run, called = fake({gate: "failed"})
    with pytest.raises(ValueError, match=f"row {gate} did not pass.*--force"):
        gpu.session(flags(tmp_path), run)
    assert called[-1] == gate
    gpu.session(flags(tmp_path, "dense_1b-full", force=True), run)
    assert called[-1] == "dense_1b-full"


def test_finished_rows_are_not_run_again_and_failed_ones_are(tmp_path, capsys):
    run, called = fake({"dense_1b-none": "memory", "dense_1b-full": "failed"})
    names = ("dense_124m-none", "dense_1b-none", "dense_1b-full")
    gpu.session(flags(tmp_path, *names), run)
    called.clear(), capsys.readouterr()
    gpu.session(flags(tmp_path, *names), run)
    assert called == ["dense_1b-full"]
    assert capsys.readouterr().out.count("fine") == 3  # machine, check and a row, as they were
    gpu.session(flags(tmp_path, *names, again=True), run)
    assert called[1:] == ["machine", "check", *names]


def test_rows_of_another_gpu_do_not_count_as_finished(tmp_path, monkeypatch):
    run, called = fake({})
    gpu.session(flags(tmp_path, "dense_124m-none"), run)
    monkeypatch.setattr(gpu, "smi", lambda *fields: {"name": "NVIDIA H200"})
    gpu.session(flags(tmp_path, "dense_124m-none"), run)
    assert called == ["machine", "check", "dense_124m-none"] * 2


def test_in_no_time_nothing_starts_and_the_command_to_go_on_is_printed(tmp_path, capsys):
    arguments = ["--minutes", "0", "--out", str(tmp_path / "gpu.jsonl"), "--again", "dense_1b-full"]
    gpu.main(arguments)
    text = capsys.readouterr().out
    assert "left, for want of time: machine check dense_1b-full" in text
    assert f"python benchmark.py gpu --minutes 0 --out {tmp_path}/gpu.jsonl dense_1b-full\n" in text
    assert not (tmp_path / "gpu.jsonl").exists()


def test_a_row_that_was_stopped_is_left_and_starts_anew(tmp_path):
    run, called = fake({"check": "time"})
    assert gpu.session(flags(tmp_path, "dense_1b-full"), run) == ["check", "dense_1b-full"]
    assert called == ["machine", "check"]
    run, called = fake({})
    assert gpu.session(flags(tmp_path, "dense_1b-full"), run) == []
    assert called == ["check", "dense_1b-full"]


def test_a_row_is_stopped_in_time(tmp_path):
    start = time.monotonic()
    found = gpu.run_row("machine", True, tmp_path, 0.2)
    assert found == {"status": "time", "error": "stopped after 0 s"}
    assert time.monotonic() - start < 5


def test_how_a_row_ended_is_told_from_its_exit_code_and_log():
    assert gpu.ending(0, "", 9) == {"status": "ok"}
    full = (
        "Traceback\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\nFor simplicity"
    )
    assert gpu.ending(1, full, 9)["status"] == "memory"
    autotuned = "W RESOURCE_EXHAUSTED while autotuning\nerror: the loss is not finite"
    found = gpu.ending(2, autotuned, 9)
    assert found == {"status": "failed", "error": "exit code 2: error: the loss is not finite"}
    assert gpu.ending(-11, "Fatal", 9)["error"] == "SIGSEGV: Fatal"
    assert gpu.ending(-6, "", 9)["error"] == "SIGABRT: nothing in its log"


def test_out_of_memory_is_told_beside_the_plan(capsys):
    gpu.show({"row": "x", "status": "memory", "planned_bytes": 85 * 2**30, "error": "much"})
    assert "out of memory: the plan said it needs 85.0 GiB. much" in capsys.readouterr().out


def test_a_record_that_was_cut_off_is_not_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"row": "a"}\n{"row": "b"}\n{"ro')
    assert [r["row"] for r in gpu.read(tmp_path / "a.jsonl")] == ["a", "b"]


def test_an_unknown_row_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"no row dense_1b_full\. Use some of machine, .*dense_1b-full"
    ):
        gpu.parse(["dense_1b_full"])
    assert gpu.parse([]).names == gpu.ROWS


# --- rows and their sizes -------------------------------------------------------------------------


def test_the_row_of_each_model_that_should_be_fastest_comes_first():
    assert gpu.ROWS[:2] == gpu.GATES and len(set(gpu.ROWS)) == len(gpu.ROWS) == 18
    assert gpu.ROWS[2:6] == tuple(f"{name}-none" for name in gpu.MODELS)


def test_every_row_fits_one_gpu_of_80_gb_by_the_plan():
    for row in gpu.ROWS[2:]:
        found = cost.predict(gpu.config_of(row, toy=False), chips.CHIPS["h100"])
        assert found.memory_bytes_per_chip < 0.9 * 0.92 * chips.CHIPS["h100"].memory_bytes, row


def test_the_experts_of_124m_are_as_many_active_parameters_as_the_dense_model():
    dense, experts = (
        weights.count(model.declare(gpu.config_of(f"{name}_124m-full", toy=False)))
        for name in ("dense", "moe")
    )
    assert experts[1] == pytest.approx(dense[1], rel=0.005) and experts[0] > 1.7 * dense[0]


def test_the_whole_square_of_attention_counts_its_half_twice():
    config = gpu.config_of("dense_1b-none", toy=False)
    m, T = config.model, config.train.sequence_length
    half = 3 * m.layers * m.heads * T * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim)
    assert gpu.flops_per_token(config, square=True) - gpu.flops_per_token(config) == pytest.approx(
        half
    )


# --- the check ------------------------------------------------------------------------------------


def test_one_wrong_gradient_of_many_is_seen():
    expected = {"large": 1e6 * gpu.np.ones(5), "small": gpu.np.ones(5), "bias": gpu.np.zeros(5)}
    errors = gpu.gradient_errors(expected | {"small": 1.5 * gpu.np.ones(5)}, expected)
    assert errors == {"large": 0, "small": 0.5, "bias": 0}
    with pytest.raises(ValueError, match=r"small.*allowed"):
        gpu.compared("bfloat16", 0.0, errors)
    assert gpu.gradient_errors(expected | {"bias": expected["small"]}, expected)["bias"] == math.inf


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 0.0), (0.0, math.nan), (0.5, 0.0)])
def test_numbers_that_are_none_do_not_pass_the_check(loss, gradient):
    with pytest.raises(ValueError, match="does not compute what the CPU does"):
        gpu.compared("bfloat16", loss, {"a": 0.0, "b": gradient})


# --- nvidia-smi -----------------------------------------------------------------------------------


def test_clocks_and_power_are_medians_of_what_nvidia_smi_says_meanwhile(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    seen = tmp_path / "seen"  # the first time it reads another clock
    program.write_text(
        f"#!/bin/sh\n[ -e {seen} ] && mhz=1980 || mhz=1000\n: > {seen}\n"
        'echo "$mhz, 2619, 690.5, [N/A], 7000"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu.watched() as found:
        time.sleep(2)
    assert found == {
        "clocks.sm": 1980,
        "clocks.mem": 2619,
        "power.draw": 690.5,
        "memory.used": 7000,
    }


def test_without_nvidia_smi_nothing_is_read(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with gpu.watched() as found:
        pass
    assert found == {} == gpu.smi("name")


# --- time by layer --------------------------------------------------------------------------------


def test_places_are_read_from_scopes():
    steady = "jit(step)/steady/while/body/closed_call/while/body/closed_call"
    for path, expected in {
        f"{steady}/jvp(attention)/bnTS,bSnW->bTnW/dot_general": "attention forward",
        f"{steady}/transpose(jvp(jvp()))/checkpoint/moe/experts/ECD,EDG->ECG/dot_general": (
            "moe/experts backward"
        ),
        f"{steady}/transpose(jvp(jvp()))/checkpoint/rematted_computation/mlp/silu": "mlp again",
        f"{steady}/attention/transpose": "attention forward",
        f"{steady}/dynamic_slice": "between layers",
        "jit(step)/steady/while/body/closed_call/last/cond/branch_1_fun/add": "loss forward",
        "jit(step)/steady/while/body/first_backward/cond/branch_1_fun/add": "embedding backward",
        "jit(step)/mul": "update",
        "": "update",
    }.items():
        assert timeline.place(path) == expected, path


PROGRAM = """HloModule jit_step

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %loop_add_fusion.1 = f32[8]{0} add(%a, %a), metadata={op_name="jit(step)/steady/jvp(mlp)/add"}
  %call.2 = f32[8]{0} call(%a), to_apply=%x, metadata={op_name="jit(step)/steady/jvp(mlp)/call"}
  ROOT %mul.3 = f32[8]{0} multiply(%a, %a), metadata={op_name="jit(step)/mul"}
}
"""


def trace_of(path: Path, lines, events) -> Path:
    """A trace of (name, process, thread, seconds, hlo_op)."""
    found = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
    ]
    for tid, name in lines.items():
        found.append(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        )
    for name, pid, tid, seconds, op in events:
        args = {"args": {"hlo_op": op}} if op else {}
        found.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": 1e6 * seconds} | args)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": found}).encode()))
    return path


def test_a_gpus_kernels_count_once_and_by_name_where_they_have_no_operation(tmp_path):
    file = trace_of(
        tmp_path / "perfetto_trace.json.gz",
        {7: "Stream #7(Compute)", 8: "XLA Ops"},
        [
            ("loop_add_fusion_1", 1, 7, 3, None),  # in a CUDA graph: the kernel's name alone
            ("nvjet_tst", 1, 7, 4, "mul.3"),
            ("loop_add_fusion_1", 1, 7, 1, "call.2"),
            ("MemcpyD2D", 1, 7, 2, None),
            ("loop_add_fusion.1", 1, 8, 3, "loop_add_fusion.1"),  # sums up the stream
            ("launch", 2, 7, 100, "mul.3"),  # the host's
        ],
    )
    taken = timeline.operation_s(file, PROGRAM)
    assert timeline.shares(taken) == {"mlp forward": 0.4, "update": 0.4, "other": 0.2}
    assert timeline.largest(taken)["mlp forward"] == {"loop_add_fusion.1": 0.4}


def test_a_trace_of_another_program_is_refused(tmp_path):
    file = trace_of(tmp_path / "t.json.gz", {7: "Stream #7"}, [("nothing", 1, 7, 1, "known.9")])
    with pytest.raises(ValueError, match="no operation of the program"):
        timeline.operation_s(file, PROGRAM)


# --- benchmark.py reference -----------------------------------------------------------------------


def test_our_rate_is_told_beside_the_machines(monkeypatch):
    text = benchmark.share_of_machine(50e9, 100e9)
    assert "50.0 GFLOP/s, 50% of a 2048 x 2048 x 2048 float32 product's 100.0" in text
    ticks = iter([0.0, 9.0, *(t for i in range(3) for t in (10.0 * i, 10.0 * i + i + 1))])
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(ticks))
    rate = benchmark.product_flops_per_s(64, benchmark.jnp.float32, in_row=2, timed=3)
    assert rate == pytest.approx(2 * 64**3 / (2 / 2))  # the median of 1, 2, 3 seconds for two


# --- benchmark.py decode --------------------------------------------------------------------------


SIZES = {"blocks": 2, "width": 32, "vocabulary": 256, "hidden": 64, "expert_hidden": 16}


def test_writing_is_timed_near_and_far_with_little_room_and_much(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as without transformers
    configs = {
        "dense": benchmark_decode.decoding_config(0, **SIZES),
        "moe": benchmark_decode.decoding_config(64, **SIZES),
    }
    benchmark_decode.compare(configs, batches=(2,), rooms=(256, 512), near=3, far=300)
    told = capsys.readouterr().out
    rows = [line.split() for line in told.splitlines() if line.split()[1:2] in (["dense"], ["moe"])]
    assert len(rows) == 2 and "behind 300 over behind 3; room for 512 over room for 256" in told
    numbers = [[float(cell) for cell in row if cell.replace(".", "").isdigit()] for row in rows]
    for texts, tokens_per_s, ms, *rest in numbers:
        assert texts == 2 and tokens_per_s * ms / 1e3 == pytest.approx(2, rel=0.1)
        assert len(rest) == 3 and min(rest[:2]) > 0
    assert "transformers is not installed" in told and "-r requirements-hf.txt" in told


@pytest.mark.huggingface
@pytest.mark.filterwarnings("ignore")
def test_transformers_writes_the_same_texts_from_the_exported_folder():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    prompts = [[5, 9, 200, 31], [7, 1, 4, 90]]
    for experts in (0, 64):
        config = benchmark_decode.decoding_config(experts, **SIZES)
        theirs, ours = benchmark_decode.Theirs(config), benchmark_decode.Decoding(config, 2, 256)
        ids = theirs.torch.tensor(prompts)
        written = theirs.model.generate(ids, max_new_tokens=6, do_sample=False)[:, 4:]
        ours.writer.start(range(2), 0)
        own = np.array([*ours.writer.write(ours.weights, prompts, 6)]).T
        assert own.tolist() == written.tolist()
        assert "DeepseekV3ForCausalLM" in theirs.what
        for writer in (ours, theirs):
            assert len(writer.write(prompts, 6)) == 5 and min(writer.write(prompts, 3)) > 0


def test_a_token_needs_the_weights_of_its_own_experts():
    config = benchmark_decode.decoding_config(64, blocks=1, vocabulary=256)
    one, two = (benchmark_decode.Decoding(config, texts, 256).bytes_read(0) for texts in (1, 2))
    assert two - one == 4 * 8 * 3 * 768 * 256  # 8 experts of three matrices more, in float32
    cached = benchmark_decode.Decoding(config, 2, 256).bytes_read(10) - two
    assert cached == 4 * 10 * 2 * (256 + 32)


# --- benchmark.py checkpoint ----------------------------------------------------------------------


def test_as_many_steps_run_with_a_save_as_without_and_what_is_saved_is_whole(tmp_path, monkeypatch):
    def counts(state, batch):
        return state.replace(step=state.step + 1), {}

    # What a step computes is no matter here, and takes long to compile.
    step = benchmark.jax.jit(counts, donate_argnums=0)
    monkeypatch.setattr(benchmark.train, "jitted_step", lambda *_: step)
    one = ["--mesh.fsdp", "1", "--mesh.pipeline", "1", "--mesh.tensor", "1", "--mesh.virtual", "1"]
    small = ["--model.blocks", "1", "--model.moe_layers", "0", "--model.vocabulary", "256"]
    small += ["--train.sequence_length", "32", "--interval_s", "0.05", "--rounds", "2"]
    flags, config = benchmark_checkpoint.parse([*one, *small])
    training = benchmark_checkpoint.Training(config, tmp_path)
    stretches = list(training.stretches(flags.interval_s, flags.rounds))
    training.saved.close()
    assert [s.saved for s in stretches] == [False, True, True, False]
    [steps] = {s.steps for s in stretches}
    first = training.done - 4 * steps  # step after which the first of them began

    saved = checkpoint.Checkpoints(tmp_path)
    assert saved.latest() == first + 2 * steps  # its files are as they were written
    for step in (first + steps, first + 2 * steps):
        state = saved.restore(step, checkpoint.stored_shapes(training.shapes))
        assert int(state.step) == step
    saved.close()

    told = list(benchmark_checkpoint.lines(training, stretches))
    assert told[0].endswith(
        "on 1 x cpu, mesh (fsdp, pipeline, tensor) = (1, 1, 1); 8 x 32 tokens per step"
    )
    names = ["between saves", "without a save", "with a save", "ratio", "ratio of CPU"]
    names += ["in save()", "on disk after", "waited for", "checkpoint"]
    assert [line[:16].strip() for line in told[1:-1]] == names
    for s in stretches:
        assert s.seconds >= s.call_s + s.wait_s and (s.write_s > 0) == s.saved


def test_a_ratio_is_of_the_two_of_a_round():
    def stretch(saved, seconds):
        return benchmark_checkpoint.Stretch(saved, 3, seconds, 2 * seconds + 1)

    turns = [stretch(False, 2.0), stretch(True, 3.0), stretch(True, 5.0), stretch(False, 4.0)]
    assert benchmark_checkpoint.ratios(turns) == [1.5, 1.25]
    assert benchmark_checkpoint.ratios(turns, "cpu_s") == [7 / 5, 11 / 9]
    assert benchmark.spread([1.5, 1.25, 9.0], 3) == "1.500 (1.250 to 9.000)"


def test_a_large_model_is_saved_less_often_and_has_a_batch_for_a_cpu():
    flags, config = benchmark_checkpoint.parse([])
    assert (flags.interval_s, flags.rounds, config.run.name) == (30, 5, "tiny")
    large = ["--config", str(ROOT / "configs/dense_124m.toml")]
    flags, config = benchmark_checkpoint.parse([*large, "--train.sequences", "2", "--rounds", "1"])
    assert (flags.interval_s, flags.rounds, config.run.name) == (120, 1, "dense_124m")
    assert (config.train.sequences, config.train.sequence_length) == (2, 256)
    with pytest.raises(ValueError, match=r"--rounds -1 leaves nothing.*--rounds 3"):
        benchmark_checkpoint.parse([*large, "--rounds", "-1"])
    with pytest.raises(ValueError, match=r"unknown flag --round: did you mean --rounds"):
        benchmark_checkpoint.parse(["--round", "1"])


# --- benchmark.py tokenize ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """(whole, part): 40 texts as JSON lines, and the first of them."""
    out, folder = tmp_path_factory.mktemp("lines"), tmp_path_factory.mktemp("texts")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"def f{number}():\n    return 'é 漢字'\n" * 50)
    (folder / "03.txt").write_text("")
    size = (folder / "00.txt").stat().st_size
    whole, part = out / "whole.jsonl", out / "part.jsonl"
    flags = tokenize.Flags(source=str(folder), mb=40 * size / 1e6)
    documents, found = tokenize.write_text(flags, whole, part)
    assert documents == 40 and 40 * size <= found < 41 * size
    return whole, part


def test_a_part_of_the_text_is_its_beginning(lines):
    whole, part = (file.read_text().splitlines() for file in lines)
    assert len(whole) == 40 and part == whole[:5]
    assert json.loads(whole[3])["text"].startswith("def f4()")  # an empty document is none


def test_without_a_source_the_packages_follow_the_standard_library():
    found = tokenize.texts("")
    library = [*tokenize.texts(tokenize.STDLIB)]
    assert [next(found) for _ in library] == library
    path = min(Path(np.__file__).parents[1].rglob("*.py"))
    assert next(found) == path.read_text()


def test_both_ways_of_tiktoken_are_given_all_text_in_batches_as_large_as_the_preparations(
    lines, monkeypatch
):
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 5000)
    batches = tokenize.batches.__wrapped__(lines[0])
    texts = [json.loads(line)["text"] for line in lines[0].read_text().splitlines()]
    assert [*itertools.chain(*batches)] == texts and len(batches) > 5
    assert all(sum(map(len, batch)) >= 5000 > sum(map(len, batch[:-1])) for batch in batches[:-1])
    encoding = tokenize.load_tokenizer("sample")
    for way in tokenize.WAYS.values():
        assert [*way(encoding, texts)] == [encoding.encode_ordinary(text) for text in texts]


def test_the_preparation_that_is_timed_makes_every_token_and_is_removed(lines):
    whole = lines[0]
    texts = [json.loads(line)["text"] for line in whole.read_text().splitlines()]
    expected = sum(map(len, map(tokenize.load_tokenizer("sample").encode_ordinary, texts)))
    before = sorted(whole.parent.iterdir())
    taken = tokenize.prepared("sample", whole, 2)
    assert taken.tokens == expected and taken.seconds > 0 and taken.cpu_s > 0
    assert sorted(whole.parent.iterdir()) == before


def test_what_a_preparation_takes_to_start_is_no_part_of_its_speed():
    part, whole = tokenize.Taken(100, 3.0, 4.0), tokenize.Taken(900, 7.0, 6.0)
    assert tokenize.steady(part, whole) == tokenize.Speed(200, 400, start_s=2.5)
    with pytest.raises(ValueError, match=r"preparing 100 tokens took no longer.*--mb 48"):
        tokenize.steady(whole, part)


def test_rounds_are_in_turns_and_their_ratios_of_one_round(lines, monkeypatch):
    called = []

    def prepared(tokenizer, file, workers):
        called.append((file, workers))
        return tokenize.Taken(100, 1.0, 1.0) if file == lines[1] else tokenize.Taken(300, 2.0, 3.0)

    monkeypatch.setattr(tokenize, "prepared", prepared)
    with ThreadPoolExecutor(
        2, initializer=tokenize.will_wait, initargs=(threading.Barrier(2),)
    ) as pool:
        rounds = [*tokenize.Measured("sample", *lines, pool).rounds(2)]
    small, large = lines[1], lines[0]
    assert called == [(small, 2), *((f, n) for n in (1, 2, 2, 1) for f in (small, large))]
    for found in rounds:
        assert [*found.speeds] == [(w, n) for w in (*tokenize.WAYS, tokenize.OURS) for n in (1, 2)]
        assert found.speeds[tokenize.OURS, 1] == tokenize.Speed(200, 100, 0.5)
        theirs = found.speeds["encode_ordinary", 2]
        assert found.ratio("encode_ordinary", 2) == pytest.approx(200 / theirs.per_s)
        assert found.ratio("encode_ordinary", 2, "per_cpu_s") == pytest.approx(
            100 / theirs.per_cpu_s
        )
    columns = [[*column.cells] for column in tokenize.table(rounds).columns]
    assert columns[0] == ["1"] * 3 + ["2"] * 3 and columns[1] == [*tokenize.WAYS, tokenize.OURS] * 2
    assert [bool(cell) for cell in columns[3]] == [True, True, False] * 2
    assert tokenize.start(rounds, 2) == "0.50 (0.50 to 0.50)"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--mb", "0"], "--mb 0.0 leaves nothing to measure. Use --mb 48"),
        (["--rounds", "-1"], "--rounds -1 leaves nothing to measure. Use --rounds 5"),
    ],
)
def test_nothing_to_measure_is_refused(flags, told):
    with pytest.raises(ValueError, match=told):
        tokenize.parse(flags)
    assert tokenize.parse([]) == tokenize.Flags()


def test_only_tiktokens_tokenizers_are_measured(monkeypatch):
    monkeypatch.setattr(tokenize, "load_tokenizer", lambda name: object())
    with pytest.raises(ValueError, match=r"--tokenizer a/b is none of tiktoken's.*Use --tokenizer"):
        tokenize.parse(["--tokenizer", "a/b"])
