"""Count the bytes that a program moves through memory, after a compiler has fused its operations.

- Elementwise operations, sums and lookups are fused into the kernel that reads them.
- Some values must exist in memory: what a product, a collective or a loop reads or makes, sums,
  and results.
- Kernels that read the same value, and do not depend on each other, are one kernel.
- A kernel moves each operand and each result once. A view of a value is that value.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from planning.jaxpr import Count, Op, Value

# Another name or another layout of the same numbers, which costs nothing.
VIEWS = frozenset([
    "copy", "name", "optimization_barrier", "pvary", "reduce_precision", "reshape", "squeeze",
    "stop_gradient", "transpose",
])  # fmt: skip
SUMS = frozenset(["reduce_max", "reduce_sum"])
PARTS = frozenset(["dynamic_slice", "gather", "slice", "split"])  # they read only what they return
FEW = 32  # a sum of at most so many numbers is fused: one thread adds them
UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}  # in place: index of input


@dataclass(eq=False)
class Kernel:
    """What is read and written at once, and the kernels that have to run before it."""

    fused: bool  # other operations may join it
    reads: dict[Value, dict[Value, Count]] = field(default_factory=dict)  # value: its parts
    writes: dict[Value, Count] = field(default_factory=dict)
    needs: set["Kernel"] = field(default_factory=set)

    @property
    def bytes(self) -> Count:
        read = (np.minimum(v.bytes, sum(parts.values())) for v, parts in self.reads.items())
        return sum(read, 0) + sum(self.writes.values(), 0)

    def waits_for(self, other: "Kernel") -> bool:
        todo, seen = [self], {self}
        while todo:
            kernel = todo.pop()
            if kernel is other:
                return True
            todo += kernel.needs - seen
            seen |= kernel.needs
        return False


def _is_sum(op: Op) -> bool:
    """Return whether it sums many numbers. A sum of few is fused into what reads it."""
    if op.eqn.primitive.name not in SUMS:
        return False
    shape = op.eqn.invars[0].aval.shape
    return math.prod(shape[axis] for axis in op.eqn.params["axes"]) > FEW


def _ordered(op: Op) -> Count | int:
    """Return the bytes moved to reorder a collective's parts.

    The ranks' parts are contiguous. They are interleaved if the collective splits or concatenates
    another dimension than the outermost.
    """
    params, found = op.eqn.params, 0
    before, after = params.get("scatter_dimension", 0), params.get("all_gather_dimension", 0)
    if op.eqn.primitive.name == "all_to_all":
        before, after = params["split_axis"], params["concat_axis"]
    for dim, values, variables in (
        (before, op.inputs, op.eqn.invars),
        (after, op.outputs, op.eqn.outvars),
    ):
        if math.prod(variables[0].aval.shape[:dim]) > 1:
            found = found + 2 * values[0].bytes
    return found


class Fused:
    """The kernels of a program's operations."""

    def __init__(self, ops: list[Op], single: frozenset[str], results: Iterable[Value]):
        """single  mesh axes of one rank, along which collectives cost nothing.
        results  values that must exist; operations that none of them needs are removed.
        """
        self.single = single
        self.source: dict[Value, Value] = {}  # view: the value itself
        self.maker: dict[Value, Op] = {}
        for op in ops:
            if self._is_view(op):
                self.source |= zip(op.outputs, map(self.of, op.inputs), strict=True)
            else:
                self.maker |= dict.fromkeys(op.outputs, op)
        self.exist = {self.of(value) for value in results}
        ops = self._needed(ops)
        # What is read by operations that are kernels of their own.
        self.whole = {self.of(v) for op in ops if not op.reads_fused for v in op.inputs}
        self.exist |= self.whole
        for op in ops:
            if not op.reads_fused or _is_sum(op):
                self.exist |= {*op.outputs}
        self.kernels: list[Kernel] = []
        self.made_by: dict[Value, Kernel] = {}
        self.bytes: Count = 0
        for op in ops:
            self._add(op)
        self.bytes = self.bytes + sum((kernel.bytes for kernel in self.kernels), 0)

    def _needed(self, ops: list[Op]) -> list[Op]:
        """Return the operations that results depend on, without views, in order."""
        needed, wanted = [], set(self.exist)
        for op in reversed(ops):
            if not self._is_view(op) and not wanted.isdisjoint(op.outputs):
                needed.insert(0, op)
                wanted |= {self.of(value) for value in op.inputs}
        return needed

    def of(self, value: Value) -> Value:
        return self.source.get(value, value)

    def _is_view(self, op: Op) -> bool:
        if op.send:
            return self.single.issuperset(op.send.axes)
        name = op.eqn.primitive.name
        sizes = [v.aval.size for v in (*op.eqn.outvars[:1], *op.eqn.invars[:1])]
        return name in VIEWS or (name == "broadcast_in_dim" and sizes[0] == sizes[-1])

    def stored(self, value: Value) -> int:
        """Return how often storing a value in a larger array moves it through memory.

        A fused operation writes it there directly. Anything else is copied.
        """
        maker = self.maker.get(self.of(value))
        return 1 if maker is None or maker.reads_fused else 2

    def sliced(self, value: Value) -> int:
        """Return how often slicing a value from a larger array moves it. Fused reads are free."""
        return 2 if self.of(value) in self.whole else 0

    def _add(self, op: Op) -> None:
        new = [value for value in op.outputs if value in self.exist]
        if op.body:
            inside = Fused(op.body.ops, self.single, op.body.outputs)
            self.bytes = self.bytes + op.times * inside.bytes
            self._add_kernel(op, {}, {})
        elif not op.reads_fused:
            self._add_kernel(op, *self._of_one(op))
        elif new:
            reads = self._leaves(new)
            needs = self._before(reads)
            kernel = self._joined(reads, needs)
            for value, parts in reads.items():
                kernel.reads.setdefault(value, {}).update(parts)
            kernel.needs |= needs
            kernel.writes |= {value: value.bytes for value in new}
            self.made_by |= dict.fromkeys(new, kernel)

    def _of_one(self, op: Op) -> tuple[dict[Value, Count], dict[Value, Count]]:
        """Return what an operation reads and writes as a kernel of its own."""
        name, inputs = op.eqn.primitive.name, [self.of(value) for value in op.inputs]
        if name == "while":  # loops of unknown length count as no trip; none has a cost
            return {}, {}
        if name in UPDATES:
            part = inputs[UPDATES[name]].bytes
            return {inputs[0]: part}, dict.fromkeys(op.outputs, part)
        if name in PARTS:
            size = sum((value.bytes for value in op.outputs), 0)
            return {inputs[0]: size}, {value: value.bytes for value in op.outputs}
        found = {v: v.bytes for v in inputs}, {value: value.bytes for value in op.outputs}
        if op.send:
            self.bytes = self.bytes + _ordered(op)
        return found

    def _add_kernel(self, op: Op, reads: dict[Value, Count], writes: dict[Value, Count]) -> None:
        kernel = Kernel(False, {v: {v: size} for v, size in reads.items()}, writes)
        kernel.needs = self._before(self.of(value) for value in op.inputs)
        self.kernels.append(kernel)
        self.made_by |= dict.fromkeys(op.outputs, kernel)

    def _leaves(self, values: list[Value]) -> dict[Value, dict[Value, Count]]:
        """Return the existing values that these are computed from, with the parts that are read."""
        found: dict[Value, dict[Value, Count]] = {}
        todo, seen = list(values), set(values)
        while todo:
            value = todo.pop()
            op = self.maker[value]
            for number, source in enumerate(map(self.of, op.inputs)):
                if source in self.exist or source not in self.maker:
                    is_part = number == 0 and op.eqn.primitive.name in PARTS
                    part = value if is_part else source
                    found.setdefault(source, {})[part] = part.bytes
                elif source not in seen:
                    seen.add(source)
                    todo.append(source)
        return found

    def _joined(self, reads: Iterable[Value], needs: set[Kernel]) -> Kernel:
        """Return a kernel that reads some of these values, or a new one.

        None of the needed kernels may wait for it.
        """
        large = {value for value in reads if value.bytes.max() > 0}
        for kernel in self.kernels:
            shared = kernel.fused and not large.isdisjoint(kernel.reads)
            if shared and not any(before.waits_for(kernel) for before in needs):
                return kernel
        self.kernels.append(Kernel(True))
        return self.kernels[-1]

    def _before(self, values: Iterable[Value]) -> set[Kernel]:
        return {self.made_by[value] for value in values if value in self.made_by}
