"""Config dataclasses and mesh axes.

A setting is a field below. From it follow the flag `--model.hidden_size`, the key `hidden_size`
under `[model]` in a TOML file, its line in `--help` (the comment at the field), the check of its
range, and what a run that resumes may do with it. `setting` declares what is not usual.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

GIB = 2**30
LANES = 128  # of a TPU's vector registers; the blocks of splash attention are multiples of it

# The axes of the mesh, outermost first, and those that batch, sequence, tokens, vocabulary and
# experts are sharded over. Weights are replicated over `replica`, whose links are the slowest: they
# connect slices.
MESH_AXES = ("replica", "fsdp", "pipeline", "context", "tensor")
BATCH_AXES = ("replica", "fsdp")
DATA_AXES = (*BATCH_AXES, "context")  # along which targets and losses vary
SEQUENCE_AXES = ("context", "tensor")
TOKEN_AXES = BATCH_AXES + SEQUENCE_AXES
VOCABULARY_AXES = ("pipeline", "tensor")
EXPERT_AXES = ("fsdp", "context", "tensor")
WEIGHT_AXES = ("fsdp", "context")  # what "fsdp" means in the layout of a weight

# Residuals that `train.remat` can save, in the order of computation (model.py names them).
REMAT_NAMES = (
    *("latents", "attention", "attention_out"),
    *("mlp_in", "hidden"),
    *("expert_in", "expert_hidden"),
)


class ConfigError(ValueError):
    """An error that the user can fix. Commands print it in one line, without a traceback."""


class TooLarge(ConfigError):
    """By the plan the model fits no mesh over these devices, and so no part of them."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the declaration of a setting says, beside its comment."""

    type: Any = None  # this and the default are those of the field
    default: Any = None
    # range of a number, beside the default: at least 0, or at least 1 for an int with another
    # default than 0, unless these are given
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    # When a run resumes, a fixed setting has to be the same, and a free one may change. A change is
    # a warning if it affects rounding alone (warned). What decides the decay of a wsd schedule may
    # change before it (until_decay). By default as the section, and a section is fixed.
    resume: Literal["fixed", "free", "warned", "until_decay"] | None = None
    weights: bool = True  # a fixed setting of [model]: --run.init_from compares it
    path: bool = False  # a leading ~ is the home folder


def rules(**named: Any) -> dict[str, Setting]:
    """Return metadata of a field with these rules, by the names of Setting."""
    return {"setting": Setting(**named)}


def setting(default: Any = dataclasses.MISSING, **named: Any) -> Any:
    """Declare a setting with a range or another rule, by the names of Setting."""
    return field(default=default, metadata=rules(**named))


FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # of model.layer_types


class LayerRun(NamedTuple):
    """Consecutive layers of a block, or the layers before the blocks, that are alike."""

    name: str  # of their weights in Transformer.blocks
    first: int  # number of the first one in the block
    layers: int
    experts: bool
    window: int  # positions that a query attends to, with its own; 0: all earlier ones
    rope: "Rope | None"  # rotary embedding of queries and keys; None: they have no position
    attention: str  # its name in attention.KINDS

    @property
    def stacked(self) -> bool:
        """Whether the weights have a dimension for the layers of the run."""
        return self.layers > 1 or not self.experts


