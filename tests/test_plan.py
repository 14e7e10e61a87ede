import json
import os
import re
import subprocess
import sys

import pytest

import hardware
import make_compiled
import plan
from conftest import ROOT
from planning import cost, report, results, search, targets

JAXFORMER = ["--config", str(ROOT / "configs" / "jaxformer_1b.toml")]
SMALL = [
    *(
        "--model.hidden_size=32",
        "--model.num_hidden_layers=2",
        "--model.num_attention_heads=2",
        "--model.kv_lora_rank=16",
    ),
    *(
        "--model.intermediate_size=64",
        "--model.n_routed_experts=0",
        "--model.decoder_sparse_step=1",
        "--model.qk_nope_head_dim=16",
    ),
    *("--model.qk_rope_head_dim=8", "--model.v_head_dim=16", "--train.seq_len=32"),
    "--model.compute_dtype=float32",
]
LARGE = ["--chip=v5e", "--chips=8", "--model.hidden_size=8192", "--model.num_hidden_layers=384"]
SHARED = {
    "memory_bytes_per_chip",
    "flops_per_chip",
    "model_flops_per_chip",
    "collective_bytes_per_chip",
}


def planned(capsys, *flags):
    plan.main([*flags, "--json"])
    return json.loads(capsys.readouterr().out)


SEARCH = ["--chips", "32", "--search"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "flags", "found"),
    [
        ("jaxformer_1b", [], "predicted"),
        pytest.param("dense_124m", SEARCH, "search", marks=pytest.mark.long),
        pytest.param("jaxformer_1b", SEARCH, "search", marks=pytest.mark.long),
    ],
)
def test_a_plan_starts_no_device(config, flags, found):
    """A platform that does not exist is an error when jax looks for devices."""
    environment = os.environ | {"JAX_PLATFORMS": "none_such"}
    flags = ["--config", str(ROOT / "configs" / f"{config}.toml"), "--chip", "v4", *flags, "--json"]
    command = [sys.executable, str(ROOT / "plan.py"), *flags]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(json.loads(run.stdout)[found]) > 5


def test_json_has_the_figures_of_the_tables(capsys):
    found = planned(capsys, *JAXFORMER, "--chip", "v4")
    predicted = found["predicted"]
    _, config = make_compiled.config_of("jaxformer")
    expected = cost.predict(config, hardware.CHIPS["v4"])
    assert set(predicted) >= SHARED | {"memory", "flops", "traffic", "seconds", "bound_by", "mfu"}
    for name in SHARED:
        assert predicted[name] == getattr(expected, name)
    assert predicted["step_s"] == expected.step_s and found["fits"] is True
    assert found["flags"]["mesh.fsdp"] == 8 and found["chips"] == 32
    assert "compiled" not in found and "search" not in found


def test_tables_show_every_part(capsys):
    plan.main([*JAXFORMER, "--chip", "v4", "--tokens", "6.5e9"])
    text = capsys.readouterr().out
    for words in (
        "973,788,032 parameters",
        "saved activations",
        "attention scores",
        "moe dispatch, backward",
        "the links along fsdp+tensor",
        "hours to 6.5e+09 tokens",
        "Bound by memory",
        "fits: ",
    ):
        assert words in text, words


def test_the_range_of_measured_steps_stands_beside_a_planned_mfu(capsys):
    words = [*JAXFORMER, "--mesh.fsdp", "8", "--mesh.pipeline", "1", "--mesh.tensor", "1"]
    plan.main([*words, "--chip", "h100"])
    text = " ".join(capsys.readouterr().out.split())
    best = float(re.search(r"at best: .*? MFU ([\d.]+)%", text)[1])
    low, high = map(float, re.search(r"models took: MFU ([\d.]+)% to ([\d.]+)%", text).groups())
    assert low == pytest.approx(best / 2.3, abs=0.1) and high == pytest.approx(best / 1.7, abs=0.1)
    plan.main([*words, "--chip", "v4"])
    assert "models took" not in capsys.readouterr().out


