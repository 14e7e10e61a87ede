import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from planning import schedule_report
from schedule import Schedule

SIZES = [
    (1, 1, 1),
    (1, 1, 5),
    (1, 3, 2),
    (2, 1, 1),
    (2, 1, 2),
    (2, 2, 2),
    (3, 1, 7),
    (3, 2, 6),
    (4, 1, 2),
    (4, 2, 8),
    (4, 3, 4),
    (8, 2, 16),
]
every_size = pytest.mark.parametrize("plan", [Schedule(*size) for size in SIZES], ids=str)


def ticks_of_tasks(plan):
    """Return {(fwd or bwd, stage, microbatch): tick} from the printed names and the phases."""
    found = {}
    for rank in range(plan.pipeline):
        names = iter(plan.tasks(rank))
        for tick in range(plan.ticks):
            for way, _, _ in plan.tasks_at(tick, rank):
                name = next(names)
                assert name.startswith(way)
                stage, microbatch = name.removeprefix(f"{way}_").split("__")
                found[way, int(stage), int(microbatch)] = tick
        assert next(names, None) is None
    return found


def test_two_ranks_and_two_microbatches_run_in_the_order_worked_by_hand():
    plan = Schedule(2, 1, 2)
    assert plan.tasks(0) == ["fwd_0__0", "fwd_0__1", "bwd_0__0", "bwd_0__1"]
    assert plan.tasks(1) == ["fwd_1__0", "bwd_1__0", "fwd_1__1", "bwd_1__1"]
    assert plan.ticks == 4
    assert plan.phases == [(0, 1, True, False), (1, 3, True, True), (3, 4, False, True)]


def test_one_rank_alternates_forward_and_backward():
    plan = Schedule(1, 1, 3)
    assert plan.tasks(0) == [f"{way}_0__{m}" for m in range(3) for way in ("fwd", "bwd")]
    assert plan.phases == [(0, 3, True, True)]
    assert plan.ring_slots == 1
    assert plan.bubble == 0


def test_two_ranks_of_two_model_chunks_run_in_the_order_worked_by_hand():
    plan = Schedule(2, 2, 2)
    first = "fwd_0__0 fwd_0__1 fwd_2__0 fwd_2__1 bwd_2__0 bwd_2__1 bwd_0__0 bwd_0__1"
    second = "fwd_1__0 fwd_1__1 fwd_3__0 bwd_3__0 fwd_3__1 bwd_3__1 bwd_1__0 bwd_1__1"
    assert [plan.tasks(0), plan.tasks(1)] == [first.split(), second.split()]


def test_four_ranks_of_two_chunks_with_eight_microbatches_take_26_ticks_and_idle_3_of_19():
    plan = Schedule(4, 2, 8)
    assert (plan.ticks, plan.bubble) == (26, Fraction(3, 19))
    fourth = "fwd_3__0 fwd_3__1 fwd_3__2 fwd_3__3 fwd_7__0 bwd_7__0 fwd_7__1 bwd_7__1"
    assert plan.tasks(3)[:8] == fourth.split()


@every_size
def test_every_stage_runs_every_microbatch_once_forward_and_once_backward(plan):
    names = [name for rank in range(plan.pipeline) for name in plan.tasks(rank)]
    wanted = [
        f"{way}_{stage}__{m}"
        for way in ("fwd", "bwd")
        for stage in range(plan.stages)
        for m in range(plan.microbatches)
    ]
    assert sorted(names) == sorted(wanted)


@every_size
def test_the_output_of_a_stage_is_used_by_its_neighbour_in_the_next_tick(plan):
    ticks = ticks_of_tasks(plan)
    for (way, stage, microbatch), tick in ticks.items():
        before = stage - 1 if way == "fwd" else stage + 1
        if 0 <= before < plan.stages:
            assert ticks[way, before, microbatch] == tick - 1


@every_size
def test_the_last_stage_runs_forward_and_backward_of_a_microbatch_in_one_tick(plan):
    ticks = ticks_of_tasks(plan)
    for microbatch in range(plan.microbatches):
        last = plan.stages - 1, microbatch
        assert ticks["bwd", *last] == ticks["fwd", *last]


@every_size
def test_tasks_run_only_in_phases_of_their_direction(plan):
    allowed = {
        (way, tick)
        for start, stop, *ways in plan.phases
        for way, runs in zip(("fwd", "bwd"), ways, strict=True)
        for tick in range(start, stop)
        if runs
    }
    assert {(way, tick) for (way, *_), tick in ticks_of_tasks(plan).items()} <= allowed
    assert [phase[0] for phase in plan.phases[1:]] == [phase[1] for phase in plan.phases[:-1]]
    assert (plan.phases[0][0], plan.phases[-1][1]) == (0, plan.ticks)


def misread(plan, slots):
    """Return backward tasks that read residuals of another task from a ring of this length."""
    wrong = []
    for rank in range(plan.pipeline):
        ring = {}
        for start, stop, forward, backward in plan.phases:
            for tick in range(start, stop):
                number = plan.forward_number(tick, rank)
                if forward:  # an idle slot also stores, because all ranks run the same operations
                    ring[number % slots] = number
                wanted = plan.backward_task(plan.backward_number(tick, rank))
                if backward and plan.is_task(plan.backward_number(tick, rank)):
                    number = plan.task_number(*wanted)
                    wrong += [(rank, wanted)] * (ring[number % slots] != number)
    return wrong


