"""Estimate the time of a compiled GPU program from its kernels.

Each instruction of the program that is not inside of a fusion is a kernel. It takes the time of its
products or that of its bytes, whichever is longer, and the time to launch it. The rates are those
that large products and copies reach. Operands and results go through memory: no cache keeps
anything between kernels. A slice counts with its own size, and so does an update in place. Foreign
code reads each operand once: the kernel of the loss reads logits again, but from the L2 cache.

Of three programs on one H100 the estimate was 0.95, 1.03 and 0.97 of the measured time
(docs/measured.md).
"""

from typing import NamedTuple

from hardware import Chip
from planning import hlo
from planning.hlo import BranchShare, Computation, Instruction, Program

COMPUTE = 0.647  # of the peak FLOP/s: 640 TFLOP/s of an H100
FLOAT8_COMPUTE = 0.581  # of the peak FLOP/s in FP8: 1,150 TFLOP/s of an H100; assumed, not measured
MEMORY = 0.866  # of the bandwidth of the memory: 2.9 TB/s of an H100
LAUNCH_S = 2e-6  # between two kernels

NO_KERNEL = frozenset([
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while",
    "conditional", "call", "partition-id", "replica-id", "iota", "opt-barrier", "copy-start",
    "copy-done",
])  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # operand that updates the first


class Estimate(NamedTuple):
    """Of all kernels of a program, with those in a loop once per trip."""

    kernels: float
    moved_bytes: float
    seconds: float


def estimate(text: str, chip: Chip, branch_share: BranchShare | None = None) -> Estimate:
    """Return the estimate for one device's program, without its collectives."""
    program = hlo.parse(text)

    def cost(instruction: Instruction, computation: Computation) -> hlo.Cost:
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind in hlo.COLLECTIVES or instruction.opcode in NO_KERNEL:
            return {}
        moved = kernel_bytes(instruction, computation, program)
        compute_s = product_seconds(instruction, computation, chip)
        for name in instruction.computations("calls") if instruction.opcode == "fusion" else ():
            inside = program.computations[name]
            compute_s += sum(product_seconds(one, inside, chip) for one in inside.values())
        busy_s = max(compute_s, moved / (MEMORY * chip.memory_bandwidth))
        return {"kernels": 1, "moved_bytes": moved, "seconds": busy_s + LAUNCH_S}

    return Estimate(**hlo.executed(program, cost, branch_share, fusions=False))


def product_seconds(instruction: Instruction, computation: Computation, chip: Chip) -> float:
    """Return the time of an instruction's multiplications; 0 if it is no product."""
    flops = hlo.flops(instruction, computation)
    if flops and chip.float8_flops and hlo.is_float8(instruction, computation):
        return flops / (FLOAT8_COMPUTE * chip.float8_flops)
    operand, _ = computation[instruction.operands[0]].shapes[0] if flops else ("", ())
    return flops / (COMPUTE * (chip.float32_flops if operand == "f32" else chip.flops))


def kernel_bytes(kernel: Instruction, computation: Computation, program: Program) -> int:
    """Return the bytes of one execution of an instruction that is not part of a fusion."""
    operands = [computation[name] for name in kernel.operands]
    if kernel.opcode == "fusion":
        [name] = kernel.computations("calls")
        inside = program.computations[name]
        read = sum(_read_bytes(i, inside) for i in inside.values() if i.opcode == "parameter")
        return read + _written_bytes([*inside.values()][-1], inside)
    if kernel.opcode in SLICES:
        return 2 * result_bytes(kernel)
    if kernel.opcode in UPDATES:
        return 2 * result_bytes(operands[UPDATES[kernel.opcode]])
    return result_bytes(kernel) + sum(map(result_bytes, operands))


def _read_bytes(value: Instruction, inside: Computation) -> int:
    """Return the bytes that a fusion reads of a parameter, or of an alias of it."""
    read = 0
    for user in (i for i in inside.values() if value.name in i.operands):
        if user.opcode in ("bitcast", "transpose"):
            read += _read_bytes(user, inside)
        elif user.opcode in SLICES and user.operands[0] == value.name:
            read += result_bytes(user)
        elif user.opcode not in UPDATES or user.operands[0] != value.name:
            return result_bytes(value)
    return min(read, result_bytes(value))


def _written_bytes(root: Instruction, inside: Computation) -> int:
    if root.opcode == "tuple":
        return sum(_written_bytes(inside[name], inside) for name in root.operands)
    if root.opcode == "bitcast":
        return _written_bytes(inside[root.operands[0]], inside)
    if root.opcode in UPDATES:
        return result_bytes(inside[root.operands[UPDATES[root.opcode]]])
    return result_bytes(root)


def result_bytes(instruction: Instruction) -> int:
    return sum(map(hlo.shape_bytes, instruction.shapes))
