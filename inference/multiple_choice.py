"""Evaluation on multiple-choice questions, by the likelihood of each choice after the prompt.

    ./run.sh python validate.py --run runs/tiny --questions questions.jsonl

Each line of the file is one question: {"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}.
Answers count from 0. Prompt and choice are tokenized separately and joined without a space, so a
choice begins with the space it needs. The model's answer is the choice of the highest probability;
length-normalised, it is the choice of the highest log-probability per byte.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
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
from runtime.console import is_primary
from utils import LANES, Config, ConfigError


@dataclass(frozen=True)
class Question:
    prompt: str
    choices: list[str]
    answer: int  # number of the right choice, from 0


def read_questions(file: Path) -> list[Question]:
    """Raises ConfigError that names an invalid line, and why."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines also splits at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--questions {file} cannot be read: {error}.") from None
    found = [parse(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--questions {file} is empty. Write a question in each line.")
    return found


def parse(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
        q = Question(fields["prompt"], fields["choices"], fields["answer"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is not a question ({type(error).__name__}: {error}). Write it as "
            '{"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}.'
        ) from None
    texts = isinstance(q.choices, list) and all(isinstance(c, str) and c for c in q.choices)
    if not isinstance(q.prompt, str) or not texts or len(q.choices) < 2:
        raise ConfigError(
            f"{where}: the prompt must be a string, and choices a list of two or more strings that "
            "are not empty."
        )
    if type(q.answer) is not int or not 0 <= q.answer < len(q.choices):
        raise ConfigError(
            f"{where}: the answer {q.answer!r} is not one of the {len(q.choices)} choices. Use a "
            f"number from 0 to {len(q.choices) - 1}."
        )
    return q


class Scorer:
    """Log-likelihood of texts given their contexts, in batches of global_batch_size."""

    def __init__(self, config: Config, declared: Transformer, mesh: Mesh, length: int):
        """length  tokens of the longest context and text together."""
        step = math.lcm(LANES, config.mesh.tensor)
        T = min(-(-length // step) * step, config.train.seq_len)
        self.config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, seq_len=T)
        )
        self.mesh, self.T = mesh, T
        self.run = jax.jit(
            sharded_model.token_losses(self.config, declared, mesh),
            out_shardings=NamedSharding(mesh, P()),  # every process reads all of it
            compiler_options=train.compiler_options(mesh),
        )

    def __call__(
        self, w: Transformer, pairs: list[tuple[list[int], list[int]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log p(text | context) of each (context, text), and whether greedy decoding gives
        the text. Both have at least one token. What exceeds seq_len is cut at the start.
        """
        check_ids((ids for pair in pairs for ids in pair), self.config.model.vocab_size)
        t, n = self.config.train, len(pairs)
        ids = np.zeros((n, self.T + 1), np.int32)
        loss_weights = np.zeros((n, self.T), np.float32)
        for row, (context, text) in enumerate(pairs):
            both = [*context, *text][-self.T - 1 :]
            ids[row, : len(both)] = both
            loss_weights[row, max(0, len(both) - 1 - len(text)) : len(both) - 1] = 1
        starts = range(0, n, t.global_batch_size)
        quiet = not is_primary() or len(starts) < 2
        console = Console(stderr=True)  # standard output may be read by another program
        found = []
        for start in track(starts, "questions", console=console, transient=True, disable=quiet):

            def rows(numbers: np.ndarray, start: int = start) -> dict[str, np.ndarray]:
                numbers = np.minimum(start + numbers, n - 1)  # fills up the last batch
                return {
                    "tokens": ids[numbers, :-1],
                    "targets": ids[numbers, 1:],
                    "loss_weights": loss_weights[numbers],
                    "segments": np.zeros((len(numbers), self.T), np.int32),
                }

            shape = t.global_batch_size, self.T
            batch = train.put_batch(self.mesh, t.microbatches, rows, shape)
            found.append(np.asarray(self.run(w, batch)).reshape(*shape, 2))
        loss_nT, is_likeliest_nT = np.moveaxis(np.concatenate(found)[:n], -1, 0)
        scores = -(loss_nT * loss_weights).sum(1)
        return scores, (is_likeliest_nT >= loss_weights).all(1)


def evaluate(
    config: Config,
    declared: Transformer,
    mesh: Mesh,
    w: Transformer,
    questions: list[Question],
    tokenizer: Tokenizer,
    begin: Sequence[int] = (),
) -> dict[str, Any]:
    """Return accuracy and its standard error, without and with length normalisation.

    begin  tokens that begin a document of the training data.
    """
    pairs = []
    for q in questions:
        context = [*begin, *tokenizer.encode_ordinary(q.prompt)] or [tokenizer.eot_token]
        # A choice without a prompt begins a text.
        encode = partial(encode_continuation, tokenizer) if q.prompt else tokenizer.encode_ordinary
        pairs += [(context, encode(choice)) for choice in q.choices]
    longest = max(len(context) + len(text) for context, text in pairs)
    scores = iter(Scorer(config, declared, mesh, longest)(w, pairs)[0].tolist())
    by_question = [list(itertools.islice(scores, len(q.choices))) for q in questions]
    right: dict[str, list[bool]] = {"accuracy": [], "accuracy_norm": []}
    for q, s in zip(questions, by_question, strict=True):
        sizes = [len(choice.encode()) for choice in q.choices]
        right["accuracy"].append(int(np.argmax(s)) == q.answer)
        right["accuracy_norm"].append(int(np.argmax(np.divide(s, sizes))) == q.answer)
    found: dict[str, Any] = {"questions": len(questions)}
    for name, answers in right.items():
        found[name], found[f"{name}_stderr"] = accuracy(answers)
    return found | {"log_likelihoods": by_question}


def accuracy(right: list[bool]) -> tuple[float, float | None]:
    """Return the share that is right, and its standard error sqrt(p (1 - p) / (n - 1))."""
    n, p = len(right), sum(right) / len(right)
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None


def report(found: dict[str, Any], file: Path) -> list[str]:
    lines = [f"step {found['step']} on {found['questions']} questions of {file}"]
    for name, key in (("accuracy", "accuracy"), ("normalised", "accuracy_norm")):
        error = found[f"{key}_stderr"]
        margin = f" +- {error:.2%}" if error is not None else ""
        lines.append(f"{name:12}  {found[key]:.2%}{margin}")
    return lines