@dataclass(frozen=True, kw_only=True)
class Mesh:
    # data parallel replicas, of all weights each, between slices; the batch is sharded over them.
    # main.py chooses each field of [mesh] for its devices unless it is set
    replica: int = 1
    fsdp: int = 2  # ranks that the batch and every matrix are sharded over
    pipeline: int = 2  # ranks that the layers are sharded over
    # ranks that the sequence is sharded over, within attention too (context parallelism); the
    # weights of fsdp are sharded over them as well
    context: int = 1
    # ranks that heads, hidden width, and the sequence between matmuls are sharded over
    tensor: int = 2
    # model chunks per pipeline rank; above 1 is interleaved 1F1B (arXiv:2104.04473)
    virtual: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of MESH_AXES."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    def __str__(self) -> str:
        """Format as (fsdp, pipeline, tensor) = (2, 2, 2), with replica and context if above 1."""
        sizes = dict(zip(MESH_AXES, self.shape, strict=True))
        sizes = {a: n for a, n in sizes.items() if n != 1 or a not in ("replica", "context")}
        return f"({', '.join(sizes)}) = {tuple(sizes.values())}"

    @property
    def batch(self) -> int:
        """Ranks that the batch is sharded over."""
        return self.replica * self.fsdp

    @property
    def sequence(self) -> int:
        """What the length of a sequence is a multiple of: context_parallel.py has two chunks."""
        return self.context * math.lcm(2, self.tensor) if self.context > 1 else self.tensor


