"""Config dataclasses, flags and the axes of the mesh. Knows nothing of the files above it.

A setting is a field below and nothing else: the flag `--model.width`, the key `width` under
`[model]` in a TOML file, and the line in `--help` (the comment beside the field) are made from it.
"""

import dataclasses
import difflib
import json
import math
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_origin

GIB = 2**30
LANES = 128  # of a TPU's vector registers: splash attention cuts sequences into multiples of it

# The axes of the mesh, outermost first; and which of them a thing is spread over. Weights are cut
# over all but replica, along which they are the same: its links, between slices, are the slowest.
MESH_AXES = ("replica", "fsdp", "pipeline", "tensor")
BATCH_AXES = ("replica", "fsdp")
SEQUENCE_AXES = ("tensor",)
TOKEN_AXES = BATCH_AXES + SEQUENCE_AXES
VOCABULARY_AXES = ("pipeline", "tensor")
EXPERT_AXES = ("fsdp", "tensor")

# Settings that runs of older versions have in their config.toml, and that nothing reads any more.
REMOVED = frozenset(["run.start_minutes", "data.cache", "data.cache_gb"])

# What `train.remat` may keep, in the order in which a layer makes them (model.py names them).
REMAT_NAMES = (
    "latents",
    "attention",
    "attention_out",
    "mlp_in",
    "hidden",
    "expert_in",
    "expert_hidden",
)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    replica: int = 1  # slices that have all weights each, and share out the batch
    fsdp: int = 2  # ranks that share out the batch and every weight
    pipeline: int = 2  # ranks that share out the layers
    tensor: int = 2  # ranks that share out heads, hidden width, and the sequence between matmuls
    # chunks of layers per pipeline rank; above 1 is interleaved 1F1B (arXiv:2104.04473)
    virtual: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """In the order of MESH_AXES."""
        return self.replica, self.fsdp, self.pipeline, self.tensor

    def __str__(self) -> str:
        """(fsdp, pipeline, tensor) = (2, 2, 2), with replica before where there are several."""
        axes = MESH_AXES[self.replica == 1 :]
        return f"({', '.join(axes)}) = {self.shape[-len(axes) :]}"

    @property
    def batch(self) -> int:
        """Ranks that share out the batch."""
        return self.replica * self.fsdp


@dataclass(frozen=True, kw_only=True)
class Fsdp:
    # gather weights once per step (fastest), or per layer (least memory)
    gather: Literal["step", "layer"] = "step"


