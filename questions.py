"""Multiple-choice questions, answered by the likelihood of each choice after the prompt.

    ./run.sh python validate.py --run runs/tiny --questions questions.jsonl

A line of the file is one question: {"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}, its
answer counted from 0. Prompt and choice are tokenized apart and joined as they are: choices begin
with the space that they need. The model's answer is the choice of the highest probability, or, with
length normalised, of the highest log-probability per byte of its text.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

import passes
import train
from data.tokenizer import Tokenizer
from metrics import is_primary
from model import Transformer
from utils import LANES, Config


@dataclass(frozen=True)
class Question:
    prompt: str
    choices: list[str]
    answer: int  # number of the right choice, from 0


def read(file: Path) -> list[Question]:
    """Raises  ValueError that names the line which is not a question, and why."""
    try:
        lines = file.read_text().split("\n")  # splitlines also cuts at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--questions {file} cannot be read: {error}.") from None
    found = [question(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"--questions {file} is empty. Write a question in each line.")
    return found


def question(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
        one = Question(fields["prompt"], fields["choices"], fields["answer"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is no question ({type(error).__name__}: {error}). Write it as "
            '{"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}.'
        ) from None
    texts = isinstance(one.choices, list) and all(isinstance(c, str) and c for c in one.choices)
    if not isinstance(one.prompt, str) or not texts or len(one.choices) < 2:
        raise ValueError(
            f"{where}: the prompt is a text, and choices are two or more that say any."
        )
    if type(one.answer) is not int or not 0 <= one.answer < len(one.choices):
        raise ValueError(
            f"{where}: the answer {one.answer!r} is none of the {len(one.choices)} choices. Use a "
            f"number from 0 to {len(one.choices) - 1}."
        )
    return one


class Scorer:
    """Log-likelihood of texts after others, in passes of one size."""

    def __init__(self, config: Config, declared: Transformer, mesh: Mesh, length: int):
        """length  tokens of the longest text with what is before it."""
        step = math.lcm(LANES, config.mesh.tensor)
        T = min(-(-length // step) * step, config.train.sequence_length)
        self.config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, sequence_length=T)
        )
        self.mesh, self.T = mesh, T
        self.run = jax.jit(
            passes.token_losses(self.config, declared, mesh),
            out_shardings=NamedSharding(mesh, P()),  # every process reads all of it
            compiler_options=train.compiler_options(mesh),
        )

    def __call__(
        self, w: Transformer, pairs: list[tuple[list[int], list[int]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """log p(text | context) of each (context, text), at least a token each, and whether each of
        the text's tokens is the likeliest. What exceeds the model's context is cut off at the
        start.
        """
        ids = np.zeros((len(pairs), self.T + 1), np.int32)
        counts = np.zeros((len(pairs), self.T), np.float32)
        for row, (context, text) in enumerate(pairs):
            both = [*context, *text][-self.T - 1 :]
            ids[row, : len(both)] = both
            counts[row, max(0, len(both) - 1 - len(text)) : len(both) - 1] = 1
        t = self.config.train
        starts = range(0, len(pairs), t.sequences)
        quiet = not is_primary() or len(starts) < 2
        found, likeliest = [], []
        console = Console(stderr=True)  # the result may be read by another program
        for start in track(starts, "questions", console=console, transient=True, disable=quiet):

            def rows(numbers: np.ndarray, start: int = start) -> dict[str, np.ndarray]:
                at = np.minimum(start + numbers, len(pairs) - 1)  # the last pass is filled up
                zeros = np.zeros((len(at), self.T), np.int32)
                tokens, targets = ids[at, :-1], ids[at, 1:]
                return {
                    "tokens": tokens,
                    "targets": targets,
                    "loss_weights": counts[at],
                    "segments": zeros,
                }

            batch = train.put_batch(self.mesh, t.microbatches, rows, (t.sequences, self.T))
            made = np.asarray(self.run(w, batch)).reshape(t.sequences, self.T, 2)
            some = counts[start : start + t.sequences]
            found.append(-(made[: len(some), :, 0] * some).sum(1))
            likeliest.append((made[: len(some), :, 1] >= some).all(1))
        return np.concatenate(found), np.concatenate(likeliest)


def answered(
    config: Config,
    declared: Transformer,
    mesh: Mesh,
    w: Transformer,
    asked: list[Question],
    tokenizer: Tokenizer,
    begin: Sequence[int] = (),
) -> dict[str, Any]:
    """Accuracy and its standard error, without and with length normalised.

    begin  tokens that begin a document of the training data.
    """
    prompts = [[*begin, *tokenizer.encode_ordinary(q.prompt)] for q in asked]
    contexts = [prompt or [tokenizer.eot_token] for prompt in prompts]
    pairs = [
        (context, tokenizer.encode_ordinary(choice))
        for q, context in zip(asked, contexts, strict=True)
        for choice in q.choices
    ]
    longest = max(len(context) + len(text) for context, text in pairs)
    scores = iter(Scorer(config, declared, mesh, longest)(w, pairs)[0].tolist())
    each = [list(itertools.islice(scores, len(q.choices))) for q in asked]
    sizes = [[len(choice.encode()) for choice in q.choices] for q in asked]
    right = [int(np.argmax(s)) == q.answer for q, s in zip(asked, each, strict=True)]
    right_per_byte = [
        int(np.argmax(np.divide(s, size))) == q.answer
        for q, s, size in zip(asked, each, sizes, strict=True)
    ]
    plain, normalised = share(right), share(right_per_byte)
    return {
        "questions": len(asked),
        "accuracy": plain[0],
        "accuracy_stderr": plain[1],
        "accuracy_norm": normalised[0],
        "accuracy_norm_stderr": normalised[1],
        "log_likelihoods": each,
    }


def share(right: list[bool]) -> tuple[float, float | None]:
    """Of what is right, with the standard error of a mean, sqrt(p (1 - p) / (n - 1))."""
    n, p = len(right), sum(right) / len(right)
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None


def lines(found: dict[str, Any], file: Path) -> list[str]:
    out = [f"step {found['step']} on {found['questions']} questions of {file}"]
    for name, key in (("accuracy", "accuracy"), ("normalised", "accuracy_norm")):
        error = found[f"{key}_stderr"]
        out.append(
            f"{name:12}  {found[key]:.2%}" + (f" +- {error:.2%}" if error is not None else "")
        )
    return out
