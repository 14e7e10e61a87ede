"""Evaluation on multiple-choice questions, by the likelihood of each choice after the prompt.

    ./run.sh python validate.py --run runs/tiny --questions questions.jsonl

Each line of the file is one question: {"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}.
Answers count from 0. Prompt and choice are tokenized separately and joined without a space, so a
choice begins with the space it needs. The model's answer is the choice of the highest probability;
length-normalised, it is the choice of the highest log-probability per byte.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

import sharded_model
import train
from data.tokenizer import Tokenizer, check_ids, encode_continuation
from model import Transformer
from runtime import cli
from runtime.console import is_primary
from utils import LANES, Config, ConfigError, changed


@dataclass(frozen=True)
class Question:
    prompt: str
    choices: list[str]
    answer: int  # number of the right choice, from 0


def read_questions(file: Path) -> list[Question]:
    """Raises ConfigError that names an invalid line, and why."""
    lines = cli.read_lines("questions", file, "question")
    return [parse(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def parse(line: str, where: str) -> Question:
    with contextlib.suppress(ValueError):
        match json.loads(line):
            case {"prompt": str(prompt), "choices": [_, _, *_] as choices, "answer": answer}:
                texts = all(isinstance(text, str) and text for text in choices)
                if texts and type(answer) is int and answer in range(len(choices)):
                    return Question(prompt, choices, answer)
    raise ConfigError(
        f'{where} is not a question. Write it as {{"prompt": "2 + 2 =", "choices": [" 3", '
        '" 4"], "answer": 1}, with two or more choices that are not empty, and the number of '
        "the right one, from 0."
    )


Pair = tuple[list[int], list[int]]  # tokens of a context, and of the text after it


def log_likelihoods(
    config: Config, declared: Transformer, mesh: Mesh, w: Transformer, pairs: list[Pair]
) -> tuple[np.ndarray, np.ndarray]:
    """Return log p(text | context) of each (context, text), and whether greedy decoding gives the
    text. Runs batches of global_batch_size.

    Both have at least one token. What exceeds seq_len is cut at the start.
    """
    check_ids((ids for pair in pairs for ids in pair), config.model.vocab_size)
    t, n, step = config.train, len(pairs), LANES * config.mesh.sequence
    longest = max(len(context) + len(text) for context, text in pairs)
    T = min(-(-longest // step) * step, t.seq_len)
    ids = np.zeros((n, T + 1), np.int32)
    loss_weights = np.zeros((n, T), np.float32)
    for row, (context, text) in enumerate(pairs):
        both = [*context, *text][-T - 1 :]
        ids[row, : len(both)] = both
        loss_weights[row, max(0, len(both) - 1 - len(text)) : len(both) - 1] = 1

    def rows(start: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        numbers = np.minimum(start + numbers, n - 1)  # fills up the last batch
        return {
            "tokens": ids[numbers, :-1],
            "targets": ids[numbers, 1:],
            "loss_weights": loss_weights[numbers],
            "segments": np.zeros((len(numbers), T), np.int32),
        }

    run = jax.jit(
        sharded_model.token_losses(changed(config, {"train.seq_len": T}), declared, mesh),
        out_shardings=NamedSharding(mesh, P()),  # every process reads all of it
        compiler_options=train.compiler_options(mesh),
    )
    results, shape = [], (t.global_batch_size, T)
    starts = range(0, n, t.global_batch_size)
    quiet = not is_primary() or len(starts) < 2
    console = Console(stderr=True)  # standard output may be read by another program
    for start in track(starts, "questions", console=console, transient=True, disable=quiet):
        batch = train.put_batch(mesh, t.microbatches, partial(rows, start), shape)
        results.append(np.asarray(run(w, batch)).reshape(*shape, 2))
    loss_nT, is_likeliest_nT = np.moveaxis(np.concatenate(results)[:n], -1, 0)
    return -(loss_nT * loss_weights).sum(1), (is_likeliest_nT >= loss_weights).all(1)


def evaluate(
    scores: Callable, questions: list[Question], tokenizer: Tokenizer, begin: Sequence[int] = ()
) -> dict[str, Any]:
    """Return accuracy and its standard error, without and with length normalisation.

    scores  log_likelihoods of a model, as a function of pairs.
    begin   tokens that begin a document of the training data.
    """
    pairs = []
    for q in questions:
        context = [*begin, *tokenizer.encode_ordinary(q.prompt)] or [tokenizer.eot_token]
        # A choice without a prompt begins a text.
        encode = partial(encode_continuation, tokenizer) if q.prompt else tokenizer.encode_ordinary
        pairs += [(context, encode(choice)) for choice in q.choices]
    found = iter(scores(pairs)[0].tolist())
    by_question = [list(itertools.islice(found, len(q.choices))) for q in questions]
    right: dict[str, list[bool]] = {"accuracy": [], "accuracy_norm": []}
    for q, s in zip(questions, by_question, strict=True):
        sizes = [len(choice.encode()) for choice in q.choices]
        right["accuracy"].append(int(np.argmax(s)) == q.answer)
        right["accuracy_norm"].append(int(np.argmax(np.divide(s, sizes))) == q.answer)
    record: dict[str, Any] = {"questions": len(questions)}
    for name, answers in right.items():
        record[name], record[f"{name}_stderr"] = accuracy(answers)
    return record | {"log_likelihoods": by_question}


def accuracy(right: list[bool]) -> tuple[float, float | None]:
    """Return the share that is right, and its standard error sqrt(p (1 - p) / (n - 1))."""
    n, p = len(right), sum(right) / len(right)
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None


def report(record: dict[str, Any], file: Path) -> list[str]:
    lines = [f"step {record['step']} on {record['questions']} questions of {file}"]
    for name, key in (("accuracy", "accuracy"), ("normalised", "accuracy_norm")):
        error = record[f"{key}_stderr"]
        margin = f" +- {error:.2%}" if error is not None else ""
        lines.append(f"{name:12}  {record[key]:.2%}{margin}")
    return lines