@every_size
def test_no_slot_of_the_ring_is_overwritten_before_it_is_read(plan):
    assert misread(plan, plan.ring_slots) == []


@pytest.mark.parametrize("size", [(2, 1, 3), (4, 2, 8), (4, 1, 2)], ids=str)
def test_a_ring_with_one_slot_less_is_overwritten_too_soon(size):
    plan = Schedule(*size)
    assert misread(plan, plan.ring_slots - 1)


@every_size
def test_the_bubble_counted_from_tasks_matches_the_formula(plan):
    ranks = range(plan.pipeline)
    tasks = sum(len(plan.tasks(rank)) for rank in ranks)
    slots = plan.pipeline * sum((stop - start) * (f + b) for start, stop, f, b in plan.phases)
    formula = Fraction(plan.pipeline - 1, plan.microbatches * plan.virtual + plan.pipeline - 1)
    assert 1 - Fraction(tasks, slots) == formula == plan.bubble


@every_size
def test_a_task_and_its_number_are_inverses(plan):
    for number in range(plan.tasks_per_rank):
        assert plan.task_number(*plan.forward_task(number)) == number
        chunk, microbatch = plan.backward_task(number)
        assert plan.task_number(plan.virtual - 1 - chunk, microbatch) == number


@every_size
def test_the_number_of_an_idle_slot_points_at_a_task(plan):
    for number in range(-plan.ticks, 2 * plan.ticks):
        chunk, microbatch = plan.forward_task(number)
        assert 0 <= chunk < plan.virtual
        assert 0 <= microbatch < plan.microbatches


def test_traced_integers_give_the_same_results_as_python_integers():
    plan = Schedule(4, 2, 8)

    def numbers(tick, rank):
        forward, backward = plan.forward_number(tick, rank), plan.backward_number(tick, rank)
        tasks = *plan.forward_task(forward), *plan.backward_task(backward)
        return forward, backward, plan.is_task(forward), plan.is_task(backward), *tasks

    ticks, ranks = jnp.meshgrid(jnp.arange(plan.ticks), jnp.arange(plan.pipeline))
    traced = jax.jit(jax.vmap(numbers))(ticks.ravel(), ranks.ravel())
    pairs = zip(ticks.ravel().tolist(), ranks.ravel().tolist(), strict=True)
    assert [tuple(a.tolist()) for a in traced] == list(
        zip(*(numbers(*p) for p in pairs), strict=True)
    )


def test_microbatches_that_do_not_fill_the_ranks_are_an_error_with_a_number_that_works():
    with pytest.raises(ValueError, match=r"--train.microbatches 6 .* Use --train.microbatches 8"):
        Schedule(4, 2, 6)
    assert Schedule(4, 2, 8).tasks_per_rank == 16
    assert Schedule(4, 1, 6).tasks_per_rank == 6


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 0, 1), (1, 1, 0)], ids=str)
def test_a_size_below_one_is_an_error(size):
    with pytest.raises(ValueError, match="must be 1 or more"):
        Schedule(*size)


def printed(capsys, flags):
    schedule_report.main(flags.split())
    return capsys.readouterr().out


def test_json_holds_one_list_of_tasks_per_rank(capsys):
    found = json.loads(printed(capsys, "--pipeline 4 --virtual 2 --microbatches 8 --json"))
    assert [len(tasks) for tasks in found["tasks"]] == [32] * 4
    assert found["tasks"][2] == Schedule(4, 2, 8).tasks(2)
    assert (found["ticks"], found["bubble"]) == (26, 3 / 19)


def test_json_of_one_rank_is_a_list_of_one_list(capsys):
    found = json.loads(printed(capsys, "--pipeline 2 --microbatches 2 --rank 1 --json"))
    assert found["tasks"] == [["fwd_1__0", "bwd_1__0", "fwd_1__1", "bwd_1__1"]]


def test_text_shows_the_grid_the_tasks_and_the_bubble_beside_the_formula(capsys):
    lines = printed(capsys, "--pipeline 2 --virtual 2 --microbatches 2").splitlines()
    assert "rank 1 fwd    . 0a 1a 0b 1b  .  .  ." in lines
    assert "rank 1 bwd    .  .  . 0b 1b 0a 1a  ." in lines
    assert f"rank 0: {' '.join(Schedule(2, 2, 2).tasks(0))}" in lines
    assert any(line.startswith("bubble   1/5 = 20.0%") for line in lines)
    assert any(line.startswith("formula") and line.endswith("= 1/5") for line in lines)


def test_a_rank_outside_the_pipeline_is_an_error(capsys):
    with pytest.raises(ValueError, match=r"--rank 4 does not exist.* Use --rank 3"):
        printed(capsys, "--pipeline 4 --rank 4")


def test_the_timeline_is_drawn_into_a_png(tmp_path):
    path = tmp_path / "plots" / "schedule.png"
    schedule_report.main(["--pipeline", "2", "--microbatches", "3", "--png", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_timeline_in_a_file_that_is_not_png_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"schedule.jpg does not end in .png"):
        schedule_report.main(["--png", str(tmp_path / "schedule.jpg")])
