"""benchmark.py links: what it plans, and what it prints of measured times."""

import io

import pytest
from rich.console import Console

from benchmarks import links
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


@pytest.fixture
def result(predictions):
    """Steps as long as planned, and a second longer with a delay of 5 ms."""

    def row(mbit, delay_ms=0.0):
        late = 1 if delay_ms else 0
        steps = {n: [predictions[n].seconds(RATE, mbit) + late] * 3 for n in links.LAYOUTS}
        steps[links.ALONE] = [predictions[links.ALONE].flops / RATE] * 3
        sizes = [size * 8e-6 / mbit for size in links.SIZES]  # collectives without latency
        collectives = dict.fromkeys(links.KINDS, sizes)
        return links.Measurement(mbit, delay_ms, mbit, 1e-4, collectives, steps)

    rows = [row(4000.0), row(1000.0), row(300.0), row(30.0), row(4000.0, 5.0)]
    return links.Result(rows, predictions)


def test_the_planned_time_is_that_of_the_plan_without_overlap(config, predictions):
    chip = links.host_chip(RATE, 30 * 125_000)
    for name in links.LAYOUTS:
        predicted = cost.predict(links.layout_of(config, name), chip, "cpu")
        assert predictions[name].seconds(RATE, 30) == pytest.approx(predicted.serial_step_s)

    def order(mbit):
        return sorted(links.LAYOUTS, key=lambda name: predictions[name].seconds(RATE, mbit))

    assert order(1e6) == ["FSDP", "interleaved", "1F1B"]
    assert order(20) == ["1F1B", "interleaved", "FSDP"]


def test_a_microbatch_per_device_has_the_same_size_in_each_layout(config, predictions):
    for name in (links.ALONE, *links.LAYOUTS):
        c = links.layout_of(config, name)
        cli.check(c)
        assert c.train.global_batch_size / c.train.microbatches / c.mesh.batch == 4
    useful = predictions[links.ALONE].flops / predictions["FSDP"].flops
    assert 0.95 < useful < 1.1  # a host alone computes its share without a bubble


def test_lines_cross_where_both_take_equally_long(result):
    mbit, falling = [10.0, 1000.0, 100.0], [100.0, 1.0, 10.0]  # in any order
    assert links.crossing(mbit, falling, [4.0] * 3) == pytest.approx(250)
    assert links.crossing(mbit, falling, [0.5] * 3) is None  # only beyond what was measured
    measured, planned = result.crossings("FSDP", "1F1B")
    assert measured == pytest.approx(planned)


def test_tables_lines_and_a_picture_show_measured_and_planned_times(result, tmp_path):
    console = Console(width=200, file=io.StringIO())
    console.print(links.step_table(result), links.collective_table(result))
    text = console.file.getvalue()
    assert "30 Mbit/s" in text and "4000 Mbit/s, 5 ms" in text
    assert "FSDP / FSDP" in text and "1F1B / 1F1B" in text
    assert f"{1e3 * links.SIZES[1] * 8e-6 / 30:,.1f}" in text  # of 1 MiB
    lines = "\n".join(links.lines(result))
    assert "15.0 GFLOP/s" in lines and "1F1B is faster than FSDP: measured" in lines
    links.draw(result, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_flags_that_cannot_be_measured_are_refused():
    for words, message in (
        ("--steps 0", "leave nothing to measure"),
        ("--mesh.fsdp 4", "Remove the --mesh flags"),
        ("--model.num_hidden_layers 6", "num_hidden_layers"),
        ("--png links.gif", r"does not end in .png"),
        ("--speed 9", "unknown flag --speed"),
    ):
        with pytest.raises(ValueError, match=message):
            links.parse(words.split())


def test_each_kind_of_collective_sends_the_requested_bytes():
    """On one device per host, which here are four of the eight devices."""
    found = links.collective_seconds()
    assert found.keys() == links.KINDS.keys()
    for kind, seconds in found.items():
        assert len(seconds) == len(links.SIZES) and min(seconds) > 0
        operand = links.collective(kind, links.SIZES[1]).args[0]
        sent = operand.nbytes / links.HOSTS * links.KINDS[kind][1]
        assert sent == pytest.approx(links.SIZES[1], rel=0.01)
