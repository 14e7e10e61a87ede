"""What benchmarks share, and those of steps and links, in this process."""

import ast
import importlib.util
import sys
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import benchmark
import hardware
from benchmarks import common, links, peer, reference, step
from conftest import ROOT
from hf.families import LLAMA
from hf.model_config import kind_of, unsupported
from planning import collectives

ONE_DEVICE = " ".join(f"--{flag} 1" for flag in common.ONE_DEVICE)
TINY = f"""
{ONE_DEVICE} --model.num_hidden_layers 1 --model.n_routed_experts 0 --model.hidden_size 32
--model.num_attention_heads 2 --model.vocab_size 256 --model.decoder_sparse_step 1
--train.global_batch_size 2 --train.seq_len 16 --train.microbatches 1 --eval.sequences 2
"""
TINY = ["--config", str(ROOT / "configs/tiny.toml"), *TINY.split()]


def test_help_lists_each_benchmark_with_one_line_and_others_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--help"])
    benchmark.run()
    lines = capsys.readouterr().out.splitlines()
    for file in {*ROOT.glob("benchmarks/*.py")}:
        doc = ast.get_docstring(ast.parse(file.read_text())) or ""
        listed = f"  {file.stem:12}{doc.partition(chr(10))[0]}"
        assert (listed in lines) == (file.stem not in ("__init__", "common"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "speed"])
    with pytest.raises(
        ValueError, match=r"benchmark.py speed is unknown. Use one of fit, gpu, ladder"
    ):
        benchmark.run()


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        *((one.main, ["--size", "3"], "unknown flag --size") for one in (links, reference)),
        (peer.main, ["--turns", "0"], "--turns 0 is out of range"),
    ],
)
def test_flags_that_are_unknown_or_measure_nothing_are_refused(main, words, message):
    with pytest.raises(ValueError, match=message):
        main(words)


def test_a_timed_compilation_reads_no_cache_and_a_later_one_does(tmp_path, request):
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        request.addfinalizer(partial(jax.config.update, name, getattr(jax.config, name)))
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    request.addfinalizer(compilation_cache.reset_cache)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

    def hits():
        jax.jit(lambda x: 3 * x + 1).lower(1.0).compile()
        return events.count("/jax/compilation_cache/cache_hits")

    assert hits() == 0
    [entry] = tmp_path.iterdir()
    with common.without_compilation_cache():
        assert hits() == hits() == 0
    assert hits() == 1 and [*tmp_path.iterdir()] == [entry]


def test_step_prints_rates_of_a_real_step(capsys):
    step.main(TINY)
    text = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in text.splitlines())
    seconds, rate = float(lines["step"].split()[0]), float(lines["tokens/s"].replace(",", ""))
    assert rate * seconds == pytest.approx(32, rel=0.1)
    assert "MFU            unknown: hardware.py has no peak for 'cpu'" in text


def test_collectives_of_the_planned_bytes_are_timed_beside_the_plan(monkeypatch):
    """On 8 CPU devices, planned as a slice of 8 chips."""
    monkeypatch.setattr(links, "LARGE", 1 << 22)
    chip = hardware.CHIPS["v4"]
    table = links.time_collectives(chip, 8)
    kinds, _, large_ms, *_, planned_ms, ratio = ([*column.cells] for column in table.columns)
    assert kinds == [*links.KINDS]
    for i, kind in enumerate(kinds):
        operand = links.collective(kind, 1 << 22).args[0]
        parts = 8 if kind == "all-gather" else 1
        assert operand.nbytes / 8 * parts == 1 << 22
        planned_s = collectives.collective_s(chip, kind, 1 << 22, ((8, 1),), 8)
        assert planned_ms[i] == f"{1e3 * planned_s:.2f}"
        assert float(ratio[i]) == pytest.approx(float(large_ms[i]) / 1e3 / planned_s, rel=0.1)


# --- peer -----------------------------------------------------------------------------------------


def test_both_trainers_have_a_model_of_transformers_and_need_its_package(monkeypatch):
    moe, llama = (peer.config_of_both(name).model for name in ("moe", "llama"))
    assert kind_of(llama) == LLAMA
    assert not unsupported(moe, kind_of(moe)) and not unsupported(llama, LLAMA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -r requirements-hf\.txt"):
        peer.main([])


def test_the_ratio_is_over_the_better_of_the_others_which_have_the_same_first_loss():
    seconds = np.array([[1.0, 4.0, 3.0], [2.0, 4.0, 3.0], [3.0, 1.0, 3.0]])
    assert peer.over_the_better(seconds) == [3.0, 1.5, 1.0]
    ours, near, far = (SimpleNamespace(name=str(x), first_loss=x) for x in (8.31, 8.32, 8.40))
    peer.check_first_losses([ours, near])
    with pytest.raises(ValueError, match=r"8.31 is 8.3100 and that of 8.4 8.4000: weights or"):
        peer.check_first_losses([ours, near, far])
