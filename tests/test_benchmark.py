"""What benchmarks share, and those of steps, text and checkpoints, mostly in this process."""

import ast
import contextlib
import importlib.util
import sys
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import benchmark
import checkpoint
from benchmarks import checkpoint as checkpoint_benchmark
from benchmarks import common, decode, experts, mesh, peer, reference, step
from conftest import ROOT
from hf.families import LLAMA
from hf.model_config import kind_of, unsupported

ONE_DEVICE = " ".join(f"--mesh.{axis} 1" for axis in common.ONE_DEVICE)
TINY = f"""
{ONE_DEVICE} --model.num_hidden_layers 1 --model.n_routed_experts 0 --model.hidden_size 32
--model.num_attention_heads 2 --model.vocab_size 256 --model.decoder_sparse_step 1
--train.global_batch_size 2 --train.seq_len 16 --train.microbatches 1 --eval.sequences 2
"""
TINY = ["--config", str(ROOT / "configs/tiny.toml"), *TINY.split()]
DENSE = ["--config", str(ROOT / "configs/dense_124m.toml")]


def test_help_lists_each_benchmark_with_one_line_and_others_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--help"])
    benchmark.run()
    lines = capsys.readouterr().out.splitlines()
    for file in {*ROOT.glob("benchmarks/*.py")}:
        doc = ast.get_docstring(ast.parse(file.read_text())) or ""
        listed = f"  {file.stem:12}{doc.partition(chr(10))[0]}"
        assert (listed in lines) == (file.stem not in ("__init__", "common"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "speed"])
    with pytest.raises(ValueError, match=r"benchmark.py speed is unknown. Use one of checkpoint,"):
        benchmark.run()


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        *((one.main, ["--size", "3"], "--size 3 is unknown") for one in (decode, mesh, reference)),
        (peer.main, ["--turns", "0"], "--turns 0 leaves nothing to measure"),
        (experts.main, DENSE, r"no experts. Use another --config"),
        (experts.main, ["--factors"], r"Use --factors 0 1.5"),
        (checkpoint_benchmark.parse, ["--rounds", "-1"], r"leaves nothing.*--rounds 5"),
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


def test_a_token_needs_the_weights_of_its_own_experts():
    config = decode.decoding_config(64, num_hidden_layers=1, vocab_size=256)

    def bytes_read(texts, position):  # without weights and compiled programs
        decoder = object.__new__(decode.Decoder)
        decoder.config, decoder.sequences = config, texts
        return decoder.bytes_read(position)

    one, two = bytes_read(1, 0), bytes_read(2, 0)
    assert two - one == 4 * 8 * 3 * 768 * 256  # 8 experts of three float32 matrices
    assert bytes_read(2, 10) - two == 4 * 10 * 2 * (256 + 32)


def test_equally_many_steps_run_with_a_save_and_without_and_saves_are_complete(tmp_path):
    words = [*TINY, "--interval_s", "0.05", "--rounds", "2"]
    flags, config = checkpoint_benchmark.parse(words)
    training = checkpoint_benchmark.Training(config, tmp_path)
    rounds = list(training.rounds(flags.interval_s, flags.rounds))
    training.checkpoints.close()
    [steps] = {one.steps for pair in rounds for one in pair}
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
        # Two of four intervals saved.
        assert saved.steps()[-2:] == [training.done - 3 * steps, training.done - 2 * steps]
    for save, other in rounds:
        assert save.seconds >= save.call_s + save.wait_s and save.write_s > 0 == other.write_s

    def interval(seconds):
        return checkpoint_benchmark.Interval(3, seconds, 2 * seconds + 1, 0.0, 0.0, 0.0)

    # A ratio is that of one round.
    rounds = [(interval(3.0), interval(2.0)), (interval(5.0), interval(4.0))]
    text = checkpoint_benchmark.report(training, rounds)
    assert "ratio           1.375 (1.250 to 1.500), " in text
    assert "ratio of CPU    1.311 (1.222 to 1.400), " in text


# --- peer -----------------------------------------------------------------------------------------


def test_both_trainers_have_a_model_of_transformers_and_need_its_package(monkeypatch):
    moe, llama = (peer.config_of_both(name).model for name in ("moe", "llama"))
    assert not unsupported(moe) and not unsupported(llama) and kind_of(llama) == LLAMA
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