@dataclass(frozen=True, kw_only=True)
class Model:
    # V: token ids that the tokenizer has; padded inside to a multiple of 256
    vocabulary: int = 4096
    width: int = 256  # D
    blocks: int = 4  # times that a block of dense_layers + moe_layers layers is repeated
    dense_layers: int = 1  # layers with a dense feed-forward in each block
    moe_layers: int = 1  # layers with experts in each block: 0 or 1
    prefix_layers: int = 0  # dense layers before the blocks (DeepSeek's first_k_dense_replace)
    heads: int = 4  # N
    q_lora_rank: int = 0  # Q: width of the latent of queries; 0 makes them without one
    kv_lora_rank: int = 64  # C: width of the latent that keys and values are made from
    qk_nope_head_dim: int = 64  # H: part of a query and key head without position
    # R: part of a query head, and the one key for all heads, with rotary position
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64  # W: width of a value head
    rope_theta: float = 10000.0  # longest wavelength of the rotary embedding, in tokens / 2 pi
    # YaRN (arXiv:2309.00071): the context is extended by this factor; 1 is plain rope
    rope_factor: float = 1.0
    rope_original_length: int = 4096  # context that YaRN extends, in tokens
    # a pair of columns that turns more often than this in the original context stays as it is
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0  # one that turns less often is slowed by the whole factor
    # rotated queries and keys are multiplied by 1 + mscale / 10 * log(factor), over the same with
    # mscale_all_dim; by 1 + log(factor) / 10 where one of the two is 0
    rope_mscale: float = 1.0
    # scores are multiplied by (1 + mscale_all_dim / 10 * log(factor))^2
    rope_mscale_all_dim: float = 1.0
    rope_in_moe_layers: bool = True  # without it, attention in layers with experts sees no position
    hidden: int = 688  # F of the dense layers' SwiGLU
    expert_hidden: int = 688  # F of each expert's SwiGLU
    experts: int = 8  # E: routed experts in each MoE layer
    experts_per_token: int = 2  # K
    # equal groups that the experts are in (arXiv:2412.19437, section 2.1.2)
    expert_groups: int = 1
    groups_per_token: int = 1  # best groups, of which a token's K experts are chosen
    # experts that every token passes through; one SwiGLU of their summed width
    shared_experts: int = 1
    scores: Literal["sigmoid", "softmax"] = "sigmoid"  # how router logits become scores
    normalize_weights: bool = True  # the weights of a token's K experts sum to 1
    routed_scaling_factor: float = 1.0  # factor on the routed experts' sum
    # room at each expert, over K * tokens / E; what exceeds it is dropped
    capacity_factor: float = 1.5
    eval_capacity_factor: float = 2.0  # the same in evaluation
    # whole experts over fsdp x tensor, or cut and gathered
    experts_layout: Literal["auto", "spread", "gathered"] = "auto"
    # factor on the sequence-wise balance loss (arXiv:2412.19437, eq. 17)
    balance_loss: float = 1e-4
    # step of the balancing bias (arXiv:2412.19437, eq. 16); 0 turns it off
    router_bias_speed: float = 1e-3
    z_loss: float = 0.0  # factor on log(Z)^2 of the output softmax (arXiv:2204.02311, section 5)
    dropout: float = 0.0  # share of each layer's output that is zeroed in training
    tied: bool = True  # the output matrix is the embedding
    norm_epsilon: float = 1e-6  # added to the mean square in RMSNorm
    # the same in the RMSNorms of latents, of queries and of keys and values; 0 takes norm_epsilon
    latent_norm_epsilon: float = 0.0
    # of matmuls and activations; weights are float32 at rest. auto is bfloat16, or on CPUs, where
    # that is slow, float32
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
    # kernel; auto is in bfloat16 splash on a TPU, for sequences of a multiple of 128, and on an
    # NVIDIA GPU cudnn, or where that cannot be used triton; else XLA
    attention: Literal["auto", "xla", "splash", "cudnn", "triton"] = "auto"

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // 256) * 256

    @property
    def layers(self) -> int:
        return self.prefix_layers + self.blocks * (self.dense_layers + self.moe_layers)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    # what updates matrices of layers; embedding, output, norms and router always have adamw
    matrices: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3  # peak learning rate
    min_lr_ratio: float = 0.1  # last learning rate over the peak
    # after warmup: cosine, or stable and then linear decay (arXiv:2404.06395)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 50  # linear from 0
    schedule_steps: int = 0  # length of the whole schedule; 0 is train.steps
    decay_share: float = 0.2  # last part of a wsd schedule
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    muon_beta: float = 0.95  # Nesterov's momentum, of muon
    weight_decay: float = 0.1  # on matrices only
    decay_embeddings: bool = False  # also on embedding and output
    clip_norm: float = 1.0  # of the gradient of the whole model; 0 turns it off


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 300
    seed: int = 0  # of weights and dropout
    sequences: int = 8  # per step, all devices together
    sequence_length: int = 256  # T, in tokens
    microbatches: int = 4  # M: parts that a step is cut into; each is sequences / M sequences
    # what backward recomputes: none, full, or a comma-separated list of names to keep
    remat: str = "none"
    loss_chunk_tokens: int = 2048  # tokens whose logits exist at a time
    # steps in a row that were not applied, after which the run stops: a step is not applied when
    # its loss or gradient norm is not finite
    max_skipped_in_row: int = 10
    # nor is it when its gradient norm is more than this many times the median of those of the last
    # 128 steps applied, once there are 16; 0 turns it off
    skip_spikes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Data:
    train: str = "data/sample/train"  # folder of shards with an index.json, also gs://BUCKET/...
    val: str = "data/sample/val"  # the same for evaluation
    mixture: tuple[str, ...] = ()  # instead: "NAME WEIGHT FOLDER" of each, with train/ and val/
    seed: int = 0  # of the order of windows
    order: Literal["windows", "blocks"] = "windows"  # blocks: few requests of a bucket
    segments: bool = False  # attention stays inside a document


