"""Validation on fixed windows: during training, and of any checkpoint on any shards.

    ./run.sh python validate.py --run runs/tiny
    ./run.sh python validate.py --run runs/tiny --step 200 --data.val data/other/val

Prints cross-entropy per token, perplexity, bits per byte of text and the balance of the experts.
Takes main.py's flags as well, over the run's own config: `--mesh.fsdp 8 --mesh.pipeline 1`.
With --questions FILE it answers multiple-choice questions instead (questions.py), and with
--lm_eval TASK,TASK it runs tasks of lm-evaluation-harness (harness.py).
Where experts have no room for all, which of their choices are dropped depends on the mesh.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import faults
import metrics
import mixture
import model
import multihost
import passes
import questions
import resume
import run_folder
import train
import utils
from dataset import Dataset
from metrics import say
from mixture import Mixture
from model import Batch, Transformer
from utils import Config


class Validation:
    """Loss and routing on fixed windows, in forward passes as large as a training step's."""

    def __init__(self, config: Config, declared: Transformer, mesh: Mesh, data: Mixture):
        self.config, self.mesh = config, mesh
        self.parts = parts_of(data)
        rounds = config.eval.sequences // config.train.sequences
        self.microbatches = config.train.microbatches * rounds
        part = dataclasses.replace(config.train, microbatches=self.microbatches)
        self.run = jax.jit(
            passes.evaluate(dataclasses.replace(config, train=part), declared, mesh),
            out_shardings=NamedSharding(mesh, P()),  # every process can read all of it
            compiler_options=train.compiler_options(mesh),
        )
        self.compiled: Any = None  # with the first batch
        self.batches: dict[str, Batch] = {}

    def __call__(self, w: Transformer) -> dict[str, Any]:
        """The record of an evaluation, without its step. Of a mixture the mean by its shares, and
        the loss on each of its datasets.
        """
        records = {name: self._record(w, name, part.data) for name, part in self.parts.items()}
        if not any(records):
            return records[""]
        shares = [part.share for part in self.parts.values()]
        found = mean(shares, list(records.values()))
        return found | {f"loss/val/{name}": r["loss/val"] for name, r in records.items()}

    def _record(self, w: Transformer, name: str, data: Dataset) -> dict[str, Any]:
        sequences, T = self.config.eval.sequences, self.config.train.sequence_length
        if name not in self.batches:
            rows = partial(data.eval_rows, sequences=sequences)
            shape = sequences, T
            self.batches[name] = train.put_batch(self.mesh, self.microbatches, rows, shape)
        if self.compiled is None:
            self.compiled = train.compiled(self.run, w, self.batches[name])
        stats, m = jax.device_get(self.compiled(w, self.batches[name])), self.config.model
        record = {
            "loss/val": float(stats.cross_entropy),
            "loss/val_balance": None,
            "moe/tokens_per_expert": [],
            "moe/dropped": None,
        }
        if stats.tokens_per_expert is not None:
            choices = sequences * T * m.experts_per_token * m.blocks
            record["loss/val_balance"] = float(stats.balance)
            record["moe/tokens_per_expert"] = stats.tokens_per_expert.reshape(m.blocks, -1).tolist()
            record["moe/dropped"] = int(stats.dropped) / choices
        return record


class Part(NamedTuple):
    """A dataset, and its share in every batch of training."""

    data: Dataset
    share: float


def parts_of(data: Mixture) -> dict[str, Part]:
    """By name; that of a dataset alone is empty."""
    both = zip(data.parts.items(), data.shares, strict=True)
    return {name: Part(part, share) for (name, part), share in both}


