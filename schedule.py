"""The pipeline schedule as arithmetic: no pipelining, 1F1B and interleaved 1F1B in one formula.

A model has `stages = pipeline * virtual` stages. Stage `chunk * pipeline + rank` is model chunk
`chunk` (a virtual stage) of `rank`. A task is one stage on one microbatch, forward or backward. A
tick is the time in which each rank runs at most one forward and one backward task. The forward
tasks of a rank are numbered 0, 1, ..., and so are its backward tasks. The number of a task
determines its chunk, its microbatch and its tick:

    forward  k runs at tick  rank + k
    backward k runs at tick  stages - 1 + (pipeline - 1 - rank) + k

With `split_backward` a backward task computes the gradient of its input alone. That of its matrices
is a third task of the same number, in a tick in which every rank has one:

    weights  k runs at tick  stages + pipeline - 2 + k

What a rank sends in a tick, its neighbour uses in the next. The formulas use only + - * // %, so
every function of ticks, numbers, chunks and microbatches takes Python integers and traced ones
alike.

Source: interleaved 1F1B, arXiv:2104.04473, section 2.2; the split, arXiv:2401.10241.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from utils import ConfigError

# (forward, backward, weight tasks) in the ticks of a phase -> its name in profiles.
PHASES = {
    (True, False, False): "warmup",
    (True, True, False): "steady", (True, True, True): "steady_weights",
    (False, True, False): "cooldown", (False, True, True): "cooldown_weights",
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """The ticks of one training step on every pipeline rank.

    Raises  ConfigError for sizes without a schedule.
    """

    pipeline: int  # ranks
    virtual: int  # model chunks per rank
    microbatches: int  # M
    split_backward: bool = False  # whether gradients of matrices are tasks of their own

    def __post_init__(self) -> None:
        if self.virtual > 1 and self.microbatches % self.pipeline:
            works = -(-self.microbatches // self.pipeline) * self.pipeline
            raise ConfigError(
                f"--train.microbatches {self.microbatches} is not a multiple of --mesh.pipeline "
                f"{self.pipeline}: with --mesh.virtual {self.virtual} microbatches pass through "
                f"the model chunks in groups of one per rank. Use --train.microbatches {works}, or "
                f"--mesh.virtual 1."
            )

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def single_stage(self) -> bool:
        """Whether there is no pipeline: rank 0 runs all blocks forward and backward in a tick."""
        return self.stages == 1

    @property
    def tasks_per_rank(self) -> int:
        """Forward tasks of a rank; it has as many of every other kind."""
        return self.microbatches * self.virtual

    @property
    def ticks(self) -> int:
        return self.tasks_per_rank + self.stages + self.pipeline - 2

    @property
    def first_weight_tick(self) -> int:
        """The first tick in which every rank has run a backward task; without a split the end."""
        return self.stages + self.pipeline - 2 if self.split_backward else self.ticks

    @property
    def phases(self) -> list[tuple[int, int, bool, bool, bool]]:
        """(first tick, end tick, forward, backward, weight tasks) of each phase, in order."""
        steady, cooldown = self.stages - 1, self.tasks_per_rank + self.pipeline - 1
        ends = sorted({0, steady, cooldown, self.first_weight_tick, self.ticks})
        return [
            (start, stop, start < cooldown, start >= steady, start >= self.first_weight_tick)
            for start, stop in pairwise(ends)
        ]

    @property
    def bubble(self) -> Fraction:
        """Idle share of the task slots: a rank has one per tick and kind of task of the phase."""
        slots = sum((stop - start) * sum(kinds) for start, stop, *kinds in self.phases)
        return 1 - Fraction((2 + self.split_backward) * self.tasks_per_rank, slots)

    @property
    def ring_slots(self) -> int:
        """Length of the ring of residuals; forward k writes to slot k % ring_slots.

        All ranks have one length, so a rank holds up to 2 * stages - 1 microbatches, where 1F1B in
        separate programs holds at most `pipeline` of them without virtual stages.
        Rank 0 holds those of chunk 0 for 2 * stages - 2 ticks, and in the last of these it writes
        before it reads. There are never more writes than forward ticks.
        """
        return min(2 * self.stages - 1, self.tasks_per_rank + self.pipeline - 1)

    def forward_number(self, tick, rank):
        """Return the number of the forward task at a tick; not `is_task` if the rank is idle."""
        return tick - rank

    def backward_number(self, tick, rank):
        """Return the number of the backward task at a tick; not `is_task` if the rank is idle."""
        return tick - (self.stages - 1) - (self.pipeline - 1 - rank)

    def weight_number(self, tick):
        """Return the number of the weight task at a tick, which is that of a backward task."""
        return tick - self.first_weight_tick

    def is_task(self, number):
        """Whether a number is a task: 0 <= number < tasks_per_rank."""
        return (number >= 0) & (number < self.tasks_per_rank)

    def forward_task(self, number):
        """Return (chunk, microbatch). Numbers that are no task wrap around to valid data."""
        k = number % self.tasks_per_rank
        chunk = k % self.stages // self.pipeline
        return chunk, k // self.stages * self.pipeline + k % self.pipeline

    def backward_task(self, number):
        """Return (chunk, microbatch), with chunks in the opposite order of forward_task."""
        chunk, microbatch = self.forward_task(number)
        return self.virtual - 1 - chunk, microbatch

    def task_number(self, chunk, microbatch):
        """Return the number of a forward task: the inverse of forward_task."""
        group, position = microbatch // self.pipeline, microbatch % self.pipeline
        return group * self.stages + chunk * self.pipeline + position

    def starts_forward(self, tick):
        """Whether rank 0 runs its first chunk on a new microbatch in this tick."""
        number = self.forward_number(tick, 0)
        return (self.forward_task(number)[0] == 0) & self.is_task(number)

    def ends_forward(self, tick):
        """Whether the last rank runs its last chunk forward in this tick."""
        number = self.forward_number(tick, self.pipeline - 1)
        return (self.forward_task(number)[0] == self.virtual - 1) & self.is_task(number)

    def ends_backward(self, tick):
        """Whether rank 0 runs its first chunk backward in this tick."""
        number = self.backward_number(tick, 0)
        return (self.backward_task(number)[0] == 0) & self.is_task(number)

    def tasks_at(self, tick: int, rank: int) -> list[tuple[str, int, int]]:
        """Return (`fwd`, `bwd` or `wgt`, chunk, microbatch) of each task in a tick, in order."""
        kinds = (
            ("fwd", self.forward_task, self.forward_number(tick, rank)),
            ("bwd", self.backward_task, self.backward_number(tick, rank)),
            ("wgt", self.backward_task, self.weight_number(tick)),
        )
        return [(kind, *task(number)) for kind, task, number in kinds if self.is_task(number)]

    def tasks(self, rank: int) -> list[str]:
        """Return `fwd_<stage>__<microbatch>`, `bwd_...`, `wgt_...` in the order of execution."""
        return [
            f"{kind}_{chunk * self.pipeline + rank}__{microbatch}"
            for tick in range(self.ticks)
            for kind, chunk, microbatch in self.tasks_at(tick, rank)
        ]
