"""Count FLOPs and collectives in the optimized text of a compiled program.

`compiled.cost_analysis()` counts the body of a loop once, whatever its trip count. `executed` walks
the text of `compiled.as_text()` instead, through loops, branches, calls and fusions. All counts are
of one device's program.

Matrix products are `dot` on CPU, `dot` or calls of cuBLAS on GPU, and `convolution` on TPU. Kernels
are opaque. Those of attention and experts are counted by rule, any other foreign code as nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import dropless
from device_kernels.adapter import GPU_TILE
from device_kernels.chunks import FULL
from device_kernels.grouped import counted_rows
from utils import ConfigError

Shape = tuple[str, tuple[int, ...]]  # element type and dims, as ("f32", (8, 16))
Shapes = tuple[Shape, ...]  # of a result; several for a tuple
Cost = dict[Any, float]  # {what is counted: how much}
CostOf = Callable[["Instruction", "Computation"], Cost]  # of one execution
BranchShare = Callable[[str], Sequence | None]  # op_name -> share of executions of each branch

COLLECTIVES = frozenset([
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
])  # fmt: skip

PRODUCTS = ("dot", "convolution", "custom-call")
CALLS = ("fusion", "call", "async-start")

# Attention kernels by their name or call target: (matrix products of the queries' width, of the
# values' width). Each of splash's two backward kernels recomputes the scores and the probabilities'
# gradient.
KERNELS = {
    "splash_mha_fwd": (1, 1), "splash_mha_dkv": (2, 2), "splash_mha_dq": (2, 1),
    "__cudnn$fmhaSoftmax": (1, 1), "__cudnn$fmhaSoftmaxBackward": (3, 2),
    "mha_forward": (1, 1), "mha_backward": (4, 3),
}  # fmt: skip

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$")


@dataclass(frozen=True)
class Instruction:
    name: str
    shapes: Shapes
    opcode: str
    argument: str  # the text in the parentheses
    attributes: str  # the text behind them

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.argument)

    @property
    def op_name(self) -> str:
        """The path of named scopes that JAX gives an operation."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def computations(self, *attributes: str) -> list[str]:
        """Return the names of the computations under some attributes."""
        names = []
        for attribute in attributes:
            under = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
            names += _NAME.findall(under[1]) if under else []
        return names


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    entry: str


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.replace("<=", "").split(",") if n)