@dataclass(frozen=True, kw_only=True)
class Fsdp:
    # gather weights once per step (fastest), or per layer (least memory); main.py chooses unless it
    # is set
    gather: Literal["step", "layer"] = "step"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    # compute gradients of matrices as tasks of their own, in ticks in which every rank has one
    # (arXiv:2401.10241): a shorter bubble for more memory and copies; not with train.remat full
    split_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Extension of the context.

    YaRN (arXiv:2309.00071), that of Llama 3 (arXiv:2407.21783), or linear (arXiv:2306.15595).
    """

    # linear divides the frequencies of all pairs by the factor
    rope_type: Literal["yarn", "llama3", "linear"] = "yarn"
    factor: float = setting(1.0, at_least=1)  # extension of the context; 1 is plain rotary
    original_max_position_embeddings: int = 4096  # tokens of the original context
    beta_fast: float = 32.0  # pairs that rotate more often than this in it keep their frequency
    beta_slow: float = setting(1.0, above=0)  # slower pairs have it divided by the factor
    truncate: bool = True  # round the numbers of these two pairs, as DeepSeek does
    # rotated queries and keys are multiplied by the quotient of 1 + mscale / 10 * log(factor) and
    # the same with mscale_all_dim; by 1 + log(factor) / 10 if either is 0
    mscale: float = 1.0
    # attention scores are multiplied by (1 + mscale_all_dim / 10 * log(factor))^2
    mscale_all_dim: float = 1.0
    # llama3: pairs that rotate more often than high_freq_factor in the original context keep their
    # frequency; pairs that rotate less often than low_freq_factor have it divided by the factor
    low_freq_factor: float = setting(1.0, above=0)
    high_freq_factor: float = 4.0


class Rope(NamedTuple):
    """A rotary embedding. The names are those of Model."""

    rope_theta: float
    rope_scaling: RopeScaling


@dataclass(frozen=True, kw_only=True)
class Model:
    """The architecture, in the names of Hugging Face's DeepSeek-V3 config where it has one.

    decoder_sparse_step is a name of Qwen's configs.
    """

    # V: token ids of the tokenizer; 0: of that of the data; padded to a multiple of 256 inside
    vocab_size: int = setting(4096, at_least=0)
    hidden_size: int = 256  # D: width of the residual stream
    num_hidden_layers: int = 8  # L: first_k_dense_replace + a multiple of decoder_sparse_step
    first_k_dense_replace: int = 0  # dense layers before the repeated blocks
    # layers of a block, of which the last has experts: layer i after the first k has experts if
    # (i + 1) % decoder_sparse_step is 0 and n_routed_experts is above 0
    decoder_sparse_step: int = 2
    num_attention_heads: int = 4  # N
    # latent attention; or grouped-query attention, which is multi-head attention if there are as
    # many heads of keys and values as of queries
    attention: Literal["mla", "gqa"] = "mla"
    num_key_value_heads: int = 4  # Y: heads of keys and values (gqa)
    head_dim: int = 64  # A: width of a head of queries, keys and values (gqa)
    qk_norm: bool = False  # RMSNorm of each head of queries and keys, as in Qwen3 (gqa)
    qk_norm_all_heads: bool = False  # this norm over all heads at once, as in OLMo 2
    attention_bias: bool = False  # biases of queries, keys and values, as in Qwen2 (gqa)
    attention_out_bias: bool = False  # also of the output, as in gpt-oss
    # a score of each head, which no value belongs to, in the softmax: as in gpt-oss (gqa)
    attention_sinks: bool = False
    query_pre_attn_scalar: float = 0.0  # scores are divided by its root; 0: by that of head_dim
    sliding_window: int = 0  # positions that a query attends to, with its own; 0: all earlier ones
    # of each layer, repeated: full_attention, sliding_attention, which alone has the window, or a
    # kind in place of --model.attention; without any, all layers have the window
    layer_types: tuple[str, ...] = ()
    q_lora_rank: int = 0  # Q: width of the query latent; 0: queries without a latent
    kv_lora_rank: int = 64  # C: width of the key-value latent
    qk_nope_head_dim: int = 64  # H: width of a query and key head without position
    # R: rotary width of a query head, and of the one rotary key that all heads share
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64  # W: width of a value head
    rope_theta: float = setting(10000.0, above=1)  # longest rotary wavelength, in tokens / 2 pi
    # a run that starts from the weights of another may extend their context
    rope_scaling: RopeScaling = field(default_factory=RopeScaling, metadata=rules(weights=False))
    # the same, without scaling, in layers with a window, as in Gemma 3; 0: as in the others
    rope_local_base_freq: float = setting(0.0, above=1)
    # layer i has no position if (i + 1) % no_rope_layer_interval is 0 (arXiv:2501.18795); 0: none
    no_rope_layer_interval: int = setting(0, at_least=0)
    # RMSNorms of attention and feed-forward: of the input, as in Llama; of the output, before it is
    # added, as in OLMo 2; or of both, as in Gemma 3
    norms: Literal["before", "after", "both"] = "before"
    embedding_multiplier: float = setting(1.0, above=0)  # of embeddings, not the output matrix
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"  # of the gate of feed-forward layers
    # the activation of gpt-oss, x sigmoid(1.702 x) times the other product plus 1, of values up to
    # this limit; 0: hidden_act
    swiglu_limit: float = 0.0
    intermediate_size: int = 688  # F of the dense layers' SwiGLU
    moe_intermediate_size: int = 688  # G of each expert's SwiGLU
    n_routed_experts: int = setting(8, at_least=0)  # E: experts of each MoE layer; 0: a dense model
    num_experts_per_tok: int = 2  # K
    n_group: int = 1  # groups of equal size that experts are in (arXiv:2412.19437, section 2.1.2)
    topk_group: int = 1  # groups from which a token's K experts are chosen
    # rank of a group: the sum of its two best experts, as in DeepSeek-V3, or its best expert, as in
    # DeepSeek-V2
    topk_method: Literal["noaux_tc", "group_limited_greedy"] = "noaux_tc"
    # experts that every token passes through; one SwiGLU of their summed width
    n_shared_experts: int = setting(1, at_least=0)
    experts_bias: bool = False  # biases of router and routed experts, as in gpt-oss; dropless only
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"  # router logits to scores
    norm_topk_prob: bool = True  # the weights of a token's K experts sum to 1
    routed_scaling_factor: float = 1.0  # factor on the routed experts' output
    # capacity of an expert for the tokens of one rank in one microbatch, as a multiple of
    # K * tokens / E; tokens beyond it are dropped. 0: dropless, so that the loss is the same on
    # every mesh
    capacity_factor: float = setting(1.5, weights=False)
    eval_capacity_factor: float = setting(0.0, resume="free")  # the same in evaluation
    # expert parallelism over fsdp x context x tensor, or experts sharded like other weights; auto
    # is expert parallelism if n_routed_experts is divisible by this product
    experts_layout: Literal["auto", "expert_parallel", "sharded"] = setting("auto", resume="free")
    # factor on the sequence-wise balance loss (arXiv:2412.19437, eq. 17)
    aux_loss_alpha: float = setting(1e-4, weights=False)
    # step of the balancing bias (arXiv:2412.19437, eq. 16); 0: no bias
    router_bias_update_speed: float = setting(1e-3, weights=False)
    # factor on log(Z)^2 of the output softmax (arXiv:2204.02311, section 5)
    z_loss: float = setting(0.0, weights=False)
    dropout: float = setting(0.0, below=1, weights=False)  # share of each layer's output to zero
    tie_word_embeddings: bool = True  # the output matrix is the embedding
    rms_norm_eps: float = 1e-6  # added to the mean square in RMSNorm
    # the same in the RMSNorms of the query and key-value latents; 0 takes rms_norm_eps
    latent_rms_norm_eps: float = 0.0
    # dtype of matmuls and activations; weights are stored in float32. auto is float32 on CPUs,
    # and on GPUs before Ampere (T4, V100), where bfloat16 is slow, and bfloat16 elsewhere
    compute_dtype: Literal["auto", "bfloat16", "float32"] = setting("bfloat16", resume="warned")
    # dtype of the products of feed-forward layers in training: the compute dtype, or float8 (e4m3,
    # and e5m2 for gradients) with a scale for each tensor, which is faster on NVIDIA GPUs from
    # Ada on and on TPU v7x. Routed experts keep the compute dtype, as do evaluation and generation
    matmul_dtype: Literal["compute", "float8"] = setting("compute", resume="warned")
    # auto in bfloat16: splash on TPUs for sequences of a multiple of 128 tokens; on NVIDIA GPUs
    # cudnn, or triton if cudnn cannot run; otherwise xla. xla leaves the loss to XLA too
    attention_kernel: Literal["auto", "xla", "splash", "cudnn", "triton"] = setting(
        "auto", resume="warned"
    )
    # of dropless experts. auto in bfloat16: triton on NVIDIA GPUs; otherwise tiles, a loop over
    # parts of each expert's tokens. megablox, for TPUs, takes more memory than tiles
    experts_kernel: Literal["auto", "tiles", "megablox", "triton"] = setting(
        "auto", resume="warned"
    )

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // 256) * 256

    @property
    def period(self) -> int:
        """Layers of a block, after which all settings of layers repeat."""
        types, interval = len(self.layer_types) or 1, self.no_rope_layer_interval or 1
        return math.lcm(self.decoder_sparse_step, types, interval)

    @property
    def blocks(self) -> int:
        """Blocks of layers, which the pipeline distributes."""
        return (self.num_hidden_layers - self.first_k_dense_replace) // self.period

    @property
    def moe_layers(self) -> int:
        """Layers with experts in each block."""
        return self.period // self.decoder_sparse_step if self.n_routed_experts else 0

    @property
    def dense_layers(self) -> int:
        """Dense layers in each block."""
        return self.period - self.moe_layers

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The layers of a block, in their order."""
        found: list[LayerRun] = []
        for i in range(self.period):
            experts = self.n_routed_experts > 0 and (i + 1) % self.decoder_sparse_step == 0
            here = experts, *self._attention(self.first_k_dense_replace + i)
            if found and found[-1][3:] == here:
                found[-1] = found[-1]._replace(layers=found[-1].layers + 1)
                continue
            kind = "moe" if experts else "dense"
            others = sum(run.experts == experts for run in found)
            found.append(LayerRun(f"{kind}_{others + 1}" if others else kind, i, 1, *here))
        return tuple(found)

    @property
    def prefix(self) -> tuple[LayerRun, ...]:
        """The layers before the blocks, at most one run: runtime/cli.py refuses several."""
        kinds = dict.fromkeys(map(self._attention, range(self.first_k_dense_replace)))
        layers = self.first_k_dense_replace
        return tuple(LayerRun("prefix", 0, layers, False, *kind) for kind in kinds)

    @property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """Those before the blocks, and those of a block."""
        return self.prefix + self.runs

    def _attention(self, layer: int) -> tuple[int, Rope | None, str]:
        """Return window, rope and attention of a layer, by its number in the model."""
        types, interval = self.layer_types, self.no_rope_layer_interval
        word = types[layer % len(types)] if types else SLIDING_ATTENTION
        kind = self.attention if word in (FULL_ATTENTION, SLIDING_ATTENTION) else word
        nope = bool(interval) and (layer + 1) % interval == 0
        window = self.sliding_window if word == SLIDING_ATTENTION else 0
        rope = Rope(self.rope_theta, self.rope_scaling)
        if window and self.rope_local_base_freq:
            rope = Rope(self.rope_local_base_freq, RopeScaling())
        return window, None if nope else rope, kind


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv:2106.09685) of the weights of --run.init_from."""

    rank: int = setting(0, at_least=0)  # of the adapters; 0: all weights are trained
    alpha: float = setting(32.0, above=0)  # the change of a matrix is A B, times alpha / rank
    # matrices with adapters: attention, mlp (of dense layers and shared experts), experts
    targets: tuple[str, ...] = ("attention", "mlp")
    # type in which the frozen weights are stored; nf4 has 4 bits (arXiv:2305.14314), for matrices
    # whose last dimension is a multiple of 16
    base: Literal["float32", "bfloat16", "nf4"] = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    # of the matrices of layers; AdamW updates embedding, output, norms and router in either case
    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3  # peak learning rate
    min_lr_ratio: float = setting(0.1, resume="until_decay")  # final learning rate over the peak
    # after warmup: a cosine, or warmup-stable-decay with a linear decay (arXiv:2404.06395)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = setting(50, at_least=0)  # linear from 0
    # length of the schedule with warmup; 0 is train.steps
    schedule_steps: int = setting(0, resume="until_decay")
    decay_share: float = setting(0.2, resume="until_decay")  # share in which a wsd schedule decays
    beta1: float = setting(0.9, below=1)  # decay of the first moment in AdamW
    beta2: float = setting(0.95, below=1)  # decay of the second moment
    epsilon: float = 1e-8
    muon_beta: float = setting(0.95, below=1)  # Nesterov's momentum in Muon
    weight_decay: float = 0.1  # of matrices and router only
    decay_embeddings: bool = False  # also of embedding and output
    clip_norm: float = 1.0  # largest global gradient norm; 0 disables clipping

    def phases(self, steps: int) -> tuple[int, int]:
        """Return the steps of warmup, at most all but one, and those before the decay."""
        warmup = min(self.warmup_steps, max(1, steps - 1))
        if self.schedule == "cosine":
            return warmup, warmup
        return warmup, max(warmup, steps - max(1, round(self.decay_share * steps)))


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = setting(300, resume="free")
    seed: int = 0  # of initial weights and dropout
    global_batch_size: int = 8  # sequences per step, on all devices
    seq_len: int = 256  # T, in tokens
    # M: of global_batch_size / M sequences each; main.py chooses M unless it is set
    microbatches: int = setting(4, resume="free")
    # recomputation in the backward pass: none, full, or a comma-separated list of what to save;
    # main.py chooses unless it is set
    remat: str = setting("none", resume="free")
    # without a pipeline: unrolled layers are faster, scanned ones compile sooner; auto: scanned on
    # TPUs, on CPUs that recompute, with adapters, and where the unrolled step does not fit
    layers: Literal["auto", "unrolled", "scanned"] = setting("auto", resume="free")
    loss_chunk_tokens: int = setting(2048, resume="free")  # most tokens with logits at a time
    # the run stops after this many skipped steps in a row; a step is skipped if its loss or
    # gradient norm is not finite
    max_skipped_in_row: int = setting(10, resume="free")
    # a step is also skipped if its gradient norm is above this many times the median of the last
    # 128 applied steps, once there are 16; 0 disables this
    skip_spikes: float = setting(0.0, at_least=1, resume="free")


@dataclass(frozen=True, kw_only=True)
class Data:
    # folder of shards with an index.json, also gs://BUCKET/...
    train: str = setting("data/sample/train", resume="free", path=True)
    val: str = setting("data/sample/val", resume="free", path=True)  # the same for evaluation
    # instead: "NAME WEIGHT FOLDER" of each, with train/ and val/
    mixture: tuple[str, ...] = setting((), resume="free")
    seed: int = 0  # of the order of windows
    order: Literal["windows", "blocks"] = "windows"  # blocks: fewer requests to a bucket
    segments: bool = False  # attention within documents only
    # of a token in the window, or in its document, which needs --data.segments
    positions: Literal["window", "document"] = "window"


@dataclass(frozen=True, kw_only=True)
class Eval:
    every_steps: int = setting(100, at_least=0)  # 0: only after the last step
    sequences: int = setting(64, at_least=0)  # validation windows, always the same; 0: none


@dataclass(frozen=True, kw_only=True)
class Sample:
    every_steps: int = 0  # 0: only after the last step
    prompts: tuple[str, ...] = ("def",)  # texts to complete; none disables samples
    tokens: int = setting(48, at_least=0)  # tokens of a completion
    temperature: float = 0.8  # 0 takes the most likely token


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every_steps: int = setting(100, at_least=0)  # also after the last step; 0: never
    keep: int = 2  # newest checkpoints to keep
    keep_every_steps: int = 0  # also keep steps that are a multiple of this; 0: none


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = "tiny"
    dir: str = setting("runs", path=True)  # the run is in DIR/NAME; DIR may be gs://BUCKET/FOLDER
    # auto resumes from a checkpoint in the run folder, if there is one
    resume: Literal["auto", "never", "must"] = "auto"
    init_from: str = setting("", path=True)  # folder of a run, whose weights this one starts from
    init_from_step: int = 0  # of its checkpoint; 0: the newest good one, which is recorded here
    # also continue its optimizer state, step and data, as to extend the constant rate of wsd
    init_optimizer: bool = False
    # take over a run folder in a bucket from an owner whose run is gone
    take_over: bool = False
    time_limit: str = ""  # save and exit before this time is over, as 11h30m
    peer_seconds: float = setting(30.0, above=0)  # without a peer's heartbeat until a process exits
    stall_minutes: float = setting(30.0, above=0)  # longest step, save or other phase
    # steps between comparisons of replicated arrays across devices, which also precede each save;
    # the run stops with exit code 75 if they differ; 0: no comparisons
    check_replicas_every: int = 0
    tensorboard: bool = False  # also write the records to DIR/NAME/tensorboard
    price_per_hour: float = 0.0  # of one device, in any currency, for the cost in the report


@dataclass(frozen=True, kw_only=True)
class Wandb:
    # also send the records to this project; offline if wandb finds no credentials
    project: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    first_step: int = 0  # first step of the trace
    steps: int = 0  # steps of the trace, written to the run folder; 0: no trace


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    mesh: Mesh = field(default_factory=Mesh, metadata=rules(resume="free"))
    fsdp: Fsdp = field(default_factory=Fsdp, metadata=rules(resume="free"))
    pipeline: Pipeline = field(default_factory=Pipeline, metadata=rules(resume="free"))
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval, metadata=rules(resume="free"))
    sample: Sample = field(default_factory=Sample, metadata=rules(resume="free"))
    checkpoint: Checkpoint = field(default_factory=Checkpoint, metadata=rules(resume="free"))
    run: Run = field(default_factory=Run, metadata=rules(resume="free"))
    wandb: Wandb = field(default_factory=Wandb, metadata=rules(resume="free"))
    profile: Profile = field(default_factory=Profile, metadata=rules(resume="free"))


# Settings that fit.for_devices chooses, with their values until the devices are known.
AUTO: Mapping[str, Any] = {
    "mesh.replica": 0,
    "mesh.fsdp": 0,
    "mesh.pipeline": 0,
    "mesh.context": 0,
    "mesh.tensor": 0,
    "mesh.virtual": 0,
    "train.microbatches": 0,
    "train.remat": "auto",
    "fsdp.gather": "auto",
}


# --- settings by name ----------------------------------------------------------------------------


@functools.cache
def settings_of(
    cls: type = Config, prefix: str = "", resume: str = "fixed", weights: bool = True
) -> Mapping[str, Setting]:
    """Return {"model.rope_scaling.factor": setting, ...} of a config or a section.

    resume   rule of the settings that declare none
    weights  of the section, for all of its settings
    """
    settings: dict[str, Setting] = {}
    for f in dataclasses.fields(cls):
        name, own = prefix + f.name, f.metadata.get("setting", Setting())
        rules = {"resume": own.resume or resume, "weights": own.weights and weights}
        own = dataclasses.replace(own, type=f.type, default=f.default, **rules)
        is_section = dataclasses.is_dataclass(f.type)
        settings |= settings_of(f.type, f"{name}.", **rules) if is_section else {name: own}
    return settings


def get(config: Any, name: str) -> Any:
    """Return the setting of a dotted name, as "model.hidden_size"."""
    return functools.reduce(getattr, name.split("."), config)


def changed(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the config with some settings replaced, by dotted names."""
    for name, value in values.items():
        field_name, _, rest = name.partition(".")
        if rest:
            value = changed(getattr(config, field_name), {rest: value})
        config = dataclasses.replace(config, **{field_name: value})
    return config


