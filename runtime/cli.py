"""Command line and config files: parse, load, write and check the settings of utils.py."""

import argparse
import dataclasses
import difflib
import importlib.util
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

import utils
from utils import (
    SLIDING_ATTENTION,
    Config,
    ConfigError,
    Model,
    Setting,
    changed,
    get,
    settings_of,
)

# Names of other programs for our settings.
FOREIGN = {
    "model.hidden_size": "n_embd d_model dim",
    "model.num_hidden_layers": "n_layer n_layers num_layers",
    "model.num_attention_heads": "n_head n_heads num_heads",
    "model.num_key_value_heads": "n_kv_head n_kv_heads",
    "model.intermediate_size": "d_ff ffn_dim n_inner",
    "train.seq_len": "block_size max_seq_len context_length n_ctx",
    "train.global_batch_size": "batch_size global_batch",
    "train.microbatches": "gradient_accumulation_steps grad_accum",
    "train.steps": "max_iters max_steps num_steps",
    "optimizer.lr": "learning_rate max_lr",
    "optimizer.warmup_steps": "warmup_iters num_warmup_steps",
}

OF_GQA = ("attention_out_bias", "attention_sinks", "query_pre_attn_scalar", "qk_norm_all_heads")
DEPTH = ("depth", "dense")  # of which settings follow: see depth.py

DESCRIPTION = (
    "Train a sharded transformer. --depth N gives a model of N layers with its batch, steps and "
    "optimizer (depth.py), with --dense one without experts. --config FILE.toml gives other "
    "defaults, also depth = N. --print_config prints the settings and exits. --run.init_from "
    "FOLDER starts from the weights of another run and uses its [model], unless --config has one."
)


