"""Validation loss and expert balance on fixed windows, during training and of a checkpoint.

    ./run.sh python validate.py --run runs/tiny
    ./run.sh python validate.py --run runs/tiny --step 200 --data.val data/other/val

Prints cross-entropy per token, perplexity, bits per byte of text and the balance of the experts.
Flags of main.py override the run's config, for example --mesh.fsdp 8 --mesh.pipeline 1.
--questions FILE evaluates multiple-choice questions instead (inference/multiple_choice.py).
--lm_eval TASK,TASK runs tasks of lm-evaluation-harness (inference/lm_eval_adapter.py), and --core
those of the CORE metric (inference/core_metric.py).
Experts are dropless. With --model.eval_capacity_factor above 0 they drop tokens beyond a capacity.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import checkpoint
import dataset
import hardware
import model
import sharded_model
import train
import utils
from data.tokenizer import text_tokens
from dataset import Dataset, Mixture
from inference import core_metric, multiple_choice
from model import Batch, Transformer
from runtime import cli, distributed, errors, jsonl, resume, run_directory
from runtime.console import log
from utils import Config, ConfigError, setting


class Validation:
    """Computes loss and expert balance on fixed windows, in microbatches of the training size.

    Where windows are no multiple of the global batch, the first ones fill the last batch. They have
    no loss there, and count in the balance of the experts.
    """

    def __init__(self, config: Config, declared: Transformer, mesh: Mesh, data: Mixture):
        self.config, self.mesh, self.data = config, mesh, data
        self.whole = train.evaluation_config(config)
        self.program = train.jitted_evaluation(config, declared, mesh)  # compiled by the loop
        self.batches: dict[str, Batch] = {}

    def lower(self, w: Any) -> Any:
        """Lower the program for weights of these shapes and layouts."""
        return self.program.lower(w, sharded_model.abstract_batch(self.whole, self.mesh))

    def __call__(self, w: Transformer) -> dict[str, Any]:
        """Return the record of an evaluation; of a mixture, the weighted mean and each loss."""
        records = {name: self._record(w, name, part) for name, part in self.data.parts.items()}
        record = records.get("")  # of a single dataset, whose name is empty
        if record is None:
            record = weighted_mean(self.data.shares, list(records.values()))
            record |= {f"loss/val/{name}": r["loss/val"] for name, r in records.items()}
        return record | {"bits_per_byte": with_perplexity(record, self.data)["bits_per_byte"]}

    def _record(self, w: Transformer, name: str, data: Dataset) -> dict[str, Any]:
        t = self.whole.train
        rows = t.global_batch_size
        if name not in self.batches:
            take, shape = partial(padded_rows, data, self.config.eval.sequences), (rows, t.seq_len)
            self.batches[name] = train.put_batch(self.mesh, t.microbatches, take, shape)
        stats, m = jax.device_get(self.program(w, self.batches[name])), self.config.model
        record = {
            "loss/val": float(stats.cross_entropy),
            "loss/val_balance": None,
            "moe/tokens_per_expert": [],
            "moe/dropped": None,
        }
        if stats.tokens_per_expert is not None:
            counts = stats.tokens_per_expert.reshape(-1, m.n_routed_experts)
            choices = rows * t.seq_len * m.num_experts_per_tok * len(counts)
            record["loss/val_balance"] = float(stats.balance)
            record["moe/tokens_per_expert"] = counts.tolist()
            record["moe/dropped"] = int(stats.dropped) / choices
        return record


def padded_rows(data: Dataset, sequences: int, numbers: np.ndarray) -> dataset.Rows:
    """Return rows of `sequences` windows, which begin again, without a loss, where they end."""
    rows = data.eval_rows(numbers % sequences, sequences)
    rows["loss_weights"][numbers >= sequences] = 0
    return rows


def weighted_mean(shares: Sequence[float], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each value; None if the value is None."""
    means = {}
    for name, first in records[0].items():
        values = (share * np.array(r[name]) for share, r in zip(shares, records, strict=True))
        means[name] = None if first is None else np.asarray(sum(values)).tolist()
    return means


# --- the result of a run --------------------------------------------------------------------------


def with_perplexity(record: dict[str, Any], data: Mixture) -> dict[str, Any]:
    """Add perplexity, and bits per byte of the text whose tokens have a loss, to a record."""
    bits, text_bytes = 0.0, 0.0  # per token
    for share, (name, part) in zip(data.shares, data.parts.items(), strict=True):
        m = part.manifest
        tokens = m.tokens if m.learned_tokens is None else m.learned_tokens
        bits += share * record[f"loss/val/{name}".rstrip("/")] / math.log(2)
        text_bytes += share * m.text_bytes / tokens
    loss = record["loss/val"]
    perplexity = math.inf if loss > 700 else math.exp(loss)  # of a run that diverged
    return record | {"perplexity": perplexity, "bits_per_byte": bits / text_bytes}


def guesses(config: Config, data: Mixture) -> dict[str, float]:
    """Return bits per byte of two guesses of each token of the evaluated windows: uniform, and by
    how often each token is in them.
    """
    entropies, n = {}, config.eval.sequences
    for name, part in data.parts.items():
        rows = part.eval_rows(np.arange(n), n)
        _, count = np.unique(rows["targets"][rows["loss_weights"] > 0], return_counts=True)
        share = count / count.sum()
        entropies[f"loss/val/{name}".rstrip("/")] = -float(share @ np.log(share))
    shares = zip(data.shares, entropies.values(), strict=True)
    mean = {"loss/val": sum(share * entropy for share, entropy in shares)} | entropies
    uniform = dict.fromkeys(mean, math.log(config.model.vocab_size))
    records = {"uniform": uniform, "by frequency": mean}
    return {name: with_perplexity(r, data)["bits_per_byte"] for name, r in records.items()}


