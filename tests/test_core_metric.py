"""The CORE metric: which tasks are asked how, and accuracies over that of a guess."""

import pytest

from inference import core_metric


def test_the_metric_is_the_mean_over_tasks_of_the_share_between_a_guess_and_all():
    asked = []

    def run(names, shots):
        asked.append((shots, names.count(",") + 1))
        results = {name: {"acc,none": 0.0, "alias": name} for name in names.split(",")}
        for name, result in results.items():
            guess = {task.name: task.guess for task in core_metric.TASKS}[name]
            result["acc_norm,none"] = 1.0 if shots == 0 else guess
        return {"results": results}

    found = core_metric.evaluate(run)
    assert asked == [(0, 7), (3, 1), (10, 13)]
    assert (
        len(found) == 22 and found["hellaswag, 0 shots"] == 1 and not found["hellaswag, 10 shots"]
    )
    assert found["core"] == pytest.approx(7 / 21)
    lines = core_metric.report(found, 7)
    assert lines[0] == "step 7, centered accuracy, without jeopardy" and len(lines) == 23
