import contextlib
import dataclasses
import io
import json
import math
import subprocess
import sys

import pytest
from rich.console import Console

from benchmarks import links
from conftest import ROOT
from planning import cost
from runtime import cli

RATE = 15e9  # FLOP/s of a host


@pytest.fixture(scope="module")
def config():
    return links.parse([])[1]


@pytest.fixture(scope="module")
def predictions(config):
    names = (links.ALONE, *links.LAYOUTS)
    return {name: links.Prediction.of(links.layout_of(config, name)) for name in names}


def collectives_at(mbit):
    """Return the seconds of collectives without latency."""
    return {kind: [size * 8e-6 / mbit for size in links.SIZES] for kind in links.KINDS}


@pytest.fixture
def result(predictions):
    """Steps as long as planned, and a second longer with a delay of 5 ms."""
    alone = predictions[links.ALONE].flops / RATE

    def row(mbit, delay_ms=0.0):
        steps = {name: [predictions[name].seconds(RATE, mbit)] * 3 for name in links.LAYOUTS}
        if delay_ms:
            steps = {name: [s + 1 for s in taken] for name, taken in steps.items()}
        steps[links.ALONE] = [alone] * 3
        return links.Measurement(mbit, delay_ms, mbit, 1e-4, collectives_at(mbit), steps)

    rows = [row(4000.0), row(1000.0), row(300.0), row(30.0), row(4000.0, 5.0)]
    return links.Result(rows, predictions)


@pytest.mark.parametrize("name", links.LAYOUTS)
def test_the_planned_time_is_that_of_the_plan_without_overlap(config, predictions, name):
    for mbit in (30, 1000):
        chip = links.host_chip(RATE, mbit * 125_000)
        predicted = cost.predict(links.layout_of(config, name), chip, "cpu")
        assert predictions[name].seconds(RATE, mbit) == pytest.approx(predicted.serial_step_s)


def test_slow_links_favor_pipelines_and_fast_ones_fsdp(predictions):
    def order(mbit):
        return sorted(links.LAYOUTS, key=lambda name: predictions[name].seconds(RATE, mbit))

    assert order(1e6) == ["FSDP", "interleaved", "1F1B"]
    assert order(20) == ["1F1B", "interleaved", "FSDP"]


def test_a_microbatch_per_device_has_the_same_size_in_each_layout(config):
    sizes = set()
    for name in (links.ALONE, *links.LAYOUTS):
        c = links.layout_of(config, name)
        cli.check(c)
        assert c.train.global_batch_size == config.train.global_batch_size
        sizes.add(c.train.global_batch_size / c.train.microbatches / c.mesh.batch)
    assert sizes == {4}


def test_a_host_alone_computes_its_share_without_a_bubble(predictions):
    useful = predictions[links.ALONE].flops / predictions["FSDP"].flops
    assert 0.95 < useful < 1.1


def test_lines_cross_where_both_take_equally_long():
    mbit = [10.0, 1000.0, 100.0]  # in any order
    falling = [1000 / m for m in mbit]
    level = [4.0] * 3
    assert links.crossing(mbit, falling, level) == pytest.approx(250)
    assert links.crossing(mbit, level, falling) == pytest.approx(250)
    assert links.crossing(mbit, falling, [m * 2 for m in falling]) is None
    assert links.crossing(mbit, falling, [0.5] * 3) is None  # only beyond what was measured


def test_crossings_of_planned_times_are_those_of_the_plan(result):
    measured, planned = result.crossings("FSDP", "1F1B")
    assert measured == pytest.approx(planned)
    fsdp, one = result.predictions["FSDP"], result.predictions["1F1B"]
    exact = (fsdp.megabits - one.megabits) / (one.flops - fsdp.flops) * RATE
    assert math.log(measured / exact) == pytest.approx(0, abs=0.3)  # a line between two points


def test_tables_and_lines_show_measured_and_planned_times(result):
    console = Console(width=200, file=io.StringIO())
    console.print(links.step_table(result), links.collective_table(result))
    text = console.file.getvalue()
    assert "not throttled" not in text and "30 Mbit/s" in text and "4000 Mbit/s, 5 ms" in text
    assert "FSDP / FSDP" in text and "1F1B / 1F1B" in text
    assert f"{1e3 * links.SIZES[1] * 8e-6 / 30:,.1f}" in text  # of 1 MiB
    lines = "\n".join(links.lines(result))
    assert "15.0 GFLOP/s" in lines and "1F1B is faster than FSDP: measured" in lines


def test_the_picture_is_written_for_one_link_and_for_several(result, tmp_path):
    one_link = dataclasses.replace(result, measurements=result.measurements[:1])
    for found in (result, one_link):
        links.draw(found, tmp_path / "links.png")
        assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "leave nothing to measure"),
        (["--mbit"], "leave nothing to measure"),
        (["--delay_ms", "-1"], "leave nothing to measure"),
        (["--mesh.fsdp", "4"], "Remove the --mesh flags"),
        (["--model.num_hidden_layers", "6"], "num_hidden_layers"),
        (["--png", "links.gif"], r"does not end in .png"),
        (["--speed", "9"], "unknown flag --speed"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        links.parse(words)


def test_a_process_answers_with_the_seconds_of_steps(config, tmp_path):
    small = links.with_values(
        links.layout_of(config, links.ALONE),
        model={"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
        train={"seq_len": 8, "global_batch_size": 8},
        eval={"sequences": 8},
    )
    (tmp_path / "alone.toml").write_text(cli.to_toml(small))
    command = [sys.executable, "benchmark.py", "links", "work", str(tmp_path / "alone.toml")]
    done = subprocess.run(command, cwd=ROOT, input="step\nstep\n", capture_output=True, text=True)
    seconds = [*map(json.loads, done.stdout.splitlines())]
    assert len(seconds) == 2 and min(seconds) > 0


@pytest.mark.parametrize("ended", [False, True])
def test_the_end_of_a_process_is_an_error_with_the_end_of_its_log(ended, config, tmp_path):
    class Here(links.Host):
        def command(self, *words, folder):
            return ["sh", "-c", "echo no such device >&2"]

    job = links.Job("FSDP", config, [Here("a", "10.0.0.1")], 1, tmp_path)
    with contextlib.closing(job):
        if ended:  # no process reads the request
            for process in job._processes:
                process.wait()
        with pytest.raises(links.TransientError, match="a process of FSDP ended: no such device"):
            job.step()


def test_each_kind_of_collective_sends_the_requested_bytes():
    """On one device per host, which here are four of the eight devices."""
    found = links.collective_seconds()
    assert found.keys() == links.KINDS.keys()
    for kind, seconds in found.items():
        assert len(seconds) == len(links.SIZES) and min(seconds) > 0
        operand = links.collective(kind, links.SIZES[1]).args[0]
        sent = operand.nbytes / links.HOSTS * links.KINDS[kind][1]
        assert sent == pytest.approx(links.SIZES[1], rel=0.01)