def parse_known(
    flags: Any,
    arguments: list[str] | None = None,
    description: str | None = None,
    separator: str = "_",
) -> tuple[Any, list[str]]:
    """Return an instance of a command's dataclass of flags, and the arguments it does not have.

    flags        a dataclass, or a union of them, which are subcommands
    description  first lines of --help, instead of the docstring of the dataclass
    separator    between the words of a flag
    Raises       ConfigError for a number outside the range that its setting declares
    """
    import tyro  # late: not needed by programs that only read files

    parsed, rest = tyro.cli(
        flags,
        args=arguments,
        description=description,
        return_unknown_args=True,
        use_underscores=separator == "_",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for name, setting in settings_of(type(parsed)).items():
        utils.check_range(name.replace("_", separator), getattr(parsed, name), setting)
    return parsed, rest


def parse_flags(flags: Any, *arguments: Any, **options: Any) -> Any:
    """Return the flags of a command that takes no others, as `parse_known` does."""
    parsed, unknown = parse_known(flags, *arguments, **options)
    refuse_unknown(unknown, settings_of(flags))
    return parsed


def refuse_unknown(arguments: list[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first of the arguments that are left, if there are any."""
    if not arguments:
        return
    flag = arguments[0].partition("=")[0]
    if not flag.startswith("--"):
        raise ConfigError(
            f"{flag!r} follows no flag that takes a value. Write --flag value, or for a switch "
            "only the flag. See --help."
        )
    raise ConfigError(f"unknown flag {flag}{_suggestion(flag, known)}")


def check_packages(flag: str, install: str, *packages: str) -> None:
    """Raise ConfigError if a package that a flag needs is missing; pip takes `install`."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{flag} needs {' and '.join(missing)}, which is not installed. Run ./run.sh uv pip "
            f"install {install}."
        )


def parse(
    arguments: list[str] | None = None,
    command: type | None = None,
    checked: bool = True,
    model: Model | None = None,
    fill: Callable[[Config, set[str], int, bool], Config] | None = None,
) -> Config:
    """Return the config from flags, the file of `--config`, `--depth`, and defaults, in this order.

    command  the dataclass of the command's own flags, for messages about unknown flags
    checked  whether to call `check`
    model    default of [model], unless `--config` has that section
    fill     depth.fill, which sets what neither flags nor file set if there is a depth
    """
    import tyro  # late: not needed by programs that only read files

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    base, arguments = _take_config_and_depth(arguments)
    default = Config(model=model or Model())
    if base.config is not None:
        default = load(base.config, model, DEPTH)
    of_model = {name for name in settings_of() if name.startswith("model.")}
    config, unknown = tyro.cli(
        Config,
        args=_switches(arguments),
        default=default,
        description=DESCRIPTION,
        return_unknown_args=True,
        use_underscores=True,
    )
    refuse_unknown(unknown, [*settings_of(), *(settings_of(command) if command else ())])
    flags = flag_names(arguments)
    if config.data.mixture and (unused := sorted(flags & {"data.train", "data.val"})):
        raise ConfigError(
            f"--{unused[0]} has no effect with a mixture, whose folders contain train/ and val/. "
            f"Remove --{unused[0]}, or disable the mixture: --data.mixture without values."
        )
    if base.depth is not None:
        names = flags | base.names | (of_model if model and "model" not in base.table else set())
        if fill is None:
            raise ConfigError("--depth is for main.py, plan.py and benchmarks.")
        config = fill(config, names, base.depth, base.dense)
    config = _with_home(config)
    if checked:
        check(config)
    return config


def _with_home(config: Config) -> Config:
    """Return the config with the home folder for `~` in its paths."""
    paths = [name for name, setting in settings_of().items() if setting.path]
    return changed(config, {name: os.path.expanduser(get(config, name)) for name in paths})


def split_auto(arguments: list[str]) -> tuple[list[str], set[str]]:
    """Return the arguments without flags of the value auto, and the names that the others and the
    file of `--config` set.
    """
    base, _ = _take_config_and_depth(arguments)
    value = rf"(?<=\0)--({'|'.join(map(re.escape, utils.AUTO))})[=\0]auto\0"
    text = "\0".join(["", *arguments, ""])
    rest = re.sub(value, "", text).split("\0")[1:-1]
    return rest, flag_names(rest) | base.names - set(re.findall(value, text))


def flag_names(arguments: list[str]) -> set[str]:
    """Return the names of all flags, as model.hidden_size."""
    return {a.partition("=")[0][2:].replace("-", "_") for a in arguments if a.startswith("--")}


def _take_config_and_depth(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return what other settings follow from, and the other arguments.

    The former are `config`, a file or None, with its `table` and the `names` of its settings;
    `depth`, a number or None; and `dense`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, alone in (("--config", ""), ("--depth", ""), ("--dense", "true")):
        parser.add_argument(flag, nargs="?", const=alone)
    base, rest = parser.parse_known_args(arguments)
    base.table = {} if base.config is None else _read(base.config)
    base.names = flat(base.table).keys() - set(DEPTH)
    depth, dense = (
        str(base.table.get(name, "")).lower() if value is None else value.lower()
        for name, value in zip(DEPTH, (base.depth, base.dense), strict=True)
    )
    asked = base.depth is not None or "depth" in base.table
    if asked and not re.fullmatch(r"-?\d+", depth):
        raise ConfigError(f"--depth {depth} is not a number of layers. Use --depth 12.")
    if dense not in ("", "true", "1", "false", "0"):
        raise ConfigError(f"--dense {dense} is not true or false. Use --dense, or omit it.")
    base.depth, base.dense = int(depth) if asked else None, dense in ("true", "1")
    if base.dense and base.depth is None:
        raise ConfigError("--dense goes with --depth. Use --depth 12 --dense.")
    return base, rest


def _switches(arguments: list[str]) -> list[str]:
    """Spell `--data.segments True`, also with =, as tyro does: `--data.segments`."""

    def spelled(found: re.Match[str]) -> str:
        section, key = found[1].rsplit(".", 1)
        return f"--{section}.{'' if found[2].lower() in ('true', '1') else 'no_'}{key}"

    names = "|".join(name for name, s in settings_of().items() if s.type is bool)
    value = rf"(?<=\0)--({names})[=\0](true|1|false|0)(?=\0)"
    text = re.sub(value, spelled, "\0".join(["", *arguments, ""]), flags=re.IGNORECASE)
    return text.split("\0")[1:-1]


def load(path: str | Path, model: Model | None = None, ignored_keys: Sequence[str] = ()) -> Config:
    """Return the config of a TOML file. Missing settings have their defaults.

    model         default of [model] if the file has no such section
    ignored_keys  keys that are no settings
    """
    table = _read(path)
    default = Config() if model is None or "model" in table else Config(model=model)
    known, values = settings_of(), flat(table)
    values = {name: value for name, value in values.items() if name not in ignored_keys}
    rope_in_moe_layers = values.pop("model.rope_in_moe_layers", True)  # the former name
    if unknown := sorted(values.keys() - known.keys()):
        raise ConfigError(f"{path}: unknown key {unknown[0]}{_suggestion(unknown[0], known)}")
    typed = {n: _typed(f"{path}: {n} =", known[n], v) for n, v in values.items()}
    m = (config := changed(default, typed)).model
    if not rope_in_moe_layers and m.n_routed_experts:
        if m.first_k_dense_replace:
            raise ConfigError(
                f"{path}: rope_in_moe_layers = false with first_k_dense_replace is not supported "
                "any more. Use the version of this project that trained the model."
            )
        config = changed(config, {"model.no_rope_layer_interval": m.decoder_sparse_step})
    return _with_home(config)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"model.rope_scaling.factor": 1.0, ...} of nested tables."""
    flattened = {}
    for key, value in table.items():
        nested = isinstance(value, dict)
        flattened |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flattened


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a BOM is skipped
        return tomllib.loads(text + "\n")  # so that an error in the last line has its number
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error}. Fix it, or name another TOML file, such as "
            "configs/tiny.toml."
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


def _suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown flag or key."""
    known, dashes = list(known), "--" * word.startswith("--")
    name = word.rpartition(".")[2].removeprefix("--").replace("-", "_")
    same = [setting for setting in known if setting.rpartition(".")[2] == name]
    same = same or [s for s, names in FOREIGN.items() if s in known and name in names.split()]
    close = same or difflib.get_close_matches(word.removeprefix("--"), known, 1, 0.5)
    if not close:
        return ". See --help."
    return f": did you mean {' or '.join(dashes + setting for setting in close)}?"


def _typed(where: str, setting: Setting, value: object) -> object:
    """Return a value, from TOML or Python, in the type of its setting."""
    expected = type(setting.default)
    if (expected, type(value)) in ((float, int), (tuple, list)):
        value = expected(value)
    parts = value if type(value) is tuple else ()
    if type(value) is not expected or not all(type(part) is str for part in parts):
        example = json.dumps(setting.default)
        raise ConfigError(f"{where} {value!r} is not {expected.__name__}. Write it like {example}.")
    choices = setting.type.__args__ if get_origin(setting.type) is Literal else (value,)
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


def check(config: Config) -> None:
    """Raise ConfigError for settings that are wrong on every mesh; see weights.check_divisible."""
    for name, setting in settings_of().items():
        utils.check_range(name, _typed(f"--{name}", setting, get(config, name)), setting)
    _check_divisible(config)
    _check_model(config.model)
    t = config.train
    unknown = sorted(set(t.remat.split(",")) - set(utils.REMAT_NAMES))
    if t.remat not in ("none", "full") and unknown:
        raise ConfigError(
            f"--train.remat {t.remat}: {', '.join(map(repr, unknown))} cannot be saved. Use none, "
            f"full, or some of {', '.join(utils.REMAT_NAMES)}, separated by commas."
        )
    if config.data.positions == "document" and not config.data.segments:
        raise ConfigError(
            "--data.positions document needs --data.segments, as attention across documents would "
            "see equal positions. Set both, or use --data.positions window."
        )
    if config.run.time_limit:
        seconds(config.run.time_limit)


def _check_divisible(config: Config) -> None:
    """Raise ConfigError for a size that another setting does not divide."""
    m, t, mesh = config.model, config.train, config.mesh
    ranks = "--train.microbatches x --mesh.fsdp" + " x --mesh.replica" * (mesh.replica > 1)
    sequence = "--mesh.tensor"
    sequence = f"--mesh.context x lcm(2, {sequence})" if mesh.context > 1 else sequence
    gqa, splash = m.attention == "gqa", m.attention_kernel == "splash"
    heads = m.num_key_value_heads if gqa else 1
    for name, parts, why in (
        ("train.global_batch_size", t.microbatches * mesh.batch, ranks),
        ("train.seq_len", mesh.sequence, sequence),
        ("train.seq_len", utils.LANES if splash else 1, "the blocks of splash attention"),
        ("model.head_dim" if gqa else "model.qk_rope_head_dim", 2, "the pairs of rotary embedding"),
        ("model.num_attention_heads", heads, "--model.num_key_value_heads"),
        ("model.n_routed_experts", m.n_group, "--model.n_group"),
    ):
        if (size := get(config, name)) % parts:
            other = f", or another {why}" * why.startswith("--")
            raise ConfigError(
                f"--{name} {size} is not divisible by {why} = {parts}. Use --{name} "
                f"{-(-size // parts) * parts}{other}."
            )


def _check_model(m: Model) -> None:
    if SLIDING_ATTENTION in m.layer_types and not m.sliding_window:
        raise ConfigError(
            f"--model.layer_types has {SLIDING_ATTENTION}, which needs --model.sliding_window: the "
            "positions that a query attends to. Set it, for example to 512."
        )
    if len(m.prefix) > 1:
        raise ConfigError(
            f"--model.first_k_dense_replace {m.first_k_dense_replace}: these layers differ by "
            "--model.layer_types or --model.no_rope_layer_interval. Use as many as are alike."
        )
    first, step = m.first_k_dense_replace, m.period
    rest = m.num_hidden_layers - first
    if rest < 1 or rest % step:
        raise ConfigError(
            f"--model.num_hidden_layers {m.num_hidden_layers} is not --model.first_k_dense_replace "
            f"{first} and a multiple of {step} layers, after which {_what_repeats(m)}. Use "
            f"--model.num_hidden_layers {first + step * max(1, -(-rest // step))}."
        )
    latent = all(run.attention == "mla" for run in m.layer_runs)
    windows = any(run.window for run in m.layer_runs)
    for name, is_used, needed in (
        *((name, not latent, "--model.attention gqa") for name in OF_GQA),
        ("qk_norm_all_heads", m.qk_norm, "--model.qk_norm"),
        ("sliding_window", windows, f"{SLIDING_ATTENTION} among --model.layer_types"),
        ("rope_local_base_freq", windows, "--model.sliding_window"),
        ("experts_bias", m.n_routed_experts, "--model.n_routed_experts"),
    ):
        if getattr(m, name) and not is_used:
            raise ConfigError(f"--model.{name} has no effect without {needed}. Set both or none.")
    rope, usual = m.rope_scaling, utils.RopeScaling()
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if (value := getattr(rope, low)) >= (limit := getattr(rope, high)):
            raise ConfigError(
                f"--model.rope_scaling.{low} {value} is not below --model.rope_scaling.{high} "
                f"{limit}. Use {getattr(usual, low)} and {getattr(usual, high)}."
            )
    if not m.moe_layers:
        return
    if m.experts_bias and (m.capacity_factor or m.eval_capacity_factor):
        raise ConfigError(
            "--model.experts_bias needs dropless experts, as a dropped token would still get the "
            "bias. Use --model.capacity_factor 0 --model.eval_capacity_factor 0."
        )
    experts, each = m.n_routed_experts, m.n_routed_experts // m.n_group
    chosen = f"the experts in --model.topk_group {m.topk_group}, with {each} in each group"
    for name, limit, what in (
        ("n_group", max(1, experts // 2), "half of --model.n_routed_experts"),
        ("topk_group", m.n_group, "the --model.n_group"),
        ("num_experts_per_tok", m.topk_group * each, chosen),
    ):
        if (value := getattr(m, name)) > limit:
            raise ConfigError(
                f"--model.{name} {value} is above {limit}, {what}. Use {limit} or less."
            )


def _what_repeats(m: Model) -> str:
    """Return the flags that decide after how many layers all settings repeat."""
    flags = [f"--model.decoder_sparse_step {m.decoder_sparse_step}"]
    flags += [f"--model.layer_types of {len(m.layer_types)}"] * bool(m.layer_types)
    interval = m.no_rope_layer_interval
    flags += [f"--model.no_rope_layer_interval {interval}"] * bool(interval)
    return f"{' and '.join(flags)} repeat{'s' * (len(flags) == 1)}"


def read_lines(name: str, path: Path, what: str) -> list[str]:
    """Return the lines of the file of the flag --NAME. Raises ConfigError if there are none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also splits at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{name} {path} cannot be read: {error}.") from None
    if not any(map(str.strip, lines)):
        raise ConfigError(f"--{name} {path} is empty. Write a {what} in each line.")
    return lines


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
