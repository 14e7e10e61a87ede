"""Command line and config files: parse, load, write and check the settings of utils.py."""

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, get_origin

from utils import (
    REMAT_NAMES,
    Config,
    ConfigError,
    Model,
    changed,
    check_attention,
    fields_of,
    get,
)

PATHS = ("data.train", "data.val", "data.mixture", "run.dir", "run.init_from")
# Names of other programs, with ours.
FOREIGN = {
    **dict.fromkeys(("n_embd", "d_model", "dim", "n_embed", "embed_dim"), "model.hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "model.num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "model.num_attention_heads"),
    **dict.fromkeys(("n_kv_head", "n_kv_heads"), "model.num_key_value_heads"),
    **dict.fromkeys(("block_size", "max_seq_len", "context_length", "n_ctx"), "train.seq_len"),
    **dict.fromkeys(("batch_size", "global_batch"), "train.global_batch_size"),
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("max_iters", "max_steps", "num_steps", "n_steps"), "train.steps"),
    **dict.fromkeys(("d_ff", "ffn_dim", "n_inner"), "model.intermediate_size"),
    **dict.fromkeys(("warmup_iters", "num_warmup_steps"), "optimizer.warmup_steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "train.microbatches"),
}

DESCRIPTION = (
    "Train a sharded transformer. --config FILE.toml gives other defaults. --run.init_from FOLDER "
    "starts from the weights of another run and uses its [model], unless --config has one."
)


def parse(
    arguments: list[str] | None = None,
    others: tuple[str, ...] = (),
    checked: bool = True,
    model: Model | None = None,
) -> Config:
    """Return the config from flags, the file of `--config`, and defaults, in this order.

    others   other flags of the command, for messages about unknown flags
    checked  whether to call `check`
    model    default of [model], unless `--config` has that section
    """
    import tyro  # late: not needed by programs that only read files

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    path, arguments = _take_config_flag(arguments)
    config, unknown = tyro.cli(
        Config,
        args=_switches(arguments),
        default=Config(model=model or Model()) if path is None else load(path, model),
        description=DESCRIPTION,
        return_unknown_args=True,
        use_underscores=True,
    )
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("--"):
            raise ConfigError(
                f"{unknown[0]!r} follows no flag that takes a value. Write --section.key value."
            )
        known = [f"--{name}" for name in (*fields_of(), *others)]
        raise ConfigError(f"unknown flag {flag}{_suggestion(flag, known)}")
    flags = {argument.partition("=")[0] for argument in arguments}
    if config.data.mixture and (unused := sorted(flags & {"--data.train", "--data.val"})):
        raise ConfigError(
            f"{unused[0]} has no effect with a mixture, whose folders contain train/ and val/. "
            f"Remove {unused[0]}, or disable the mixture: --data.mixture without values."
        )
    config = _expanded(config)
    if checked:
        check(config)
    return config


def _expanded(config: Config) -> Config:
    """Return the config with a home folder for `~` in its paths."""
    found = {}
    for name in PATHS:
        value = get(config, name)
        many = type(value) is tuple
        found[name] = tuple(map(_home, value)) if many else _home(value)
    return changed(config, found)


def _home(path: str) -> str:
    return os.path.expanduser(path) if path.startswith("~") else path


def sets_mesh(arguments: list[str]) -> bool:
    """Return whether the flags, or the file of `--config`, set a field of the mesh."""
    path, rest = _take_config_flag(arguments)
    in_flags = any(argument.startswith("--mesh.") for argument in rest)
    return in_flags or (path is not None and "mesh" in _read(path))