def test_a_number_of_chips_without_a_slice_is_reported(capsys):
    sizes = ["--mesh.fsdp=1", "--mesh.pipeline=3", "--mesh.tensor=1", "--model.num_hidden_layers=3"]
    plan.main([*SMALL, *sizes, "--model.vocab_size=768"])
    assert "No usual slice of v4 has 3 chips" in capsys.readouterr().out


@pytest.mark.long
def test_another_number_of_chips_searches_for_the_best_mesh(capsys):
    found = planned(capsys, *JAXFORMER, "--chip", "v5e", "--chips", "16")
    flags = found["flags"]
    assert flags["mesh.fsdp"] * flags["mesh.pipeline"] * flags["mesh.tensor"] == 16
    assert found["search"][0]["flags"] == flags
    again = [word for flag in flags for word in (f"--{flag}", str(flags[flag]))]
    same = planned(capsys, *JAXFORMER, "--chip", "v5e", *again)
    assert same["predicted"] == found["predicted"]


@pytest.mark.long
def test_sizes_that_only_the_mesh_of_the_file_forbids_are_accepted(capsys):
    """32 sequences are too few for 8 microbatches on 8 fsdp ranks, which 4 chips do not have."""
    found = planned(capsys, *JAXFORMER, "--chips", "4", "--train.global_batch_size", "32")
    assert found["chips"] == 4


def test_a_step_that_does_not_fit_names_the_flag_that_finds_what_fits(capsys):
    one = ["--mesh.fsdp=1", "--mesh.pipeline=1", "--mesh.tensor=1", "--train.remat=none"]
    plan.main([*JAXFORMER, "--chip", "v5e", *one])
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit: 49.80 GiB more" in text and "--search finds what fits" in text


@pytest.mark.slow
def test_a_compiled_plan_has_ratios_to_its_prediction(capsys, tmp_path):
    flags = [*SMALL, "--chip", "cpu", "--compile"]
    files = {name: tmp_path / f"step.{name}" for name in ("hlo", "png")}
    kept = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    found = planned(capsys, *flags, *kept)
    assert set(found["compiled"]) >= SHARED | {"compile_s"}
    assert found["compile_s"] == found["compiled"]["compile_s"] > 0
    assert found["fits"] is None
    assert abs(found["ratios"]["FLOPs"] - 1) < 0.05
    assert abs(found["ratios"]["tensor"] - 1) < 0.1
    assert files["hlo"].read_text().startswith("HloModule")
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_the_tables_of_a_compiled_step_show_the_ratio(capsys, monkeypatch):
    row = make_compiled.recorded()["jaxformer v4"]
    monkeypatch.setattr(plan, "build", lambda *_: results.Compiled(**row))
    monkeypatch.setattr(targets, "check", lambda _: None)  # as if libtpu were here
    plan.main([*JAXFORMER, "--chip", "v4", "--compile"])
    text = capsys.readouterr().out
    assert "ratio" in text and "collectives along fsdp+tensor, GB" in text
    assert "times the model's" in text
    assert "memory traffic, GB" not in text  # TPUs keep results beside their units


def test_step_time_follows_the_memory_traffic_of_compiled_kernels(capsys, monkeypatch):
    row = make_compiled.recorded()["gpu-dense-124m h100"]
    row |= {"memory_traffic_bytes": 3.35e12 / 2}  # half a second of its memory
    monkeypatch.setattr(plan, "build", lambda *_: results.Compiled(**row))
    monkeypatch.setattr(targets, "check", lambda _: None)
    config = ["--config", str(ROOT / "configs" / "dense_124m.toml")]
    plan.main([*config, "--chip", "h100", "--compile"])
    predicted, compiled = capsys.readouterr().out.split("As compiled by")
    assert re.search(r"memory traffic, GB +[\d,.]+ +1,675.000 ", compiled)
    assert re.search(r"memory +500 *\n", compiled) and "Bound by memory" in compiled
    assert (
        "the compiled kernels read and write" in " ".join(compiled.split())
        and "kernels would read and write" in predicted
    )