@dataclass(frozen=True, kw_only=True)
class Eval:
    every_steps: int = 100  # 0: only after the last step
    sequences: int = 64  # fixed validation windows; a multiple of train.sequences


@dataclass(frozen=True, kw_only=True)
class Sample:
    every_steps: int = 0  # 0: only after the last step
    prompts: tuple[str, ...] = ("def",)  # texts to continue; none turns samples off
    tokens: int = 48  # to add
    temperature: float = 0.8  # 0 takes the likeliest token


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every_steps: int = 100  # also after the last step; 0: never
    keep: int = 2  # newest ones kept
    keep_every_steps: int = 0  # also kept: every step that is a multiple of this; 0: none
    # steps without a checkpoint that is whole after which the run stops; 0: 10 times every_steps
    max_age_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = "tiny"
    dir: str = "runs"  # a run lives in DIR/NAME; gs://BUCKET/FOLDER is a folder of a bucket
    # auto continues a folder that has a checkpoint
    resume: Literal["auto", "never", "must"] = "auto"
    # folder of another run, whose weights a new run begins with: --init runs/tiny in short
    init: str = ""
    init_step: int = 0  # of its checkpoint; 0 is the newest good one, which is then recorded here
    time_limit: str = ""  # saves and ends before this time is over, as 11h30m
    peer_seconds: float = 30.0  # without a heartbeat of a process, after which the others end
    stall_minutes: float = 30.0  # in which a step, a save or any other phase has to end
    # steps between comparisons of what several devices hold alike, which are also made before each
    # save; a run whose devices differ stops with exit code 75; 0: none
    check_replicas_every: int = 0


@dataclass(frozen=True, kw_only=True)
class Wandb:
    project: str = ""  # also send metrics there; offline without WANDB_API_KEY


@dataclass(frozen=True, kw_only=True)
class Profile:
    first_step: int = 0  # first step of the trace
    steps: int = 0  # steps in the trace, kept in the run's folder; 0 makes none


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    mesh: Mesh = field(default_factory=Mesh)
    fsdp: Fsdp = field(default_factory=Fsdp)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    sample: Sample = field(default_factory=Sample)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
    wandb: Wandb = field(default_factory=Wandb)
    profile: Profile = field(default_factory=Profile)


# In place of a mesh that nobody set, until the devices are known (train.for_devices).
UNSET_MESH = Mesh(replica=0, fsdp=0, pipeline=0, tensor=0, virtual=0)


# --- flags ----------------------------------------------------------------------------------------

DESCRIPTION = (
    "Train a sharded transformer. --config FILE.toml gives other defaults; --init FOLDER begins "
    "with the weights of another run, and without --config with its [model]."
)
SHORT = {"--init": "--run.init"}


def parse(
    arguments: list[str] | None = None,
    others: tuple[str, ...] = (),
    checked: bool = True,
    model: Model | None = None,
) -> Config:
    """The config that `--config FILE` and the flags say: a flag wins over the file, the file over
    the default.

    others   flags that the program has beside these, to be named where one is unknown.
    checked  False leaves the call of `check` to the caller.
    model    the default of [model] without `--config`.

    Raises ValueError for a flag, a key or a file that does not exist, and for values that no run
    can have.
    """
    import tyro  # late: what reads configs from files alone runs without it

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    default, arguments = _config_file(arguments, Config(model=model or Model()))
    config, unknown = tyro.cli(
        Config,
        args=_switches(_long(arguments)),
        default=default,
        description=DESCRIPTION,
        return_unknown_args=True,
        use_underscores=True,
    )
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("--"):
            raise ValueError(
                f"{unknown[0]!r} follows no flag that takes it. Write --section.key value, as "
                "--model.width 256; see --help."
            )
        known = [f"--{name}" for name in (*_names(), *others)]
        raise ValueError(f"unknown flag {flag}{_mend(flag, known)}")
    if config.data.mixture:
        _check_alone(arguments)
    if checked:
        check(config)
    return config