def parse(text: str) -> Program:
    """Return the computations of an optimized module, by name, and its entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    # A Pallas kernel's attributes are written over three lines.
    for line in re.sub(r'\n(?="|}})', "", text).splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            name, kind, *rest = found.groups()
            shapes = tuple((t, _dims(dims)) for t, dims in _SHAPE.findall(kind))
            current[name] = Instruction(name, shapes, *rest)
    return Program(computations, entry)


# --- the walk -------------------------------------------------------------------------------------


def executed(
    program: Program, cost: CostOf, branch_share: BranchShare | None = None, fusions: bool = True
) -> Cost:
    """Return the sum of cost(instruction, its computation) over all executions.

    branch_share(op_name)  share of executions of each branch of the conditional with that op_name
                           (`lax.cond`: false first), or None if all branches cost the same.
    fusions                whether the instructions in fusions count by themselves.
    Raises  ConfigError for a loop or branch with a cost that runs an unknown number of times.
    """

    def run(name: str) -> Counter:
        """Return the cost of one execution of a computation."""
        total: Counter = Counter()
        computation = program.computations[name]
        for instruction in computation.values():
            parts = [(cost(instruction, computation), 1)]
            if instruction.opcode in CALLS and (fusions or instruction.opcode != "fusion"):
                callees = instruction.computations("calls", "to_apply")
                parts += [(run(callee), 1) for callee in callees]
            elif instruction.opcode == "while":
                parts += loop(instruction, computation)
            elif instruction.opcode == "conditional":
                parts += branches(instruction)
            for part, times in parts:
                for key, value in part.items():
                    total[key] += value * times
        return total

    def loop(instruction: Instruction, around: Computation) -> list[tuple[Cost, float]]:
        """Return the costs of body and condition with their trips, which only a cost needs.

        Left out are tiles of experts beyond those of an even load.
        """
        if f"/{dropless.OVERFLOW}/" in instruction.op_name:
            return []
        body, condition = map(run, instruction.computations("body", "condition"))
        if not any((body + condition).values()):
            return []
        trips = trip_count(instruction, around, program)
        return [(body, trips), (condition, trips + 1)]

    def branches(conditional: Instruction) -> list[tuple[Cost, float]]:
        """Return the cost of each branch with its share, in the order of `lax.switch`."""
        names = conditional.computations("branch_computations")
        names = names or conditional.computations("false_computation", "true_computation")
        costs = [run(name) for name in names]
        shares = branch_share(conditional.op_name) if branch_share else None
        if shares is None and any(cost != costs[0] for cost in costs):
            raise ConfigError(
                f"Conditional {conditional.name} (op_name {conditional.op_name!r}) has branches "
                f"that cost {[dict(cost) for cost in costs]}, and it is unknown how often each "
                f"runs. Give a branch_share that returns {len(costs)} shares for its op_name."
            )
        return list(zip(costs, shares or [1 / len(costs)] * len(costs), strict=True))

    return dict(run(program.entry))


def trip_count(loop: Instruction, computation: Computation, program: Program) -> int:
    """Return how often a loop's body runs: as the compiler noted, else from its condition.

    From the condition the step is taken to be one.

    Raises  ConfigError for a loop that does not count from a constant to a constant.
    """
    noted = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
    if noted:
        return int(noted[1])
    condition = program.computations[loop.computations("condition")[0]]
    inside = list(condition.values())
    for name in (name for i in condition.values() for name in i.computations("calls")):
        inside += program.computations[name].values()
    limits = {int(i.argument) for i in inside if i.opcode == "constant" and _is_integer(i)}
    compares = [i for i in inside if i.opcode == "compare" and "direction=LT" in i.attributes]
    counters = [i for i in inside if i.opcode == "get-tuple-element" and _is_integer(i)]
    one_each = len(limits) == len(compares) == len(counters) == 1
    first = first_count(loop, counters[0], computation) if one_each else None
    if first is None:
        raise ConfigError(
            f"Loop {loop.name} (op_name {loop.op_name!r}) has no known trip count: it does not "
            "count from one constant to another. Write it as a lax.scan."
        )
    return limits.pop() - first


def first_count(loop: Instruction, counter: Instruction, computation: Computation) -> int | None:
    """Return the counter's value before the loop: None if it is an argument of the program, and 0,
    as in every lax.scan, if it is another that is not constant.
    """
    index = int(re.search(r"index=(\d+)", counter.attributes)[1])
    source = computation[loop.operands[0]]
    while source.opcode in ("tuple", "copy", "bitcast"):
        operands = source.operands
        source = computation[operands[index] if source.opcode == "tuple" else operands[0]]
    if source.opcode == "parameter" and _is_integer(source):
        return None
    return int(source.argument) if source.opcode == "constant" else 0


def _is_integer(instruction: Instruction) -> bool:
    return instruction.shapes[0][0] in ("s32", "s64", "u32", "u64") and not instruction.shapes[0][1]


# --- FLOPs ----------------------------------------------------------------------------------------


def dot_flops(text: str, branch_share: BranchShare | None = None) -> float:
    """Return the FLOPs of all matrix products: 2 * elements of the result * contracted length."""
    return executed(parse(text), lambda *at: {"flops": flops(*at)}, branch_share).get("flops", 0)


def flops(instruction: Instruction, computation: Computation) -> int:
    """Return the FLOPs of a matrix product, or of a kernel whose products are known; else 0."""
    if instruction.opcode == "convolution":
        return convolution_flops(instruction, computation)
    if instruction.opcode == "custom-call":
        if rows := counted_rows(instruction.op_name):
            arrays = [instruction, *(computation[name] for name in instruction.operands)]
            shapes = [dims for array in arrays for _, dims in array.shapes]
            return 2 * rows * math.prod(next((d for d in shapes if len(d) == 3), (0, 0))[1:])
        name = kernel_name(instruction)
        if name in KERNELS:
            return attention_flops(instruction, computation, *KERNELS[name])
        if not name.startswith("__cublas$"):
            return 0
    elif instruction.opcode != "dot":
        return 0
    # lhs_contracting_dims={1,2} of a dot, or "lhs_contracting_dimensions":["1","2"] of cuBLAS
    found = re.search(r'lhs_contracting_dim\w+\W+([\d,"]*)', instruction.attributes)
    _, lhs = computation[instruction.operands[0]].shapes[0]
    summed = math.prod(lhs[int(dim)] for dim in re.findall(r"\d+", found[1] if found else ""))
    return 2 * math.prod(instruction.shapes[0][1]) * summed


def is_float8(product: Instruction, computation: Computation) -> bool:
    """Return whether a product multiplies FP8 numbers, as calls of __cublas$lt$matmul$f8 do."""
    kind, _ = computation[product.operands[0]].shapes[0]
    return kind.startswith("f8")


def kernel_name(call: Instruction) -> str:
    """Return the name of a kernel: that of the call for splash, of the function for Triton, else
    the target of the call.
    """
    if splash := re.match("splash_mha_(fwd|dkv|dq)", call.name):
        return splash[0]
    target = re.search(r'custom_call_target="([^"]*)"', call.attributes)[1]
    triton = re.search(r'[{ ]name = "(\w+)"', call.attributes)
    return triton[1] if target == "__gpu$xla.gpu.triton" and triton else target


def attention_flops(
    call: Instruction, computation: Computation, by_query: int, by_value: int
) -> int:
    """Return 2 * pairs of positions in the computed blocks * the widths that are multiplied.

    The text does not show which blocks a kernel computes. They are those at and below the diagonal,
    of which all ranks of context have as many.
    """
    shapes = [computation[name].shapes[0] for name in call.operands]
    if call.name.startswith("splash"):
        _, rows, columns = shapes[0][1]  # the mask of blocks
        # With one sequence, the batch dimension is missing.
        arrays = [dims for kind, dims in shapes if kind in ("bf16", "f32")]
        (*batch, T, A), (*_, S, _), (*_, W) = arrays[:3]
        if T * columns != S * rows:
            raise ConfigError(f"the blocks of {call.name} are not square: {rows} by {columns}")
    else:
        (b, T, n, A), (_, S, *_), (*_, W) = [dims for _, dims in shapes[:3]]
        batch, columns = (b, n), -(-T // GPU_TILE)
    full = FULL in call.op_name  # a square of context whose keys are all earlier
    pairs = T * S if full else T * S * (columns + 1) // (2 * columns)
    return 2 * math.prod(batch) * pairs * (by_query * A + by_value * W)


def convolution_flops(convolution: Instruction, computation: Computation) -> int:
    """Return 2 * batch * features in and out * pairs of output and kernel position with an input.

    Batched matrix products are convolutions with the batch as a spatial dimension. So positions in
    padding and between dilated inputs do not count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes).groups()
    arrays = [*(computation[name] for name in convolution.operands[:2]), convolution]
    dims = (array.shapes[0][1] for array in arrays)
    lhs, rhs, out = (dict(zip(*both, strict=True)) for both in zip(labels, dims, strict=True))
    window = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", convolution.attributes)

    def entry(field: str, label: str, default: int) -> int:
        """Return the field of a spatial dimension; for padding, the low one."""
        if field not in fields:
            return default
        return int(fields[field].split("x")[int(label)].split("_")[0])

    operations = 2 * (lhs["b"] // (int(groups[1]) if groups else 1)) * rhs["i"] * rhs["o"]
    for label in filter(str.isdigit, out):
        stride, pad = entry("stride", label, 1), entry("pad", label, 0)
        dilate, spread = entry("lhs_dilate", label, 1), entry("rhs_dilate", label, 1)
        at = np.arange(out[label])[:, None] * stride + np.arange(rhs[label]) * spread - pad
        operations *= int(np.sum((at >= 0) & (at < lhs[label] * dilate) & (at % dilate == 0)))
    return operations


# --- collectives ----------------------------------------------------------------------------------


def collective_of(instruction: Instruction, computation: Computation) -> tuple[str, Shapes]:
    """Return the kind and the results of a collective, or "" and nothing.

    An asynchronous collective counts at its end. Its start has more results.
    """
    kind = instruction.opcode.removesuffix("-done")
    if kind not in COLLECTIVES:
        return "", ()
    slices = [i for i in computation.values() if _is_slice_of(instruction, i, computation)]
    if kind == "all-reduce" and slices:  # a reduce-scatter in a TPU's fusion
        return "reduce-scatter", slices[0].shapes
    return kind, instruction.shapes


def _is_slice_of(whole: Instruction, slice: Instruction, computation: Computation) -> bool:
    if slice.opcode != "dynamic-slice":
        return False
    source = computation.get(slice.operands[0])
    while source is not None and source.opcode in ("bitcast", "reshape"):
        source = computation.get(source.operands[0])
    return source is not None and source.name == whole.name


class Collective(NamedTuple):
    """The kind and the ranks of a collective, and whether it overlaps with computation."""

    axes: tuple[str, ...]  # mesh axes along which the ranks of a group differ
    kind: str
    overlapped: bool  # with computation between its start and its end


def collectives(
    text: str, mesh: Mapping[str, int], branch_share: BranchShare | None = None
) -> dict[Collective, int]:
    """Return the bytes of the results of collectives over all executions.

    mesh  {axis: size}, outermost first, in the order of device numbers. The outermost axis is over
          TPU slices.
    """

    def cost(instruction: Instruction, computation: Computation) -> Cost:
        first = instruction
        if instruction.opcode.endswith("-done"):
            first = computation.get(instruction.operands[0], instruction)
        kind, results = collective_of(instruction, computation)
        axes = group_axes(first, mesh) if results else ()
        if first is not instruction and (between := between_slices(first)):
            kind, results, axes = between, instruction.shapes[:1], tuple(mesh)[:1]
        if not axes:
            return {}
        overlapped = first is not instruction and _computes(first, instruction, computation)
        return {Collective(axes, kind, overlapped): sum(map(shape_bytes, results))}

    return executed(parse(text), cost, branch_share)


def between_slices(received: Instruction) -> str:
    """Return the kind of a collective between slices, which libtpu sends through hosts, or ""."""
    if received.opcode != "recv":
        return ""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', received.attributes)
    return found[1].lower().replace("_", "-") if found else ""


def _computes(start: Instruction, done: Instruction, computation: Computation) -> bool:
    """Return whether the program computes between the two; the text is in execution order."""
    names = list(computation)
    between = names[names.index(start.name) + 1 : names.index(done.name)]
    return any(computation[n].opcode in ("fusion", "while", *PRODUCTS) for n in between)


def group_axes(collective: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the ranks of a group differ."""
    sizes = tuple(mesh.values())
    groups = device_groups(collective.attributes) or [range(math.prod(sizes))]
    positions = [np.stack(np.unravel_index(np.asarray(group), sizes)) for group in groups]
    differs = [any(len(set(p[axis])) > 1 for p in positions) for axis in range(len(sizes))]
    return tuple(name for name, along in zip(mesh, differs, strict=True) if along)


def device_groups(attributes: str) -> list[list[int]]:
    """Return the groups of devices that exchange data.

    The text has one of three forms: {{0,1},{2,3}}, [2,2]<=[4] with an optional T(1,0), or
    mesh['a'=2,'b'=2] {'b'}.
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", attributes):
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        shape, sizes, order = (_dims(numbers or "") for numbers in found.groups())
    elif found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        axes = re.findall(r"'(\w+)'=(\d+)", found[1])
        used = re.findall(r"'(\w+)'", found[2])
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        order = [names.index(name) for name in ([n for n in names if n not in used] + used)]
        shape = (-1, math.prod(sizes[names.index(name)] for name in used))
    else:
        return []
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(order or None).reshape(shape).tolist()


def shape_bytes(shape: Shape) -> int:
    """Return the bytes of an array. Types of less than a byte are packed."""
    kind, dims = shape
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    return -(-math.prod(dims) * bits // 8)
