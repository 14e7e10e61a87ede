import dataclasses
import io
import json
import math
import subprocess
import sys

import pytest
from rich.console import Console

import benchmark_links as links
import utils
from conftest import ROOT
from planning import cost

RATE = 15e9  # FLOP/s of a host


@pytest.fixture(scope="module")
def config():
    return links.parse([])[1]


@pytest.fixture(scope="module")
def expected(config):
    """Without collectives counted in a compiled program."""
    names = (links.ALONE, *links.LAYOUTS)
    return {name: links.Expected.of(links.layout_of(config, name), {}) for name in names}


def paces_at(mbit):
    """Of collectives that cost what their bytes do."""
    return {kind: [size * 8e-6 / mbit for size in links.SIZES] for kind in links.KINDS}


@pytest.fixture
def found(expected):
    """As if all took as long as is planned, and 5 ms of delay a second more."""
    alone = expected[links.ALONE].flops / RATE

    def row(mbit, delay_ms=0.0):
        steps = {name: [expected[name].planned_s(RATE, mbit)] * 3 for name in links.LAYOUTS}
        if delay_ms:
            steps = {name: [s + 1 for s in taken] for name, taken in steps.items()}
        steps[links.ALONE] = [alone] * 3
        return links.Row(mbit, delay_ms, mbit, 1e-4, paces_at(mbit), steps)

    rows = [row(4000.0), row(1000.0), row(300.0), row(30.0), row(4000.0, 5.0)]
    return links.Found(rows, expected)


@pytest.mark.parametrize("name", links.LAYOUTS)
def test_the_plan_is_what_plan_py_says_without_overlap(config, expected, name):
    for mbit in (30, 1000):
        chip = links.host_chip(RATE, mbit * 125_000)
        predicted = cost.predict(links.layout_of(config, name), chip, "cpu")
        assert expected[name].planned_s(RATE, mbit) == pytest.approx(predicted.serial_step_s)


@pytest.mark.parametrize("name", links.LAYOUTS)
def test_collectives_that_cost_what_their_bytes_do_take_as_long_as_is_planned(expected, name):
    paced, planned = (
        expected[name].paced_s(RATE, paces_at(100)),
        expected[name].planned_s(RATE, 100),
    )
    assert paced == pytest.approx(planned)


def test_what_each_collective_costs_beside_its_bytes_is_counted_as_often_as_it_is_there(expected):
    one = expected["FSDP"]._replace(messages={"all-gather": 8, "all-reduce": 3})
    paces = paces_at(100)
    more = paces | {kind: [s + 0.01 for s in paces[kind]] for kind in ("all-gather", "all-reduce")}
    assert one.paced_s(RATE, more) - one._replace(messages={}).paced_s(RATE, more) == pytest.approx(
        8 * more["all-gather"][0] + 3 * more["all-reduce"][0]
    )


def test_slow_links_favour_pipelines_and_fast_ones_fsdp(expected):
    def order(mbit):
        return sorted(links.LAYOUTS, key=lambda name: expected[name].planned_s(RATE, mbit))

    assert order(1e6) == ["FSDP", "interleaved", "1F1B"]
    assert order(20) == ["1F1B", "interleaved", "FSDP"]


def test_a_microbatch_of_a_device_has_the_same_size_in_each_layout(config):
    sizes = set()
    for name in (links.ALONE, *links.LAYOUTS):
        c = links.layout_of(config, name)
        utils.check(c)
        assert c.train.sequences == config.train.sequences
        sizes.add(c.train.sequences / c.train.microbatches / c.mesh.batch)
    assert sizes == {4}


def test_alone_a_host_computes_what_it_does_in_a_pipeline_without_a_bubble(expected):
    useful = expected[links.ALONE].flops / expected["FSDP"].flops
    assert 0.95 < useful < 1.1


def test_two_lines_cross_where_both_take_as_long():
    mbit = [10.0, 1000.0, 100.0]  # in any order
    falling = [1000 / m for m in mbit]
    level = [4.0] * 3
    assert links.crossing(mbit, falling, level) == pytest.approx(250)
    assert links.crossing(mbit, level, falling) == pytest.approx(250)
    assert links.crossing(mbit, falling, [m * 2 for m in falling]) is None
    assert links.crossing(mbit, falling, [0.5] * 3) is None  # only beyond what was measured


def test_crossings_are_those_of_the_plan_where_all_is_as_planned(found):
    measured, planned, paced = found.crossings("FSDP", "1F1B")
    assert measured == pytest.approx(planned) == pytest.approx(paced)
    fsdp, one = found.expected["FSDP"], found.expected["1F1B"]
    exact = (fsdp.megabits - one.megabits) / (one.flops - fsdp.flops) * RATE
    assert math.log(measured / exact) == pytest.approx(0, abs=0.3)  # a line between two points


def test_all_is_told(found):
    console = Console(width=200, file=io.StringIO())
    console.print(links.table(found))
    text = console.file.getvalue()
    assert "not throttled" not in text and "30 Mbit/s" in text and "4000 Mbit/s, 5 ms" in text
    assert "FSDP / FSDP / FSDP" in text and "1F1B / 1F1B / 1F1B" in text
    assert "/ - /" in text  # no plan of a link with a delay
    lines = "\n".join(links.lines(found))
    assert "15.0 GFLOP/s" in lines and "all-gather 1.00, reduce-scatter 1.00" in lines
    assert "faster than FSDP: measured" in lines
    assert "30 Mbit/s: interleaving loses by its sends: 1." in lines
    assert "\n4000 Mbit/s: interleaving" not in lines


def test_the_picture_and_the_json_are_written(found, tmp_path):
    links.draw(found, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
    one_link = dataclasses.replace(found, rows=found.rows[:1])
    links.draw(one_link, tmp_path / "one.png")
    told = json.loads(json.dumps(links.as_json(found)))
    assert told["flops_per_s"] == pytest.approx(RATE)
    assert told["rows"][3]["planned"]["1F1B"] == pytest.approx(found.rows[3].seconds("1F1B"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "nothing can be measured so"),
        (["--mbit"], "nothing can be measured so"),
        (["--delay_ms", "-1"], "nothing can be measured so"),
        (["--mesh.fsdp", "4"], "leave --mesh out"),
        (["--model.blocks", "6"], "blocks"),
        (["--png", "links.gif"], r"does not end in .png"),
        (["--speed", "9"], "unknown flag --speed"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        links.parse(words)


def test_a_process_answers_with_its_collectives_and_with_seconds(config, tmp_path):
    small = links.with_values(
        links.layout_of(config, links.ALONE), model={"width": 32, "hidden": 64, "heads": 2}
    )
    (tmp_path / "alone.toml").write_text(utils.to_toml(small))
    command = [sys.executable, "benchmark.py", "links", "work", str(tmp_path / "alone.toml")]
    done = subprocess.run(command, cwd=ROOT, input="step\nstep\n", capture_output=True, text=True)
    messages, *seconds = map(json.loads, done.stdout.splitlines())
    assert messages == {} and len(seconds) == 2 and min(seconds) > 0


def test_a_process_that_ends_is_an_error_with_its_last_words(config, tmp_path):
    class Here(links.Host):
        def command(self, *words, folder):
            return ["sh", "-c", "echo no such device >&2"]

    job = links.Job("FSDP", config, [Here("a", "10.0.0.1")], 1, tmp_path)
    with pytest.raises(links.Fault, match="a process of FSDP ended: no such device"):
        job.started()
    job.close()
