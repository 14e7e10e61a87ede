"""The test of problem A.6."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
from answers import Schedule

answer = check.load_answer()
for pipeline in (1, 2, 3, 4, 8):
    for microbatches in range(1, 9):
        schedule = Schedule(pipeline, 1, microbatches)
        for rank in range(pipeline):
            for tick in range(schedule.ticks):
                for way, _, microbatch in schedule.tasks_at(tick, rank):
                    if way == "fwd":
                        continue
                    found = answer.backward_tick(pipeline, rank, microbatch)
                    if found != tick:
                        print(
                            f"not right: with {pipeline} ranks, rank {rank} runs the backward task "
                            f"of microbatch {microbatch} at tick {tick}, and you return {found}."
                        )
                        sys.exit(1)
print("right: 40 schedules.")