def _take_config_flag(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the file that `--config` names, None without it, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", const="")
    found, rest = parser.parse_known_args(arguments)
    return found.config, rest


def _switches(arguments: list[str]) -> list[str]:
    """Spell `--run.tensorboard False`, also with =, as tyro does: `--run.no_tensorboard`."""
    switches = {f"--{name}" for name, f in fields_of().items() if f.type is bool}
    switches |= {name.replace("_", "-") for name in switches}
    prefixes = {"true": "", "1": "", "false": "no_", "0": "no_"}
    out, rest = [], list(arguments)
    while rest:
        flag, *value = rest.pop(0).split("=", 1)
        if flag in switches and not value and rest and not rest[0].startswith("-"):
            value = [rest.pop(0)]
        if flag in switches and value:
            if value[0].lower() not in prefixes:
                raise ConfigError(f"{flag} {value[0]!r} is no switch value. Use True or False.")
            flag, value = flag.replace(".", "." + prefixes[value[0].lower()]), []
        out.append("=".join([flag, *value]))
    return out


def load(path: str | Path, model: Model | None = None) -> Config:
    """Return the config of a TOML file. Missing settings have their defaults.

    model  default of [model] if the file has no such section
    """
    read = _read(path)
    default = Config() if model is None or "model" in read else Config(model=model)
    known, table = fields_of(), flat(read)
    sections = sorted({name.rpartition(".")[0] for name in known})
    values = {name: value for name, value in table.items() if name not in sections}  # not empty
    for name in values:
        section, _, key = name.rpartition(".")
        if section and section not in sections:
            hint = _suggestion(section, sections)
            raise ConfigError(f"{path}: unknown section [{section}]{hint}")
        if name not in known:
            inside = f" in [{section}]" * bool(section)
            raise ConfigError(f"{path}: unknown key {key}{inside}{_suggestion(name, [*known])}")
    typed = {n: _typed(f"{path}: {n} =", known[n], v) for n, v in values.items()}
    return _expanded(changed(default, typed))


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"model.rope_scaling.factor": 1.0, ...} of nested tables."""
    found = {}
    for key, value in table.items():
        is_filled = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if is_filled else {prefix + key: value}
    return found


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a BOM is skipped
        return tomllib.loads(text + "\n")  # so that an error in the last line has its number
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if place := re.search(r"(overwrite|twice).*at line (\d+)", str(error)):
            raise ConfigError(
                f"--config {path} gives a key twice: line {place[2]}, "
                f"{text.splitlines()[int(place[2]) - 1].strip()!r}. Remove one of the two."
            ) from None
        raise ConfigError(
            f"--config {path} cannot be read: {error}. Name a TOML file, such as configs/tiny.toml."
        ) from None


def to_toml(config: Any, section: str = "") -> str:
    """Return the config as the text of a file that `--config` reads."""
    lines, tables = [], []
    for f in dataclasses.fields(config):
        value, name = getattr(config, f.name), f"{section}.{f.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            tables.append(f"[{name}]\n{to_toml(value, name)}")
        else:
            lines.append(f"{f.name} = {json.dumps(value)}\n")  # TOML's strings and arrays are JSON
    return "".join(lines) + "\n" * bool(lines) + "".join(tables)


def _suggestion(word: str, known: list[str]) -> str:
    """Return the end of a message about an unknown flag, section or key."""
    name = word.removeprefix("--").rpartition(".")[2].replace("-", "_")
    same = [setting for setting in known if setting.rpartition(".")[2] == name]
    same = same or [setting for setting in known if setting.lstrip("-") == FOREIGN.get(name)]
    close = same or difflib.get_close_matches(word, known, 1, 0.5)
    if close:
        return f": did you mean {' or '.join(close)}?"
    return f". Known are {', '.join(sorted(known)[:8])}, ...; see --help."


def _typed(where: str, known: dataclasses.Field, value: object) -> object:
    """Return a value, from TOML or Python, in the type of its field."""
    expected = type(known.default)
    if expected is float and type(value) is int:
        value = float(value)
    if expected is tuple and type(value) is list:
        value = tuple(value)
    parts = value if type(value) is tuple else ()
    if type(value) is not expected or not all(type(part) is str for part in parts):
        example = json.dumps(known.default)
        raise ConfigError(f"{where} {value!r} is not {expected.__name__}. Write it like {example}.")
    choices = known.type.__args__ if get_origin(known.type) is Literal else (value,)
    if value not in choices:
        raise ConfigError(f"{where} {value!r} is not one of {', '.join(map(repr, choices))}.")
    return value


def seconds(text: str) -> int:
    """Return the seconds of 11h30m, 90m or 45s."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or not found:
        raise ConfigError(
            f"--run.time_limit {text!r} is not a time. Write hours, minutes and seconds, as 11h30m."
        )
    h, m, s = (int(part or 0) for part in found.groups())
    return 3600 * h + 60 * m + s


