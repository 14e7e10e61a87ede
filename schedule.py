"""When each stage runs, as arithmetic: no pipelining, 1F1B and interleaved 1F1B in one formula.

A model is cut into `stages = pipeline * virtual` stages; stage `chunk * pipeline + rank` lives on
`rank`. Forward work of a rank is numbered 0, 1, ..., and backward work likewise; a number says
which chunk and microbatch, and in which tick:

    forward  k runs at tick  rank + k
    backward k runs at tick  stages - 1 + (pipeline - 1 - rank) + k

A rank does at most one forward and one backward in a tick, and what it sends in a tick its
neighbour needs in the next one. Only + - * // % are used, so every function of ticks, numbers,
chunks and microbatches takes Python integers and traced ones alike.

Source: interleaved 1F1B, arXiv:2104.04473, section 2.2.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Schedule:
    """The ticks of one training step on every pipeline rank.

    Raises  ValueError for sizes that no schedule can have.
    """

    pipeline: int  # ranks
    virtual: int  # chunks per rank
    microbatches: int  # M

    def __post_init__(self) -> None:
        for flag, size in (
            ("--mesh.pipeline", self.pipeline),
            ("--mesh.virtual", self.virtual),
            ("--train.microbatches", self.microbatches),
        ):
            if size < 1:
                raise ValueError(
                    f"{flag} {size} is not a size: it must be 1 or more. Use {flag} 1."
                )
        if self.virtual > 1 and self.microbatches % self.pipeline:
            works = -(-self.microbatches // self.pipeline) * self.pipeline
            raise ValueError(
                f"--train.microbatches {self.microbatches} is not a multiple of --mesh.pipeline "
                f"{self.pipeline}: with --mesh.virtual {self.virtual} microbatches pass through "
                f"the chunks in groups of one per rank. Use --train.microbatches {works}, or "
                f"--mesh.virtual 1."
            )

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def at_once(self) -> bool:
        """Whether a microbatch goes forward and back in the same tick."""
        return self.stages == 1

    @property
    def work(self) -> int:
        """Forward tasks of one rank; it has as many backward tasks."""
        return self.microbatches * self.virtual

    @property
    def ticks(self) -> int:
        return self.work + self.stages + self.pipeline - 2

    @property
    def phases(self) -> list[tuple[int, int, bool, bool]]:
        """(first tick, tick after the last, any forward, any backward): at most three, in order."""
        steady, cooldown = self.stages - 1, self.work + self.pipeline - 1
        phases = [
            (0, steady, True, False),
            (steady, cooldown, True, True),
            (cooldown, self.ticks, False, True),
        ]
        return [phase for phase in phases if phase[0] < phase[1]]

    @property
    def bubble(self) -> Fraction:
        """Idle share of the slots, counted: a rank has one per tick and direction of its phase."""
        slots = sum((stop - start) * (fwd + bwd) for start, stop, fwd, bwd in self.phases)
        return Fraction(slots - 2 * self.work, slots)

    @property
    def slots(self) -> int:
        """Length of the ring in which forward k leaves its residuals at k % slots.

        Rank 0 keeps those of chunk 0 for 2 * stages - 2 ticks, and stores in the last of them
        before it reads. A rank never stores more often than there are forward ticks.
        """
        return min(2 * self.stages - 1, self.work + self.pipeline - 1)

    def forward_number(self, tick, rank):
        """Number of the forward task at a tick; below 0 or from `work` on, the rank idles."""
        return tick - rank

    def backward_number(self, tick, rank):
        """Number of the backward task at a tick; below 0 or from `work` on, the rank idles."""
        return tick - (self.stages - 1) - (self.pipeline - 1 - rank)

    def is_task(self, number):
        """Whether a number is a task, and not an idle slot."""
        return (number >= 0) & (number < self.work)

    def forward_task(self, number):
        """(chunk, microbatch); the number of an idle slot wraps around, to point at real data."""
        k = number % self.work
        chunk = k % self.stages // self.pipeline
        return chunk, k // self.stages * self.pipeline + k % self.pipeline

    def backward_task(self, number):
        """(chunk, microbatch); chunks in the opposite order of forward_task."""
        chunk, microbatch = self.forward_task(number)
        return self.virtual - 1 - chunk, microbatch

    def task_number(self, chunk, microbatch):
        """The forward number of (chunk, microbatch): forward_task inverted."""
        group, position = microbatch // self.pipeline, microbatch % self.pipeline
        return group * self.stages + chunk * self.pipeline + position

    def enters(self, tick):
        """Whether rank 0 takes a new microbatch into its first chunk."""
        number = self.forward_number(tick, 0)
        return (self.forward_task(number)[0] == 0) & self.is_task(number)

    def ends(self, tick):
        """Whether the last rank has just taken a microbatch through its last chunk."""
        number = self.forward_number(tick, self.pipeline - 1)
        return (self.forward_task(number)[0] == self.virtual - 1) & self.is_task(number)

    def leaves(self, tick):
        """Whether rank 0 takes a microbatch backward through its first chunk."""
        number = self.backward_number(tick, 0)
        return (self.backward_task(number)[0] == 0) & self.is_task(number)

    def tasks_at(self, tick: int, rank: int) -> list[tuple[str, int, int]]:
        """(`fwd` or `bwd`, chunk, microbatch) of what a rank does in a tick: forward first."""
        forward, backward = self.forward_number(tick, rank), self.backward_number(tick, rank)
        found = []
        if self.is_task(forward):
            found.append(("fwd", *self.forward_task(forward)))
        if self.is_task(backward):
            found.append(("bwd", *self.backward_task(backward)))
        return found

    def tasks(self, rank: int) -> list[str]:
        """`fwd_<stage>__<microbatch>` and `bwd_...` in the order in which a rank runs them."""
        return [
            f"{way}_{chunk * self.pipeline + rank}__{microbatch}"
            for tick in range(self.ticks)
            for way, chunk, microbatch in self.tasks_at(tick, rank)
        ]
