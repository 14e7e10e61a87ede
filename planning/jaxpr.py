"""Analyze a traced function on one chip: products, collectives, residuals, recomputation, memory.

A function and its gradient are traced together (trace.py). In that program, the backward pass is
what depends on the gradients of the results, and what was made by transposing. The residuals are
what it reads of the rest. A walk back from the residuals finds what a remat policy saves and what
it recomputes. It applies the policies of `jax.checkpoint` themselves.

Counts are arrays, with one number for each batch size: see `Sizes`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

import dropless
from device_kernels.grouped import counted_rows
from utils import LANES, ConfigError

Count = np.ndarray  # FLOPs or bytes, for each batch of Sizes
Policy = Callable[..., bool]  # a policy of jax.checkpoint

COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
}
# Products and loops whose cost a trace does not show.
OPAQUE = ("conv_general_dilated", "pallas_call", "ragged_dot_general", "while", "cond")
# Functions of attention kernels: (matrix products of the queries' width, of the values' width).
# Splash runs two backward kernels, for keys and values and for queries. Each recomputes the scores
# and the probabilities' gradient, and so does Triton's single one.
KERNEL_PRODUCTS = {
    "splash_plain": (1, 1), "splash_forward": (1, 1), "splash_backward": (4, 3),
    "cudnn_plain": (1, 1), "cudnn_forward": (1, 1), "cudnn_backward": (3, 2),
    "triton_plain": (1, 1), "triton_forward": (1, 1), "triton_backward": (4, 3),
}  # fmt: skip
# What compilers compute inside of the kernel that reads it.
FUSED = frozenset([
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "clamp",
    "concatenate", "convert_element_type", "cos", "div", "eq", "exp", "exp2", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "name", "ne", "neg", "not", "or", "pad", "pow", "pvary", "random_bits", "random_fold_in",
    "random_seed", "random_wrap", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "rem",
    "reshape", "rev", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze",
    "stop_gradient", "sub", "tanh", "transpose", "xor",
])  # fmt: skip

READS = FUSED | {"gather"}
IN_PLACE = (*FUSED, "scan", "while", "scatter", "scatter-add", "dynamic_update_slice")


@dataclass(frozen=True)
class Sizes:
    """Scales bytes and FLOPs of one trace to each number of sequences in `batches`.

    traced  sequences of the trace on one fsdp rank. If it is a prime that divides no other
            dimension, the numbers that it divides are those that grow with the batch. One trace
            then serves all batch sizes. 0: nothing is scaled.
    """

    traced: int = 0
    batches: tuple[int, ...] = (1,)

    def __call__(self, number: int) -> Count:
        if self.traced and number % self.traced == 0:
            return number // self.traced * np.array(self.batches)
        return np.full(len(self.batches), number)


class Send(NamedTuple):
    """A collective."""

    axes: tuple[str, ...]
    kind: str  # its name in HLO
    bytes: Count  # size of its result


@dataclass(eq=False)
class Value:
    """An array of a program."""

    bytes: Count
    itemsize: int = 0  # bytes of an element, if an operand of another size cannot be overwritten


@dataclass(eq=False)
class Op:
    eqn: Any
    inputs: list[Value]
    outputs: list[Value]
    part: str  # its named scopes
    transposed: bool  # made by reverse-mode differentiation
    flops: Count | None
    send: Send | None
    body: "Program | None" = None  # a loop's body
    times: int = 1
    overflow: "Program | None" = None  # body of a loop that takes memory, and does not run

    @cached_property
    def moved_bytes(self) -> Count:
        return sum((value.bytes for value in (*self.inputs, *self.outputs)), 0)

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @cached_property
    def body_peak(self) -> Count:
        """Peak bytes of a loop's body besides its carry and its slices of stacked inputs."""
        if self.overflow:
            return peak(self.overflow.ops, {*self.overflow.inputs, *self.overflow.outputs})
        _, carried = self.constants_and_carried
        return peak(self.body.ops, {*self.body.inputs, *self.body.outputs[:carried]})

    @property
    def constants_and_carried(self) -> tuple[int, int]:
        """The numbers of constant and of carried inputs of a loop.

        Versions of JAX store them differently, so they are counted by dimensions: a stacked input
        has one more outside of the body.
        """
        inner = self.eqn.params["jaxpr"].jaxpr
        pairs = [(self.eqn.invars, inner.invars), (self.eqn.outvars, inner.outvars)]
        whole, carried = (
            sum(a.aval.ndim == b.aval.ndim for a, b in zip(*p, strict=True)) for p in pairs
        )
        return whole - carried, carried


