import json
import re

import pytest

import hardware
import make_compiled
import plan
from conftest import ROOT
from planning import compiler, cost, results, targets

JAXFORMER = ["--config", str(ROOT / "configs" / "jaxformer_1b.toml")]
DENSE = ["--config", str(ROOT / "configs" / "dense_124m.toml"), "--chip", "h100"]
# Figures of a prediction that a compiled step has too.
SHARED = {f"{name}_per_chip" for name in ("memory_bytes", "flops", "model_flops")}
SHARED |= {"collective_bytes_per_chip"}


PRICE = (r"([\d.]+) hours to 1e\+12", r"tokens for ([\d,.]+)")


def printed(capsys, *flags):
    plan.main([*flags])
    return " ".join(capsys.readouterr().out.split())


def test_json_and_tables_have_the_figures_of_the_prediction(capsys):
    plan.main([*JAXFORMER, "--chip", "v4", "--json"])
    found = json.loads(capsys.readouterr().out)
    predicted = found["predicted"]
    expected = cost.predict(make_compiled.config_of("jaxformer"), hardware.CHIPS["v4"])
    assert set(predicted) >= SHARED | {"memory", "flops", "traffic", "seconds", "mfu"}
    for name in (*SHARED, "step_s"):
        assert predicted[name] == getattr(expected, name)
    assert found["fits"] and (found["flags"]["mesh.fsdp"], predicted["chips"]) == (8, 32)
    assert "compiled" not in found and "search" not in found
    text = printed(capsys, *JAXFORMER, "--chip", "v4", "--tokens", "6.5e9")
    parts = ["973,788,032 parameters", "saved activations", "attention scores", "fits: "]
    parts += ["moe dispatch, backward", "the links along fsdp+tensor", "hours to 6.5e+09 tokens"]
    assert not [part for part in (*parts, "not measured on a v4") if part not in text]
    alone = ["--mesh.fsdp=1", "--mesh.pipeline=1", "--mesh.tensor=1", "--chip=h100"]
    text = printed(capsys, *JAXFORMER, *alone)
    assert "Accuracy: not measured; within" in text and "of communication" not in text


def test_a_plan_for_figures_ends_with_the_command_that_trains(capsys):
    flags = ["--mesh.fsdp=1", "--mesh.pipeline", "1", "--mesh.tensor", "1"]
    figures = "name=own,flops=165,memory=24,bandwidth=1008,link=32"
    text = printed(capsys, *DENSE[:2], "--chip", figures, *flags)
    assert "1 x own, mesh" in text and "not measured on a own;" in text
    file, _, chosen = text.partition("run: ./run.sh python main.py --config ")[2].partition(" ")
    assert file == DENSE[1] and chosen.startswith(f"{' '.join(flags)} --mesh.virtual 1 --train.")


def test_a_plan_chooses_what_main_would_and_prices_it(capsys):
    words = ["--depth", "2", "--model.vocab_size", "4096", "--chip", "h100"]
    text = printed(capsys, *words, "--price_per_hour", "2.5", "--tokens", "1e12")
    hours, money = (float(re.search(rf"{part}", text)[1].replace(",", "")) for part in PRICE)
    assert money == pytest.approx(2.5 * hours, rel=0.01)
    chosen = text.partition("run: ")[2]
    assert "--mesh.fsdp 1 " in chosen and "--train.microbatches 1 " in chosen
    assert "An evaluation needs" in text and "on 8 x" not in text
    ranks = printed(capsys, *words, "--mesh.fsdp", "4", "--mesh.tensor", "auto")
    assert "4 x h100, mesh (fsdp, pipeline, tensor) = (4, 1, 1)" in ranks


def test_what_does_not_fit_and_a_number_of_chips_without_a_slice_are_reported(capsys):
    one = ["--mesh.fsdp=1", "--mesh.pipeline=1", "--mesh.tensor=1", "--train.remat=none"]
    text = printed(capsys, *JAXFORMER, "--chip", "v5e", *one)
    assert "does not fit (--search finds what fits): 466% of 13.60 GiB usable" in text
    three = ["--mesh.pipeline=3", "--model.num_hidden_layers=54", "--model.vocab_size=99840"]
    text = printed(capsys, *JAXFORMER, *one, *three)
    assert "No usual slice of v4 has 3 chips" in text


@pytest.fixture
def compiled(monkeypatch):
    def replace(key, **fields):
        row = make_compiled.recorded()[key] | fields
        program = results.Compiled(**row), ""
        monkeypatch.setattr(compiler, "compile_step", lambda *_: program)
        monkeypatch.setattr(targets, "check", lambda _: None)  # as if the compiler were here

    return replace


def test_the_tables_of_a_compiled_step_show_ratios_and_hidden_collectives(capsys, compiled):
    compiled("jaxformer v4")
    text = printed(capsys, *JAXFORMER, "--chip", "v4", "--compile")
    assert "ratio" in text and "collectives along fsdp+tensor, GB" in text
    assert "times the model's" in text and "The program computes during 6." in text


def test_a_compiled_step_that_exceeds_a_gpus_memory_is_refused_after_its_tables(capsys, compiled):
    compiled("gpu-dense-124m-xla h100", memory_bytes_per_chip=100 * 2**30)
    needs = r"needs 100.00 GiB and a h100 has 79.65 GiB: 20.35 GiB are missing. Use --t"
    with pytest.raises(ValueError, match=needs):
        plan.main([*DENSE, "--compile"])
    assert "autotunes kernels" in " ".join(capsys.readouterr().out.split())


SPLASH = f"{' '.join(JAXFORMER)} --search --model.attention_kernel splash"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--chip v7", "--chip v7 is not known. Use one of v2, v3, v4"),
        ("--hlo x", "--hlo goes with --compile"),
        ("--topology 2x2", "--topology goes with --compile"),
        ("--compile --hlo /proc/x", "--hlo /proc/x cannot be written"),
        ("--tokens nan", "Use a finite number at least 0"),
        ("--chips 1000000000", "Use an integer at least 0 and at most 131072"),
        ("--model.capacity_factor inf", "inf is out of range. Use a finite number"),
        ("--chip h100-pcie --compile", "does not describe this chip"),
        ("--chip h100 --compile --topology 2x2", "--topology is for TPU slices"),
        (f"--chip h100 {SPLASH}", "splash: these devices have cudnn and triton. Use "),
        (
            f"--train.seq_len 1000 {SPLASH}",
            "splash: sequences of 1000 are not",
        ),
    ],
)
def test_bad_input_is_refused_with_a_fix(flags, message):
    with pytest.raises(ValueError) as caught:
        plan.main(flags.split())
    assert message in str(caught.value)
