"""The CORE metric: mean centered accuracy on 22 tasks (arXiv:2406.11794, section 3.5).

A task's centered accuracy is 0 for a guess and 1 for all answers right. The tasks, their examples
in the prompt and the accuracies of a guess are those of the paper's code (mlfoundations/dclm). The
questions are asked by lm-evaluation-harness, whose prompts differ from that code's, so a mean is
comparable to others that validate.py prints, and not to published ones.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Task(NamedTuple):
    name: str  # in the harness
    shots: int  # examples in the prompt
    guess: float = 0.0  # accuracy of a guess


TASKS = (
    Task("agieval_lsat_ar", 3, 0.2),
    Task("arc_challenge", 10, 0.25),
    Task("arc_easy", 10, 0.25),
    Task("bigbench_cs_algorithms_generate_until", 10),
    Task("bigbench_dyck_languages_generate_until", 10),
    Task("bigbench_language_identification_multiple_choice", 10, 0.091),
    Task("bigbench_operators_generate_until", 10),
    Task("bigbench_qa_wikidata_generate_until", 10),
    Task("bigbench_repeat_copy_logic_generate_until", 10),
    Task("boolq", 10, 0.62),
    Task("commonsense_qa", 10, 0.2),
    Task("copa", 0, 0.5),
    Task("coqa", 0),
    Task("hellaswag", 0, 0.25),
    Task("hellaswag", 10, 0.25),
    Task("lambada_openai", 0),
    Task("openbookqa", 0, 0.25),
    Task("piqa", 10, 0.5),
    Task("squad_completion", 10),
    Task("winogrande", 0, 0.5),
    Task("wsc273", 0, 0.5),
)
MISSING = ("jeopardy",)  # the harness has no such task
# Accuracies in the harness's results, best first. The paper divides likelihoods by length.
METRICS = ("acc_norm", "acc", "exact_match", "em", "contains")


def evaluate(run: Callable[[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the centered accuracy of each task, and their mean as "core".

    run  (names with commas between them, shots) -> the harness's results of these tasks
    """
    centered = {}
    for shots in sorted({task.shots for task in TASKS}):
        tasks = [task for task in TASKS if task.shots == shots]
        results = run(",".join(task.name for task in tasks), shots)["results"]
        for task in tasks:
            result = results[task.name]
            accuracy = next(result[f"{m},none"] for m in METRICS if f"{m},none" in result)
            centered[f"{task.name}, {shots} shots"] = (accuracy - task.guess) / (1 - task.guess)
    return centered | {"core": sum(centered.values()) / len(centered)}


def report(found: Mapping[str, Any], step: int) -> list[str]:
    lines = [f"step {step}, centered accuracy, without {' and '.join(MISSING)}"]
    width = max(map(len, found))
    return lines + [f"{name:{width}}  {value:7.4f}" for name, value in found.items()]
