import dataclasses
import itertools
import subprocess
import sys
from functools import partial

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import benchmark
import checkpoint
from benchmarks import checkpoint as checkpoint_benchmark
from benchmarks import common, decode, experts, mesh, reference, step
from benchmarks import data as data_benchmark
from conftest import ROOT

ONE_DEVICE = " ".join(f"--mesh.{axis} 1" for axis in common.ONE_DEVICE)


def test_help_lists_each_benchmark_with_one_line():
    command = [sys.executable, "benchmark.py", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {path.stem for path in ROOT.glob("benchmarks/*.py")} - {"__init__", "common"}
    listed = [line.split() for line in text.splitlines() if line.split()[:1] and line[:2] == "  "]
    assert {words[0] for words in listed if words[0] in files and len(words) > 3} == files


def test_an_unknown_benchmark_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "speed"])
    with pytest.raises(ValueError, match=r"benchmark.py speed is unknown. Use one of checkpoint,"):
        benchmark.run()


@pytest.mark.parametrize("one", [decode, mesh, reference])
def test_a_benchmark_without_flags_refuses_them_and_prints_its_help(one, capsys):
    with pytest.raises(ValueError, match="--size 3 is unknown"):
        one.main(["--size", "3"])
    with pytest.raises(SystemExit):
        one.main(["--help"])
    assert one.__doc__.splitlines()[0] in capsys.readouterr().out


# --- what benchmarks share ------------------------------------------------------------------------


def test_spread_is_median_minimum_and_maximum():
    assert common.spread([1.5, 1.25, 9.0], 3) == "1.500 (1.250 to 9.000)"


def test_the_rate_of_a_product_is_the_median_of_its_measurements(monkeypatch):
    calls = [(10.0 * i, 10.0 * i + 1 + i % 3) for i in range(common.STEPS + 1)]
    ticks = iter(itertools.chain(*calls))
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(ticks))
    rate = common.matmul_flops_per_s(64, common.jnp.float32, in_flight=2)
    assert rate == pytest.approx(2 * 64**3 * 2 / 2)  # a median of 2 s for two products


def test_a_timed_compilation_reads_no_cache_and_a_later_one_does(tmp_path, request):
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        request.addfinalizer(partial(jax.config.update, name, getattr(jax.config, name)))
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    request.addfinalizer(compilation_cache.reset_cache)
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
    )

    def compiled():
        jax.jit(lambda x: 3 * x + 1).lower(1.0).compile()
        return len(hits)

    assert compiled() == 0
    [entry] = tmp_path.iterdir()
    with common.without_compilation_cache():
        assert compiled() == compiled() == 0
    assert compiled() == 1 and [*tmp_path.iterdir()] == [entry]


# --- step, mesh and reference, with a step that compiles at once ----------------------------------


@pytest.fixture
def fast_step(monkeypatch):
    """A step that only counts. A real one takes long to compile."""

    def count(state, batch, schedule):
        return state.replace(step=state.step + 1), {"tokens": batch.tokens.sum()}

    jitted = common.jax.jit(count, donate_argnums=0)
    monkeypatch.setattr(common.train, "jitted_step", lambda *_: jitted)
    monkeypatch.setattr(common.train, "peak_bytes", lambda *_: (2**30, "device"))
    monkeypatch.setattr(common.train, "planned_bytes", lambda *_: 2**20)
    monkeypatch.setattr(common.Program, "flops_ratio", lambda self: 1.25)


def test_step_prints_rates_of_a_real_step(capsys):
    sizes = "--model.num_hidden_layers 1 --model.n_routed_experts 0 --model.hidden_size 32"
    small = f"{ONE_DEVICE} {sizes} --model.num_attention_heads 2 --model.vocab_size 256"
    batch = "--train.global_batch_size 2 --train.seq_len 16 --train.microbatches 1"
    words = f"{small} {batch} --eval.sequences 2 --model.decoder_sparse_step 1".split()
    step.main(["--config", str(ROOT / "configs/tiny.toml"), *words])
    text = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in text.splitlines())
    seconds, rate = float(lines["step"].split()[0]), float(lines["tokens/s"].replace(",", ""))
    assert rate * seconds == pytest.approx(32, rel=0.1)
    assert "MFU            unknown: hardware.py has no peak for 'cpu'" in text