def left_open(config: Config) -> frozenset[str]:
    """Return the names of AUTO that have no value yet."""
    return frozenset(name for name, value in AUTO.items() if get(config, name) == value)


def capability(platform: str) -> float:
    """Return the compute capability of an NVIDIA GPU, 8.9 of gpu8.9; 0 for all else."""
    number = platform.removeprefix("gpu")
    return float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else 0.0


def has_bfloat16(platform: str) -> bool:
    """Return whether a platform, as hardware.platform_of names it, multiplies in bfloat16.

    XLA computes in float32 what it does not.
    """
    return platform != "cpu" and not 0 < capability(platform) < 8


def for_platform(config: Config, platform: str) -> Config:
    """Return the config with `--model.compute_dtype auto` resolved for a platform."""
    if config.model.compute_dtype != "auto":
        return config
    dtype = "bfloat16" if has_bfloat16(platform) else "float32"
    return changed(config, {"model.compute_dtype": dtype})


def check_range(name: str, value: Any, declared: Setting) -> None:
    """Raise ConfigError for a number outside the range that its setting declares."""
    if type(value) not in (int, float) or value == declared.default:
        return
    low, kind = declared.at_least, "an integer" if type(value) is int else "a finite number"
    if low is None and declared.above is None:
        low = 1 if type(value) is int and declared.default else 0
    bounds = (
        (operator.ge, "at least", low),
        (operator.gt, "above", declared.above),
        (operator.lt, "below", declared.below),
        (operator.le, "at most", declared.at_most),
    )
    given = [bound for bound in bounds if bound[2] is not None]
    if not math.isfinite(value) or not all(holds(value, limit) for holds, _, limit in given):
        limits = " and ".join(f"{words} {limit}" for _, words, limit in given)
        usual = "omit it" if declared.default is None else f"the default {declared.default}"
        raise ConfigError(f"--{name} {value} is out of range. Use {kind} {limits}, or {usual}.")