# --- checks ---------------------------------------------------------------------------------------

MAY_BE_ZERO = {
    *("model.first_k_dense_replace", "model.q_lora_rank", "model.n_routed_experts"),
    *(
        "model.n_shared_experts",
        "model.sliding_window",
        "optimizer.warmup_steps",
        "optimizer.schedule_steps",
    ),
    *("train.seed", "data.seed", "eval.every_steps", "eval.sequences"),
    *("sample.every_steps", "sample.tokens"),
    *("checkpoint.every_steps", "checkpoint.keep_every_steps", "run.init_from_step"),
    *("run.check_replicas_every", "profile.first_step", "profile.steps"),
}
ABOVE_ZERO = {"run.peer_seconds", "run.stall_minutes"}  # floats that must be above 0


def check(config: Config) -> None:
    """Raise ConfigError for settings that are wrong on every mesh; see weights.check_divisible."""
    for name, known in fields_of().items():
        value = _typed(f"--{name}", known, get(config, name))
        if name in ABOVE_ZERO and value == 0:
            raise ConfigError(f"--{name} 0.0 must be above 0. Use {known.default}.")
        low = 0 if name in MAY_BE_ZERO or type(value) is float else 1
        if type(value) in (int, float) and not low <= value < math.inf:
            why = f"below {low}" if value < low else "not a finite number"
            raise ConfigError(f"--{name} {value} is {why}. Use {low} or more.")
    _check_run(config)
    _check_model(config.model)
    check_attention(config)
    t, mesh, ranks = config.train, config.mesh, "--train.microbatches x --mesh.fsdp"
    ranks += " x --mesh.replica" * (mesh.replica > 1)
    for name, parts, why in (
        ("train.global_batch_size", t.microbatches * mesh.batch, ranks),
        ("train.seq_len", mesh.tensor, "--mesh.tensor"),
    ):
        if (size := get(config, name)) % parts:
            raise ConfigError(
                f"--{name} {size} is not divisible by {why} = {parts}. Use --{name} "
                f"{-(-size // parts) * parts}."
            )


def _check_run(config: Config) -> None:
    remat = config.train.remat
    unknown = sorted(set(remat.split(",")) - set(REMAT_NAMES))
    if remat not in ("none", "full") and unknown:
        raise ConfigError(
            f"--train.remat {remat}: {', '.join(map(repr, unknown))} cannot be saved. Use none, "
            f"full, or some of {', '.join(REMAT_NAMES)}, separated by commas."
        )
    if config.run.time_limit:
        seconds(config.run.time_limit)
    if 0 < (factor := config.train.skip_spikes) < 1:
        raise ConfigError(
            f"--train.skip_spikes {factor} would skip steps below the median gradient norm: it "
            "must be 1 or more. Use 5.0, or 0.0 to disable it."
        )
    for name in ("optimizer.beta1", "optimizer.beta2", "optimizer.muon_beta"):
        if (beta := get(config, name)) >= 1:
            default = get(Config(), name)
            raise ConfigError(f"--{name} {beta} must be below 1: nothing decays. Use {default}.")


