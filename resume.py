"""What a run may go on from: its own folder, or another run's weights. What differs is named.

Also what every other command reads of a run's folder: config, weights, tokenizer.
"""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import metrics
import run_folder
import utils
from checkpoint import Checkpoints, reshaped, stored_shapes
from data.tokenizer import Tokenizer, load_tokenizer
from manifest import Manifest, read_manifest
from metrics import say
from model import Transformer
from utils import Config

# All that may change when a run continues; what is not named here must stay.
FREE_SECTIONS = {"mesh", "fsdp", "eval", "sample", "checkpoint", "run", "wandb", "profile"}
FREE_FIELDS = {
    "model.eval_capacity_factor",
    "model.experts_layout",
    "train.steps",
    "train.microbatches",
    "train.remat",
    "train.loss_chunk_tokens",
    "train.max_skipped_in_row",
    "train.skip_spikes",
    "data.train",  # `tokens.train` says what it holds
    "data.val",
    "data.mixture",
    # Told for who samples; `tokens.train` depends on them.
    "tokens.tokenizer",
    "tokens.tokenizer_sha256",
    "tokens.end_of_text",
    "tokens.begin_of_text",
}
# These change rounding and nothing else.
WARNED_FIELDS = {"model.compute_dtype", "model.attention"}
# What a run had that was begun before there was such a field.
ABSENT = {
    "optimizer.matrices": "adamw",
    "optimizer.muon_beta": 0.95,
}
# Of [model], what weights of another run do not depend on: room, losses beside, how it computes.
FREE_OF_WEIGHTS = WARNED_FIELDS | {
    "model.capacity_factor",
    "model.eval_capacity_factor",
    "model.experts_layout",
    "model.balance_loss",
    "model.router_bias_speed",
    "model.z_loss",
    "model.dropout",
}
MOST_NAMED = 10  # fields in one message


# --- what other commands read of a run ------------------------------------------------------------


def config_of(run: run_folder.Folder, arguments: Sequence[str], flags: type) -> Config:
    """The config of the run in this folder, with main.py's flags over it.

    flags   the dataclass of the command's own, to be named where one is unknown.
    Raises  ValueError for a folder of no run, and as utils.parse does.
    """
    if any(argument.partition("=")[0] == "--config" for argument in arguments):
        raise ValueError(
            f"--config has no place beside --run, whose config is {run.path('config.toml')}. Give "
            "single flags over it, as --eval.sequences 64."
        )
    own = tuple(field.name for field in dataclasses.fields(flags))
    return utils.parse(["--config", str(config_file(run, "--run")), *arguments], own)


def config_file(run: run_folder.Folder, flag: str) -> Path:
    """Raises ValueError for a folder of no run, which `flag` named."""
    file = run.files / "config.toml"
    if not file.is_file():
        what = "has no config.toml" if run.exists() else "does not exist"
        raise ValueError(f"{flag} {run} {what}. Give the folder of a run, as {flag} runs/tiny.")
    return file


def weights_of(
    run: run_folder.Folder, step: int | None, shapes: Transformer, flag: str = "--run"
) -> tuple[int, Transformer, dict[str, Any]]:
    """(step, weights in these shapes and layouts, what `save` was told) of a run's checkpoint.

    step    the newest good one if None.
    flag    that named the run.
    Raises  ValueError where there is none, or it is damaged.
    """
    with closing(Checkpoints(run.checkpoints)) as saved:
        step, stored = saved.good(step, {"weights": stored_shapes(shapes)}, flag)
        return step, reshaped(stored["weights"], shapes), saved.config(step)


def tokenizer_of(tokens: dict[str, Any], config: Config) -> tuple[Tokenizer, int, list[int]]:
    """(tokenizer, end of text, tokens that begin a document) of a run, from what a checkpoint says
    of its tokens, or the shards that the run was trained on: older checkpoints do not name it.
    """
    if "tokenizer" not in tokens:
        tokens = vars(read_manifest(config.data.train)) | {"begin_of_text": []}
    if not tokens["tokenizer"]:
        raise ValueError(
            f"run {config.run.name} has no tokenizer: the folder it was imported from had no "
            "tokenizer.json. Put one there and import it again."
        )
    tokenizer = load_tokenizer(tokens["tokenizer"], tokens["tokenizer_sha256"])
    return tokenizer, tokens["end_of_text"], tokens.get("begin_of_text", [])