def sets_mesh(arguments: list[str]) -> bool:
    """Whether the flags, or the file of `--config`, set any field of the mesh."""
    names = [argument.partition("=") for argument in arguments]
    if any(flag.startswith("--mesh.") for flag, _, _ in names):
        return True
    for (flag, equals, path), following in zip(names, [*arguments[1:], ""], strict=True):
        if flag == "--config":
            return "mesh" in tomllib.loads(Path(path if equals else following).read_text())
    return False


def for_platform(config: Config, platform: str) -> Config:
    """The config with `--model.compute_dtype auto` replaced by what suits the platform's devices.

    platform  as jax names it: cpu, gpu, tpu.
    """
    if config.model.compute_dtype != "auto":
        return config
    dtype = "float32" if platform == "cpu" else "bfloat16"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))


def _check_alone(arguments: list[str]) -> None:
    """Raises ValueError for flags that a mixture leaves without effect."""
    for argument in arguments:
        if (flag := argument.partition("=")[0]) in ("--data.train", "--data.val"):
            raise ValueError(
                f"{flag} is not read beside a mixture, whose folders have a train/ and a val/ "
                f"each. Leave {flag} out, or turn the mixture off: --data.mixture, with nothing "
                "behind it."
            )


def _long(arguments: list[str]) -> list[str]:
    """The arguments with flags that are in SHORT spelled out."""
    split = (argument.partition("=") for argument in arguments)
    return [SHORT.get(flag, flag) + equals + value for flag, equals, value in split]


def _config_file(arguments: list[str], default: Config) -> tuple[Config, list[str]]:
    """The defaults that `--config` names, or `default`, and the arguments without it."""
    for i, argument in enumerate(arguments):
        name, equals, path = argument.partition("=")
        if name == "--config":
            rest = arguments[:i] + arguments[i + (1 if equals else 2) :]
            path = path if equals else arguments[i + 1] if i + 1 < len(arguments) else ""
            return load(path), rest
    return default, arguments


def _switches(arguments: list[str]) -> list[str]:
    """`--model.tied False`, also with =, as tyro takes it: `--model.no_tied`."""
    switches = {f"--{name}" for name, f in _names().items() if f.type is bool}
    switches |= {name.replace("_", "-") for name in switches}
    words = {"true": "", "1": "", "false": "no_", "0": "no_"}
    out, rest = [], list(arguments)
    while rest:
        flag, *value = rest.pop(0).split("=", 1)
        if flag in switches and not value and rest and not rest[0].startswith("-"):
            value = [rest.pop(0)]
        if flag in switches and value:
            if value[0].lower() not in words:
                raise ValueError(f"{flag} {value[0]!r} is not a switch's value. Use True or False.")
            flag, value = flag.replace(".", "." + words[value[0].lower()]), []
        out.append("=".join([flag, *value]))
    return out


def load(path: str | Path) -> Config:
    """A config from a TOML file: [section] key = value for the fields above, the rest as by
    default.
    """
    try:
        text = Path(path).read_bytes().decode()
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"--config {path} cannot be read: {error}. Name a TOML file, such as configs/tiny.toml."
        ) from None
    sections = {}
    for section, values in table.items():
        known = _sections().get(section)
        if known is None or not isinstance(values, dict):
            what = f"section [{section}]" if isinstance(values, dict) else f"key {section}"
            names = [*_sections()] if isinstance(values, dict) else [*_names()]
            raise ValueError(f"{path}: unknown {what}{_mend(section, names)}")
        values = {key: v for key, v in values.items() if f"{section}.{key}" not in REMOVED}
        for key in values:
            if key not in known:
                mend = _mend(f"{section}.{key}", [*_names()])
                raise ValueError(f"{path}: unknown key {key} in [{section}]{mend}")
        made = {
            key: _typed(f"{path}: {section}.{key} =", known[key], value)
            for key, value in values.items()
        }
        sections[section] = _classes()[section](**made)
    return Config(**sections)