def _check_model(m: Model) -> None:
    first, step = m.first_k_dense_replace, m.decoder_sparse_step
    rest = m.num_hidden_layers - first
    if rest < 1 or rest % step:
        raise ConfigError(
            f"--model.num_hidden_layers {m.num_hidden_layers} is not --model.first_k_dense_replace "
            f"{first} and a multiple of --model.decoder_sparse_step {step}. Use "
            f"--model.num_hidden_layers {first + step * max(1, -(-rest // step))}."
        )
    rotated = "head_dim" if m.attention == "gqa" else "qk_rope_head_dim"
    if (width := getattr(m, rotated)) % 2:
        raise ConfigError(
            f"--model.{rotated} {width} is odd, and rotary embedding rotates pairs. Use "
            f"{width + 1}."
        )
    N, Y = m.num_attention_heads, m.num_key_value_heads
    if m.attention == "gqa" and N % Y:
        raise ConfigError(
            f"--model.num_attention_heads {N} is not divisible by --model.num_key_value_heads {Y}: "
            "each head of keys and values serves equally many query heads. Use "
            f"--model.num_key_value_heads {math.gcd(N, Y)}."
        )
    rope = m.rope_scaling
    if rope.factor < 1:
        raise ConfigError(
            f"--model.rope_scaling.factor {rope.factor} is below 1, and it extends the context. "
            "Use 1.0, which is plain rotary embedding, or more."
        )
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if rope.factor > 1 and rope.rope_type == "llama3" and not 0 < low < high:
        raise ConfigError(
            f"--model.rope_scaling.low_freq_factor {low} must be above 0 and below "
            f"high_freq_factor {high}. Use 1.0 and 4.0, as Llama 3 does."
        )
    if rope.factor > 1 and not 0 < rope.beta_slow <= rope.beta_fast:
        raise ConfigError(
            f"--model.rope_scaling.beta_slow {rope.beta_slow} must be above 0 and at most "
            f"beta_fast {rope.beta_fast}. Use --model.rope_scaling.beta_slow 1.0, beta_fast 32.0."
        )
    if rope.factor > 1 and m.rope_theta <= 1:
        raise ConfigError(
            f"--model.rope_theta {m.rope_theta} is not above 1, and YaRN needs pairs of falling "
            "frequency. Use --model.rope_theta 10000.0."
        )
    if m.moe_layers:
        _check_experts(m)


def _check_experts(m: Model) -> None:
    experts, k, groups = m.n_routed_experts, m.num_experts_per_tok, m.n_group
    for name, limit in (("num_experts_per_tok", "n_routed_experts"), ("topk_group", "n_group")):
        if (value := getattr(m, name)) > (most := getattr(m, limit)):
            raise ConfigError(
                f"--model.{name} {value} is more than --model.{limit} {most}. Use {most} or less."
            )
    if groups > 1 and (experts % groups or experts < 2 * groups):
        usable = [n for n in range(1, groups) if experts % n == 0 and experts >= 2 * n]
        raise ConfigError(
            f"--model.n_group {groups} with --model.n_routed_experts {experts}: groups have equal "
            "size, and 2 experts or more, as a group's score is the sum of its two best. Use "
            f"--model.n_group {max(usable, default=1)}."
        )
    each = experts // groups
    if m.topk_group * each < k:
        raise ConfigError(
            f"--model.num_experts_per_tok {k} is more than the experts in --model.topk_group "
            f"{m.topk_group}, with {each} in each group. Use --model.topk_group {-(-k // each)}."
        )


def check_writable(name: str, path: Path) -> None:
    """Raise ConfigError if the file of the flag --NAME cannot be written."""
    if name != "hlo" and path.suffix != f".{name}":
        raise ConfigError(
            f"--{name} {path} does not end in .{name}. Use --{name} {path.with_suffix('.' + name)}."
        )
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(
            f"--{name} {path} cannot be written: {error.strerror}. Name another file."
        ) from None
    if not existed:
        path.unlink()