# --- what must stay when a run continues ----------------------------------------------------------


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """{"model.width": 256, ...}, with values as they come back from JSON."""
    sections = json.loads(json.dumps(config))
    return {
        f"{s}.{name}": value for s, fields in sections.items() for name, value in fields.items()
    }


def what_must_match(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to continue a run with settings that would make it another run.

    saved, now  `dataclasses.asdict` of both configs, with `optimizer.schedule_steps` resolved.
    Raises      ValueError that names every field that differs, with both values.
    """
    old, new = _fields(saved), _fields(now)
    old = {name: value for name, value in ABSENT.items() if name in new} | old
    changed = {
        name: f"{name} {old.get(name, 'absent')!r} -> {new.get(name, 'absent')!r}"
        for name in sorted(old.keys() | new.keys())
        if name.split(".")[0] not in FREE_SECTIONS
        and name not in FREE_FIELDS | utils.REMOVED
        and old.get(name, ...) != new.get(name, ...)
    }
    # A field that only one of the two has came or went with a change of the code.
    warned = {name for name in changed if name in WARNED_FIELDS or name not in old.keys() & new}
    for name in sorted(warned):
        say(f"warning: the run continues with another {changed[name]}")
    refused = [text for name, text in changed.items() if name not in warned]
    if refused:
        raise ValueError(
            f"this run was started with other settings and cannot be continued with these: "
            f"{', '.join(refused)}. Give the old values, or start another run with --run.name."
        )


def must_not_be_lost(folder: run_folder.Folder, every_steps: int) -> None:
    """Refuses to begin anew, and to cut the records, where a run's checkpoints were left behind.

    every_steps  between checkpoints, where the folder has no config.toml.
    Raises       ValueError when the records in a folder without checkpoints tell of one.
    """
    records = folder.files / "metrics.jsonl"
    told = metrics.read(records) if records.is_file() else []
    steps = [r["step"] for r in told if "loss/train" in r]
    before = folder.files / "config.toml"
    if before.is_file():
        c = utils.load(before)
        every_steps = c.checkpoint.every_steps and min(c.checkpoint.every_steps, c.train.steps)
    if not steps or not every_steps:
        return
    gone = not folder.has_checkpoints() and steps[-1] >= every_steps
    ages = [(r["step"], r.get("checkpoint/age_steps")) for r in told if "loss/train" in r]
    if gone or any(age is not None and age < step for step, age in ages):
        raise ValueError(
            f"{folder} tells of {steps[-1]} steps and has no checkpoint: its folder checkpoints/ "
            "was not copied, or was removed, and a new run would begin at step 0 and cut "
            "metrics.jsonl. Copy that folder too, or begin another run with another --run.name."
        )


# --- what must be the same when a run begins with another's weights -------------------------------


def same_model(
    run: run_folder.Folder, theirs: utils.Model, ours: utils.Model, flag: str = "--init"
) -> None:
    """Refuses weights that another model was trained to.

    flag    that named the run, or the folder.
    Raises  ValueError that names the first fields that differ, with both values.
    """
    old, new = (_fields({"model": dataclasses.asdict(m)}) for m in (theirs, ours))
    differ = [
        f"{name} {old[name]!r} there and {new[name]!r} here"
        for name in old
        if name not in FREE_OF_WEIGHTS and old[name] != new[name]
    ]
    if differ:
        more = f" and {len(differ) - MOST_NAMED} more" * (len(differ) > MOST_NAMED)
        raise ValueError(
            f"{flag} {run} is of another model: {', '.join(differ[:MOST_NAMED])}{more}. "
            "Leave out --config and these flags, which takes its [model], or give its values."
        )


def same_tokenizer(
    run: run_folder.Folder, tokens: dict[str, Any], data: str, manifest: Manifest
) -> None:
    """Refuses data whose ids mean other text than those that another run's weights know.

    tokens  what the checkpoint says of them; older ones do not name the tokenizer.
    """
    theirs = tokens.get("tokenizer_sha256", manifest.tokenizer_sha256)
    if theirs != manifest.tokenizer_sha256:
        name = tokens["tokenizer"]
        raise ValueError(
            f"--init {run} knows the tokenizer {name} (table sha256 {theirs}), and {data} was made "
            f"with {manifest.tokenizer} ({manifest.tokenizer_sha256}), whose ids mean other text. "
            f"Prepare the data with data/prepare.py --tokenizer {name}."
        )