def result(config: Config, data: Mixture | None) -> str:
    """Describe a finished run: its last validation loss, its files, and what can follow."""
    run = run_directory.of(config)
    records = jsonl.read(run.files / "metrics.jsonl")
    losses = [r for r in records if r.get("loss/val") is not None]
    text = f"{run}: {config.train.steps} steps"
    if losses:
        text += f", validation loss {losses[-1]['loss/val']:.4f} after {losses[-1]['step']}"
    if losses and data:
        bits, others = with_perplexity(losses[-1], data)["bits_per_byte"], guesses(config, data)
        text += f": {bits:.2f} bits per byte of text. Guesses need "
        text += " and ".join(f"{bits:.2f} ({name})" for name, bits in others.items())
    names = ["report.html", "metrics.jsonl", "samples.jsonl", "plots", "config.toml"]
    paths = [f"{run}/{name}" for name in names if (run.files / name).exists()]
    if run.has_checkpoints():
        paths.append(str(run.checkpoints))
        text += "\nnext: " + "\n      ".join(resume.next_commands(run, config))
    return f"{text}\nfiles: {', '.join(paths)}"


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of validate.py; those of main.py are accepted too."""

    run: str  # directory of the run, for example runs/tiny or gs://bucket/runs/tiny
    step: int | None = None  # step of a kept checkpoint; default: the newest valid one
    questions: Path | None = None  # JSON lines of prompt, choices and answer to evaluate instead
    lm_eval: str | None = None  # tasks of lm-evaluation-harness to run instead, comma-separated
    core: bool = False  # the tasks of the CORE metric of lm-evaluation-harness, and their mean
    include_path: Path | None = None  # directory of your own task files, for --lm_eval
    # maximum number of examples per task of --lm_eval
    limit: int | None = setting(None, at_least=1)
    json: bool = False  # print JSON instead of lines


def main(arguments: list[str] | None = None) -> None:
    """Print the evaluation of a checkpoint."""
    flags, rest = cli.parse_known(Flags, arguments, __doc__)
    run = run_directory.at(flags.run)
    config = resume.config_of(run, rest, Flags)
    check(flags)
    questions = multiple_choice.read_questions(flags.questions) if flags.questions else []
    declared = model.declare(config)
    sharded_model.schedule_of(config)
    data = None if questions or flags.lm_eval or flags.core else dataset.open_validation(config)
    with distributed.job(replicas=config.mesh.replica):
        config = utils.for_platform(config, hardware.platform_of_device(jax.devices()[0]))
        mesh = train.make_mesh(config)
        shapes = train.abstract_state(config, declared, mesh).weights
        step, w, stored = checkpoint.load_weights(run, flags.step, shapes)
        scores = partial(multiple_choice.log_likelihoods, config, declared, mesh, w)
        if flags.lm_eval or flags.core:
            from inference import lm_eval_adapter  # late: its packages are optional

            tokens = text_tokens(stored["tokens"], run)
            adapter = lm_eval_adapter.Model(config, mesh, w, scores, tokens)
            options = flags.include_path, flags.limit
            evaluate = partial(lm_eval_adapter.evaluate, adapter, *options)
            if flags.core:
                record = core_metric.evaluate(evaluate)
                text = core_metric.report(record, step)
            else:
                results = evaluate(flags.lm_eval)
                text = lm_eval_adapter.report(results, step)
                record = {"results": results["results"]}
        elif questions:
            tokenizer, begin, _ = text_tokens(stored["tokens"], run)
            record = multiple_choice.evaluate(scores, questions, tokenizer, begin)
            text = multiple_choice.report({"step": step} | record, flags.questions)
        else:
            record = with_perplexity(Validation(config, declared, mesh, data)(w), data)
            text = report({"step": step} | record, config, data)
        log(json.dumps(jsonl.plain({"step": step} | record)) if flags.json else "\n".join(text))


def check(flags: Flags) -> None:
    """Raises ConfigError for conflicting flags, or a missing package."""
    if bool(flags.questions) + bool(flags.lm_eval) + flags.core > 1:
        raise ConfigError("--questions, --lm_eval and --core: each is an evaluation. Give one.")
    harness = "--core" if flags.core else flags.lm_eval and "--lm_eval"
    if not harness and (flags.include_path or flags.limit is not None):
        raise ConfigError("--include_path and --limit need --lm_eval. Add --lm_eval TASK.")
    if harness:
        cli.check_packages(harness, "-r requirements-hf.txt", "lm_eval")


def report(record: dict[str, Any], config: Config, data: Mixture) -> list[str]:
    windows, T = config.eval.sequences, config.train.seq_len
    lines = [
        f"step {record['step']} on {windows} windows of {T} tokens of {data.folder}",
        f"loss           {record['loss/val']:.4f} nats per token",
        f"perplexity     {record['perplexity']:.2f}",
        f"bits per byte  {record['bits_per_byte']:.4f}",
    ]
    losses = {name[9:]: loss for name, loss in record.items() if name.startswith("loss/val/")}
    lines += [f"loss of {name:<6} {loss:.4f}" for name, loss in losses.items()]
    if record["loss/val_balance"] is not None:
        lines.append(f"balance        {record['loss/val_balance']:.3f} (1 is even)")
        lines.append(f"dropped        {record['moe/dropped']:.2%} of the choices of an expert")
    return lines


if __name__ == "__main__":
    errors.run_command(main)