def _classes() -> dict[str, type]:
    return {f.name: f.default_factory for f in dataclasses.fields(Config)}


def _sections() -> dict[str, dict[str, dataclasses.Field]]:
    return {name: {f.name: f for f in dataclasses.fields(cls)} for name, cls in _classes().items()}


def _names() -> dict[str, dataclasses.Field]:
    return {f"{name}.{key}": f for name, keys in _sections().items() for key, f in keys.items()}


def _typed(where: str, known: dataclasses.Field, value: object) -> object:
    """A value, from TOML or Python, as the field's type.

    Raises ValueError where it is of another, or not one of the field's choices.
    """
    expected = type(known.default)
    if expected is float and type(value) is int:
        value = float(value)
    if expected is tuple and type(value) is list:
        value = tuple(value)
    parts = value if type(value) is tuple else ()
    if type(value) is not expected or not all(type(part) is str for part in parts):
        raise ValueError(
            f"{where} {value!r} is not {expected.__name__}. Write it like {_toml(known.default)}."
        )
    choices = known.type.__args__ if get_origin(known.type) is Literal else (value,)
    if value not in choices:
        raise ValueError(f"{where} {value!r} is not one of {', '.join(map(repr, choices))}.")
    return value


# What Hugging Face's configs of this family call our settings, and what they set beside.
HUGGING_FACE = {
    "hidden_size": "model.width",
    "intermediate_size": "model.hidden",
    "moe_intermediate_size": "model.expert_hidden",
    "num_hidden_layers": "model.prefix_layers and model.blocks",
    "first_k_dense_replace": "model.prefix_layers",
    "moe_layer_freq": "model.dense_layers and model.moe_layers",
    "num_attention_heads": "model.heads",
    "n_routed_experts": "model.experts",
    "num_experts_per_tok": "model.experts_per_token",
    "n_shared_experts": "model.shared_experts",
    "n_group": "model.expert_groups",
    "topk_group": "model.groups_per_token",
    "scoring_func": "model.scores",
    "norm_topk_prob": "model.normalize_weights",
    "topk_method": "model.router_bias_speed",
    "aux_loss_alpha": "model.balance_loss",
    "rms_norm_eps": "model.norm_epsilon",
    "tie_word_embeddings": "model.tied",
    "vocab_size": "model.vocabulary",
    "rope_scaling": "model.rope_factor and model.rope_original_length and model.rope_beta_fast and "
    "model.rope_beta_slow and model.rope_mscale and model.rope_mscale_all_dim",
    "original_max_position_embeddings": "model.rope_original_length",
    "max_position_embeddings": "train.sequence_length",
    "torch_dtype": "model.compute_dtype",
    "dtype": "model.compute_dtype",
}
NOT_HERE = frozenset(
    ["num_nextn_predict_layers", "num_key_value_heads", "attention_bias", "attention_dropout",
     "hidden_act", "initializer_range", "seq_aux", "head_dim", "rope_interleave", "model_type",
     "architectures", "use_cache"]
)  # fmt: skip


def _mend(word: str, known: list[str]) -> str:
    """The mend for an unknown flag, section or key."""
    name = word.removeprefix("--").rpartition(".")[2].replace("-", "_")
    if name in NOT_HERE:
        return f": the model has no setting for Hugging Face's {name}. Leave it out."
    if name in HUGGING_FACE:
        dashes = "--" if word.startswith("--") else ""
        ours = f" and {dashes}".join(HUGGING_FACE[name].split(" and "))
        return f": Hugging Face's {name} is {dashes}{ours} here."
    same = [setting for setting in known if setting.rpartition(".")[2] == name]
    close = same or difflib.get_close_matches(word, known, 1, 0.5)
    if close:
        return f": did you mean {' or '.join(close)}?"
    return f". Known are {', '.join(sorted(known)[:8])}, ...; see --help."