@dataclass(eq=False)
class Program:
    """Operations in order, with calls inlined."""

    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    constants: list[Value] = field(default_factory=list)  # values that it closes over

    @cached_property
    def peak(self) -> Count:
        """Peak bytes besides its inputs."""
        return peak(self.ops, {*self.inputs})


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Converts jaxprs to Programs.

    kernel_share  share of attention's scores that the kernel computes.
    skipped       prefix of the names of functions whose calls are counted elsewhere.
    same_type     whether a result overwrites only operands of its element size. libtpu's logits in
                  float32 and their gradient in bfloat16 are one buffer.
    """

    sizes: Sizes
    kernel_share: float
    skipped: str = ""
    same_type: bool = False

    def read(self, closed: Any, scope: str = "") -> Program:
        program = Program([self._value(v.aval) for v in closed.jaxpr.invars])
        program.constants = [self._value(v.aval) for v in closed.jaxpr.constvars]
        args = [*program.inputs, *program.constants]
        program.outputs = self._walk(closed, args, program.ops, scope)
        return program

    def _value(self, aval: Any) -> Value:
        itemsize = aval.dtype.itemsize
        return Value(self.sizes(aval.size * itemsize), itemsize if self.same_type else 0)

    def _walk(self, closed: Any, args: Sequence[Value], ops: list[Op], scope: str) -> list[Value]:
        jaxpr = getattr(closed, "jaxpr", closed)
        values = dict(zip((*jaxpr.invars, *jaxpr.constvars), args, strict=False))
        values |= {v: self._value(v.aval) for v in jaxpr.constvars if v not in values}

        def of(atom: Any) -> Value:
            return Value(self.sizes(0)) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            inputs, here = [of(v) for v in eqn.invars], f"{scope}/{eqn.source_info.name_stack}"
            inner = self._called(eqn)
            if inner is not None:
                outputs = self._walk(inner, inputs, ops, here)
            else:
                outputs = [self._value(v.aval) for v in eqn.outvars]
                ops.append(self._op(eqn, inputs, outputs, here))
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def _called(self, eqn: Any) -> Any:
        """Return the function that an equation calls once; None for others and skipped ones."""
        name = str(eqn.params.get("name"))
        loops = eqn.primitive.name in OPAQUE or eqn.params.get("length", 1) != 1
        if loops or (self.skipped and name.startswith(self.skipped)):
            return None
        # Compilers inline a loop of one trip.
        return eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))

    def _op(self, eqn: Any, inputs: list[Value], outputs: list[Value], scope: str) -> Op:
        name, part = eqn.primitive.name, _part(scope)
        count = self._flops(eqn)
        flops = self.sizes(count) if count else None
        op = Op(eqn, inputs, outputs, part, "transpose(" in scope, flops, None)
        if name in COLLECTIVES:
            axes = eqn.params.get("axes") or eqn.params.get("axis_name")
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            op.send = Send(axes, COLLECTIVES[name], sum(value.bytes for value in outputs))
        elif name == "scan":
            op.body, op.times = self.read(eqn.params["jaxpr"], scope), eqn.params["length"]
        elif name == "while" and part.split()[-1:] == [dropless.OVERFLOW]:
            op.overflow = self.read(eqn.params["body_jaxpr"], scope)
        elif name in OPAQUE and _has_cost(eqn):
            raise ConfigError(
                f"{part or 'the model'} has a {name}, whose cost a trace does not show. Write "
                "loops as lax.scan, choices as jnp.where, and products as einsum."
            )
        return op

    def _flops(self, eqn: Any) -> int:
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            return 2 * eqn.outvars[0].aval.size * math.prod(shapes[0][dim] for dim in summed)
        if eqn.primitive.name == "foreign_kernel":
            kernel = eqn.params["function"].__name__
            if kernel == "cross_entropy_kernel":  # multiplies no matrices
                return 0
            if rows := counted_rows(kernel):
                shapes += [v.aval.shape for v in eqn.outvars]
                return 2 * rows * math.prod(next(s for s in shapes if len(s) == 3)[1:])
            by_query, by_value = KERNEL_PRODUCTS[kernel]
            first = int(by_query > 1)  # the gradient comes first
            (b, T, n, A), (_, S, _, W) = shapes[first], shapes[first + 2]
            return round(2 * b * n * T * S * self.kernel_share * (by_query * A + by_value * W))
        return 0


def _has_cost(eqn: Any) -> bool:
    """Return whether it is a product, or contains a product or a collective."""
    names = ("dot_general", "foreign_kernel", *COLLECTIVES, *OPAQUE[:3])
    return eqn.primitive.name in names or any(f" {name}[" in str(eqn) for name in names)


def _part(scope: str) -> str:
    """Convert "jvp(attention)/latents/bTD,DC->bTC" to "attention latents"."""
    matches = (re.fullmatch(r"(?:(?:jvp|transpose|vmap)\()*(\w+)\)*", s) for s in scope.split("/"))
    return " ".join(match[1] for match in matches if match)


# --- sums -----------------------------------------------------------------------------------------


def runs(ops: Iterable[Op], times: int = 1) -> Iterator[tuple[Op, int]]:
    """Yield operations, in loops too, with how often each runs."""
    for op in ops:
        if op.body:
            yield from runs(op.body.ops, times * op.times)
        else:
            yield op, times


def costs(ops: Iterable[Op]) -> list[tuple[Op, int]]:
    """Return products and collectives, with how often each runs."""
    return [(op, times) for op, times in runs(ops) if op.send or op.flops is not None]


def depending(ops: Iterable[Op], values: Iterable[Value]) -> set[Value]:
    """Return the values and everything that depends on them."""
    dependent = set(values)
    for op in ops:
        if not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
    return dependent


# --- rematerialization ----------------------------------------------------------------------------


@dataclass
class Remat:
    """What a policy saves of a forward pass, and what it recomputes."""

    saved: dict[Value, int] = field(default_factory=dict)  # value: copies, one per trip of a loop
    ops: list[Op] = field(default_factory=list)  # recomputed operations, in order
    costs: list[tuple[Op, int]] = field(default_factory=list)  # those of `costs`

    @property
    def bytes(self) -> Count:
        return sum((value.bytes * times for value, times in self.saved.items()), 0)


def remat(program: Program, needed: Iterable[Value], known: set[Value], policy: Policy) -> Remat:
    """Walk back from what is needed to what is saved, known, or an input."""
    result, wanted = Remat(), set(needed) - known
    for op in reversed(program.ops):
        outputs = [value for value in op.outputs if value in wanted]
        avals = [v.aval for v in op.eqn.invars]
        if outputs and policy(op.eqn.primitive, *avals, **op.eqn.params):
            result.saved |= dict.fromkeys(outputs, 1)
        elif outputs:
            inputs = op.inputs
            if op.body:
                inside, inputs = _remat_loop(op, wanted, policy)
                result.saved |= {value: n * op.times for value, n in inside.saved.items()}
                result.costs += [(o, n * op.times) for o, n in inside.costs]
            else:
                result.costs += costs([op])
            result.ops.insert(0, op)
            wanted |= set(inputs) - known
    result.saved |= {value: 1 for value in program.inputs if value in wanted}
    return result


def _remat_loop(op: Op, wanted: set[Value], policy: Policy) -> tuple[Remat, list[Value]]:
    """Return the Remat of a loop's body, and the inputs that the loop then needs."""
    constants, carried = op.constants_and_carried
    pairs = list(zip(op.body.outputs, op.outputs, strict=True))
    needed = {inner for inner, outer in pairs if outer in wanted}
    while True:
        inside = remat(op.body, needed, set(), policy)
        read = [value in inside.saved for value in op.body.inputs]
        # What a trip needs of the previous trip, that one has to make.
        before = {op.body.outputs[i] for i in range(carried) if read[constants + i]}
        if before <= needed:
            break
        needed |= before
    for value in op.body.inputs:
        inside.saved.pop(value, None)
    return inside, [value for value, used in zip(op.inputs, read, strict=True) if used]


