"""A model from one number: what `--depth N` gives the settings that are not set.

The N layers are 64 N wide, so width and depth grow together, and they have about 51,200 N^3 active
parameters. Batch, steps and optimizer follow from that number. docs/experiments.md reports what was
measured of these rules, on models of depth 2 to 6. Beyond, they are extrapolated.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import utils
from runtime import cli
from utils import Config, ConfigError

HEAD = 64  # width of a head without position, so depth N has N heads
TILE = 128  # of a matrix unit; hidden widths are multiples
TOKENS_PER_PARAMETER = 20  # arXiv:2203.15556
MAX_DEPTH = 256  # layers, which have 860 billion active parameters


class TunedRate(NamedTuple):
    """The best peak learning rate at a width, and how it changes with the width D of a model.

    Below this width it is lr * (width / D) ** power, as measured; above, lr * width / D
    (arXiv:2203.03466), which is extrapolated. It is that of TUNED_STEPS steps of TUNED_BATCH
    tokens. For others it changes as the square root of batch over steps (arXiv:2205.10287 for the
    batch, arXiv:2310.07831 for the steps), which was measured at depth 2.
    """

    lr: float
    width: int
    power: float


TUNED_STEPS, TUNED_BATCH = 128, 4096
LR = {"adamw": TunedRate(0.0040, 160, 0.5), "muon": TunedRate(0.010, 384, 0.7)}
DECAY = 2.0  # best product of learning rate, weight decay and steps (arXiv:2405.13698)

Rule = Callable[[Config, int], Any]


def fill(config: Config, names: set[str], depth: int, dense: bool = False) -> Config:
    """Return the config with the settings of a depth, except those with these names.

    depth  layers
    dense  no experts; else every second layer has eight, of which a token uses two
    """
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"--depth {depth} is out of range. Use a number from 1 to {MAX_DEPTH}.")
    for name, setting in utils.settings_of().items():
        if name in names:
            utils.check_range(name, utils.get(config, name), setting)
    feed_forward = DENSE if dense or depth == 1 else EXPERTS
    for name, rule in itertools.chain(*map(dict.items, (SHAPE, feed_forward, TRAINING))):
        if name not in names:
            config = utils.changed(config, {name: rule(config, depth)})
    return config


def parse(arguments: list[str] | None = None, *rest: Any, **options: Any) -> Config:
    """Return the config as cli.parse does, which may have a depth."""
    return cli.parse(arguments, *rest, fill=fill, **options)


def parse_open(
    arguments: list[str],
    command: type | None = None,
    model: utils.Model | None = None,
    checked: bool = True,
) -> Config:
    """Return the config as `parse` does, with settings of utils.AUTO left open unless they are set.

    checked  whether to raise ConfigError for what is wrong on any devices
    """
    asked = any(word.startswith("--mesh.context") for word in arguments)
    arguments, names = cli.split_auto(arguments)
    config = parse(arguments, command, checked=False, model=model)
    if {"mesh.fsdp", "mesh.pipeline", "mesh.tensor"} <= names and not asked:
        names = names | {"mesh.context"}  # the mesh is complete
    auto = {name: value for name, value in utils.AUTO.items() if name not in names}
    one = {"train.remat": "none", "fsdp.gather": "step"}  # and 1 of all others
    if checked:
        cli.check(utils.changed(config, {name: one.get(name, 1) for name in auto}))
    return utils.changed(config, auto)


def round_up(size: float, multiple: int) -> int:
    return multiple * math.ceil(size / multiple)


def tokens(depth: int) -> int:
    """Return the tokens of a run: TOKENS_PER_PARAMETER for each active parameter of the layers."""
    return TOKENS_PER_PARAMETER * 51_200 * depth**3


def best_lr(config: Config) -> float:
    """Return the best learning rate that is known for an optimizer, width, batch and steps."""
    if (name := config.optimizer.name) not in LR:
        raise ConfigError(f"No learning rate was tuned for {name}. Set --optimizer.lr.")
    tuned, ratio = LR[name], LR[name].width / config.model.hidden_size
    t, steps = config.train, config.optimizer.schedule_steps or config.train.steps
    batches = t.global_batch_size * t.seq_len / TUNED_BATCH
    at_width = tuned.lr * ratio ** (tuned.power if ratio > 1 else 1)
    return at_width * math.sqrt(batches * TUNED_STEPS / steps)


def two_digits(number: float) -> float:
    return float(f"{number:.2g}")


# Rules in the order in which they are applied: one may use what those before it have set.
SHAPE: dict[str, Rule] = {
    "model.vocab_size": lambda c, n: 0,  # that of the data
    "model.hidden_size": lambda c, n: HEAD * n,
    "model.num_hidden_layers": lambda c, n: n,
    "model.num_attention_heads": lambda c, n: n,
    "model.num_key_value_heads": lambda c, n: n,
    "model.head_dim": lambda c, n: HEAD,
    "model.kv_lora_rank": lambda c, n: round_up(HEAD * n / 3, HEAD),
    "model.qk_nope_head_dim": lambda c, n: HEAD,
    "model.qk_rope_head_dim": lambda c, n: HEAD // 2,
    "model.v_head_dim": lambda c, n: HEAD,
    "model.intermediate_size": lambda c, n: round_up(3 * HEAD * n, TILE),
    "model.compute_dtype": lambda c, n: "auto",
}
DENSE: dict[str, Rule] = {
    "model.decoder_sparse_step": lambda c, n: 1,
    "model.n_routed_experts": lambda c, n: 0,
    "model.n_shared_experts": lambda c, n: 0,
}
EXPERTS: dict[str, Rule] = {
    "model.first_k_dense_replace": lambda c, n: n % 2,
    "model.moe_intermediate_size": lambda c, n: round_up(HEAD * n, TILE),
    "model.capacity_factor": lambda c, n: 0.0,  # dropless: the loss does not depend on the mesh
}
TRAINING: dict[str, Rule] = {
    "train.seq_len": lambda c, n: min(2048, 2 ** int(math.log2(128 * max(2, n)))),
    # The best batch grows as tokens^0.57 (arXiv:2503.04715).
    "train.global_batch_size": lambda c, n: max(
        8, 2 ** round(math.log2(tokens(n) ** 0.571 / c.train.seq_len))
    ),
    "train.steps": lambda c, n: max(
        1, round(tokens(n) / c.train.global_batch_size / c.train.seq_len)
    ),
    "train.loss_chunk_tokens": lambda c, n: 8192,
    "optimizer.name": lambda c, n: "muon",
    "optimizer.lr": lambda c, n: two_digits(best_lr(c)),
    "optimizer.weight_decay": lambda c, n: two_digits(
        DECAY / (c.optimizer.lr * c.train.steps) if c.optimizer.lr else 0.0
    ),
    "optimizer.schedule": lambda c, n: "wsd",
    "optimizer.decay_share": lambda c, n: 0.4,
    "optimizer.min_lr_ratio": lambda c, n: 0.0,
    "optimizer.warmup_steps": lambda c, n: max(1, c.train.steps // 20),
    # A short run needs a faster balance.
    "model.router_bias_update_speed": lambda c, n: min(1e-2, max(1e-3, 2 / c.train.steps)),
    "eval.every_steps": lambda c, n: max(1, c.train.steps // 20),
    "checkpoint.every_steps": lambda c, n: max(1, c.train.steps // 20),
    "run.name": lambda c, n: f"{'depth' if c.model.moe_layers else 'dense'}-{n}",
}