def seconds(text: str) -> int:
    """Of 11h30m, 90m or 45s. Raises ValueError for other texts."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or not found:
        raise ValueError(
            f"--run.time_limit {text!r} is no time. Write hours, minutes and seconds, as 11h30m."
        )
    h, m, s = (int(part or 0) for part in found.groups())
    return 3600 * h + 60 * m + s


def check(config: Config) -> None:
    """What can be seen to be wrong before any device is touched, but for the layouts of weights
    (see weights.check_cuts).
    """
    m, train, mesh = config.model, config.train, config.mesh
    check_numbers(config)
    _remat(train.remat)
    check_times(config.run)
    check_attention(config)
    check_checkpoints(config.checkpoint)
    for factor in ("capacity_factor", "eval_capacity_factor"):
        if getattr(m, factor) == 0:
            raise ValueError(
                f"--model.{factor} 0.0 leaves no room at any expert: it must be above 0. Use 1.5."
            )
    if m.moe_layers > 1 or m.dense_layers + m.moe_layers == 0:
        raise ValueError(
            f"--model.dense_layers {m.dense_layers} with --model.moe_layers {m.moe_layers}: a "
            "block has any number "
            "of dense layers, then 0 or 1 with experts, and at least one in all. Use "
            "--model.moe_layers 1."
        )
    if m.qk_rope_head_dim % 2:
        raise ValueError(
            f"--model.qk_rope_head_dim {m.qk_rope_head_dim} is odd, and rotation takes pairs. Use "
            f"{m.qk_rope_head_dim + 1}."
        )
    check_rope(m)
    if m.moe_layers:
        check_experts(m)
    multiples = [
        (
            "train.sequences",
            train.sequences,
            train.microbatches * mesh.batch,
            "--train.microbatches x --mesh.fsdp" + " x --mesh.replica" * (mesh.replica > 1),
        ),
        ("eval.sequences", config.eval.sequences, train.sequences, "--train.sequences"),
        ("train.sequence_length", train.sequence_length, mesh.tensor, "--mesh.tensor"),
    ]
    for flag, size, parts, why in multiples:
        if size % parts:
            raise ValueError(
                f"--{flag} {size} is not a multiple of {why} = {parts}, and every rank must have "
                "as much. "
                f"Use --{flag} {-(-size // parts) * parts}."
            )


MAY_BE_ZERO = frozenset(
    [
        "dense_layers",
        "moe_layers",
        "prefix_layers",
        "q_lora_rank",
        "shared_experts",
        "warmup_steps",
        "schedule_steps",
        "seed",
        "every_steps",
        "tokens",
        "first_step",
        "steps",
        "init_step",
        "keep_every_steps",
        "max_age_steps",
        "check_replicas_every",
    ]
)


def check_numbers(config: Config) -> None:
    """Types and bounds of each field on its own."""
    for name, known in _names().items():
        section, key = name.split(".")
        value = _typed(f"--{name}", known, getattr(getattr(config, section), key))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name} {value} is not a finite number. Use one.")
        low = 0 if key in MAY_BE_ZERO or isinstance(value, float) else 1
        if isinstance(value, int | float) and not isinstance(value, bool) and value < low:
            raise ValueError(f"--{name} {value} is below {low}. Use {low} or more.")
    if 0 < (spikes := config.train.skip_spikes) < 1:
        raise ValueError(
            f"--train.skip_spikes {spikes} would leave out steps whose gradient norm is below the "
            "median of those before: it must be 1 or more. Use 5.0, or 0.0, which turns it off."
        )
    for key in ("beta1", "beta2", "muon_beta"):
        if (beta := getattr(config.optimizer, key)) >= 1:
            raise ValueError(
                f"--optimizer.{key} {beta} keeps all of what was before, or more: it must be below "
                f"1. Use {getattr(Optimizer, key)}."
            )


def check_rope(m: Model) -> None:
    """Raises ValueError for frequencies that YaRN cannot make."""
    if m.rope_factor < 1:
        raise ValueError(
            f"--model.rope_factor {m.rope_factor} is below 1, and YaRN makes contexts longer. Use "
            "1.0, which is plain rope, or more."
        )
    if m.rope_factor == 1:
        return
    if not 0 < m.rope_beta_slow <= m.rope_beta_fast:
        raise ValueError(
            f"--model.rope_beta_slow {m.rope_beta_slow} with --model.rope_beta_fast "
            f"{m.rope_beta_fast}: both count turns in the original context, the first above 0 and "
            "not above the second. Use --model.rope_beta_slow 1.0 --model.rope_beta_fast 32.0."
        )
    if m.rope_theta <= 1:
        raise ValueError(
            f"--model.rope_theta {m.rope_theta} is not above 1, and YaRN needs pairs that turn "
            "slower and slower. Use --model.rope_theta 10000.0."
        )


def check_experts(m: Model) -> None:
    """Raises ValueError for choices of experts that no token can make."""
    if m.experts_per_token > m.experts:
        raise ValueError(
            f"--model.experts_per_token {m.experts_per_token} is more than --model.experts "
            f"{m.experts}. Use {m.experts} or less."
        )
    if m.expert_groups > 1 and (m.experts % m.expert_groups or m.experts < 2 * m.expert_groups):
        cuts = [n for n in range(1, m.expert_groups) if m.experts % n == 0 and m.experts >= 2 * n]
        raise ValueError(
            f"--model.expert_groups {m.expert_groups} with --model.experts {m.experts}: groups are "
            "equal, and have 2 experts or more, as the sum of the two best is a group's score. Use "
            f"--model.expert_groups {max(cuts, default=1)}."
        )
    if m.groups_per_token > m.expert_groups:
        raise ValueError(
            f"--model.groups_per_token {m.groups_per_token} is more than --model.expert_groups "
            f"{m.expert_groups}. Use {m.expert_groups} or less."
        )
    each = m.experts // m.expert_groups
    if m.experts_per_token > m.groups_per_token * each:
        raise ValueError(
            f"--model.experts_per_token {m.experts_per_token} is more than the experts in "
            f"--model.groups_per_token {m.groups_per_token}, {each} in each group. Use "
            f"--model.groups_per_token {-(-m.experts_per_token // each)}."
        )


def check_times(run: Run) -> None:
    """Raises ValueError for times in which no run can do anything."""
    if run.time_limit:
        seconds(run.time_limit)
    for name in ("peer_seconds", "stall_minutes"):
        if not getattr(run, name):
            raise ValueError(
                f"--run.{name} 0.0 ends every run at once. Use {getattr(Run, name)}, or more."
            )


def check_checkpoints(c: Checkpoint) -> None:
    """Raises ValueError for a run that would stop before its second checkpoint is due."""
    if 0 < c.max_age_steps < c.every_steps:
        raise ValueError(
            f"--checkpoint.max_age_steps {c.max_age_steps} is below --checkpoint.every_steps "
            f"{c.every_steps}, and so old is the newest when the next is due. Use "
            f"--checkpoint.max_age_steps {2 * c.every_steps}, or 0."
        )


def check_attention(config: Config) -> None:
    """Raises ValueError for sequences that splash cannot take."""
    length = config.train.sequence_length
    if config.model.attention == "splash" and length % LANES:
        raise ValueError(
            f"--model.attention splash cannot take --train.sequence_length {length}: its blocks "
            f"are multiples of {LANES}. Use --train.sequence_length {-(-length // LANES) * LANES}, "
            "or --model.attention xla."
        )


def _remat(policy: str) -> None:
    # What runs before it was gone may have in their configs: a name of nothing keeps nothing.
    unknown = sorted(set(policy.split(",")) - {*REMAT_NAMES, "expert_out"})
    if policy not in ("none", "full") and unknown:
        close = difflib.get_close_matches(unknown[0], ("none", "full", *REMAT_NAMES), 1, 0.5)
        raise ValueError(
            f"--train.remat {policy}: {', '.join(map(repr, unknown))} cannot be kept"
            f"{f', did you mean {close[0]}?' if close else '.'} Use none, full, or some of "
            f"{', '.join(REMAT_NAMES)}, separated by commas."
        )


def to_toml(config: Config) -> str:
    """The config as a file that `--config` reads."""
    lines = []
    for section, fields in dataclasses.asdict(config).items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in fields.items()), ""]
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # TOML's basic strings and arrays are JSON's.
    return json.dumps(value)
