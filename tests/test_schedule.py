import functools
import json
from fractions import Fraction

import pytest

import pipeline
from planning import schedule_report
from schedule import PHASES, Schedule

SIZES = [(1, 1, 5), (1, 3, 2), (2, 1, 1), (2, 2, 2), (3, 1, 7), (4, 1, 2), (4, 2, 8), (8, 3, 16)]
PLANS = [Schedule(*size, split) for split in (False, True) for size in SIZES]
every_size = pytest.mark.parametrize("plan", PLANS, ids=str)


def ways_of(plan):
    return ("fwd", "bwd", "wgt")[: 2 + plan.split_backward]


@functools.cache
def ticks_of_tasks(plan):
    """Return {(fwd, bwd or wgt, stage, microbatch): tick}."""
    return {
        (way, chunk * plan.pipeline + rank, microbatch): tick
        for rank in range(plan.pipeline)
        for tick in range(plan.ticks)
        for way, chunk, microbatch in plan.tasks_at(tick, rank)
    }


def test_tasks_run_in_the_order_worked_by_hand():
    plan = Schedule(2, 2, 2)
    first = "fwd_0__0 fwd_0__1 fwd_2__0 fwd_2__1 bwd_2__0 bwd_2__1 bwd_0__0 bwd_0__1"
    second = "fwd_1__0 fwd_1__1 fwd_3__0 bwd_3__0 fwd_3__1 bwd_3__1 bwd_1__0 bwd_1__1"
    assert [plan.tasks(0), plan.tasks(1)] == [first.split(), second.split()]
    assert Schedule(4, 2, 8).ticks == 26 and Schedule(4, 2, 8).bubble == Fraction(3, 19)
    plan = Schedule(1, 1, 3)  # no pipeline
    assert plan.tasks(0) == [f"{way}_0__{m}" for m in range(3) for way in ("fwd", "bwd")]
    assert (plan.phases, plan.ring_slots, plan.bubble) == ([(0, 3, True, True, False)], 1, 0)
    plan = Schedule(2, 1, 2, split_backward=True)
    first = ["fwd_0__0", "fwd_0__1", "bwd_0__0", "wgt_0__0", "bwd_0__1", "wgt_0__1"]
    second = ["fwd_1__0", "bwd_1__0", "fwd_1__1", "bwd_1__1", "wgt_1__0", "wgt_1__1"]
    assert [plan.tasks(0), plan.tasks(1)] == [first, second] and plan.bubble == Fraction(1, 4)
    assert (plan.ticks, [phase[2:] for phase in plan.phases]) == (
        Schedule(2, 1, 2).ticks,
        [(True, False, False), (True, True, False), (True, True, True), (False, True, True)],
    )


@every_size
def test_every_stage_runs_every_microbatch_once_in_each_direction_when_its_input_arrives(plan):
    ticks, stages, ways = ticks_of_tasks(plan), range(plan.stages), ways_of(plan)
    microbatches = range(plan.microbatches)
    assert ticks.keys() == {(w, s, m) for w in ways for s in stages for m in microbatches}
    assert len(ticks) == sum(len(plan.tasks(rank)) for rank in range(plan.pipeline))
    for (way, stage, microbatch), tick in ticks.items():
        [phase] = [phase for phase in plan.phases if phase[0] <= tick < phase[1]]
        assert phase[2 + ways.index(way)], "the phase has tasks of this kind"
        if way == "wgt":
            waited = tick - ticks["bwd", stage, microbatch]
            assert 0 <= waited < plan.pipeline, "until its slot is written again"
            continue
        before = stage - 1 if way == "fwd" else stage + 1
        if before in stages:
            assert ticks[way, before, microbatch] == tick - 1
        elif way == "bwd":
            assert ticks["fwd", stage, microbatch] == tick, "of the last stage, in one tick"
    ends = [plan.phases[0][0], *(phase[1] for phase in plan.phases)]
    assert ends == [*(phase[0] for phase in plan.phases), plan.ticks] and ends[0] == 0