@pytest.mark.long
def test_experts_compares_dropless_with_capacity(capsys, monkeypatch):
    sizes = "--model.num_hidden_layers 2 --model.hidden_size 32 --model.moe_intermediate_size 16"
    small = f"{ONE_DEVICE} {sizes} --model.num_attention_heads 2 --model.vocab_size 256"
    batch = "--train.global_batch_size 2 --train.seq_len 16 --train.microbatches 1"
    words = f"{small} {batch} --eval.sequences 2 --factors 0 0.5".split()
    monkeypatch.setattr(experts, "step_seconds", lambda programs: [3.0, 2.0])
    experts.main(["--config", str(ROOT / "configs/tiny.toml"), *words])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0][:4] == ["dropless", "3.000", "1.500", "0.00%"]
    assert rows[1][:3] == ["0.5", "2.000", "1.000"] and float(rows[1][3].rstrip("%")) > 40
    assert float(rows[0][4]) > float(rows[1][4]) > 0  # FLOPs
    with pytest.raises(ValueError, match=r"no experts. Use another --config"):
        experts.main(["--config", str(ROOT / "configs/dense_124m.toml")])
    with pytest.raises(ValueError, match=r"Use --factors 0 1.5"):
        experts.main(["--factors"])


@pytest.mark.long
def test_mesh_compares_one_device_with_eight_and_compile_times(fast_step, capsys):
    mesh.main([])
    text = capsys.readouterr().out
    assert "mesh (fsdp, pipeline, tensor) = (2, 2, 2) virtual 2: " in text
    assert "tokens/s of 8 devices over 1: " in text and "remat full: compiled over" in text
    assert "  32 layers, 16 microbatches: " in text


def test_reference_prints_the_bound_of_each_schedule_and_the_share_of_a_product(
    fast_step, capsys, monkeypatch
):
    monkeypatch.setattr(reference, "step_seconds", lambda programs: [2.0, 1.0, 4.0, 8.0])
    monkeypatch.setattr(common.Program, "model_flops", 50 * 10**9)
    monkeypatch.setattr(reference, "matmul_flops_per_s", lambda *_, **__: 100e9)
    reference.main([])
    text = " ".join(capsys.readouterr().out.split())
    assert "virtual 1: compiled over model FLOPs 1.250 (bound 1.15 x 1.250 = 1.438)" in text
    assert "virtual 2: compiled over model FLOPs 1.250 (bound 1.15 x 1.125 = 1.294)" in text
    assert "reaches 50% of the 100.0 GFLOP/s of a 2048 x 2048 x 2048" in text


# --- decode ---------------------------------------------------------------------------------------


SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "kv_lora_rank": 32,
    "vocab_size": 256,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
}


def test_generation_is_timed_near_and_far_with_a_short_and_a_long_cache(capsys):
    configs = {"moe": decode.decoding_config(64, **SIZES)}
    decode.compare(configs, batches=(2,), lengths=(256, 512), near=3, far=300)
    text = capsys.readouterr().out
    [row] = [line.split() for line in text.splitlines() if line.split()[1:2] == ["moe"]]
    words = " ".join(text.split())
    assert "after 300 over after 3; a cache of 512 over 256" in words
    numbers = [float(cell) for cell in row if cell.replace(".", "").isdigit()]
    texts, tokens_per_s, ms, *ratios = numbers
    assert texts == 2 and tokens_per_s * ms / 1e3 == pytest.approx(2, rel=0.1)
    assert len(ratios) == 3 and min(ratios[:2]) > 0


def test_a_token_needs_the_weights_of_its_own_experts():
    config = decode.decoding_config(64, num_hidden_layers=1, vocab_size=256)

    def bytes_read(texts, position):  # without weights and compiled programs
        decoder = object.__new__(decode.Decoder)
        decoder.config, decoder.sequences = config, texts
        return decoder.bytes_read(position)

    one, two = bytes_read(1, 0), bytes_read(2, 0)
    assert two - one == 4 * 8 * 3 * 768 * 256  # 8 experts of three float32 matrices
    assert bytes_read(2, 10) - two == 4 * 10 * 2 * (256 + 32)


# --- checkpoint -----------------------------------------------------------------------------------