def test_a_compiled_step_that_exceeds_a_gpus_memory_is_refused_after_its_tables(
    capsys, monkeypatch, tmp_path
):
    row = make_compiled.recorded()["gpu-dense-124m-xla h100"]
    row |= {"memory_bytes_per_chip": 100 * 2**30}
    monkeypatch.setattr(plan, "build", lambda *_: results.Compiled(**row))
    monkeypatch.setattr(targets, "check", lambda _: None)
    config = ["--config", str(ROOT / "configs" / "dense_124m.toml")]
    needs = r"needs 100.00 GiB and a h100 has 79.65 GiB: 20.35 GiB are missing. Use --t"
    with pytest.raises(ValueError, match=needs):
        plan.main([*config, "--chip", "h100", "--compile", "--png", str(tmp_path / "plan.png")])
    assert (tmp_path / "plan.png").exists()
    assert "autotunes kernels" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_the_picture_has_a_bar_for_each_mesh(tmp_path):
    _, config = make_compiled.config_of("jaxformer")
    chip = hardware.CHIPS["v4"]
    found = search.search(config, chip, 32)
    best = found.best[0]
    made = plan.Plan(best.config, best.predicted, "jaxformer_1b", chip, 1e9, search=found)
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    bars = [report.milliseconds(c.predicted) for c in found.best]
    report.draw_bars(axes, [str(n) for n in range(len(bars))], bars)
    tops = {}
    for patch in axes.patches:
        x = round(patch.get_x() + patch.get_width() / 2)
        tops[x] = max(tops.get(x, 0.0), patch.get_y() + patch.get_height())
    for x, candidate in enumerate(found.best):
        assert tops[x] == pytest.approx(1e3 * candidate.predicted.serial_step_s, rel=1e-6)
    report.draw(made, tmp_path / "meshes.png")
    assert (tmp_path / "meshes.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--chip", "v7"], "--chip v7 is not known. Use one of v4, v5e"),
        ([*JAXFORMER, "--chips", "7"], "--chips 7: the model divides over no mesh of 7 chips"),
        (["--hlo", "x"], "--hlo goes with --compile"),
        (["--topology", "2x2"], "--topology goes with --compile"),
        (["--png", "/proc/x.png"], "--png /proc/x.png cannot be written"),
        (["--tokens", "nan"], "Use 0 or more"),
        (["--model.capacity_factor", "inf"], "inf is not a finite number"),
        (["--png", "x.jpg"], "Use --png x.png"),
        (["--tokens", "-1"], "Use 0 or more"),
        (["--chip", "h100-pcie", "--compile"], "does not describe this GPU"),
        (["--chip", "h100", "--compile", "--topology", "2x2"], "--topology is for TPU slices"),
        (["--chp", "v4"], "unknown flag --chp: did you mean --chip"),
        (
            ["--chips=4", "--mesh.fsdp=2", "--mesh.pipeline=2", "--mesh.tensor=2"],
            "--chips 4 does not match --mesh.fsdp 2 --mesh.pipeline 2 --mesh.tensor 2",
        ),
        pytest.param(
            [*JAXFORMER, *LARGE],
            "the config fits on no mesh of 8 v5e: at best",
            marks=pytest.mark.long,
        ),
    ],
)
def test_bad_input_is_refused_with_a_fix(flags, message):
    with pytest.raises(ValueError) as caught:
        plan.main(flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--chip", "h100"],
            "splash: these devices have cudnn and triton. Use ",
        ),
        (["--train.seq_len", "1000"], "splash cannot take --train.seq_len 1000"),
    ],
)
def test_attention_that_cannot_run_is_refused_before_the_search(flags, message):
    with pytest.raises(ValueError, match=f"^--model.attention_kernel {message}"):
        plan.main([*JAXFORMER, *flags, "--search", "--model.attention_kernel", "splash"])


@pytest.mark.long
def test_a_config_that_fits_nowhere_reports_the_missing_memory():
    with pytest.raises(ValueError, match=r"GiB per chip are missing.*Use more chips"):
        plan.main([*JAXFORMER, *LARGE])


def test_help_shows_every_flag_with_its_text(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("finds the best mesh", "rank all meshes", "needs no chip", "main.py's flags"):
        assert words in text
