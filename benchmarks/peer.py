"""Compare training steps of one model with those of PyTorch on the same device.

    ./run.sh python benchmark.py peer           needs the packages of requirements-hf.txt
    ./run.sh python benchmark.py peer --model llama

The model is the mixture of experts of configs/reference.toml with its dense layers first, as in
DeepseekV3ForCausalLM of transformers, or a Llama of its width. The class of transformers trains
from the same initial weights on the same tokens. The trainers take turns, so that a disturbance of
the machine slows all of them. Each runs in its own process, where threads and memory of the others
do not slow it.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import model
import train
import weights
from benchmarks.common import ONE_DEVICE, compile_step, random_batch, reference_config, spread
from checkpoint import Checkpoints
from convert import Export, export_run
from runtime import cli
from runtime.console import log
from utils import Config, ConfigError, changed

if TYPE_CHECKING:  # imported late: it is optional
    import torch

# The first step of a turn is not timed. On a virtual machine, memory pages that were free for a
# second are slow to return, and a training run never pauses that long.
STEPS_PER_TURN = 3
LLAMA = {
    "model.attention": "gqa",
    "model.num_key_value_heads": 2,
    "model.head_dim": 64,
    "model.decoder_sparse_step": 1,
    "model.n_routed_experts": 0,
    "model.n_shared_experts": 0,
}
LOSS_TOLERANCE = 0.02  # between first losses from the same weights: rounding may change routing


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py peer`."""

    model: Literal["moe", "llama"] = "moe"
    turns: int = 8  # of each trainer, with two timed steps each
    compile: bool = True  # torch.compile, which takes minutes, is measured too unless --no_compile


def config_of_both(name: str) -> Config:
    """Return the config of `moe` or `llama`, which both trainers have."""
    config = reference_config()
    m = config.model
    dense = m.blocks * m.dense_layers
    moe = {"model.first_k_dense_replace": dense, "model.decoder_sparse_step": 1}
    values = {"moe": moe, "llama": LLAMA}[name]
    return changed(config, ONE_DEVICE | values | {"train.microbatches": 1})


class Project:
    """The step of train.py, with float32 weights used in compute_dtype."""

    def __init__(self, config: Config):
        program = compile_step(config)
        self.name, self.ready_s = "this project", program.compile_s
        m = config.model
        self._steps = program.steps()
        self._choices = m.blocks * m.moe_layers * m.num_experts_per_tok * program.tokens
        _, self.first_loss = self.step()

    def step(self) -> tuple[float, float]:
        """Return the seconds and the loss of the next step."""
        seconds, report = next(self._steps)
        self.dropped = int(report["stats"].dropped) / max(1, self._choices)
        return seconds, float(report["stats"].cross_entropy)


# --- PyTorch --------------------------------------------------------------------------------------


def export_initial_weights(config: Config, folder: Path) -> Path:
    """Export the initial weights for transformers; return the new folder within `folder`."""
    run, out = folder / "run", folder / "exported"
    run.mkdir()
    (run / "config.toml").write_text(cli.to_toml(config), encoding="utf-8")
    state = {"weights": weights.initialize(model.declare(config), train.make_mesh(config), 0)}
    saved_config = dataclasses.asdict(config) | {"tokens": {"tokenizer": "", "end_of_text": 0}}
    with closing(Checkpoints(run / "checkpoints", keep=1)) as checkpoints:
        checkpoints.save(0, state, saved_config)
    export_run(Export(run=run, out=out))
    return out


