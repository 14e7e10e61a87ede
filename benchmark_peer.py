"""Training steps of one model here and in PyTorch, on the same device; a part of benchmark.py.

    ./run.sh python benchmark.py peer           needs the packages of requirements-hf.txt
    ./run.sh python benchmark.py peer dense     one model: moe, or dense, which wants a GPU
    ./run.sh python benchmark.py peer --help    its flags

`moe` is the mixture of experts of `benchmark.py reference`, with its dense layers first, as
transformers' DeepseekV3ForCausalLM has them: that trains from the same first weights on the same
tokens. `dense` is configs/dense_124m.toml beside a GPT of as many layers and heads, as wide, of
PyTorch's own modules. Each takes steps in turn, so that what slows the machine slows all, and is in
a process of its own: in one, threads and memory of the others slow it too.
"""

import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import model
import train
import utils
import weights
from benchmark import (
    ONE_DEVICE,
    compiled,
    one_cpu_device,
    random_batch,
    reference_config,
    spread,
    with_values,
)
from benchmark_decode import exported
from utils import Config

if TYPE_CHECKING:  # imported late below: it is optional
    import torch

ROOT = Path(__file__).resolve().parent
# Steps of a turn, of which the first is not timed: to a virtual machine, pages that were free for a
# second are slow to come back, and no run of training waits so long.
IN_TURN = 3
FIRST_LOSS = 0.02  # by which those of the same weights may differ: rounding chooses other experts


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py peer`."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()  # moe, dense; both on a GPU, moe elsewhere
    turns: int = 8  # of each, with two steps that are timed
    microbatches: int = 0  # of a step, here and there; 0: 1 of moe, of dense those of its config
    compile: bool = True  # also what torch.compile makes of theirs, which takes minutes


class Trainer(Protocol):
    """Of a model, on one device."""

    name: str
    ready_s: float  # to compile it; of PyTorch the first step, in which it does
    first_loss: float
    dropped: float  # share of choices that found no room in an expert, in the last step

    def step(self) -> float:
        """Seconds that it took."""


def moe(microbatches: int) -> Config:
    config = reference_config()
    m = config.model
    layers = {"prefix_layers": m.blocks * m.dense_layers, "dense_layers": 0}
    train = {"microbatches": microbatches or 1}
    return with_values(config, mesh=ONE_DEVICE, model=layers, train=train)


def dense(microbatches: int) -> Config:
    config = utils.load(ROOT / "configs" / "dense_124m.toml")
    return with_values(config, train={"microbatches": microbatches or config.train.microbatches})


CONFIGS: dict[str, Callable[[int], Config]] = {"moe": moe, "dense": dense}


# --- this project ---------------------------------------------------------------------------------


class Ours:
    """The step of train.py. Weights are float32, and in use as compute_dtype says."""

    def __init__(self, config: Config):
        self.program = compiled(config)
        self.name, self.ready_s = "this project", self.program.compile_s
        self._steps, m = self.program.steps(), config.model
        self._choices = m.blocks * m.moe_layers * m.experts_per_token * self.program.tokens
        self.step()
        self.first_loss = self.last_loss

    def step(self) -> float:
        seconds, report = next(self._steps)
        stats = report["stats"]
        self.dropped = int(stats.dropped) / max(1, self._choices)
        self.last_loss = float(stats.cross_entropy)
        return seconds


# --- PyTorch --------------------------------------------------------------------------------------


class Theirs:
    """A step of PyTorch: loss of all microbatches, gradients, their norm, AdamW."""

    dropped = 0.0

    def __init__(self, name: str, network: "torch.nn.Module", config: Config, compile: bool):
        """network  ids [b, T] -> logits [b, T, vocabulary]."""
        import torch

        self.name = f"{name}, torch.compile" if compile else f"{name}, eager"
        self._torch, o = torch, config.optimizer
        self._clip = o.clip_norm or math.inf
        self._device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        network = network.to(self._device).train()
        self._parameters = list(network.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            weight_decay=o.weight_decay,
            fused=True,
        )
        self._type = getattr(torch, config.model.compute_dtype)
        self._ids, self._targets = (self._tensor(a) for a in tokens_of(config))
        self._loss = torch.compile(self._loss_of(network)) if compile else self._loss_of(network)
        self.ready_s = self.step()
        self.first_loss = self.last_loss

    def _tensor(self, ids: np.ndarray) -> "torch.Tensor":
        return self._torch.tensor(ids.astype(np.int64), device=self._device)

    def _loss_of(self, network: "torch.nn.Module") -> Callable:
        torch = self._torch

        def loss(ids: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
            narrow = self._type != torch.float32
            with torch.autocast(self._device, dtype=self._type, enabled=narrow):
                logits = network(ids)
            flat = logits.float().flatten(0, 1)
            return torch.nn.functional.cross_entropy(flat, targets.flatten())

        return loss

    def step(self) -> float:
        start, total = time.perf_counter(), 0.0
        for ids, targets in zip(self._ids, self._targets, strict=True):
            loss = self._loss(ids, targets) / len(self._ids)
            loss.backward()
            total += loss.detach()
        self._torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.last_loss = float(total)  # which waits for the device
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return time.perf_counter() - start


def tokens_of(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [M, B, T] of the steps that are timed here."""
    batch = random_batch(config, train.make_mesh(config))
    return np.asarray(batch.tokens), np.asarray(batch.targets)


def deepseek(config: Config) -> "torch.nn.Module":
    """transformers' class with the first weights of this project."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        out = exported(config, Path(folder))
        found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.found = found

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.found(ids, use_cache=False).logits

    return Logits()


def gpt(config: Config) -> "torch.nn.Module":
    """Pre-norm layers of attention and GELU, learned positions, tied output."""
    import torch
    from torch import nn

    m, T = config.model, config.train.sequence_length

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(m.width, bias=False) for _ in range(2))
            self.qkv = nn.Linear(m.width, 3 * m.width, bias=False)
            self.out = nn.Linear(m.width, m.width, bias=False)
            self.up = nn.Linear(m.width, 4 * m.width, bias=False)
            self.down = nn.Linear(4 * m.width, m.width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.qkv(self.norms[0](x)).unflatten(-1, (3, m.heads, -1))
            q, k, v = split.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(m.padded_vocabulary, m.width)
            self.positions = nn.Embedding(T, m.width)
            self.layers = nn.Sequential(*(Layer() for _ in range(m.blocks)))
            self.norm = nn.LayerNorm(m.width, bias=False)
            nn.init.normal_(self.table.weight, std=0.02)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids) + self.positions.weight[: ids.shape[1]]
            return self.norm(self.layers(x)) @ self.table.weight.T

    return Gpt()


PEERS: dict[str, tuple[str, Callable[[Config], "torch.nn.Module"]]] = {
    "moe": ("DeepseekV3ForCausalLM", deepseek),
    "dense": ("GPT", gpt),
}


def theirs(name: str, config: Config, compile: bool) -> Theirs:
    """The peer of one of CONFIGS, on all cores."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    peer, make = PEERS[name]
    return Theirs(peer, make(config), config, compile)


# --- in turns -------------------------------------------------------------------------------------


class Apart:
    """A trainer in a process of its own, which waits while others take their steps.

    Raises  what making it, or a step, raises there.
    """

    def __init__(self, make: Callable[..., Trainer], *args: Any):
        fresh = multiprocessing.get_context("spawn")  # a fork would have jax's threads, half alive
        self._connection, there = fresh.Pipe()
        self._process = fresh.Process(target=serve, args=(there, make, *args))
        self._process.start()
        there.close()
        self.name, self.ready_s, self.first_loss = self._received()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # at which it ends
        self._process.join()

    def turn(self) -> float:
        """Seconds of a step, of the timed ones."""
        self._connection.send(None)
        seconds, self.dropped = self._received()
        return statistics.fmean(seconds[1:])

    def _received(self) -> Any:
        try:
            found = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"a trainer's process ended with exit code {code}") from None
        if isinstance(found, Exception):
            self.__exit__()
            raise found
        return found


def serve(connection: Connection, make: Callable[..., Trainer], *args: Any) -> None:
    """Steps of a turn for each message, until the other end is closed."""
    try:
        trainer = make(*args)
        connection.send((trainer.name, trainer.ready_s, trainer.first_loss))
        while True:
            connection.recv()
            seconds = [trainer.step() for _ in range(IN_TURN)]
            connection.send((seconds, trainer.dropped))
    except EOFError:
        pass
    except Exception as error:  # sent on, whatever it is, to be raised where it is waited for
        connection.send(error)


# --- the table ------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    flags = tyro.cli(
        Flags, args=arguments, use_underscores=True, description=__doc__, prog="benchmark.py peer"
    )
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room too
    cores = len(os.sched_getaffinity(0))
    os.environ |= one_cpu_device(cores)
    check(flags)
    on_gpu = jax.default_backend() == "gpu"
    for name in flags.models or (("moe", "dense") if on_gpu else ("moe",)):
        compare(name, flags)


def check(flags: Flags) -> None:
    """Raises ValueError for what cannot be compared here."""
    if unknown := set(flags.models) - set(CONFIGS):
        raise ValueError(f"{sorted(unknown)[0]} is no model: use {' or '.join(CONFIGS)}.")
    if flags.turns < 1 or flags.microbatches < 0:
        raise ValueError("--turns and --microbatches are counts. Use 1 or more.")
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        raise ValueError(
            "benchmark.py peer needs torch and transformers: "
            "./run.sh python -m pip install -r requirements-hf.txt"
        )
    import torch

    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise ValueError("this torch does not see the GPU: install one that is built for CUDA.")


def compare(name: str, flags: Flags) -> None:
    """Prints a row for each trainer of a model."""
    config = CONFIGS[name](flags.microbatches)
    console = Console(stderr=True)
    with ExitStack() as open_:
        with console.status(f"{name}: compiling"):
            trainers = [open_.enter_context(Apart(Ours, config))]
        for compile in (False, True)[: 1 + flags.compile]:
            with console.status(f"{name}: the first step of PyTorch" + ", compiling" * compile):
                trainers.append(open_.enter_context(Apart(theirs, name, config, compile)))
        turns = track(
            range(flags.turns),
            f"turns of {name}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        timed = np.array([[trainer.turn() for trainer in trainers] for _ in turns])
    if name == "moe":
        same_start(trainers)
    Console(width=120).print(table(config, trainers, timed))
    print(f"this project over the better of the others: {spread(over_the_better(timed))}")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("jax", "torch"))
    kind = jax.devices()[0].device_kind
    print(
        f"On {kind}, {config.model.compute_dtype}, microbatches {config.train.microbatches}, "
        f"{config.train.sequences} x {config.train.sequence_length} tokens: {versions}, "
        f"transformers {importlib.metadata.version('transformers')}. Here "
        f"{trainers[0].dropped:.1%} of choices found no room in an expert; theirs drop none."
    )


def over_the_better(seconds: np.ndarray) -> list[float]:
    """How much faster the first trainer is than the best of the others, turn by turn.

    seconds  [turns, trainers]
    """
    ours, theirs = seconds[:, 0], seconds[:, 1:]
    return (theirs[:, np.argmin(np.median(theirs, axis=0))] / ours).tolist()


def same_start(trainers: Sequence[Trainer]) -> None:
    """Raises ValueError where first losses say that models, weights or tokens differ."""
    ours, *others = trainers
    for one in others:
        if abs(one.first_loss - ours.first_loss) > FIRST_LOSS:
            raise ValueError(
                f"the first loss is {ours.first_loss:.4f} here and {one.first_loss:.4f} by "
                f"{one.name}: weights or tokens are not the same."
            )


def table(config: Config, trainers: Sequence[Trainer], seconds: np.ndarray) -> Table:
    """seconds  [turns, trainers]"""
    tokens = config.train.sequences * config.train.sequence_length
    total, active = weights.count(model.declare(config))
    made = Table("trainer", "tokens/s", "seconds of a step", "to compile, s")
    made.title = f"{total:,} parameters, {active:,} active"
    for trainer, column in zip(trainers, seconds.T, strict=True):
        rate = tokens / statistics.median(column)
        made.add_row(trainer.name, f"{rate:,.0f}", spread(column, 3), f"{trainer.ready_s:.0f}")
    return made