def test_equally_many_steps_run_with_a_save_and_without_and_saves_are_complete(fast_step, tmp_path):
    model = "--model.num_hidden_layers 2 --model.n_routed_experts 0 --model.vocab_size 256"
    words = f"{ONE_DEVICE} {model} --train.seq_len 32 --interval_s 0.05 --rounds 2"
    flags, config = checkpoint_benchmark.parse(words.split())
    training = checkpoint_benchmark.Training(config, tmp_path)
    rounds = list(training.rounds(flags.interval_s, flags.rounds))
    training.checkpoints.close()
    [steps] = {one.steps for pair in rounds for one in pair}
    first = training.done - 4 * steps  # the step after which the first interval begins

    saved = checkpoint.Checkpoints(tmp_path)
    assert saved.steps()[-1] == first + 2 * steps
    shapes = common.train.abstract_state(training.config, training.program.declared, training.mesh)
    for number in (first + steps, first + 2 * steps):
        assert int(saved.restore(number, shapes).step) == number
    saved.close()

    first_line, *lines, _ = checkpoint_benchmark.report(training, rounds).splitlines()
    assert first_line.endswith(
        "on 1 x cpu, mesh (fsdp, pipeline, tensor) = (1, 1, 1); 8 x 32 tokens per step"
    )
    names = ["between saves", "without a save", "with a save", "ratio", "ratio of CPU"]
    names += ["in save()", "complete after", "waited for", "checkpoint"]
    assert [line[:16].strip() for line in lines] == names
    for save, other in rounds:
        assert save.seconds >= save.call_s + save.wait_s and save.write_s > 0 == other.write_s


def test_a_ratio_is_that_of_one_round(fast_step, tmp_path):
    def interval(seconds):
        return checkpoint_benchmark.Interval(3, seconds, 2 * seconds + 1, 0.0, 0.0, 0.0)

    _, config = checkpoint_benchmark.parse(ONE_DEVICE.split())
    training = checkpoint_benchmark.Training(config, tmp_path)
    training.checkpoints.close()
    (tmp_path / "1").mkdir()  # the newest checkpoint
    rounds = [(interval(3.0), interval(2.0)), (interval(5.0), interval(4.0))]
    text = checkpoint_benchmark.report(training, rounds)
    assert "ratio           1.375 (1.250 to 1.500), " in text
    assert "ratio of CPU    1.311 (1.222 to 1.400), " in text


def test_flags_of_a_config_are_accepted_and_those_that_measure_nothing_are_refused():
    large = ["--config", str(ROOT / "configs/dense_124m.toml")]
    flags, config = checkpoint_benchmark.parse(
        [*large, "--train.global_batch_size", "8", "--rounds", "1"]
    )
    assert (flags.interval_s, flags.rounds, config.run.name) == (30, 1, "dense_124m")
    assert config.train.global_batch_size == 8
    with pytest.raises(ValueError, match=r"--rounds -1 leaves nothing.*--rounds 5"):
        checkpoint_benchmark.parse([*large, "--rounds", "-1"])
    with pytest.raises(ValueError, match=r"unknown flag --round: did you mean --rounds"):
        checkpoint_benchmark.parse(["--round", "1"])


# --- data -----------------------------------------------------------------------------------------


def test_data_measures_disk_and_bucket_and_the_waiting_of_a_run(
    tmp_path, bucket_server, abandoned_connections, monkeypatch
):
    """With a run that has ended. Clients of this process keep the address of the first bucket."""
    flags = data_benchmark.Flags(
        tokens=40_000, bucket_tokens=40_000, shards=2, many=5, rows=4, rounds=1, steps=3
    )
    for name, value in bucket_server.environment.items():
        monkeypatch.setenv(name, value)

    @data_benchmark.contextlib.contextmanager
    def emulated_bucket(flags):
        yield bucket_server.bucket().url

    def train(command, **_):
        run = tmp_path / "runs" / "waits"
        run.mkdir(parents=True)
        steps = [{"data_wait_s": wait, "step_s": 2.0} for wait in (1.0, 0.1, 0.3)]
        data_benchmark.jsonl.append(run / "metrics.jsonl", [*steps, {"loss/val": 3.0}])
        assert command[2:4] == ["--config", "configs/tiny.toml"]
        assert str(tmp_path / "runs") in command

    monkeypatch.setattr(data_benchmark, "emulated_bucket", emulated_bucket)
    monkeypatch.setattr(data_benchmark.subprocess, "run", train)
    rows = [*data_benchmark.measure(flags, tmp_path)]
    assert [row[0].split(",")[0] for row in rows] == [
        *["M tokens/s from a disk"] * 2,
        *["ms until opened", "ms until the first batch"] * 2,
        *(["M tokens/s from the bucket"] * 2 + ["requests per step"]) * 2,
        "% of a step that a run waits",
    ]
    assert rows[-1][1] == "10.00 (5.00 to 15.00)"  # of the steps after the first


def test_the_emulated_bucket_prints_its_address_and_ends_with_the_benchmark(monkeypatch):
    monkeypatch.setattr(data_benchmark.os, "environ", {**data_benchmark.os.environ})
    flags = dataclasses.replace(data_benchmark.Flags(), delay_ms=0.0)
    with data_benchmark.emulated_bucket(flags) as url:
        assert url.startswith("gs://")