class Torch:
    """A step of PyTorch: loss over all microbatches, gradients, their norm, AdamW."""

    dropped = 0.0

    def __init__(self, config: Config, compile: bool):
        import torch
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
        self._torch, o = torch, config.optimizer
        self._clip = o.clip_norm or math.inf
        self._device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        with tempfile.TemporaryDirectory() as folder:
            path = export_initial_weights(config, Path(folder))
            network = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        network = network.to(self._device).train()
        self.name = f"{type(network).__name__}, {'torch.compile' if compile else 'eager'}"
        self._parameters = list(network.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            weight_decay=o.weight_decay,
            fused=True,
        )
        batch = random_batch(config, train.make_mesh(config))  # that of the other trainers
        self._ids, self._targets = (
            torch.tensor(np.asarray(ids_MBT).astype(np.int64), device=self._device)
            for ids_MBT in (batch.tokens, batch.targets)
        )

        def loss(ids: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
            logits = network(ids, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        self._loss = torch.compile(loss) if compile else loss
        self.ready_s, self.first_loss = self.step()

    def step(self) -> tuple[float, float]:
        """Return the seconds and the loss of the next step."""
        start, total = time.perf_counter(), 0.0
        for ids, targets in zip(self._ids, self._targets, strict=True):
            loss = self._loss(ids, targets) / len(self._ids)
            loss.backward()
            total += loss.detach()
        self._torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss = float(total)  # waits for the device
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return time.perf_counter() - start, loss


# --- turns ----------------------------------------------------------------------------------------

_trainer: Project | Torch | None = None  # of a trainer's process


def _start(make: Callable, *arguments: Any) -> tuple[str, float, float]:
    global _trainer
    _trainer = make(*arguments)
    return _trainer.name, _trainer.ready_s, _trainer.first_loss


def _take_turn() -> tuple[list[float], float]:
    return [_trainer.step()[0] for _ in range(STEPS_PER_TURN)], _trainer.dropped


class TrainerProcess:
    """A trainer in its own process, idle between its turns.

    ready_s  seconds to compile, for PyTorch of the first step
    dropped  share of routing choices dropped at full experts, in the last step
    Raises   the trainer's exceptions, and BrokenProcessPool if its process was killed.
    """

    def __init__(self, *maker: Any):
        # Not a fork, which would copy JAX's threads in an undefined state.
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.name, self.ready_s, self.first_loss = self.pool.submit(_start, *maker).result()

    def turn(self) -> float:
        """Return the mean seconds of the timed steps of a turn."""
        seconds, self.dropped = self.pool.submit(_take_turn).result()
        return statistics.fmean(seconds[1:])


def main(arguments: list[str]) -> None:
    flags = cli.parse_flags(Flags, arguments, __doc__)
    needed = "torch", "transformers"
    cli.check_packages("benchmark.py peer", "-r requirements-hf.txt", *needed)
    import torch

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to PyTorch
    # One CPU device never waits for another, so the many threads of run.sh only compete for cores.
    # XLA's newer fusions (YNN) speed up several devices and slow down a single one by a fifth.
    one_device = "--xla_force_host_platform_device_count=1"
    os.environ["XLA_FLAGS"] = f"{one_device} --xla_cpu_experimental_ynn_fusion_type="
    os.environ["PJRT_NPROC"] = str(len(os.sched_getaffinity(0)))
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU. Install a build of torch for CUDA.")
    compare(config_of_both(flags.model), flags.turns, flags.compile)


def compare(config: Config, turns: int, compile: bool) -> None:
    """Print a row for each trainer."""
    trainers: list[TrainerProcess] = []
    makers = [(Project, config), *((Torch, config, c) for c in (False, True)[: 1 + compile])]
    with ExitStack() as stack:
        for maker in makers:
            log(f"trainer {len(trainers) + 1} of {len(makers)} compiles and makes its first step")
            trainers.append(TrainerProcess(*maker))
            stack.enter_context(trainers[-1].pool)
        check_first_losses(trainers)
        seconds = np.array([[t.turn() for t in trainers] for _ in range(turns)])
    total, active = weights.count(model.declare(config))
    title = f"{total:,} parameters, {active:,} active"
    table = Table("trainer", "tokens/s", "seconds per step", "to compile, s", title=title)
    t = config.train
    for trainer, column in zip(trainers, seconds.T, strict=True):
        rate = f"{t.global_batch_size * t.seq_len / statistics.median(column):,.0f}"
        table.add_row(trainer.name, rate, spread(column, 3), f"{trainer.ready_s:.0f}")
    Console(width=120).print(table)
    print(f"this project over the better of the others: {spread(over_the_better(seconds))}")
    packages = ("jax", "torch", "transformers")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    print(
        f"On {jax.devices()[0].device_kind}, {config.model.compute_dtype}, "
        f"{t.global_batch_size} x {t.seq_len} tokens: {versions}."
    )
    if config.model.n_routed_experts:
        print(
            f"This project dropped {trainers[0].dropped:.1%} of the routing choices at full "
            "experts. The others drop none."
        )


def over_the_better(seconds: np.ndarray) -> list[float]:
    """Return the speed of the first trainer over that of the best other one, turn by turn.

    seconds  [turns, trainers]
    """
    ours, others = seconds[:, 0], seconds[:, 1:]
    return (others[:, np.argmin(np.median(others, axis=0))] / ours).tolist()


def check_first_losses(trainers: Sequence[TrainerProcess]) -> None:
    """Raise ConfigError if the first losses show other models, weights or tokens."""
    ours, *others = trainers
    for other in others:
        if abs(other.first_loss - ours.first_loss) > LOSS_TOLERANCE:
            raise ConfigError(
                f"the first loss of {ours.name} is {ours.first_loss:.4f} and that of {other.name} "
                f"{other.first_loss:.4f}: weights or tokens are not the same."
            )