def misread(plan, slots):
    """Return backward tasks that read residuals of another task from a ring of this length."""
    wrong = []
    for rank in range(plan.pipeline):
        ring = {}
        for start, stop, forward, *reading in plan.phases:
            for tick in range(start, stop):
                number = plan.forward_number(tick, rank)
                if forward:  # an idle slot also stores, because all ranks run the same operations
                    ring[number % slots] = number
                numbers = plan.backward_number(tick, rank), plan.weight_number(tick)
                for reads, task in zip(reading, numbers, strict=True):
                    if reads and plan.is_task(task):
                        number = plan.task_number(*(wanted := plan.backward_task(task)))
                        wrong += [(rank, wanted)] * (ring[number % slots] != number)
    return wrong


@every_size
def test_the_ring_is_as_long_as_its_residuals_need_and_idle_slots_make_the_bubble(plan):
    assert misread(plan, plan.ring_slots) == []
    assert plan.ring_slots == 1 or misread(plan, plan.ring_slots - 1)
    slots = plan.pipeline * sum((stop - start) * sum(f) for start, stop, *f in plan.phases)
    tasks, idle = plan.microbatches * plan.virtual, plan.pipeline - 1
    formula = Fraction(2 * idle, (2 + plan.split_backward) * tasks + 2 * idle)
    assert 1 - Fraction(len(ticks_of_tasks(plan)), slots) == formula == plan.bubble


@every_size
def test_first_and_last_run_once_for_each_microbatch_and_direction(plan):
    share = pipeline.branch_share(plan)
    for role in ("first", "last", "first_backward"):
        runs = 0
        for start, stop, *ways in plan.phases:
            never, once = share(f"step/{PHASES[tuple(ways)]}/while/body/{role}/cond")
            runs += (stop - start) * once
            assert never + once == 1
        assert runs == pytest.approx(plan.microbatches)


def test_sizes_without_a_schedule_are_an_error_with_a_number_that_works():
    with pytest.raises(ValueError, match=r"--train.microbatches 6 .* Use --train.microbatches 8"):
        Schedule(4, 2, 6)
    assert Schedule(4, 1, 6).tasks_per_rank == 6


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def printed(capsys):
    def run(flags):
        schedule_report.main(flags.split())
        return capsys.readouterr().out

    return run


def test_the_command_prints_or_draws_the_grid_the_tasks_and_the_bubble(printed, tmp_path):
    facts = json.loads(printed("--pipeline 4 --virtual 2 --microbatches 8 --rank 1 --json"))
    assert facts["tasks"] == [Schedule(4, 2, 8).tasks(1)]
    assert (facts["ticks"], facts["bubble"]) == (26, 3 / 19)
    path = tmp_path / "plots" / "schedule.png"
    text = printed(f"--pipeline 2 --virtual 2 --microbatches 2 --png {path}")
    assert "rank 1 fwd    . 0a 1a 0b 1b  .  .  .\n" in text
    assert "rank 1 bwd    .  .  . 0b 1b 0a 1a  .\n" in text
    assert f"rank 0: {' '.join(Schedule(2, 2, 2).tasks(0))}\n" in text
    assert "\nbubble   1/5 = 20.0%" in text and "= 1/5\n" in text
    assert path.read_bytes().startswith(b"\x89PNG")
    text = printed(f"--pipeline 2 --microbatches 2 --split_backward --png {path}")
    assert "rank 1 bwd    . 0a 1a  .\nrank 1 wgt    .  . 0a 1a\n" in text
    assert "wgt_1__0" in text and "\nbubble   1/4 = 25.0%" in text and "= 1/4\n" in text
    for flags, message in (
        ("--pipeline 4 --rank 4", "--rank 4 does not exist.* Use --rank 3"),
        ("--pipeline 0", "--pipeline 0 is out of range. Use an integer at least 1, or"),
        ("--pipelines 4", "unknown flag --pipelines: did you mean --pipeline?"),
        ("--png schedule.jpg", "schedule.jpg does not end in .png"),
    ):
        with pytest.raises(ValueError, match=message):
            printed(flags)
