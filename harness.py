"""A checkpoint under lm-evaluation-harness: validate.py --lm_eval TASK[,TASK].

Texts are cut into tokens as the harness does for models of Hugging Face, prompt and continuation
together, and a text longer than the model's context loses its start, as there. Needs the packages
of requirements-hf.txt, which nothing else imports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from jax.sharding import Mesh
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from data.tokenizer import Tokenizer, text_of
from generate import ENDED, Drawing, Writer, writing_mesh
from model import Transformer
from questions import Scorer
from utils import Config

TEXTS_AT_ONCE = 8  # that are written together


@dataclass(frozen=True)
class Asked:
    """What the harness is asked for."""

    tasks: str  # names with commas between
    include_path: Path | None  # folder of task files of one's own
    limit: int | None  # of the examples of each task; all if None


def evaluated(model: "Model", asked: Asked) -> dict[str, Any]:
    """The harness's results.

    Raises  ValueError for a task that there is not.
    """
    tasks = TaskManager(include_path=asked.include_path)
    names = asked.tasks.split(",")
    unknown = [name for name in names if not tasks.match_tasks([name])]
    if unknown:
        raise ValueError(
            f"--lm_eval {','.join(unknown)} is no task of lm-evaluation-harness. Use a name that "
            "`lm_eval ls tasks` prints, or one of your own files with --include_path FOLDER."
        )
    matching = tasks.match_tasks(names)
    return lm_eval.simple_evaluate(
        model, tasks=matching, limit=asked.limit, task_manager=tasks, log_samples=False
    )


def lines(found: dict[str, Any], step: int) -> list[str]:
    return [f"step {step}", *make_table(found).rstrip().splitlines()]


class Model(TemplateLM):
    """What the harness asks of a model, answered by Scorer and Writer. All processes are asked the
    same, and answer together.
    """

    def __init__(
        self,
        config: Config,
        declared: Transformer,
        mesh: Mesh,
        w: Transformer,
        tokenizer: Tokenizer,
        end_of_text: int,
        begin: Sequence[int] = (),
    ):
        """begin  tokens that begin a document of the training data."""
        super().__init__()
        self.config, self.declared, self.mesh, self.w = config, declared, mesh, w
        self.codec, self.end_of_text = tokenizer, end_of_text  # the harness has its own `tokenizer`
        self.context, self.begin = config.train.sequence_length, list(begin)

    @property
    def eot_token_id(self) -> int:
        return self.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """What a text without a prompt begins after."""
        return self.begin[0] if self.begin else self.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list:
        begin = [] if add_special_tokens is False else self.begin
        return begin + self.codec.encode_ordinary(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether it is what the likeliest tokens give) of each."""
        pairs = [(context, text) for _, context, text in requests]
        return list(zip(*(a.tolist() for a in self.scores(pairs)), strict=True))

    def scores(self, pairs: list[tuple[list[int], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        longest = max(len(context) + len(text) for context, text in pairs)
        return Scorer(self.config, self.declared, self.mesh, longest)(self.w, pairs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each text, in windows as long as the context; each token is counted once."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        windows = [list(self.windows(text)) for text in texts]
        scores = iter(self.scores([pair for some in windows for pair in some])[0].tolist())
        return [sum(next(scores) for _ in some) for some in windows]

    def windows(self, text: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        cut = get_rolling_token_windows(text, self.prefix_token_id, self.context, context_len=1)
        return map(make_disjoint_window, cut)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the likeliest tokens go on with, before the first of the stops."""
        asked = [(request.args[0], settings(request.args[1])) for request in requests]
        found: dict[int, str] = {}
        in_order = sorted(range(len(asked)), key=lambda i: asked[i][1])
        writer = self.writer() if asked else None
        for (tokens, stops), group in groupby(in_order, key=lambda i: asked[i][1]):
            numbers = list(group)
            for first in range(0, len(numbers), writer.B):
                some = numbers[first : first + writer.B]
                prompts = [asked[i][0] for i in some]
                found |= zip(some, self.written(writer, prompts, tokens, stops), strict=True)
        return [found[i] for i in range(len(asked))]

    def writer(self) -> Writer:
        config, mesh = writing_mesh(self.config, self.mesh)
        made = Writer(config, mesh, TEXTS_AT_ONCE, self.context, self.end_of_text, Drawing(0.0))
        self.ready = made.ready(self.w)
        return made

    def written(
        self, writer: Writer, prompts: list[str], tokens: int, stops: Sequence[str]
    ) -> list[str]:
        if tokens >= self.context:
            raise ValueError(
                f"a task asks for {tokens} tokens (max_gen_toks), and the model was trained on "
                f"{self.context} (train.sequence_length), so no prompt has room before them. Set "
                f"generation_kwargs: max_gen_toks: {max(1, self.context // 2)} in the task's file."
            )
        room = self.context - tokens
        texts = [self.tok_encode(prompt)[-room:] or [self.end_of_text] for prompt in prompts]
        made: list[list[int]] = [[] for _ in texts]
        writer.start(range(len(texts)), 0)
        for new_B in writer.write(self.ready, texts, tokens):
            for ids, new in zip(made, new_B.tolist(), strict=False):
                ids.append(new)
            said = [text_of(self.codec, ids) for ids in made]
            ended = [ids[-1] == ENDED for ids in made]
            if all(e or any(s in text for s in stops) for e, text in zip(ended, said, strict=True)):
                break
        return [postprocess_generated_text(text, list(stops), None) for text in said]


def settings(given: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(most tokens, stops) of a request.

    Raises  ValueError for one that is to be drawn.
    """
    found = normalize_gen_kwargs(given)
    if found["do_sample"]:
        raise ValueError(
            "a task asks for drawn text (generation_kwargs: do_sample), and here the likeliest "
            "tokens are taken. Set do_sample: false in the task's file."
        )
    return found["max_gen_toks"], tuple(stop for stop in found["until"] if stop)