# --- memory ---------------------------------------------------------------------------------------


def peak(ops: list[Op], elsewhere: set[Value]) -> Count:
    """Return the peak bytes while the operations run in order.

    The rules are those of compilers. Elementwise operations are computed inside of what reads them,
    and overwrite operands that are read for the last time. So do updates and the carry of a loop.

    elsewhere  values that are counted elsewhere. So are values that nothing here reads.
    """
    made = {value for op in ops for value in op.outputs if op.name not in FUSED}
    made |= {value for op in ops if op.name not in READS for value in op.inputs}
    last: dict[Value, int] = {value: i for i, op in enumerate(ops) for value in op.inputs}
    for i, op in reversed(list(enumerate(ops))):
        until = [last.get(value, i) for value in op.outputs if value not in made]
        for value in op.inputs if until else ():
            last[value] = max(last[value], *until)
    produced = {value for op in ops for value in op.outputs}
    live = sum((v.bytes for v in last if v not in produced and v not in elsewhere), 0)
    ends: dict[int, list[Value]] = {}
    for value, i in last.items():
        if value not in elsewhere and (value in made or value not in produced):
            ends.setdefault(i, []).append(value)
    most = live
    for i, op in enumerate(ops):
        freed = sum((value.bytes for value in ends.get(i, ())), 0)
        new = [v for v in op.outputs if v in made and v in last and v not in elsewhere]
        size = sum((value.bytes for value in new), 0)
        inside = op.body_peak if op.body or op.overflow else 0
        items = {value.itemsize for value in new}
        usable = sum((v.bytes for v in ends.get(i, ()) if v.itemsize in items), 0)
        over = np.minimum(usable, size) if op.name in IN_PLACE else 0
        most = np.maximum(most, live + size - over + inside + _scratch(op))
        live = live + size - freed
    return most


def _scratch(op: Op) -> Count | int:
    """Return the bytes that a kernel needs inside.

    Splash's forward kernel writes its log-sum-exp as wide as a TPU's vector registers. Squares of
    context add up in float32 (device_kernels/chunks.py).
    """
    kernel = op.eqn.params["function"].__name__ if op.name == "foreign_kernel" else ""
    if kernel == "splash_forward":
        return LANES * op.outputs[1].bytes
    if kernel.startswith(("cudnn", "triton")):
        first = int(kernel.endswith("backward"))  # the gradient comes first
        q, k = op.eqn.invars[first : first + 2]
        if q.aval.shape[1] != k.aval.shape[1]:
            sizes = (4 // v.aval.dtype.itemsize for v in op.eqn.outvars)
            return sum(times * value.bytes for times, value in zip(sizes, op.outputs, strict=True))
    return 0