def mean(shares: list[float], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each value by these shares; None where there is none."""
    found = {}
    for name, first in records[0].items():
        values = [np.array(record[name]) for record in records] if first is not None else []
        value = sum(share * value for share, value in zip(shares, values, strict=False))
        found[name] = None if first is None else np.asarray(value).tolist()
    return found


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of validate.py beside those of main.py."""

    run: str  # folder of the run, as runs/tiny or gs://bucket/runs/tiny
    step: int | None = None  # of a checkpoint that is still kept; the newest good one if not given
    questions: Path | None = None  # JSON lines of prompt, choices and answer, asked instead
    lm_eval: str | None = None  # tasks of lm-evaluation-harness, with commas between, run instead
    include_path: Path | None = None  # folder with task files of one's own, for --lm_eval
    limit: int | None = None  # most examples of each task of --lm_eval
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # print JSON instead of lines


def main(arguments: list[str] | None = None) -> None:
    """Print the validation of a checkpoint."""
    flags, rest = tyro.cli(
        Flags, args=arguments, return_unknown_args=True, use_underscores=True, description=__doc__
    )
    run = run_folder.at(flags.run)
    config = resume.config_of(run, rest, Flags)
    check(flags)
    asked = questions.read(flags.questions) if flags.questions else []
    harness = import_harness() if flags.lm_eval else None
    declared = model.declare(config)
    passes.schedule_of(config)
    data = None if asked or harness else mixture.open_validation(config)
    with multihost.job(replicas=config.mesh.replica):
        _validate(flags, run, config, declared, data, asked, harness)


def _validate(
    flags: Flags,
    run: run_folder.Folder,
    config: Config,
    declared: Transformer,
    data: Mixture | None,
    asked: list[questions.Question],
    harness: ModuleType | None,
) -> None:
    config = utils.for_platform(config, jax.default_backend())
    mesh = train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    step, w, told = resume.weights_of(run, flags.step, shapes)
    if harness:
        known = resume.tokenizer_of(told["tokens"], config)
        asked = harness.Asked(flags.lm_eval, flags.include_path, flags.limit)
        found = harness.evaluated(harness.Model(config, declared, mesh, w, *known), asked)
        text, found = harness.lines(found, step), {"results": found["results"]}
    elif asked:
        tokenizer, _, begin = resume.tokenizer_of(told["tokens"], config)
        found = questions.answered(config, declared, mesh, w, asked, tokenizer, begin)
        text = questions.lines({"step": step} | found, flags.questions)
    else:
        found = extended(Validation(config, declared, mesh, data)(w), data)
        text = lines({"step": step} | found, config, data)
    say(json.dumps(metrics.plain({"step": step} | found)) if flags.json else "\n".join(text))


def check(flags: Flags) -> None:
    """Raises ValueError for flags that do not go together, or a limit that leaves nothing."""
    if flags.questions and flags.lm_eval:
        raise ValueError("--questions and --lm_eval are two validations. Give one of them.")
    if not flags.lm_eval and (flags.include_path or flags.limit is not None):
        raise ValueError("--include_path and --limit are for --lm_eval. Add --lm_eval TASK.")
    if flags.limit is not None and flags.limit < 1:
        raise ValueError(f"--limit {flags.limit} leaves no example. Use 1 or more.")


def import_harness() -> ModuleType:
    """harness.py, whose packages are not among those of requirements.txt."""
    try:
        import harness
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--lm_eval needs the package {error.name}, which is not installed. Install it with "
            "./run.sh python -m pip install -r requirements-hf.txt."
        ) from None
    return harness


def extended(record: dict[str, Any], data: Mixture) -> dict[str, Any]:
    """The record with what follows from its loss: perplexity, and bits per byte of the text that
    the loss is of.
    """
    bits, text_bytes = 0.0, 0.0  # of a token of the validation
    for name, part in parts_of(data).items():
        m = part.data.manifest
        tokens = m.tokens if m.learned_tokens is None else m.learned_tokens
        bits += part.share * record[f"loss/val/{name}".rstrip("/")] / math.log(2)
        text_bytes += part.share * m.text_bytes / tokens
    loss = record["loss/val"]
    perplexity = math.inf if loss > 700 else math.exp(loss)  # of a run that was lost
    return record | {"perplexity": perplexity, "bits_per_byte": bits / text_bytes}


def lines(found: dict[str, Any], config: Config, data: Mixture) -> list[str]:
    windows, T = config.eval.sequences, config.train.sequence_length
    out = [
        f"step {found['step']} on {windows} windows of {T} tokens of {data.folder}",
        f"loss           {found['loss/val']:.4f} nats per token",
        f"perplexity     {found['perplexity']:.2f}",
        f"bits per byte  {found['bits_per_byte']:.4f}",
    ]
    losses = {name: loss for name, loss in found.items() if name.startswith("loss/val/")}
    out += [f"loss of {name[9:]:<6} {loss:.4f}" for name, loss in losses.items()]
    if found["loss/val_balance"] is not None:
        out.append(f"balance        {found['loss/val_balance']:.3f} (1 is even)")
        out.append(f"dropped        {found['moe/dropped']:.2%} of the choices of an expert")
    return out


if __name__ == "__main__":
    faults.command_line(main)
