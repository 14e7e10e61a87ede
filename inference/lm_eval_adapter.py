"""Evaluation by lm-evaluation-harness: validate.py --lm_eval TASK[,TASK].

Prompt and continuation are tokenized together, and a text longer than the model's context loses its
start, as in the harness's own models. Needs the packages of requirements-hf.txt.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval
from jax.sharding import Mesh
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from data.tokenizer import TextTokens, text_of
from inference.sampling import ENDED, Generator, SamplingOptions, generation_mesh
from model import Transformer
from utils import Config, ConfigError

BATCH_SIZE = 8  # texts that are generated together


def evaluate(
    model: "Model",
    include_path: Path | None,
    limit: int | None,
    tasks: str,
    shots: int | None = None,
) -> dict[str, Any]:
    """Return the harness's results; the arguments are flags of validate.py.

    shots  examples in the prompt; None for each task's own number

    Raises  ConfigError for an unknown task.
    """
    manager, names = TaskManager(include_path=include_path), tasks.split(",")
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"--lm_eval {','.join(unknown)} is not a task of lm-evaluation-harness. Use a name "
            "that `lm_eval ls tasks` prints, or your own task file with --include_path FOLDER."
        )
    matching = manager.match_tasks(names)
    options = {"task_manager": manager, "log_samples": False, "num_fewshot": shots}
    return lm_eval.simple_evaluate(model, tasks=matching, limit=limit, **options)


def report(results: dict[str, Any], step: int) -> list[str]:
    return [f"step {step}", *make_table(results).rstrip().splitlines()]


class Model(TemplateLM):
    """The harness's model interface. Every process gets the same requests and computes together."""

    def __init__(
        self, config: Config, mesh: Mesh, w: Transformer, scores: Callable, tokens: TextTokens
    ):
        """scores  log_likelihoods of multiple_choice.py, as a function of pairs."""
        super().__init__()
        self.config, self.mesh, self.w, self.scores = config, mesh, w, scores
        self.codec, self.begin, self.ends = tokens  # the harness has its own `tokenizer`
        self.context = config.train.seq_len

    @property
    def eot_token_id(self) -> int:
        return self.ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no prompt."""
        return self.begin[0] if self.begin else self.ends[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list:
        begin = [] if add_special_tokens is False else self.begin
        return begin + self.codec.encode_ordinary(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log p(continuation | context), whether greedy decoding gives it) of each."""
        pairs = [(context, text) for _, context, text in requests]
        return list(zip(*(a.tolist() for a in self.scores(pairs)), strict=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each text, in windows of the context's length; tokens count once."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        windows = [list(self.windows(text)) for text in texts]
        scores = iter(self.scores([pair for some in windows for pair in some])[0].tolist())
        return [sum(next(scores) for _ in some) for some in windows]

    def windows(self, text: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        cut = get_rolling_token_windows(text, self.prefix_token_id, self.context, context_len=1)
        return map(make_disjoint_window, cut)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy completions, each up to the first of its stop strings."""
        completions: list[str] = []
        for options, group in groupby(requests, lambda each: generation_options(each.args[1])):
            prompts = [request.args[0] for request in group]
            for first in range(0, len(prompts), BATCH_SIZE):
                completions += self.complete(prompts[first : first + BATCH_SIZE], *options)
        return completions

    @cached_property
    def generator(self) -> Generator:
        config, mesh = generation_mesh(self.config, self.mesh)
        greedy = SamplingOptions(temperature=0.0)
        generator = Generator(config, mesh, BATCH_SIZE, self.context, self.ends, greedy)
        self.decoding_weights = generator.convert_weights(self.w)
        return generator

    def complete(self, prompts: list[str], tokens: int, stops: Sequence[str]) -> list[str]:
        if tokens >= self.context:
            raise ConfigError(
                f"a task requests {tokens} tokens (max_gen_toks), and the model was trained on "
                f"{self.context} (train.seq_len), which leaves none for the prompt. Set "
                f"generation_kwargs: max_gen_toks: {max(1, self.context // 2)} in the task's file."
            )
        left = self.context - tokens
        texts = [self.tok_encode(prompt)[-left:] or self.ends[:1] for prompt in prompts]
        made: list[list[int]] = [[] for _ in texts]
        self.generator.reset(range(len(texts)), 0)
        for new_B in self.generator.generate(self.decoding_weights, texts, tokens):
            for ids, new in zip(made, new_B.tolist(), strict=False):
                ids.append(new)
            completions = [text_of(self.codec, ids) for ids in made]
            if all(
                ids[-1] == ENDED or any(stop in text for stop in stops)
                for ids, text in zip(made, completions, strict=True)
            ):
                break
        return [postprocess_generated_text(text, list(stops), None) for text in completions]


def generation_options(arguments: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return (maximum tokens, stop strings) of a request.

    Raises  ConfigError for a request that samples.
    """
    options = normalize_gen_kwargs(arguments)
    if options["do_sample"]:
        raise ConfigError(
            "a task requests sampling (generation_kwargs: do_sample), and only greedy decoding is "
            "supported. Set do_sample: false in the task's file."
        )
    return options["max_gen_toks"], tuple(stop for stop in options["until"] if stop)
